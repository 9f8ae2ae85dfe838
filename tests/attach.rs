//! Several rings on one poller thread.

mod common;

use std::fs;
use std::io::ErrorKind;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, Setup, reap_exactly};
use moonring::code::errno;
use moonring::sim::Sim;
use moonring::{CqeFlags, Engine, Entry, Refusal, Region, Ring, Stage, WaitError, fence, opcode};

/// One test at a time: they count the process's threads.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nop(user_data: u64) -> Entry {
    opcode::Nop::new().build().user_data(user_data)
}

/// Waits until so many pollers are there: a thread takes its name when it has started, and leaves the list a little after its end.
fn await_pollers(count: usize) {
    let end = Instant::now() + LIMIT;
    loop {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
        // The kernel keeps 15 bytes of a name.
        let found = names.filter(|name| name.trim() == "moonring-poller").count();
        if found == count {
            return;
        }
        assert!(Instant::now() < end, "{found} pollers, not {count}");
        thread::yield_now();
    }
}

fn attached(other: &Ring, entries: u32, engine: &Engine) -> Ring {
    Ring::builder().grace(Duration::from_millis(100)).attach(other).build(entries, engine).unwrap()
}

/// Pushes Nops and reaps them, in order, until `count` are through.
fn run_nops(ring: &mut Ring, count: u64) {
    let (mut pushed, mut reaped) = (0, 0);
    while reaped < count {
        while pushed < count && ring.submission().push(nop(pushed)).is_ok() {
            pushed += 1;
        }
        ring.submit().unwrap();
        ring.wait_timeout(1, LIMIT).unwrap();
        for cqe in ring.completion() {
            assert_eq!((cqe.user_data(), cqe.res()), (reaped, 0));
            reaped += 1;
        }
    }
}

#[test]
fn attached_rings_share_a_thread_until_the_last_is_closed() {
    let _alone = alone();
    await_pollers(0);
    let engine = Engine::loopback();
    let first = Ring::builder().build(16, &engine).unwrap();
    let builder = Ring::builder().attach(&first);
    let mut second = builder.clone().build(64, &engine).unwrap();
    let mut third = attached(&second, 8, &Engine::loopback());
    // The first one's end is no matter, neither for those that are there nor for those to come.
    drop(first);
    run_nops(&mut second, 1_000);
    run_nops(&mut third, 1_000);
    await_pollers(1);
    let mut fourth = builder.clone().build(16, &engine).unwrap();
    drop((second, third));
    run_nops(&mut fourth, 1_000);
    await_pollers(1);
    let (submission, completion) = fourth.split();
    drop(submission);
    await_pollers(1);
    drop(completion);
    await_pollers(0);
    assert_eq!(builder.build(16, &engine).unwrap_err().kind(), ErrorKind::NotConnected);
    await_pollers(0);
}

