//! A simulated transport: seeded delays and faults, in the core's own time.
//!
//! Operations copy between regions of the same engine, so open the engine's own name; `sim/1`, `sim/2` and so on name it
//! too, each as a peer of its own. Everything random comes from the
//! seed: print it, and a failure can be replayed as far as the threads around it allow.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use super::TransportError;
use super::{Busy, Caps, Driver, Event, Hint, Nanos, Op, PollerWaker, RawMemory, Token, Transport};
use crate::code::{Stage, errno};

/// How a simulated transport behaves.
#[derive(Clone, Debug)]
pub struct Sim {
    seed: u64,
    delay: Range<u64>,
    failures: u32,
    unquiet: u32,
    partial: u32,
    merged: u32,
    longest: u32,
    panic_at: Option<u64>,
    close: Duration,
    probe: Probe,
}

impl Sim {
    /// Nothing goes wrong and every operation takes 1 to 20 µs, by this seed's choice.
    pub fn new(seed: u64) -> Sim {
        Sim {
            seed,
            delay: 1_000..20_000,
            failures: 0,
            unquiet: 0,
            partial: 0,
            merged: 0,
            longest: u32::MAX,
            panic_at: None,
            close: Duration::ZERO,
            probe: Probe::default(),
        }
    }

    /// How long operations take. An empty range is taken as its start.
    #[must_use]
    pub fn delay(mut self, delay: Range<Duration>) -> Sim {
        let [start, end] = [delay.start, delay.end].map(|span| span.as_nanos().try_into().unwrap_or(u64::MAX / 2));
        self.delay = start..end.max(start + 1);
        self
    }

    /// How many of 1,000 operations fail with `-EIO`, moving nothing.
    #[must_use]
    pub fn failures(mut self, per_mille: u32) -> Sim {
        self.failures = per_mille;
        self
    }

    /// How many of 1,000 operations report `-ETIMEDOUT` at their time, go on touching their local range, and become quiet
    /// after as long again.
    #[must_use]
    pub fn unquiet(mut self, per_mille: u32) -> Sim {
        self.unquiet = per_mille;
        self
    }

    /// How many of 1,000 submits take only a part of what they are offered, or nothing.
    #[must_use]
    pub fn partial_submits(mut self, per_mille: u32) -> Sim {
        self.partial = per_mille;
        self
    }

    /// Neighbours are merged into one operation of up to `bytes`; not at all by default.
    #[must_use]
    pub fn merged(mut self, bytes: u32) -> Sim {
        self.merged = bytes;
        self
    }

    /// Operations of more than `bytes` are rejected outright, with `-ENOBUFS` at the issue stage.
    #[must_use]
    pub fn longest(mut self, bytes: u32) -> Sim {
        self.longest = bytes;
        self
    }

    /// The driver panics when it is given its `n`th operation, counted from 1; for 0 when it is made.
    #[must_use]
    pub fn panic_at(mut self, n: u64) -> Sim {
        self.panic_at = Some(n);
        self
    }

    /// How long closing the transport takes: a real one's may take seconds.
    #[must_use]
    pub fn slow_close(mut self, span: Duration) -> Sim {
        self.close = span;
        self
    }

    /// Counts what the transport was asked to do.
    pub fn probe(&self) -> Probe {
        self.probe.clone()
    }

    pub(crate) fn into_transport(self) -> impl Transport {
        SimTransport { sim: self, memory: Arc::default(), opened: AtomicU32::new(0), closed: AtomicBool::new(false) }
    }
}

/// What a simulated transport was asked to do so far.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    issued: Arc<AtomicU64>,
    batches: Arc<AtomicU64>,
}

impl Probe {
    /// Operations started.
    pub fn issued(&self) -> u64 {
        self.issued.load(Relaxed)
    }

    /// Calls that started some.
    pub fn batches(&self) -> u64 {
        self.batches.load(Relaxed)
    }
}

/// SplitMix64: small, and the same numbers for a seed for ever.
#[derive(Clone, Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < u64::from(per_mille)
    }
}

#[derive(Debug)]
struct SimTransport {
    sim: Sim,
    memory: Arc<RwLock<Vec<RawMemory>>>,
    opened: AtomicU32,
    closed: AtomicBool,
}

const NAME: &str = "sim";
/// More names of the engine, each a peer of its own to the ring.
const MAX_PEERS: u32 = 10_000;

// SAFETY: an operation copies between its own two ranges, when its result is due or, unquiet, when it becomes quiet.
unsafe impl Transport for SimTransport {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn caps(&self) -> Caps {
        Caps { threads_here: false, max_batch: 64, max_in_flight_per_peer: 256, max_merged: self.sim.merged }
    }

