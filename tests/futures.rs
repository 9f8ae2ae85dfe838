//! Futures of single entries: what they say, when they give their buffer back, and what dropping them does at every stage.

mod common;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use common::{LIMIT, Setup};
use moonring::code::errno;
use moonring::fence::{self, FenceStatus};
use moonring::opcode::{Cancel, Nop, Timeout, Wait};
use moonring::sim::{Probe, Sim};
use moonring::{CqeFlags, Ended, Engine, EntryFlags, EntryFuture, Refusal, Ring, Stage, WaitError};

/// As long as a test needs it, or a bit more.
const AGES: Duration = Duration::from_secs(3600);

/// The future's output, by a thread that sleeps in between and is woken by its waker alone.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let end = Instant::now() + LIMIT;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        assert!(Instant::now() < end, "no wake-up within {LIMIT:?}");
        thread::park_timeout(LIMIT);
    }
}

/// One poll, by nobody who could be woken.
fn poll<T: Send + 'static>(future: &mut EntryFuture<T>) -> Poll<Ended<T>> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// A buffer that tells when it is let go of.
#[derive(Debug)]
struct Page {
    number: usize,
    dropped: Sender<usize>,
}

impl Page {
    fn new(number: usize) -> (Page, Receiver<usize>) {
        let (dropped, drops) = channel();
        (Page { number, dropped }, drops)
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let _ = self.dropped.send(self.number);
    }
}

/// It has been let go of, once.
fn is_dropped(drops: &Receiver<usize>, number: usize) {
    assert_eq!(drops.recv_timeout(LIMIT), Ok(number));
    assert!(drops.try_recv().is_err());
}

fn is_kept(drops: &Receiver<usize>) {
    assert!(drops.try_recv().is_err(), "it is let go of too early");
}

fn until(mut what: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !what() {
        assert!(Instant::now() < end);
        thread::yield_now();
    }
}

fn until_issued(probe: &Probe, count: u64) {
    until(|| probe.issued() >= count);
}

/// A simulated ring whose transfers last for ever, unless the ring ends them.
fn endless(entries: u32) -> (Setup, Probe) {
    let sim = Sim::new(1).delay(AGES..AGES + Duration::from_secs(1));
    let probe = sim.probe();
    (Setup::simulated(entries, sim), probe)
}

fn code<T>(ended: &Ended<T>) -> (i32, Stage) {
    (ended.completion.res(), ended.completion.stage())
}

#[test]
fn a_future_gives_result_and_buffer_and_the_queue_has_the_others() {
    let mut setup = Setup::loopback(8);
    setup.theirs.write_at(0, b"a page").unwrap();
    let (page, drops) = Page::new(3);
    let entry = setup.read(0, 6).user_data(7);
    let mut future = setup.ring.submission().push_future(entry).unwrap().keep(page);
    setup.push(Nop::new().build().user_data(8));
    assert!(poll(&mut future).is_pending());
    setup.ring.submit().unwrap();
    let ended = block_on(future);
    assert_eq!((ended.result(), ended.completion.user_data()), (Ok(6), 7));
    assert!(ended.notif.is_none() && ended.completion.flags().is_empty());
    assert_eq!(ended.buffer.as_ref().map(|page| page.number), Some(3));
    is_kept(&drops);
    drop(ended);
    is_dropped(&drops, 3);
    let mut bytes = [0; 6];
    setup.ours.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"a page");
    assert_eq!(setup.reap(1)[0].user_data(), 8);
    assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
}

/// A reaper is told when only entries with futures were left, and their units are there for whoever hears of them.
#[test]
fn units_come_back_with_the_future() {
    let mut setup = Setup::loopback(2);
    for round in 0..1000 {
        let futures: Vec<_> = (0..2)
            .map(|n| setup.ring.submission().push_future(Nop::new().build().user_data(2 * round + n)).unwrap())
            .collect();
        assert!(matches!(setup.refused(Nop::new().build()), Refusal::Full { capacity: 2 }));
        setup.ring.submit().unwrap();
        if round % 2 == 0 {
            assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
        }
        for (n, future) in futures.into_iter().enumerate() {
            assert_eq!(block_on(future).completion.user_data(), 2 * round + n as u64);
        }
    }
}