/// Four rings with transfers, fences and Nops at once, each with its own results; others come, and go with work outstanding.
#[test]
fn rings_of_one_poller_work_side_by_side() {
    const EACH: u64 = 5_000;
    let _alone = alone();
    let base = Ring::builder().build(1, &Engine::loopback()).unwrap();
    let shared = Engine::sim(Sim::new(1).partial_submits(100));
    let workers: Vec<_> = (0..4u64)
        .map(|number| {
            // Two on one engine, two on engines of their own.
            let engine = if number < 2 { shared.clone() } else { Engine::sim(Sim::new(10 + number)) };
            let mut ring = attached(&base, 32, &engine);
            let memory = engine.register(Region::alloc(1 << 16).unwrap()).unwrap();
            let peer = engine.open_segment(engine.name(), LIMIT).unwrap();
            let info = memory.info();
            thread::spawn(move || {
                let (mut signaller, timeline) = fence::timeline(0);
                let (mut pushed, mut ended) = (0, vec![0u8; EACH as usize]);
                let mut reaped = 0;
                while reaped < EACH {
                    while pushed < EACH {
                        // A length that tells rings apart.
                        let len = 8 * (number as usize + 1);
                        let read = || {
                            let remote = peer.slice(&info, 4096, len as u64).unwrap();
                            opcode::Read::new(memory.slice(0..len).unwrap(), remote).build()
                        };
                        let entry = match pushed % 3 {
                            0 => read(),
                            1 => read().wait(&timeline.at(pushed)),
                            _ => opcode::Nop::new().result(len as i32).build(),
                        };
                        if ring.submission().push(entry.user_data(pushed)).is_err() {
                            break;
                        }
                        pushed += 1;
                    }
                    ring.submit().unwrap();
                    signaller.signal(pushed).unwrap();
                    ring.wait_timeout(1, LIMIT).unwrap();
                    for cqe in ring.completion() {
                        assert_eq!(cqe.result(), Ok(8 * (number as u32 + 1)));
                        ended[cqe.user_data() as usize] += 1;
                        reaped += 1;
                    }
                }
                assert!(ended.iter().all(|&count| count == 1));
                ring.close(LIMIT)
            })
        })
        .collect();
    // Meanwhile rings come and go on the same poller and engine, with entries that wait, are with the transport, or both.
    let memory = shared.register(Region::alloc(4096).unwrap()).unwrap();
    let peer = shared.open_segment(shared.name(), LIMIT).unwrap();
    let mut rounds = 0;
    while rounds < 20 || workers.iter().any(|worker| !worker.is_finished()) {
        let mut ring = attached(&base, 16, &shared);
        let (_signaller, never) = fence::host();
        for n in 0..8 {
            let read = opcode::Read::new(memory.slice(0..8).unwrap(), peer.slice(&memory.info(), 8, 8).unwrap());
            let read = read.build().user_data(n);
            ring.submission().push(if n % 2 == 0 { read.wait(&never) } else { read }).unwrap();
        }
        ring.submit().unwrap();
        let report = ring.close(LIMIT);
        assert!(report.finished);
        assert_eq!((report.completions.len(), report.unquiet), (8, 0), "{report:?}");
        rounds += 1;
    }
    for worker in workers {
        let report = worker.join().unwrap();
        assert!(report.finished && report.completions.is_empty(), "{report:?}");
    }
    await_pollers(1);
    drop(base);
    await_pollers(0);
}

/// A ring that ends its engine, which takes a second, holds up nobody.
#[test]
fn a_slow_end_of_an_engine_stalls_no_other_ring() {
    let _alone = alone();
    let hour = Duration::from_secs(3600);
    let sim = Sim::new(2).delay(hour..2 * hour).slow_close(Duration::from_secs(1));
    let probe = sim.probe();
    let mut setup = Setup::simulated(8, sim);
    let mut other = attached(&setup.ring, 8, &Engine::loopback());
    setup.push(setup.read(0, 8).user_data(1));
    setup.ring.submit().unwrap();
    let end = Instant::now() + LIMIT;
    while probe.issued() == 0 {
        assert!(Instant::now() < end);
    }
    let Setup { engine, ring, ours, theirs, .. } = setup;
    drop((engine, ours, theirs));
    let closer = thread::spawn(move || ring.close(Duration::ZERO));
    let mut trips = 0;
    while !closer.is_finished() {
        run_nops(&mut other, 1);
        trips += 1;
        thread::sleep(Duration::from_millis(1));
    }
    // A poller that waits for the end makes one or two.
    assert!(trips > 10, "{trips} round trips in a second");
    let report = closer.join().unwrap();
    assert!(report.finished);
    assert_eq!((report.unissued, report.completed, report.unquiet), (0, 1, 0));
    let cqe = report.completions[0];
    assert_eq!((cqe.user_data(), cqe.res(), cqe.stage()), (1, -errno::ESHUTDOWN, Stage::Transfer));
    run_nops(&mut other, 100);
}

