//! The deterministic simulation: the core and the producers' and reapers' code, without threads and under a clock that
//! goes when it is told to, with everything going wrong that a transport, a fence, a full queue or a closing ring can do.
//!
//! A seed makes a [program](program), which the [world](world) runs step by step. The [book](book) keeps what each entry may
//! still become, from what was pushed, signalled and done by the transport, and holds the promises against every operation
//! that reaches the transport and every completion, and after every turn. What fails is printed with its seed, and made
//! smaller.
//!
//! `MOONRING_SEEDS` says how many seeds are run, 10,000 unless set, and `MOONRING_SEED` the first one, 1 unless set: what is
//! part of every change's tests is the same each time, and other seeds are for `cargo xtask sim`. A seed that is run alone
//! prints what happens in it.

mod book;
mod checks;
mod ending;
mod futures;
mod net;
mod program;
mod push;
mod record;
mod scale;
mod shrink;
mod store;
mod strips;
mod transport;
mod verdict;
mod world;

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use world::{Report, run};

/// As many failures are made small and printed.
const SHOWN: u64 = 3;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name}={text:?}: it takes a whole number, such as {default}"))
    })
}

/// Says what must be seen of a test that passes too, whose output is kept back otherwise.
fn say(text: &str) {
    // Nobody listens: then nobody misses it.
    let _ = writeln!(io::stderr(), "simulation: {text}");
}

#[derive(Default)]
struct Tally {
    seeds: AtomicU64,
    steps: AtomicU64,
    faults: AtomicU64,
    /// Operations of several entries.
    merged: AtomicU64,
    /// Entries with futures that ended.
    futures: AtomicU64,
    /// Keys that a Store was asked for.
    asked: AtomicU64,
    violations: AtomicU64,
}

impl Tally {
    fn add(&self, report: &Report) -> u64 {
        self.steps.fetch_add(report.steps, Relaxed);
        self.faults.fetch_add(report.faults, Relaxed);
        self.merged.fetch_add(report.merged, Relaxed);
        self.futures.fetch_add(report.futures, Relaxed);
        self.asked.fetch_add(report.asked, Relaxed);
        self.seeds.fetch_add(1, Relaxed) + 1
    }
}

#[test]
fn every_promise_is_kept() {
    let (seeds, first) = (setting("MOONRING_SEEDS", 10_000), setting("MOONRING_SEED", 1));
    say(&format!("{seeds} seeds, MOONRING_SEED={first}"));
    let tally = Tally::default();
    if seeds == 1 {
        let report = run(&program::program(first), true);
        report.trace.iter().for_each(|line| println!("{line}"));
    }
    let workers = thread::available_parallelism().map_or(1, |count| count.get().min(8)) as u64;
    thread::scope(|scope| {
        for worker in 0..workers {
            let tally = &tally;
            scope.spawn(move || {
                for seed in (worker..seeds).step_by(workers as usize).map(|n| first.wrapping_add(n)) {
                    check(seed, tally, seeds);
                }
            });
        }
    });
    let Tally { seeds, steps, faults, merged, futures, asked, violations } = tally;
    let [seeds, steps, faults, merged, futures, asked, violations] =
        [seeds, steps, faults, merged, futures, asked, violations].map(AtomicU64::into_inner);
    let line = serde_json::json!({
        "seeds": seeds, "steps": steps, "faults": faults, "merged": merged, "futures": futures, "store": asked,
        "violations": violations,
    });
    println!("\nsimulation: {line}");
    assert_eq!(violations, 0, "{violations} of {seeds} seeds break a promise");
    assert!(faults > 0 || seeds < 1_000, "no fault was injected");
    assert!(asked > seeds / 2 || seeds < 10_000, "{asked} keys that a Store was asked for in {seeds} programs are few");
    assert!(futures > seeds || seeds < 10_000, "{futures} entries with futures in {seeds} programs are few");
    assert!(merged > seeds || seeds < 10_000, "{merged} operations of several entries in {seeds} programs are few");
}

fn check(seed: u64, tally: &Tally, seeds: u64) {
    let program = program::program(seed);
    let report = run(&program, false);
    let done = tally.add(&report);
    if seeds >= 100_000 && done.is_multiple_of(seeds / 20) {
        say(&format!("{done} of {seeds} seeds, {} violations", tally.violations.load(Relaxed)));
    }
    if report.violations.is_empty() {
        return;
    }
    if tally.violations.fetch_add(1, Relaxed) >= SHOWN {
        return;
    }
    let small = shrink::shrink(program, |program| !run(program, false).violations.is_empty());
    let again = run(&small, true);
    let mut text = format!("VIOLATION, MOONRING_SEED={seed} MOONRING_SEEDS=1: {}\n", report.violations[0]);
    text += &format!(
        "  smallest program: engines {:?}\n    rings {:?}\n    ending {:?}\n",
        small.engines, small.rings, small.ending
    );
    small.steps.iter().for_each(|step| text += &format!("    {step:?}\n"));
    text += "  what happens in it:\n";
    again.trace.iter().for_each(|line| text += &format!("  {line}\n"));
    say(&text);
}

/// The same seed is the same program and the same story, or nothing could be replayed.
#[test]
fn a_seed_is_replayed() {
    for seed in 0..200 {
        let [one, two] = [(); 2].map(|()| run(&program::program(seed), true));
        assert_eq!(one.trace, two.trace, "seed {seed}");
        assert_eq!((one.steps, one.faults), (two.steps, two.faults), "seed {seed}");
    }
}
