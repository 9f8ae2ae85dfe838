//! Full queues, wake-ups, and peers that hold things up (F, G, H).

use std::thread;
use std::time::{Duration, Instant};

use moonring::code::errno;
use moonring::opcode::{Nop, Wait};
use moonring::sim::Sim;
use moonring::{Refusal, Stage, fence};

use crate::common::Setup;
use crate::{Held, LIMIT, MS, PAGE, Scene};

/// Tiny rings, threads that push until they are let in, a first attempt that fails, and dependents that come at once: always
/// further, and the poller waits for nobody.
#[test]
fn f1_tiny_rings_always_go_on() {
    for entries in [1, 2, 4] {
        let sim = Sim::new(entries.into()).failures(500).partial_submits(500).delay(Duration::ZERO..MS / 100);
        let mut setup = Setup::simulated(entries, sim);
        let mut left = 300;
        let pushers: Vec<_> = (0..3)
            .map(|_| {
                let mut submitter = setup.ring.submitter();
                thread::spawn(move || {
                    for _ in 0..200 {
                        let end = Instant::now() + LIMIT;
                        while submitter.push(Nop::new().build().user_data(u64::MAX)).is_err() {
                            assert!(Instant::now() < end, "nobody makes room");
                            thread::yield_now();
                        }
                        submitter.submit().unwrap();
                    }
                })
            })
            .collect();
        let mut nops = 0;
        let mut on_its_way = false;
        let end = Instant::now() + LIMIT;
        while left > 0 || nops < 600 {
            assert!(Instant::now() < end, "{left} reads and {nops} nops");
            if left > 0 && !on_its_way {
                // What failed is pushed again by whoever reaps, without waiting.
                let entry = setup.read(0, 64);
                on_its_way = setup.ring.submission().push(entry).is_ok();
                setup.ring.submit().unwrap();
            }
            let _ = setup.ring.wait_timeout(1, MS);
            for cqe in setup.ring.completion() {
                if cqe.user_data() == u64::MAX {
                    nops += 1;
                    continue;
                }
                assert!(cqe.res() == 64 || cqe.res() == -errno::EIO);
                on_its_way = false;
                left -= i32::from(cqe.res() == 64);
            }
        }
        pushers.into_iter().for_each(|pusher| pusher.join().unwrap());
        assert_eq!(nops, 600);
    }
}

/// A transport that has room for eight: what it does not take is offered again, and never a failure.
#[test]
fn f2_a_full_transport_is_no_failure() {
    let mut scene = Scene::on(256, Held::new().with_room(8));
    let (mut pushed, mut ended) = (0, 0);
    let end = Instant::now() + LIMIT;
    while ended < 5000 {
        assert!(Instant::now() < end, "{ended} of {pushed} have ended, {} were issued", scene.held.issued());
        while pushed < 5000 {
            let entry = scene.write(0, pushed % 64);
            match scene.ring.submission().push(entry) {
                Ok(()) => pushed += 1,
                Err(refused) => {
                    assert!(matches!(refused.reason, Refusal::Full { .. }));
                    break;
                }
            }
        }
        scene.ring.submit().unwrap();
        assert!(scene.held.running() <= 8);
        scene.held.land_all();
        for cqe in scene.ring.completion() {
            assert_eq!(cqe.result(), Ok(PAGE as u32));
            ended += 1;
        }
    }
    assert_eq!((scene.held.issued(), ended), (5000, 5000));
}

