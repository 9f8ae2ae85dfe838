//! Vectored entries: many transfers, one completion.

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, Setup, reap_exactly};
use moonring::code::errno;
use moonring::opcode::{Cancel, Nop, Read, ReadPages, Readv, Select, WritePages, Writev};
use moonring::sim::Sim;
use moonring::{
    Cqe, CqeFlags, Engine, Entry, EntryFlags, Refusal, Region, Registered, Remote, Ring, Slice, Stage, UnregisterError,
    fence,
};

const PAGE: usize = 4096;

/// Numbers that look random, the same for a seed.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound as u64) as usize
    }

    /// The numbers below `count`, in any order.
    fn order(&mut self, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|at| all.swap(at, self.below(at + 1)));
        all
    }
}

fn byte(at: usize) -> u8 {
    (at * 31 + at / 251 + 7) as u8
}

/// Each byte of the region tells its place.
fn number(region: &Registered) {
    let bytes: Vec<u8> = (0..region.len()).map(byte).collect();
    region.write_at(0, &bytes).unwrap();
}

fn bytes(region: &Registered, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    region.read_at(at, &mut bytes).unwrap();
    bytes
}

fn numbered(at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(byte).collect()
}

/// A part: so many bytes at these offsets of both sides.
fn part(setup: &Setup, local: usize, remote: usize, len: usize) -> (Slice, Remote) {
    let remote = setup.peer.at(setup.theirs.address() + remote as u64);
    (setup.ours.slice(local..local + len).unwrap(), remote)
}

/// `count` parts of 64 bytes from `first` on, at the same offset of both sides.
fn parts(setup: &Setup, first: usize, count: usize) -> Vec<(Slice, Remote)> {
    (first..first + count).map(|at| part(setup, at * 64, at * 64, 64)).collect()
}

/// A part that no peer has: a simulated engine reaches all of its own regions, and nothing is mapped at 8.
fn bad(setup: &Setup, local: usize) -> (Slice, Remote) {
    (setup.ours.slice(local..local + 64).unwrap(), setup.peer.at(8))
}

fn outcome(cqe: &Cqe) -> (u64, i32, Stage) {
    (cqe.user_data(), cqe.res(), cqe.stage())
}

#[test]
fn a_list_is_read_and_written_as_one_entry() {
    let mut setup = Setup::loopback(24);
    number(&setup.theirs);
    let list = vec![
        part(&setup, 100, 7000, 33),
        part(&setup, 50_000, 0, 0),
        part(&setup, 0, 90_000, 100),
        part(&setup, 133, 12, 1),
        part(&setup, 200_000, 300_001, 70_000),
    ];
    setup.push(Readv::new(list.clone()).build().user_data(5));
    let cqe = setup.reap(1)[0];
    assert_eq!((cqe.user_data(), cqe.result(), cqe.stage()), (5, Ok(70_134), Stage::Done));
    assert_eq!(bytes(&setup.ours, 100, 33), numbered(7000, 33));
    assert_eq!(bytes(&setup.ours, 0, 100), numbered(90_000, 100));
    assert_eq!(bytes(&setup.ours, 133, 1), numbered(12, 1));
    assert_eq!(bytes(&setup.ours, 200_000, 70_000), numbered(300_001, 70_000));
    assert_eq!(bytes(&setup.ours, 134, 199_866), vec![0; 199_866], "between the parts");
    assert_eq!(bytes(&setup.ours, 270_000, 1000), vec![0; 1000], "behind them");

    setup.theirs.write_at(0, &vec![0; 1 << 20]).unwrap();
    setup.push(Writev::new(list).build());
    assert_eq!(setup.reap(1)[0].result(), Ok(70_134));
    assert_eq!(bytes(&setup.theirs, 7000, 33), numbered(7000, 33));
    assert_eq!(bytes(&setup.theirs, 300_001, 70_000), numbered(300_001, 70_000));
    assert_eq!(bytes(&setup.theirs, 7033, 1000), vec![0; 1000]);

    // Without bytes it waits for its fences, and for nothing else.
    let (signaller, fence) = fence::host();
    setup.push(Readv::new([]).build().wait(&fence));
    setup.push(Readv::new([part(&setup, 0, 0, 0)]).build().wait(&fence));
    setup.push(ReadPages::new(setup.ours.slice(..).unwrap(), setup.peer.at(0), 64, []).build().wait(&fence));
    setup.ring.submit().unwrap();
    assert!(setup.ring.completion().next().is_none());
    signaller.signal();
    assert!(setup.reap(3).iter().all(|cqe| cqe.result() == Ok(0)));
}

