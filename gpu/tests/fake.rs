//! The whole run on the fake driver.

use std::process::Command;

use serde_json::{Value, json};

fn run(arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_moonring-gpu")).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// The checks hold, and times on a driver that is none are not reported.
#[test]
#[ignore = "needs cargo xtask setup"]
fn all_checks_hold_and_the_last_line_is_the_report() {
    let (success, stdout, stderr) = run(&["--fake"]);
    assert!(success, "{stdout}\n{stderr}");
    let report: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    let expected = json!({
        "device": "fake",
        "checks": 17,
        "failed": 0,
        "failures": [],
        "facts": [],
        "skipped": ["test_programs"],
        "overlap_ratio": null,
        "event_signal_to_issue_us": null,
        "timeline_signal_to_issue_us": null,
        "launch_slowdown": null,
    });
    assert_eq!(report, expected, "{stderr}");
}

#[test]
fn a_check_that_fails_says_why() {
    let (success, _, stderr) = run(&["--check", "no_such_check"]);
    assert!(!success);
    assert!(stderr.contains("no_such_check"), "{stderr}");
}
