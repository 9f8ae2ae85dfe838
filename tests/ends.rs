//! A ring's ends: its two halves, waiting at them, the descriptor for foreign event loops, and closing.

mod common;

use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, Setup};
use moonring::code::errno;
use moonring::sim::{Probe, Sim};
use moonring::{
    Completion, Cqe, CqeFlags, Engine, Entry, EntryFlags, EventFd, Refusal, Ring, Stage, Submission, UnregisterError,
    WaitError, fence, opcode,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::unix::AsyncFd;

fn nop(user_data: u64) -> Entry {
    opcode::Nop::new().build().user_data(user_data)
}

fn halves(entries: u32) -> (Submission, Completion) {
    Ring::builder().build(entries, &Engine::loopback()).unwrap().split()
}

/// Pushes everything, submitting and yielding while the ring is full.
fn push_all(submission: &mut Submission, entries: impl Iterator<Item = Entry>) {
    let end = Instant::now() + 3 * LIMIT;
    for mut entry in entries {
        while let Err(refused) = submission.submission().push(entry) {
            assert!(matches!(refused.reason, Refusal::Full { .. }), "{}", refused.reason);
            assert!(Instant::now() < end, "full for too long");
            submission.submit().unwrap();
            thread::yield_now();
            entry = refused.entry;
        }
    }
    submission.submit().unwrap();
}

/// Both halves at work, on two threads that are neither the one that built the ring.
#[test]
fn two_halves_on_two_threads_lose_and_double_nothing() {
    const COUNT: u64 = 100_000;
    let (mut submission, mut completion) = halves(64);
    let producer = thread::spawn(move || push_all(&mut submission, (0..COUNT).map(nop)));
    let consumer = thread::spawn(move || {
        let mut next = 0;
        loop {
            match completion.wait_timeout(1, LIMIT) {
                Ok(_) => {
                    for cqe in completion.completion() {
                        assert_eq!(cqe.user_data(), next);
                        next += 1;
                    }
                }
                // The submitting half is gone, so this is the end.
                Err(WaitError::NothingOutstanding) => return next,
                Err(error) => panic!("after {next}: {error}"),
            }
        }
    });
    producer.join().unwrap();
    assert_eq!(consumer.join().unwrap(), COUNT);
}

/// io_uring's recorded outcomes: two are wanted, `min_wait` is 5 ms, here with limits far from it. What comes at what time is
/// told by the count: on a busy machine everything may be late, nothing may be early.
#[test]
fn wait_min_waits_for_many_then_for_one() {
    const MIN: Duration = Duration::from_millis(5);
    let mut setup = Setup::loopback(8);
    let (signaller, never) = fence::host();
    setup.push(opcode::Wait::new().build().wait(&never));
    setup.push(nop(1));
    setup.ring.submit().unwrap();
    // One is ready, the second never comes: it ends at `min_wait`, not at once and not at the limit.
    let start = Instant::now();
    assert_eq!(setup.ring.wait_min(2, MIN, LIMIT), Ok(1));
    assert!(start.elapsed() >= MIN && start.elapsed() < LIMIT, "{:?}", start.elapsed());
    // Two are ready: at once.
    setup.push(nop(2));
    setup.ring.submit().unwrap();
    assert_eq!(setup.ring.wait_min(2, LIMIT, LIMIT), Ok(2));
    assert!(start.elapsed() < LIMIT);
    assert_eq!(setup.ring.completion().count(), 2);
    // None comes: the limit.
    let start = Instant::now();
    assert_eq!(setup.ring.wait_min(2, MIN, Duration::from_millis(30)), Err(WaitError::TimedOut));
    assert!(start.elapsed() >= Duration::from_millis(30));
    // A limit before `min_wait`.
    let start = Instant::now();
    assert_eq!(setup.ring.wait_min(2, LIMIT, MIN), Err(WaitError::TimedOut));
    assert!(start.elapsed() >= MIN && start.elapsed() < LIMIT);
    // One comes after `min_wait`: then.
    setup.push(opcode::Timeout::new(Duration::from_millis(12)).build().user_data(3));
    let start = Instant::now();
    setup.ring.submit().unwrap();
    assert_eq!(setup.ring.wait_min(2, MIN, LIMIT), Ok(1));
    assert!(start.elapsed() >= Duration::from_millis(12) && start.elapsed() < LIMIT, "{:?}", start.elapsed());
    assert_eq!(setup.ring.completion().map(|cqe| cqe.user_data()).collect::<Vec<_>>(), [3]);
    // Two, the second after a while and before `min_wait`: then.
    setup.push(nop(4));
    setup.push(opcode::Timeout::new(Duration::from_millis(12)).build().user_data(5));
    setup.ring.submit().unwrap();
    let start = Instant::now();
    assert_eq!(setup.ring.wait_min(2, LIMIT, LIMIT), Ok(2));
    assert!(start.elapsed() < LIMIT);
    assert_eq!(setup.ring.completion().count(), 2);
    // The same at a half on its own; then nobody is left, and it waits for neither.
    signaller.signal();
    assert_eq!(setup.ring.wait(1), Ok(1));
    assert_eq!(setup.ring.completion().count(), 1);
    let (submission, mut completion) = setup.ring.split();
    assert_eq!(completion.wait_min(2, MIN, 2 * MIN), Err(WaitError::TimedOut));
    drop(submission);
    assert_eq!(completion.wait_min(2, LIMIT, LIMIT), Err(WaitError::NothingOutstanding));
}

/// While somebody may submit, waiting is no error. It ends when nobody is left.
#[test]
fn a_waiting_half_wakes_when_the_submitting_half_is_dropped() {
    for with_submitter in [false, true] {
        let (mut submission, mut completion) = halves(8);
        assert_eq!(completion.wait_timeout(1, Duration::from_millis(5)), Err(WaitError::TimedOut));
        let submitter = with_submitter.then(|| submission.submitter());
        submission.submission().push(nop(1)).unwrap();
        let waiter = thread::spawn(move || {
            // More than will come, so it sleeps until nobody is left to submit more.
            let first = completion.wait(3);
            let reaped: Vec<u64> = completion.completion().map(|cqe| cqe.user_data()).collect();
            (first, reaped, completion.wait(1))
        });
        thread::sleep(Duration::from_millis(20));
        drop(submission); // Submits what it has.
        if let Some(submitter) = submitter {
            thread::sleep(Duration::from_millis(20));
            assert!(!waiter.is_finished());
            drop(submitter);
        }
        assert_eq!(waiter.join().unwrap(), (Ok(1), vec![1], Err(WaitError::NothingOutstanding)));
    }
}

/// What the submitting half leaves is still carried out: an open chain ends with what was pushed.
#[test]
fn the_reaping_half_outlives_the_submitting_one() {
    let (mut submission, mut completion) = halves(8);
    let (signaller, fence) = fence::host();
    submission.submission().push(opcode::Wait::new().build().wait(&fence).user_data(1)).unwrap();
    submission.submission().push(nop(2).flags(EntryFlags::IO_LINK)).unwrap();
    drop(submission);
    assert_eq!(completion.wait_timeout(1, LIMIT), Ok(1));
    assert_eq!(completion.completion().map(|cqe| cqe.user_data()).collect::<Vec<_>>(), [2]);
    signaller.signal();
    assert_eq!(completion.wait_timeout(1, LIMIT), Ok(1));
    assert_eq!(completion.completion().next().map(|cqe| (cqe.user_data(), cqe.res())), Some((1, 0)));
}

/// The ring lives as long as one half does, and no longer. Without a reaper it fills up.
#[test]
fn the_last_half_closes_the_ring() {
    for submission_first in [true, false] {
        let (mut submission, completion) = halves(8);
        let mut submitter = submission.submitter();
        if submission_first {
            drop(submission);
            submitter.push(nop(0)).unwrap();
            submitter.submit().unwrap();
            drop(completion);
        } else {
            drop(completion);
            let mut accepted = 0;
            let end = Instant::now() + LIMIT;
            while accepted < 16 + 8 {
                assert!(Instant::now() < end, "only {accepted} were accepted");
                accepted += u64::from(submission.submission().push(nop(accepted)).is_ok());
                submission.submit().unwrap();
            }
            let refused = submission.submission().push(nop(99)).unwrap_err();
            assert_eq!(refused.reason, Refusal::Full { capacity: 8 });
            let start = Instant::now();
            drop(submission);
            assert!(start.elapsed() < Duration::from_secs(11), "{:?}", start.elapsed());
        }
        assert_eq!(submitter.push(nop(1)).unwrap_err().reason, Refusal::Closed);
    }
}

/// Reads with fences signalled by a third thread, submitted and reaped on two: everything a ring does works on its halves.
#[test]
fn halves_carry_transfers_and_fences() {
    let setup = Setup::loopback(32);
    let (mut signaller, timeline) = fence::timeline(0);
    let entries: Vec<Entry> =
        (0..2_000).map(|n| setup.read(0, 8).wait(&timeline.at(n / 16 + 1)).user_data(n)).collect();
    let Setup { ring, .. } = setup;
    let (mut submission, mut completion) = ring.split();
    let producer = thread::spawn(move || push_all(&mut submission, entries.into_iter()));
    let signals = thread::spawn(move || {
        for value in 1..=2_000 / 16 + 1 {
            signaller.signal(value).unwrap();
            thread::yield_now();
        }
        signaller
    });
    let mut cqes: Vec<Cqe> = Vec::new();
    while cqes.len() < 2_000 {
        completion.wait_timeout(1, LIMIT).unwrap();
        cqes.extend(completion.completion());
    }
    assert!(cqes.iter().all(|cqe| cqe.result() == Ok(8)));
    let mut all: Vec<u64> = cqes.iter().map(Cqe::user_data).collect();
    all.sort_unstable();
    assert_eq!(all, (0..2_000).collect::<Vec<_>>());
    producer.join().unwrap();
    drop(signals.join().unwrap());
}

/// True if the descriptor is readable within `limit`.
fn readable(eventfd: &EventFd, limit: Duration) -> bool {
    let limit = Timespec::try_from(limit).unwrap();
    poll(&mut [PollFd::new(eventfd, PollFlags::IN)], Some(&limit)).unwrap() == 1
}

/// It was signalled once or will be soon: clears it.
fn told(eventfd: &EventFd) -> bool {
    readable(eventfd, LIMIT) && eventfd.clear()
}

/// It is not signalled, not even a little later: the write follows the completion.
fn not_told(eventfd: &EventFd) -> bool {
    !readable(eventfd, Duration::from_millis(20))
}

fn nops(ring: &mut Ring, count: u64) {
    (0..count).for_each(|n| ring.submission().push(nop(n)).unwrap());
    ring.submit().unwrap();
}

#[test]
fn the_eventfd_tells_of_completions_in_an_empty_queue_once() {
    let mut ring = Ring::builder().build(32, &Engine::loopback()).unwrap();
    nops(&mut ring, 1);
    assert_eq!(ring.wait(1), Ok(1));
    // Made late, it tells what is there.
    let eventfd = ring.eventfd().unwrap();
    assert!(told(&eventfd));
    assert!(!eventfd.clear());
    assert_eq!(ring.eventfd().unwrap().as_raw_fd(), eventfd.as_raw_fd());
    // Nobody reaped, so nobody is told again.
    nops(&mut ring, 3);
    assert_eq!(ring.wait(4), Ok(4));
    assert!(not_told(&eventfd));
    // A reaper that leaves some behind makes it readable again; one that leaves none does not.
    assert_eq!(ring.completion().take(2).count(), 2);
    assert!(told(&eventfd));
    assert_eq!(ring.completion().count(), 2);
    assert!(not_told(&eventfd));
    // Skipped completions are none.
    ring.submission().push(nop(9).flags(EntryFlags::CQE_SKIP_SUCCESS)).unwrap();
    assert_eq!(ring.submit_and_wait(1), Err(WaitError::NothingOutstanding));
    assert!(not_told(&eventfd));
    // Eight at once: one publish, one signal.
    nops(&mut ring, 8);
    assert!(told(&eventfd));
    assert_eq!(ring.wait(8), Ok(8));
    assert_eq!(ring.completion().count(), 8);
    // A half has the same.
    let (mut submission, mut completion) = ring.split();
    assert_eq!(completion.eventfd().unwrap().as_raw_fd(), eventfd.as_raw_fd());
    while eventfd.clear() {}
    push_all(&mut submission, [nop(1)].into_iter());
    assert!(told(&eventfd));
    // It outlives the ring, and is silent.
    drop((submission, completion));
    assert!(not_told(&eventfd));
}

#[test]
fn a_muted_eventfd_is_silent_and_loses_nothing() {
    let mut ring = Ring::builder().build(32, &Engine::loopback()).unwrap();
    let eventfd = ring.eventfd().unwrap();
    assert!(not_told(&eventfd));
    eventfd.mute();
    nops(&mut ring, 4);
    assert_eq!(ring.wait(4), Ok(4));
    assert_eq!(ring.completion().take(1).count(), 1);
    assert!(not_told(&eventfd));
    eventfd.unmute();
    assert!(told(&eventfd));
    assert_eq!(ring.completion().count(), 3);
    nops(&mut ring, 1);
    assert!(told(&eventfd));
}

#[test]
fn the_eventfd_tells_of_the_pollers_death() {
    let mut setup = Setup::simulated(8, Sim::new(1).panic_at(1));
    let eventfd = setup.ring.eventfd().unwrap();
    setup.push(setup.read(0, 8));
    setup.ring.submit().unwrap();
    let end = Instant::now() + LIMIT;
    let mut reaped = 0;
    loop {
        assert!(Instant::now() < end && told(&eventfd), "{reaped} reaped");
        reaped += setup.ring.completion().count();
        if reaped == 1 {
            break;
        }
    }
    assert_eq!(setup.ring.wait(1), Err(WaitError::PollerDead));
}

/// A loop that sleeps on the descriptor alone, reaping some or all of what is there, sleeps through nothing.
#[test]
fn an_event_loop_on_the_eventfd_loses_no_wake_up() {
    const COUNT: u64 = 20_000;
    for most in [3, usize::MAX] {
        let (mut submission, mut completion) = halves(16);
        let eventfd = completion.eventfd().unwrap();
        let producer = thread::spawn(move || {
            for n in 0..COUNT {
                push_all(&mut submission, [nop(n)].into_iter());
                if n % 64 == 0 {
                    // Let the loop fall asleep now and then.
                    thread::sleep(Duration::from_micros(n % 100));
                }
            }
        });
        let mut next = 0;
        while next < COUNT {
            assert!(readable(&eventfd, LIMIT), "asleep after {next} of {COUNT}, at most {most} a time");
            eventfd.clear();
            for cqe in completion.completion().take(most) {
                assert_eq!(cqe.user_data(), next);
                next += 1;
            }
        }
        producer.join().unwrap();
    }
}

#[tokio::test(flavor = "current_thread")]
async fn tokio_waits_for_the_eventfd() {
    const COUNT: u64 = 2_000;
    let mut ring = Ring::builder().build(16, &Engine::loopback()).unwrap();
    // SAFETY: the descriptor is the same one and stays open as long as its `EventFd`, which the `AsyncFd` owns.
    let eventfd = unsafe { AsyncFd::register(ring.eventfd().unwrap()) }.unwrap();
    let mut submitter = ring.submitter();
    let producer = thread::spawn(move || {
        let (mut signaller, timeline) = fence::timeline(0);
        for n in 0..COUNT {
            let mut entry = opcode::Wait::new().build().wait(&timeline.at(n + 1)).user_data(n);
            while let Err(refused) = submitter.push(entry) {
                entry = refused.entry;
                thread::yield_now();
            }
            submitter.submit().unwrap();
            signaller.signal(n + 1).unwrap();
        }
        signaller
    });
    // In any order: an entry whose value was reached before it was taken may pass one that waits to be released.
    let mut seen = vec![false; COUNT as usize];
    let mut reaped = 0;
    while reaped < COUNT {
        let guard = tokio::time::timeout(LIMIT, eventfd.readable()).await;
        let mut guard = guard.unwrap_or_else(|_| panic!("asleep after {reaped} of {COUNT}")).unwrap();
        // In this order: what comes after the reaping is told of afresh.
        eventfd.get_ref().clear();
        guard.clear_ready();
        for cqe in ring.completion() {
            assert_eq!(cqe.res(), 0);
            assert!(!std::mem::replace(&mut seen[cqe.user_data() as usize], true), "{cqe:?} came twice");
            reaped += 1;
        }
    }
    drop(producer.join().unwrap());
}

/// Waits until the transport was given so many operations.
fn until_issued(probe: &Probe, count: u64) {
    let end = Instant::now() + LIMIT;
    while probe.issued() < count {
        assert!(Instant::now() < end, "{} of {count} issued", probe.issued());
        thread::yield_now();
    }
}

/// Closes a ring with work in every state: each entry is in the report, once, with what became of it.
#[test]
fn close_hands_over_every_result() {
    let sim = Sim::new(3).delay(Duration::from_millis(400)..Duration::from_millis(401));
    let mut setup = Setup::simulated(64, sim);
    let (_signaller, never) = fence::host();
    (0..3).for_each(|n| setup.push(nop(n)));
    (3..8).for_each(|n| setup.push(setup.read(0, 8).user_data(n)));
    setup.push(setup.read(0, 8).user_data(100).flags(EntryFlags::CQE_SKIP_SUCCESS));
    (8..10).for_each(|n| setup.push(setup.read(0, 8).wait(&never).user_data(n)));
    setup.push(opcode::Wait::new().build().wait(&never).user_data(10).flags(EntryFlags::IO_HARDLINK));
    setup.push(nop(11));
    setup.push(opcode::Timeout::new(Duration::from_secs(3600)).build().user_data(12));
    setup.ring.submit().unwrap();
    assert_eq!(setup.ring.wait_timeout(3, LIMIT), Ok(3));
    // Pushed, and not submitted: closing does that.
    setup.push(setup.read(0, 8).wait(&never).user_data(13));
    let report = setup.ring.close(LIMIT);
    assert!(report.finished);
    assert_eq!((report.unissued, report.completed, report.unquiet), (6, 5, 0), "{report:?}");
    let mut all: Vec<_> = report.completions.iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.stage())).collect();
    all.sort_unstable_by_key(|&(user_data, ..)| user_data);
    let expected = (0..14).map(|n| match n {
        0..3 => (n, 0, Stage::Done),
        3..8 => (n, 8, Stage::Done),
        _ => (n, -errno::ESHUTDOWN, Stage::Shutdown),
    });
    assert_eq!(all, expected.collect::<Vec<_>>());
    assert!(report.completions.iter().all(|cqe| cqe.flags().is_empty()));
}