#[test]
fn pages_are_the_same_as_their_list() {
    let seed = 7;
    println!("seed {seed}");
    let mut rng = Rng(seed);
    for round in 0..16 {
        let page = [1, 64, 1000, PAGE][round % 4];
        let count = 1 + rng.below(Entry::MAX_PARTS);
        let (ours, theirs) = (rng.order(200), rng.order(200));
        let pages: Vec<_> = ours.into_iter().zip(theirs).take(count).collect();
        let (base, start) = (rng.below(1000), rng.below(1000));
        let sides: Vec<_> = [false, true]
            .map(|paged| {
                let mut setup = Setup::loopback(16);
                number(&setup.theirs);
                setup.ours.write_at(0, &vec![9; 1 << 20]).unwrap();
                let local = setup.ours.slice(base..).unwrap();
                let remote = setup.peer.at(setup.theirs.address() + start as u64);
                let list: Vec<_> = pages
                    .iter()
                    .map(|&(to, from)| part(&setup, base + to as usize * page, start + from as usize * page, page))
                    .collect();
                setup.push(match (paged, round % 2 == 0) {
                    (false, true) => Readv::new(list).build(),
                    (true, true) => ReadPages::new(local, remote, page, pages.clone()).build(),
                    (false, false) => Writev::new(list).build(),
                    (true, false) => WritePages::new(local, remote, page, pages.clone()).build(),
                });
                assert_eq!(setup.reap(1)[0].result(), Ok((count * page) as u32), "round {round}");
                (bytes(&setup.ours, 0, 1 << 20), bytes(&setup.theirs, 0, 1 << 20))
            })
            .into();
        assert!(sides[0] == sides[1], "round {round}");
        let moved = if round % 2 == 0 { &sides[0].0 } else { &sides[0].1 };
        let (to, from) = pages[count - 1];
        let (to, from) = (base + to as usize * page, start + from as usize * page);
        match round % 2 {
            0 => assert_eq!(moved[to..to + page], numbered(from, page)),
            _ => assert_eq!(moved[from..from + page], vec![9; page]),
        }
    }
}

#[test]
fn every_region_is_in_use_until_the_entry_has_ended() {
    let mut setup = Setup::loopback(16);
    let regions: Vec<_> = (0..3).map(|_| setup.engine.register(Region::alloc(PAGE).unwrap()).unwrap()).collect();
    let (signaller, fence) = fence::host();
    let remote = setup.peer.at(setup.theirs.address());
    let list = [0, 1, 1, 0, 2].map(|at: usize| (regions[at].slice(0..64).unwrap(), remote.clone()));
    setup.push(Readv::new(list).build().wait(&fence));
    setup.ring.submit().unwrap();
    for region in &regions {
        assert!(matches!(region.unregister(), Err(UnregisterError::Busy(1..=2))));
    }
    signaller.signal();
    assert_eq!(setup.reap(1)[0].result(), Ok(320));
    regions.iter().for_each(|region| region.unregister().unwrap());
}

