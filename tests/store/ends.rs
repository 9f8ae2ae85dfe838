//! Entries, rings and clients that end around a call.

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use moonring::code::errno;
use moonring::opcode::{Cancel, LinkTimeout, Select};
use moonring::store::CloseError;
use moonring::{CqeFlags, EntryFlags, Refusal, Ring, Stage, UnregisterError};

use crate::common::{LIMIT, Setup};
use crate::{PAGE, Shop, failure};

const SHORT: Duration = Duration::from_millis(1);

/// Its result when its limit passes, and once more when the call has returned: the page is in use until then.
#[test]
fn a_limit_that_passes_in_a_call_is_told_twice() {
    let mut shop = Shop::new(16);
    shop.fill(0, 9);
    shop.run(shop.put("a", 0));
    shop.memory.hold("a");
    shop.submit(shop.get("a", 1).user_data(1).transfer_limit(SHORT));
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((failure(&cqe), cqe.flags()), ((errno::ETIME, Stage::Transfer, 0), CqeFlags::MORE));
    assert!(matches!(shop.setup.ours.unregister(), Err(UnregisterError::Busy(1))));
    assert_ne!(shop.bytes(1), [9; PAGE]);
    shop.memory.release("a");
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((cqe.user_data(), cqe.res(), cqe.flags()), (1, 0, CqeFlags::NOTIF));
    assert_eq!(shop.bytes(1), [9; PAGE]);
    shop.setup.ours.unregister().unwrap();
}

/// The last word of a call that failed late is its number.
#[test]
fn a_notif_has_the_stores_last_word() {
    let mut shop = Shop::new(16);
    shop.memory.hold("absent");
    shop.submit(shop.get("absent", 1).transfer_limit(SHORT));
    assert_eq!(shop.setup.reap(1)[0].flags(), CqeFlags::MORE);
    shop.memory.release("absent");
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((cqe.flags(), cqe.detail()), (CqeFlags::NOTIF, -704));
}

/// While an entry is overdue its Store has an eighth of the ring.
#[test]
fn an_overdue_store_has_a_small_share() {
    let mut shop = Shop::new(32);
    shop.run(shop.setup.read(0, 8));
    shop.memory.hold("a");
    shop.submit(shop.get("a", 1).transfer_limit(SHORT));
    shop.setup.reap(1);
    shop.occupy_three();
    let refused = shop.setup.refused(shop.exist("b"));
    assert_eq!(refused, Refusal::SegmentOverdue { segment: "memory".into(), limit: 4 });
    shop.memory.release("a");
    assert_eq!(shop.setup.reap(1)[0].flags(), CqeFlags::NOTIF);
    assert_eq!(shop.run(shop.exist("b")).result(), Ok(0));
    shop.let_go();
    shop.setup.reap(3);
}

/// A Cancel of what is in a call comes too late, or detaches it; a LinkTimeout detaches.
#[test]
fn what_is_in_a_call_can_be_detached() {
    let mut shop = Shop::new(16);
    shop.memory.hold("a");
    shop.submit(shop.get("a", 1).user_data(1));
    shop.await_calls(1);
    let controller = shop.setup.ring.controller();
    assert_eq!(controller.cancel(Cancel::user_data(1)), Ok(0));
    let guarded = vec![
        shop.get("a", 2).user_data(2).flags(EntryFlags::IO_LINK),
        // Longer than the second call waits for the first.
        LinkTimeout::new(200 * SHORT).build().user_data(3).flags(EntryFlags::CQE_SKIP_SUCCESS),
    ];
    shop.setup.ring.submission().push_chain(guarded).unwrap();
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((cqe.user_data(), failure(&cqe)), (2, (errno::ECANCELED, Stage::Cancel, 0)));
    assert_eq!(cqe.flags(), CqeFlags::MORE);
    assert_eq!(controller.cancel(Cancel::user_data(1).detach()), Ok(1));
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((cqe.user_data(), failure(&cqe)), (1, (errno::ECANCELED, Stage::Cancel, 0)));
    assert_eq!(controller.quiesce(Select::store(&shop.store), SHORT), Err(moonring::ControlError::Limit(SHORT)));
    shop.memory.release("a");
    controller.quiesce(Select::store(&shop.store), LIMIT).unwrap();
    let cqes = shop.setup.reap(2);
    assert!(cqes.iter().all(|cqe| cqe.flags() == CqeFlags::NOTIF), "{cqes:?}");
}

