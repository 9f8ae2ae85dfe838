//! `stats()`: the counts fit each other, and what was reaped.

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, Setup, reap_exactly};
use moonring::code::errno;
use moonring::opcode::{Cancel, LinkTimeout, MsgRing, Nop, Select, Timeout, Wait, Write};
use moonring::sim::Sim;
use moonring::{
    ControlError, Counts, Cqe, CqeFlags, Engine, Entry, EntryFlags, Outcome, Region, Ring, Stage, Stats, fence,
};

/// What somebody counts who sees every completion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Tally {
    ok: u64,
    failed: u64,
    cancelled: u64,
    stages: HashMap<Stage, u64>,
}

impl Tally {
    fn count(&mut self, cqe: &Cqe) {
        let Some(outcome) = cqe.outcome() else { return };
        match outcome {
            Outcome::Ok => self.ok += 1,
            Outcome::Failed => self.failed += 1,
            Outcome::Cancelled => self.cancelled += 1,
        }
        *self.stages.entry(cqe.stage()).or_default() += 1;
    }

    fn ended(&self) -> u64 {
        self.ok + self.failed + self.cancelled
    }
}

const STAGES: [Stage; 6] = [Stage::Done, Stage::Gate, Stage::Issue, Stage::Transfer, Stage::Cancel, Stage::Shutdown];

fn ended(counts: &Counts) -> u64 {
    counts.ok + counts.failed + counts.cancelled
}

/// What holds of every snapshot.
fn check(stats: &Stats) {
    let all = std::iter::once(&stats.total).chain(stats.peers.iter().map(|peer| &peer.counts));
    for counts in all {
        assert_eq!(counts.accepted, ended(counts) + counts.outstanding, "{counts:?}");
        assert_eq!(STAGES.iter().map(|&stage| counts.stages.of(stage)).sum::<u64>(), ended(counts), "{counts:?}");
        assert!(counts.overdue <= counts.outstanding && counts.silent <= ended(counts), "{counts:?}");
    }
    let total = &stats.total;
    assert!(total.outstanding <= u64::from(stats.capacity + Ring::CANCEL_RESERVE), "{stats:?}");
    let sum = |what: fn(&Counts) -> u64| stats.peers.iter().map(|peer| what(&peer.counts)).sum::<u64>();
    assert!(sum(|counts| counts.accepted) <= total.accepted, "{stats:?}");
    assert_eq!(sum(|counts| counts.overdue), total.overdue, "{stats:?}");
    assert_eq!(sum(|counts| counts.read_bytes), total.read_bytes, "{stats:?}");
    assert_eq!(sum(|counts| counts.written_bytes), total.written_bytes, "{stats:?}");
}

/// The counts are what was reaped, and nothing is left.
fn check_all(stats: &Stats, tally: &Tally) {
    check(stats);
    let total = &stats.total;
    assert_eq!((total.ok, total.failed, total.cancelled), (tally.ok, tally.failed, tally.cancelled), "{total:?}");
    for stage in STAGES {
        assert_eq!(total.stages.of(stage), tally.stages.get(&stage).copied().unwrap_or(0), "{stage}: {total:?}");
    }
}

#[test]
fn each_kind_of_end_is_counted_once() {
    let mut s = Setup::loopback(16);
    assert_eq!(s.ring.stats().unwrap().capacity, 16);
    assert_eq!(s.ring.stats().unwrap().total, Counts::default());
    let (signaller, fence) = fence::host();
    signaller.fail(errno::EIO);
    let (_never, pending) = fence::host();
    let read = s.read(0, 100);
    s.push(read);
    let bad = Write::new(s.ours.slice(0..10).unwrap(), s.peer.at(8)).build();
    s.push(bad);
    let failed = s.read(0, 1);
    s.push(failed.wait(&fence));
    s.push(Wait::new().build().wait(&pending).user_data(5));
    s.push(Nop::new().build());
    s.push(Timeout::new(Duration::from_micros(1)).build());
    s.push(Nop::new().build().flags(EntryFlags::CQE_SKIP_SUCCESS));
    s.push(Nop::new().build().flags(EntryFlags::IO_LINK));
    s.push(LinkTimeout::new(LIMIT).build());
    let mut tally = Tally::default();
    reap(&mut s, 7, &mut tally);
    let stats = s.ring.stats().unwrap();
    check(&stats);
    let total = stats.total;
    assert_eq!((total.accepted, total.outstanding, total.silent), (9, 1, 1));
    // The Nop that is skipped is ok, the LinkTimeout is cancelled.
    assert_eq!((total.ok, total.failed, total.cancelled), (tally.ok + 1, tally.failed, tally.cancelled));
    assert_eq!((total.ok, total.failed, total.cancelled), (5, 2, 1));
    assert_eq!((total.stages.done, total.stages.gate, total.stages.transfer, total.stages.cancel), (5, 1, 1, 1));
    assert_eq!((total.read_bytes, total.written_bytes), (100, 0));
    let peer = &stats.peers[..];
    assert_eq!((peer.len(), peer[0].name.as_str()), (1, s.peer.name()));
    let counts = peer[0].counts;
    assert_eq!((counts.accepted, counts.ok, counts.failed, counts.read_bytes), (3, 1, 2, 100));
    assert_eq!((counts.stages.gate, counts.stages.transfer), (1, 1));

    assert_eq!(s.ring.controller().cancel(Cancel::user_data(5)).unwrap(), 1);
    // Before anybody reaps it.
    let stats = s.ring.stats().unwrap();
    assert_eq!((stats.total.cancelled, stats.total.outstanding), (2, 0));
    // What is pushed and not submitted is in no count.
    s.push(Nop::new().build());
    assert_eq!(s.ring.stats().unwrap(), stats);
}