/// The ring has one part list: had a refusal kept it, the next push would find none.
#[test]
fn a_refused_entry_gives_everything_back() {
    let mut setup = Setup::loopback(8);
    let third = Engine::loopback();
    let foreign = third.register(Region::alloc(PAGE).unwrap()).unwrap();
    let elsewhere = setup.engine.open_segment(third.name(), LIMIT).unwrap();
    let good = setup.engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let gone = setup.engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let gone_slice = gone.slice(0..64).unwrap();
    gone.unregister().unwrap();
    let remote = setup.peer.at(setup.theirs.address());
    let usable = good.slice(0..64).unwrap();
    let with = |middle: (Slice, Remote)| {
        Readv::new([(usable.clone(), remote.clone()), middle, (usable.clone(), remote.clone())]).build()
    };
    let refusals = [
        (with((foreign.slice(0..64).unwrap(), remote.clone())), "ForeignSlice"),
        (with((gone_slice.clone(), remote.clone())), "Unregistered"),
        (with((gone_slice.clone(), elsewhere.at(0))), "OtherSegment { part: 1,"),
        (with((usable.clone(), setup.peer.at(u64::MAX - 8))), "RemoteRange"),
        (Readv::new(vec![(usable.clone(), remote.clone()); 129]).build(), "TooManyParts(129)"),
        (ReadPages::new(usable.clone(), remote.clone(), 16, [(0, 0), (4, 0)]).build(), "LocalPage { page: 4,"),
        (ReadPages::new(usable.clone(), remote.clone(), 65, [(0, 0)]).build(), "LocalPage { page: 0,"),
        (ReadPages::new(usable.clone(), remote.clone(), 1 << 31, [(0, 0)]).build(), "TooLong(2147483648)"),
        (WritePages::new(usable.clone(), setup.peer.at(u64::MAX - 8), 4, [(0, 9)]).build(), "RemoteRange"),
        (WritePages::new(usable.clone(), setup.peer.at(u64::MAX - 8), 4, [(0, u32::MAX)]).build(), "RemoteRange"),
        (ReadPages::new(gone_slice, remote.clone(), 1, [(0, 0)]).build(), "Unregistered"),
    ];
    for (entry, expected) in refusals {
        let refused = setup.ring.submission().push(entry.user_data(77)).unwrap_err();
        let reason = format!("{:?}", refused.reason);
        assert!(reason.starts_with(expected), "{reason}, expected {expected}");
        // Unchanged: the same again.
        let again = setup.ring.submission().push(refused.entry).unwrap_err();
        assert_eq!(format!("{:?}", again.reason), reason);
        assert!(format!("{:?}", again.entry).contains("user_data: 77"));
    }

    // Two GiB in parts, none of them too long alone. Nothing is ever moved.
    let large = setup.engine.register(Region::alloc(1 << 28).unwrap()).unwrap();
    let eighth = (large.slice(..).unwrap(), remote.clone());
    assert_eq!(setup.refused(Readv::new(vec![eighth; 8]).build()), Refusal::TooLong(1 << 31));

    // The list goes with the entry, and comes back with it.
    let (signaller, fence) = fence::host();
    setup.push(with((usable.clone(), remote.clone())).wait(&fence));
    assert_eq!(setup.refused(with((usable.clone(), remote.clone()))), Refusal::NoPartList { count: 1 });
    setup.push(Nop::new().build());
    setup.ring.submit().unwrap();
    signaller.signal();
    assert_eq!(setup.reap(2).len(), 2);

    // A chain of which a later member is refused, and an entry that finds the ring full.
    let chain =
        vec![with((usable.clone(), remote.clone())), Nop::new().build(), with((usable.clone(), remote.clone()))];
    let refused = setup.ring.submission().push_chain(chain).unwrap_err();
    assert_eq!((refused.at, refused.reason), (2, Refusal::NoPartList { count: 1 }));
    let (signaller, fence) = fence::host();
    for _ in 0..8 {
        setup.push(Nop::new().build().wait(&fence));
    }
    for _ in 0..2 {
        let full = setup.refused(with((usable.clone(), remote.clone())));
        assert_eq!(full, Refusal::Full { capacity: 8 });
    }
    signaller.signal();
    assert_eq!(setup.reap(8).len(), 8);
    setup.push(with((usable.clone(), remote.clone())));
    assert_eq!(setup.reap(1)[0].result(), Ok(192));
    good.unregister().unwrap();
}

#[test]
fn a_bad_part_fails_the_entry_and_no_other() {
    let mut setup = Setup::loopback(32);
    number(&setup.theirs);
    for at in [0, 1, 60, 99] {
        let mut list = parts(&setup, 0, 100);
        list[at] = bad(&setup, at * 64);
        setup.push(Readv::new(parts(&setup, 200, 100)).build().user_data(1));
        setup.push(Readv::new(list).build().user_data(2));
        setup.push(setup.read(0, 8).user_data(3));
        let cqes = setup.reap(3);
        assert_eq!(outcome(&cqes[0]), (1, 6400, Stage::Done));
        assert_eq!(outcome(&cqes[1]), (2, -errno::EFAULT, Stage::Transfer));
        assert_eq!(outcome(&cqes[2]), (3, 8, Stage::Done));
        assert!(cqes.iter().all(|cqe| cqe.flags().is_empty()));
    }
    setup.ours.unregister().unwrap();
}

