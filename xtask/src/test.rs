//! `cargo xtask test`: every test of the workspace, and their totals.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::AddAssign;
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::{command, loom, setup};

/// Sets up what the tests need, runs every step, and prints the totals as the last line.
///
/// Fails when a step fails, when a test failed or was ignored, and when none ran.
pub fn test(args: &[OsString]) -> Result<ExitCode> {
    setup::setup()?;
    let mut totals = Totals::default();
    for step in &mut steps(args) {
        eprintln!("running `{}`", command::shown(step));
        totals += run(step, &mut io::stdout())?;
    }
    if totals.ignored > 0 {
        eprintln!("error: ignored tests were not run, though they were asked for");
    }
    if totals.passed + totals.failed == 0 {
        eprintln!("error: no test ran");
    }
    println!("{totals}");
    Ok(if totals.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is run, in this order. Each step is a cargo command whose test programs print libtest's results.
fn steps(args: &[OsString]) -> Vec<Command> {
    // The workspace's own tests and the documentation's examples, those that need set-up among them.
    let mut everything = command::cargo();
    everything.args(["test", "--workspace", "--all-features", "--no-fail-fast", "--", "--include-ignored"]).args(args);
    if args.is_empty() {
        vec![everything, loom::all()]
    } else {
        // The arguments select tests or are for them.
        vec![everything]
    }
}

/// Runs one step, passes its output on to `out` line by line, and counts.
fn run(step: &mut Command, out: &mut impl Write) -> Result<Totals> {
    let (mut totals, status) = count(step, out)?;
    if !status.success() {
        eprintln!("error: `{}` ended with {status}", command::shown(step));
        // What does not compile, or dies, prints no result: it is a failure all the same.
        totals.failed = totals.failed.max(1);
    }
    Ok(totals)
}

/// Runs a command whose test programs print libtest's results, passes its output on to `out` line by line, and counts.
pub fn count(step: &mut Command, out: &mut impl Write) -> Result<(Totals, ExitStatus)> {
    let mut child =
        step.stdout(Stdio::piped()).spawn().with_context(|| format!("could not start `{}`", command::shown(step)))?;
    let mut totals = Totals::default();
    if let Some(stdout) = child.stdout.take() {
        let mut lines = BufReader::new(stdout);
        let mut line = Vec::new();
        // A test may print anything, so lines are bytes.
        while lines.read_until(b'\n', &mut line)? > 0 {
            out.write_all(&line)?;
            if let Some(result) = parse(&String::from_utf8_lossy(&line)) {
                totals += result;
            }
            line.clear();
        }
    }
    Ok((totals, child.wait()?))
}

/// How many tests ended in which way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    pub passed: u64,
    pub failed: u64,
    pub ignored: u64,
}

impl Totals {
    fn is_good(self) -> bool {
        self.passed > 0 && self.failed == 0 && self.ignored == 0
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} ignored", self.passed, self.failed, self.ignored)
    }
}

/// Reads the line with which one test program ends: `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
fn parse(line: &str) -> Option<Totals> {
    let (_verdict, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut totals = Totals::default();
    for count in counts.split("; ") {
        let (number, what) = count.trim().split_once(' ')?;
        let field = match what {
            "passed" => &mut totals.passed,
            "failed" => &mut totals.failed,
            "ignored" => &mut totals.ignored,
            // "0 measured", "0 filtered out", "finished in 0.00s"
            _ => continue,
        };
        *field = number.parse().ok()?;
    }
    Some(totals)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_results_of_test_programs() {
        let line = "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.00s\n";
        assert_eq!(parse(line), Some(Totals { passed: 3, failed: 0, ignored: 1 }));
        let line = "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.25s";
        assert_eq!(parse(line), Some(Totals { passed: 10, failed: 2, ignored: 0 }));
    }

    #[test]
    fn other_lines_are_no_results() {
        for line in [
            "running 3 tests",
            "test tests::a ... ok",
            "test result: ok",
            "test result: ok. many passed; 0 failed",
            "  test result: ok. 3 passed; 0 failed; 0 ignored",
            "all doctests ran in 0.30s; merged doctests compilation took 0.20s",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[test]
    fn sums_and_judges() {
        let mut totals = Totals::default();
        assert!(!totals.is_good(), "nothing ran");
        totals += Totals { passed: 2, failed: 0, ignored: 0 };
        totals += Totals { passed: 3, failed: 0, ignored: 0 };
        assert!(totals.is_good());
        assert_eq!(totals.to_string(), "5 passed, 0 failed, 0 ignored");
        for bad in [Totals { ignored: 1, ..totals }, Totals { failed: 1, ..totals }] {
            assert!(!bad.is_good());
        }
    }

    #[test]
    fn a_step_is_counted_and_its_failure_noticed() {
        let script = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured'; printf '\\377\\n'; \
                      echo 'test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured'";
        let totals = Totals { passed: 3, failed: 0, ignored: 0 };
        let mut shown = Vec::new();
        let mut shell = |script| run(Command::new("sh").args(["-c", script]), &mut shown).unwrap();
        assert_eq!(shell(script), totals);
        let died = format!("{script}; kill -ABRT $$");
        assert_eq!(shell(&died), Totals { failed: 1, ..totals });
        assert_eq!(shown.iter().filter(|byte| **byte == 0o377).count(), 2);
    }
}
