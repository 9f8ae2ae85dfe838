//! Ends of entries feed fences: edges between entries, rings and threads.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, Setup, reap_exactly, taken};
use moonring::code::errno::{ECANCELED, EINVAL, EIO, EOWNERDEAD, ESHUTDOWN, ETIME, ETIMEDOUT};
use moonring::fence::{self, Failure, FenceStatus};
use moonring::opcode::{Cancel, LinkTimeout, Nop, Timeout, Wait};
use moonring::sim::Sim;
use moonring::{CqeFlags, Engine, Entry, EntryFlags, Fence, Refusal, Ring, Stage};

const L: EntryFlags = EntryFlags::IO_LINK;
const MS: Duration = Duration::from_millis(1);

fn nop(user_data: u64) -> Entry {
    Nop::new().build().user_data(user_data)
}

fn failing(user_data: u64) -> Entry {
    Nop::new().result(-EIO).build().user_data(user_data)
}

fn ring() -> Ring {
    Ring::builder().grace(50 * MS).build(32, &Engine::loopback()).unwrap()
}

fn fenced(ring: &mut Ring, entry: Entry) -> Fence {
    ring.submission().push_fenced(entry).unwrap()
}

fn settled(fence: &Fence) -> FenceStatus {
    fence.wait_timeout(LIMIT)
}

fn failed(root: i32) -> FenceStatus {
    FenceStatus::Failed(Failure { errno: ECANCELED, detail: -root })
}

/// A fails; B waits for A, C for B, D for A and E; F waits for an entry that has ended.
#[test]
fn e5_failure_travels_along_edges_with_its_root_and_nothing_is_issued() {
    let sim = Sim::new(1);
    let probe = sim.probe();
    let mut setup = Setup::simulated(16, sim);
    let done = fenced(&mut setup.ring, nop(0));
    setup.reap(1);
    assert_eq!(done.status(), FenceStatus::Signalled);
    let a = fenced(&mut setup.ring, failing(1));
    let read = |user_data| setup.read(0, 8).user_data(user_data);
    let [b, c, d, e, f] = [2, 3, 4, 5, 6].map(read);
    let ring = &mut setup.ring;
    let b = fenced(ring, b.wait(&a));
    let c = fenced(ring, c.wait(&b));
    let e = fenced(ring, e);
    let d = fenced(ring, d.wait(&a).wait(&e));
    let f = fenced(ring, f.wait(&done));
    let mut cqes = setup.reap(6);
    cqes.sort_by_key(|cqe| cqe.user_data());
    let got: Vec<_> = cqes.iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.stage(), cqe.detail())).collect();
    let cancelled = |user_data| (user_data, -ECANCELED, Stage::Gate, -EIO);
    assert_eq!(got[0], (1, -EIO, Stage::Issue, 0));
    assert_eq!(got[1..4], [cancelled(2), cancelled(3), cancelled(4)]);
    assert_eq!([cqes[4].res(), cqes[5].res()], [8, 8]);
    assert_eq!([&b, &c, &d, &e, &f].map(settled)[..3], [failed(EIO); 3]);
    assert_eq!([e.status(), f.status()], [FenceStatus::Signalled; 2]);
    assert_eq!(probe.issued(), 2);
}

/// The root is kept through links too: the dependent of a member that a failed dependency's dependent took with it.
#[test]
fn the_root_is_kept_through_a_chain() {
    let mut ring = ring();
    let (signaller, host) = fence::host();
    let first = fenced(&mut ring, nop(1).wait(&host).flags(L));
    let second = fenced(&mut ring, nop(2));
    let third = fenced(&mut ring, nop(3).wait(&second));
    ring.submit().unwrap();
    signaller.fail(7);
    let details: Vec<_> = reap_exactly(&mut ring, 3).iter().map(|cqe| (cqe.res(), cqe.detail())).collect();
    assert_eq!(details, [(-ECANCELED, -7); 3]);
    assert_eq!([&first, &second, &third].map(settled), [failed(7); 3]);
}

/// A pipeline through rings with pollers of their own: each step's entry waits for the one before, in another ring.
#[test]
fn edges_cross_rings() {
    let mut rings: Vec<_> = (0..3).map(|_| ring()).collect();
    for (root, expected) in [(0, FenceStatus::Signalled), (EIO, failed(EIO))] {
        let (signaller, mut fence) = fence::host();
        for step in 0..60 {
            fence = fenced(&mut rings[step % 3], nop(step as u64).wait(&fence));
        }
        for ring in &mut rings {
            ring.submit().unwrap();
        }
        assert_eq!(fence.wait_timeout(20 * MS), FenceStatus::Pending);
        if root == 0 {
            signaller.signal()
        } else {
            signaller.fail(root)
        }
        assert_eq!(settled(&fence), expected);
        for ring in &mut rings {
            let bad = reap_exactly(ring, 20).iter().filter(|cqe| (cqe.res() < 0) != (root != 0)).count();
            assert_eq!(bad, 0);
        }
    }
}