/// Three entries of 100 parts towards a peer with room for 256: the third is issued in part, 56 of it.
fn partly_issued(setup: &mut Setup, third: impl FnOnce(Entry) -> Entry) {
    for n in 0..2 {
        setup.push(Readv::new(parts(setup, n * 100, 100)).build().user_data(n as u64 + 1));
    }
    let entry = Readv::new(parts(setup, 200, 100)).build().user_data(3);
    setup.push(third(entry));
}

fn same(millis: u64) -> std::ops::Range<Duration> {
    Duration::from_millis(millis)..Duration::from_millis(millis)
}

fn issued(sim: &moonring::sim::Probe, count: u64) {
    let end = Instant::now() + LIMIT;
    while sim.issued() < count {
        assert!(Instant::now() < end, "{} of {count} are issued", sim.issued());
        std::thread::yield_now();
    }
}

#[test]
fn what_a_peer_has_no_room_for_is_issued_later() {
    for partial in [0, 900] {
        let sim = Sim::new(3).partial_submits(partial);
        let probe = sim.probe();
        let mut setup = Setup::simulated(64, sim);
        number(&setup.theirs);
        for n in 0..8 {
            setup.push(Readv::new(parts(&setup, n * 128, 128)).build().user_data(n as u64));
        }
        let cqes = setup.reap(8);
        assert!(cqes.iter().all(|cqe| cqe.result() == Ok(8192) && cqe.flags().is_empty()), "{cqes:?}");
        assert_eq!(probe.issued(), 1024);
        assert_eq!(bytes(&setup.ours, 0, 65_536), numbered(0, 65_536));
    }
}

#[test]
fn after_a_failure_no_further_part_is_issued() {
    // The driver leaves a part of all that it is offered, and what it takes fails in the same turn.
    let sim = Sim::new(4).delay(same(0)).failures(1000).partial_submits(1000);
    let probe = sim.probe();
    let mut setup = Setup::simulated(8, sim);
    setup.push(Readv::new(parts(&setup, 0, 100)).build().user_data(1));
    let cqe = setup.reap(1)[0];
    assert_eq!((outcome(&cqe), cqe.flags()), ((1, -errno::EIO, Stage::Transfer), CqeFlags::empty()));
    assert!((1..100).contains(&probe.issued()));
    setup.ours.unregister().unwrap();
}

#[test]
fn cancel_takes_what_is_not_issued_and_is_too_late_for_the_rest() {
    let sim = Sim::new(5).delay(same(1000));
    let probe = sim.probe();
    let mut setup = Setup::simulated(64, sim);
    let (_signaller, fence) = fence::host();
    partly_issued(&mut setup, |entry| entry);
    setup.push(Readv::new(parts(&setup, 300, 100)).build().user_data(4));
    setup.push(Readv::new(parts(&setup, 400, 100)).build().user_data(5).wait(&fence));
    setup.ring.submit().unwrap();
    issued(&probe, 256);
    let controller = setup.ring.controller();
    for (user_data, cancelled) in [(1, 0), (3, 0), (4, 1), (5, 1)] {
        assert_eq!(controller.cancel(Cancel::user_data(user_data)), Ok(cancelled), "{user_data}");
    }
    let mut got: Vec<_> = reap_exactly(&mut setup.ring, 2).iter().map(outcome).collect();
    got.sort_by_key(|outcome| outcome.0);
    assert_eq!(got, [(4, -errno::ECANCELED, Stage::Cancel), (5, -errno::ECANCELED, Stage::Cancel)]);
    assert_eq!(controller.cancel(Cancel::user_data(3).detach()), Ok(1));
    let detached = reap_exactly(&mut setup.ring, 1)[0];
    assert_eq!(outcome(&detached), (3, -errno::ECANCELED, Stage::Cancel));
    assert_eq!(detached.flags(), CqeFlags::MORE);
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(_))));
    let cqes = reap_exactly(&mut setup.ring, 3);
    for cqe in cqes {
        match cqe.user_data() {
            3 => assert_eq!((cqe.res(), cqe.flags()), (0, CqeFlags::NOTIF)),
            _ => assert_eq!(cqe.result(), Ok(6400)),
        }
    }
    assert_eq!(probe.issued(), 256, "the rest of 3, and 4 and 5, were never issued");
    setup.ours.unregister().unwrap();
}

