//! DESIGN's promises, one after the other, on the simulated and loopback transports.

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, Setup, reap_exactly, taken};
use moonring::code::errno;
use moonring::sim::Sim;
use moonring::{
    CqeFlags, Engine, Entry, Fence, Refusal, Region, Ring, Stage, UnregisterError, WaitError, fence, opcode,
};

/// Promise 1: the transport is not called before every fence has signalled.
#[test]
fn nothing_is_issued_before_its_fences_have_signalled() {
    let sim = Sim::new(1);
    let probe = sim.probe();
    let mut setup = Setup::simulated(64, sim);
    let (first, one) = fence::host();
    let (second, two) = fence::host();
    let (mut third, timeline) = fence::timeline(0);
    let three = timeline.at(7);
    let entry = setup.read(0, 4096).wait(&one).wait(&two).wait(&three);
    setup.push(entry);
    setup.ring.submit().unwrap();
    for step in 0..4 {
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(probe.issued(), 0, "issued before step {step}");
        assert!(setup.ring.completion().next().is_none());
        match step {
            0 => third.signal(6).unwrap(),
            1 => third.signal(9).unwrap(),
            _ => {}
        }
        if step == 2 {
            break;
        }
    }
    second.signal();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(probe.issued(), 0);
    first.signal();
    assert_eq!(setup.reap(1)[0].result(), Ok(4096));
    assert_eq!(probe.issued(), 1);
}

/// Promise 2: what is ready overtakes what waits.
#[test]
fn entries_that_wait_hold_up_nobody() {
    let mut setup = Setup::loopback(1024);
    let (signaller, never) = fence::host();
    let waiting = setup.read(0, 64).wait(&never).user_data(u64::MAX);
    setup.push(waiting);
    for n in 0..1000 {
        setup.push(setup.read(64, 64).user_data(n));
    }
    setup.ring.submit().unwrap();
    let cqes = setup.reap(1000);
    assert!(cqes.iter().enumerate().all(|(n, cqe)| cqe.user_data() == n as u64 && cqe.result() == Ok(64)));
    signaller.signal();
    assert_eq!(setup.reap(1)[0].user_data(), u64::MAX);
}

/// Promise 2, in numbers: many entries on many fences, released out of order.
#[test]
fn fences_release_their_own_entries_in_any_order() {
    let mut setup = Setup::loopback(1024);
    let fences: Vec<_> = (0..100).map(|_| fence::host()).collect();
    for n in 0..1000u64 {
        let entry = setup.read(0, 8).wait(&fences[n as usize % 100].1).user_data(n);
        setup.push(entry);
    }
    setup.ring.submit().unwrap();
    for (at, (signaller, _)) in fences.into_iter().enumerate().rev() {
        signaller.signal();
        let cqes = setup.reap(10);
        assert!(cqes.iter().all(|cqe| cqe.user_data() % 100 == at as u64));
    }
}

/// Promise 3: exact results, good and bad in one submit.
#[test]
fn good_and_bad_entries_of_one_submit_each_have_their_own_result() {
    let mut setup = Setup::loopback(16);
    let beyond = setup.theirs.address() + setup.theirs.len() as u64 - 4;
    let bad = opcode::Read::new(setup.ours.slice(0..8).unwrap(), setup.peer.at(beyond)).build();
    setup.push(setup.read(0, 3).user_data(1));
    setup.push(bad.user_data(2));
    setup.push(setup.read(0, 5).user_data(3));
    let cqes = setup.reap(3);
    assert_eq!(cqes[0].result(), Ok(3));
    let error = cqes[1].result().unwrap_err();
    assert_eq!((error.errno, error.stage), (errno::EFAULT, Stage::Transfer));
    assert_eq!(cqes[2].result(), Ok(5));
}

