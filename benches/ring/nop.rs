//! A Nop ring, and the same job done with two bare queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use moonring::{Engine, Ring, opcode};

use crate::{median, pin, ping_pong};

const OPERATIONS: u64 = 1_000_000;
const BATCH: u64 = 32;
const IN_FLIGHT: u64 = 1024;
const ROUNDS: usize = 9;

fn rate(operations: u64, time: Duration) -> f64 {
    operations as f64 / time.as_secs_f64() / 1e6
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
            ring.submit().unwrap();
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

pub fn against_array_queues() {
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