/// A driver that leaves the last part of what it is offered: the entry is issued in part for good, and nothing of it runs.
#[test]
fn an_entry_with_nothing_running_is_quiet_when_it_is_cut_short() {
    for detach in [true, false] {
        let sim = Sim::new(12).delay(same(0)).partial_submits(1000);
        let probe = sim.probe();
        let mut setup = Setup::simulated(8, sim);
        let entry = Readv::new(parts(&setup, 0, 20)).build().user_data(1);
        setup.push(if detach { entry } else { entry.transfer_limit(Duration::from_millis(50)) });
        setup.ring.submit().unwrap();
        issued(&probe, 19);
        let controller = setup.ring.controller();
        if detach {
            // Until what runs has ended.
            std::thread::sleep(Duration::from_millis(10));
            assert_eq!(controller.cancel(Cancel::user_data(1)), Ok(0));
            assert_eq!(controller.cancel(Cancel::user_data(1).detach()), Ok(1));
        }
        let cqe = reap_exactly(&mut setup.ring, 1)[0];
        let expected = if detach { (-errno::ECANCELED, Stage::Cancel) } else { (-errno::ETIME, Stage::Transfer) };
        assert_eq!(((cqe.res(), cqe.stage()), cqe.flags()), (expected, CqeFlags::empty()));
        setup.ours.unregister().unwrap();
        assert_eq!(probe.issued(), 19);
    }
}

/// The limit counts from the first part's issue, although further parts are issued all the time.
#[test]
fn a_limit_is_not_put_off_by_further_parts() {
    let sim = Sim::new(13).delay(Duration::from_millis(100)..Duration::from_millis(1100));
    let probe = sim.probe();
    let mut setup = Setup::simulated(64, sim);
    partly_issued(&mut setup, |entry| entry.transfer_limit(Duration::from_millis(150)));
    let cqe = setup.reap(1)[0];
    assert_eq!((outcome(&cqe), cqe.flags()), ((3, -errno::ETIME, Stage::Transfer), CqeFlags::MORE));
    let before = probe.issued();
    assert!(before < 300, "all parts were issued before the limit");
    assert_eq!(reap_exactly(&mut setup.ring, 3).len(), 3);
    assert_eq!(probe.issued(), before);
}

#[test]
fn cancel_finds_an_entry_by_any_of_its_regions() {
    let mut setup = Setup::loopback(32);
    let other = setup.engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let (signaller, fence) = fence::host();
    let remote = setup.peer.at(setup.theirs.address());
    let mut list = parts(&setup, 0, 3);
    list.push((other.slice(0..64).unwrap(), remote));
    setup.push(Readv::new(list).build().user_data(1).wait(&fence));
    setup.push(Readv::new(parts(&setup, 0, 3)).build().user_data(2).wait(&fence));
    setup.ring.submit().unwrap();
    let controller = setup.ring.controller();
    assert!(controller.quiesce(Select::region(&other), Duration::from_millis(5)).is_err());
    assert_eq!(controller.cancel(Cancel::new(Select::region(&other)).all()), Ok(1));
    assert_eq!(outcome(&reap_exactly(&mut setup.ring, 1)[0]), (1, -errno::ECANCELED, Stage::Cancel));
    controller.quiesce(Select::region(&other), LIMIT).unwrap();
    other.unregister().unwrap();
    assert_eq!(controller.cancel(Cancel::new(Select::segment(&setup.peer)).all()), Ok(1));
    assert_eq!(outcome(&reap_exactly(&mut setup.ring, 1)[0]), (2, -errno::ECANCELED, Stage::Cancel));
    drop(signaller);
}

