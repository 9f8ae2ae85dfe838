//! A Store beside the peers of a real engine, in one ring and one chain.

use std::path::PathBuf;

use moonring::mooncake::LogLevel;
use moonring::{EntryFlags, Region, Ring, opcode, store};
use store_master::Master;

use crate::peer::{LIMIT, Peer, alone, engine, fill, matching};

/// The same pages are registered with the engine and with the Store: out of the Store to the peer, from the peer into the
/// Store, with a Read of other pages meanwhile.
#[test]
#[ignore = "needs cargo xtask setup"]
fn a_chain_goes_through_the_store_and_a_peer() {
    const PAGE: usize = 64 << 10;
    let _alone = alone();
    let mut peer = Peer::start(4 * PAGE);
    let engine = engine();
    let pages = engine.register(Region::alloc(8 * PAGE).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let wheel: PathBuf = mooncake_sys::StoreApi::load().unwrap().path().ancestors().nth(2).unwrap().into();
    let master = Master::start(&wheel, &[]).unwrap();
    let builder = store::builder("127.0.0.1", master.address()).segment_bytes(16 << 20).log_level(LogLevel::Fatal);
    let client = builder.limit(LIMIT).build(&engine).unwrap_or_else(|error| panic!("{error}"));
    client.register(&pages).unwrap();
    let mut ring = Ring::builder().build(64, &engine).unwrap();

    let local = |page: usize| pages.slice(page * PAGE..(page + 1) * PAGE).unwrap();
    let remote = |page: usize| segment.slice(&peer.info, (page * PAGE) as u64, PAGE as u64).unwrap();
    let link = EntryFlags::IO_LINK;
    fill(&pages, 1, 0, PAGE);
    let chain = vec![
        opcode::Put::new(&client, "a", local(0)).build().flags(link),
        opcode::Get::new(&client, "a", local(1)).build().flags(link),
        opcode::Write::new(local(1), remote(0)).build().flags(link),
        opcode::Read::new(local(2), remote(0)).build().flags(link),
        opcode::Put::new(&client, "b", local(2)).build().flags(link),
        opcode::Get::new(&client, "b", local(3)).build(),
    ];
    ring.submission().push_chain(chain).unwrap();
    ring.submission().push(opcode::Read::new(local(4), remote(1)).build()).unwrap();
    ring.submit().unwrap();
    assert_eq!(ring.wait_timeout(7, LIMIT), Ok(7));
    for cqe in ring.completion() {
        assert_eq!(cqe.result(), Ok(PAGE as u32), "{cqe:?}");
    }
    for page in 1..4 {
        let mut bytes = vec![0; PAGE];
        let mut first = vec![0; PAGE];
        pages.read_at(page * PAGE, &mut bytes).unwrap();
        pages.read_at(0, &mut first).unwrap();
        assert!(bytes == first, "page {page}");
    }
    assert_eq!(matching(&pages, 1, 0, PAGE), PAGE);
    assert_eq!(peer.matching(1, 0, PAGE), PAGE);

    drop(ring);
    client.unregister(&pages).unwrap();
    pages.unregister().unwrap();
    client.close(LIMIT).unwrap();
}
