//! Vectored entries on a real engine.

use moonring::code::errno;
use moonring::{Entry, Region, Ring, Stage, opcode};

use crate::peer::{LIMIT, Peer, alone, engine, fill, matching};

const PAGE: usize = 4096;

#[test]
#[ignore = "needs cargo xtask setup"]
fn pages_and_lists_move_whole_and_a_bad_part_fails_its_entry_only() {
    let _alone = alone();
    const PAGES: usize = 1024;
    const ENTRIES: usize = PAGES / Entry::MAX_PARTS;
    let mut peer = Peer::start(PAGES * PAGE);
    let engine = engine();
    let region = engine.register(Region::alloc(PAGES * PAGE).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(64, &engine).unwrap();
    let info = peer.info.clone();
    let remote = |page: usize| segment.slice(&info, (page * PAGE) as u64, PAGE as u64).unwrap();
    let reap = |ring: &mut Ring, count: usize| {
        ring.submit().unwrap();
        assert_eq!(ring.wait_timeout(count, LIMIT), Ok(count));
        let mut cqes: Vec<_> = ring.completion().collect();
        cqes.sort_by_key(|cqe| cqe.user_data());
        cqes
    };

    // Entry n has every eighth page from the nth on: more parts than a peer has room for, and none next to another.
    let numbers = |n: usize| (n..PAGES).step_by(ENTRIES);
    fill(&region, 1, 0, PAGES * PAGE);
    peer.fill(2, 0, PAGES * PAGE);
    for n in 0..ENTRIES {
        let same = numbers(n).map(|page| (page as u32, page as u32));
        let write = opcode::WritePages::new(region.slice(..).unwrap(), remote(0), PAGE, same);
        ring.submission().push(write.build().user_data(n as u64)).unwrap();
    }
    for (n, cqe) in reap(&mut ring, ENTRIES).iter().enumerate() {
        let got = (cqe.user_data(), cqe.result(), cqe.stage());
        assert_eq!(got, (n as u64, Ok((Entry::MAX_PARTS * PAGE) as u32), Stage::Done));
    }
    assert_eq!(peer.matching(1, 0, PAGES * PAGE), PAGES * PAGE);

    // Back as lists, both size classes in one, and one entry with a part that the peer does not have.
    peer.fill(3, 0, PAGES * PAGE);
    let large = 32 * PAGE;
    for n in 0..4 {
        let first = n * 256;
        let mut list: Vec<_> = (first..first + 100)
            .map(|page| (region.slice(page * PAGE..(page + 1) * PAGE).unwrap(), remote(page)))
            .collect();
        let behind = (first + 100) * PAGE;
        list.push((region.slice(behind..behind + large).unwrap(), segment.at(info.address + behind as u64)));
        if n == 2 {
            list[50].1 = segment.at(info.address + info.len + (1 << 20));
        }
        ring.submission().push(opcode::Readv::new(list).build().user_data(n as u64)).unwrap();
    }
    let len = 132 * PAGE;
    for (n, cqe) in reap(&mut ring, 4).iter().enumerate() {
        if n == 2 {
            assert_eq!((cqe.res(), cqe.stage(), cqe.detail()), (-errno::EIO, Stage::Transfer, 6), "{cqe:?}");
        } else {
            assert_eq!(cqe.result(), Ok(len as u32), "{cqe:?}");
            assert_eq!(matching(&region, 3, n * 256 * PAGE, len), len, "entry {n}");
        }
        assert!(cqe.flags().is_empty(), "{cqe:?}");
    }
    let bad = (512 + 50) * PAGE;
    assert_eq!(matching(&region, 1, bad, PAGE), PAGE, "the bad part changed nothing");
    region.unregister().unwrap();
}
