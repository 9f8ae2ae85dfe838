//! Cancelling where it meets other things: other rings, ends, crowds, a ring that closes.

mod common;

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, Setup, reap_exactly};
use moonring::code::errno::{EALREADY, ECANCELED, ENOENT, ESHUTDOWN};
use moonring::opcode::{Cancel, Wait};
use moonring::sim::Sim;
use moonring::{CqeFlags, Engine, EntryFlags, Refusal, Ring, Stage, WaitError, fence};

/// A Cancel means entries of its own ring, even where two rings share a poller.
#[test]
fn a_cancel_finds_nothing_of_another_ring() {
    let engine = Engine::loopback();
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    let mut other = Ring::builder().attach(&ring).build(8, &engine).unwrap();
    let (_signaller, never) = fence::host();
    ring.submission().push(Wait::new().build().wait(&never).user_data(1)).unwrap();
    ring.submit().unwrap();
    other.submission().push(Cancel::user_data(1).build().user_data(2)).unwrap();
    other.submission().push(Cancel::any().build().user_data(3)).unwrap();
    other.submit().unwrap();
    let got: Vec<_> = reap_exactly(&mut other, 2).iter().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    assert_eq!(got, [(2, -ENOENT), (3, 0)]);
    assert_eq!(other.controller().cancel(Cancel::any()), Ok(0));
    assert!(ring.completion().is_empty());
    assert_eq!(ring.controller().cancel(Cancel::user_data(1)), Ok(1));
    assert_eq!(reap_exactly(&mut ring, 1)[0].res(), -ECANCELED);
}

/// A ring closes around a transfer that was cancelled just before, or is being: each entry has its last completion, once, and
/// nothing hangs.
#[test]
fn a_ring_closes_with_a_cancel_under_way() {
    const AGES: Duration = Duration::from_secs(3600);
    for reaped_first in [true, false] {
        let sim = Sim::new(1).delay(AGES..AGES + Duration::from_secs(1));
        let probe = sim.probe();
        let mut setup = Setup::simulated(8, sim);
        setup.push(setup.read(0, 8).user_data(1));
        setup.ring.submit().unwrap();
        let start = Instant::now();
        while probe.issued() == 0 {
            assert!(start.elapsed() < LIMIT);
        }
        setup.push(Cancel::user_data(1).detach().build().user_data(2));
        setup.ring.submit().unwrap();
        let mut all = if reaped_first { reap_exactly(&mut setup.ring, 2) } else { Vec::new() };
        let start = Instant::now();
        let report = setup.ring.close(Duration::from_millis(20));
        assert!(report.finished && start.elapsed() < Duration::from_secs(11));
        all.extend(report.completions);
        let of = |user_data| all.iter().filter(move |cqe| cqe.user_data() == user_data).collect::<Vec<_>>();
        let (transfer, cancel) = (of(1), of(2));
        assert_eq!(cancel.len(), 1, "{all:?}");
        match cancel[0].res() {
            0 => {
                assert_eq!((transfer[0].res(), transfer[0].flags()), (-ECANCELED, CqeFlags::MORE));
                assert_eq!((transfer[1].res(), transfer[1].flags()), (0, CqeFlags::NOTIF | CqeFlags::UNQUIET));
                assert_eq!(transfer.len(), 2, "{all:?}");
            }
            // It came too late.
            res => {
                assert!(!reaped_first);
                assert_eq!((res, cancel[0].stage()), (-ESHUTDOWN, Stage::Shutdown));
                assert_eq!((transfer[0].res(), transfer[0].flags()), (-ESHUTDOWN, CqeFlags::UNQUIET));
                assert_eq!(transfer.len(), 1, "{all:?}");
            }
        }
    }
}

/// Fences signal while their entries are cancelled: whoever wins, the Cancel and its target say the same.
#[test]
fn cancels_race_with_ends() {
    const ROUNDS: u64 = 100;
    const EACH: u64 = 16;
    let sim = Sim::new(2).delay(Duration::from_micros(1)..Duration::from_micros(100));
    let mut setup = Setup::simulated(64, sim);
    let mut outcomes = [0; 3];
    for round in 0..ROUNDS {
        let (signallers, fences): (Vec<_>, Vec<_>) = (0..EACH).map(|_| fence::host()).unzip();
        for (n, fence) in (0..).zip(&fences) {
            setup.push(setup.read(8 * n as usize, 8).wait(fence).user_data(n));
        }
        setup.ring.submit().unwrap();
        let other = thread::spawn(move || signallers.into_iter().for_each(|signaller| signaller.signal()));
        if round % 4 == 0 {
            // So that some are late for sure.
            setup.ring.wait_timeout(1, LIMIT).unwrap();
        }
        for n in 0..EACH {
            setup.push(Cancel::user_data(n).build().user_data(EACH + n));
            setup.ring.submit().unwrap();
        }
        let all: HashMap<_, _> = setup.reap(2 * EACH as usize).iter().map(|cqe| (cqe.user_data(), *cqe)).collect();
        assert_eq!(all.len(), 2 * EACH as usize);
        for n in 0..EACH {
            let (cancel, target) = (all[&(EACH + n)], all[&n]);
            let expected = match cancel.res() {
                0 => (-ECANCELED, Stage::Cancel, 0),
                res if res == -ENOENT => (8, Stage::Done, 1),
                res if res == -EALREADY => (8, Stage::Done, 2),
                res => panic!("round {round}: {res}"),
            };
            assert_eq!((target.res(), target.stage(), target.flags()), (expected.0, expected.1, CqeFlags::empty()));
            outcomes[expected.2] += 1;
        }
        other.join().unwrap();
    }
    println!("cancelled, ended before, with the transport: {outcomes:?}");
    assert!(outcomes[1] > 0);
    assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
}