/// More completions than the queue has room for are handed over in order.
#[test]
fn close_hands_over_what_waits_for_room() {
    let mut setup = Setup::loopback(8);
    setup.theirs.write_at(23 * 8, b"the last").unwrap();
    let mut accepted = 0;
    let end = Instant::now() + LIMIT;
    while accepted < 16 + 8 {
        assert!(Instant::now() < end);
        let entry = setup.read(accepted as usize * 8, 8).user_data(accepted);
        accepted += u64::from(setup.ring.submission().push(entry).is_ok());
        setup.ring.submit().unwrap();
    }
    // The last has landed, in the turn that posts it or lets it wait.
    let mut last = [0; 8];
    while last != *b"the last" {
        assert!(Instant::now() < end);
        setup.ours.read_at(23 * 8, &mut last).unwrap();
    }
    let report = setup.ring.close(LIMIT);
    let all: Vec<_> = report.completions.iter().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    assert_eq!(all, (0..24).map(|n| (n, 8)).collect::<Vec<_>>());
}

/// Transfers that do not end in time: others use the engine, so they cannot be stopped, and every completion says so.
#[test]
fn close_tells_what_it_could_not_stop() {
    let sim = Sim::new(4).delay(Duration::from_secs(3600)..Duration::from_secs(3601));
    let probe = sim.probe();
    let mut setup = Setup::simulated(16, sim);
    // The slots have held entries that ended elsewhere.
    (0..16).for_each(|n| setup.push(opcode::Nop::new().result(-errno::EIO).build().user_data(n)));
    assert_eq!(setup.reap(16).len(), 16);
    (0..5).for_each(|n| setup.push(setup.read(0, 8).user_data(n)));
    setup.ring.submit().unwrap();
    until_issued(&probe, 5);
    let start = Instant::now();
    let report = setup.ring.close(Duration::from_millis(20));
    assert!(start.elapsed() >= Duration::from_millis(20) && start.elapsed() < Duration::from_secs(11));
    assert!(report.finished);
    assert_eq!((report.unissued, report.completed, report.unquiet), (0, 0, 5));
    for (n, cqe) in report.completions.iter().enumerate() {
        assert_eq!((cqe.user_data(), cqe.flags()), (n as u64, CqeFlags::UNQUIET));
        let error = cqe.result().unwrap_err();
        assert_eq!((error.errno, error.stage), (errno::ESHUTDOWN, Stage::Transfer));
    }
    assert!(matches!(setup.ours.unregister(), Err(UnregisterError::Busy(5))));
}