/// Promise 3 under random faults: each accepted entry has one last completion, with its own `user_data`.
#[test]
fn every_entry_ends_once_under_faults() {
    for seed in 0..20 {
        let sim = Sim::new(seed)
            .delay(Duration::ZERO..Duration::from_micros(50))
            .failures(100)
            .unquiet(100)
            .partial_submits(300);
        let mut setup = Setup::simulated(32, sim);
        let mut last = vec![0u32; 2000];
        let mut more = vec![0u32; 2000];
        let (mut pushed, mut ended) = (0, 0);
        while ended < 2000 {
            while pushed < 2000 {
                let entry = setup.read(pushed as usize % 100 * 64, 64).user_data(pushed);
                if setup.ring.submission().push(entry).is_err() {
                    break;
                }
                pushed += 1;
            }
            setup.ring.submit().unwrap();
            setup.ring.wait_timeout(1, LIMIT).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            for cqe in setup.ring.completion() {
                let at = cqe.user_data() as usize;
                if cqe.flags().contains(CqeFlags::MORE) {
                    assert_eq!((cqe.res(), more[at]), (-errno::ETIMEDOUT, 0), "seed {seed}");
                    more[at] += 1;
                    continue;
                }
                assert_eq!(cqe.flags().contains(CqeFlags::NOTIF), more[at] == 1, "seed {seed}");
                last[at] += 1;
                ended += 1;
            }
        }
        assert!(last.iter().all(|&count| count == 1), "seed {seed}");
        assert!(more.contains(&1), "seed {seed}: the fault was never injected");
    }
}

/// Promise 4: MORE, and NOTIF when the buffer is quiet; the region is busy until then.
#[test]
fn an_unquiet_result_is_followed_by_a_notif() {
    let sim = Sim::new(3).unquiet(1000).delay(Duration::from_millis(500)..Duration::from_millis(501));
    let mut setup = Setup::simulated(4, sim);
    setup.push(setup.read(0, 64).user_data(5));
    let first = setup.reap(1)[0];
    assert_eq!((first.res(), first.flags(), first.user_data()), (-errno::ETIMEDOUT, CqeFlags::MORE, 5));
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(1))));
    let second = setup.reap(1)[0];
    assert_eq!((second.res(), second.flags(), second.user_data()), (0, CqeFlags::NOTIF, 5));
    setup.ours.unregister().unwrap();
}

/// Promise 5: a failed dependency fails its dependents with the cause, and never issues them.
#[test]
fn a_failed_fence_fails_its_dependents() {
    let sim = Sim::new(4);
    let probe = sim.probe();
    let mut setup = Setup::simulated(16, sim);
    let (good, kept) = fence::host();
    let (bad, failing) = fence::host();
    let (dropped, orphan) = fence::host();
    setup.push(setup.read(0, 8).wait(&failing).user_data(1));
    setup.push(setup.read(0, 8).wait(&kept).wait(&failing).user_data(2));
    setup.push(opcode::Wait::new().build().wait(&orphan).user_data(3));
    setup.ring.submit().unwrap();
    bad.fail(errno::EINVAL);
    let cqes = setup.reap(2);
    for cqe in &cqes {
        let error = cqe.result().unwrap_err();
        assert_eq!((error.errno, error.stage, error.detail), (errno::ECANCELED, Stage::Gate, -errno::EINVAL));
    }
    drop(dropped);
    let error = setup.reap(1)[0].result().unwrap_err();
    assert_eq!((error.errno, error.stage, error.detail), (errno::ECANCELED, Stage::Gate, -errno::EOWNERDEAD));
    good.signal();
    // A fence that has failed already fails what is pushed later.
    setup.push(setup.read(0, 8).wait(&failing));
    assert_eq!(setup.reap(1)[0].stage(), Stage::Gate);
    assert_eq!(probe.issued(), 0);
}

/// Promise 6: refusals at the door give the entry back and name what was wrong.
#[test]
fn bad_entries_are_refused_at_push() {
    let mut setup = Setup::loopback(64);
    let other = Setup::loopback(1);
    let slice = setup.ours.slice(0..8).unwrap();
    let foreign = opcode::Read::new(other.ours.slice(0..8).unwrap(), setup.peer.at(4096)).build();
    assert!(matches!(setup.refused(foreign), Refusal::ForeignSlice(_)));
    let foreign = opcode::Read::new(slice.clone(), other.peer.at(4096)).build();
    assert!(matches!(setup.refused(foreign), Refusal::ForeignSegment(_)));
    let wraps = opcode::Write::new(slice.clone(), setup.peer.at(u64::MAX - 3)).build();
    assert_eq!(setup.refused(wraps), Refusal::RemoteRange { address: u64::MAX - 3, len: 8 });
    assert!(setup.ours.slice(8..usize::MAX).is_err());
    assert!(setup.ours.slice(0..setup.ours.len() + 1).is_err());
    assert!(setup.peer.slice(&setup.theirs.info(), 1, setup.theirs.len() as u64).is_err());

    let stale = setup.peer.clone();
    setup.peer = setup.engine.reopen_segment(stale.name(), LIMIT).unwrap();
    let entry = opcode::Read::new(slice.clone(), stale.at(4096)).build();
    assert!(matches!(setup.refused(entry), Refusal::StaleSegment(_)));

    let fences: Vec<Fence> = (0..65).map(|_| fence::host().1).collect();
    let entry = fences.iter().fold(opcode::Wait::new().build(), Entry::wait);
    assert_eq!(setup.refused(entry), Refusal::TooManyFences(65));

    setup.ours.unregister().unwrap();
    let entry = opcode::Read::new(slice, setup.peer.at(4096)).build();
    assert!(matches!(setup.refused(entry), Refusal::Unregistered(_)));
    assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
}