/// The result is there at its limit, the buffer when the transport has let go of it.
#[test]
fn the_buffer_of_a_late_transfer_comes_back_when_it_is_quiet() {
    let sim = Sim::new(2).unquiet(1000).delay(Duration::from_millis(300)..Duration::from_millis(301));
    let mut setup = Setup::simulated(8, sim);
    let (page, drops) = Page::new(1);
    let entry = setup.read(0, 8);
    let mut future = setup.ring.submission().push_future(entry).unwrap().keep(page);
    setup.ring.submit().unwrap();
    let result = block_on(future.result());
    assert_eq!((result.res(), result.flags()), (-errno::ETIMEDOUT, CqeFlags::MORE));
    assert_eq!(block_on(future.result()).res(), -errno::ETIMEDOUT);
    assert!(poll(&mut future).is_pending());
    is_kept(&drops);
    let ended = block_on(future);
    assert_eq!((ended.completion.res(), ended.completion.flags()), (-errno::ETIMEDOUT, CqeFlags::MORE));
    let notif = ended.notif.unwrap();
    assert_eq!((notif.res(), notif.flags()), (0, CqeFlags::NOTIF));
    assert!(ended.buffer.is_some());
    setup.ours.unregister().unwrap();
}

/// Dropped before it is submitted, at the gate, in a chain and behind a drain: never issued, its unit and its buffer are back,
/// and no completion shows up.
#[test]
fn dropped_before_it_is_issued_it_never_is() {
    for case in 0..4 {
        println!("case {case}");
        let (mut setup, probe) = endless(4);
        let (signaller, held) = fence::host();
        let blocker = Wait::new().build().wait(&held).user_data(1);
        let mut entry = setup.read(0, 8);
        match case {
            0 => {}
            1 => entry = entry.wait(&held),
            2 => setup.push(blocker.flags(EntryFlags::IO_LINK)),
            _ => {
                setup.push(blocker);
                entry = entry.flags(EntryFlags::IO_DRAIN);
            }
        }
        let (page, drops) = Page::new(case);
        let future = setup.ring.submission().push_future(entry).unwrap().keep(page);
        if case > 0 {
            setup.ring.submit().unwrap();
        }
        drop(future);
        if case == 0 {
            is_kept(&drops);
            setup.ring.submit().unwrap();
        }
        if case == 2 {
            // Its turn has to come, once the poller has heard of the drop: it obeys one call after the other.
            assert_eq!(setup.ring.controller().cancel(Cancel::user_data(u64::MAX)), Ok(0));
            signaller.signal();
            is_dropped(&drops, case);
        } else {
            is_dropped(&drops, case);
            signaller.signal();
        }
        let blockers = usize::from(case >= 2);
        assert_eq!(setup.reap(blockers).len(), blockers);
        assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
        (0..4).for_each(|n| setup.push(Nop::new().build().user_data(n)));
        assert_eq!(setup.reap(4).len(), 4);
        assert_eq!(probe.issued(), 0);
        setup.ours.unregister().unwrap();
    }
}

/// Dropped with the transport at it: it goes on, and buffer, region and unit are taken until it has landed.
#[test]
fn dropped_while_it_is_issued_it_keeps_its_buffer_until_it_lands() {
    let sim = Sim::new(3).delay(Duration::from_millis(300)..Duration::from_millis(301));
    let probe = sim.probe();
    let mut setup = Setup::simulated(1, sim);
    setup.theirs.write_at(0, b"landed").unwrap();
    let (page, drops) = Page::new(1);
    let entry = setup.read(0, 6);
    let future = setup.ring.submission().push_future(entry).unwrap().keep(page);
    setup.ring.submit().unwrap();
    until_issued(&probe, 1);
    drop(future);
    // A call that goes the same way as the cancel, after it.
    assert_eq!(setup.ring.controller().cancel(moonring::opcode::Cancel::any()), Ok(0));
    is_kept(&drops);
    assert!(matches!(setup.refused(Nop::new().build()), Refusal::Full { .. }));
    is_dropped(&drops, 1);
    let mut bytes = [0; 6];
    setup.ours.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"landed");
    setup.ours.unregister().unwrap();
    assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
}

