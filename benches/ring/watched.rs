//! A transport that moves nothing and tells what the poller does: when it is given operations, and how long turns take. The
//! poller asks a driver that has something in flight once in each turn, so the time between two questions is a turn's.

use std::sync::atomic::{
    AtomicU8, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crossbeam_utils::CachePadded;
use moonring::transport::{Busy, Caps, Driver, Event, Hint, Nanos, Op, PollerWaker, Transport};
use moonring::{Engine, RawMemory, Stage, TransportError};

/// Turns are timed so many at a time, for their mean, because a look at the clock takes as long as a turn.
const TURNS: u64 = 64;

/// What is seen.
#[derive(Debug)]
pub struct Watched {
    start: Instant,
    watching: AtomicU8,
    /// How often watching began.
    begun: AtomicU64,
    /// When operations were last given to the driver, in nanoseconds from `start`; 0 for not yet. Alone on its cache line: the
    /// caller writes it while it waits, and the poller reads what lies beside in every turn.
    called: CachePadded<AtomicU64>,
    turns: Mutex<Vec<f64>>,
    longest: AtomicU64,
}

const NOTHING: u8 = 0;
const MEANS: u8 = 1;
const LONGEST: u8 = 2;

impl Watched {
    /// An engine on such a transport.
    pub fn engine() -> (Engine, Arc<Watched>) {
        let watched = Arc::new(Watched {
            start: Instant::now(),
            watching: AtomicU8::new(NOTHING),
            begun: AtomicU64::new(0),
            called: CachePadded::default(),
            turns: Mutex::default(),
            longest: AtomicU64::new(0),
        });
        (Engine::with_transport(Arc::new(Watch(Arc::clone(&watched)))), watched)
    }

    pub fn nanos(&self, moment: Instant) -> u64 {
        (moment - self.start).as_nanos() as u64
    }

    /// When operations were given to the driver since this was last called; `None` if none were yet.
    pub fn take_called(&self) -> Option<u64> {
        match self.called.swap(0, Acquire) {
            0 => None,
            nanos => Some(nanos),
        }
    }

    /// The median of many means of [`TURNS`] turns each while `during` runs, in nanoseconds; `NAN` if there were none. What
    /// `during` does first has to wake the poller, which then stays awake.
    pub fn turn(&self, during: impl FnOnce()) -> f64 {
        self.turns().clear();
        self.watch(MEANS, during);
        let mut turns = std::mem::take(&mut *self.turns());
        if turns.is_empty() { f64::NAN } else { crate::machine::median(&mut turns) }
    }

    /// The longest turn while `during` runs, in nanoseconds. As [`turn`](Self::turn).
    pub fn longest(&self, during: impl FnOnce()) -> f64 {
        self.longest.store(0, Relaxed);
        self.watch(LONGEST, during);
        self.longest.load(Relaxed) as f64
    }

    fn watch(&self, what: u8, during: impl FnOnce()) {
        self.begun.fetch_add(1, Relaxed);
        self.watching.store(what, Release);
        during();
        self.watching.store(NOTHING, Release);
    }

    fn turns(&self) -> std::sync::MutexGuard<'_, Vec<f64>> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Watch(Arc<Watched>);

// SAFETY: operations touch no memory at all.
unsafe impl Transport for Watch {
    fn name(&self) -> String {
        "watched".into()
    }

    fn caps(&self) -> Caps {
        Caps { threads_here: false, max_batch: 128, max_in_flight_per_peer: 128, max_merged: 0 }
    }

    fn driver(&self, _wake: PollerWaker) -> Box<dyn Driver> {
        Box::new(WatchDriver { watched: Arc::clone(&self.0), polls: 0, begun: 0, last: None })
    }

    unsafe fn register(&self, _memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        Ok(())
    }

    fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn open(&self, _name: &str, _fresh: bool) -> Result<u32, TransportError> {
        Ok(0)
    }

    fn close(&self) -> Result<(), Busy> {
        Ok(())
    }
}

#[derive(Debug)]
struct WatchDriver {
    watched: Arc<Watched>,
    polls: u64,
    /// Which watching `last` is of.
    begun: u64,
    /// When the turn, or the first of those that are timed together, began.
    last: Option<Instant>,
}

impl Driver for WatchDriver {
    fn submit(&mut self, _target: u32, ops: &[Op], _now: Nanos, out: &mut Vec<Event>) -> usize {
        self.watched.called.store(self.watched.nanos(Instant::now()), Release);
        for op in ops {
            let (op, res) = (op.token, op.len as i32);
            out.push(Event::Result { op, res, stage: Stage::Transfer, detail: 0, quiet: true });
        }
        ops.len()
    }

    fn poll(&mut self, _now: Nanos, _budget: u32, _out: &mut Vec<Event>) -> Hint {
        self.polls += 1;
        let means = self.watched.watching.load(Acquire) == MEANS;
        if means && !self.polls.is_multiple_of(TURNS) {
            return Hint::Now;
        }
        let now = Instant::now();
        let begun = self.watched.begun.load(Relaxed);
        if std::mem::replace(&mut self.begun, begun) != begun {
            self.last = None;
        }
        if let Some(last) = self.last.replace(now) {
            let nanos = (now - last).as_nanos() as u64;
            if means {
                self.watched.turns().push(nanos as f64 / TURNS as f64);
            } else {
                self.watched.longest.fetch_max(nanos, Relaxed);
            }
        }
        Hint::Now
    }

    fn settle(&mut self, _now: Nanos, _out: &mut Vec<Event>) {}

    fn in_flight(&self) -> usize {
        // So that it is asked in every turn, and the poller stays awake.
        usize::from(self.watched.watching.load(Relaxed) != NOTHING)
    }
}
