//! Short runs, as a user starts them.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use serde_json::Value;

fn soak(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moonring-soak"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn report(output: &Output) -> Value {
    let stdout = String::from_utf8_lossy(&output.stdout);
    let last = stdout.lines().last().unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    serde_json::from_str(last).unwrap_or_else(|error| panic!("{error} in {last}"))
}

/// The processes that a process has started, and those that these have.
fn children(of: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok());
    let direct: Vec<u32> =
        lists.flat_map(|list| list.split_whitespace().map(str::parse).collect::<Vec<_>>()).flatten().collect();
    direct.iter().flat_map(|&child| [vec![child], children(child)].concat()).collect()
}

fn is_there(process: u32) -> bool {
    Path::new(&format!("/proc/{process}")).exists()
}

/// It is a program of its own, and no copy of the run's any more that was told nothing yet.
fn has_begun(process: u32) -> bool {
    let line = fs::read_to_string(format!("/proc/{process}/cmdline"));
    line.is_ok_and(|line| !line.is_empty() && !line.contains("--minutes"))
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn some_seconds_of_faults_show_no_anomaly() {
    let output = soak(&["run", "--minutes", "0.15", "--seed", "1"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let report = report(&output);
    assert!(output.status.success(), "{report}\n{stderr}");
    assert!(stderr.contains("seed 1\n"), "{stderr}");
    let number = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{key} in {report}"));
    assert_eq!((number("anomalies"), number("seed")), (0, 1));
    assert!(number("operations") > 100 && number("verified") > 100, "{report}");
    assert!(report["faults_by_kind"].as_object().unwrap().len() >= 5, "{report}");
    assert!(number("faults") > 10 && number("rss_end_bytes") > 1 << 20, "{report}");
    // It did not run for a minute.
    assert_eq!(report["rss_start_bytes"], Value::Null);
}

/// The control: with Mooncake's old protocol a Write completes before the peer has the bytes, or has rejected them.
#[test]
#[ignore = "needs cargo xtask setup"]
fn writes_that_complete_too_early_are_anomalies() {
    let output = soak(&["run", "--minutes", "0.1", "--seed", "1"]).env("MC_TCP_PROTO", "1").output().unwrap();
    let report = report(&output);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report["anomalies"].as_u64() > Some(0), "{report}");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn peers_end_with_the_run_even_stopped_ones() {
    struct Killed(Child);
    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let mut run = Killed(soak(&["run", "--minutes", "5"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let end = Instant::now() + Duration::from_secs(60);
    let mut peers = Vec::new();
    // The metadata server and all peers.
    while peers.len() < 5 || !peers.iter().all(|&peer| has_begun(peer)) {
        assert!(Instant::now() < end, "only {peers:?} are started");
        thread::sleep(Duration::from_millis(50));
        peers = children(run.0.id());
    }
    let stopped = Command::new("kill").args(["-STOP", &peers[4].to_string()]).status().unwrap();
    assert!(stopped.success());
    run.0.kill().unwrap();
    run.0.wait().unwrap();
    while let Some(left) = peers.iter().find(|&&peer| is_there(peer)) {
        assert!(Instant::now() < end, "{left} is left of {peers:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_length_that_is_none_is_an_error() {
    for minutes in ["-1", "nan", "1e300", "inf"] {
        let output = soak(&["run", &format!("--minutes={minutes}")]).output().unwrap();
        assert!(!output.status.success());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("--minutes"), "{stderr}");
    }
}
