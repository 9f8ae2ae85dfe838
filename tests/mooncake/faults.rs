//! What is left after faults: the right bytes, other peers that are well, and no descriptor, thread or memory.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use moonring::code::errno;
use moonring::{OpenError, Refusal, Region, Ring, Stage, opcode};

use crate::peer::{LIMIT, Peer, alone, engine, fill, matching, rerun};

const PAGE: usize = 4096;

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_new_peer_takes_over_from_a_killed_one_under_a_new_name() {
    let _alone = alone();
    let (old_peer, mut other) = (Peer::start(PAGE), Peer::start(PAGE));
    let engine = engine();
    let region = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    fill(&region, 1, 0, PAGE);
    let [old, well] = [&old_peer, &other].map(|peer| engine.open_segment(&peer.info.segment, LIMIT).unwrap());
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    let mut write = |segment: &moonring::Segment, address| {
        let write = opcode::Write::new(region.slice(..).unwrap(), segment.at(address));
        ring.submission().push(write.build()).unwrap();
        ring.submit().unwrap();
        assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1));
        ring.completion().next().unwrap()
    };
    assert_eq!(write(&old, old_peer.info.address).result(), Ok(PAGE as u32));
    let old_address = old_peer.info.address;
    drop(old_peer);
    let mut new_peer = Peer::start(PAGE);
    new_peer.fill(2, 0, PAGE);
    let cqe = write(&old, old_address);
    assert_eq!((cqe.res(), cqe.stage()), (-errno::EIO, Stage::Transfer), "{cqe:?}");
    assert_eq!(new_peer.matching(2, 0, PAGE), PAGE);
    let new = engine.open_segment(&new_peer.info.segment, LIMIT).unwrap();
    assert_eq!(write(&new, new_peer.info.address).result(), Ok(PAGE as u32));
    assert_eq!(new_peer.matching(1, 0, PAGE), PAGE);
    assert_eq!(write(&well, other.info.address).result(), Ok(PAGE as u32));
    assert_eq!(other.matching(1, 0, PAGE), PAGE);
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_listener_that_never_accepts_ends_the_open_at_its_limit_and_holds_up_nobody() {
    let _alone = alone();
    let (peer, other) = (Peer::start(PAGE), Peer::start(PAGE));
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = silent.local_addr().unwrap().to_string();
    let engine = engine();
    let region = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    let limit = Duration::from_millis(500);
    let entries = std::thread::scope(|scope| {
        let open = scope.spawn(|| {
            let start = Instant::now();
            (engine.open_segment(&name, limit), start.elapsed())
        });
        let mut entries = 0;
        while !open.is_finished() {
            let read = opcode::Read::new(region.slice(..).unwrap(), segment.at(peer.info.address));
            ring.submission().push(read.build()).unwrap();
            ring.submit().unwrap();
            assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1));
            assert_eq!(ring.completion().next().unwrap().result(), Ok(PAGE as u32));
            entries += 1;
        }
        let (result, took) = open.join().unwrap();
        let error = result.unwrap_err();
        assert!(matches!(&error, OpenError::Limit { name: of, .. } if *of == name), "{error}");
        assert!(took >= limit && took < LIMIT, "{took:?}");
        entries
    });
    assert!(entries > 10, "{entries} entries ended while the open waited");
    // The look-up goes on, and whoever asks again joins it; others are looked up beside it.
    engine.open_segment(&name, Duration::from_millis(10)).unwrap_err();
    engine.open_segment(&other.info.segment, LIMIT).unwrap();
    drop(silent);
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn reads_from_a_peer_that_is_stopped_among_them_have_the_right_bytes() {
    let _alone = alone();
    const LEN: usize = 16 << 20;
    const READS: usize = 4;
    let mut peer = Peer::start(READS * LEN);
    peer.fill(1, 0, READS * LEN);
    let engine = engine();
    let region = engine.register(Region::alloc(READS * LEN).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(READS as u32, &engine).unwrap();
    // The stop may come late. One among a few comes while bytes are missing that no socket holds.
    let stopped_midway = (0..10).any(|_| {
        fill(&region, 2, 0, READS * LEN);
        for at in (0..READS).map(|read| read * LEN) {
            let read =
                opcode::Read::new(region.slice(at..at + LEN).unwrap(), segment.at(peer.info.address + at as u64));
            ring.submission().push(read.build()).unwrap();
        }
        ring.submit().unwrap();
        // The first bytes are here.
        let end = Instant::now() + LIMIT;
        while (0..READS).all(|read| matching(&region, 1, read * LEN, PAGE) < PAGE) {
            assert!(Instant::now() < end);
        }
        peer.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(300));
        let later = ring.completion().len();
        peer.signal(libc::SIGCONT);
        assert_eq!(ring.wait_timeout(READS, LIMIT), Ok(READS));
        for cqe in ring.completion() {
            assert_eq!(cqe.result(), Ok(LEN as u32), "{cqe:?}");
        }
        assert_eq!(matching(&region, 1, 0, READS * LEN), READS * LEN);
        later < READS
    });
    assert!(stopped_midway);
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn forty_thousand_small_transfers_to_two_peers_all_arrive() {
    let _alone = alone();
    const TRANSFERS: usize = 40_000;
    const PAGES: usize = 1_000;
    let mut peers = [Peer::start(PAGES * PAGE), Peer::start(PAGES * PAGE)];
    let engine = engine();
    // The first pages are written to both peers; those behind are read, from one and from the other.
    let region = engine.register(Region::alloc(3 * PAGES * PAGE).unwrap()).unwrap();
    fill(&region, 1, 0, PAGES * PAGE);
    let segments = [0, 1].map(|at: usize| engine.open_segment(&peers[at].info.segment, LIMIT).unwrap());
    let mut ring = Ring::builder().build(1024, &engine).unwrap();
    let (mut pushed, mut reaped) = (0, 0);
    let mut seen = vec![false; TRANSFERS];
    while reaped < TRANSFERS {
        // Reads come when every write has ended: then they bring what was written.
        while pushed < TRANSFERS && (pushed < TRANSFERS / 2 || reaped >= TRANSFERS / 2) {
            let (to, page, round) = (pushed % 2, pushed / 2 % PAGES, pushed / (TRANSFERS / 2));
            let remote = segments[to].at(peers[to].info.address + (page * PAGE) as u64);
            let local = if round == 0 { page } else { (1 + to) * PAGES + page } * PAGE;
            let local = region.slice(local..local + PAGE).unwrap();
            let entry = match round {
                0 => opcode::Write::new(local, remote).build(),
                _ => opcode::Read::new(local, remote).build(),
            };
            match ring.submission().push(entry.user_data(pushed as u64)) {
                Ok(()) => pushed += 1,
                Err(refused) => {
                    let full = matches!(refused.reason, Refusal::Full { .. } | Refusal::SegmentShare { .. });
                    assert!(full, "{refused}");
                    break;
                }
            }
        }
        ring.submit().unwrap();
        ring.wait_timeout(1, LIMIT).unwrap();
        for cqe in ring.completion() {
            assert_eq!(cqe.result(), Ok(PAGE as u32), "{cqe:?}");
            assert!(!std::mem::replace(&mut seen[cqe.user_data() as usize], true), "{cqe:?} came twice");
            reaped += 1;
        }
    }
    for (to, peer) in peers.iter_mut().enumerate() {
        assert_eq!(peer.matching(1, 0, PAGES * PAGE), PAGES * PAGE);
        let mut bytes = [vec![0; PAGES * PAGE], vec![0; PAGES * PAGE]];
        region.read_at(0, &mut bytes[0]).unwrap();
        region.read_at((1 + to) * PAGES * PAGE, &mut bytes[1]).unwrap();
        assert!(bytes[0] == bytes[1], "what was read from peer {to} is not what was written");
    }
}

/// Descriptors, threads, and memory in KiB.
fn possessions() -> [usize; 3] {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    [std::fs::read_dir("/proc/self/fd").unwrap().count(), number("Threads:"), number("VmRSS:")]
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn descriptors_threads_and_memory_return_to_where_they_began() {
    // In a process of its own: other tests have descriptors and threads, too.
    if !rerun("faults::descriptors_threads_and_memory_return_to_where_they_began", &[]) {
        return;
    }
    const LEN: usize = 4 << 20;
    const MOVED: usize = 256 << 10;
    const ENTRIES: u64 = 64;
    let round = |fault: &str| {
        let peers = [Peer::start(LEN), Peer::start(LEN)];
        let engine = engine();
        let region = engine.register(Region::alloc(LEN).unwrap()).unwrap();
        // All of it is in memory.
        region.write_at(0, &vec![1; LEN]).unwrap();
        let segments = [0, 1].map(|at: usize| engine.open_segment(&peers[at].info.segment, LIMIT).unwrap());
        let mut ring = Ring::builder().build(2 * ENTRIES as u32, &engine).unwrap();
        let push = |ring: &mut Ring, to: usize, address: u64| {
            for number in 0..ENTRIES {
                let read = opcode::Read::new(region.slice(0..MOVED).unwrap(), segments[to].at(address));
                ring.submission().push(read.build().user_data(number)).unwrap();
            }
            ring.submit().unwrap();
        };
        push(&mut ring, 0, peers[0].info.address);
        assert_eq!(ring.wait_timeout(ENTRIES as usize, LIMIT), Ok(ENTRIES as usize));
        assert!(ring.completion().all(|cqe| cqe.result() == Ok(MOVED as u32)));
        push(&mut ring, 0, if fault == "rejects" { 8 } else { peers[0].info.address });
        match fault {
            "is killed" => peers[0].signal(libc::SIGKILL),
            "is stopped" => peers[0].signal(libc::SIGSTOP),
            _ => {}
        }
        push(&mut ring, 1, peers[1].info.address);
        drop((region, segments, engine));
        // Some have ended, some fail, and a stopped peer's end with the engine, whose last user the ring is.
        let report = ring.close(Duration::from_secs(3));
        let ends = report.completions.len() as u64;
        assert_eq!((ends, report.unquiet, report.finished), (2 * ENTRIES, 0, true), "{fault}: {report:?}");
    };
    // What is loaded and allocated once is there afterwards.
    for fault in ["is well", "is killed", "is stopped", "rejects"] {
        round(fault);
    }
    let [descriptors, threads, memory] = possessions();
    for fault in ["is killed", "is stopped", "is killed", "is stopped"] {
        round(fault);
    }
    let end = Instant::now() + LIMIT;
    let now = loop {
        let now = possessions();
        if now[0] <= descriptors && now[1] <= threads || Instant::now() > end {
            break now;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(now[0] <= descriptors && now[1] <= threads, "{now:?} after [{descriptors}, {threads}, {memory}]");
    // Two regions that were not given back would be more than that.
    assert!(now[2] <= memory + 6 * 1024, "{now:?} after [{descriptors}, {threads}, {memory}]");
}
