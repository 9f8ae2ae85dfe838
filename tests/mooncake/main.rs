//! The Mooncake transport on a real engine over TCP, with peers in other processes.
#![cfg(feature = "mooncake")]

mod adopted;
#[path = "../common/children.rs"]
mod children;
mod faults;
mod memory;
mod merging;
mod peer;
mod process;
mod restart;
mod results;
mod sick;
mod stats;
mod store;
mod vectored;

use moonring::{Region, Ring, Stage, mooncake, opcode};
use peer::{LIMIT, Peer, alone, engine, fill, matching};

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_peer_answers_and_ends_with_its_parent() {
    if peer::serve() {
        return;
    }
    let _alone = alone();
    let mut peer = Peer::start(4096);
    peer.fill(1, 0, 4096);
    assert_eq!(peer.matching(1, 0, 4096), 4096);
    assert!(peer.matching(2, 0, 4096) < 4096);
    assert!(peer.ends_when_told(LIMIT));
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn data_moves_both_ways() {
    let _alone = alone();
    const LEN: usize = 4 << 20;
    let mut peer = Peer::start(LEN);
    let engine = engine();
    let region = engine.register(Region::alloc(LEN).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(64, &engine).unwrap();
    // Both size classes in one submit, and odd places and lengths.
    let ranges = [0..1, 4096..8192, 8193..70_001, 100_000..165_536, 165_537..1_200_000, 2 << 20..LEN];

    peer.fill(1, 0, LEN);
    fill(&region, 2, 0, LEN);
    for (i, range) in ranges.iter().enumerate() {
        let remote = segment.slice(&peer.info, range.start as u64, range.len() as u64).unwrap();
        let read = opcode::Read::new(region.slice(range.clone()).unwrap(), remote);
        ring.submission().push(read.build().user_data(i as u64)).unwrap();
    }
    ring.submit().unwrap();
    assert_eq!(ring.wait_timeout(ranges.len(), LIMIT), Ok(ranges.len()));
    let mut seen = 0;
    for cqe in ring.completion() {
        let range = &ranges[cqe.user_data() as usize];
        assert_eq!((cqe.result(), cqe.stage()), (Ok(range.len() as u32), Stage::Done), "{range:?}");
        seen |= 1 << cqe.user_data();
    }
    assert_eq!(seen, (1 << ranges.len()) - 1);
    for range in &ranges {
        assert_eq!(matching(&region, 1, range.start, range.len()), range.len(), "{range:?}");
    }
    assert_eq!(matching(&region, 2, 1, 4095), 4095, "bytes between the ranges");

    fill(&region, 3, 0, LEN);
    for range in &ranges {
        let remote = segment.slice(&peer.info, range.start as u64, range.len() as u64).unwrap();
        ring.submission().push(opcode::Write::new(region.slice(range.clone()).unwrap(), remote).build()).unwrap();
    }
    ring.submit().unwrap();
    assert_eq!(ring.wait_timeout(ranges.len(), LIMIT), Ok(ranges.len()));
    for cqe in ring.completion() {
        assert_eq!(cqe.stage(), Stage::Done, "{cqe:?}");
    }
    for range in &ranges {
        assert_eq!(peer.matching(3, range.start, range.len()), range.len(), "{range:?}");
    }
    assert_eq!(peer.matching(1, 1, 4095), 4095, "bytes between the ranges");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_protocol_that_the_machine_lacks_is_an_error() {
    // In a process of its own: Mooncake looks for network cards with libraries that may do anything.
    if !peer::rerun("a_protocol_that_the_machine_lacks_is_an_error", &[]) {
        return;
    }
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|cards| cards.count() > 0) {
        mooncake::builder("127.0.0.1").protocol(mooncake::Protocol::Rdma).build().unwrap();
    } else {
        let builder = mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal);
        let error = builder.protocol(mooncake::Protocol::Rdma).build().unwrap_err();
        assert!(error.to_string().contains("rdma"), "{error}");
    }
    let builder = mooncake::builder("127.0.0.1").metadata(mooncake::Metadata::Redis("redis://127.0.0.1:1".into()));
    assert!(matches!(builder.build(), Err(mooncake::BuildError::NotInWheel { .. })));
    let builder = mooncake::builder("127.0.0.1").metadata(mooncake::Metadata::Http("http://127.0.0.1:1/x".into()));
    let error = builder.build().unwrap_err();
    assert!(error.to_string().contains("http://127.0.0.1:1/x"), "{error}");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_forked_child_can_drop_the_engine_and_use_it_for_nothing() {
    let _alone = alone();
    let engine = engine();
    let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
    region.write_at(0, b"parent").unwrap();
    // SAFETY: the child allocates, which is allowed in glibc after a fork, drops handles and ends without running any of
    // the test harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused = engine.register(Region::alloc(4096).unwrap()).is_err();
        drop((region, engine));
        // SAFETY: as above.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) }
    }
    let status = children::wait_for(child);
    assert!(status.success(), "the child hung, crashed or used its parent's engine");
    let mut bytes = [0; 6];
    region.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"parent");
    region.unregister().unwrap();
}
