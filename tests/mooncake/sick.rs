//! A peer that is stopped, killed or unreachable is its own problem.

use std::time::{Duration, Instant};

use moonring::code::errno;
use moonring::{CqeFlags, OpenError, Region, Registered, Ring, Segment, Stage, UnregisterError, opcode};

use crate::peer::{LIMIT, Peer, alone, engine, fill, issued, rerun};

const PAGE: usize = 4096;
const BIG: usize = 8 << 20;
/// Entries of the sick peer have user data from here on.
const SICK: u64 = 1 << 32;

/// Two peers on one ring: the one that gets sick, and the other.
struct Two {
    sick: Peer,
    well: Peer,
    region: Registered,
    sick_segment: Segment,
    well_segment: Segment,
    ring: Ring,
}

impl Two {
    fn new() -> Two {
        let (sick, well) = (Peer::start(BIG), Peer::start(BIG));
        let engine = engine();
        let region = engine.register(Region::alloc(BIG).unwrap()).unwrap();
        fill(&region, 1, 0, BIG);
        let sick_segment = engine.open_segment(&sick.info.segment, LIMIT).unwrap();
        let well_segment = engine.open_segment(&well.info.segment, LIMIT).unwrap();
        let ring = Ring::builder().build(256, &engine).unwrap();
        let mut two = Two { sick, well, region, sick_segment, well_segment, ring };
        // Connections are there.
        assert_eq!(two.write_well(4), 0);
        two.push_sick(PAGE, 0);
        assert_eq!(two.ring.wait_timeout(1, LIMIT), Ok(1));
        assert_eq!(two.ring.completion().next().unwrap().result(), Ok(PAGE as u32));
        two
    }

    fn push_sick(&mut self, len: usize, number: u64) {
        let write =
            opcode::Write::new(self.region.slice(0..len).unwrap(), self.sick_segment.at(self.sick.info.address));
        self.ring.submission().push(write.build().user_data(SICK + number)).unwrap();
        self.ring.submit().unwrap();
    }

