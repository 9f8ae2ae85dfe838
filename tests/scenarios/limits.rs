//! Deadlines, cancels, and memory that something still touches (C, D, K).

use std::thread;
use std::time::Duration;

use moonring::code::errno;
use moonring::opcode::{Cancel, Select};
use moonring::{Cqe, CqeFlags, Refusal, Stage, UnregisterError, fence};

use crate::{LIMIT, MS, PAGE, Scene};

const NEW: u8 = 2;
const NEXT: u8 = 3;

fn ends(cqe: &Cqe) -> (u64, i32, Stage, CqeFlags) {
    (cqe.user_data(), cqe.res(), cqe.stage(), cqe.flags())
}

/// A peer freezes under a transfer: its limit is told once, with the word that the buffer is still in use, other peers go
/// on, and the late end is the last that is heard of it.
#[test]
fn c1_a_frozen_peer_costs_its_own_entries_their_limit() {
    let mut scene = Scene::new(16);
    scene.submit(scene.write(0, 0).transfer_limit(5 * MS).user_data(1));
    scene.held.await_issued(1);
    let late = scene.reap(1)[0];
    assert_eq!(ends(&late), (1, -errno::ETIME, Stage::Transfer, CqeFlags::MORE));
    for n in 0..50 {
        scene.submit(scene.write(1, 1).user_data(100 + n));
        scene.held.await_issued(n as usize + 2);
        scene.held.land(1);
        assert_eq!(scene.reap(1)[0].result(), Ok(PAGE as u32));
    }
    assert!(matches!(scene.ours.unregister(), Err(UnregisterError::Busy(1))));
    scene.held.land(0);
    let last = scene.reap(1)[0];
    assert_eq!((last.user_data(), last.res(), last.flags()), (1, 0, CqeFlags::NOTIF));
    scene.taken();
    assert!(scene.ring.completion().is_empty());
    scene.ours.unregister().unwrap();
}

/// The transport says that an operation has timed out, and goes on: buffer and slot are kept until it has really ended.
#[test]
fn c2_a_time_out_is_not_the_end() {
    let mut scene = Scene::new(16);
    Scene::fill(&scene.theirs, 0, NEW);
    for round in 0..20 {
        scene.submit(scene.read(0, 0).user_data(round));
        scene.held.await_issued(round as usize + 1);
        scene.held.time_out(0);
        let told = scene.reap(1)[0];
        assert_eq!(ends(&told), (round, -errno::ETIMEDOUT, Stage::Transfer, CqeFlags::MORE));
        assert_eq!(scene.ring.stats().unwrap().total.overdue, 1);
        assert!(matches!(scene.ours.unregister(), Err(UnregisterError::Busy(1))));
        scene.held.land_late(0);
        let last = scene.reap(1)[0];
        assert_eq!((last.user_data(), last.flags(), last.detail()), (round, CqeFlags::NOTIF, 1));
        assert_eq!(scene.ring.stats().unwrap().total.overdue, 0);
    }
    scene.ours.unregister().unwrap();
}

/// Nothing is kept for an entry that ended badly, whichever way: afterwards the ring has all its room, and regions are free.
/// One that cannot end yet keeps its own unit and no other.
#[test]
fn c3_every_unhappy_end_gives_everything_back() {
    let mut scene = Scene::new(8);
    scene.submit(scene.read(1, 1).user_data(u64::MAX - 1));
    scene.held.await_issued(1);
    let mut issued = 1;
    for round in 0..250 {
        let (signaller, fence) = fence::host();
        scene.push(scene.read(0, 0));
        scene.push(scene.read(0, 0));
        scene.push(scene.read(0, 0));
        scene.submit(scene.read(0, 0).wait(&fence).user_data(round));
        issued += 3;
        scene.held.await_issued(issued);
        // Behind the one that stays: refused outright, failed on its way, timed out.
        scene.held.fail(1, errno::ENOBUFS, Stage::Issue);
        scene.held.fail(1, errno::ECONNRESET, Stage::Transfer);
        scene.held.time_out(1);
        match round % 2 {
            0 => drop(signaller),
            _ => assert_eq!(scene.ring.controller().cancel(Cancel::user_data(round).all()), Ok(1)),
        }
        assert!(scene.reap(4).iter().all(|cqe| cqe.res() < 0));
        scene.held.land_late(1);
        assert_eq!(scene.reap(1)[0].flags(), CqeFlags::NOTIF);
        assert_eq!(scene.ring.stats().unwrap().total.outstanding, 1);
    }
    assert!(matches!(scene.ours.unregister(), Err(UnregisterError::Busy(1))));
    scene.held.land(0);
    scene.reap(1);
    let (signaller, fence) = fence::host();
    (0..6).for_each(|_| scene.push(scene.read(0, 0).wait(&fence)));
    (0..2).for_each(|_| scene.push(scene.read(1, 0).wait(&fence)));
    drop(signaller);
    scene.reap(8);
    scene.ours.unregister().unwrap();
}