/// Promise 6: a chain of 64 fences on an entry, and side blocks that run out and come back.
#[test]
fn side_blocks_are_refused_when_used_up_and_come_back() {
    let mut ring = Ring::builder().build(16, &Engine::loopback()).unwrap();
    let all: Vec<_> = (0..64).map(|_| fence::host()).collect();
    let wait = |user_data| {
        all.iter().map(|(_, fence)| fence).fold(opcode::Wait::new().build(), Entry::wait).user_data(user_data)
    };
    for n in 0..2 {
        ring.submission().push(wait(n)).unwrap();
    }
    let refused = ring.submission().push(wait(2)).unwrap_err();
    assert_eq!(refused.reason, Refusal::NoSideBlock { count: 2 });
    ring.submit().unwrap();
    for (signaller, _) in all {
        assert!(ring.completion().next().is_none());
        signaller.signal();
    }
    assert_eq!(reap_exactly(&mut ring, 2).iter().map(|cqe| cqe.res()).sum::<i32>(), 0);
    ring.submission().push(refused.entry).unwrap();
    ring.submit().unwrap();
    assert_eq!(reap_exactly(&mut ring, 1)[0].user_data(), 2);
}

/// Promise 6: a completion that finds the CQ full waits, in order; nothing is dropped and dependents go on.
#[test]
fn completions_wait_for_room_in_order() {
    let mut setup = Setup::loopback(8);
    let mut pushed = 0;
    let (signaller, fence) = fence::host();
    setup.push(setup.read(0, 8).wait(&fence).user_data(0));
    pushed += 1;
    // A CQ of 16 fills up, then completions wait in their slots until the ring is full.
    let end = Instant::now() + LIMIT;
    while pushed < 16 + 8 {
        assert!(Instant::now() < end, "{pushed} are accepted");
        let entry = setup.read(0, 8).user_data(pushed);
        match setup.ring.submission().push(entry) {
            Ok(()) => pushed += 1,
            Err(_) => std::thread::yield_now(),
        }
        setup.ring.submit().unwrap();
    }
    // And then no more.
    for _ in 0..100 {
        assert_eq!(setup.refused(setup.read(0, 8)), Refusal::Full { capacity: 8 });
        taken(&setup.ring);
    }
    signaller.signal();
    let mut seen = Vec::new();
    while seen.len() < pushed as usize {
        setup.ring.wait_timeout(1, LIMIT).unwrap();
        seen.extend(setup.ring.completion().map(|cqe| cqe.user_data()));
    }
    let expected: Vec<u64> = (1..pushed).chain([0]).collect();
    assert_eq!(seen, expected);
    // The refused ones hold nothing.
    setup.ours.unregister().unwrap();
}

/// Promise 8: a peer that does not answer cannot eat the ring, and less so once an entry of its is overdue.
#[test]
fn no_segment_takes_the_whole_ring() {
    let mut setup = Setup::loopback(16);
    let third = Engine::loopback();
    let theirs = third.register(Region::alloc(4096).unwrap()).unwrap();
    let other = setup.engine.open_segment(third.name(), LIMIT).unwrap();
    let (signaller, fence) = fence::host();
    // Alone it may have everything.
    for _ in 0..16 {
        setup.push(setup.read(0, 8).wait(&fence));
    }
    assert_eq!(setup.refused(setup.read(0, 8)), Refusal::Full { capacity: 16 });
    setup.ring.submit().unwrap();
    signaller.signal();
    setup.reap(16);

    let read_other = || opcode::Read::new(setup.ours.slice(0..8).unwrap(), other.at(theirs.address())).build();
    let (signaller, fence) = fence::host();
    let to_other = (0..4).map(|_| read_other().wait(&fence)).collect::<Vec<_>>();
    setup.ring.submission().push_chain(to_other).unwrap();
    for _ in 0..12 {
        setup.push(setup.read(0, 8).wait(&fence));
    }
    // Now the ring is full for everybody.
    assert_eq!(setup.refused(opcode::Nop::new().build()), Refusal::Full { capacity: 16 });
    setup.ring.submit().unwrap();
    signaller.signal();
    setup.reap(16);

    let (signaller, fence) = fence::host();
    for _ in 0..12 {
        setup.push(setup.read(0, 8).wait(&fence));
    }
    let segment: Box<str> = setup.peer.name().into();
    let expected = Refusal::SegmentShare { segment, limit: 12 };
    assert_eq!(setup.refused(setup.read(0, 8)), expected);
    // A chain that is given back gives its share back.
    let chain = vec![opcode::Nop::new().build(), setup.read(0, 8)];
    assert_eq!(setup.ring.submission().push_chain(chain).unwrap_err().reason, expected);
    setup
        .ring
        .submission()
        .push(opcode::Read::new(setup.ours.slice(0..8).unwrap(), other.at(theirs.address())).build())
        .unwrap();
    setup.ring.submit().unwrap();
    signaller.signal();
    setup.reap(13);
}

