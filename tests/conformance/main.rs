//! moonring and the kernel's io_uring against one executable model of the rules, on random programs.
//!
//! `MOONRING_PROGRAMS` says how many, 2,000 unless set, and `MOONRING_SEED` the first one's seed. Each program has a seed
//! of its own, one more than the last one's, so that a failure is repeated with its seed and one program.

mod compare;
mod kernel;
mod model;
mod named;
mod ours;
mod program;
mod random;

use std::io::{self, Write};
use std::time::Duration;

use kernel::Mode;
use model::{Deviation, Fault, Prediction, Rules, predict};
use moonring::Engine;
use named::{NAMED, Ours};
use program::{Outcome, Program};
use random::Subject;

/// How long nothing more must come after what is expected.
const QUIET: Duration = Duration::from_micros(100);
/// The same where the kernel's workers are about.
const QUIET_PARALLEL: Duration = Duration::from_micros(400);
/// As many mismatches are made small and printed.
const SHOWN: u64 = 3;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name}={text:?}: it takes a whole number, such as {default}"))
    })
}

/// Says what must be seen of a test that passes too, whose output is kept back otherwise.
fn say(text: &str) {
    // Nobody listens: then nobody misses it.
    let _ = writeln!(io::stderr(), "conformance: {text}");
}

/// What came of many programs.
#[derive(Default)]
struct Tally {
    programs: u64,
    completions: usize,
    mismatches: u64,
}

impl Tally {
    /// Prints the tally on a line of its own, for `cargo xtask conformance`, and judges it.
    fn report(self, subject: &str, deviations: &[Deviation]) {
        let Tally { programs, completions, mismatches } = self;
        let deviations: Vec<_> = deviations.iter().map(|deviation| format!("{deviation:?}")).collect();
        let line = serde_json::json!({
            "subject": subject, "programs": programs, "completions": completions, "mismatches": mismatches,
            "deviations": deviations,
        });
        println!("\nconformance: {line}");
        assert_eq!(mismatches, 0, "{mismatches} of {programs} programs disagree with the model");
        assert!(programs > 0, "MOONRING_PROGRAMS=0: nothing was compared");
    }
}

/// What is wrong with a program's outcome, if anything is.
struct Mismatch {
    why: String,
    right: Outcome,
    seen: Outcome,
}

/// Runs the model and the real thing on random programs.
fn compare_many(
    name: &str,
    subject: impl Fn(u64) -> Subject,
    check: impl Fn(&Program, Subject) -> Result<usize, Box<Mismatch>>,
) -> Tally {
    let (programs, first) = (setting("MOONRING_PROGRAMS", 2_000), setting("MOONRING_SEED", fastrand::u64(..1 << 32)));
    say(&format!("{name}: {programs} programs, MOONRING_SEED={first}"));
    let mut tally = Tally { programs, ..Tally::default() };
    for seed in (0..programs).map(|n| first.wrapping_add(n)) {
        let subject = subject(seed);
        let program = random::program(seed, subject);
        match check(&program, subject) {
            Ok(completions) => tally.completions += completions,
            Err(first) => {
                tally.mismatches += 1;
                if tally.mismatches <= SHOWN {
                    show(seed, subject, &program, *first, &check);
                }
            }
        }
    }
    tally
}

/// Prints a mismatch, made small if it happens again.
fn show(
    seed: u64,
    subject: Subject,
    program: &Program,
    first: Mismatch,
    check: &impl Fn(&Program, Subject) -> Result<usize, Box<Mismatch>>,
) {
    println!("MISMATCH, MOONRING_SEED={seed} MOONRING_PROGRAMS=1, {subject:?}: {}", first.why);
    println!("  program  {program}\n  right    {}\n  seen     {}", first.right, first.seen);
    let small = compare::shrink(program.clone(), |smaller| check(smaller, subject).is_err());
    if let Err(mismatch) = check(&small, subject) {
        println!("  smaller  {small}: {}\n  right    {}\n  seen     {}", mismatch.why, mismatch.right, mismatch.seen);
    }
}

fn check_moonring(program: &Program, engine: &Engine) -> Result<usize, Box<Mismatch>> {
    let prediction = predict(program, Rules::moonring());
    let seen = ours::run(program, engine, &prediction.outcome);
    match compare::difference(program, &prediction, &seen, true) {
        None => Ok(seen.completions()),
        Some(why) => Err(Box::new(Mismatch { why, right: prediction.outcome, seen })),
    }
}

#[test]
fn model_agrees_with_moonring() {
    let engine = Engine::loopback();
    let tally = compare_many("moonring", |_| Subject::Moonring, |program, _| check_moonring(program, &engine));
    tally.report("moonring", &Deviation::ALL);
}

/// Each of the kernel's modes in turn.
fn kernel_subject(seed: u64) -> Subject {
    Subject::Kernel(Mode::ALL[(seed % 4) as usize])
}

fn check_kernel(program: &Program, mode: Mode) -> Result<usize, Box<Mismatch>> {
    let prediction = predict(program, Rules::kernel(mode.submits_all()));
    let quiet = if prediction.parallel { QUIET_PARALLEL } else { QUIET };
    let seen = kernel::run(program, mode, &prediction.outcome, quiet).expect("the ring works");
    match compare::difference(program, &prediction, &seen, true) {
        None => Ok(seen.completions()),
        Some(why) => Err(Box::new(Mismatch { why, right: prediction.outcome, seen })),
    }
}