/// A cancel comes too late for a load. Its owner fills the page again at the last completion, and nothing lands on it. One
/// who takes the first completion for the last finds the old load there.
#[test]
fn d1_a_cancelled_load_is_over_before_its_page_is_used_again() {
    for patient in [true, false] {
        let mut scene = Scene::new(8);
        Scene::fill(&scene.theirs, 0, NEW);
        scene.submit(scene.read(0, 0).user_data(1));
        scene.held.await_issued(1);
        scene.submit(Cancel::user_data(1).build().user_data(2));
        assert_eq!(ends(&scene.reap(1)[0]), (2, -errno::EALREADY, Stage::Cancel, CqeFlags::empty()));
        scene.taken();
        assert!(scene.ring.completion().is_empty(), "it goes on, and its completion waits");

        assert_eq!(scene.ring.controller().cancel(Cancel::user_data(1).detach()), Ok(1));
        assert_eq!(ends(&scene.reap(1)[0]), (1, -errno::ECANCELED, Stage::Cancel, CqeFlags::MORE));
        if !patient {
            Scene::fill(&scene.ours, 0, NEXT);
        }
        scene.held.land(0);
        assert_eq!(scene.reap(1)[0].flags(), CqeFlags::NOTIF);
        if patient {
            Scene::fill(&scene.ours, 0, NEXT);
        }
        assert_eq!(scene.held.running(), 0);
        assert!(Scene::holds(&scene.ours, 0, if patient { NEXT } else { NEW }));
    }
}

/// A signal and a cancel of one entry race: it ends once, and cancelled means that the transport was never called.
#[test]
fn d2_a_cancel_and_a_signal_race() {
    let mut scene = Scene::new(8);
    let mut issued = 0;
    let mut cancelled = 0;
    for round in 0..500 {
        let (signaller, fence) = fence::host();
        scene.submit(scene.read(0, 0).wait(&fence).user_data(round));
        let controller = scene.ring.controller();
        let signals = thread::spawn(move || signaller.signal());
        let found = controller.cancel(Cancel::user_data(round)).unwrap();
        signals.join().unwrap();
        if found == 0 {
            issued += 1;
            scene.held.await_issued(issued);
            scene.held.land(0);
        } else {
            cancelled += 1;
        }
        let expected = if found == 0 { PAGE as i32 } else { -errno::ECANCELED };
        assert_eq!((scene.reap(1)[0].res(), scene.held.issued()), (expected, issued));
        assert_eq!(controller.cancel(Cancel::user_data(round)), Ok(0), "it is over");
    }
    println!("{cancelled} of 500 were cancelled");
    scene.taken();
    assert!(scene.ring.completion().is_empty());
}

