//! Allocations per operation, by counting every one in this process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use moonring::{Engine, Region, Ring, fence, opcode};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

const STEPS: u64 = 1_000;
const BATCH: usize = 32;

/// Loads of 64 bytes behind one fence a step, on loopback. The fences are made beforehand.
pub fn per_operation() {
    let engine = Engine::loopback();
    let region = engine.register(Region::alloc(1 << 16).unwrap()).unwrap();
    let peer = engine.open_segment(engine.name(), Duration::from_secs(1)).unwrap();
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
    let before = ALLOCATIONS.load(Relaxed);
    for _ in 0..STEPS {
        step(&mut ring);
    }
    let each = (ALLOCATIONS.load(Relaxed) - before) as f64 / (STEPS * BATCH as u64) as f64;
    println!("loopback read of 64 bytes behind a fence: {each} allocations an operation");
}