/// The same with a ring that is the engine's last user: the transport is closed, which ends them.
#[test]
fn close_ends_what_only_the_ring_uses() {
    let sim = Sim::new(5).delay(Duration::from_secs(3600)..Duration::from_secs(3601));
    let probe = sim.probe();
    let mut setup = Setup::simulated(16, sim);
    (0..5).for_each(|n| setup.push(setup.read(0, 8).user_data(n)));
    setup.ring.submit().unwrap();
    until_issued(&probe, 5);
    let Setup { engine, ring, ours, theirs, .. } = setup;
    drop((engine, ours, theirs));
    let report = ring.close(Duration::from_millis(20));
    assert_eq!((report.unissued, report.completed, report.unquiet), (0, 5, 0));
    let stages = report.completions.iter().map(|cqe| (cqe.res(), cqe.stage(), cqe.flags()));
    assert!(stages.eq([(-errno::ESHUTDOWN, Stage::Transfer, CqeFlags::empty()); 5]), "{report:?}");
}

/// A result that was told with MORE: what follows says whether the local range is quiet.
#[test]
fn close_ends_an_overdue_entry_with_a_notif() {
    for alone in [true, false] {
        let sim = Sim::new(6).unquiet(1000).delay(Duration::from_millis(500)..Duration::from_millis(501));
        let mut setup = Setup::simulated(8, sim);
        setup.push(setup.read(0, 8).user_data(1));
        let cqe = setup.reap(1)[0];
        assert_eq!((cqe.res(), cqe.flags()), (-errno::ETIMEDOUT, CqeFlags::MORE));
        let Setup { engine, ring, ours, theirs, .. } = setup;
        let others = (!alone).then_some((engine, ours, theirs));
        let report = ring.close(Duration::ZERO);
        assert_eq!((report.unissued, report.completed, report.unquiet), (0, usize::from(alone), usize::from(!alone)));
        let expected = if alone { CqeFlags::NOTIF } else { CqeFlags::NOTIF | CqeFlags::UNQUIET };
        let all: Vec<_> = report.completions.iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.flags())).collect();
        assert_eq!(all, [(1, 0, expected)]);
        drop(others);
    }
}

/// After the poller's death the report has what was not reaped, and submitters are refused.
#[test]
fn close_after_the_pollers_death() {
    let mut setup = Setup::simulated(8, Sim::new(7).panic_at(2));
    (0..4).for_each(|n| setup.push(setup.read(0, 8).user_data(n)));
    setup.ring.submit().unwrap();
    assert_eq!(setup.ring.wait_timeout(4, LIMIT), Ok(4));
    let mut submitter = setup.ring.submitter();
    let report = setup.ring.close(LIMIT);
    assert!(report.finished);
    assert_eq!(report.completions.len(), 4);
    assert!(submitter.push(nop(9)).is_err());
}