fn reap(s: &mut Setup, count: usize, tally: &mut Tally) {
    for cqe in s.reap(count) {
        tally.count(&cqe);
    }
}

#[test]
fn an_entry_is_overdue_from_more_to_notif() {
    let span = Duration::from_millis(500);
    let mut s = Setup::simulated(8, Sim::new(1).delay(span..span).unquiet(1000));
    let read = s.read(0, 64);
    s.push(read);
    let first = s.reap(1);
    assert!(first[0].flags().contains(CqeFlags::MORE) && first[0].outcome().is_none());
    let stats = s.ring.stats().unwrap();
    check(&stats);
    let peer = stats.peers[0].counts;
    for counts in [stats.total, peer] {
        assert_eq!((counts.accepted, counts.outstanding, counts.overdue, counts.failed), (1, 1, 1, 0));
    }
    let last = s.reap(1);
    assert_eq!(last[0].outcome(), Some(Outcome::Failed));
    let total = s.ring.stats().unwrap().total;
    assert_eq!((total.outstanding, total.overdue, total.failed, total.stages.transfer), (0, 0, 1, 1));

    // The same of one that is cancelled while the transport has it.
    let sim = Sim::new(1).delay(span..span);
    let probe = sim.probe();
    let mut s = Setup::simulated(8, sim);
    let read = s.read(0, 64);
    s.push(read);
    s.ring.submit().unwrap();
    while probe.issued() == 0 {
        thread::yield_now();
    }
    assert_eq!(s.ring.controller().cancel(Cancel::new(Select::any()).detach()).unwrap(), 1);
    let total = s.ring.stats().unwrap().total;
    assert_eq!((total.outstanding, total.overdue, total.cancelled), (1, 1, 0));
    let ends = s.reap(2);
    assert_eq!([ends[0].outcome(), ends[1].outcome()], [None, Some(Outcome::Cancelled)]);
    let total = s.ring.stats().unwrap().total;
    assert_eq!((total.outstanding, total.overdue, total.cancelled, total.read_bytes), (0, 0, 1, 0));
}

/// A message is an entry of the ring that it comes for, and of the one that it goes from.
#[test]
fn messages_and_completions_without_room_are_counted() {
    let engine = Engine::loopback();
    let mut to = Ring::builder().build(2, &engine).unwrap();
    let mut from = Ring::builder().build(8, &engine).unwrap();
    let target = to.messages();
    for n in 0..6 {
        let mut entry = MsgRing::new(&target, n, 1).build();
        // The queue holds four; of the two that follow each keeps its unit.
        while let Err(refused) = from.submission().push(entry) {
            entry = refused.entry;
            thread::yield_now();
        }
        from.submit().unwrap();
    }
    from.wait(6).unwrap();
    let end = Instant::now() + LIMIT;
    let stats = loop {
        let stats = to.stats().unwrap();
        if stats.total.accepted == 6 || Instant::now() > end {
            break stats;
        }
    };
    check(&stats);
    assert_eq!((stats.total.accepted, stats.total.ok, stats.total.outstanding), (6, 4, 2));
    let mut tally = Tally::default();
    reap_exactly(&mut to, 6).iter().for_each(|cqe| tally.count(cqe));
    check_all(&to.stats().unwrap(), &tally);
    assert_eq!(from.stats().unwrap().total.ok, 6);
}

