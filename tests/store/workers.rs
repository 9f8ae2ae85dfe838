//! The workers: what is grouped, what waits, and whom a call that hangs does not hold up.

use std::collections::HashMap;
use std::thread;
use std::time::Duration;

use moonring::code::errno;
use moonring::fence::FenceStatus;
use moonring::{CqeFlags, EntryFlags, Refusal, Ring, Stage, opcode};

use crate::common::{LIMIT, reap_exactly};
use crate::{PAGE, Shop, await_that, failure};

/// Ready entries gather while all workers are in calls, and go out as one call each kind.
#[test]
fn what_gathers_goes_out_together() {
    let mut shop = Shop::new(64);
    shop.fill(0, 1);
    shop.run(shop.put("here", 0));
    shop.occupy();
    let before = shop.memory.calls().len();
    for n in 0..10 {
        shop.submit(shop.put(&format!("put{n}"), 0));
        shop.submit(shop.get("here", 1 + n));
        shop.submit(shop.exist(&format!("exist{n}")));
    }
    // They are the poller's: it has taken them all.
    shop.setup.push(opcode::Nop::new().build().user_data(1));
    assert_eq!(shop.setup.reap(1)[0].user_data(), 1);
    assert_eq!(shop.memory.calls().len(), before, "there is no idle worker");
    shop.memory.release("held0");
    let cqes = shop.setup.reap(31);
    assert!(cqes.iter().all(|cqe| cqe.res() >= 0), "{cqes:?}");
    let calls = &shop.memory.calls()[before..];
    let mut by_kind: HashMap<&str, usize> = HashMap::new();
    for call in calls {
        let kind = call[0].trim_end_matches(char::is_numeric);
        assert!(call.iter().all(|key| key.starts_with(kind)), "kinds are not mixed: {calls:?}");
        *by_kind.entry(kind).or_default() += 1;
    }
    // One worker was free: the first kind's ten keys as one call, and so on. The same key needs calls of its own.
    assert_eq!((by_kind["put"], by_kind["here"], by_kind["exist"]), (1, 10, 1), "{calls:?}");
    shop.let_go();
    shop.setup.reap(3);
}

/// A call has 64 keys at most, and no further one past 16 MiB.
#[test]
fn a_call_has_its_most() {
    let mut shop = Shop::new(256);
    shop.occupy();
    let before = shop.memory.calls().len();
    for n in 0..130 {
        shop.submit(shop.exist(&n.to_string()));
    }
    let big = shop.setup.engine.register(moonring::Region::alloc(6 << 20).unwrap()).unwrap();
    shop.store.register(&big).unwrap();
    for n in 0..5 {
        let get = opcode::Get::new(&shop.store, format!("get{n}"), big.slice(..).unwrap()).build();
        shop.submit(get);
    }
    shop.setup.push(opcode::Nop::new().build());
    shop.setup.reap(1);
    shop.let_go();
    shop.setup.reap(139);
    let calls = &shop.memory.calls()[before..];
    assert!(calls.iter().all(|call| call.len() <= 64), "{calls:?}");
    let gets: Vec<_> = calls.iter().filter(|call| call[0].starts_with("get")).map(Vec::len).collect();
    assert!(gets.iter().all(|&keys| keys <= 3), "{gets:?}");
    assert_eq!(gets.iter().sum::<usize>(), 5);
}

/// Promise 8 and G5: with every worker stuck, Reads flow, the ring keeps room for them, and what waits for the Store can be
/// cancelled or pass its limit as if it had not been issued, which it has not.
#[test]
fn g5_stuck_workers_hold_up_the_store_alone() {
    let mut shop = Shop::new(32);
    // The segment is known, so the Store has a share and no more.
    shop.run(shop.setup.read(0, 8));
    shop.occupy();
    let calls = shop.memory.calls().len();
    for n in 0..20 {
        shop.submit(shop.get("a", 1).user_data(n));
    }
    // 24 of 32: four that are stuck and twenty that wait.
    assert_eq!(shop.setup.refused(shop.get("a", 1)), Refusal::SegmentShare { segment: "memory".into(), limit: 24 });
    for _ in 0..100 {
        shop.setup.push(shop.setup.read(0, 8).user_data(100));
        let cqe = shop.setup.reap(1)[0];
        assert_eq!((cqe.user_data(), cqe.result()), (100, Ok(8)));
    }
    let controller = shop.setup.ring.controller();
    assert_eq!(controller.cancel(opcode::Cancel::user_data(7)), Ok(1));
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((cqe.user_data(), failure(&cqe)), (7, (errno::ECANCELED, Stage::Cancel, 0)));
    shop.submit(shop.get("a", 1).user_data(50).gate_limit(Duration::from_millis(1)));
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((cqe.user_data(), failure(&cqe), cqe.flags()), (50, (errno::ETIME, Stage::Gate, 0), CqeFlags::empty()));
    assert_eq!(shop.memory.calls().len(), calls, "the Store was asked for none of them");
    shop.let_go();
    shop.setup.reap(23);
}

/// One worker that is stuck leaves the others to other entries.
#[test]
fn a_stuck_worker_holds_up_its_own_keys() {
    let mut shop = Shop::new(32);
    shop.memory.hold("stuck");
    shop.submit(shop.exist("stuck").user_data(99));
    shop.await_calls(1);
    for n in 0..200 {
        let cqe = shop.run(shop.exist("a").user_data(n));
        assert_eq!((cqe.user_data(), cqe.result()), (n, Ok(0)));
    }
    shop.memory.release("stuck");
    assert_eq!(shop.setup.reap(1)[0].user_data(), 99);
}

