//! Many producers, sleeping and waking, async: what happens between threads.

mod common;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, Setup};
use moonring::{Engine, EntryFlags, Refusal, Ring, WaitError, fence, opcode};

/// Producers push and retry; the owner reaps everything, each producer's entries in its own order.
#[test]
fn many_producers_lose_and_double_nothing() {
    const EACH: u64 = 20_000;
    const PRODUCERS: u64 = 4;
    let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
    let first = ring.submitter();
    let producers: Vec<_> = (0..PRODUCERS)
        .map(|producer| {
            let mut submitter = first.clone();
            thread::spawn(move || {
                for n in 0..EACH {
                    let mut entry = opcode::Nop::new().build().user_data(producer << 32 | n);
                    while let Err(refused) = submitter.push(entry) {
                        assert_eq!(refused.reason, Refusal::Full { capacity: 64 });
                        submitter.submit().unwrap();
                        thread::yield_now();
                        entry = refused.entry;
                    }
                    if n % 7 == 0 {
                        submitter.submit().unwrap();
                    }
                }
            })
        })
        .collect();
    drop(first);
    let mut next = [0; PRODUCERS as usize];
    let mut reaped = 0;
    while reaped < EACH * PRODUCERS {
        ring.wait_timeout(1, LIMIT).unwrap();
        for cqe in ring.completion() {
            let (producer, n) = ((cqe.user_data() >> 32) as usize, cqe.user_data() & 0xffff_ffff);
            assert_eq!(n, next[producer]);
            next[producer] += 1;
            reaped += 1;
        }
    }
    for producer in producers {
        producer.join().unwrap();
    }
    assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
}

/// What a thread has pushed and not submitted does not keep it asleep, once units are shared with others.
#[test]
fn a_sleeper_does_not_count_what_it_has_not_submitted() {
    let mut ring = Ring::builder().build(8, &Engine::loopback()).unwrap();
    drop(ring.submitter());
    let (signaller, fence) = fence::host();
    let silent = opcode::Nop::new().build().flags(EntryFlags::CQE_SKIP_SUCCESS);
    ring.submission().push(silent.wait(&fence)).unwrap();
    ring.submit().unwrap();
    ring.submission().push(opcode::Nop::new().build()).unwrap();
    let signals = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        signaller.signal();
    });
    let start = Instant::now();
    assert_eq!(ring.wait_timeout(1, LIMIT), Err(WaitError::NothingOutstanding));
    assert!(start.elapsed() < LIMIT);
    signals.join().unwrap();
}

/// The owner pushes too, beside submitters that come and go.
#[test]
fn lanes_come_and_go() {
    let mut ring = Ring::builder().build(16, &Engine::loopback()).unwrap();
    for round in 0..200 {
        let mut submitter = ring.submitter();
        let other = thread::spawn(move || {
            for n in 0..3 {
                submitter.push(opcode::Nop::new().build().user_data(n)).unwrap();
            }
            // Dropping it submits.
        });
        ring.submission().push(opcode::Nop::new().build().user_data(3)).unwrap();
        ring.submit().unwrap();
        other.join().unwrap();
        let mut all = Vec::new();
        while all.len() < 4 {
            ring.wait_timeout(1, LIMIT).unwrap_or_else(|error| panic!("round {round}: {error}, {all:?}"));
            all.extend(ring.completion().map(|cqe| cqe.user_data()));
        }
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3], "round {round}");
    }
}

/// SCENARIOS G1: one entry exactly as the poller parks, then silence; the same for a signal and for a reaper.
#[test]
fn g1_no_wake_up_is_lost_between_empty_and_sleep() {
    let mut ring = Ring::builder().idle(Duration::ZERO).build(8, &Engine::loopback()).unwrap();
    for round in 0..3_000u64 {
        // The pause sweeps over the moment at which the poller parks.
        let pause = Duration::from_nanos(round * 37 % 60_000);
        let start = Instant::now();
        while start.elapsed() < pause {}
        ring.submission().push(opcode::Nop::new().build().user_data(round)).unwrap();
        ring.submit().unwrap();
        assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1), "round {round}");
        assert_eq!(ring.completion().next().unwrap().user_data(), round);

        let (signaller, fence) = fence::host();
        ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
        ring.submit().unwrap();
        let start = Instant::now();
        while start.elapsed() < pause {}
        signaller.signal();
        assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1), "round {round}");
        assert!(ring.completion().next().is_some());
    }
}

/// What is pushed and not submitted is not outstanding, once there has been a submitter either.
#[test]
fn waiting_does_not_count_what_is_not_submitted() {
    let mut ring = Ring::builder().build(8, &Engine::loopback()).unwrap();
    for _ in 0..2 {
        ring.submission().push(opcode::Nop::new().build()).unwrap();
        assert_eq!(ring.wait_timeout(1, LIMIT), Err(WaitError::NothingOutstanding));
        assert_eq!(ring.submit_and_wait(1), Ok(1));
        assert_eq!(ring.completion().count(), 1);
        drop(ring.submitter());
    }
}