#[test]
fn limits_hold_for_the_whole_entry() {
    let sim = Sim::new(6).delay(same(1000));
    let probe = sim.probe();
    let mut setup = Setup::simulated(64, sim);
    let soon = Duration::from_millis(20);
    // Its time at the gate ends with its first part's issue.
    partly_issued(&mut setup, |entry| entry.gate_limit(soon).transfer_limit(2 * soon));
    setup.push(Readv::new(parts(&setup, 300, 100)).build().user_data(4).gate_limit(soon));
    let cqes = setup.reap(2);
    assert_eq!(outcome(&cqes[0]), (4, -errno::ETIME, Stage::Gate));
    assert_eq!(cqes[0].flags(), CqeFlags::empty());
    assert_eq!(outcome(&cqes[1]), (3, -errno::ETIME, Stage::Transfer));
    assert_eq!(cqes[1].flags(), CqeFlags::MORE);
    let cqes = reap_exactly(&mut setup.ring, 3);
    assert_eq!(cqes.iter().filter(|cqe| cqe.result() == Ok(6400)).count(), 2);
    let last = cqes.iter().find(|cqe| cqe.user_data() == 3).unwrap();
    assert_eq!((last.res(), last.flags()), (0, CqeFlags::NOTIF));
    assert_eq!(probe.issued(), 256);
}

#[test]
fn a_segment_that_was_reopened_gets_no_further_part() {
    let sim = Sim::new(7).delay(same(500));
    let probe = sim.probe();
    let mut setup = Setup::simulated(64, sim);
    partly_issued(&mut setup, |entry| entry);
    setup.ring.submit().unwrap();
    issued(&probe, 256);
    setup.engine.reopen_segment(setup.engine.name(), LIMIT).unwrap();
    let mut got: Vec<_> = reap_exactly(&mut setup.ring, 3).iter().map(outcome).collect();
    got.sort_by_key(|outcome| outcome.0);
    assert_eq!(got, [(1, 6400, Stage::Done), (2, 6400, Stage::Done), (3, -errno::ESTALE, Stage::Issue)]);
    assert_eq!(probe.issued(), 256);
    setup.ours.unregister().unwrap();
}

#[test]
fn parts_that_are_not_quiet_hold_the_regions_until_notif() {
    let mut setup = Setup::simulated(8, Sim::new(8).delay(same(30)).unquiet(1000));
    // More than the peer has room for: what is told has given its room back.
    for n in 0..5 {
        setup.push(Readv::new(parts(&setup, 0, 100)).build().user_data(n));
        let cqes = setup.reap(2);
        assert_eq!(cqes.iter().map(Cqe::flags).collect::<Vec<_>>(), [CqeFlags::MORE, CqeFlags::NOTIF]);
    }
    // With time to look at what is between.
    let mut setup = Setup::simulated(8, Sim::new(8).delay(same(500)).unquiet(1000));
    setup.push(Readv::new(parts(&setup, 0, 100)).build().user_data(1).flags(EntryFlags::IO_HARDLINK));
    setup.push(Nop::new().build().user_data(2));
    let first = setup.reap(1)[0];
    assert_eq!(outcome(&first), (1, -errno::ETIMEDOUT, Stage::Transfer));
    assert_eq!(first.flags(), CqeFlags::MORE);
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(1))));
    let cqes = reap_exactly(&mut setup.ring, 2);
    assert_eq!((cqes[0].user_data(), cqes[0].res(), cqes[0].flags()), (1, 0, CqeFlags::NOTIF));
    assert_eq!(outcome(&cqes[1]), (2, 0, Stage::Done), "a hard link's follower starts at NOTIF");
    setup.ours.unregister().unwrap();
}

#[test]
fn chains_and_drains_take_it_as_one() {
    const L: EntryFlags = EntryFlags::IO_LINK;
    let mut setup = Setup::simulated(32, Sim::new(9));
    let good = |setup: &Setup, n| Readv::new(parts(setup, 0, 100)).build().user_data(n);
    let mut list = parts(&setup, 0, 100);
    list[50] = bad(&setup, 0);
    let chain = vec![
        good(&setup, 1).flags(L),
        good(&setup, 2).flags(EntryFlags::IO_DRAIN | EntryFlags::CQE_SKIP_SUCCESS),
        Readv::new(list).build().user_data(3).flags(L),
        good(&setup, 4),
    ];
    setup.ring.submission().push_chain(chain).unwrap();
    let got: Vec<_> = setup.reap(3).iter().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    assert_eq!(got, [(1, 6400), (3, -errno::EFAULT), (4, -errno::ECANCELED)]);
    setup.ours.unregister().unwrap();
}