/// False, and loudly so, where the kernel has no io_uring for us.
fn kernel_works(test: &str) -> bool {
    let Some(error) = kernel::refusal() else { return true };
    say(&format!("SKIPPED: {test}: io_uring_setup is refused here ({error}); nothing was compared with the kernel"));
    false
}

#[test]
fn model_agrees_with_the_kernel() {
    if !kernel_works("model_agrees_with_the_kernel") {
        return;
    }
    let tally = compare_many("kernel", kernel_subject, |program, subject| match subject {
        Subject::Kernel(mode) => check_kernel(program, mode),
        Subject::Moonring => unreachable!("the kernel's programs are run"),
    });
    tally.report("kernel", &[]);
}

fn read<T: std::str::FromStr<Err = program::Unreadable>>(text: &str) -> T {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A recorded outcome in the place of the predicted one, which is returned too.
fn recorded(text: &str, prediction: Prediction) -> (Prediction, Outcome) {
    (Prediction { outcome: read(text), ..prediction }, prediction.outcome)
}

#[test]
fn the_model_knows_the_recorded_outcomes() {
    for named in NAMED {
        let program: Program = read(named.program);
        let prediction = predict(&program, Rules::kernel(true));
        let (recorded, predicted) = recorded(named.kernel, prediction);
        let difference = compare::difference(&program, &recorded, &predicted, false);
        assert_eq!(difference, None, "{}: {program}: {predicted}", named.name);
    }
}

/// The named programs that moonring can run, with its outcomes.
fn named_for_moonring() -> impl Iterator<Item = (&'static str, Program, &'static str)> {
    NAMED.iter().filter_map(|named| {
        let outcome = match named.ours {
            Ours::Same => named.kernel,
            Ours::Other(outcome) => outcome,
            Ours::Absent => return None,
        };
        Some((named.name, read(named.program), outcome))
    })
}

#[test]
fn moonring_behaves_as_recorded() {
    let engine = Engine::loopback();
    for (name, program, outcome) in named_for_moonring() {
        let (recorded, _) = recorded(outcome, predict(&program, Rules::moonring()));
        let seen = ours::run(&program, &engine, &recorded.outcome);
        let difference = compare::difference(&program, &recorded, &seen, false);
        assert_eq!(difference, None, "{name}: {program}: {seen}");
    }
}

#[test]
fn the_model_knows_where_moonring_deviates() {
    for (name, program, outcome) in named_for_moonring() {
        let (recorded, predicted) = recorded(outcome, predict(&program, Rules::moonring()));
        let difference = compare::difference(&program, &recorded, &predicted, false);
        assert_eq!(difference, None, "{name}: {program}: {predicted}");
    }
}

#[test]
fn the_kernel_still_behaves_as_recorded() {
    if !kernel_works("the_kernel_still_behaves_as_recorded") {
        return;
    }
    for named in NAMED {
        let program: Program = read(named.program);
        let (recorded, _) = recorded(named.kernel, predict(&program, Rules::kernel(true)));
        let seen = kernel::run(&program, Mode::SubmitAll, &recorded.outcome, QUIET_PARALLEL).unwrap();
        let difference = compare::difference(&program, &recorded, &seen, false);
        assert_eq!(difference, None, "{}: {program}: {seen}", named.name);
    }
}

/// The first random program whose outcome tells two sets of rules apart.
fn shown_by(subject: impl Fn(u64) -> Subject, right: impl Fn(Subject) -> Rules, wrong: impl Fn(Rules) -> Rules) -> u64 {
    let shows = |seed: &u64| {
        let subject = subject(*seed);
        let program = random::program(*seed, subject);
        let rules = right(subject);
        let seen = predict(&program, wrong(rules)).outcome;
        compare::difference(&program, &predict(&program, rules), &seen, true).is_some()
    };
    (0..2_000).find(shows).expect("2,000 programs do not show it") + 1
}

/// The random programs are able to see a wrong rule: each fault that is planted in the model shows.
#[test]
fn planted_faults_show() {
    for fault in Fault::ALL {
        let program = shown_by(kernel_subject, Subject::rules, |rules| rules.with(fault));
        println!("{fault:?}: shown by the kernel's program {program}");
        if fault != Fault::DrainAfterSkipRuns {
            let program = shown_by(|_| Subject::Moonring, Subject::rules, |rules| rules.with(fault));
            println!("{fault:?}: shown by moonring's program {program}");
        }
    }
}

/// They are able to see each deviation: a moonring without it would not pass.
#[test]
fn deviations_show() {
    for deviation in Deviation::ALL {
        let program = shown_by(|_| Subject::Moonring, Subject::rules, |rules| rules.without(deviation));
        println!("{deviation:?}: shown by program {program}");
    }
}

/// Which of two timers fires first is the clock's choice, and a late kernel's. This one's T1 fires when its LT3 does.
#[test]
fn programs_up_to_the_clock_are_known() {
    let program = read("T1(2ms,multi=2) T1(inf)/L LT3(2ms)");
    assert!(random::is_up_to_the_clock(&program, Subject::Kernel(Mode::SubmitAll)), "LT3 cancels the first T1");
    assert!(!random::is_up_to_the_clock(&program, Subject::Moonring), "LT3 cancels the second one");
    let seed = 3_621_901_349;
    let (subject, program) = (kernel_subject(seed), random::program(seed, kernel_subject(seed)));
    assert!(!random::is_up_to_the_clock(&program, subject), "MOONRING_SEED={seed}: {program}");
}

#[test]
fn programs_survive_as_text() {
    for seed in 0..2_000 {
        let program = random::program(seed, kernel_subject(seed));
        assert_eq!(read::<Program>(&program.to_string()), program);
    }
}