/// The poller sleeps while all workers are stuck and entries wait for one.
#[test]
fn waiting_for_a_worker_costs_no_cpu() {
    let mut shop = Shop::new(32);
    shop.occupy();
    shop.submit(shop.exist("a"));
    let spent = || {
        let mut usage = std::mem::MaybeUninit::<libc::timespec>::uninit();
        // SAFETY: the call initialises what it is given.
        unsafe {
            assert_eq!(libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, usage.as_mut_ptr()), 0);
            let usage = usage.assume_init();
            Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
        }
    };
    // Other tests of this program may run meanwhile, but not for ever: one quiet moment is enough.
    let quiet = || {
        let before = spent();
        thread::sleep(Duration::from_millis(100));
        spent() - before < Duration::from_millis(20)
    };
    await_that(quiet);
    shop.let_go();
    shop.setup.reap(5);
}

/// Two pollers share the workers of one client: whoever found none idle is woken when one is, whosever call that was.
#[test]
fn pollers_share_the_workers() {
    let mut shop = Shop::new(32);
    let mut other = Ring::builder().build(32, &shop.setup.engine).unwrap();
    for _ in 0..20 {
        shop.occupy();
        let entry = shop.exist("a").user_data(1);
        other.submission().push(entry).unwrap();
        other.submit().unwrap();
        // It has found no worker, and sleeps.
        thread::sleep(Duration::from_millis(2));
        assert_eq!(other.completion().count(), 0);
        shop.memory.release("held2");
        assert_eq!(reap_exactly(&mut other, 1)[0].result(), Ok(0));
        shop.let_go();
        shop.setup.reap(4);
    }
}

/// Rings of one poller share its driver, and one that closes leaves it to the other.
#[test]
fn rings_of_one_poller_share_a_store() {
    let mut shop = Shop::new(32);
    for round in 0..10 {
        let mut other = Ring::builder().attach(&shop.setup.ring).build(32, &shop.setup.engine).unwrap();
        let entries: Vec<_> = (0..20).map(|n| shop.put(&format!("{round}/{n}"), 0).user_data(n)).collect();
        other.submission().push_chain(entries).unwrap();
        other.submit().unwrap();
        (0..20).for_each(|n| shop.submit(shop.exist(&format!("{n}"))));
        assert!(reap_exactly(&mut other, 20).iter().all(|cqe| cqe.result() == Ok(PAGE as u32)));
        assert!(shop.setup.reap(20).iter().all(|cqe| cqe.result() == Ok(0)));
        for n in 0..20 {
            other.submission().push(shop.remove(&format!("{round}/{n}"))).unwrap();
        }
        other.submit().unwrap();
        let report = other.close(LIMIT);
        assert!(report.finished, "{report:?}");
        // What was issued has ended, the rest never was.
        assert_eq!(report.completions.len(), 20);
        assert_eq!(report.unquiet, 0);
    }
}

/// Many threads, each with keys of its own: each sees its own bytes, and each entry completes once.
#[test]
fn submitters_see_their_own_objects() {
    const THREADS: u64 = 3;
    const ROUNDS: u64 = 300;
    // Room for all of them: nobody waits for the reaper.
    let mut shop = Shop::new(4096);
    let producers: Vec<_> = (0..THREADS)
        .map(|number| {
            let mut submitter = shop.setup.ring.submitter();
            let (store, ours) = (shop.store.clone(), shop.setup.ours.clone());
            thread::spawn(move || {
                let (from, to) = (number as usize * 2 * PAGE, (number as usize * 2 + 1) * PAGE);
                for round in 0..ROUNDS {
                    let (key, bytes) = (format!("{number}/{round}"), (number << 32 | round).to_le_bytes());
                    ours.write_at(from, &bytes).unwrap();
                    let slice = |at| ours.slice(at..at + PAGE).unwrap();
                    let put = opcode::Put::new(&store, &*key, slice(from)).build().user_data(1);
                    submitter.push(put.flags(EntryFlags::IO_LINK)).unwrap();
                    let get = opcode::Get::new(&store, &*key, slice(to)).build().user_data(2);
                    submitter.push(get.flags(EntryFlags::IO_LINK)).unwrap();
                    let remove = opcode::Remove::new(&store, &*key).build().user_data(3);
                    let end = submitter.push_fenced(remove).unwrap();
                    submitter.submit().unwrap();
                    assert_eq!(end.wait_timeout(LIMIT), FenceStatus::Signalled);
                    let mut got = [0; 8];
                    ours.read_at(to, &mut got).unwrap();
                    assert_eq!(got, bytes);
                }
            })
        })
        .collect();
    let mut ended = [0; 4];
    while ended.iter().sum::<u64>() < THREADS * ROUNDS * 3 {
        shop.setup.ring.wait_timeout(1, LIMIT).unwrap();
        for cqe in shop.setup.ring.completion() {
            assert_eq!(cqe.result(), Ok(if cqe.user_data() == 3 { 0 } else { PAGE as u32 }));
            ended[cqe.user_data() as usize] += 1;
        }
    }
    assert_eq!(ended, [0, THREADS * ROUNDS, THREADS * ROUNDS, THREADS * ROUNDS]);
    producers.into_iter().for_each(|producer| producer.join().unwrap());
    let stats = shop.setup.ring.stats().unwrap();
    assert_eq!(stats.peers.len(), 1);
    let counts = &stats.peers[0].counts;
    assert_eq!((stats.peers[0].name.as_str(), counts.ok), ("memory", THREADS * ROUNDS * 3));
    let bytes = THREADS * ROUNDS * PAGE as u64;
    assert_eq!((counts.read_bytes, counts.written_bytes), (bytes, bytes));
}
