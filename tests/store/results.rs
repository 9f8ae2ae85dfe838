//! What each entry completes with.

use moonring::code::errno;
use moonring::{Engine, EntryFlags, Refusal, Region, Stage, UnregisterError, fence, opcode, store};

use crate::common::{LIMIT, Setup};
use crate::{PAGE, Shop, failure};

#[test]
fn objects_come_back_and_go() {
    let mut shop = Shop::new(16);
    shop.fill(0, 7);
    assert_eq!(shop.run(shop.exist("a")).result(), Ok(0));
    assert_eq!(shop.run(shop.put("a", 0)).result(), Ok(PAGE as u32));
    assert_eq!(shop.memory.object("a"), Some(vec![7; PAGE]));
    assert_eq!(shop.run(shop.exist("a")).result(), Ok(1));
    let got = shop.run(shop.get("a", 1).user_data(5));
    assert_eq!((got.result(), got.user_data(), got.stage()), (Ok(PAGE as u32), 5, Stage::Done));
    assert_eq!(shop.bytes(1), [7; PAGE]);
    assert_eq!(shop.run(shop.remove("a")).result(), Ok(0));
    assert_eq!(shop.run(shop.exist("a")).result(), Ok(0));
    assert_eq!(failure(&shop.run(shop.remove("a"))), (errno::ENOENT, Stage::Transfer, -704));
}

/// Many slices are one object, and a shorter object leaves the rest alone.
#[test]
fn an_object_has_many_slices() {
    let mut shop = Shop::new(16);
    shop.fill(0, 1);
    shop.fill(1, 2);
    let ours = shop.setup.ours.clone();
    let slices = [10..20, PAGE..PAGE, PAGE + 5..PAGE + 12].map(|range| ours.slice(range).unwrap());
    let put = opcode::Put::vectored(&shop.store, "a", slices).build();
    assert_eq!(shop.run(put).result(), Ok(17));
    let object = [[1; 10].to_vec(), [2; 7].to_vec()].concat();
    assert_eq!(shop.memory.object("a"), Some(object));
    let slices = [8192..8195, 9000..9100].map(|range| ours.slice(range).unwrap());
    let get = opcode::Get::vectored(&shop.store, "a", slices).build();
    assert_eq!(shop.run(get).result(), Ok(17));
    let mut bytes = [0; 15];
    ours.read_at(9000, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0]);
    assert_eq!(
        failure(&shop.run(opcode::Get::vectored(&shop.store, "a", []).build())),
        (errno::EMSGSIZE, Stage::Transfer, 17)
    );
}

/// Every cause has a pair of its own, with Mooncake's number, but for the size where that is what is asked for.
#[test]
fn every_cause_has_its_code() {
    let mut shop = Shop::new(16);
    shop.run(shop.put("a", 0));
    assert_eq!(failure(&shop.run(shop.get("b", 0))), (errno::ENOENT, Stage::Transfer, -704));
    assert_eq!(failure(&shop.run(shop.put("a", 0))), (errno::EEXIST, Stage::Transfer, -705));
    let short = opcode::Get::new(&shop.store, "a", shop.setup.ours.slice(0..100).unwrap()).build();
    assert_eq!(failure(&shop.run(short)), (errno::EMSGSIZE, Stage::Transfer, PAGE as i32));
    let all = opcode::Put::new(&shop.store, "all", shop.setup.ours.slice(..).unwrap()).build();
    assert_eq!(failure(&shop.run(all)), (errno::ENOSPC, Stage::Transfer, -200));
    let others = [
        (-707, errno::EKEYEXPIRED),
        (-703, errno::EAGAIN),
        (-706, errno::EBUSY),
        (-708, errno::EBUSY),
        (-714, errno::EBUSY),
        (-400, errno::EINVAL),
        (-600, errno::EINVAL),
        (-800, errno::EIO),
        (-801, errno::EBADMSG),
        (-900, errno::ECONNRESET),
        (-901, errno::ETIMEDOUT),
        (-1, errno::EREMOTEIO),
        (-12345, errno::EREMOTEIO),
    ];
    for (code, errno) in others {
        shop.memory.fail("c", code);
        for entry in [shop.get("c", 0), shop.put("c", 0), shop.exist("c"), shop.remove("c")] {
            let cqe = shop.run(entry);
            assert_eq!((failure(&cqe), cqe.flags().is_empty()), ((errno, Stage::Transfer, code), true));
        }
    }
}