/// A future hears of an end that has no completion in the queue.
#[test]
fn entries_with_futures_are_counted() {
    let mut s = Setup::loopback(8);
    let (_never, pending) = fence::host();
    let read = s.read(0, 10);
    let first = s.ring.submission().push_future(read.flags(EntryFlags::CQE_SKIP_SUCCESS)).unwrap();
    let second = s.ring.submission().push_future(Wait::new().build().wait(&pending)).unwrap();
    s.ring.submit().unwrap();
    assert_eq!(first.fence().wait_timeout(LIMIT), fence::FenceStatus::Signalled);
    let total = s.ring.stats().unwrap().total;
    assert_eq!((total.accepted, total.ok, total.silent, total.read_bytes, total.outstanding), (2, 1, 0, 10, 1));
    drop((first, second));
    let stats = s.ring.stats().unwrap();
    check(&stats);
    assert_eq!((stats.total.cancelled, stats.total.silent, stats.total.outstanding), (1, 0, 0));
}

#[test]
fn a_reopened_segment_goes_on_under_its_name() {
    let mut s = Setup::loopback(8);
    let read = s.read(0, 10);
    s.push(read);
    s.reap(1);
    s.peer = s.engine.reopen_segment(s.peer.name(), LIMIT).unwrap();
    let read = s.read(0, 20);
    s.push(read);
    s.reap(1);
    let stats = s.ring.stats().unwrap();
    check(&stats);
    let [peer] = &stats.peers[..] else { panic!("{stats:?}") };
    assert_eq!((peer.name.as_str(), peer.counts.accepted, peer.counts.read_bytes), (s.peer.name(), 2, 30));
}

#[test]
fn a_dead_ring_and_a_closed_one_keep_their_counts() {
    let mut s = Setup::simulated(8, Sim::new(3).panic_at(3));
    let (_never, pending) = fence::host();
    let mut tally = Tally::default();
    for n in 0..2 {
        let read = s.read(n * 10, 10);
        s.push(read);
        reap(&mut s, 1, &mut tally);
    }
    s.push(Wait::new().build().wait(&pending));
    let read = s.read(0, 10);
    s.push(read);
    reap(&mut s, 2, &mut tally);
    let stats = s.ring.stats().unwrap();
    check_all(&stats, &tally);
    assert_eq!((stats.total.accepted, stats.total.ok, stats.total.stages.shutdown), (4, 2, 2));
    let controller = s.ring.controller();
    let report = s.ring.close(LIMIT);
    assert_eq!(report.stats.as_ref(), Some(&stats));
    assert_eq!(controller.stats().unwrap(), stats);
    assert_eq!(controller.cancel(Cancel::new(Select::any())), Err(ControlError::Gone));

    let mut s = Setup::loopback(8);
    let controller = s.ring.controller();
    s.push(Nop::new().build());
    s.push(Nop::new().build().flags(EntryFlags::CQE_SKIP_SUCCESS));
    s.ring.submit_and_wait(1).unwrap();
    s.push(Wait::new().build().wait(&pending));
    let report = s.ring.close(LIMIT);
    let stats = report.stats.unwrap();
    let mut tally = Tally::default();
    report.completions.iter().for_each(|cqe| tally.count(cqe));
    check(&stats);
    assert_eq!((stats.total.accepted, stats.total.silent, stats.total.outstanding), (3, 1, 0));
    assert_eq!((stats.total.ok, stats.total.failed), (tally.ok + 1, tally.failed));
    assert_eq!(stats.total.stages.shutdown, 1);
    assert_eq!(controller.stats().unwrap(), stats);
}

/// Several producers push at random, a thread looks all the time, one reaps and counts. Every look fits itself, has all that
/// was submitted and reaped before it, and the last one is what was counted.
#[test]
fn the_counts_are_the_completions_under_random_load() {
    let sims =
        [None, Some(Sim::new(7).failures(150)), Some(Sim::new(8).failures(50).unquiet(200).partial_submits(300))];
    for (seed, sim) in sims.into_iter().enumerate() {
        println!("seed {seed}");
        load(seed as u64, sim);
    }
}

