//! The whole run: every check and measurement in a process of its own, and the report.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use crate::SKIPPED;
use crate::bundle::{Bundle, PARTS};
use crate::checks::CHECKS;
use crate::measure::MEASUREMENTS;
use crate::programs::{self, Ended, Tests};

/// The whole run takes less than five minutes, whatever hangs.
const TOTAL: Duration = Duration::from_secs(280);
/// Of one check or test program. What is sound takes a fraction of it.
const EACH: Duration = Duration::from_secs(60);
/// Of one test of a test program, and of one measurement. The tests have limits of their own, of 20 seconds.
const ONE: Duration = Duration::from_secs(25);
/// What is kept for the measurements while checks run.
const KEPT: Duration = Duration::from_secs(60);
/// Tests that run on a real device at the same time. Most of a test's time goes into the making of its context.
const AT_ONCE: usize = 4;

/// The program that asks what the table of the stand-in driver says: on a real device another answer is a fact.
const TABLE: &str = "driver";

#[derive(Default)]
struct Report {
    device: Option<String>,
    checks: u64,
    failures: Vec<String>,
    skipped: Vec<String>,
    facts: Vec<String>,
    numbers: Map<String, Value>,
}

/// How one check or measurement ended.
enum Outcome {
    /// With what it printed.
    Passed(Vec<String>),
    Skipped(String),
    Failed(String),
}

impl Report {
    fn pass(&mut self, name: &str, took: Duration) {
        self.checks += 1;
        eprintln!("ok       {name} ({:.1} s)", took.as_secs_f64());
    }

    fn fail(&mut self, name: &str, why: &str) {
        self.checks += 1;
        eprintln!("FAILED   {name}: {why}");
        self.failures.push(name.to_owned());
    }

    fn skip(&mut self, name: impl Into<String>, why: &str) {
        let name = name.into();
        eprintln!("skipped  {name}: {why}");
        self.skipped.push(name);
    }

    /// Something about a real device; the fake has what the table says.
    fn fact(&mut self, fact: impl Into<String>) {
        let fact = fact.into();
        if self.device.as_deref() != Some("fake") && !self.facts.contains(&fact) {
            eprintln!("fact     {fact}");
            self.facts.push(fact);
        }
    }

    fn line(&self) -> Value {
        let mut line = json!({
            "device": self.device,
            "checks": self.checks,
            "failed": self.failures.len(),
            "failures": self.failures,
            "skipped": self.skipped,
            "facts": self.facts,
        });
        for (name, _) in MEASUREMENTS {
            line[*name] = self.numbers.get(*name).cloned().unwrap_or_default();
        }
        line
    }
}

/// Runs everything and prints the report as the last line, whatever happens. Fails if a check failed.
pub fn run(fake: bool) -> ExitCode {
    let mut report = Report::default();
    if let Err(error) = everything(fake, &mut report) {
        report.fail("run", &format!("{error:#}"));
    }
    println!("{}", report.line());
    if report.failures.is_empty() && report.checks > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn everything(fake: bool, report: &mut Report) -> Result<()> {
    let end = Instant::now() + TOTAL;
    let left = |limit: Duration, kept: Duration| limit.min((end - kept).saturating_duration_since(Instant::now()));
    let mut bundle = driver(fake, report)?;
    engine(&mut bundle)?;
    // A device that nobody uses is shut down, and takes its time to come up again.
    let mut keeper = bundle.is_real().then(|| programs::beside(&mut bundle.again(&["--keep"])?)).transpose()?;

    for (check, _) in CHECKS {
        let started = Instant::now();
        match outcome(bundle.again(&["--check", check])?, left(EACH, KEPT)) {
            Outcome::Passed(_) => report.pass(check, started.elapsed()),
            Outcome::Skipped(why) => report.skip(*check, &why),
            Outcome::Failed(why) => report.fail(check, &why),
        }
    }
    for (name, _) in MEASUREMENTS {
        let started = Instant::now();
        match outcome(bundle.again(&["--measure", name])?, left(ONE, Duration::ZERO)) {
            Outcome::Passed(printed) => match printed.last().and_then(|line| line.parse::<f64>().ok()) {
                Some(number) => {
                    report.pass(name, started.elapsed());
                    // On the fake driver times say nothing.
                    if bundle.is_real() {
                        report.numbers.insert((*name).to_owned(), json!(number));
                    }
                }
                None => report.fail(name, &format!("it printed {printed:?}")),
            },
            Outcome::Skipped(why) => report.skip(*name, &why),
            Outcome::Failed(why) => report.fail(name, &why),
        }
    }
    let test_programs = bundle.test_programs()?;
    if test_programs.is_empty() {
        report.skip("test_programs", "there are none beside this program");
    }
    for program in test_programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Err(error) = test_program(&bundle, &program, &name, end, report) {
            report.fail(&name, &format!("{error:#}"));
        }
    }
    if let Some(keeper) = &mut keeper {
        let _ = programs::stop(keeper);
    }
    Ok(())
}

/// Finds out which driver the run is about, each asked by a process of its own: one that hangs must not hang this.
fn driver(fake: bool, report: &mut Report) -> Result<Bundle> {
    for real in [true, false].into_iter().skip(usize::from(fake)) {
        let bundle = Bundle::with(real)?;
        match (outcome(bundle.again(&["--describe"])?, EACH), real) {
            (Outcome::Passed(said), _) => {
                eprintln!("{}", said.join(": "));
                report.device = Some(if real { said.first().cloned().unwrap_or_default() } else { "fake".into() });
                return Ok(bundle);
            }
            (Outcome::Skipped(why), true) => eprintln!("{why}: the fake driver is used"),
            (Outcome::Failed(why), true) => report.skip("the driver of this machine", &why),
            (Outcome::Skipped(why) | Outcome::Failed(why), false) => bail!("the fake driver cannot be used: {why}"),
        }
    }
    unreachable!("the fake driver is used or an error")
}

