//! Neighbours merged into one request to a real engine.

use moonring::code::errno;
use moonring::{Entry, Region, RegionInfo, Ring, Stage, opcode};

use crate::peer::{LIMIT, Peer, alone, engine, fill, matching};

const PAGE: usize = 4096;

#[test]
#[ignore = "needs cargo xtask setup"]
fn neighbours_move_whole_up_and_down_and_nothing_between_them() {
    let _alone = alone();
    const PAGES: usize = 4096;
    let mut peer = Peer::start(PAGES * PAGE);
    let engine = engine();
    let region = engine.register(Region::alloc(PAGES * PAGE).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(PAGES as u32, &engine).unwrap();
    let info = peer.info.clone();
    let read = |page: usize, info: &RegionInfo| {
        let remote = segment.slice(info, (page * PAGE) as u64, PAGE as u64).unwrap();
        opcode::Read::new(region.slice(page * PAGE..(page + 1) * PAGE).unwrap(), remote).build().user_data(page as u64)
    };
    let write = |page: usize| {
        let remote = segment.slice(&info, (page * PAGE) as u64, PAGE as u64).unwrap();
        opcode::Write::new(region.slice(page * PAGE..(page + 1) * PAGE).unwrap(), remote).build().user_data(page as u64)
    };
    let mut go = |entries: Vec<Entry>| {
        let count = entries.len();
        entries.into_iter().for_each(|entry| ring.submission().push(entry).unwrap());
        ring.submit().unwrap();
        assert_eq!(ring.wait_timeout(count, LIMIT), Ok(count));
        let mut seen: Vec<_> =
            ring.completion().map(|cqe| (cqe.user_data() as usize, cqe.res(), cqe.stage())).collect();
        seen.sort_unstable_by_key(|&(page, ..)| page);
        seen
    };
    let ok = |pages: Vec<usize>| pages.into_iter().map(|page| (page, PAGE as i32, Stage::Done)).collect::<Vec<_>>();

    peer.fill(1, 0, PAGES * PAGE);
    assert_eq!(go((0..PAGES).map(|page| read(page, &info)).collect()), ok((0..PAGES).collect()));
    assert_eq!(matching(&region, 1, 0, PAGES * PAGE), PAGES * PAGE);

    // Down, with a gap at every 16th page.
    let gap = |page: &usize| page % 16 == 15;
    let pages: Vec<usize> = (0..PAGES).filter(|page| !gap(page)).collect();
    fill(&region, 2, 0, PAGES * PAGE);
    assert_eq!(go(pages.iter().rev().map(|&page| write(page)).collect()), ok(pages.clone()));
    assert_eq!(peer.matching(2, 0, PAGES * PAGE), peer_expected(&pages, PAGES));

    // What the peer has not registered is declared too: the pages that it has come all the same.
    let longer = RegionInfo { len: info.len + (64 << 20), ..info.clone() };
    peer.fill(3, 0, PAGES * PAGE);
    let beyond = |page: usize| {
        let remote = segment.slice(&longer, (page * PAGE) as u64, PAGE as u64).unwrap();
        let local = (page - PAGES / 2) * PAGE;
        opcode::Read::new(region.slice(local..local + PAGE).unwrap(), remote).build().user_data(page as u64)
    };
    let seen = go((PAGES - 32..PAGES + 2).map(beyond).collect());
    let (inside, outside) = seen.split_at(32);
    assert_eq!(inside, ok((PAGES - 32..PAGES).collect()));
    assert!(outside.iter().all(|&(_, res, at)| (res, at) == (-errno::EIO, Stage::Transfer)), "{outside:?}");
}

/// The bytes of so many pages that match the pattern which `written` pages have, and the others have not: their pattern is
/// another's, which agrees in no byte.
fn peer_expected(written: &[usize], pages: usize) -> usize {
    assert!(written.len() < pages);
    written.len() * PAGE
}