fn load(seed: u64, sim: Option<Sim>) {
    const PRODUCERS: u64 = 3;
    const EACH: u64 = 2_000;
    let mut s = match sim {
        None => Setup::loopback(64),
        Some(sim) => Setup::simulated(64, sim),
    };
    let other = Engine::loopback();
    let elsewhere = other.register(Region::alloc(1 << 16).unwrap()).unwrap();
    let names = if s.peer.name() == "sim" {
        ["sim/1".to_owned(), "sim/2".to_owned()]
    } else {
        [other.name().to_owned(), other.name().to_owned()]
    };
    let second = s.engine.open_segment(&names[0], LIMIT).unwrap();
    let third = s.engine.open_segment(&names[1], LIMIT).unwrap();
    let submitted = AtomicU64::new(0);
    let reaped = AtomicU64::new(0);
    let silent_ok = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    let looks = AtomicU64::new(0);
    let controller = s.ring.controller();
    let first = s.ring.submitter();
    let mut tally = Tally::default();
    // By producer and number of the entry: its peer, and whether it reads.
    let mut bytes = [0, 0];
    thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let mut submitter = first.clone();
            let (s, second, third, elsewhere) = (&s, &second, &third, &elsewhere);
            let (submitted, silent_ok, looks) = (&submitted, &silent_ok, &looks);
            let (ours, theirs, peer) = (s.ours.clone(), s.theirs.clone(), s.peer.clone());
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed * 100 + producer);
                let (mut signallers, mut pushed, end) = (Vec::new(), 0, Instant::now() + 3 * LIMIT);
                for n in 0..EACH {
                    // There are looks at all times.
                    while looks.load(SeqCst) < n / 100 {
                        assert!(Instant::now() < end, "nobody looks any more");
                        thread::yield_now();
                    }
                    let len = random.usize(1..500);
                    let at = random.usize(0..1000);
                    let local = ours.slice(at..at + len).unwrap();
                    let remote = match random.u8(0..3) {
                        0 => peer.at(theirs.address() + at as u64),
                        1 if peer.name() == "sim" => second.at(theirs.address() + at as u64),
                        1 => second.at(elsewhere.address() + at as u64),
                        // Nothing is registered there.
                        _ => third.at(8),
                    };
                    let mut entry: Entry = match random.u8(0..10) {
                        0..3 => moonring::opcode::Read::new(local, remote).build().user_data(READ),
                        3..5 => Write::new(local, remote).build().user_data(WRITE),
                        5 => Nop::new().result(-random.i32(1..100)).build(),
                        6 => Timeout::new(Duration::from_micros(random.u64(1..50))).build(),
                        7 => {
                            silent_ok.fetch_add(1, Relaxed);
                            Nop::new().build().flags(EntryFlags::CQE_SKIP_SUCCESS)
                        }
                        8 => Cancel::new(Select::any()).build(),
                        _ => {
                            let (signaller, fence) = fence::host();
                            signallers.push(signaller);
                            Wait::new().build().wait(&fence)
                        }
                    };
                    while let Err(refused) = submitter.push(entry) {
                        submitted.fetch_add(submitter.submit().unwrap() as u64, SeqCst);
                        signallers.drain(..).for_each(|signaller| {
                            if random.bool() {
                                signaller.signal()
                            }
                        });
                        thread::yield_now();
                        entry = refused.entry;
                    }
                    pushed += 1;
                    if random.u8(0..4) == 0 {
                        submitted.fetch_add(submitter.submit().unwrap() as u64, SeqCst);
                    }
                }
                submitted.fetch_add(submitter.submit().unwrap() as u64, SeqCst);
                assert_eq!(pushed, EACH);
            });
        }
        drop(first);
        let (submitted, reaped, done, looks) = (&submitted, &reaped, &done, &looks);
        let looker = scope.spawn(move || {
            let mut last = Counts::default();
            while !done.load(SeqCst) {
                let (before, ended_before) = (submitted.load(SeqCst), reaped.load(SeqCst));
                let stats = controller.stats().unwrap();
                check(&stats);
                let total = stats.total;
                assert!(total.accepted >= before, "{total:?} after {before} were submitted");
                assert!(ended(&total) - total.silent >= ended_before, "{total:?} after {ended_before} were reaped");
                assert!(total.accepted >= last.accepted && total.ok >= last.ok && total.failed >= last.failed);
                assert!(total.cancelled >= last.cancelled && total.read_bytes >= last.read_bytes);
                last = total;
                looks.fetch_add(1, SeqCst);
            }
        });
        while s.ring.wait_timeout(1, LIMIT).is_ok() {
            for cqe in s.ring.completion() {
                tally.count(&cqe);
                let moved = cqe.res().max(0) as u64;
                match cqe.user_data() {
                    READ => bytes[0] += moved,
                    WRITE => bytes[1] += moved,
                    _ => {}
                }
            }
            reaped.store(tally.ended(), SeqCst);
        }
        done.store(true, SeqCst);
        looker.join().unwrap();
    });
    let stats = s.ring.stats().unwrap();
    check(&stats);
    let total = stats.total;
    assert_eq!((total.accepted, total.outstanding), (PRODUCERS * EACH, 0));
    assert_eq!(total.silent, silent_ok.load(Relaxed));
    assert_eq!((total.ok, total.failed, total.cancelled), (tally.ok + total.silent, tally.failed, tally.cancelled));
    for stage in STAGES {
        let counted = tally.stages.get(&stage).copied().unwrap_or(0);
        let silent = if stage == Stage::Done { total.silent } else { 0 };
        assert_eq!(total.stages.of(stage), counted + silent, "{stage}");
    }
    assert_eq!([total.read_bytes, total.written_bytes], bytes);
    assert!(stats.peers.len() >= 2 && total.failed > 0 && total.cancelled > 0 && bytes[0] > 0 && bytes[1] > 0);
}

const READ: u64 = 1;
const WRITE: u64 = 2;