/// A region is not given back under an entry that waits, one that is on its way, and one that is overdue.
#[test]
fn d4_a_region_is_kept_for_all_that_may_touch_it() {
    let mut scene = Scene::new(16);
    let (signaller, fence) = fence::host();
    scene.push(scene.read(0, 0).user_data(1));
    scene.push(scene.read(0, 1).user_data(2));
    scene.submit(scene.read(0, 2).wait(&fence).user_data(3));
    scene.held.await_issued(2);
    scene.held.time_out(0);
    assert_eq!(scene.reap(1)[0].flags(), CqeFlags::MORE);
    let busy = |scene: &Scene, count| {
        assert!(matches!(scene.ours.unregister(), Err(UnregisterError::Busy(uses)) if uses == count), "{count}");
        let quiesced = scene.ring.controller().quiesce(Select::region(&scene.ours), MS);
        assert!(quiesced.is_err(), "{count}");
    };
    busy(&scene, 3);
    signaller.fail(errno::EIO);
    scene.reap(1);
    busy(&scene, 2);
    scene.held.land(1);
    scene.reap(1);
    busy(&scene, 1);
    scene.held.land_late(0);
    scene.reap(1);
    scene.ring.controller().quiesce(Select::region(&scene.ours), LIMIT).unwrap();
    scene.ours.unregister().unwrap();
}

/// Late ends find slots that others have by now: each completion belongs to its entry, equal `user_data` or not.
#[test]
fn d6_late_ends_find_their_own_entries() {
    for seed in 0..20 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut scene = Scene::new(4);
        // How many completions are to come for a page, and what runs: pages in the transport's order, and whether overdue.
        let mut running: Vec<(usize, bool)> = Vec::new();
        let mut issued = 0;
        for _ in 0..400 {
            if running.len() < 4 && random.bool() {
                let page = running.len() + random.usize(0..8) * 4;
                let length = (page + 1) * 8;
                let local = scene.ours.slice(0..length).unwrap();
                let entry = moonring::opcode::Read::new(local, scene.remote(0, 0)).build();
                if scene.ring.submission().push(entry.user_data(page as u64 % 2)).is_err() {
                    // Once overdue, a peer may have little of the ring.
                    continue;
                }
                scene.ring.submit().unwrap();
                issued += 1;
                scene.held.await_issued(issued);
                running.push((page, false));
                continue;
            }
            if running.is_empty() {
                continue;
            }
            let at = random.usize(0..running.len());
            let (page, overdue) = running[at];
            let expected = match overdue {
                true => {
                    scene.held.land_late(at);
                    running.remove(at);
                    (page as u64 % 2, 0, CqeFlags::NOTIF)
                }
                false if random.bool() => {
                    scene.held.time_out(at);
                    running[at].1 = true;
                    (page as u64 % 2, -errno::ETIMEDOUT, CqeFlags::MORE)
                }
                false => {
                    scene.held.land(at);
                    running.remove(at);
                    (page as u64 % 2, (page as i32 + 1) * 8, CqeFlags::empty())
                }
            };
            let cqe = scene.reap(1)[0];
            assert_eq!((cqe.user_data(), cqe.res(), cqe.flags()), expected, "seed {seed}");
        }
        assert!(issued > 20, "seed {seed}: {issued}");
    }
}

/// A limit ends with its entry: whoever has the slot next is not called late by it.
#[test]
fn d6_a_limit_is_not_the_next_ones() {
    let mut scene = Scene::new(1);
    let mut issued = 0;
    // On a slow machine the limit may pass in truth.
    let in_time = (0..20).any(|_| {
        scene.submit(scene.read(0, 0).transfer_limit(5 * MS));
        issued += 1;
        scene.held.await_issued(issued);
        scene.held.land(0);
        let ended = scene.reap(1)[0].result() == Ok(PAGE as u32);
        ended || scene.reap(1).is_empty()
    });
    assert!(in_time);
    scene.submit(scene.read(0, 0));
    scene.held.await_issued(issued + 1);
    thread::sleep(10 * MS);
    scene.taken();
    assert!(scene.ring.completion().is_empty());
    scene.held.land(0);
    assert_eq!(scene.reap(1)[0].result(), Ok(PAGE as u32));
}