/// Promise 8: with an entry overdue the share is an eighth, until the NOTIF.
#[test]
fn an_overdue_entry_leaves_its_segment_an_eighth() {
    let sim = Sim::new(9).delay(Duration::from_millis(500)..Duration::from_millis(501));
    let mut setup = Setup::simulated(16, sim);
    let other = setup.engine.open_segment("sim/1", LIMIT).unwrap();
    let theirs = setup.theirs.address();
    let read_other = |setup: &Setup| opcode::Read::new(setup.ours.slice(0..8).unwrap(), other.at(theirs)).build();
    setup.push(setup.read(0, 8).transfer_limit(Duration::from_millis(5)).user_data(1));
    setup.push(read_other(&setup).user_data(2));
    setup.ring.submit().unwrap();
    let late = reap_exactly(&mut setup.ring, 1)[0];
    assert_eq!((late.user_data(), late.flags()), (1, CqeFlags::MORE));
    // The overdue one counts: one more, and no third.
    setup.push(setup.read(0, 8).user_data(3));
    let expected = Refusal::SegmentOverdue { segment: setup.peer.name().into(), limit: 2 };
    assert_eq!(setup.refused(setup.read(0, 8)), expected);
    for _ in 0..11 {
        setup.push(read_other(&setup));
    }
    setup.ring.submit().unwrap();
    while setup.ring.completion().all(|cqe| cqe.flags() != CqeFlags::NOTIF) {
        setup.ring.wait_timeout(1, LIMIT).unwrap();
    }
    setup.push(setup.read(0, 8));
    setup.push(setup.read(0, 8));
}

/// Promise 9: drop is bounded and everything accepted has ended.
#[test]
fn dropping_a_ring_with_work_in_every_state_is_bounded() {
    let sim = Sim::new(5).delay(Duration::from_secs(3600)..Duration::from_secs(3601));
    let probe = sim.probe();
    let mut setup = Setup::simulated(64, sim);
    let (signaller, fence) = fence::host();
    for n in 0..10 {
        setup.push(setup.read(0, 8).user_data(n));
        setup.push(setup.read(0, 8).wait(&fence));
    }
    setup.ring.submit().unwrap();
    let end = Instant::now() + LIMIT;
    while probe.issued() < 10 {
        assert!(Instant::now() < end, "{} of 10 are issued", probe.issued());
        std::thread::yield_now();
    }
    // Pushed and not submitted. Dropping submits it, and the poller may take it before it hears of the end.
    setup.push(setup.read(0, 8).wait(&fence));
    let mut submitter = setup.ring.submitter();
    let start = Instant::now();
    drop(setup.ring);
    assert!(start.elapsed() < Duration::from_secs(12), "{:?}", start.elapsed());
    let refused = submitter.push(opcode::Nop::new().build()).unwrap_err();
    assert_eq!(refused.reason, Refusal::Closed);
    signaller.signal();
    // The engine is not the ring's alone, so the transfers are for ever: the region stays busy and is never given back.
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(10))));
}