/// Dropped between its result and quiet.
#[test]
fn dropped_when_it_is_overdue_it_keeps_its_buffer_until_it_is_quiet() {
    let sim = Sim::new(4).unquiet(1000).delay(Duration::from_millis(200)..Duration::from_millis(201));
    let mut setup = Setup::simulated(4, sim);
    let (page, drops) = Page::new(1);
    let entry = setup.read(0, 6);
    let mut future = setup.ring.submission().push_future(entry).unwrap().keep(page);
    setup.ring.submit().unwrap();
    assert_eq!(block_on(future.result()).flags(), CqeFlags::MORE);
    drop(future);
    is_kept(&drops);
    assert!(setup.ours.unregister().is_err());
    is_dropped(&drops, 1);
    setup.ours.unregister().unwrap();
}

/// Dropped after its end, with or without having been asked: it lets go of the buffer itself.
#[test]
fn dropped_after_its_end_it_drops_its_buffer() {
    let mut setup = Setup::loopback(4);
    let (page, drops) = Page::new(1);
    let entry = setup.read(0, 6);
    let mut future = setup.ring.submission().push_future(entry).unwrap().keep(page);
    let end = future.fence();
    setup.ring.submit().unwrap();
    assert_eq!(end.wait_timeout(LIMIT), FenceStatus::Signalled);
    assert_eq!(block_on(future.result()).res(), 6);
    is_kept(&drops);
    drop(future);
    is_dropped(&drops, 1);
}

#[test]
fn a_detached_entry_runs_and_its_buffer_is_dropped() {
    let mut setup = Setup::loopback(4);
    setup.theirs.write_at(0, b"landed").unwrap();
    let (signaller, gate) = fence::host();
    let (page, drops) = Page::new(1);
    let entry = setup.read(0, 6).wait(&gate);
    setup.ring.submission().push_future(entry).unwrap().keep(page).detach();
    setup.ring.submit().unwrap();
    signaller.signal();
    is_dropped(&drops, 1);
    let mut bytes = [0; 6];
    setup.ours.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"landed");
}

/// Cancelled, it is ready with the cancel's result, and gives its buffer back. What is issued completes.
#[test]
fn cancelled_it_gives_its_buffer_back() {
    let sim = Sim::new(5).delay(Duration::from_millis(100)..Duration::from_millis(101));
    let probe = sim.probe();
    let mut setup = Setup::simulated(8, sim);
    let (_signaller, never) = fence::host();
    let [gated, issued, early] = [setup.read(0, 8).wait(&never), setup.read(8, 8), setup.read(16, 8).wait(&never)];
    let gated = setup.ring.submission().push_future(gated).unwrap().keep(1);
    let issued = setup.ring.submission().push_future(issued).unwrap().keep(2);
    setup.ring.submit().unwrap();
    until_issued(&probe, 1);
    gated.cancel();
    issued.cancel();
    let ended = block_on(gated);
    assert_eq!((code(&ended), ended.buffer), ((-errno::ECANCELED, Stage::Cancel), Some(1)));
    let ended = block_on(issued);
    assert_eq!((ended.result(), ended.buffer), (Ok(8), Some(2)));
    // Before the poller knows it. What depends on it fails, and is told why.
    let early = setup.ring.submission().push_future(early).unwrap();
    let end = early.fence();
    early.cancel();
    setup.push(Wait::new().build().wait(&end));
    let failed = setup.reap(1)[0];
    assert_eq!((failed.res(), failed.detail()), (-errno::ECANCELED, -errno::ECANCELED));
    assert_eq!(code(&block_on(early)), (-errno::ECANCELED, Stage::Cancel));
    assert_eq!(probe.issued(), 1);
}