/// A call that panics fails its keys, not the worker, the poller or the client.
#[test]
fn a_call_that_panics_fails_its_keys() {
    let mut shop = Shop::new(16);
    shop.memory.panic("bad");
    for _ in 0..10 {
        assert_eq!(failure(&shop.run(shop.exist("bad"))), (errno::EPROTO, Stage::Transfer, 0));
    }
    assert_eq!(shop.run(shop.exist("good")).result(), Ok(0));
}

/// Eight keys in one call: each has its own result, and the good ones are whole.
#[test]
fn j1_keys_of_one_call_have_results_of_their_own() {
    let mut shop = Shop::new(32);
    for page in 0..6 {
        shop.fill(page, page as u8 + 1);
        shop.run(shop.put(&page.to_string(), page));
    }
    shop.memory.fail("5", -707);
    shop.occupy();
    let before = shop.memory.calls().len();
    let mut gets: Vec<_> = (0..6).map(|page| shop.get(&page.to_string(), 10 + page).user_data(page as u64)).collect();
    gets.push(shop.get("absent", 17).user_data(6));
    let short = shop.setup.ours.slice(18 * PAGE..18 * PAGE + 1).unwrap();
    gets.push(opcode::Get::new(&shop.store, "0", short).build().user_data(7));
    // The same key, twice in one submit: a call takes each once.
    gets.push(shop.get("1", 19).user_data(8));
    shop.setup.ring.submission().push_chain(gets).unwrap();
    shop.setup.ring.submit().unwrap();
    shop.let_go();
    let mut cqes = shop.setup.reap(13);
    cqes.sort_by_key(|cqe| cqe.user_data());
    let expected = |page: u64| match page {
        5 => Err((errno::EKEYEXPIRED, -707)),
        6 => Err((errno::ENOENT, -704)),
        7 => Err((errno::EMSGSIZE, PAGE as i32)),
        _ => Ok(PAGE as u32),
    };
    for (page, cqe) in (0..9).zip(&cqes) {
        let result = cqe.result().map_err(|error| (error.errno, cqe.detail()));
        assert_eq!((cqe.user_data(), result), (page, expected(page)));
    }
    for page in 0..5 {
        assert_eq!(shop.bytes(10 + page), [page as u8 + 1; PAGE]);
    }
    assert_eq!(shop.bytes(19), [2; PAGE]);
    let calls = &shop.memory.calls()[before..];
    assert_eq!(calls.iter().map(Vec::len).sum::<usize>(), 9);
    let distinct = |call: &Vec<String>| call.iter().collect::<std::collections::HashSet<_>>().len() == call.len();
    assert!(calls.iter().all(distinct), "{calls:?}");
    assert!(calls.len() < 9, "nothing was grouped: {calls:?}");
}

/// The Store is asked for nothing before the fences have signalled, and never if one fails.
#[test]
fn the_store_is_asked_after_the_fences() {
    let mut shop = Shop::new(64);
    let (signaller, fence) = fence::host();
    let (failing, failed) = fence::host();
    for entry in [shop.get("a", 0), shop.put("a", 0), shop.exist("a"), shop.remove("a")] {
        shop.submit(entry.wait(&fence));
    }
    for entry in [shop.get("b", 0), shop.put("b", 0), shop.exist("b"), shop.remove("b")] {
        shop.submit(entry.wait(&failed).wait(&fence));
    }
    shop.setup.push(shop.setup.read(0, 8));
    assert_eq!(shop.setup.reap(1)[0].result(), Ok(8));
    failing.fail(errno::EIO);
    let cqes = shop.setup.reap(4);
    assert!(cqes.iter().all(|cqe| failure(cqe) == (errno::ECANCELED, Stage::Gate, -errno::EIO)), "{cqes:?}");
    assert!(shop.memory.calls().is_empty());
    signaller.signal();
    shop.setup.reap(4);
    let calls = shop.memory.calls();
    assert_eq!(calls.concat(), ["a"; 4], "{calls:?}");
}