    fn driver(&self, _wake: PollerWaker) -> Box<dyn Driver> {
        assert!(self.sim.panic_at != Some(0), "the simulated driver panics when it is made, as asked");
        let rng = Rng(self.sim.seed);
        Box::new(SimDriver { sim: self.sim.clone(), memory: Arc::clone(&self.memory), rng, running: Vec::new() })
    }

    unsafe fn register(&self, memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner).push(memory);
        Ok(())
    }

    fn unregister(&self, memory: RawMemory) -> Result<(), TransportError> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner).retain(|&other| other != memory);
        Ok(())
    }

    fn open(&self, name: &str, _fresh: bool) -> Result<u32, TransportError> {
        let known = name.strip_prefix(NAME).is_some_and(|rest| match rest.strip_prefix('/') {
            Some(number) => number.parse().is_ok_and(|number| (1..=MAX_PEERS).contains(&number)),
            None => rest.is_empty(),
        });
        if known {
            return Ok(self.opened.fetch_add(1, Relaxed));
        }
        Err(TransportError {
            what: format!("opening segment {name:?}"),
            code: 0,
            why: format!(
                "a simulated engine reaches itself only, by the names {NAME:?} and \"{NAME}/1\" to \"{NAME}/{MAX_PEERS}\""
            ),
        })
    }

    fn close(&self) -> Result<(), Busy> {
        // Closed again, there is nothing left to end.
        if !self.closed.swap(true, Relaxed) {
            std::thread::sleep(self.sim.close);
        }
        Ok(())
    }
}

#[derive(Debug)]
struct SimDriver {
    sim: Sim,
    memory: Arc<RwLock<Vec<RawMemory>>>,
    rng: Rng,
    running: Vec<Running>,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    op: Op,
    due: Nanos,
    delay: Nanos,
    fate: Fate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Land,
    Fail,
    /// Reports a time-out first.
    Unquiet,
    /// Has reported it.
    Lingering,
}

impl Driver for SimDriver {
    fn submit(&mut self, _target: u32, ops: &[Op], now: Nanos, out: &mut Vec<Event>) -> usize {
        let mut take = ops.len();
        if self.rng.chance(self.sim.partial) {
            take = self.rng.below(take as u64) as usize;
        }
        for &op in &ops[..take] {
            let issued = self.sim.probe.issued.fetch_add(1, Relaxed) + 1;
            assert!(self.sim.panic_at != Some(issued), "the simulated driver panics at operation {issued}, as asked");
            if op.len > self.sim.longest {
                let (res, stage) = (-errno::ENOBUFS, Stage::Issue);
                out.push(Event::Result { op: op.token, res, stage, detail: 0, quiet: true });
                continue;
            }
            let delay = self.sim.delay.start + self.rng.below(self.sim.delay.end - self.sim.delay.start);
            let fate = match () {
                () if self.rng.chance(self.sim.failures) => Fate::Fail,
                () if self.rng.chance(self.sim.unquiet) => Fate::Unquiet,
                () => Fate::Land,
            };
            self.running.push(Running { op, due: now + delay, delay, fate });
        }
        if take > 0 {
            self.sim.probe.batches.fetch_add(1, Relaxed);
        }
        take
    }

    fn poll(&mut self, now: Nanos, _budget: u32, out: &mut Vec<Event>) -> Hint {
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].due > now {
                at += 1;
                continue;
            }
            let running = self.running.swap_remove(at);
            let token = running.op.token;
            let timed_out = -errno::ETIMEDOUT;
            match running.fate {
                Fate::Land => out.push(result(token, self.copy(&running.op), true)),
                Fate::Fail => out.push(result(token, -errno::EIO, true)),
                Fate::Unquiet => {
                    out.push(result(token, timed_out, false));
                    self.running.push(Running { due: now + running.delay, fate: Fate::Lingering, ..running });
                }
                Fate::Lingering => {
                    self.copy(&running.op);
                    out.push(Event::Quiet { op: token, detail: 0 });
                }
            }
        }
        Hint::Sleep { until: self.running.iter().map(|running| running.due).min() }
    }

    fn settle(&mut self, now: Nanos, out: &mut Vec<Event>) {
        self.poll(now, u32::MAX, out);
    }

    fn in_flight(&self) -> usize {
        self.running.len()
    }
}

fn result(op: Token, res: i32, quiet: bool) -> Event {
    Event::Result { op, res, stage: Stage::Transfer, detail: 0, quiet }
}

impl SimDriver {
    fn copy(&self, op: &Op) -> i32 {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the core vouches for the local range until we report quiet; what is registered stays mapped while we hold
        // the lock.
        unsafe { op.copy_here(&memory, &mut 0) }.unwrap_or(-errno::EFAULT)
    }
}
