//! Entries that do nothing: what the ring itself costs, beside io_uring and bare queues.

use std::hint::spin_loop;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use moonring::{Engine, Region, Registered, Ring, Segment, opcode};

use crate::Settings;
use crate::machine::{CALLER, State, on_poller_core, pin, undisturbed};
use crate::out;
use crate::queues::{ArrayQueues, Rtrb, Tokio, four_into_an_array_queue};
use crate::rounds::{Subject, Table, interleave};
use crate::uring::Uring;

pub const IN_FLIGHT: u64 = 1024;
const BATCH: u64 = 32;
/// Operations between two looks at the clock.
const STREAM: u64 = 16_384;
const LOCKSTEP: u64 = 4_096;
const ROUND_TRIPS: u64 = 512;

/// Something that takes entries on one side and gives results back on the other, a poller between them.
pub trait Pair {
    /// Pushes `count` entries whose user data begin with `first`, and shows them to the poller. There is room.
    fn push(&mut self, first: u64, count: u64);

    /// Takes the results that are ready; the next user data is `next`. How many.
    fn reap(&mut self, next: u64) -> u64;

    /// Waits until `count` results are ready, or some.
    fn wait(&mut self, _count: u64) {
        spin_loop();
    }
}

/// Runs `operations` in batches with up to [`IN_FLIGHT`] outstanding; nanoseconds.
fn stream(pair: &mut impl Pair, batch: u64, operations: u64) -> f64 {
    let (mut pushed, mut reaped) = (0, 0);
    let start = Instant::now();
    while reaped < operations {
        if pushed < operations && pushed - reaped + batch <= IN_FLIGHT {
            pair.push(pushed, batch);
            pushed += batch;
        }
        reaped += pair.reap(reaped);
    }
    start.elapsed().as_nanos() as f64
}

/// Runs `operations` in batches, each of which ends before the next is pushed; nanoseconds.
fn lockstep(pair: &mut impl Pair, batch: u64, operations: u64) -> f64 {
    let mut reaped = 0;
    let start = Instant::now();
    while reaped < operations {
        let end = reaped + batch;
        pair.push(reaped, batch);
        while reaped < end {
            pair.wait(end - reaped);
            reaped += pair.reap(reaped);
        }
    }
    start.elapsed().as_nanos() as f64
}

/// Million operations in a second: runs of `operations` until the time is up, after one to warm up. `NAN` if it cannot be built.
fn rate<P: Pair>(build: impl Fn() -> Option<P>, run: fn(&mut P, u64, u64) -> f64, batch: u64, operations: u64) -> f64 {
    const SPAN: f64 = 10e6;
    let operations = operations.next_multiple_of(batch);
    undisturbed(|| {
        let Some(mut pair) = on_poller_core(&build) else { return f64::NAN };
        run(&mut pair, batch, operations);
        let (mut done, mut nanos) = (0, 0.0);
        while nanos < SPAN {
            nanos += run(&mut pair, batch, operations);
            done += operations;
        }
        done as f64 * 1e3 / nanos
    })
}

/// The ring, built as anybody would.
struct Nops(Ring);

impl Nops {
    fn new() -> Option<Nops> {
        Some(Nops(Ring::builder().build(IN_FLIGHT as u32, &Engine::loopback()).unwrap()))
    }
}

impl Pair for Nops {
    fn push(&mut self, first: u64, count: u64) {
        let mut queue = self.0.submission();
        for user_data in first..first + count {
            queue.push(opcode::Nop::new().build().user_data(user_data)).unwrap();
        }
        self.0.submit().unwrap();
    }

    fn reap(&mut self, next: u64) -> u64 {
        reap(&mut self.0, next, 0)
    }

    fn wait(&mut self, count: u64) {
        self.0.wait(count as usize).unwrap();
    }
}

fn reap(ring: &mut Ring, next: u64, bytes: u32) -> u64 {
    let mut reaped = 0;
    for cqe in ring.completion() {
        assert_eq!((cqe.user_data(), cqe.result()), (next + reaped, Ok(bytes)));
        reaped += 1;
    }
    reaped
}

/// Reads of 64 bytes on loopback.
struct Reads {
    ring: Ring,
    region: Registered,
    peer: Segment,
}