/// A thousand waiting entries are cancelled one by one, in no order, by entries and by chains of them.
#[test]
fn a_thousand_are_cancelled_one_by_one() {
    const COUNT: u64 = 1000;
    let mut ring = Ring::builder().build(2 * COUNT as u32, &Engine::loopback()).unwrap();
    let (_signaller, never) = fence::host();
    for round in 0..3 {
        for n in 0..COUNT {
            ring.submission().push(Wait::new().build().wait(&never).user_data(n)).unwrap();
        }
        ring.submit().unwrap();
        for step in 0..COUNT {
            // 383 and 1,000 have no common factor, so each has its turn.
            let n = step * 383 % COUNT;
            let linked = round == 1 && step % 10 != 9;
            let flags = if linked { EntryFlags::IO_LINK } else { EntryFlags::empty() };
            ring.submission().push(Cancel::user_data(n).build().user_data(COUNT + n).flags(flags)).unwrap();
        }
        ring.submit().unwrap();
        let all = reap_exactly(&mut ring, 2 * COUNT as usize);
        let mut seen = vec![0; 2 * COUNT as usize];
        for cqe in all {
            seen[cqe.user_data() as usize] += 1;
            assert_eq!(cqe.res(), if cqe.user_data() < COUNT { -ECANCELED } else { 0 });
        }
        assert!(seen.iter().all(|&times| times == 1));
        assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
    }
}

/// A full ring takes a few Cancels more, from its owner and from submitters together, and then no more until something ends.
#[test]
fn a_full_ring_takes_a_few_cancels() {
    const RESERVE: u64 = Ring::CANCEL_RESERVE as u64;
    for shared in [false, true] {
        let mut ring = Ring::builder().build(8, &Engine::loopback()).unwrap();
        let mut submitter = shared.then(|| ring.submitter());
        let (signaller, never) = fence::host();
        let wait = |n| Wait::new().build().wait(&never).user_data(n);
        (0..8).for_each(|n| ring.submission().push(wait(n)).unwrap());
        // The Cancels are not to end while others are pushed.
        let cancel = |n: u64| Cancel::user_data(n).build().wait(&never).user_data(100 + n);
        // Nobody has taken the entries yet, so there is no place.
        let refused = ring.submission().push(cancel(0)).unwrap_err();
        assert!(matches!(refused.reason, Refusal::Full { capacity: 8 }));
        ring.submit().unwrap();
        let end = Instant::now() + LIMIT;
        for n in 0..RESERVE {
            let mut entry = cancel(n);
            loop {
                let pushed = match submitter.as_mut().filter(|_| n % 2 == 1) {
                    Some(submitter) => submitter.push(entry),
                    None => ring.submission().push(entry),
                };
                let Err(refused) = pushed else { break };
                assert!(Instant::now() < end);
                entry = refused.entry;
            }
            assert!(matches!(ring.submission().push(wait(9)).unwrap_err().reason, Refusal::Full { .. }));
        }
        assert!(ring.submission().push(cancel(9)).is_err());
        assert!(submitter.as_mut().is_none_or(|submitter| submitter.push(cancel(9)).is_err()));
        ring.submit().unwrap();
        submitter.map(|mut submitter| submitter.submit().unwrap());
        // Of all that is taken: so it is all there.
        assert_eq!(ring.controller().cancel(Cancel::any()), Ok(8 + RESERVE as usize));
        assert_eq!(reap_exactly(&mut ring, 8 + RESERVE as usize).len(), 8 + RESERVE as usize);
        assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
        // All units are back, once.
        (0..8).for_each(|n| ring.submission().push(wait(n)).unwrap());
        assert!(ring.submission().push(wait(9)).is_err());
        ring.submit().unwrap();
        // What it is for.
        let end = Instant::now() + LIMIT;
        while ring.submission().push(Cancel::any().build().user_data(100)).is_err() {
            assert!(Instant::now() < end);
        }
        ring.submit().unwrap();
        assert_eq!(reap_exactly(&mut ring, 9).iter().filter(|cqe| cqe.res() == -ECANCELED).count(), 8);
        drop(signaller);
    }
}
