//! Fences against the transport (A).

use std::thread;

use moonring::code::errno;
use moonring::fence::FenceStatus;
use moonring::opcode::{ReadPages, Readv, WritePages, Writev};
use moonring::{Entry, Stage, fence};

use crate::{LIMIT, MS, PAGE, Scene};

const OLD: u8 = 1;
const NEW: u8 = 2;

type Make = fn(&Scene) -> Entry;

/// A store of page 0 starts when its producer has signalled, and not before: the peer sees the new bytes only. Without the
/// fence the same store takes the old ones.
#[test]
fn a1_a_store_reads_its_source_after_the_producer() {
    let stores: [Make; 3] = [
        |scene| scene.write(0, 0),
        |scene| Writev::new([(scene.local(0), scene.remote(0, 0))]).build(),
        |scene| WritePages::new(scene.local(0), scene.remote(0, 0), PAGE, [(0, 0)]).build(),
    ];
    for store in stores {
        for fenced in [true, false] {
            let mut scene = Scene::new(8);
            Scene::fill(&scene.ours, 0, OLD);
            let (signaller, produced) = fence::host();
            let entry = store(&scene);
            scene.submit(if fenced { entry.wait(&produced) } else { entry });
            scene.taken();
            // The producer is late, and an unfenced store is on its way.
            scene.held.await_issued(usize::from(!fenced));
            scene.held.land_all();
            let ours = scene.ours.clone();
            let producer = thread::spawn(move || {
                Scene::fill(&ours, 0, NEW);
                signaller.signal();
            });
            scene.held.await_issued(1);
            producer.join().unwrap();
            scene.held.land_all();
            assert_eq!(scene.reap(1)[0].result(), Ok(PAGE as u32));
            assert!(Scene::holds(&scene.theirs, 0, if fenced { NEW } else { OLD }), "fenced: {fenced}");
        }
    }
}

/// A load into page 0 starts when the kernel that still reads and clears the page has signalled. Without the fence the
/// kernel clears what was loaded.
#[test]
fn a2_a_load_lands_after_the_page_was_cleared() {
    let loads: [Make; 3] = [
        |scene| scene.read(0, 0),
        |scene| Readv::new([(scene.local(0), scene.remote(0, 0))]).build(),
        |scene| ReadPages::new(scene.local(0), scene.remote(0, 0), PAGE, [(0, 0)]).build(),
    ];
    for load in loads {
        for fenced in [true, false] {
            let mut scene = Scene::new(8);
            Scene::fill(&scene.ours, 0, OLD);
            Scene::fill(&scene.theirs, 0, NEW);
            let (signaller, cleared) = fence::host();
            let entry = load(&scene);
            scene.submit(if fenced { entry.wait(&cleared) } else { entry });
            scene.taken();
            scene.held.await_issued(usize::from(!fenced));
            scene.held.land_all();
            let ours = scene.ours.clone();
            let kernel = thread::spawn(move || {
                let undisturbed = Scene::holds(&ours, 0, OLD);
                Scene::fill(&ours, 0, 0);
                signaller.signal();
                undisturbed
            });
            assert_eq!(kernel.join().unwrap(), fenced, "what the kernel read");
            scene.held.await_issued(1);
            scene.held.land_all();
            assert_eq!(scene.reap(1)[0].result(), Ok(PAGE as u32));
            assert!(Scene::holds(&scene.ours, 0, if fenced { NEW } else { 0 }), "fenced: {fenced}");
        }
    }
}

/// Whoever waits for a load is let go of when it fails, and knows; the next one is waited for as the first. The same on a
/// stream is `cuda_timelines::a4_a_failed_entry_releases_the_stream_and_the_host_sees_it`.
#[test]
fn a4_a_failed_load_releases_who_waits_for_it() {
    let mut scene = Scene::new(8);
    for round in 0..10 {
        let load = scene.read(0, 0);
        let fence = scene.fenced(load);
        scene.ring.submit().unwrap();
        scene.held.await_issued(round + 1);
        let waiter = {
            let fence = fence.clone();
            thread::spawn(move || fence.wait_timeout(LIMIT))
        };
        assert_eq!(fence.wait_timeout(MS), FenceStatus::Pending);
        if round % 2 == 0 {
            scene.held.fail(0, errno::EIO, Stage::Transfer);
        } else {
            scene.held.land(0);
        }
        let failed = matches!(waiter.join().unwrap(), FenceStatus::Failed(failure) if failure.detail == -errno::EIO);
        assert_eq!(failed, round % 2 == 0);
        assert_eq!(scene.reap(1)[0].result().is_err(), failed);
    }
}

/// A copy that one peer never finishes stops nobody else's.
#[test]
fn a7_a_copy_that_hangs_stops_no_other() {
    let mut scene = Scene::new(16);
    scene.submit(scene.read(0, 0).user_data(100));
    scene.held.await_issued(1);
    for n in 0..100 {
        scene.submit(scene.read(1, 1).user_data(n));
        scene.held.await_issued(n as usize + 2);
        scene.held.land(1);
        assert_eq!(scene.reap(1)[0].user_data(), n);
    }
    scene.held.land(0);
    assert_eq!(scene.reap(1)[0].user_data(), 100);
}
