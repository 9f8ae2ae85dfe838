//! No allocation per operation in steady state, in moonring's own code: counted by a global allocator, on every thread of
//! this process, so it is alone in its program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

mod common;

use common::{LIMIT, Setup};
use moonring::{WaitError, fence, opcode};

struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(SeqCst) {
            ALLOCATIONS.fetch_add(1, SeqCst);
        }
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

fn count(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.load(SeqCst);
    COUNTING.store(true, SeqCst);
    work();
    COUNTING.store(false, SeqCst);
    ALLOCATIONS.load(SeqCst) - before
}

/// One step as engines do it: a batch of loads behind one fence, signalled late, waited for and reaped; each
/// moves a timeline when it ends. With every second
/// step the poller has the time to gate them; with the others the signal may come first.
fn step(setup: &mut Setup, fences: &mut Vec<(fence::Signaller, moonring::Fence)>, progress: &fence::Progress) {
    let late = fences.len().is_multiple_of(2);
    let (signaller, fence) = fences.pop().unwrap();
    for n in 0..32 {
        let entry = setup.read(n * 64, 64).wait(&fence).user_data(n as u64);
        setup.ring.submission().push_signalling(entry, progress).unwrap();
    }
    setup.push(opcode::Nop::new().build());
    setup.ring.submit().unwrap();
    let mut reaped = 0;
    if late {
        // The Nop behind them has been seen: they are at the gate.
        setup.ring.wait(1).unwrap();
        reaped += setup.ring.completion().count();
    }
    signaller.signal();
    while reaped < 33 {
        setup.ring.wait(1).unwrap();
        reaped += setup.ring.completion().count();
    }
}

/// The poller's thread is asleep.
fn poller_sleeps() -> bool {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    // The state follows the name, which is in parentheses.
    let mut stats = threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("stat")).ok());
    stats.any(|stat| stat.contains("(moonring-poller) S"))
}

#[test]
fn steady_state_allocates_nothing() {
    let mut setup = Setup::loopback(64);
    // A fence is one allocation, by its maker; they are made beforehand so that only the ring's work is counted.
    let mut fences: Vec<_> = (0..1500).map(|_| fence::host()).collect();
    let progress = fence::progress(32);
    for _ in 0..500 {
        step(&mut setup, &mut fences, &progress);
    }
    // A thread's first sleep allocates, in event-listener: the reaper's and the poller's.
    let (signaller, fence) = fence::host();
    setup.push(opcode::Wait::new().build().wait(&fence));
    setup.ring.submit().unwrap();
    let end = Instant::now() + LIMIT;
    while !poller_sleeps() {
        assert!(Instant::now() < end, "the poller does not sleep");
        std::thread::yield_now();
    }
    assert_eq!(setup.ring.wait_timeout(1, Duration::from_millis(20)), Err(WaitError::TimedOut));
    signaller.signal();
    assert_eq!(setup.reap(1).len(), 1);
    let allocations = count(|| {
        for _ in 0..1000 {
            step(&mut setup, &mut fences, &progress);
        }
    });
    assert_eq!(allocations, 0, "in 33,000 operations");
    assert_eq!(progress.value(), 1500 * 32);

    // Building a vectored entry allocates its list; pushing it and everything after does not, once there are part lists.
    let pages = |n: u32| (0..64).map(move |at| (at, (at + n) % 64));
    let entry = |n| {
        let remote = setup.peer.at(setup.theirs.address());
        opcode::ReadPages::new(setup.ours.slice(..).unwrap(), remote, 256, pages(n)).build()
    };
    let mut entries: Vec<_> = (0..800).map(entry).collect();
    let mut eight = |setup: &mut Setup| {
        for entry in entries.drain(entries.len() - 8..) {
            setup.push(entry);
        }
        setup.ring.submit().unwrap();
        let mut reaped = 0;
        while reaped < 8 {
            setup.ring.wait(1).unwrap();
            reaped += setup.ring.completion().count();
        }
    };
    for _ in 0..20 {
        eight(&mut setup);
    }
    let allocations = count(|| (0..80).for_each(|_| eight(&mut setup)));
    assert_eq!(allocations, 0, "in 640 vectored entries");
    // The count can fail.
    assert_eq!(count(|| drop(Box::new(1))), 1);
}