#[test]
fn closing_a_ring_issues_no_further_part() {
    let sim = Sim::new(10).delay(same(500));
    let probe = sim.probe();
    let mut setup = Setup::simulated(64, sim);
    setup.ring = Ring::builder().grace(LIMIT).build(64, &setup.engine).unwrap();
    partly_issued(&mut setup, |entry| entry);
    setup.ring.submit().unwrap();
    issued(&probe, 256);
    let Setup { ring, ours, .. } = setup;
    drop(ring);
    assert_eq!(probe.issued(), 256);
    // The grace time was long enough for the transfers.
    ours.unregister().unwrap();
}

#[test]
fn a_panic_in_the_driver_ends_it_once() {
    let mut setup = Setup::simulated(16, Sim::new(11).delay(same(5000)).panic_at(100));
    // 64 are taken with the first offer, the panic comes with the second.
    setup.push(Readv::new(parts(&setup, 0, 128)).build().user_data(1));
    setup.push(Readv::new(parts(&setup, 0, 128)).build().user_data(2));
    let mut got: Vec<_> = setup.reap(2).iter().map(|cqe| (outcome(cqe), cqe.flags())).collect();
    got.sort_by_key(|(outcome, _)| outcome.0);
    let dead = |n| (n, -errno::EOWNERDEAD, Stage::Shutdown);
    assert_eq!(got, [(dead(1), CqeFlags::UNQUIET), (dead(2), CqeFlags::empty())]);
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(1))));
    assert_eq!(setup.refused(Readv::new(parts(&setup, 0, 2)).build()), Refusal::PollerDead);
}

/// Random entries on a transport that fails, lingers and takes what it likes. Every entry ends once; what succeeded has all
/// of its bytes, and after its last completion nothing touches an entry's local ranges.
#[test]
fn every_entry_ends_once_and_leaves_its_ranges_alone() {
    for seed in 0..20 {
        println!("seed {seed}");
        one_program(seed);
    }
}

/// What an entry may use of the local region.
const EACH: usize = 128 * 64;

fn one_program(seed: u64) {
    const ENTRIES: usize = 120;
    let sim =
        Sim::new(seed).delay(Duration::ZERO..Duration::from_micros(300)).failures(3).unquiet(3).partial_submits(500);
    let mut setup = Setup::simulated(64, sim);
    number(&setup.theirs);
    let pool = setup.engine.register(Region::alloc(ENTRIES * EACH).unwrap()).unwrap();
    let mut rng = Rng(seed);
    let mut sources: Vec<Vec<(usize, usize, usize)>> = Vec::new();
    let (mut mores, mut ended) = (vec![false; ENTRIES], vec![0; ENTRIES]);
    let (mut left, mut failures) = (ENTRIES, 0);
    while left > 0 {
        while sources.len() < ENTRIES {
            let n = sources.len();
            let list: Vec<_> =
                (0..rng.below(129)).map(|at| (n * EACH + at * 64, rng.below(1 << 19), rng.below(65))).collect();
            let entry = Readv::new(list.iter().map(|&(to, from, len)| {
                (pool.slice(to..to + len).unwrap(), setup.peer.at(setup.theirs.address() + from as u64))
            }));
            let mut entry = entry.build().user_data(n as u64);
            if rng.below(10) == 0 {
                entry = entry.transfer_limit(Duration::from_micros(rng.below(400) as u64));
            }
            match setup.ring.submission().push(entry) {
                Ok(()) => sources.push(list),
                Err(refused) => {
                    let reason = refused.reason;
                    assert!(
                        matches!(
                            reason,
                            Refusal::Full { .. } | Refusal::NoPartList { .. } | Refusal::NoSideBlock { .. }
                        ),
                        "seed {seed}: {reason}"
                    );
                    break;
                }
            }
        }
        setup.ring.submit().unwrap();
        if rng.below(4) == 0 {
            let victim = rng.below(ENTRIES) as u64;
            setup.ring.controller().cancel(Cancel::user_data(victim).detach()).unwrap();
        }
        setup.ring.wait_timeout(1, LIMIT).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        for cqe in setup.ring.completion() {
            let n = cqe.user_data() as usize;
            assert_eq!(ended[n], 0, "seed {seed}: {cqe:?} came after the last of its entry");
            assert_eq!(cqe.flags().contains(CqeFlags::NOTIF), mores[n], "seed {seed}: {cqe:?}");
            if cqe.flags().contains(CqeFlags::MORE) {
                assert!(cqe.res() < 0 && !mores[n], "seed {seed}: {cqe:?}");
                mores[n] = true;
                continue;
            }
            ended[n] += 1;
            left -= 1;
            if cqe.res() < 0 || mores[n] {
                failures += 1;
                let known = [-errno::EIO, -errno::ETIMEDOUT, -errno::ECANCELED, -errno::ETIME, 0];
                assert!(known.contains(&cqe.res()), "seed {seed}: {cqe:?}");
            } else {
                let total: usize = sources[n].iter().map(|&(_, _, len)| len).sum();
                assert_eq!(cqe.result(), Ok(total as u32), "seed {seed}: entry {n}");
                for &(to, from, len) in &sources[n] {
                    assert_eq!(bytes(&pool, to, len), numbered(from, len), "seed {seed}: entry {n}");
                }
            }
            pool.write_at(n * EACH, &[0xaa; EACH]).unwrap();
        }
    }
    assert!(failures > 0 && mores.contains(&true), "seed {seed}: no fault was injected");
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(bytes(&pool, 0, pool.len()), vec![0xaa; pool.len()], "seed {seed}: a range was touched later");
    pool.unregister().unwrap();
}