/// Whoever pushes beside others takes room ahead of its entries. Until it submits, others are refused where there would be room;
/// then all of the ring is to be had. If nothing of it is accepted, it keeps nothing.
#[test]
fn room_taken_ahead_goes_back() {
    let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
    let mut full = Ring::builder().build(1, &Engine::loopback()).unwrap();
    let mut submitter = ring.submitter();
    let (signaller, fence) = fence::host();
    let wait = || opcode::Wait::new().build().wait(&fence);
    for _ in 0..8 {
        submitter.push(opcode::Nop::new().build()).unwrap();
    }
    submitter.submit().unwrap();
    assert_eq!(ring.wait_timeout(8, LIMIT), Ok(8));
    assert_eq!(ring.completion().count(), 8);

    full.submission().push(wait()).unwrap();
    let messages = full.messages();
    let message = submitter.push(opcode::MsgRing::new(&messages, 0, 0).build()).unwrap_err();
    assert_eq!(message.reason, Refusal::TargetFull { capacity: 1 });
    let mut other = ring.submitter();
    for _ in 0..64 {
        other.push(wait()).unwrap();
    }
    assert_eq!(other.push(wait()).unwrap_err().reason, Refusal::Full { capacity: 64 });
    other.submit().unwrap();
    signaller.signal();
    assert_eq!(ring.wait_timeout(64, LIMIT), Ok(64));
    assert_eq!(ring.completion().count(), 64);

    let (signaller, fence) = fence::host();
    let wait = || opcode::Wait::new().build().wait(&fence);
    submitter.push(wait()).unwrap();
    let before = (0..64).take_while(|_| ring.submission().push(wait()).is_ok()).count();
    assert_eq!(before, 56, "an eighth of the room was taken at once");
    submitter.submit().unwrap();
    let after = (0..64).take_while(|_| ring.submission().push(wait()).is_ok()).count();
    assert_eq!(before + after, 63);
    signaller.signal();
}

/// An owner that has taken room ahead does not wait for it.
#[test]
fn waiting_does_not_count_room_taken_ahead() {
    let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
    drop(ring.submitter());
    for count in [8, 1] {
        for _ in 0..count {
            ring.submission().push(opcode::Nop::new().build()).unwrap();
        }
        assert_eq!(ring.wait_timeout(1, LIMIT), Err(WaitError::NothingOutstanding));
        ring.submit().unwrap();
        assert_eq!(ring.wait_timeout(2 * count, LIMIT), Ok(count));
        assert_eq!(ring.completion().count(), count);
    }
}

/// A reaper that sleeps is woken when enough has come, not at every completion.
#[test]
fn a_sleeping_reaper_is_woken_for_its_count() {
    let mut setup = Setup::loopback(64);
    let (mut signaller, timeline) = fence::timeline(0);
    for value in 1..=10 {
        setup.push(opcode::Wait::new().build().wait(&timeline.at(value)));
    }
    setup.ring.submit().unwrap();
    let other = thread::spawn(move || {
        for value in 1..=10 {
            thread::sleep(Duration::from_millis(2));
            signaller.signal(value).unwrap();
        }
        signaller
    });
    assert_eq!(setup.ring.wait_timeout(10, LIMIT), Ok(10));
    assert_eq!(setup.ring.completion().count(), 10);
    drop(other.join().unwrap());
}

#[test]
fn waiting_ends_at_its_limit_with_what_is_ready() {
    let mut setup = Setup::loopback(8);
    let (signaller, fence) = fence::host();
    setup.push(opcode::Wait::new().build().wait(&fence));
    setup.ring.submit().unwrap();
    let start = Instant::now();
    assert_eq!(setup.ring.wait_timeout(1, Duration::from_millis(20)), Err(WaitError::TimedOut));
    assert!(start.elapsed() >= Duration::from_millis(20));
    setup.push(opcode::Nop::new().build());
    setup.ring.submit().unwrap();
    assert_eq!(setup.ring.wait_timeout(1, LIMIT), Ok(1));
    let start = Instant::now();
    assert_eq!(setup.ring.wait_timeout(2, Duration::from_millis(20)), Ok(1));
    assert!(start.elapsed() >= Duration::from_millis(20));
    signaller.signal();
    assert_eq!(setup.ring.wait(2), Ok(2));
}

