//! What an engine, a poller and a ring keep of what is over: nothing, or what the documentation says. Live memory is counted by
//! a global allocator, on every thread of this process, so these are alone in their program, and take turns.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

mod common;

use common::{LIMIT, Setup};
use moonring::store::{Client, Memory};
use moonring::{Engine, OpenError, Region, Ring, fence, opcode};

struct Counting;

static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size() as i64, SeqCst);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

static TURN: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often a thing is done and is over.
const TIMES: i64 = 600;
/// What lists and tables may have taken in advance, and a thread that is about to end, in all.
const SLACK: i64 = 8192;

/// Does something again and again: at most `each` bytes stay of each time.
#[track_caller]
fn keeps(each: i64, mut it: impl FnMut()) {
    (0..TIMES).for_each(|_| it());
    let before = LIVE.load(SeqCst);
    (0..TIMES).for_each(|_| it());
    let end = Instant::now() + LIMIT;
    loop {
        // Threads that have said their last word may still let go of something.
        let kept = LIVE.load(SeqCst) - before;
        if kept <= each * TIMES + SLACK {
            println!("{kept} bytes of {TIMES} times, {each} of each are allowed");
            return;
        }
        assert!(Instant::now() < end, "{kept} bytes are kept of {TIMES} times, {} of each", kept / TIMES);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A ring whose poller has worked and slept: the first time of each allocates.
fn setup(entries: u32) -> Setup {
    let mut setup = Setup::loopback(entries);
    for _ in 0..2 {
        setup.push(setup.read(0, 64));
        setup.ring.submit_and_wait(1).unwrap();
        assert_eq!(setup.ring.completion().count(), 1);
        std::thread::sleep(Duration::from_millis(20));
    }
    setup
}

/// Pushes some entries and reaps them.
fn use_it(ring: &mut Ring, setup: &Setup) {
    for n in 0..4 {
        ring.submission().push(setup.read(n * 64, 64)).unwrap();
    }
    ring.submit_and_wait(4).unwrap();
    assert_eq!(ring.completion().filter(|cqe| cqe.result().is_ok()).count(), 4);
}

#[test]
fn rings_and_submitters_leave_nothing() {
    let _alone = alone();
    let mut setup = setup(16);
    keeps(0, || {
        let mut ring = Ring::builder().build(16, &setup.engine).unwrap();
        use_it(&mut ring, &setup);
        assert!(ring.close(LIMIT).finished);
    });
    keeps(0, || {
        let mut ring = Ring::builder().attach(&setup.ring).build(16, &setup.engine).unwrap();
        use_it(&mut ring, &setup);
        assert!(ring.close(LIMIT).finished);
    });
    keeps(0, || {
        let mut submitter = setup.ring.submitter();
        submitter.push(opcode::Nop::new().build()).unwrap();
        submitter.submit().unwrap();
        setup.ring.wait(1).unwrap();
        assert_eq!(setup.ring.completion().count(), 1);
    });
}

#[test]
fn engines_leave_nothing() {
    let _alone = alone();
    keeps(0, || {
        let mut setup = Setup::loopback(4);
        setup.push(setup.read(0, 64));
        setup.ring.submit_and_wait(1).unwrap();
    });
}

#[test]
fn fences_and_timelines_leave_nothing() {
    let _alone = alone();
    let mut setup = setup(16);
    let end = |setup: &mut Setup, signal: &mut dyn FnMut()| {
        setup.ring.submit().unwrap();
        signal();
        setup.ring.wait(1).unwrap();
        assert_eq!(setup.ring.completion().count(), 1);
    };
    keeps(0, || {
        let (signaller, fence) = fence::host();
        setup.push(opcode::Wait::new().build().wait(&fence));
        let mut signaller = Some(signaller);
        end(&mut setup, &mut || signaller.take().unwrap().signal());
    });
    keeps(0, || {
        let (mut signaller, timeline) = fence::timeline(0);
        setup.push(opcode::Wait::new().build().wait(&timeline.at(2)));
        end(&mut setup, &mut || signaller.signal(2).unwrap());
    });
    let (mut signaller, timeline) = fence::timeline(0);
    keeps(0, || {
        let next = timeline.value() + 1;
        setup.push(opcode::Wait::new().build().wait(&timeline.at(next)));
        end(&mut setup, &mut || signaller.signal(next).unwrap());
    });
    // Somebody waits for a value that is far off, and gives up each time: alone, or because another fence fails.
    let far = |setup: &mut Setup, also: Option<&moonring::Fence>| {
        let entry = opcode::Wait::new().build().wait(&timeline.at(u64::MAX)).user_data(7);
        setup.push(also.into_iter().fold(entry, |entry, fence| entry.wait(fence)));
        // The Nop behind it has been seen: it is at the gate.
        setup.push(opcode::Nop::new().build());
        setup.ring.submit_and_wait(1).unwrap();
        assert_eq!(setup.ring.completion().count(), 1);
    };
    keeps(0, || {
        far(&mut setup, None);
        let controller = setup.ring.controller();
        end(&mut setup, &mut || assert_eq!(controller.cancel(opcode::Cancel::user_data(7)).unwrap(), 1));
    });
    keeps(0, || {
        let (failing, fence) = fence::host();
        far(&mut setup, Some(&fence));
        let mut failing = Some(failing);
        end(&mut setup, &mut || failing.take().unwrap().fail(5));
    });
    // Those that others still wait for are not lost with them, and one that was given up can be waited for again.
    let (far_off, near) = (timeline.at(1 << 40), timeline.at(1 << 20));
    for (fence, number) in [(&near, 1), (&far_off, 2), (&far_off, 3), (&near, 4)] {
        setup.push(opcode::Wait::new().build().wait(fence).user_data(number));
    }
    setup.ring.submit().unwrap();
    let controller = setup.ring.controller();
    for number in 2..=4 {
        assert_eq!(controller.cancel(opcode::Cancel::user_data(number)).unwrap(), 1);
    }
    setup.push(opcode::Wait::new().build().wait(&far_off).user_data(5));
    setup.ring.submit().unwrap();
    setup.ring.wait_timeout(3, LIMIT).unwrap();
    assert_eq!(setup.ring.completion().count(), 3);
    for (value, number) in [(1 << 20, 1), (1 << 40, 5)] {
        signaller.signal(value).unwrap();
        setup.ring.wait_timeout(1, LIMIT).unwrap();
        let ended: Vec<_> = setup.ring.completion().map(|cqe| (cqe.user_data(), cqe.result().is_ok())).collect();
        assert_eq!(ended, [(number, true)]);
    }
}

#[test]
fn regions_leave_their_addresses() {
    let _alone = alone();
    let setup = setup(4);
    let page = Box::leak(Box::new([0_u8; 4096]));
    let address = page.as_ptr() as u64;
    keeps(0, || {
        // SAFETY: the memory is never freed, nobody has a reference to it, and no peer writes it.
        let foreign = unsafe { setup.engine.register_foreign(address, 4096, "cpu:0") }.unwrap();
        // SAFETY: as above.
        unsafe { foreign.unregister_foreign() }.unwrap();
    });
    // The number that `Registered::unregister` states, and what the list has in advance.
    keeps(2 * 40, || {
        let own = setup.engine.register(Region::alloc(4096).unwrap()).unwrap();
        own.write_at(0, &[1; 64]).unwrap();
        own.unregister().unwrap();
    });
}

#[test]
fn segments_leave_what_is_stated() {
    let _alone = alone();
    let mut setup = setup(16);
    let mut number = 0;
    let mut next = |what| {
        number += 1;
        format!("{what}-{number}")
    };
    // Nothing of a peer that is not found.
    keeps(0, || {
        assert!(matches!(setup.engine.open_segment(&next("nobody"), LIMIT), Err(OpenError::Transport(_))));
        assert!(matches!(setup.engine.reopen_segment(&next("nobody"), LIMIT), Err(OpenError::Transport(_))));
    });
    // The numbers that `Engine::open_segment` states, and what tables have in advance.
    let other = Engine::loopback();
    keeps(2 * 150, || drop(setup.engine.reopen_segment(other.name(), LIMIT).unwrap()));
    keeps(2 * 250, || {
        let peer = Engine::loopback();
        setup.engine.open_segment(peer.name(), LIMIT).unwrap();
    });
    keeps(2 * 1100, || {
        let peer = setup.engine.reopen_segment(other.name(), LIMIT).unwrap();
        let own = setup.ours.slice(0..64).unwrap();
        setup.push(opcode::Read::new(own, peer.at(0)).build());
        setup.ring.submit_and_wait(1).unwrap();
        assert_eq!(setup.ring.completion().count(), 1);
    });
}

#[test]
fn stores_leave_their_names() {
    let _alone = alone();
    let setup = setup(4);
    let memory = Memory::new(0);
    keeps(2 * 30, || {
        let client = Client::memory(&setup.engine, &memory).unwrap();
        client.close(LIMIT).unwrap();
    });
}

/// One that a timeline has outlived stays on its list.
#[test]
fn pollers_stay_on_the_lists_of_timelines() {
    let _alone = alone();
    let setup = setup(4);
    let (_signaller, timeline) = fence::timeline(1);
    let later = timeline.at(2);
    keeps(1000, || {
        let mut ring = Ring::builder().build(4, &setup.engine).unwrap();
        ring.submission().push(opcode::Wait::new().build().wait(&later)).unwrap();
        // The Nop behind it has been seen: it is at the gate.
        ring.submission().push(opcode::Nop::new().build()).unwrap();
        ring.submit_and_wait(1).unwrap();
        assert!(ring.close(LIMIT).finished);
    });
}
