//! The whole run: every check and measurement in a process of its own, and the report.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use crate::SKIPPED;
use crate::bundle::Bundle;
use crate::checks::CHECKS;
use crate::device;
use crate::programs::{self, Ended, Tests};

/// The whole run takes less than five minutes, whatever hangs.
const TOTAL: Duration = Duration::from_secs(285);
/// Of one check or test program. What is sound takes a fraction of it.
const EACH: Duration = Duration::from_secs(60);
/// Of one test of a test program. They have limits of their own, of 20 seconds.
const ONE_TEST: Duration = Duration::from_secs(25);
/// What the measurements get at the end.
const MEASUREMENTS: Duration = Duration::from_secs(90);

/// The measured numbers in the report, in its order.
const NUMBERS: [&str; 4] =
    ["overlap_ratio", "event_signal_to_issue_us", "timeline_signal_to_issue_us", "launch_slowdown"];

#[derive(Default)]
struct Report {
    checks: u64,
    failed: u64,
    skipped: Vec<String>,
}

impl Report {
    fn pass(&mut self, name: &str, took: Duration) {
        self.checks += 1;
        eprintln!("ok       {name} ({:.1} s)", took.as_secs_f64());
    }

    fn fail(&mut self, name: &str, why: &str) {
        self.checks += 1;
        self.failed += 1;
        eprintln!("FAILED   {name}: {why}");
    }

    fn skip(&mut self, name: impl Into<String>, why: &str) {
        let name = name.into();
        eprintln!("skipped  {name}: {why}");
        self.skipped.push(name);
    }
}