/// The ring closes: what was not issued ends, and so does what can be stopped. What cannot keeps its buffer for ever.
#[test]
fn a_closed_ring_ends_its_futures() {
    for alone in [true, false] {
        let (mut setup, probe) = endless(8);
        let (_signaller, never) = fence::host();
        let (pages, drops): (Vec<_>, Vec<_>) = (0..3).map(Page::new).unzip();
        let entries = [setup.read(0, 8).wait(&never), setup.read(0, 8), setup.read(0, 8)];
        let mut futures: Vec<_> = (entries.into_iter().zip(pages))
            .map(|(entry, page)| setup.ring.submission().push_future(entry).unwrap().keep(page))
            .collect();
        setup.ring.submit().unwrap();
        until_issued(&probe, 2);
        // Dropped with the transport at it.
        futures.pop();
        let Setup { engine, ring, ours, theirs, .. } = setup;
        let others = (!alone).then_some((engine, ours, theirs));
        let report = ring.close(Duration::from_millis(20));
        assert!(report.finished && report.completions.is_empty(), "{report:?}");
        let mut futures = futures.into_iter();
        let gated = block_on(futures.next().unwrap());
        assert_eq!((code(&gated), gated.buffer.is_some()), ((-errno::ESHUTDOWN, Stage::Shutdown), true));
        let issued = block_on(futures.next().unwrap());
        assert_eq!((code(&issued), issued.buffer.is_some()), ((-errno::ESHUTDOWN, Stage::Transfer), alone));
        assert_eq!(issued.completion.flags().contains(CqeFlags::UNQUIET), !alone);
        if alone {
            is_dropped(&drops[2], 2);
        } else {
            is_kept(&drops[1]);
            is_kept(&drops[2]);
        }
        drop(others);
    }
}

/// The poller dies: every future hears of it, although nobody reaps and the queue is full.
#[test]
fn a_dead_poller_ends_its_futures() {
    let mut setup = Setup::simulated(4, Sim::new(6).panic_at(1));
    for n in 0..8 {
        let end = Instant::now() + LIMIT;
        while setup.ring.submission().push(Nop::new().build().user_data(n)).is_err() {
            assert!(Instant::now() < end);
        }
        setup.ring.submit().unwrap();
    }
    let (_signaller, never) = fence::host();
    let (page, drops) = Page::new(0);
    until(|| setup.ring.completion().len() == 8);
    let gated = setup.ring.submission().push_future(Wait::new().build().wait(&never)).unwrap();
    let entry = setup.read(0, 8);
    let issued = setup.ring.submission().push_future(entry).unwrap().keep(page);
    setup.ring.submit().unwrap();
    assert_eq!(code(&block_on(gated)), (-errno::EOWNERDEAD, Stage::Shutdown));
    let ended = block_on(issued);
    assert_eq!((code(&ended), ended.completion.flags()), ((-errno::EOWNERDEAD, Stage::Shutdown), CqeFlags::UNQUIET));
    assert!(ended.buffer.is_none());
    is_kept(&drops);
    assert_eq!(setup.ring.completion().count(), 8);
    assert!(matches!(setup.ring.submission().push_future(Nop::new().build()).unwrap_err().reason, Refusal::PollerDead));
}

/// A submitter's entry that comes too late for a ring that closed.
#[test]
fn what_no_poller_took_ends_with_its_submitter() {
    let mut setup = Setup::loopback(4);
    let mut submitter = setup.ring.submitter();
    let (page, drops) = Page::new(1);
    let [kept, dropped] = [(); 2].map(|()| submitter.push_future(setup.read(0, 8)).unwrap());
    drop(dropped.keep(page));
    drop(setup.ring);
    is_kept(&drops);
    drop(submitter);
    is_dropped(&drops, 1);
    assert_eq!(code(&block_on(kept)), (-errno::ESHUTDOWN, Stage::Shutdown));
    setup.ours.unregister().unwrap();
}

/// A skipped entry and a multishot Timeout: the future hears of the end, once.
#[test]
fn a_future_hears_of_the_end_whatever_the_flags() {
    let mut setup = Setup::loopback(8);
    let skipped = Nop::new().build().flags(EntryFlags::CQE_SKIP_SUCCESS);
    let failing = Nop::new().result(-errno::EIO).build().flags(EntryFlags::CQE_SKIP_SUCCESS | EntryFlags::IO_LINK);
    let ticks = Timeout::new(Duration::from_millis(1)).multishot(3).build().user_data(5);
    let skipped = setup.ring.submission().push_future(skipped).unwrap();
    let failing = setup.ring.submission().push_future(failing).unwrap();
    let hidden = setup.ring.submission().push_future(Nop::new().build()).unwrap();
    let ticks = setup.ring.submission().push_future(ticks).unwrap();
    setup.ring.submit().unwrap();
    assert_eq!(block_on(skipped).result(), Ok(0));
    assert_eq!(block_on(failing).completion.res(), -errno::EIO);
    assert_eq!(block_on(hidden).completion.res(), -errno::ECANCELED);
    let ended = block_on(ticks);
    assert_eq!((code(&ended), ended.completion.flags()), ((-errno::ETIME, Stage::Done), CqeFlags::empty()));
    assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
}