/// A preempted request: its stores are cancelled and drained, then its pages are another's, and nothing of the old arrives.
#[test]
fn a_preempted_requests_pages_are_reused_when_its_stores_are_drained() {
    let mut shop = Shop::new(64);
    for round in 0..20u8 {
        shop.fill(0, round);
        shop.occupy();
        shop.memory.hold("old");
        // Some in a call, some waiting for a worker.
        shop.memory.release("held0");
        shop.setup.reap(1);
        let old: Vec<_> = (0..8).map(|n| shop.put(&format!("{round}/{n}"), 0).user_data(7)).collect();
        shop.setup.ring.submission().push_chain(old).unwrap();
        shop.setup.ring.submit().unwrap();
        let controller = shop.setup.ring.controller();
        controller.cancel(Cancel::user_data(7).all().detach()).unwrap();
        controller.quiesce(Select::user_data(7), LIMIT).unwrap();
        // Drained: what was stored has the old bytes, and nothing reads the page any more.
        shop.fill(0, 255);
        shop.let_go();
        let end = Instant::now() + LIMIT;
        let mut ended = 0;
        while ended < 11 {
            assert!(Instant::now() < end);
            let _ = shop.setup.ring.wait_timeout(1, LIMIT);
            ended += shop.setup.ring.completion().filter(|cqe| !cqe.flags().contains(CqeFlags::MORE)).count();
        }
        for n in 0..8 {
            let object = shop.memory.object(&format!("{round}/{n}"));
            assert!(object.is_none_or(|object| object == [round; PAGE]), "round {round}: object {n} has later bytes");
        }
    }
}

/// A ring that closes around a call that hangs is bounded, says so, and leaves the memory alone for ever.
#[test]
fn closing_around_a_stuck_call_is_bounded() {
    let mut shop = Shop::new(16);
    let (engine, ours, store, memory) =
        (shop.setup.engine.clone(), shop.setup.ours.clone(), shop.store.clone(), shop.memory.clone());
    memory.hold("a");
    shop.submit(shop.put("a", 0).user_data(1));
    shop.await_calls(1);
    shop.submit(shop.put("b", 0).user_data(2));
    shop.setup.reap(1);
    let Shop { setup: Setup { ring, .. }, .. } = shop;
    let report = ring.close(SHORT);
    assert!(report.finished);
    assert_eq!((report.unissued, report.completed, report.unquiet), (0, 0, 1));
    let cqe = report.completions[0];
    assert_eq!((cqe.user_data(), failure(&cqe)), (1, (errno::ESHUTDOWN, Stage::Transfer, 0)));
    assert_eq!(cqe.flags(), CqeFlags::UNQUIET);
    assert!(matches!(ours.unregister(), Err(UnregisterError::Busy(1))));
    // The client serves other rings meanwhile, and its worker comes back.
    let mut ring = Ring::builder().build(16, &engine).unwrap();
    ring.submission().push(moonring::opcode::Exist::new(&store, "b").build()).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), Ok(1));
    assert_eq!(store.clone().close(LIMIT), Err(CloseError::InUse));
    memory.release("a");
    drop(ring);
    crate::await_that(|| memory.object("a").is_some());
}

/// What waits for a worker was never issued.
#[test]
fn closing_ends_what_waits_for_a_worker() {
    let mut shop = Shop::new(16);
    shop.occupy();
    let calls = shop.memory.calls().len();
    shop.submit(shop.put("a", 0).user_data(1));
    let memory = shop.memory.clone();
    let Shop { setup: Setup { ring, .. }, .. } = shop;
    let report = ring.close(SHORT);
    assert_eq!((report.unissued, report.completed, report.unquiet), (1, 0, 4));
    let cqe = report.completions.iter().find(|cqe| cqe.user_data() == 1).unwrap();
    assert_eq!(failure(cqe), (errno::ESHUTDOWN, Stage::Shutdown, 0));
    (0..4).for_each(|worker| memory.release(&format!("held{worker}")));
    assert_eq!(memory.calls().len(), calls);
}

/// A client ends with its last handle or entry, not before; close waits for that, and for no longer than it is told.
#[test]
fn a_client_ends_with_its_last_user() {
    let mut shop = Shop::new(16);
    let other = shop.store.clone();
    assert_eq!(other.close(LIMIT), Err(CloseError::InUse));
    shop.memory.hold("a");
    shop.submit(shop.put("a", 0));
    shop.await_calls(1);
    let Shop { mut setup, memory, store } = shop;
    // The entry has it still.
    assert_eq!(store.close(LIMIT), Err(CloseError::InUse));
    memory.release("a");
    assert_eq!(setup.reap(1)[0].result(), Ok(PAGE as u32));
    setup.ours.unregister().unwrap();
}