/// One ring, one chain, two transports.
#[test]
fn chains_go_from_store_to_segment_and_back() {
    let mut shop = Shop::new(16);
    shop.fill(0, 3);
    shop.run(shop.put("a", 0));
    let link = EntryFlags::IO_LINK;
    let remote = || shop.setup.peer.slice(&shop.setup.theirs.info(), 0, PAGE as u64).unwrap();
    let write = |page| opcode::Write::new(shop.page(page), remote()).build();
    let read = |page| opcode::Read::new(shop.page(page), remote()).build();
    // Out of the Store, to the peer, back from there, into the Store.
    let chain = vec![
        shop.get("a", 1).flags(link),
        write(1).flags(link),
        read(2).flags(link),
        shop.put("b", 2).flags(link),
        opcode::Wait::new().build(),
    ];
    shop.setup.ring.submission().push_chain(chain).unwrap();
    let results: Vec<_> = shop.setup.reap(5).iter().map(|cqe| cqe.result()).collect();
    assert_eq!(results, [Ok(4096), Ok(4096), Ok(4096), Ok(4096), Ok(0)]);
    assert_eq!(shop.memory.object("b"), Some(vec![3; PAGE]));
    // What fails in the Store fails what waits for it.
    let chain = vec![shop.get("absent", 1).flags(link), {
        let remote = shop.setup.peer.slice(&shop.setup.theirs.info(), 0, PAGE as u64).unwrap();
        opcode::Write::new(shop.page(4), remote).build()
    }];
    shop.setup.ring.submission().push_chain(chain).unwrap();
    let cqes = shop.setup.reap(2);
    assert_eq!(failure(&cqes[0]).0, errno::ENOENT);
    assert_eq!(failure(&cqes[1]), (errno::ECANCELED, Stage::Gate, -errno::ENOENT));
    let mut bytes = [0; PAGE];
    shop.setup.theirs.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [3; PAGE], "the Write was not issued");
}

#[test]
fn pushes_are_refused_with_what_is_wrong() {
    let mut shop = Shop::new(16);
    let other = Shop::new(16);
    let ours = shop.setup.ours.clone();
    assert_eq!(shop.setup.refused(other.exist("a")), Refusal::ForeignStore("memory".into()));
    let foreign = opcode::Get::new(&shop.store, "a", other.page(0)).build();
    assert_eq!(shop.setup.refused(foreign), Refusal::ForeignSlice(shop.setup.engine.name().into()));
    for key in ["", "a\0b", &"x".repeat(4097)] {
        assert_eq!(shop.setup.refused(shop.exist(key)), Refusal::Key(key.into()));
        assert_eq!(shop.setup.refused(shop.get(key, 0)), Refusal::Key(key.into()));
    }
    assert_eq!(shop.run(shop.exist(&"x".repeat(4096))).result(), Ok(0));
    let slices = (0..129).map(|_| ours.slice(0..1).unwrap());
    let parts = opcode::Put::vectored(&shop.store, "a", slices).build();
    assert_eq!(shop.setup.refused(parts), Refusal::TooManyParts(129));
    let empty = opcode::Put::new(&shop.store, "a", ours.slice(5..5).unwrap()).build();
    assert_eq!(shop.setup.refused(empty), Refusal::NoBytes("a".into()));
    let huge = shop.setup.engine.register(Region::alloc(2 << 30).unwrap()).unwrap();
    shop.store.register(&huge).unwrap();
    let long = opcode::Get::new(&shop.store, "a", huge.slice(..).unwrap()).build();
    assert_eq!(shop.setup.refused(long), Refusal::TooLong(2 << 30));

    let region = shop.setup.engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let get = |shop: &Shop| opcode::Get::new(&shop.store, "a", region.slice(..).unwrap()).build();
    assert!(matches!(shop.setup.refused(get(&shop)), Refusal::NotInStore(_)));
    // The same entry is good when the region is registered.
    let entry = get(&shop);
    let refused = shop.setup.ring.submission().push(entry).unwrap_err().entry;
    shop.store.register(&region).unwrap();
    shop.store.register(&region).unwrap();
    assert_eq!(failure(&shop.run(refused)).0, errno::ENOENT);
    // A use that is refused leaves none behind.
    let unregistered = shop.setup.engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    shop.store.register(&unregistered).unwrap();
    unregistered.unregister().unwrap();
    assert!(shop.store.register(&unregistered).is_ok(), "it is known already");
    let both = [region.slice(..).unwrap(), unregistered.slice(..).unwrap()];
    let put = opcode::Put::vectored(&shop.store, "a", both).build();
    assert!(matches!(shop.setup.refused(put), Refusal::Unregistered(_)));
    shop.store.unregister(&region).unwrap();
    assert!(matches!(shop.store.unregister(&region), Err(UnregisterError::NotRegistered)));
    assert!(matches!(shop.setup.refused(get(&shop)), Refusal::NotInStore(_)));
    region.unregister().unwrap();
    let error = other.store.register(&shop.setup.ours).unwrap_err().to_string();
    assert!(error.contains("another engine"), "{error}");
}