/// Sees to it that the engine loads: with the system's libraries, or with those of the bundle.
fn engine(bundle: &mut Bundle) -> Result<()> {
    let Outcome::Failed(why) = outcome(bundle.again(&["--engine"])?, EACH) else { return Ok(()) };
    if bundle.use_own_libraries() {
        eprintln!("the engine gets the bundle's system libraries, as it does not load with this system's: {why}");
    }
    Ok(())
}

/// Runs this program for one thing.
fn outcome(mut command: Command, limit: Duration) -> Outcome {
    if limit.is_zero() {
        return Outcome::Skipped("no time is left".into());
    }
    let ended = match programs::run(&mut command, limit) {
        Ok(ended) => ended,
        Err(error) => return Outcome::Failed(format!("{error:#}")),
    };
    let said = ended.stderr.join("\n");
    match ended.status {
        Some(status) if status.success() => {
            ended.stderr.iter().for_each(|line| eprintln!("         {line}"));
            Outcome::Passed(ended.stdout)
        }
        Some(status) if status.code() == Some(SKIPPED.into()) => Outcome::Skipped(said),
        Some(status) => Outcome::Failed(format!("{status}\n{said}")),
        None => Outcome::Failed(format!("it was stopped after {limit:?}\n{said}")),
    }
}

/// Runs a test program: whole on the fake driver; on a real one each test in a process of its own, so that none meets
/// what another has left, a fault or streams that share a queue.
fn test_program(bundle: &Bundle, program: &Path, name: &str, end: Instant, report: &mut Report) -> Result<()> {
    let left = || end.saturating_duration_since(Instant::now());
    if left().is_zero() {
        report.skip(name, "no time is left");
        return Ok(());
    }
    let part = PARTS.iter().find(|(of, _)| *of == name).map_or(&[][..], |(_, part)| *part);
    let mut list = bundle.command(program);
    let listed = programs::run(list.args(["--list", "--format=terse"]).args(part), EACH.min(left()))?;
    let tests: Vec<&str> = listed.stdout.iter().filter_map(|line| line.strip_suffix(": test")).collect();
    ensure!(!tests.is_empty(), "it lists no tests: {}", listed.stderr.join("\n"));
    if !bundle.is_real() {
        let ended = run_tests(bundle, program, part, EACH.min(left()))?;
        result_of_tests(name, tests.len(), ended, false, report);
        return Ok(());
    }
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            let (sender, tests, next, left) = (sender.clone(), &tests, &next, &left);
            scope.spawn(move || {
                while let Some(test) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let limit = ONE.min(left());
                    let ran = (!limit.is_zero()).then(|| run_tests(bundle, program, &["--exact", test], limit));
                    let _ = sender.send((*test, ran));
                }
            });
        }
        drop(sender);
        for (test, ran) in results {
            let shown = format!("{name}: {test}");
            match ran {
                None => report.skip(shown, "no time is left"),
                Some(Err(error)) => report.fail(&shown, &format!("{error:#}")),
                Some(Ok(ended)) => result_of_tests(&shown, 1, ended, name == TABLE, report),
            }
        }
    });
    Ok(())
}

fn run_tests(bundle: &Bundle, program: &Path, which: &[&str], limit: Duration) -> Result<(Ended, Duration)> {
    let started = Instant::now();
    let mut command = bundle.command(program);
    command.args(["--test-threads=1", "--show-output", "--color=never"]).args(which);
    let ended = programs::run(&mut command, limit).context("the tests could not be started")?;
    Ok((ended, started.elapsed()))
}

/// Reports what a test program, or one test of it, has said. With `table`, what fails is no failure but a fact about the
/// device: it is not what the stand-in driver's table says.
fn result_of_tests(name: &str, expected: usize, (ended, took): (Ended, Duration), table: bool, report: &mut Report) {
    let tests = Tests::read(&ended.stdout);
    // A test that leaves something out is not counted, though it may have checked the rest.
    report.checks += tests.passed.saturating_sub(tests.skipped.len() as u64);
    for part in &tests.skipped {
        report.skip(format!("{name}: {part}"), "the program says so");
    }
    for fact in &tests.facts {
        report.fact(fact);
    }
    let mut differs = |what: &str, why: &str| {
        if table {
            report.checks += 1;
            report.fact(format!("{what}: this device is not as the table says: {why}"));
        } else {
            report.fail(what, why);
        }
    };
    for (test, why) in &tests.failed {
        differs(&if expected == 1 { name.to_owned() } else { format!("{name}: {test}") }, why);
    }
    let why = match ended.status {
        Some(status) if status.success() && tests.passed > 0 && tests.failed.is_empty() => {
            if tests.skipped.len() < expected {
                eprintln!("ok       {name}: {} of {expected} tests ({:.1} s)", tests.passed, took.as_secs_f64());
            }
            return;
        }
        Some(status) => format!("it ended with {status} after {} of {expected} tests", tests.passed),
        None => format!("it was stopped after {took:.0?} and {} of {expected} tests", tests.passed),
    };
    if tests.failed.is_empty() {
        // It died or hung: that is a failure of its own.
        differs(name, &why);
    }
    // What the harness says of failures comes last; a program that died says nothing of the kind.
    let told = ended.stdout.iter().position(|line| line == "failures:").unwrap_or(0);
    eprintln!("{}\n{}", ended.stdout[told..].join("\n"), ended.stderr.join("\n"));
}
