//! Scale: 1,000 peers through one core, in virtual time.
//!
//! Entries arrive at a steady rate for random peers, each with a latency and a bandwidth of its own. A turn takes virtual
//! time by what it did, at the costs below, so that waiting for the poller shows. Throughput is wall time, the simulated
//! transport's part in it included; waiting is virtual time, from the submit to the moment when the transport has the entry.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fastrand::Rng;

use super::say;
use crate::code::Stage;
use crate::core::Core;
use crate::transport::{
    Busy, Caps, Driver, Event, Hint, Nanos, Op, PollerWaker, RawMemory, Token, Transport, TransportError,
};
use crate::{Engine, Refusal, Ring, opcode};

const PEERS: usize = 1_000;
/// A debug build has not the time for all.
const ENTRIES: usize = if cfg!(debug_assertions) { 20_000 } else { 1_000_000 };
const RING: u32 = 1 << 16;
/// Between two arrivals: 8 million a second, four fifths of what the costs below allow.
const ARRIVAL: Nanos = 125;
/// What a turn costs, and each entry that it takes and each that it ends.
const TURN: Nanos = 200;
const ENTRY: Nanos = 50;

/// One peer: its link, when that is free, and what entries for it waited.
#[derive(Debug)]
struct Link {
    latency: Nanos,
    bytes_per_micro: u64,
    free: Nanos,
    waited: Nanos,
    entries: u64,
}

#[derive(Debug, Default)]
struct Fleet {
    links: Vec<Link>,
    /// When each entry was submitted.
    submitted: Vec<Nanos>,
    opened: u32,
    /// Entries issued and ended since somebody asked.
    done: u64,
}

#[derive(Clone, Debug)]
struct Net(Arc<Mutex<Fleet>>);

impl Net {
    fn lock(&self) -> MutexGuard<'_, Fleet> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: no operation touches any memory: the addresses are names.
unsafe impl Transport for Net {
    fn name(&self) -> String {
        "fleet".to_owned()
    }

    fn caps(&self) -> Caps {
        Caps { threads_here: false, max_batch: 128, max_in_flight_per_peer: 64, max_merged: 0 }
    }

    fn driver(&self, _wake: PollerWaker) -> Box<dyn Driver> {
        Box::new(Ships { net: self.clone(), running: BinaryHeap::new(), places: Vec::new(), free: Vec::new() })
    }

    unsafe fn register(&self, _memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        Ok(())
    }

    fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn open(&self, _name: &str, _fresh: bool) -> Result<u32, TransportError> {
        let mut fleet = self.lock();
        fleet.opened += 1;
        Ok(fleet.opened - 1)
    }

    fn close(&self) -> Result<(), Busy> {
        Ok(())
    }
}

#[derive(Debug)]
struct Ships {
    net: Net,
    /// When due, and which place.
    running: BinaryHeap<Reverse<(Nanos, usize)>>,
    /// Operations and their bytes.
    places: Vec<(Token, u32)>,
    free: Vec<usize>,
}

impl Driver for Ships {
    fn submit(&mut self, target: u32, ops: &[Op], now: Nanos, _out: &mut Vec<Event>) -> usize {
        let mut fleet = self.net.lock();
        for op in ops {
            let waited = now - fleet.submitted[op.remote as usize];
            let link = &mut fleet.links[target as usize];
            link.waited += waited;
            link.entries += 1;
            link.free = link.free.max(now) + u64::from(op.len) * 1_000 / link.bytes_per_micro;
            let place = self.free.pop().unwrap_or(self.places.len());
            if place == self.places.len() {
                self.places.push((op.token, op.len));
            }
            self.places[place] = (op.token, op.len);
            self.running.push(Reverse((link.free + link.latency, place)));
        }
        fleet.done += ops.len() as u64;
        ops.len()
    }

    fn poll(&mut self, now: Nanos, budget: u32, out: &mut Vec<Event>) -> Hint {
        let before = out.len();
        while let Some(&Reverse((due, place))) = self.running.peek()
            && due <= now
        {
            if out.len() - before >= budget as usize {
                break;
            }
            self.running.pop();
            let (op, len) = self.places[place];
            self.free.push(place);
            out.push(Event::Result { op, res: len as i32, stage: Stage::Transfer, detail: 0, quiet: true });
        }
        self.net.lock().done += (out.len() - before) as u64;
        Hint::Sleep { until: self.running.peek().map(|Reverse((due, ..))| *due) }
    }