/// A panic in a driver ends every entry and poisons the ring.
#[test]
fn a_dead_poller_ends_every_entry_and_refuses_more() {
    let mut setup = Setup::simulated(64, Sim::new(6).panic_at(5));
    let (_signaller, fence) = fence::host();
    for n in 0..8 {
        setup.push(setup.read(0, 8).user_data(n));
    }
    setup.push(opcode::Nop::new().build().wait(&fence).user_data(8));
    let cqes = setup.reap(9);
    let mut all: Vec<u64> = cqes.iter().map(|cqe| cqe.user_data()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..9).collect::<Vec<_>>());
    for cqe in &cqes {
        let error = cqe.result().unwrap_err();
        assert_eq!((error.errno, error.stage), (errno::EOWNERDEAD, Stage::Shutdown));
    }
    assert_eq!(setup.ring.wait(1), Err(WaitError::PollerDead));
    let refused = setup.ring.submission().push(opcode::Nop::new().build()).unwrap_err();
    assert_eq!(refused.reason, Refusal::PollerDead);
}

/// A panic while results that are not quiet wait for room: they are the last word then, and say so.
#[test]
fn a_dead_poller_ends_what_waits_for_room_too() {
    let sim = Sim::new(7).unquiet(1000).delay(Duration::from_millis(20)..Duration::from_millis(21)).panic_at(16);
    let mut setup = Setup::simulated(8, sim);
    let push = |setup: &mut Setup, user_data| {
        setup.push(setup.read(0, 8).user_data(user_data));
        setup.ring.submit().unwrap();
    };
    (0..8).for_each(|n| push(&mut setup, n));
    // Their results and their NOTIFs fill the CQ of 16.
    assert_eq!(setup.ring.wait_timeout(16, LIMIT), Ok(16));
    (8..15).for_each(|n| push(&mut setup, n));
    // The results of these wait in their slots, with MORE to come, when the driver panics.
    std::thread::sleep(Duration::from_millis(30));
    push(&mut setup, 15);
    let mut last = [0; 16];
    while last.iter().sum::<u32>() < 16 {
        setup.ring.wait_timeout(1, LIMIT).unwrap_or_else(|error| panic!("{error}: {last:?}"));
        for cqe in setup.ring.completion() {
            last[cqe.user_data() as usize] += u32::from(!cqe.flags().contains(CqeFlags::MORE));
        }
    }
    assert_eq!(last, [1; 16]);
    assert_eq!(setup.ring.wait(1), Err(WaitError::PollerDead));
}

/// What a driver was being offered when it panicked may have been started: it does not count as quiet.
#[test]
fn entries_offered_to_a_panicking_driver_are_unquiet() {
    let mut setup = Setup::simulated(8, Sim::new(8).panic_at(2));
    for n in 0..3 {
        setup.push(setup.read(0, 8).user_data(n));
    }
    let cqes = setup.reap(3);
    assert!(cqes.iter().all(|cqe| cqe.flags() == CqeFlags::UNQUIET), "{cqes:?}");
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(3))));
}

/// Any grace time is possible.
#[test]
fn an_endless_grace_time_is_no_overflow() {
    drop(Ring::builder().grace(Duration::MAX).build(1, &Engine::loopback()).unwrap());
}

/// So does a driver that panics when it is made.
#[test]
fn a_poller_that_dies_at_once_ends_every_entry() {
    let mut setup = Setup::simulated(4, Sim::new(7).panic_at(0));
    let accepted = (0..3).filter(|_| setup.ring.submission().push(opcode::Nop::new().build()).is_ok()).count();
    if accepted > 0 {
        for cqe in setup.reap(accepted) {
            assert_eq!(cqe.result().unwrap_err().errno, errno::EOWNERDEAD);
        }
    }
    assert_eq!(setup.ring.wait(1), Err(WaitError::PollerDead));
}

/// Unregistering answers busy while entries are outstanding, and the pages are gone afterwards.
#[test]
fn a_region_with_work_outstanding_is_busy() {
    let mut setup = Setup::loopback(8);
    let (signaller, fence) = fence::host();
    setup.push(setup.read(0, 8).wait(&fence));
    setup.ring.submit().unwrap();
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(1))));
    signaller.signal();
    setup.reap(1);
    setup.ours.unregister().unwrap();
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::NotRegistered)));
    assert!(setup.ours.read_at(0, &mut [0; 8]).is_err());
    // The peer's own region: a transfer to it now fails, and other regions go on.
    setup.theirs.unregister().unwrap();
    let ours = setup.engine.register(Region::alloc(4096).unwrap()).unwrap();
    let entry = opcode::Write::new(ours.slice(..).unwrap(), setup.peer.at(setup.theirs.address())).build();
    setup.push(entry);
    assert_eq!(setup.reap(1)[0].result().unwrap_err().errno, errno::EFAULT);
}
