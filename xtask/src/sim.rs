//! `cargo xtask sim`: the deterministic simulation of the core, on many seeds and at scale.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use crate::command;

/// What the simulation begins the lines with that are for us.
const MARK: &str = "simulation: ";

/// Runs `seeds` seeds from `seed` on and prints what came of them as one JSON object.
///
/// Fails on a violation, and when nothing was run. One seed alone is shown step by step.
pub fn sim(seeds: u64, seed: Option<u64>) -> Result<ExitCode> {
    let mut test = test_program("simulation::every_promise_is_kept");
    test.env("MOONRING_SEEDS", seeds.to_string());
    if let Some(seed) = seed {
        test.env("MOONRING_SEED", seed.to_string());
    }
    report(test, &["seeds", "steps", "faults", "merged", "futures", "store", "violations"], |report| {
        report["violations"] == 0
    })
}

/// Runs 1,000 peers and 1,000,000 entries through one core in virtual time.
pub fn scale() -> Result<ExitCode> {
    let test = test_program("simulation::scale::a_thousand_peers_share_one_core");
    let keys = [
        "peers",
        "entries",
        "sim_1000_peers_mops",
        "sim_1000_peers_worst_share",
        "mean_wait_us",
        "turns",
        "refused",
        "virtual_seconds",
        "wall_seconds",
        "pollers_for_10_mops",
        "pollers_for_100_mops",
    ];
    report(test, &keys, |report| report["entries"].is_u64())
}

fn test_program(test: &str) -> Command {
    let mut cargo = command::cargo();
    cargo.args(["test", "--release", "--package", "moonring", "--lib", "--"]);
    cargo.args([test, "--exact", "--nocapture", "--test-threads=1"]).env("RUST_BACKTRACE", "0");
    cargo
}

/// Runs a simulation, whose words are progress, and prints its report as the last line: what it did not say is null.
fn report(mut test: Command, keys: &[&str], is_good: impl Fn(&Value) -> bool) -> Result<ExitCode> {
    eprintln!("running `{}`", command::shown(&test));
    let mut child = test
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("could not start `{}`", command::shown(&test)))?;
    let mut said = None;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line?;
            writeln!(io::stderr(), "{line}")?;
            said = parse(&line).or(said);
        }
    }
    let status = child.wait()?;
    let said = said.unwrap_or(Value::Null);
    let report: Map<_, _> = keys.iter().map(|&key| (key.to_owned(), said[key].clone())).collect();
    let report = Value::Object(report);
    println!("{report}");
    Ok(if status.success() && is_good(&report) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn parse(line: &str) -> Option<Value> {
    serde_json::from_str(line.strip_prefix(MARK)?).ok().filter(Value::is_object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_told_from_progress() {
        assert_eq!(parse(r#"simulation: {"seeds":3}"#).unwrap()["seeds"], 3);
        for line in ["simulation: 3 seeds, MOONRING_SEED=1", "running 1 test", "", r#"{"seeds":3}"#] {
            assert_eq!(parse(line), None, "{line}");
        }
    }
}