/// Any number of threads, that come before and after, and nobody reaps.
#[test]
fn threads_wait_for_an_entry() {
    for round in 0..50 {
        let mut ring = ring();
        let (signaller, gate) = fence::host();
        let fence = fenced(&mut ring, nop(1).wait(&gate));
        ring.submit().unwrap();
        let waiters: Vec<_> = (0..3)
            .map(|_| {
                let fence = fence.clone();
                thread::spawn(move || fence.wait_timeout(LIMIT))
            })
            .collect();
        if round % 2 == 0 {
            assert_eq!(fence.wait_timeout(MS), FenceStatus::Pending);
        }
        signaller.signal();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap(), FenceStatus::Signalled);
        }
    }
}

#[test]
fn a_thread_waits_for_a_host_timeline() {
    let (mut signaller, timeline) = fence::timeline(0);
    let third = timeline.at(3);
    let waiter = {
        let third = third.clone();
        thread::spawn(move || third.wait_timeout(LIMIT))
    };
    for value in 1..4 {
        assert_eq!(third.status(), FenceStatus::Pending);
        signaller.signal(value).unwrap();
    }
    assert_eq!(waiter.join().unwrap(), FenceStatus::Signalled);
    drop(signaller);
    assert_eq!(third.wait_timeout(LIMIT), FenceStatus::Signalled);
    assert_eq!(timeline.at(4).wait_timeout(LIMIT), failed(EOWNERDEAD));
}

/// A success is told when nothing touches the local range any more, and not before.
#[test]
fn success_settles_at_landing() {
    let mut setup = Setup::simulated(8, Sim::new(1).delay(40 * MS..41 * MS));
    setup.theirs.write_at(0, b"page").unwrap();
    let read = setup.read(0, 4);
    let fence = fenced(&mut setup.ring, read);
    let start = Instant::now();
    setup.ring.submit().unwrap();
    assert_eq!(settled(&fence), FenceStatus::Signalled);
    assert!(start.elapsed() >= 40 * MS);
    let mut bytes = [0; 4];
    setup.ours.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"page");
}

/// However an entry without a transfer ends, its fence says so.
#[test]
fn endings_without_a_transfer() {
    let mut ring = ring();
    let (signaller, host) = fence::host();
    let (_kept, never) = fence::host();
    signaller.fail(9);
    let hour = Duration::from_secs(3600);
    let skip = EntryFlags::CQE_SKIP_SUCCESS;
    let mut expected = Vec::new();
    let mut push = |entry, status| expected.push((fenced(&mut ring, entry), status));
    let ok = FenceStatus::Signalled;
    push(nop(1), ok);
    push(Nop::new().result(7).build(), ok);
    push(nop(2).flags(skip), ok);
    push(failing(3), failed(EIO));
    push(failing(3).flags(skip), failed(EIO));
    push(Nop::new().bad().build(), failed(EINVAL));
    push(nop(4).wait(&host), failed(9));
    push(nop(5).wait(&never).gate_limit(MS), failed(ETIME));
    push(Timeout::new(MS).build(), failed(ETIME));
    push(Timeout::new(MS).etime_success().build(), ok);
    push(Timeout::new(MS).multishot(3).etime_success().build(), ok);
    // Chains: a failure takes the rest with it, hidden or not; a LinkTimeout that fires and one that does not.
    push(failing(6).flags(L), failed(EIO));
    push(nop(6).wait(&never), failed(EIO));
    push(failing(7).flags(L | skip), failed(EIO));
    push(nop(7), failed(EIO));
    push(nop(8).flags(L), failed(EINVAL));
    push(Nop::new().bad().build().flags(L), failed(EINVAL));
    push(nop(8), failed(EINVAL));
    push(Timeout::new(hour).build().flags(L), failed(ECANCELED));
    push(LinkTimeout::new(MS).build(), failed(ETIME));
    push(nop(9).flags(L), ok);
    push(LinkTimeout::new(hour).build().flags(skip), failed(ECANCELED));
    // Cancelled at the gate, and before its turn.
    push(nop(10).wait(&never), failed(ECANCELED));
    push(Timeout::new(2 * MS).etime_success().build().flags(L), ok);
    push(nop(11), failed(ECANCELED));
    push(Cancel::user_data(10).build(), ok);
    push(Cancel::user_data(11).build(), ok);
    push(Cancel::user_data(99).build(), failed(2));
    ring.submit().unwrap();
    for (at, (fence, status)) in expected.iter().enumerate() {
        assert_eq!(settled(fence), *status, "entry {at}");
    }
}

