//! The Store's entries on a real Mooncake: a client out of the wheel, and a `mooncake_master` that each test program starts.
#![cfg(feature = "mooncake")]

#[path = "common/mod.rs"]
mod common;

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, Setup};
use moonring::code::errno;
use moonring::opcode::{Cancel, Exist, Get, Put, Remove, Select};
use moonring::store::{self, CloseError, ConnectError};
use moonring::{Cqe, CqeFlags, Entry, Refusal, Stage};
use store_master::Master;

const PAGE: usize = 64 << 10;
/// What a client adds to the Store.
const SEGMENT: u64 = 16 << 20;
/// How long an object is safe from removal and eviction after it was asked for.
const LEASE: Duration = Duration::from_secs(1);

/// Clients share two cores and one Mooncake: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A master, a client of it with a segment, and a ring on a loopback engine with a peer.
struct Shop {
    setup: Setup,
    store: store::Client,
    master: Master,
    _alone: MutexGuard<'static, ()>,
}

impl Shop {
    fn new() -> Shop {
        Shop::with_lease(LEASE)
    }

    fn with_lease(lease: Duration) -> Shop {
        let alone = alone();
        let api = mooncake_sys::StoreApi::load().unwrap_or_else(|error| panic!("{error}"));
        let wheel: PathBuf = api.path().ancestors().nth(2).unwrap().into();
        let lease = format!("-default_kv_lease_ttl={}", lease.as_millis());
        let master = Master::start(&wheel, &[&lease]).unwrap();
        let setup = Setup::loopback(256);
        let store =
            builder(&master).segment_bytes(SEGMENT).build(&setup.engine).unwrap_or_else(|error| panic!("{error}"));
        store.register(&setup.ours).unwrap();
        Shop { setup, store, master, _alone: alone }
    }

    fn page(&self, page: usize) -> moonring::Slice {
        self.setup.ours.slice(page * PAGE..(page + 1) * PAGE).unwrap()
    }

    fn get(&self, key: &str, page: usize) -> Entry {
        Get::new(&self.store, key, self.page(page)).build()
    }

    fn put(&self, key: &str, page: usize) -> Entry {
        Put::new(&self.store, key, self.page(page)).build()
    }

    fn fill(&self, page: usize, seed: u8) {
        let bytes: Vec<u8> = (0..PAGE).map(|at| byte(seed, at)).collect();
        self.setup.ours.write_at(page * PAGE, &bytes).unwrap();
    }

    /// How many bytes of a page are the seed's.
    fn matching(&self, page: usize, seed: u8) -> usize {
        let mut bytes = vec![0; PAGE];
        self.setup.ours.read_at(page * PAGE, &mut bytes).unwrap();
        bytes.iter().enumerate().filter(|&(at, &value)| value == byte(seed, at)).count()
    }

    fn run(&mut self, entry: Entry) -> Cqe {
        self.setup.push(entry);
        self.setup.reap(1)[0]
    }

    /// Does all of them at once; their completions in the order of `user_data`.
    fn run_all(&mut self, entries: Vec<Entry>) -> Vec<Cqe> {
        let count = entries.len();
        self.setup.ring.submission().push_chain(entries).unwrap();
        let mut cqes = self.setup.reap(count);
        cqes.sort_by_key(|cqe| cqe.user_data());
        cqes
    }

    fn close(self) {
        let Shop { setup, store, .. } = self;
        drop(setup.ring);
        store.close(LIMIT).unwrap();
    }
}

fn builder(master: &Master) -> store::Builder {
    store::builder("127.0.0.1", master.address()).log_level(moonring::mooncake::LogLevel::Fatal).limit(LIMIT)
}

fn byte(seed: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed
}

