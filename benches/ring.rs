//! Side by side: the ring, what it replaces, and what it costs. `cargo bench` prints one line for each.
//!
//! Rounds of ours and the peer's alternate, medians are printed, and every number is a ratio within one run: the machine
//! may be noisy. Two threads of one measurement run on a core each when there are two.

use std::sync::{Arc, LazyLock};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use moonring::{Engine, Ring, opcode};

const OPERATIONS: u64 = 1_000_000;
const BATCH: u64 = 32;
const IN_FLIGHT: u64 = 1024;
const ROUNDS: usize = 9;

fn main() {
    LazyLock::force(&CORES);
    nop_against_array_queues();
}

/// Counted before anything is pinned: a pinned thread is told of one.
static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

/// Pins the calling thread. With one core there is nothing to choose.
fn pin(core: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core % *CORES);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Nanoseconds for a word to go from one core to the other and back.
fn ping_pong() -> f64 {
    use std::sync::atomic::AtomicU64;
    let word = Arc::new(AtomicU64::new(0));
    let other = Arc::clone(&word);
    const TURNS: u64 = 20_000;
    let echo = std::thread::spawn(move || {
        pin(1);
        for turn in 0..TURNS {
            while other.load(std::sync::atomic::Ordering::Acquire) != 2 * turn + 1 {
                std::hint::spin_loop();
            }
            other.store(2 * turn + 2, std::sync::atomic::Ordering::Release);
        }
    });
    pin(0);
    let mut start = Instant::now();
    for turn in 0..TURNS {
        if turn == TURNS / 10 {
            start = Instant::now();
        }
        word.store(2 * turn + 1, std::sync::atomic::Ordering::Release);
        while word.load(std::sync::atomic::Ordering::Acquire) != 2 * turn + 2 {
            std::hint::spin_loop();
        }
    }
    let time = start.elapsed();
    echo.join().unwrap();
    time.as_nanos() as f64 / (TURNS - TURNS / 10) as f64
}

fn rate(operations: u64, time: Duration) -> f64 {
    operations as f64 / time.as_secs_f64() / 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn nop_ring() -> f64 {
    pin(1);
    let mut ring = Ring::builder().build(IN_FLIGHT as u32, &Engine::loopback()).unwrap();
    pin(0);
    let (mut pushed, mut reaped) = (0, 0);
    let start = Instant::now();
    while reaped < OPERATIONS {
        if pushed < OPERATIONS {
            let mut queue = ring.submission();
            for _ in 0..BATCH {
                if queue.push(opcode::Nop::new().build().user_data(pushed)).is_err() {
                    break;
                }
                pushed += 1;
            }
            ring.submit();
        }
        for cqe in ring.completion() {
            assert_eq!(cqe.user_data(), reaped);
            reaped += 1;
        }
    }
    rate(OPERATIONS, start.elapsed())
}

/// The same job by hand: entries of 64 bytes one way, results of 16 bytes the other.
fn array_queues() -> f64 {
    #[derive(Clone, Copy)]
    #[repr(align(64))]
    struct Entry([u64; 8]);
    let entries = Arc::new(ArrayQueue::<Entry>::new(IN_FLIGHT as usize));
    let results = Arc::new(ArrayQueue::<[u64; 2]>::new(IN_FLIGHT as usize));
    let stop = Arc::new(AtomicBool::new(false));
    let (ins, outs, stopped) = (Arc::clone(&entries), Arc::clone(&results), Arc::clone(&stop));
    let poller = std::thread::spawn(move || {
        pin(1);
        while !stopped.load(Relaxed) {
            while let Some(entry) = ins.pop() {
                let mut result = [entry.0[0], 0];
                while let Err(again) = outs.push(result) {
                    result = again;
                }
            }
        }
    });
    pin(0);
    let (mut pushed, mut reaped) = (0, 0);
    let start = Instant::now();
    while reaped < OPERATIONS {
        for _ in 0..BATCH {
            if pushed == OPERATIONS
                || pushed - reaped >= IN_FLIGHT
                || entries.push(Entry([pushed, 1, 2, 3, 4, 5, 6, 7])).is_err()
            {
                break;
            }
            pushed += 1;
        }
        while let Some(result) = results.pop() {
            assert_eq!(result[0], reaped);
            reaped += 1;
        }
    }
    let time = start.elapsed();
    stop.store(true, Relaxed);
    poller.join().unwrap();
    rate(OPERATIONS, time)
}

fn nop_against_array_queues() {
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let before = ping_pong();
    for _ in 0..ROUNDS {
        let (ring, queues) = (nop_ring(), array_queues());
        ours.push(ring);
        theirs.push(queues);
        ratios.push(ring / queues);
    }
    let after = ping_pong();
    println!(
        "nop, batches of 32: ring {:.1} M/s, two ArrayQueues {:.1} M/s, ratio {:.2} (core to core {before:.0} ns before, \
         {after:.0} ns after)",
        median(ours),
        median(theirs),
        median(ratios)
    );
}