/// Runs everything and prints the report as the last line. Fails if a check failed.
pub fn run(fake: bool) -> Result<ExitCode> {
    let end = Instant::now() + TOTAL;
    let bundle = Bundle::find(fake)?;
    let name = name_of_device(&bundle)?;
    let mut report = Report::default();
    let left = |limit: Duration| limit.min((end - MEASUREMENTS).saturating_duration_since(Instant::now()));

    for (check, _) in CHECKS {
        one_check(&bundle, check, left(EACH), &mut report)?;
    }
    let programs = bundle.test_programs()?;
    if programs.is_empty() {
        report.skip("test_programs", "there are none beside this program");
    }
    for program in programs {
        test_program(&bundle, &program, end - MEASUREMENTS, &mut report)?;
    }
    let numbers = measurements(&bundle, end.saturating_duration_since(Instant::now()), &mut report)?;
    for number in NUMBERS {
        if bundle.is_real() && numbers[number].is_null() {
            report.skip(number, "it could not be measured");
        }
    }

    let mut line = json!({
        "device": name,
        "checks": report.checks,
        "failed": report.failed,
        "skipped": report.skipped,
    });
    for number in NUMBERS {
        // On the fake driver times say nothing.
        line[number] = if bundle.is_real() { numbers[number].clone() } else { Value::Null };
    }
    println!("{line}");
    Ok(if report.failed == 0 && report.checks > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn name_of_device(bundle: &Bundle) -> Result<String> {
    let described = programs::run(&mut bundle.again(&["--describe"])?, EACH)?;
    if let (Some(status), [name, more]) = (described.status, &described.stdout[..])
        && status.success()
    {
        eprintln!("{name}: {more}");
        return Ok(if bundle.is_real() { name.clone() } else { "fake".into() });
    }
    anyhow::bail!("the driver cannot be used:\n{}", described.stderr.join("\n"))
}

fn one_check(bundle: &Bundle, name: &str, limit: Duration, report: &mut Report) -> Result<()> {
    if limit.is_zero() {
        report.skip(name, "no time is left");
        return Ok(());
    }
    let started = Instant::now();
    let ended = programs::run(&mut bundle.again(&["--check", name])?, limit)?;
    let said = ended.stderr.join("\n");
    match ended.status {
        Some(status) if status.success() => report.pass(name, started.elapsed()),
        Some(status) if status.code() == Some(SKIPPED.into()) => report.skip(name, &said),
        Some(status) => report.fail(name, &format!("{status}\n{said}")),
        None => report.fail(name, &format!("it was stopped after {limit:?}\n{said}")),
    }
    Ok(())
}

/// Runs a test program: whole on the fake driver; on a real one each test in a process of its own, so that none meets
/// what another has left, a fault or streams that share a queue.
fn test_program(bundle: &Bundle, program: &Path, end: Instant, report: &mut Report) -> Result<()> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let listed = programs::run(bundle.command(program).args(["--list", "--format=terse"]), EACH)?;
    let tests: Vec<&str> = listed.stdout.iter().filter_map(|line| line.strip_suffix(": test")).collect();
    if tests.is_empty() {
        report.fail(&name, "it lists no tests");
        return Ok(());
    }
    let runs: Vec<&[&str]> = if bundle.is_real() { tests.chunks(1).collect() } else { vec![&tests] };
    for tests in runs {
        let shown = if let [test] = tests { format!("{name}: {test}") } else { name.clone() };
        let most = if bundle.is_real() { ONE_TEST } else { EACH };
        let limit = most.min(end.saturating_duration_since(Instant::now()));
        if limit.is_zero() {
            report.skip(shown, "no time is left");
            continue;
        }
        let mut command = bundle.command(program);
        command.args(["--test-threads=1", "--show-output", "--color=never"]);
        if bundle.is_real() {
            command.arg("--exact").args(tests);
        }
        let started = Instant::now();
        let ended = programs::run(&mut command, limit)?;
        result_of_tests(&shown, tests.len(), &ended, started.elapsed(), report);
    }
    Ok(())
}

fn result_of_tests(name: &str, expected: usize, ended: &Ended, took: Duration, report: &mut Report) {
    let tests = Tests::read(&ended.stdout);
    // A test that leaves something out is not counted, though it may have checked the rest.
    report.checks += tests.passed.saturating_sub(tests.skipped.len() as u64);
    for test in &tests.failed {
        report.fail(&format!("{name}: {test}"), "see below");
    }
    for part in &tests.skipped {
        report.skip(format!("{name}: {part}"), "the program says so");
    }
    for fact in &tests.facts {
        eprintln!("fact     {fact}");
    }
    let why = match ended.status {
        Some(status) if status.success() && tests.passed > 0 && tests.failed.is_empty() => {
            if tests.skipped.len() < expected {
                eprintln!("ok       {name}: {} of {expected} tests ({:.1} s)", tests.passed, took.as_secs_f64());
            }
            return;
        }
        Some(status) => format!("it ended with {status} after {} of {expected} tests", tests.passed),
        None => format!("it was stopped after {took:?} and {} of {expected} tests", tests.passed),
    };
    if tests.failed.is_empty() {
        // It died or hung: that is a failure of its own.
        report.fail(name, &why);
    }
    // What the harness says of failures comes last; a program that died says nothing of the kind.
    let told = ended.stdout.iter().position(|line| line == "failures:").unwrap_or(0);
    eprintln!("{}\n{}", ended.stdout[told..].join("\n"), ended.stderr.join("\n"));
}

/// The numbers; what could not be measured is missing.
fn measurements(bundle: &Bundle, limit: Duration, report: &mut Report) -> Result<Value> {
    let name = "measurements";
    let started = Instant::now();
    let ended = programs::run(&mut bundle.again(&["--measure"])?, limit)?;
    for line in &ended.stderr {
        eprintln!("         {line}");
    }
    let numbers = ended.stdout.last().and_then(|line| serde_json::from_str::<Value>(line).ok());
    match (ended.status, numbers) {
        (Some(status), Some(numbers)) if status.success() => {
            report.pass(name, started.elapsed());
            Ok(numbers)
        }
        (Some(status), _) => {
            report.fail(name, &status.to_string());
            Ok(Value::Null)
        }
        (None, _) => {
            report.fail(name, &format!("they were stopped after {limit:?}"));
            Ok(Value::Null)
        }
    }
}

/// What [`name_of_device`] reads, printed by a process of its own.
pub fn describe() -> Result<ExitCode> {
    let (name, more) = device::describe()?;
    println!("{name}\n{more}");
    Ok(ExitCode::SUCCESS)
}
