//! What is told to `tracing`: the ends of rings and engines, segments, sick peers, limits; and nothing for a single entry.
#![cfg(feature = "tracing")]

mod common;

use std::fmt::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use common::{LIMIT, Setup};
use moonring::opcode::{Nop, Wait};
use moonring::sim::Sim;
use moonring::{Engine, Region, Ring, fence};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Keeps every event as a line.
struct Keeper;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for Keeper {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        assert_eq!(event.metadata().target(), "moonring");
        let mut line = Line(event.metadata().level().to_string());
        event.record(&mut line);
        let panics =
            line.0.contains("engine=\"sim\"") && line.0.contains("ring built") && line.0.contains("entries=13");
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.0);
        assert!(!panics, "a subscriber may panic");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// One test at a time, from an empty list.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // The second test finds it set.
    let _ = tracing::subscriber::set_global_default(Keeper);
    take();
    guard
}

fn take() -> Vec<String> {
    std::mem::take(&mut *LINES.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The line of a level with all of these in it, waiting for it.
fn expect(level: Level, parts: &[&str]) -> String {
    let end = Instant::now() + LIMIT;
    loop {
        let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let fits = |line: &&String| line.starts_with(level.as_str()) && parts.iter().all(|part| line.contains(part));
        if let Some(line) = lines.iter().find(fits) {
            return line.clone();
        }
        assert!(Instant::now() < end, "no {level} with {parts:?} in {lines:#?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_rings_life_is_told_and_its_entries_are_not() {
    let _alone = alone();
    let mut s = Setup::loopback(16);
    expect(Level::DEBUG, &["ring built", "entries=16", "attached=false", s.engine.name()]);
    let attached = Ring::builder().attach(&s.ring).build(8, &s.engine).unwrap();
    expect(Level::DEBUG, &["ring built", "entries=8", "attached=true"]);
    expect(Level::DEBUG, &["segment opened", s.peer.name(), "again=false"]);
    s.engine.reopen_segment(s.peer.name(), LIMIT).unwrap();
    expect(Level::DEBUG, &["segment opened", s.peer.name(), "again=true"]);
    s.engine.open_segment("nobody", LIMIT).unwrap_err();
    expect(Level::WARN, &["segment not opened", "segment=\"nobody\"", "again=false", "error="]);
    take();
    s.peer = s.engine.open_segment(s.peer.name(), LIMIT).unwrap();
    let (_never, pending) = fence::host();
    for _ in 0..5 {
        s.push(Nop::new().build());
        let read = s.read(0, 100);
        s.push(read);
    }
    s.reap(10);
    s.push(Wait::new().build().wait(&pending));
    s.ring.submit().unwrap();
    s.ring.stats().unwrap();
    assert_eq!(take(), Vec::<String>::new());
    drop(attached);
    expect(Level::DEBUG, &["ring closed", "accepted=0"]);
    s.ring.close(LIMIT);
    expect(Level::DEBUG, &["ring closed", "accepted=11", "ok=10", "failed=1", "cancelled=0"]);
    let name = s.engine.name().to_owned();
    drop((s.ours, s.engine));
    expect(Level::DEBUG, &["engine ended", &name]);
}

#[test]
fn a_sick_peer_and_passed_limits_are_told_once() {
    let _alone = alone();
    let span = Duration::from_millis(500);
    let mut s = Setup::simulated(64, Sim::new(1).delay(span..span));
    let (_never, pending) = fence::host();
    for n in 0..3 {
        let read = s.read(n * 10, 10).transfer_limit(Duration::from_millis(1));
        s.push(read);
        s.push(Wait::new().build().wait(&pending).gate_limit(Duration::from_millis(1)));
    }
    s.reap(9);
    expect(Level::WARN, &["peer has an overdue entry", "peer=\"sim\""]);
    expect(Level::INFO, &["peer has no overdue entry any more", "peer=\"sim\""]);
    let lines = take();
    let count = |text: &str| lines.iter().filter(|line| line.contains(text)).count();
    assert_eq!((count("has an overdue"), count("no overdue")), (1, 1), "{lines:#?}");
    let limits: Vec<_> = lines.iter().filter(|line| line.contains("limits passed")).collect();
    let sum = |name: &str| {
        let values = limits.iter().flat_map(|line| line.split(' ')).filter_map(|word| word.strip_prefix(name));
        values.map(|value| value.parse::<u32>().unwrap()).sum::<u32>()
    };
    assert_eq!((sum("at_gate="), sum("with_transport=")), (3, 3), "{lines:#?}");
}

#[test]
fn deaths_and_leaks_are_told_and_a_subscribers_panic_goes_no_further() {
    let _alone = alone();
    let mut s = Setup::simulated(13, Sim::new(1).panic_at(1));
    let read = s.read(0, 10);
    s.push(read);
    s.reap(1);
    expect(Level::ERROR, &["poller died of a panic", "rings=1"]);
    expect(Level::ERROR, &["kept for ever", "engine=\"sim\""]);
    take();

    // The engine's last user ends it around a transfer that does not end.
    let span = Duration::from_secs(3600);
    let sim = Sim::new(2).delay(span..span);
    let probe = sim.probe();
    let engine = Engine::sim(sim);
    let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
    let peer = engine.open_segment(engine.name(), LIMIT).unwrap();
    let mut ring = Ring::builder().grace(Duration::ZERO).build(4, &engine).unwrap();
    let read = moonring::opcode::Read::new(region.slice(..).unwrap(), peer.at(region.address())).build();
    ring.submission().push(read).unwrap();
    ring.submit().unwrap();
    while probe.issued() == 0 {
        std::thread::yield_now();
    }
    drop((region, peer, engine));
    drop(ring);
    expect(Level::WARN, &["ending the engine with transfers in flight", "engine=\"sim\""]);
    expect(Level::DEBUG, &["ring closed"]);
}
