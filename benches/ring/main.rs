//! Side by side: the ring, what it replaces, and what it costs. `cargo bench` prints a line for each.
//!
//! Rounds of ours and the peer's alternate, medians are printed, and what counts are ratios within one run: the machine
//! may be noisy.

mod allocations;
#[cfg(feature = "mooncake")]
mod mooncake;
mod nop;

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Release},
};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

fn main() {
    LazyLock::force(&CORES);
    // `cargo bench -- nop` runs what has "nop" in its name; cargo itself adds `--bench`.
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let run = |name: &str, measure: fn()| {
        if wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str())) {
            measure();
        }
    };
    run("allocations", allocations::per_operation);
    // Before anything is pinned: its engines have threads of their own.
    #[cfg(feature = "mooncake")]
    run("mooncake", mooncake::added_latency);
    run("nop", nop::against_array_queues);
}

/// Counted before anything is pinned: a pinned thread is told of one.
static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

/// Pins the calling thread. With one core there is nothing to choose.
pub fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core % *CORES);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Nanoseconds for a word to go from one core to the other and back.
pub fn ping_pong() -> f64 {
    let word = Arc::new(AtomicU64::new(0));
    let other = Arc::clone(&word);
    const TURNS: u64 = 20_000;
    let echo = std::thread::spawn(move || {
        pin(1);
        for turn in 0..TURNS {
            while other.load(Acquire) != 2 * turn + 1 {
                std::hint::spin_loop();
            }
            other.store(2 * turn + 2, Release);
        }
    });
    pin(0);
    let mut start = Instant::now();
    for turn in 0..TURNS {
        if turn == TURNS / 10 {
            start = Instant::now();
        }
        word.store(2 * turn + 1, Release);
        while word.load(Acquire) != 2 * turn + 2 {
            std::hint::spin_loop();
        }
    }
    let time = start.elapsed();
    echo.join().unwrap();
    time.as_nanos() as f64 / (TURNS - TURNS / 10) as f64
}

/// The middle one, or the upper of the middle two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