impl Reads {
    fn new() -> Option<Reads> {
        let engine = Engine::loopback();
        let region = engine.register(Region::alloc(2 * 64 * IN_FLIGHT as usize).unwrap()).unwrap();
        let peer = engine.open_segment(engine.name(), Duration::from_secs(10)).unwrap();
        Some(Reads { ring: Ring::builder().build(IN_FLIGHT as u32, &engine).unwrap(), region, peer })
    }
}

impl Pair for Reads {
    fn push(&mut self, first: u64, count: u64) {
        let mut queue = self.ring.submission();
        for user_data in first..first + count {
            let at = (user_data % IN_FLIGHT) as usize * 64;
            let remote = self.peer.at(self.region.address() + 64 * IN_FLIGHT + at as u64);
            let read = opcode::Read::new(self.region.slice(at..at + 64).unwrap(), remote);
            queue.push(read.build().user_data(user_data)).unwrap();
        }
        self.ring.submit().unwrap();
    }

    fn reap(&mut self, next: u64) -> u64 {
        reap(&mut self.ring, next, 64)
    }
}

/// Four threads that submit batches to one ring, in million operations in a second. They share a core with the reaper, so
/// whoever can do nothing yields.
fn four_submitters(operations: u64) -> f64 {
    let mut ring = on_poller_core(|| Ring::builder().build(IN_FLIGHT as u32, &Engine::loopback()).unwrap());
    let submitters: [_; 4] = std::array::from_fn(|_| ring.submitter());
    let each = (operations / 4).next_multiple_of(BATCH);
    let mut sum = 0;
    let start = Instant::now();
    std::thread::scope(|scope| {
        for mut submitter in submitters {
            scope.spawn(move || {
                let mut pushed = 0;
                while pushed < each {
                    let end = pushed + BATCH;
                    while pushed < end {
                        if submitter.push(opcode::Nop::new().build().user_data(pushed)).is_ok() {
                            pushed += 1;
                        } else {
                            submitter.submit().unwrap();
                            yield_now();
                        }
                    }
                    submitter.submit().unwrap();
                }
            });
        }
        let mut reaped = 0;
        while reaped < 4 * each {
            let before = reaped;
            for cqe in ring.completion() {
                sum += cqe.user_data();
                reaped += 1;
            }
            if reaped == before {
                yield_now();
            }
        }
    });
    let time = start.elapsed();
    assert_eq!(sum, 4 * (each * (each - 1) / 2));
    4.0 * each as f64 * 1e3 / time.as_nanos() as f64
}

const RING: &str = "moonring";
const URINGS: [&str; 2] = ["io_uring", "io_uring SQPOLL"];
const ARRAY_QUEUES: &str = "two ArrayQueues";
const RTRB: &str = "two rtrb rings";
const TOKIO: &str = "tokio mpsc and oneshot";

pub fn measure(settings: &mut Settings) {
    if let Err(error) = Uring::new(false) {
        out::note(&format!("io_uring was not measured: the kernel refuses it here ({error})"));
    }
    pin(CALLER);
    let rounds = settings.rounds(41, 7);
    batches(settings, rounds);
    lockstepped(settings, rounds);
    reads(settings, rounds);
    producers(settings, rounds);
    for batch in [1, 8, 128] {
        curve(settings, batch, settings.rounds(9, 3));
    }
}

fn batches(settings: &mut Settings, rounds: usize) {
    let mut subjects = [
        Subject::new(RING, || rate(Nops::new, stream, BATCH, STREAM)),
        Subject::new(URINGS[0], || rate(|| Uring::new(false).ok(), stream, BATCH, STREAM)),
        Subject::new(URINGS[1], || rate(|| Uring::new(true).ok(), stream, BATCH, STREAM)),
        Subject::new(ARRAY_QUEUES, || rate(ArrayQueues::new, stream, BATCH, STREAM)),
        Subject::new(RTRB, || rate(Rtrb::new, stream, BATCH, STREAM)),
        Subject::new(TOKIO, || rate(Tokio::new, stream, BATCH, STREAM)),
    ];
    let names = subjects.iter().map(|subject| subject.name()).collect::<Vec<_>>();
    let table = interleave(settings, rounds, &mut subjects);
    table.compare("nop_batch32_vs_io_uring", RING, &URINGS, "M/s", true);
    table.compare("nop_batch32_vs_array_queue", RING, &[ARRAY_QUEUES], "M/s", true);
    table.compare("nop_batch32_vs_rtrb", RING, &[RTRB], "M/s", true);
    table.compare("nop_batch32_vs_tokio", RING, &[TOKIO], "M/s", true);
    for state in State::ALL {
        for name in &names {
            if let Some(value) = table.value(name, state) {
                out::point("batch", name, state.name(), BATCH as f64, value);
            }
        }
    }
}

