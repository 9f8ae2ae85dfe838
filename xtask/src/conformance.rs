//! `cargo xtask conformance`: the executable model of io_uring's rules against moonring and against the kernel.

use std::io::{self, Write};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::command;

/// Runs both comparisons on `programs` random programs and prints what came of them as one JSON object.
///
/// Fails on a mismatch, and when moonring was not compared at all.
pub fn conformance(programs: u64, seed: u64) -> Result<ExitCode> {
    let mut test = test_program(programs, seed);
    eprintln!("running `{}`", command::shown(&test));
    let output = test
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not start `{}`", command::shown(&test)))?;
    io::stderr().write_all(&output.stdout)?;
    let report = report(&String::from_utf8_lossy(&output.stdout));
    println!("{report}");
    let good = output.status.success() && report["programs"].is_u64();
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn test_program(programs: u64, seed: u64) -> Command {
    let mut cargo = command::cargo();
    cargo
        .args(["test", "--release", "--package", "moonring", "--test", "conformance", "--"])
        .args(["model_agrees_with", "--nocapture", "--test-threads=1"])
        .env("MOONRING_PROGRAMS", programs.to_string())
        .env("MOONRING_SEED", seed.to_string());
    cargo
}

/// Puts together what the tests say. What was not compared is null.
fn report(output: &str) -> Value {
    let tallies: Vec<Value> =
        output.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("conformance: ")?).ok()).collect();
    let of = |subject: &str, key: &str| {
        tallies.iter().find(|tally| tally["subject"] == subject).map_or(Value::Null, |tally| tally[key].clone())
    };
    json!({
        "programs": of("moonring", "programs"),
        "completions": of("moonring", "completions"),
        "mismatches": of("moonring", "mismatches"),
        "kernel_programs": of("kernel", "programs"),
        "kernel_mismatches": of("kernel", "mismatches"),
        "deviations": of("moonring", "deviations"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOONRING: &str =
        r#"conformance: {"subject":"moonring","programs":5,"completions":40,"mismatches":1,"deviations":["A","B"]}"#;
    const KERNEL: &str =
        r#"conformance: {"subject":"kernel","programs":6,"completions":50,"mismatches":0,"deviations":[]}"#;

    #[test]
    fn both_comparisons_are_reported() {
        let report = report(&format!("running 2 tests\ntest a ... 5 programs\n{MOONRING}\nok\n{KERNEL}\nok\n"));
        let right = json!({
            "programs": 5, "completions": 40, "mismatches": 1, "kernel_programs": 6, "kernel_mismatches": 0,
            "deviations": ["A", "B"],
        });
        assert_eq!(report, right);
    }

    #[test]
    fn what_was_not_compared_is_null() {
        let without_kernel = report(MOONRING);
        assert_eq!((&without_kernel["mismatches"], &without_kernel["kernel_mismatches"]), (&json!(1), &Value::Null));
        assert!(report("error: could not compile").as_object().unwrap().values().all(Value::is_null));
    }
}
