//! The machine under the measurements: pinning, the state it is in, and how noisy it is.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::sync::LazyLock;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::Instant;

use crossbeam_utils::CachePadded;
use rustix::thread::CpuSet;
use serde_json::json;

use crate::out;

/// Where the producer and the reaper run, and where the poller.
pub const CALLER: usize = 0;
pub const POLLER: usize = 1;

/// A message and its answer take about 60 ns or about 370 ns on the machines seen, and that changes by itself. Everything
/// between cores follows it. A single word on a line of its own, which no ring can do with, takes 25 ns or 130.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Near,
    Far,
}

impl State {
    pub const ALL: [State; 2] = [State::Near, State::Far];

    pub fn name(self) -> &'static str {
        match self {
            State::Near => "near",
            State::Far => "far",
        }
    }
}

/// Between the two.
const NEAR_MOST: f64 = 250.0;

/// The cores that this process may use, seen before anything is pinned.
static CORES: LazyLock<CpuSet> =
    LazyLock::new(|| rustix::thread::sched_getaffinity(None).expect("the kernel tells a thread its cores"));

/// Call it first: a pinned thread is told of one core.
pub fn look_at_cores() {
    LazyLock::force(&CORES);
}

/// The kernel's number of the first or second core that there is.
pub fn core(which: usize) -> usize {
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| CORES.is_set(core)).collect();
    all[which % all.len()]
}

/// Pins the calling thread, and with it the threads that it starts.
pub fn pin(which: usize) {
    let mut set = CpuSet::new();
    set.set(core(which));
    rustix::thread::sched_setaffinity(None, &set).expect("a core of our own");
}

/// Runs `build` on the poller's core, so that the threads that it starts stay there.
pub fn on_poller_core<T>(build: impl FnOnce() -> T) -> T {
    pin(POLLER);
    let built = build();
    pin(CALLER);
    built
}

/// What goes from one core to the other: an entry, and on another line the word that says that it is there.
#[derive(Default)]
struct Message {
    entry: CachePadded<[AtomicU64; 8]>,
    sent: CachePadded<AtomicU64>,
}

impl Message {
    fn send(&self, turn: u64) {
        self.entry.iter().for_each(|word| word.store(turn, Relaxed));
        self.sent.store(turn, Release);
    }

    fn receive(&self, turn: u64) {
        while self.sent.load(Acquire) != turn {
            spin_loop();
        }
        assert_eq!(self.entry[0].load(Relaxed), turn);
    }
}

/// Nanoseconds for a message to go from one core to the other and its answer to come back: the median of short chunks, so
/// that a thread that loses its core for a while does not count. Leaves the caller pinned.
pub fn ping_pong() -> f64 {
    const CHUNKS: u64 = 15;
    const CHUNK: u64 = 100;
    let both = Arc::new([Message::default(), Message::default()]);
    let other = Arc::clone(&both);
    let echo = std::thread::spawn(move || {
        pin(POLLER);
        for turn in 1..=CHUNKS * CHUNK {
            other[0].receive(turn);
            other[1].send(turn);
        }
    });
    pin(CALLER);
    let mut chunks = Vec::new();
    for chunk in 0..CHUNKS {
        let start = Instant::now();
        for turn in chunk * CHUNK..(chunk + 1) * CHUNK {
            both[0].send(turn + 1);
            both[1].receive(turn + 1);
        }
        chunks.push(start.elapsed().as_nanos() as f64 / CHUNK as f64);
    }
    echo.join().unwrap();
    median(&mut chunks)
}

/// The state now.
pub fn state() -> (State, f64) {
    let nanos = ping_pong();
    (if nanos <= NEAR_MOST { State::Near } else { State::Far }, nanos)
}

/// The fixed probe: a chain of multiplications that touches no memory, some 5 ms of it, in nanoseconds. It takes as long as the
/// core lets it, and long enough to meet others on it, so its spread is the machine's noise.
pub fn probe() -> f64 {
    let start = Instant::now();
    let mut value = black_box(1u64);
    for _ in 0..4_000_000 {
        value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    }
    black_box(value);
    start.elapsed().as_nanos() as f64
}

/// Times that threads of this process lost their core to somebody.
fn preemptions() -> i64 {
    // SAFETY: a plain call that fills the zeroed struct.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage.ru_nivcsw
    }
}

/// Measures again, a few times, when somebody took a core away meanwhile, and says whether that helped. For measurements whose
/// threads have a core each.
pub fn undisturbed(mut measure: impl FnMut() -> f64) -> f64 {
    let mut value = f64::NAN;
    let mut disturbed = true;
    for _ in 0..3 {
        let before = preemptions();
        value = measure();
        disturbed = preemptions() != before;
        if !disturbed {
            break;
        }
    }
    out::say("disturbed", json!(disturbed));
    value
}

/// The middle one, or the upper of the middle two. Sorts.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