/// 100,000 parts from four threads through a ring with few part lists.
#[test]
fn many_parts_from_many_threads() {
    const THREADS: usize = 4;
    const ENTRIES: usize = 196;
    let mut setup = Setup::loopback(64);
    number(&setup.theirs);
    let pool = setup.engine.register(Region::alloc(THREADS * EACH).unwrap()).unwrap();
    let (mut moved, mut count) = (0, 0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let mut submitter = setup.ring.submitter();
            let (pool, peer, base) = (&pool, &setup.peer, setup.theirs.address());
            scope.spawn(move || {
                for n in 0..ENTRIES {
                    let pages = (0..128u32).map(|at| (at, (at + n as u32) % 4096));
                    let local = pool.slice(thread * EACH..(thread + 1) * EACH).unwrap();
                    let mut entry = ReadPages::new(local, peer.at(base), 64, pages).build();
                    loop {
                        match submitter.push(entry) {
                            Ok(()) => break,
                            Err(refused) => {
                                let full = Refusal::Full { capacity: 64 };
                                assert!([full, Refusal::NoPartList { count: 8 }].contains(&refused.reason));
                                entry = refused.entry;
                                std::thread::yield_now();
                            }
                        }
                    }
                    submitter.submit().unwrap();
                }
            });
        }
        while count < THREADS * ENTRIES {
            setup.ring.wait_timeout(1, LIMIT).unwrap();
            for cqe in setup.ring.completion() {
                moved += cqe.result().unwrap() as usize;
                count += 1;
            }
        }
    });
    assert_eq!(moved, THREADS * ENTRIES * EACH);
    assert_eq!(count * 128, 100_352);
    pool.unregister().unwrap();
    // The lists are all back.
    for _ in 0..8 {
        setup.push(Readv::new(parts(&setup, 0, 1)).build());
    }
    assert_eq!(setup.reap(8).len(), 8);
}

/// A plain entry behind a vectored one, and both between others, keep the order in which they became ready.
#[test]
fn parts_keep_their_entries_place_in_the_order() {
    let mut setup = Setup::loopback(64);
    for n in 0..20 {
        let entry = match n % 3 {
            0 => Read::new(setup.ours.slice(0..64).unwrap(), setup.peer.at(setup.theirs.address())).build(),
            _ => Readv::new(parts(&setup, 0, if n % 3 == 1 { 128 } else { 100 })).build(),
        };
        match setup.ring.submission().push(entry.user_data(n)) {
            Ok(()) => {}
            Err(refused) => {
                assert_eq!(refused.reason, Refusal::NoPartList { count: 8 });
                setup.push(Nop::new().build().user_data(n));
            }
        }
    }
    let cqes = setup.reap(20);
    let transfers: Vec<_> = cqes.iter().filter(|cqe| cqe.res() > 0).map(Cqe::user_data).collect();
    assert!(transfers.is_sorted() && transfers.len() >= 15, "{transfers:?}");
}