/// A result with MORE is a failure, told with the result: the dependents do not wait for NOTIF.
#[test]
fn a_result_with_more_fails_at_once() {
    let mut setup = Setup::simulated(8, Sim::new(1).delay(500 * MS..501 * MS));
    let [limited, detached] = [1, 2].map(|user_data| setup.read(0, 8).user_data(user_data));
    let limited = fenced(&mut setup.ring, limited.transfer_limit(5 * MS));
    let detached = fenced(&mut setup.ring, detached);
    setup.ring.submit().unwrap();
    assert_eq!(settled(&limited), failed(ETIME));
    assert_eq!(setup.ring.controller().cancel(Cancel::user_data(2).detach()), Ok(1));
    assert_eq!(settled(&detached), failed(ECANCELED));
    let cqes = reap_exactly(&mut setup.ring, 4);
    let notifs = cqes.iter().filter(|cqe| cqe.flags() == CqeFlags::NOTIF).count();
    let more = cqes.iter().filter(|cqe| cqe.flags() == CqeFlags::MORE).count();
    assert_eq!((more, notifs), (2, 2));
    assert_eq!([limited.status(), detached.status()], [failed(ETIME), failed(ECANCELED)]);
    let mut setup = Setup::simulated(8, Sim::new(1).delay(MS..2 * MS).unquiet(1000));
    let read = setup.read(0, 8);
    let given_up = fenced(&mut setup.ring, read);
    setup.ring.submit().unwrap();
    assert_eq!(settled(&given_up), failed(ETIMEDOUT));
}

/// The ring goes: what waits, what is held, what is in flight at the end of the grace time, what was never submitted.
#[test]
fn endings_by_close() {
    let sim = Sim::new(1).delay(Duration::from_secs(5)..Duration::from_secs(6));
    let probe = sim.probe();
    let mut setup = Setup::simulated(8, sim);
    let (_kept, never) = fence::host();
    let progress = fence::progress(8);
    let mut submitter = setup.ring.submitter();
    let in_flight = setup.read(0, 8);
    let in_flight = fenced(&mut setup.ring, in_flight);
    let gated = fenced(&mut setup.ring, nop(1).wait(&never).flags(L));
    let held = fenced(&mut setup.ring, nop(2).wait(&never));
    let value = setup.ring.submission().push_signalling(nop(3).wait(&never), &progress).unwrap();
    let left = submitter.push_fenced(nop(4)).unwrap();
    let last = submitter.push_signalling(nop(5), &progress).unwrap();
    let elsewhere = {
        let mut other = ring();
        let fence = fenced(&mut other, Wait::new().build().wait(&in_flight));
        other.submit().unwrap();
        setup.ring.submit().unwrap();
        let start = Instant::now();
        while probe.issued() == 0 {
            assert!(start.elapsed() < LIMIT);
            thread::yield_now();
        }
        drop(setup);
        let cqe = reap_exactly(&mut other, 1)[0];
        assert_eq!((cqe.res(), cqe.detail()), (-ECANCELED, -ESHUTDOWN));
        fence
    };
    for fence in [&in_flight, &gated, &held, &elsewhere, &progress.at(value).unwrap()] {
        assert_eq!(settled(fence), failed(ESHUTDOWN));
    }
    assert_eq!(left.status(), FenceStatus::Pending);
    drop(submitter);
    assert_eq!(left.status(), failed(ESHUTDOWN));
    assert_eq!((progress.value(), progress.at(last).unwrap().status()), (2, failed(ESHUTDOWN)));
}

#[test]
fn endings_by_the_death_of_the_poller() {
    let hour = Duration::from_secs(3600);
    let mut setup = Setup::simulated(8, Sim::new(1).delay(hour..2 * hour).panic_at(2));
    let (_kept, never) = fence::host();
    let progress = fence::progress(8);
    let [first, second] = [setup.read(0, 8), setup.read(0, 8)];
    let gated = fenced(&mut setup.ring, nop(1).wait(&never).flags(L));
    let held = fenced(&mut setup.ring, nop(2));
    let issued = fenced(&mut setup.ring, first);
    let value = setup.ring.submission().push_signalling(nop(3).wait(&never), &progress).unwrap();
    setup.ring.submit().unwrap();
    // The first has been taken.
    taken(&setup.ring);
    let fatal = fenced(&mut setup.ring, second);
    setup.ring.submit().unwrap();
    for fence in [&gated, &held, &issued, &fatal, &progress.at(value).unwrap()] {
        assert_eq!(settled(fence), failed(EOWNERDEAD));
    }
    // What died there fails its dependents elsewhere.
    let mut other = ring();
    other.submission().push(nop(1).wait(&issued)).unwrap();
    other.submit().unwrap();
    assert_eq!(reap_exactly(&mut other, 1)[0].detail(), -EOWNERDEAD);
}

