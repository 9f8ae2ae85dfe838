//! Memory: what a ring takes, what an entry that waits takes, and that operations allocate nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::Duration;

use moonring::{Engine, Region, Ring, fence, opcode};

use crate::{Settings, out};

/// Counts allocations while it is told to, so that it costs other parts a load.
struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Relaxed) {
            ALLOCATIONS.fetch_add(1, Relaxed);
            BYTES.fetch_add(layout.size() as i64, Relaxed);
        }
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if COUNTING.load(Relaxed) {
            BYTES.fetch_sub(layout.size() as i64, Relaxed);
        }
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// What `run` allocates, on all threads, and bytes that it leaves allocated, as the program asked for them.
fn count<T>(run: impl FnOnce() -> T) -> (T, u64, i64) {
    ALLOCATIONS.store(0, Relaxed);
    BYTES.store(0, Relaxed);
    COUNTING.store(true, Release);
    let done = run();
    COUNTING.store(false, Release);
    (done, ALLOCATIONS.load(Acquire), BYTES.load(Acquire))
}

pub fn measure(_settings: &mut Settings) {
    out::alone("ring_1024_bytes", ring_bytes(1024) as f64, "bytes");
    out::alone("waiting_entry_bytes", waiting_bytes(), "bytes");
    out::alone("allocations_per_op", per_operation(), "allocations");
    for entries in [256, 1024, 4096, 16_384] {
        out::point("ring memory", "a ring of so many entries", "any", f64::from(entries), ring_bytes(entries) as f64);
    }
}

fn nop(ring: &mut Ring) {
    ring.submission().push(opcode::Nop::new().build()).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().count(), 1);
}

/// A ring's heap, its poller's side included; not its thread's stack.
fn ring_bytes(entries: u32) -> i64 {
    let engine = Engine::loopback();
    let (ring, _, bytes) = count(|| {
        let mut ring = Ring::builder().build(entries, &engine).unwrap();
        // The poller has made its side when it answers.
        nop(&mut ring);
        ring
    });
    drop(ring);
    bytes
}

/// All that a ring with 100,000 entries that wait for one fence takes, by entry.
fn waiting_bytes() -> f64 {
    const WAITING: u32 = 100_000;
    let engine = Engine::loopback();
    let (signaller, fence) = fence::host();
    let (ring, _, bytes) = count(|| {
        let mut ring = Ring::builder().build(WAITING + 1, &engine).unwrap();
        for _ in 0..WAITING {
            ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
        }
        nop(&mut ring);
        ring
    });
    drop(ring);
    drop(signaller);
    bytes as f64 / f64::from(WAITING)
}

const STEPS: u64 = 1_000;
const BATCH: usize = 32;

/// Loads of 64 bytes behind one fence a step, on loopback. The fences are made beforehand.
fn per_operation() -> f64 {
    let engine = Engine::loopback();
    let region = engine.register(Region::alloc(1 << 16).unwrap()).unwrap();
    let peer = engine.open_segment(engine.name(), Duration::from_secs(10)).unwrap();
    let mut ring = Ring::builder().build(BATCH as u32, &engine).unwrap();
    let mut fences: Vec<_> = (0..2 * STEPS).map(|_| fence::host()).collect();
    let mut step = |ring: &mut Ring| {
        let (signaller, fence) = fences.pop().unwrap();
        for n in 0..BATCH {
            let remote = peer.at(region.address() + (1 << 15));
            let entry = opcode::Read::new(region.slice(n * 64..n * 64 + 64).unwrap(), remote).build();
            ring.submission().push(entry.wait(&fence)).unwrap();
        }
        ring.submit().unwrap();
        signaller.signal();
        ring.wait(BATCH).unwrap();
        assert_eq!(ring.completion().filter(|cqe| cqe.result() == Ok(64)).count(), BATCH);
    };
    for _ in 0..STEPS {
        step(&mut ring);
    }
    // A thread's first sleep allocates, in event-listener: the reaper's and the poller's.
    let (signaller, fence) = fence::host();
    ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
    ring.submit().unwrap();
    ring.wait_timeout(1, Duration::from_millis(20)).unwrap_err();
    signaller.signal();
    ring.wait(1).unwrap();
    assert_eq!(ring.completion().count(), 1);
    let ((), allocations, _) = count(|| (0..STEPS).for_each(|_| step(&mut ring)));
    allocations as f64 / (STEPS * BATCH as u64) as f64
}