fn curve(settings: &mut Settings, batch: u64, rounds: usize) {
    let mut subjects = [
        Subject::new(RING, || rate(Nops::new, stream, batch, STREAM)),
        Subject::new(URINGS[0], || rate(|| Uring::new(false).ok(), stream, batch, STREAM)),
        Subject::new(URINGS[1], || rate(|| Uring::new(true).ok(), stream, batch, STREAM)),
        Subject::new(ARRAY_QUEUES, || rate(ArrayQueues::new, stream, batch, STREAM)),
        Subject::new(RTRB, || rate(Rtrb::new, stream, batch, STREAM)),
        Subject::new(TOKIO, || rate(Tokio::new, stream, batch, STREAM)),
    ];
    let names = subjects.iter().map(|subject| subject.name()).collect::<Vec<_>>();
    // Only a picture: no waiting for a state of the machine.
    let mut patience = Settings { near_wait: Duration::ZERO, ..*settings };
    let table = interleave(&mut patience, rounds, &mut subjects);
    for state in State::ALL {
        for name in &names {
            if let Some(value) = table.value(name, state) {
                out::point("batch", name, state.name(), batch as f64, value);
            }
        }
    }
}

fn lockstepped(settings: &mut Settings, rounds: usize) {
    let mut subjects = [
        Subject::new(RING, || rate(Nops::new, lockstep, BATCH, LOCKSTEP)),
        Subject::new(URINGS[0], || rate(|| Uring::new(false).ok(), lockstep, BATCH, LOCKSTEP)),
        Subject::new(URINGS[1], || rate(|| Uring::new(true).ok(), lockstep, BATCH, LOCKSTEP)),
        Subject::new(RTRB, || rate(Rtrb::new, lockstep, BATCH, LOCKSTEP)),
    ];
    let table = interleave(settings, rounds, &mut subjects);
    table.compare("nop_lockstep32_vs_io_uring", RING, &URINGS, "M/s", true);
    floor(&table, "submit 32 and wait for 32", "M/s");
    // A round trip is the inverse of the rate at depth 1.
    let nanos = |rate: f64| 1e3 / rate;
    let mut subjects = [
        Subject::new(RING, || nanos(rate(Nops::new, lockstep, 1, ROUND_TRIPS))),
        Subject::new(URINGS[0], || nanos(rate(|| Uring::new(false).ok(), lockstep, 1, ROUND_TRIPS))),
        Subject::new(URINGS[1], || nanos(rate(|| Uring::new(true).ok(), lockstep, 1, ROUND_TRIPS))),
        Subject::new(RTRB, || nanos(rate(Rtrb::new, lockstep, 1, ROUND_TRIPS))),
    ];
    let table = interleave(settings, rounds, &mut subjects);
    table.compare("nop_depth1_vs_io_uring", RING, &URINGS, "ns", false);
    floor(&table, "one at a time", "ns");
}

/// What bare rings take for the same, with nothing done in between: nobody who hands entries to another core can do better.
fn floor(table: &Table, what: &str, unit: &str) {
    for state in State::ALL {
        if let Some(value) = table.value(RTRB, state) {
            out::note(&format!("{what}, {}: {RTRB} make {value:.4} {unit}", state.name()));
        }
    }
}

fn reads(settings: &mut Settings, rounds: usize) {
    let mut subjects = [
        Subject::new(RING, || rate(Reads::new, stream, BATCH, STREAM)),
        Subject::new(URINGS[0], || rate(|| Uring::new(false).ok(), stream, BATCH, STREAM)),
        Subject::new(URINGS[1], || rate(|| Uring::new(true).ok(), stream, BATCH, STREAM)),
    ];
    let table = interleave(settings, rounds, &mut subjects);
    table.compare("loopback_read_vs_io_uring", RING, &URINGS, "M/s", true);
}

fn producers(settings: &mut Settings, rounds: usize) {
    let operations = if settings.quick { 50_000 } else { 200_000 };
    let mut subjects = [
        Subject::new(RING, || four_submitters(operations)),
        Subject::new(ARRAY_QUEUES, || four_into_an_array_queue(operations)),
    ];
    let table = interleave(settings, rounds, &mut subjects);
    table.compare("nop_4_producers_vs_array_queue", RING, &[ARRAY_QUEUES], "M/s", true);
}