#[test]
fn a_client_without_entries_ends_at_once() {
    let Shop { setup, store, .. } = Shop::new(16);
    store.close(LIMIT).unwrap();
    setup.ours.unregister().unwrap();
}

/// A poller that dies ends what is in a call as it ends what a transport has.
#[test]
fn a_dead_poller_leaves_calls_alone() {
    let mut shop = Shop::on(Setup::simulated(16, moonring::sim::Sim::new(1).panic_at(1)));
    shop.memory.hold("a");
    shop.submit(shop.put("a", 0).user_data(1));
    shop.await_calls(1);
    let (_signaller, never) = moonring::fence::host();
    shop.submit(shop.put("b", 0).user_data(2).wait(&never));
    shop.submit(shop.setup.read(0, 8).user_data(3));
    let mut cqes = shop.setup.reap(3);
    cqes.sort_by_key(|cqe| cqe.user_data());
    assert!(cqes.iter().all(|cqe| failure(cqe) == (errno::EOWNERDEAD, Stage::Shutdown, 0)), "{cqes:?}");
    let unquiet: Vec<_> = cqes.iter().map(|cqe| cqe.flags().contains(CqeFlags::UNQUIET)).collect();
    assert_eq!(unquiet, [true, false, true]);
    shop.memory.release("a");
    crate::await_that(|| shop.memory.object("a").is_some());
}

/// The Store gives up on a key: nobody knows when its page is left alone, so the entry never is, and the ring says so.
#[test]
fn what_the_store_gave_up_on_is_never_quiet() {
    let mut shop = Shop::new(16);
    shop.memory.give_up("a");
    shop.submit(shop.get("a", 1).user_data(1));
    let cqe = shop.setup.reap(1)[0];
    assert_eq!((failure(&cqe), cqe.flags()), ((errno::ENOTRECOVERABLE, Stage::Transfer, -800), CqeFlags::MORE));
    assert!(matches!(shop.setup.ours.unregister(), Err(UnregisterError::Busy(1))));
    assert_eq!(shop.run(shop.exist("b")).result(), Ok(0));
    let ours = shop.setup.ours.clone();
    let report = shop.setup.ring.close(SHORT);
    assert_eq!((report.finished, report.unquiet), (true, 1));
    let cqe = report.completions[0];
    assert_eq!((cqe.user_data(), cqe.flags()), (1, CqeFlags::NOTIF | CqeFlags::UNQUIET));
    assert!(matches!(ours.unregister(), Err(UnregisterError::Busy(1))));
}

/// Tells when it is let go of.
struct Page(Sender<()>);

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

/// Futures of Gets: dropped while no worker has it, the entry is never issued; dropped while one has, the buffer is let go of
/// when the call has returned.
#[test]
fn dropped_futures_let_go_of_their_pages_when_calls_return() {
    let mut shop = Shop::new(16);
    shop.occupy_three();
    shop.memory.hold("a");
    let page = |shop: &mut Shop, key: &str| {
        let (dropped, drops) = channel();
        let get = shop.get(key, 1);
        let future = shop.setup.ring.submission().push_future(get).unwrap().keep(Page(dropped));
        shop.setup.ring.submit().unwrap();
        (future, drops)
    };
    let calls = shop.memory.calls().len();
    let (in_call, in_call_drops) = page(&mut shop, "a");
    shop.await_calls(calls + 1);
    let (waiting, waiting_drops) = page(&mut shop, "b");
    drop(waiting);
    waiting_drops.recv_timeout(LIMIT).unwrap();
    drop(in_call);
    assert!(in_call_drops.recv_timeout(SHORT).is_err(), "the call may still write there");
    shop.memory.release("a");
    in_call_drops.recv_timeout(LIMIT).unwrap();
    assert_eq!(shop.memory.calls().len(), calls + 1, "the other one was never asked for");
    shop.let_go();
    shop.setup.reap(3);
}

/// A forked child that drops its parent's client leaves it alone, and does not wait for it.
#[test]
fn a_forked_child_leaves_the_client_alone() {
    let mut shop = Shop::new(16);
    // SAFETY: the child allocates, which glibc allows after a fork, drops a handle and ends without running anything else.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let left = shop.store.close(SHORT);
        // SAFETY: as above.
        unsafe { libc::_exit(if left == Err(CloseError::Left) { 0 } else { 1 }) }
    }
    let mut status = 0;
    // SAFETY: the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child hung, crashed or used its parent's client");
    assert_eq!(shop.run(shop.exist("a")).result(), Ok(0));
    shop.store.close(LIMIT).unwrap();
}