/// A ring is closed under threads that push, with entries that wait, run, are overdue, and were not reaped: in bounded time,
/// with an end for each, and what cannot be stopped keeps its memory.
#[test]
fn k1_a_ring_closes_with_work_in_every_state() {
    let mut scene = Scene::new(64);
    let (signaller, fence) = fence::host();
    scene.push(scene.read(0, 0).user_data(1));
    scene.push(scene.read(0, 1).user_data(2));
    scene.push(scene.read(0, 2).user_data(3));
    scene.submit(scene.read(0, 3).wait(&fence).user_data(4));
    scene.held.await_issued(3);
    scene.held.land(2);
    scene.held.time_out(1);
    scene.ring.wait_timeout(2, LIMIT).unwrap();
    let pushers: Vec<_> = (0..2)
        .map(|_| {
            let mut submitter = scene.ring.submitter();
            thread::spawn(move || {
                let mut accepted = 0;
                loop {
                    match submitter.push(moonring::opcode::Nop::new().build().user_data(5)) {
                        Ok(()) => accepted += 1,
                        Err(refused) if refused.reason == Refusal::Closed => return accepted,
                        Err(refused) => assert!(matches!(refused.reason, Refusal::Full { .. }), "{}", refused.reason),
                    }
                    submitter.submit().unwrap();
                }
            })
        })
        .collect();
    // Some are there, and stay where they are: nobody reaps.
    scene.ring.wait_timeout(32, LIMIT).unwrap();
    let start = std::time::Instant::now();
    let report = scene.ring.close(10 * MS);
    assert!(report.finished && start.elapsed() < Duration::from_secs(12), "{:?}", start.elapsed());
    let accepted: usize = pushers.into_iter().map(|pusher| pusher.join().unwrap()).sum();
    signaller.signal();
    let last = report.completions.iter().filter(|cqe| !cqe.flags().contains(CqeFlags::MORE));
    let mut of = [0; 6];
    last.for_each(|cqe| of[cqe.user_data() as usize] += 1);
    // The last entry of each pusher may have come too late: accepted, and submitted to a ring that was closed meanwhile.
    let late = accepted.checked_sub(of[5]).expect("no entry ends twice");
    assert!(of[..5] == [0, 1, 1, 1, 1] && late <= 2, "{of:?} of {accepted}");
    // Two run for ever: their memory is kept.
    assert_eq!((report.unquiet, scene.held.running()), (2, 2));
    assert!(matches!(scene.ours.unregister(), Err(UnregisterError::Busy(2))));
}

/// Entries end at every moment that something may cut them short, in parts and whole: each once.
#[test]
fn e3_parts_limits_and_cancels_end_an_entry_once() {
    use moonring::opcode::Readv;
    let mut scene = Scene::new(64);
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..100 {
        let before = scene.held.issued();
        let parts = (0..4).map(|part| (scene.local(part), scene.remote(0, part)));
        let entry =
            Readv::new(parts).build().user_data(round).transfer_limit(Duration::from_micros(random.u64(1..2000)));
        scene.submit(entry);
        scene.held.await_issued(before + 4);
        let controller = scene.ring.controller();
        let canceller = thread::spawn(move || {
            controller.cancel(Cancel::user_data(round).detach()).unwrap();
        });
        for _ in 0..4 {
            if random.bool() {
                thread::sleep(Duration::from_micros(random.u64(0..500)));
            }
            match random.u8(0..3) {
                0 => scene.held.fail(0, errno::EIO, Stage::Transfer),
                1 => {
                    scene.held.time_out(0);
                    scene.held.land_late(0);
                }
                _ => scene.held.land(0),
            }
        }
        canceller.join().unwrap();
        let (mut results, mut last) = (0, 0);
        while last == 0 {
            scene.ring.wait_timeout(1, LIMIT).unwrap();
            for cqe in scene.ring.completion() {
                assert_eq!(cqe.user_data(), round);
                results += usize::from(!cqe.flags().contains(CqeFlags::NOTIF));
                last += usize::from(!cqe.flags().contains(CqeFlags::MORE));
            }
        }
        scene.taken();
        assert!(scene.ring.completion().is_empty(), "round {round}");
        assert_eq!((results, last), (1, 1), "round {round}");
    }
    scene.ours.unregister().unwrap();
}