    /// Writes pages to the other peer, one after the other; how many completions of the sick one came meanwhile.
    fn write_well(&mut self, count: usize) -> usize {
        let mut others = 0;
        for i in 0..count {
            let remote = self.well_segment.at(self.well.info.address + (i % 8 * PAGE) as u64);
            let write = opcode::Write::new(self.region.slice(0..PAGE).unwrap(), remote);
            self.ring.submission().push(write.build().user_data(i as u64)).unwrap();
            self.ring.submit().unwrap();
            let mut done = false;
            while !done {
                self.ring.wait_timeout(1, LIMIT).unwrap();
                for cqe in self.ring.completion() {
                    if cqe.user_data() >= SICK {
                        others += 1;
                    } else {
                        assert_eq!((cqe.user_data(), cqe.result()), (i as u64, Ok(PAGE as u32)), "{cqe:?}");
                        done = true;
                    }
                }
            }
        }
        others
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn h2_a_killed_peer_fails_its_own_entries_only() {
    let _alone = alone();
    let mut two = Two::new();
    for number in 0..32 {
        two.push_sick(BIG, number);
    }
    two.sick.signal(libc::SIGKILL);
    let ended = two.write_well(100);
    let mut failed = 0;
    let mut left = 32 - ended;
    while left > 0 {
        two.ring.wait_timeout(1, LIMIT).unwrap();
        for cqe in two.ring.completion() {
            // What was acknowledged before the kill is good.
            if cqe.res() < 0 {
                assert_eq!((cqe.res(), cqe.stage()), (-errno::EIO, Stage::Transfer), "{cqe:?}");
                assert!(!cqe.flags().contains(CqeFlags::MORE));
                failed += 1;
            }
            left -= 1;
        }
    }
    assert!(failed + ended > 0, "the kill came too late to be seen");
    // A new entry to the dead peer fails too, and others go on.
    two.push_sick(PAGE, 99);
    two.ring.wait_timeout(1, LIMIT).unwrap();
    let cqe = two.ring.completion().next().unwrap();
    assert_eq!((cqe.user_data(), cqe.res()), (SICK + 99, -errno::EIO), "{cqe:?}");
    assert_eq!(two.write_well(100), 0);
    two.region.unregister().unwrap();
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn c1_g4_a_stopped_peer_holds_up_nobody_and_finishes_when_continued() {
    let _alone = alone();
    let mut two = Two::new();
    two.sick.signal(libc::SIGSTOP);
    for number in 0..32 {
        two.push_sick(if number % 2 == 0 { PAGE } else { BIG }, number);
    }
    assert_eq!(two.write_well(500), 0, "a stopped peer completes nothing");
    let busy = two.region.unregister().unwrap_err();
    assert!(matches!(busy, UnregisterError::Busy(32)), "{busy}");
    two.sick.signal(libc::SIGCONT);
    assert_eq!(two.ring.wait_timeout(32, LIMIT), Ok(32));
    for cqe in two.ring.completion() {
        assert!(cqe.result().is_ok_and(|bytes| bytes as usize >= PAGE), "{cqe:?}");
    }
    assert_eq!(two.sick.matching(1, 0, BIG), BIG);
    two.region.unregister().unwrap();
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_stopped_peer_holds_up_nobody_without_the_connection_pool_either() {
    // The user's setting stands. Then it takes a group of its own for each request not to connect in the poller.
    if !rerun(
        "sick::a_stopped_peer_holds_up_nobody_without_the_connection_pool_either",
        &[("MC_TCP_ENABLE_CONNECTION_POOL", "0")],
    ) {
        return;
    }
    let mut two = Two::new();
    assert_eq!(std::env::var("MC_TCP_ENABLE_CONNECTION_POOL").as_deref(), Ok("0"));
    two.sick.signal(libc::SIGSTOP);
    for number in 0..32 {
        two.push_sick(PAGE, number);
    }
    assert_eq!(two.write_well(100), 0);
    two.sick.signal(libc::SIGCONT);
    assert_eq!(two.ring.wait_timeout(32, LIMIT), Ok(32));
    for cqe in two.ring.completion() {
        assert_eq!(cqe.result(), Ok(PAGE as u32), "{cqe:?}");
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn e1_the_old_framing_completes_what_a_stopped_peer_has_not_seen() {
    // The control for the tests that say a stopped peer completes nothing: in Mooncake's old protocol it does.
    if !rerun("sick::e1_the_old_framing_completes_what_a_stopped_peer_has_not_seen", &[("MC_TCP_PROTO", "1")]) {
        return;
    }
    let mut two = Two::new();
    two.sick.fill(2, 0, PAGE);
    two.sick.signal(libc::SIGSTOP);
    two.push_sick(PAGE, 0);
    assert_eq!(two.ring.wait_timeout(1, LIMIT), Ok(1));
    assert_eq!(two.ring.completion().next().unwrap().result(), Ok(PAGE as u32));
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn g2_waiting_for_a_stopped_peer_costs_next_to_nothing() {
    let _alone = alone();
    let mut two = Two::new();
    two.sick.signal(libc::SIGSTOP);
    for number in 0..32 {
        two.push_sick(PAGE, number);
    }
    std::thread::sleep(Duration::from_millis(200));
    let before = cpu_time();
    let start = Instant::now();
    assert!(two.ring.wait_timeout(1, Duration::from_secs(2)).is_err());
    let (used, took) = (cpu_time() - before, start.elapsed());
    assert!(used < took / 5, "{used:?} of processor time in {took:?}");
    two.sick.signal(libc::SIGCONT);
    assert_eq!(two.ring.wait_timeout(32, LIMIT), Ok(32));
}

/// What all threads of this process have used.
fn cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills what it is given.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    [usage.ru_utime, usage.ru_stime]
        .map(|time| Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64))
        .iter()
        .sum()
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_peer_that_stays_stopped_fails_its_entries_after_mooncakes_time() {
    if !rerun(
        "sick::a_peer_that_stays_stopped_fails_its_entries_after_mooncakes_time",
        &[("MC_TCP_STATUS_TIMEOUT_SEC", "2")],
    ) {
        return;
    }
    let mut two = Two::new();
    two.sick.signal(libc::SIGSTOP);
    let start = Instant::now();
    for number in 0..4 {
        two.push_sick(PAGE, number);
    }
    let mut ended = 0;
    while ended == 0 {
        assert!(start.elapsed() < LIMIT, "the entries of a stopped peer do not end");
        ended = two.write_well(20);
    }
    assert!(start.elapsed() > Duration::from_millis(1500), "ended after {:?}", start.elapsed());
    while ended < 4 {
        two.ring.wait_timeout(1, LIMIT).unwrap();
        for cqe in two.ring.completion() {
            assert_eq!((cqe.res(), cqe.stage(), cqe.detail()), (-errno::EIO, Stage::Transfer, 6), "{cqe:?}");
            ended += 1;
        }
    }
    // Mooncake has let go of the region: the bytes that still arrive at the peer have left already.
    two.region.unregister().unwrap();
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn dropping_a_ring_is_bounded_while_a_peer_is_stopped() {
    let _alone = alone();
    for last_user in [true, false] {
        let Two { sick, well: _well, region, sick_segment, mut ring, .. } = Two::new();
        sick.signal(libc::SIGSTOP);
        let write = opcode::Write::new(region.slice(..).unwrap(), sick_segment.at(sick.info.address));
        ring.submission().push(write.build()).unwrap();
        ring.submit().unwrap();
        issued(&mut ring);
        let keep = (!last_user).then_some(region);
        let start = Instant::now();
        drop(ring);
        let took = start.elapsed();
        assert!(took < Duration::from_secs(11), "last user {last_user}: {took:?}");
        if let Some(region) = keep {
            // Somebody else uses the engine, so the transfer goes on and the memory stays.
            assert!(matches!(region.unregister(), Err(UnregisterError::Busy(1))));
            let mut byte = [0];
            region.read_at(0, &mut byte).unwrap();
        }
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn opening_a_stopped_peer_returns_at_its_limit() {
    let _alone = alone();
    let (peer, other) = (Peer::start(PAGE), Peer::start(PAGE));
    let engine = engine();
    peer.signal(libc::SIGSTOP);
    let limit = Duration::from_millis(300);
    let start = Instant::now();
    let error = engine.open_segment(&peer.info.segment, limit).unwrap_err();
    let took = start.elapsed();
    assert!(matches!(&error, OpenError::Limit { name, .. } if *name == peer.info.segment), "{error}");
    assert!(took >= limit && took < LIMIT, "{took:?}");
    // The look-up that still runs stands in nobody's way.
    engine.open_segment(&other.info.segment, LIMIT).unwrap();
    let region = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    peer.signal(libc::SIGCONT);
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    ring.submission()
        .push(opcode::Read::new(region.slice(..).unwrap(), segment.at(peer.info.address)).build())
        .unwrap();
    ring.submit().unwrap();
    assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1));
    assert_eq!(ring.completion().next().unwrap().result(), Ok(PAGE as u32));
}