/// A ring closes around transfers that go on, on an engine that another ring of the poller uses: that one keeps its peers.
#[test]
fn transfers_left_behind_do_not_hold_up_the_engines_other_ring() {
    let _alone = alone();
    let sim = Sim::new(3).delay(Duration::from_millis(300)..Duration::from_millis(301));
    let probe = sim.probe();
    let mut setup = Setup::simulated(256, sim);
    let mut other = attached(&setup.ring, 256, &setup.engine);
    // As many as the transport takes for one peer.
    (0..256).for_each(|n| setup.push(setup.read(0, 8).user_data(n)));
    setup.ring.submit().unwrap();
    let end = Instant::now() + LIMIT;
    while probe.issued() < 256 {
        assert!(Instant::now() < end);
    }
    let reads: Vec<Entry> = (0..256).map(|n| setup.read(0, 8).user_data(n)).collect();
    let report = setup.ring.close(Duration::ZERO);
    assert_eq!((report.unissued, report.completed, report.unquiet), (0, 0, 256));
    assert!(report.completions.iter().all(|cqe| cqe.flags() == CqeFlags::UNQUIET));
    other.submission().push_chain(reads).unwrap();
    other.submit().unwrap();
    let cqes = reap_exactly(&mut other, 256);
    assert!(cqes.iter().all(|cqe| cqe.result() == Ok(8)));
}

/// A panic on the thread ends every ring on it, and those that are attached later.
#[test]
fn a_panic_ends_all_rings_of_the_poller() {
    let _alone = alone();
    let mut setup = Setup::simulated(8, Sim::new(4).panic_at(1));
    let mut other = attached(&setup.ring, 8, &Engine::loopback());
    let (_signaller, never) = fence::host();
    other.submission().push(opcode::Wait::new().build().wait(&never).user_data(1)).unwrap();
    other.submit().unwrap();
    setup.push(setup.read(0, 8).user_data(2));
    assert_eq!(setup.reap(1)[0].res(), -errno::EOWNERDEAD);
    let cqe = reap_exactly(&mut other, 1)[0];
    assert_eq!((cqe.user_data(), cqe.res(), cqe.stage()), (1, -errno::EOWNERDEAD, Stage::Shutdown));
    assert_eq!(other.wait(1), Err(WaitError::PollerDead));
    let mut late = attached(&other, 8, &Engine::loopback());
    let end = Instant::now() + LIMIT;
    while late.wait_timeout(1, LIMIT) != Err(WaitError::PollerDead) {
        assert!(Instant::now() < end);
        thread::yield_now();
    }
    assert_eq!(late.submission().push(nop(1)).unwrap_err().reason, Refusal::PollerDead);
    drop((setup.ring, other, late));
    await_pollers(0);
}

/// Calls and messages reach a ring by its number, wherever in the core it is.
#[test]
fn calls_and_messages_find_a_ring_whose_place_is_not_its_number() {
    let _alone = alone();
    let engine = Engine::loopback();
    let first = Ring::builder().build(8, &engine).unwrap();
    let keep = attached(&first, 8, &engine);
    drop(first);
    let mut ring = attached(&keep, 8, &engine);
    let (signaller, fence) = moonring::fence::host();
    ring.submission().push(nop(1).wait(&fence)).unwrap();
    ring.submit().unwrap();
    let controller = ring.controller();
    assert_eq!(controller.cancel(moonring::opcode::Cancel::user_data(1)), Ok(1));
    assert_eq!(controller.quiesce(moonring::opcode::Select::any(), LIMIT), Ok(()));
    let messages = ring.messages();
    let message = moonring::opcode::MsgRing::new(&messages, 5, 7).build();
    let mut keep = keep;
    keep.submission().push(message).unwrap();
    keep.submit_and_wait(1).unwrap();
    assert_eq!(keep.completion().next().unwrap().res(), 0);
    assert_eq!(ring.wait_timeout(2, LIMIT), Ok(2));
    let got: Vec<_> = ring.completion().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    assert_eq!(got, [(1, -125), (5, 7)]);
    drop(signaller);
}