/// What its user does wrong stays there: the poller goes on.
#[test]
fn panics_of_buffers_and_wakers_do_no_harm() {
    struct Loud;
    impl Drop for Loud {
        fn drop(&mut self) {
            panic!("a buffer's drop panics, as the test wants");
        }
    }
    struct LoudWaker;
    impl Wake for LoudWaker {
        fn wake(self: Arc<Self>) {
            panic!("a waker panics, as the test wants");
        }
    }
    let mut setup = Setup::loopback(8);
    let (signaller, gate) = fence::host();
    let detached = setup.ring.submission().push_future(Wait::new().build().wait(&gate)).unwrap();
    let mut woken = setup.ring.submission().push_future(Wait::new().build().wait(&gate)).unwrap();
    let waker = Waker::from(Arc::new(LoudWaker));
    assert!(Pin::new(&mut woken).poll(&mut Context::from_waker(&waker)).is_pending());
    detached.keep(Loud).detach();
    setup.ring.submit().unwrap();
    signaller.signal();
    assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
    setup.push(Nop::new().build().user_data(9));
    assert_eq!(setup.reap(1)[0].user_data(), 9);
    assert_eq!(block_on(woken).result(), Ok(0));
}

/// Tasks on two threads, each with a submitter, await, give up after random times, cancel and drop: every buffer comes back
/// once, and so does every unit.
#[test]
fn tasks_that_give_up_lose_no_buffer_and_no_unit() {
    const TASKS: usize = 4;
    const ROUNDS: usize = 300;
    let sim = Sim::new(7).delay(Duration::from_micros(1)..Duration::from_millis(2)).failures(50).unquiet(50);
    let mut setup = Setup::simulated(16, sim);
    let dropped = Arc::new(AtomicUsize::new(0));
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let mut submitter = setup.ring.submitter();
            let entries: Vec<_> = (0..ROUNDS).map(|round| setup.read(8 * (round % 1000), 8)).collect();
            let dropped = Arc::clone(&dropped);
            runtime.spawn(async move {
                let mut random = fastrand::Rng::with_seed(task as u64);
                for mut entry in entries {
                    let future = loop {
                        match submitter.push_future(entry) {
                            Ok(future) => break future,
                            Err(refused) => entry = refused.entry,
                        }
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    };
                    let mut future = future.keep(Counted(Arc::clone(&dropped)));
                    submitter.submit().unwrap();
                    let limit = Duration::from_micros(random.u64(0..2500));
                    match random.u8(0..5) {
                        0 => drop(future),
                        1 => future.detach(),
                        2 => {
                            let _ = tokio::time::timeout(limit, future).await;
                        }
                        3 => {
                            future.result().await;
                        }
                        _ => {
                            future.cancel();
                            assert!(future.await.buffer.is_some());
                        }
                    }
                }
            })
        })
        .collect();
    runtime.block_on(async {
        for task in tasks {
            tokio::time::timeout(LIMIT, task).await.unwrap().unwrap();
        }
    });
    until(|| dropped.load(SeqCst) == TASKS * ROUNDS);
    assert_eq!(setup.ring.wait(1), Err(WaitError::NothingOutstanding));
    (0..16).for_each(|n| setup.push(Nop::new().build().user_data(n)));
    assert_eq!(setup.reap(16).len(), 16);
    setup.ours.unregister().unwrap();
    assert_eq!(dropped.load(SeqCst), TASKS * ROUNDS);
}

/// A future may be sent, its ring need not be at hand, and any number is awaited at once.
#[tokio::test]
async fn many_futures_of_one_task() {
    fn assert_send<T: Send>(value: T) -> T {
        value
    }
    let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
    let (signaller, gate) = fence::host();
    let futures: Vec<_> = (0..64)
        .map(|n| assert_send(ring.submission().push_future(Wait::new().build().wait(&gate).user_data(n)).unwrap()))
        .collect();
    ring.submit().unwrap();
    let all = tokio::spawn(async move {
        let mut sum = 0;
        for future in futures {
            sum += future.await.completion.user_data();
        }
        sum
    });
    tokio::time::sleep(Duration::from_millis(2)).await;
    signaller.signal();
    assert_eq!(tokio::time::timeout(LIMIT, all).await.unwrap().unwrap(), 64 * 63 / 2);
}