/// One entry waits for ever, a hundred for their limits in no order, and a thousand others go on; each limit is told.
#[test]
fn g3_what_waits_holds_up_nobody() {
    let mut scene = Scene::new(1024);
    let (signaller, never) = fence::host();
    scene.push(Wait::new().build().wait(&never).user_data(0));
    let mut random = fastrand::Rng::with_seed(7);
    for n in 1..=100 {
        let limit = MS * random.u32(20..60);
        scene.push(Wait::new().build().wait(&never).gate_limit(limit).user_data(n));
    }
    scene.ring.submit().unwrap();
    let mut late = [0; 101];
    let (mut pushed, mut ended) = (0, 0);
    let end = Instant::now() + LIMIT;
    while ended < 1000 || late.iter().sum::<i32>() < 100 {
        assert!(Instant::now() < end, "{ended} others, {late:?}");
        if pushed < 1000 && scene.ring.submission().push(Nop::new().build().user_data(1000)).is_ok() {
            pushed += 1;
        }
        scene.ring.submit().unwrap();
        let _ = scene.ring.wait_timeout(1, MS);
        for cqe in scene.ring.completion() {
            if cqe.user_data() == 1000 {
                ended += 1;
                continue;
            }
            assert_eq!((cqe.res(), cqe.stage()), (-errno::ETIME, Stage::Gate));
            assert!(cqe.gate_time() >= 20 * MS);
            late[cqe.user_data() as usize] += 1;
        }
    }
    assert!(late[0] == 0 && late[1..].iter().all(|&count| count == 1));
    signaller.signal();
    let first = scene.reap(1)[0];
    assert_eq!((first.user_data(), first.res()), (0, 0));
}

/// A peer takes everything and answers nothing. Pushing to it is refused in time, never waits, and leaves room for others.
#[test]
fn g4_a_silent_peer_leaves_room_for_others() {
    let mut scene = Scene::new(16);
    scene.submit(scene.read(1, 0));
    scene.held.await_issued(1);
    scene.held.land(0);
    scene.reap(1);
    for _ in 0..12 {
        scene.push(scene.read(0, 0).user_data(1));
    }
    let entry = scene.read(0, 0);
    let reason = scene.ring.submission().push(entry).unwrap_err().reason;
    assert!(matches!(reason, Refusal::SegmentShare { limit: 12, .. }), "{reason}");
    scene.ring.submit().unwrap();
    scene.held.await_issued(1 + 12);
    for n in 0..1000 {
        scene.submit(scene.read(1, 1).user_data(2));
        scene.held.await_issued(14 + n);
        scene.held.land(12);
        assert_eq!(scene.reap(1)[0].user_data(), 2);
    }
    assert_eq!(scene.held.running(), 12);
}

/// A handle of before its peer's restart is refused, also where an entry waits on it; the new one works, whether the ring
/// knew the peer before or not.
#[test]
fn h1_a_handle_of_before_the_restart_leads_nowhere() {
    let mut scene = Scene::new(8);
    let mut issued = 0;
    for known in [false, true, true] {
        assert_eq!(known, issued > 0);
        let (signaller, fence) = fence::host();
        scene.submit(scene.read(0, 0).wait(&fence).user_data(1));
        scene.taken();
        let old = std::mem::replace(&mut scene.peers[0], scene.engine.reopen_segment("held/0", LIMIT).unwrap());
        let stale = moonring::opcode::Write::new(scene.local(0), old.at(scene.theirs.address())).build();
        assert!(matches!(scene.ring.submission().push(stale).unwrap_err().reason, Refusal::StaleSegment(_)));
        signaller.signal();
        let waited = scene.reap(1)[0].result().unwrap_err();
        assert_eq!((waited.errno, scene.held.issued()), (errno::ESTALE, issued));
        scene.submit(scene.read(0, 0));
        issued += 1;
        scene.held.await_issued(issued);
        scene.held.land(0);
        assert_eq!(scene.reap(1)[0].result(), Ok(PAGE as u32));
    }
    // The simulated transport keeps to that too.
    let mut setup = Setup::simulated(8, Sim::new(1));
    for _ in 0..3 {
        setup.peer = setup.engine.reopen_segment(setup.peer.name(), LIMIT).unwrap();
        let entry = setup.read(0, 8);
        setup.push(entry);
        assert_eq!(setup.reap(1)[0].result(), Ok(8));
    }
}