struct Count(AtomicU64);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Async: pending until a completion is there, woken by it, nothing lost when the future is dropped.
#[test]
fn async_reaping_is_woken_and_loses_nothing() {
    let mut setup = Setup::loopback(8);
    let wakes = Arc::new(Count(AtomicU64::new(0)));
    let waker = Waker::from(Arc::clone(&wakes));
    let mut context = Context::from_waker(&waker);
    let (signaller, fence) = fence::host();
    setup.push(opcode::Wait::new().build().wait(&fence).user_data(4));
    setup.ring.submit().unwrap();
    {
        let mut next = pin!(setup.ring.next());
        assert!(next.as_mut().poll(&mut context).is_pending());
    }
    let mut next = pin!(setup.ring.next());
    assert!(next.as_mut().poll(&mut context).is_pending());
    signaller.signal();
    let end = Instant::now() + LIMIT;
    while wakes.0.load(Relaxed) == 0 {
        assert!(Instant::now() < end, "never woken");
        thread::yield_now();
    }
    match next.as_mut().poll(&mut context) {
        Poll::Ready(Ok(cqe)) => assert_eq!(cqe.user_data(), 4),
        other => panic!("{other:?}"),
    }
}

/// The stream ends when no more can come.
#[test]
fn the_stream_ends_when_nothing_is_outstanding() {
    use futures_core::Stream;
    let mut setup = Setup::loopback(8);
    for n in 0..5 {
        setup.push(opcode::Nop::new().build().user_data(n));
    }
    setup.ring.submit().unwrap();
    let mut seen = Vec::new();
    let mut context = Context::from_waker(Waker::noop());
    let mut stream = pin!(setup.ring.completions());
    let end = Instant::now() + LIMIT;
    loop {
        match stream.as_mut().poll_next(&mut context) {
            Poll::Ready(Some(cqe)) => seen.push(cqe.user_data()),
            Poll::Ready(None) => break,
            Poll::Pending => thread::yield_now(),
        }
        assert!(Instant::now() < end);
    }
    assert_eq!(seen, [0, 1, 2, 3, 4]);
}

/// SCENARIOS D2, without a cancel yet: signallers race with pushes, every entry ends once.
#[test]
fn signals_race_with_pushes() {
    let mut setup = Setup::loopback(64);
    for round in 0..3_000 {
        let (signaller, fence) = fence::host();
        let other = (round % 3 != 0)
            .then(|| thread::spawn(move || if round % 3 == 1 { signaller.signal() } else { drop(signaller) }));
        for n in 0..4 {
            setup.push(setup.read(n * 8, 8).wait(&fence));
        }
        setup.ring.submit().unwrap();
        if let Some(other) = other {
            other.join().unwrap();
        }
        for cqe in setup.reap(4) {
            assert_eq!(cqe.res(), if round % 3 == 1 { 8 } else { -125 }, "round {round}");
        }
    }
}

/// Two rings with pollers of their own wait for the same fences, signalled from a third thread: each hears of each.
#[test]
fn rings_share_fences() {
    let engine = Engine::loopback();
    let mut rings = [0, 1].map(|_| Ring::builder().idle(Duration::ZERO).build(8, &engine).unwrap());
    for round in 0..1_000 {
        let (signaller, told) = fence::host();
        let (mut word, timeline) = fence::timeline(0);
        let point = timeline.at(2);
        let other = thread::spawn(move || {
            word.signal(1).unwrap();
            signaller.signal();
            word.signal(2).unwrap();
        });
        for ring in &mut rings {
            ring.submission().push(opcode::Wait::new().build().wait(&told)).unwrap();
            ring.submission().push(opcode::Wait::new().build().wait(&point).wait(&told)).unwrap();
            ring.submit().unwrap();
        }
        for ring in &mut rings {
            assert_eq!(ring.wait_timeout(2, LIMIT), Ok(2), "round {round}");
            assert!(ring.completion().all(|cqe| cqe.result() == Ok(0)), "round {round}");
        }
        other.join().unwrap();
    }
}

/// A ring is dropped while submitters push, submit, and come and go: they are refused, and nothing hangs.
#[test]
fn a_ring_is_dropped_while_submitters_push() {
    for _ in 0..20 {
        let mut setup = Setup::loopback(8);
        let first = setup.ring.submitter();
        let producers: Vec<_> = (0..3)
            .map(|_| {
                let (mut submitter, mut entry) = (first.clone(), setup.read(0, 8));
                thread::spawn(move || {
                    loop {
                        match submitter.push(entry) {
                            Ok(()) => entry = opcode::Nop::new().build(),
                            Err(refused) if refused.reason == Refusal::Closed => return,
                            Err(refused) => entry = refused.entry,
                        }
                        submitter.submit().unwrap();
                        submitter = submitter.clone();
                    }
                })
            })
            .collect();
        drop(first);
        setup.ring.wait_timeout(1, LIMIT).unwrap();
        drop(setup);
        for producer in producers {
            producer.join().unwrap();
        }
    }
}