/// Two rings move one timeline, with random delays and failures; one entry is held back. The word stops before it, and in
/// the end every value up to the first failed one has signalled, and every later one has its cause.
#[test]
fn the_word_shows_the_completed_prefix() {
    const EACH: u64 = 40;
    for seed in 0..30 {
        println!("seed {seed}");
        let sim = |seed| Sim::new(seed).delay(Duration::ZERO..2 * MS).failures(if seed % 3 == 0 { 40 } else { 0 });
        let mut setups = [Setup::simulated(64, sim(seed)), Setup::simulated(64, sim(seed + 3000))];
        let progress = fence::progress(2 * EACH as u32);
        let (signaller, host) = fence::host();
        let held = 1 + seed * 7 % (2 * EACH);
        let mut last = 0;
        for at in 0..2 * EACH {
            let setup = &mut setups[(at % 2) as usize];
            let entry = setup.read(at as usize * 8, 8).user_data(at + 1);
            let entry = if at + 1 == held { entry.wait(&host) } else { entry };
            last = setup.ring.submission().push_signalling(entry, &progress).unwrap();
            assert_eq!(last, at + 1);
        }
        let mut waiter = ring();
        let points: Vec<_> = (1..=last).map(|value| progress.at(value).unwrap()).collect();
        waiter.submission().push(Wait::new().build().wait(&points[last as usize - 1])).unwrap();
        waiter.submit().unwrap();
        let mut results = vec![None; last as usize + 1];
        for setup in &mut setups {
            setup.ring.submit().unwrap();
        }
        let mut ended = 0;
        while ended < last - 1 {
            for setup in &mut setups {
                for cqe in setup.ring.completion() {
                    results[cqe.user_data() as usize] = Some(cqe.res());
                    ended += 1;
                }
            }
            let prefix = results[1..].iter().take_while(|res| res.is_some()).count() as u64;
            let word = progress.value();
            assert!(prefix <= word && word < held, "prefix {prefix}, word {word}, held {held}");
            thread::yield_now();
        }
        assert_eq!((progress.value(), results[held as usize]), (held - 1, None));
        signaller.signal();
        let setup = &mut setups[((held - 1) % 2) as usize];
        results[held as usize] = Some(reap_exactly(&mut setup.ring, 1)[0].res());
        assert_eq!(progress.value(), last);
        let first_failed = (1..=last).find(|&value| results[value as usize].unwrap() < 0);
        for (value, point) in (1..).zip(&points) {
            let expected = match first_failed {
                Some(first) if first <= value => failed(EIO),
                _ => FenceStatus::Signalled,
            };
            assert_eq!(point.status(), expected, "value {value}");
        }
        assert_eq!(progress.failure().map(|(value, _)| value), first_failed);
        let detail = if first_failed.is_some() { (-ECANCELED, -EIO) } else { (0, 0) };
        let cqe = reap_exactly(&mut waiter, 1)[0];
        assert_eq!((cqe.res(), cqe.detail()), detail);
    }
}

/// A full window refuses, takes nothing with it, and opens when the prefix grows.
#[test]
fn a_full_window_refuses() {
    let mut setup = Setup::loopback(4);
    let progress = fence::progress(2);
    let (signaller, host) = fence::host();
    for value in 1..=2 {
        let entry = setup.read(0, 8).wait(&host);
        assert_eq!(setup.ring.submission().push_signalling(entry, &progress).unwrap(), value);
    }
    for _ in 0..10 {
        let entry = setup.read(0, 8).wait(&host).gate_limit(LIMIT).user_data(7);
        let error = setup.ring.submission().push_signalling(entry, &progress).unwrap_err();
        assert_eq!(error.reason, Refusal::WindowFull { window: 2 });
    }
    setup.push(nop(1));
    setup.push(nop(2));
    assert_eq!(setup.refused(nop(3)), Refusal::Full { capacity: 4 });
    signaller.signal();
    setup.reap(4);
    assert_eq!(setup.ring.submission().push_signalling(nop(4), &progress).unwrap(), 3);
    setup.reap(1);
    assert_eq!((progress.value(), progress.reserved()), (3, 3));
    assert_eq!(progress.at(4).unwrap_err().last, 3);
    setup.ours.unregister().unwrap();
}

/// A member that fails with its chain before it came to the gate gives its side block back.
#[test]
fn a_member_that_never_started_gives_its_side_block_back() {
    let mut ring = Ring::builder().build(8, &Engine::loopback()).unwrap();
    let (_kept, never) = fence::host();
    for _ in 0..5 {
        let limited = nop(2).wait(&never).gate_limit(LIMIT);
        ring.submission().push_chain(vec![failing(1).flags(L), limited]).unwrap();
        ring.submit().unwrap();
        assert_eq!(reap_exactly(&mut ring, 2)[1].detail(), -EIO);
    }
}