/// While an entry is outstanding its region stays with the engine and with the Store.
#[test]
fn a_region_in_use_stays_registered() {
    let mut shop = Shop::new(16);
    shop.memory.hold("a");
    shop.submit(shop.put("a", 0));
    shop.await_calls(1);
    assert!(matches!(shop.store.unregister(&shop.setup.ours), Err(UnregisterError::Busy(1))));
    assert!(matches!(shop.setup.ours.unregister(), Err(UnregisterError::Busy(1))));
    shop.memory.release("a");
    assert_eq!(shop.setup.reap(1)[0].result(), Ok(PAGE as u32));
    shop.store.unregister(&shop.setup.ours).unwrap();
    shop.setup.ours.unregister().unwrap();
}

/// Two clients of one engine are two peers.
#[test]
fn clients_come_and_go_on_one_ring() {
    let engine = Engine::loopback();
    let mut ring = moonring::Ring::builder().build(16, &engine).unwrap();
    for round in 0..20u32 {
        let memory = store::Memory::new(1000);
        let store = store::Client::memory(&engine, &memory).unwrap();
        let other = store::Client::memory(&engine, &memory).unwrap();
        for client in [&store, &other] {
            ring.submission().push(opcode::Exist::new(client, "a").build()).unwrap();
        }
        ring.submit_and_wait(2).unwrap();
        assert_eq!(ring.completion().map(|cqe| cqe.result()).collect::<Vec<_>>(), [Ok(0), Ok(0)], "round {round}");
        store.close(LIMIT).unwrap();
        drop(other);
    }
}

/// A Store's entries are selected like a segment's.
#[test]
fn a_cancel_selects_a_store() {
    let mut shop = Shop::on(Setup::loopback(16));
    let (_signaller, never) = fence::host();
    shop.submit(shop.get("a", 0).wait(&never).user_data(1));
    shop.submit(shop.setup.read(0, 8).wait(&never).user_data(2));
    let controller = shop.setup.ring.controller();
    assert_eq!(controller.cancel(opcode::Cancel::new(opcode::Select::store(&shop.store)).all()), Ok(1));
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((cqe.user_data(), failure(&cqe)), (1, (errno::ECANCELED, Stage::Cancel, 0)));
    controller.quiesce(opcode::Select::store(&shop.store), LIMIT).unwrap();
    assert_eq!(controller.cancel(opcode::Cancel::new(opcode::Select::segment(&shop.setup.peer)).all()), Ok(1));
    shop.setup.reap(1);
}