    fn settle(&mut self, now: Nanos, out: &mut Vec<Event>) {
        self.poll(now, u32::MAX, out);
    }

    fn in_flight(&self) -> usize {
        self.running.len()
    }
}

#[test]
fn a_thousand_peers_share_one_core() {
    let mut rng = Rng::with_seed(1);
    // 10 to 500 µs, and 1 to 25 GB/s: one rack and the next building.
    let link = |rng: &mut Rng| {
        let (latency, bytes_per_micro) = (10_000 << rng.u32(..6), 1_000 * rng.u64(1..=25));
        Link { latency: latency + rng.u64(..latency / 2), bytes_per_micro, free: 0, waited: 0, entries: 0 }
    };
    let links = (0..PEERS).map(|_| link(&mut rng)).collect();
    let net = Net(Arc::new(Mutex::new(Fleet { links, ..Fleet::default() })));
    let engine = Engine::over(Arc::new(net.clone()));
    // SAFETY: nothing reads or writes it: the transport moves nothing.
    let region = unsafe { engine.register_foreign(1 << 30, 1 << 20, "cpu:0") }.unwrap();
    let peers: Vec<_> = (0..PEERS).map(|peer| engine.open_here(&format!("peer{peer}"), false)).collect();
    let mut ring = Ring::builder().without_poller(RING, &engine);
    let mut core = Core::new(ring.controls(), 0);
    let (mut now, mut arrived, mut ended, mut turns, mut refused) = (1_000, 0, 0, 0u64, 0u64);
    let first = now;
    let start = Instant::now();
    while ended < ENTRIES {
        while arrived < ENTRIES && first + arrived as Nanos * ARRIVAL <= now {
            let len = 4_096 << rng.u32(..5);
            let entry = opcode::Read::new(region.slice(..len).unwrap(), peers[rng.usize(..PEERS)].at(arrived as u64));
            net.lock().submitted.push(first + arrived as Nanos * ARRIVAL);
            match ring.submission().push(entry.build().user_data(arrived as u64)) {
                Ok(()) => arrived += 1,
                Err(error) => {
                    assert!(matches!(error.reason, Refusal::Full { .. } | Refusal::SegmentShare { .. }), "{error}");
                    net.lock().submitted.pop();
                    refused += 1;
                    break;
                }
            }
        }
        ring.submit().unwrap();
        let hint = core.turn(now);
        turns += 1;
        ended += ring.completion().filter(|cqe| cqe.res() > 0).count();
        let done = std::mem::take(&mut net.lock().done);
        now += TURN + done * ENTRY;
        if let Hint::Sleep { until } = hint {
            let next = (arrived < ENTRIES).then_some(first + arrived as Nanos * ARRIVAL);
            now = now.max(until.into_iter().chain(next).min().expect("something is running or to come"));
        }
    }
    let wall = start.elapsed().as_secs_f64();
    let fleet = net.lock();
    let means: Vec<f64> = fleet.links.iter().map(|link| link.waited as f64 / link.entries.max(1) as f64).collect();
    let all: Nanos = fleet.links.iter().map(|link| link.waited).sum();
    let mean = all as f64 / ENTRIES as f64;
    let worst = means.iter().copied().fold(0.0, f64::max) / mean;
    drop(fleet);
    let mops = ENTRIES as f64 / wall / 1e6;
    let pollers = |rate: f64| (rate / mops).ceil() as u64;
    let line = serde_json::json!({
        "peers": PEERS,
        "entries": ENTRIES,
        "sim_1000_peers_mops": mops,
        "sim_1000_peers_worst_share": worst,
        "mean_wait_us": mean / 1e3,
        "turns": turns,
        "refused": refused,
        "virtual_seconds": (now - first) as f64 / 1e9,
        "wall_seconds": wall,
        "pollers_for_10_mops": pollers(10.0),
        "pollers_for_100_mops": pollers(100.0),
    });
    println!("\nsimulation: {line}");
    assert!(worst <= 2.0, "the worst peer's entries wait {worst} times as long as all entries do");
    let (closing, _rest) = ring.begin_close(std::time::Duration::ZERO);
    while !core.is_done() {
        now += TURN;
        core.turn(now);
    }
    assert!(closing.wait(std::time::Duration::ZERO));
    say("1,000 peers: done");
}