fn failure(cqe: &Cqe) -> (i32, Stage, i32) {
    let error = cqe.result().unwrap_err();
    (error.errno, error.stage, cqe.detail())
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn objects_go_in_and_come_out() {
    let mut shop = Shop::new();
    shop.fill(0, 1);
    assert_eq!(shop.run(Exist::new(&shop.store, "a").build()).result(), Ok(0));
    assert_eq!(failure(&shop.run(shop.get("a", 1))), (errno::ENOENT, Stage::Transfer, -704));
    assert_eq!(failure(&shop.run(Remove::new(&shop.store, "a").build())), (errno::ENOENT, Stage::Transfer, -704));
    assert_eq!(shop.run(shop.put("a", 0)).result(), Ok(PAGE as u32));
    assert_eq!(shop.run(Exist::new(&shop.store, "a").build()).result(), Ok(1));
    assert_eq!(shop.run(shop.get("a", 1)).result(), Ok(PAGE as u32));
    assert_eq!(shop.matching(1, 1), PAGE);
    // Under the lease of the Get.
    assert_eq!(failure(&shop.run(Remove::new(&shop.store, "a").build())), (errno::EBUSY, Stage::Transfer, -706));
    shop.fill(2, 2);
    assert_eq!(failure(&shop.run(shop.put("a", 2))), (errno::EEXIST, Stage::Transfer, -705));
    assert_eq!(shop.run(shop.get("a", 3)).result(), Ok(PAGE as u32));
    assert_eq!(shop.matching(3, 1), PAGE, "the object stayed as it was");
    thread::sleep(LEASE + LEASE / 2);
    assert_eq!(shop.run(Remove::new(&shop.store, "a").build()).result(), Ok(0));
    assert_eq!(shop.run(Exist::new(&shop.store, "a").build()).result(), Ok(0));
    // A key of the greatest length, and one that is not ASCII.
    let long = "x".repeat(4096);
    for key in [&*long, "schlüssel/鍵"] {
        assert_eq!(shop.run(shop.put(key, 0)).result(), Ok(PAGE as u32));
        assert_eq!(shop.run(shop.get(key, 4)).result(), Ok(PAGE as u32));
        assert_eq!(shop.matching(4, 1), PAGE);
    }
    shop.close();
}

/// J1: one call, and each key has its own result; the good ones are whole.
#[test]
#[ignore = "needs cargo xtask setup"]
fn j1_keys_of_one_call_have_results_of_their_own() {
    let mut shop = Shop::new();
    for page in 0..5 {
        shop.fill(page, page as u8);
    }
    let puts = (0..5).map(|page| shop.put(&page.to_string(), page).user_data(page as u64)).collect();
    assert!(shop.run_all(puts).iter().all(|cqe| cqe.result() == Ok(PAGE as u32)));
    let ours = shop.setup.ours.clone();
    let short = Get::new(&shop.store, "0", ours.slice(15 * PAGE..16 * PAGE - 1).unwrap()).build();
    let mut gets: Vec<Entry> =
        (0..5).map(|page| shop.get(&page.to_string(), 5 + page).user_data(page as u64)).collect();
    gets.push(shop.get("absent", 10).user_data(5));
    gets.push(short.user_data(6));
    // The same key again, as one slice and as three, and in a longer range.
    gets.push(shop.get("1", 11).user_data(7));
    let slices =
        [0..10, 10..10, 10..PAGE].map(|range| ours.slice(12 * PAGE + range.start..12 * PAGE + range.end).unwrap());
    gets.push(Get::vectored(&shop.store, "2", slices).build().user_data(8));
    gets.push(Get::new(&shop.store, "3", ours.slice(13 * PAGE..15 * PAGE).unwrap()).build().user_data(9));
    let cqes = shop.run_all(gets);
    for (n, cqe) in cqes.iter().enumerate() {
        match n {
            5 => assert_eq!(failure(cqe), (errno::ENOENT, Stage::Transfer, -704)),
            6 => assert_eq!(failure(cqe), (errno::EMSGSIZE, Stage::Transfer, PAGE as i32)),
            _ => assert_eq!(cqe.result(), Ok(PAGE as u32), "{n}"),
        }
    }
    for (page, seed) in [(5, 0), (6, 1), (7, 2), (8, 3), (9, 4), (11, 1), (12, 2), (13, 3)] {
        assert_eq!(shop.matching(page, seed), PAGE, "page {page}");
    }
    // Many slices make one object.
    let slices = [0..1, PAGE..2 * PAGE, 7..9].map(|range| ours.slice(range).unwrap());
    assert_eq!(shop.run(Put::vectored(&shop.store, "v", slices).build()).result(), Ok(PAGE as u32 + 3));
    let whole = Get::new(&shop.store, "v", ours.slice(13 * PAGE..15 * PAGE).unwrap()).build();
    assert_eq!(shop.run(whole).result(), Ok(PAGE as u32 + 3));
    let mut bytes = vec![0; PAGE + 3];
    ours.read_at(13 * PAGE, &mut bytes).unwrap();
    let middle: Vec<u8> = (0..PAGE).map(|at| byte(1, at)).collect();
    assert_eq!(bytes, [&[byte(0, 0)][..], &middle, &[byte(0, 7), byte(0, 8)]].concat());
    shop.close();
}

/// More than the Store holds: a Put finds no room, or older objects go, and nothing that is read is anything but its own.
#[test]
#[ignore = "needs cargo xtask setup"]
fn a_full_store_evicts_or_refuses() {
    let mut shop = Shop::new();
    let mut kept = 0;
    let mut refused = 0;
    let total = 3 * SEGMENT as usize / PAGE;
    for n in 0..total {
        shop.fill(0, n as u8);
        let cqe = shop.run(shop.put(&n.to_string(), 0));
        match cqe.result() {
            Ok(bytes) => {
                assert_eq!(bytes, PAGE as u32);
                kept += 1;
            }
            Err(_) => {
                assert_eq!(failure(&cqe), (errno::ENOSPC, Stage::Transfer, -200));
                refused += 1;
                // The master evicts once it has been asked in vain, and in its own time.
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
    assert!(kept > 0);
    let (mut there, mut gone) = (0, 0);
    for n in 0..total {
        let cqe = shop.run(shop.get(&n.to_string(), 1));
        if cqe.res() == -errno::ENOENT {
            gone += 1;
        } else {
            assert_eq!(cqe.result(), Ok(PAGE as u32), "{cqe:?}");
            assert_eq!(shop.matching(1, n as u8), PAGE);
            there += 1;
        }
    }
    assert!(there > 0 && gone > 0 && gone >= refused, "{there} there, {gone} gone, {refused} refused");
    assert!(there as u64 * PAGE as u64 <= SEGMENT);
    shop.close();
}

/// A master that is gone fails what is asked, not the client: it serves again when the master is back.
#[test]
#[ignore = "needs cargo xtask setup"]
fn a_master_can_be_killed_and_restarted() {
    let mut shop = Shop::new();
    shop.fill(0, 1);
    assert_eq!(shop.run(shop.put("a", 0)).result(), Ok(PAGE as u32));
    shop.master.kill();
    let entries = vec![
        shop.get("a", 1).user_data(0),
        shop.put("b", 0).user_data(1),
        Exist::new(&shop.store, "a").build().user_data(2),
        Remove::new(&shop.store, "a").build().user_data(3),
    ];
    for cqe in shop.run_all(entries) {
        let (errno, stage, detail) = failure(&cqe);
        assert_eq!((errno, stage, detail, cqe.flags()), (errno::ECONNRESET, Stage::Transfer, -900, CqeFlags::empty()));
    }
    // Nobody else minds.
    assert_eq!(shop.run(shop.setup.read(15 * PAGE, 8)).result(), Ok(8));
    shop.master.restart().unwrap();
    // The client finds out by itself, and brings its segment along.
    let end = Instant::now() + LIMIT;
    loop {
        let cqe = shop.run(shop.put("c", 0));
        if cqe.result() == Ok(PAGE as u32) {
            break;
        }
        assert!(Instant::now() < end, "{cqe:?}");
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(shop.run(shop.get("c", 1)).result(), Ok(PAGE as u32));
    assert_eq!(shop.matching(1, 1), PAGE);
    // A master keeps nothing.
    assert_eq!(failure(&shop.run(shop.get("a", 2))), (errno::ENOENT, Stage::Transfer, -704));
    shop.close();
}

/// G5: the master is stopped in the middle: calls hang, and hold up nobody else. Limits pass, `MORE` and `NOTIF` follow.
#[test]
#[ignore = "needs cargo xtask setup"]
fn a_stopped_master_holds_up_the_store_alone() {
    let mut shop = Shop::new();
    shop.fill(0, 1);
    assert_eq!(shop.run(shop.put("a", 0)).result(), Ok(PAGE as u32));
    assert_eq!(shop.run(shop.setup.read(15 * PAGE, 8)).result(), Ok(8));
    stop(&shop.master);
    // One at a time, so that each has a worker.
    for n in 0..4 {
        shop.setup.push(shop.get("a", 1 + n).user_data(n as u64).transfer_limit(Duration::from_millis(50)));
        let cqe = shop.setup.reap(1)[0];
        assert_eq!((cqe.user_data(), failure(&cqe)), (n as u64, (errno::ETIME, Stage::Transfer, 0)));
        assert_eq!(cqe.flags(), CqeFlags::MORE);
    }
    // No worker is left.
    let waiting = shop.get("a", 5).user_data(9).gate_limit(Duration::from_millis(20));
    let cqe = shop.run(waiting);
    assert_eq!((cqe.user_data(), failure(&cqe)), (9, (errno::ETIME, Stage::Gate, 0)));
    for _ in 0..1000 {
        assert_eq!(shop.run(shop.setup.read(15 * PAGE, 8)).result(), Ok(8));
    }
    let asks: Vec<_> = (0..40).map(|_| Exist::new(&shop.store, "a").build()).collect();
    let refusals: Vec<_> = asks.into_iter().filter_map(|ask| shop.setup.ring.submission().push(ask).err()).collect();
    let overdue = |refusal: &Refusal| matches!(refusal, Refusal::SegmentOverdue { limit: 32, .. });
    assert!(refusals.iter().all(|error| overdue(&error.reason)) && refusals.len() >= 12, "{}", refusals.len());
    // They have the entries, and those the client.
    let refused = refusals.len();
    drop(refusals);
    shop.setup.ring.submit().unwrap();
    signal(&shop.master, libc::SIGCONT);
    let mut notifs = 0;
    for cqe in shop.setup.reap(4 + 40 - refused) {
        if cqe.flags().contains(CqeFlags::NOTIF) {
            notifs += 1;
        } else {
            assert_eq!(cqe.result(), Ok(1));
        }
    }
    assert_eq!(notifs, 4);
    for page in 1..5 {
        assert_eq!(shop.matching(page, 1), PAGE, "what was asked for late arrived before its NOTIF");
    }
    shop.close();
}

/// Stops it, and waits until all of its threads are.
fn stop(master: &Master) {
    signal(master, libc::SIGSTOP);
    let end = Instant::now() + LIMIT;
    let is_stopped = |task: std::fs::DirEntry| {
        // One that has ended meanwhile may have started another: not yet.
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { return false };
        stat.rsplit(") ").next().unwrap().starts_with('T')
    };
    let tasks = || std::fs::read_dir(format!("/proc/{}/task", master.id())).unwrap();
    while !tasks().all(|task| is_stopped(task.unwrap())) {
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(1));
    }
}

fn signal(master: &Master, number: i32) {
    // SAFETY: the process is our child.
    assert_eq!(unsafe { libc::kill(master.id() as i32, number) }, 0);
}

/// J2: the lease begins when the Store is asked, which is after the fences; one that ends before the bytes are there is told.
#[test]
#[ignore = "needs cargo xtask setup"]
fn j2_a_lease_that_ends_early_is_told() {
    let mut shop = Shop::new();
    shop.fill(0, 1);
    assert_eq!(shop.run(shop.put("a", 0)).result(), Ok(PAGE as u32));
    let (signaller, fence) = moonring::fence::host();
    shop.setup.push(shop.get("a", 1).wait(&fence));
    shop.setup.ring.submit().unwrap();
    thread::sleep(2 * LEASE);
    signaller.signal();
    assert_eq!(shop.setup.reap(1)[0].result(), Ok(PAGE as u32));
    assert_eq!(shop.matching(1, 1), PAGE);
    shop.close();

    let mut shop = Shop::with_lease(Duration::ZERO);
    assert_eq!(shop.run(shop.put("a", 0)).result(), Ok(PAGE as u32));
    // Alone, and beside another in one call.
    assert_eq!(failure(&shop.run(shop.get("a", 1))), (errno::EKEYEXPIRED, Stage::Transfer, -707));
    let cqes = shop.run_all(vec![shop.get("a", 1).user_data(1), shop.get("absent", 2).user_data(2)]);
    assert_eq!(failure(&cqes[0]), (errno::EKEYEXPIRED, Stage::Transfer, -707));
    assert_eq!(failure(&cqes[1]).0, errno::ENOENT);
    shop.close();
}

/// A preempted request: its stores are cancelled and drained, then its pages are reused; what was stored is the old bytes.
#[test]
#[ignore = "needs cargo xtask setup"]
fn a_preempted_requests_pages_are_reused_when_its_stores_are_drained() {
    let mut shop = Shop::new();
    let controller = shop.setup.ring.controller();
    for round in 0..10u8 {
        for page in 0..8 {
            shop.fill(page, round);
        }
        let puts = (0..8).map(|page| shop.put(&format!("{round}/{page}"), page).user_data(7)).collect();
        shop.setup.ring.submission().push_chain(puts).unwrap();
        shop.setup.ring.submit().unwrap();
        controller.cancel(Cancel::user_data(7).all().detach()).unwrap();
        controller.quiesce(Select::user_data(7), LIMIT).unwrap();
        for page in 0..8 {
            shop.fill(page, 255 - round);
        }
        let mut ended = 0;
        while ended < 8 {
            shop.setup.ring.wait_timeout(1, LIMIT).unwrap();
            ended += shop.setup.ring.completion().filter(|cqe| !cqe.flags().contains(CqeFlags::MORE)).count();
        }
        for page in 0..8 {
            let cqe = shop.run(shop.get(&format!("{round}/{page}"), 8));
            if cqe.res() != -errno::ENOENT {
                assert_eq!(cqe.result(), Ok(PAGE as u32), "{cqe:?}");
                assert_eq!(shop.matching(8, round), PAGE, "round {round}, page {page}");
            }
        }
    }
    shop.close();
}

/// Two clients of one Store see each other's objects, and a client takes its segment's along.
#[test]
#[ignore = "needs cargo xtask setup"]
fn clients_share_objects_and_leave_with_their_segments() {
    let mut shop = Shop::new();
    let other = builder(&shop.master).workers(1).build(&shop.setup.engine).unwrap();
    other.register(&shop.setup.ours).unwrap();
    shop.fill(0, 1);
    // The other has no segment: the bytes travel to ours, and back.
    let put = Put::new(&other, "a", shop.page(0)).build();
    assert_eq!(shop.run(put).result(), Ok(PAGE as u32));
    assert_eq!(shop.run(shop.get("a", 1)).result(), Ok(PAGE as u32));
    let get = Get::new(&other, "a", shop.page(2)).build();
    assert_eq!(shop.run(get).result(), Ok(PAGE as u32));
    assert_eq!((shop.matching(1, 1), shop.matching(2, 1)), (PAGE, PAGE));
    shop.store.unregister(&shop.setup.ours).unwrap();
    let first = std::mem::replace(&mut shop.store, other);
    first.close(LIMIT).unwrap();
    let cqe = shop.run(shop.get("a", 3));
    assert_eq!(failure(&cqe), (errno::ENOENT, Stage::Transfer, -704));
    let cqe = shop.run(shop.put("b", 0));
    assert_eq!(failure(&cqe).0, errno::ENOSPC, "{cqe:?}");
    let (Shop { store, .. }, other) = {
        let other = shop.store.clone();
        (shop, other)
    };
    assert_eq!(other.close(LIMIT), Err(CloseError::InUse));
    store.close(LIMIT).unwrap();
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn what_cannot_be_connected_says_so() {
    let shop = Shop::new();
    let engine = &shop.setup.engine;
    assert!(matches!(builder(&shop.master).workers(0).build(engine), Err(ConnectError::Workers(0))));
    assert!(matches!(store::builder("", "127.0.0.1:1").build(engine), Err(ConnectError::Build(_))));
    assert!(matches!(store::builder("127.0.0.1", "a b").build(engine), Err(ConnectError::Build(_))));
    // With a port: without one Mooncake takes a master that does not answer for a port that is taken, and tries others.
    let host = format!("127.0.0.1:{}", free_port());
    let nobody = store::builder(host, "127.0.0.1:1").log_level(moonring::mooncake::LogLevel::Fatal).limit(LIMIT);
    let error = nobody.build(engine).unwrap_err();
    assert!(matches!(error, ConnectError::Call(_)), "{error}");
    // A master that is stopped: the limit holds, and what was begun is taken down behind it.
    stop(&shop.master);
    let limit = Duration::from_millis(200);
    let error = builder(&shop.master).limit(limit).build(engine).unwrap_err();
    assert!(matches!(error, ConnectError::Limit { .. }), "{error}");
    signal(&shop.master, libc::SIGCONT);
    shop.close();
}

/// A port that nobody listens on now.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
