//! The ring demo, as a user runs it.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use serde_json::Value;

#[cfg(feature = "cuda")]
#[path = "common/driver_by_name.rs"]
mod driver_by_name;

/// The demo with arguments. `cargo test` builds it, `cargo test --test demo` does not.
fn program(args: &[&str]) -> Command {
    let test = env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/ring_demo");
    assert!(program.exists(), "no {}; run `cargo build --example ring_demo`", program.display());
    let mut command = Command::new(program);
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn start(args: &[&str]) -> Child {
    program(args).spawn().unwrap()
}

fn demo(args: &[&str]) -> Output {
    start(args).wait_with_output().unwrap()
}

/// Runs the demo for `STEPS` steps of `PAGES` pages and checks what it says.
fn run_and_check(transport: &str) {
    const STEPS: u64 = 40;
    const PAGES: u64 = 8;
    const PAGE_SIZE: u64 = 16384;
    let (steps, pages, page_size) = (STEPS.to_string(), PAGES.to_string(), PAGE_SIZE.to_string());
    let output = demo(&[
        "--json",
        "--transport",
        transport,
        "--steps",
        &steps,
        "--pages-per-step",
        &pages,
        "--page-size",
        &page_size,
    ]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
    let last = stdout.lines().last().expect("the demo prints a line");
    let results: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error} in {last}"));

    let integer = |key: &str| results[key].as_u64().unwrap_or_else(|| panic!("{key} in {last}"));
    assert_eq!(results["transport"], transport);
    assert_eq!(integer("steps"), STEPS);
    assert_eq!(integer("pages"), STEPS * PAGES);
    assert_eq!(integer("bytes"), STEPS * PAGES * PAGE_SIZE);
    assert_eq!(integer("verified"), STEPS * PAGES);
    assert_eq!(integer("corrupted_with_fences"), 0);
    assert!((1..=STEPS * PAGES).contains(&integer("corrupted_without_fences")), "{last}");
    assert!(results["gigabytes_per_second"].as_f64().is_some_and(|speed| speed > 0.0), "{last}");
    for times in ["gate_us", "wire_us", "total_us"] {
        let [p50, p99, max] = ["p50", "p99", "max"].map(|key| results[times][key].as_f64().expect(last));
        assert!(0.0 <= p50 && p50 <= p99 && p99 <= max, "{times} in {last}");
    }
    // A load waits at the gate for the kernel that is in front of its step's copies, and is on the wire after that.
    let median = |times: &str| results[times]["p50"].as_f64().unwrap();
    assert!(median("gate_us") > 0.0, "{last}");
    assert!(median("total_us") >= median("gate_us"), "{last}");
}

#[test]
fn loopback() {
    run_and_check("loopback");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn mooncake() {
    run_and_check("mooncake-tcp");
}

/// A demo that is under way on a real Mooncake, for more steps than it will be let do.
struct Running {
    demo: Child,
    stderr: BufReader<ChildStderr>,
    prefill: u32,
}

impl Running {
    fn start() -> Running {
        let mut demo = start(&["--json", "--steps", "1000000"]);
        let mut stderr = BufReader::new(demo.stderr.take().unwrap());
        let mut said = String::new();
        let prefill = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "the demo ended: {said}");
            if let Some(rest) = line.strip_prefix("the prefill side is process ") {
                break rest.split(' ').next().unwrap().parse().unwrap();
            }
            said += &line;
        };
        // Let transfers run.
        thread::sleep(Duration::from_millis(300));
        Running { demo, stderr, prefill }
    }

    fn rest_of_stderr(&mut self) -> String {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).unwrap();
        rest
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that failed leaves nothing running.
        let _ = self.demo.kill();
        let _ = self.demo.wait();
    }
}

fn signal(process: u32, signal: i32) {
    // SAFETY: `kill` takes numbers only.
    assert_eq!(unsafe { libc::kill(process as i32, signal) }, 0);
}

/// False for a process that has ended, whether or not anybody has asked for its status: such a one has no command line.
fn runs(process: u32) -> bool {
    fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_killed_prefill_side_ends_the_demo_with_an_error() {
    let mut running = Running::start();
    signal(running.prefill, libc::SIGKILL);
    let stderr = running.rest_of_stderr();
    assert_eq!(running.demo.wait().unwrap().code(), Some(1), "{stderr}");
    assert!(stderr.contains("the load of page"), "{stderr}");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn the_prefill_side_ends_with_the_demo() {
    for stop in [libc::SIGINT, libc::SIGKILL] {
        let mut running = Running::start();
        assert!(runs(running.prefill));
        signal(running.demo.id(), stop);
        assert!(!running.demo.wait().unwrap().success());
        let end = Instant::now() + Duration::from_secs(30);
        while runs(running.prefill) {
            assert!(Instant::now() < end, "process {} outlives its demo", running.prefill);
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn bad_arguments_are_named() {
    for (args, value) in [
        (["--steps", "0"], "'0'"),
        (["--page-size", "65537"], "'65537'"),
        (["--pages-per-step", "many"], "'many'"),
        (["--depth", "1000"], "'1000'"),
        (["--transport", "pigeon"], "'pigeon'"),
    ] {
        let output = demo(&args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(stderr.contains(value) && stderr.contains(args[0]), "{args:?}: {stderr}");
    }
}

#[test]
fn impossible_sizes_are_named() {
    let output = demo(&["--transport=loopback", "--depth=64", "--pages-per-step=4096", "--page-size=1073741824"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("524288 pages of 1073741824 bytes"), "{stderr}");
}

/// With a CUDA stream in place of the thread.
#[cfg(feature = "cuda")]
#[test]
fn the_copies_run_on_a_cuda_stream_where_there_is_one() {
    let args = ["--json", "--transport", "loopback", "--steps", "30", "--pages-per-step", "4", "--page-size", "16384"];
    let output = driver_by_name::run_with_driver(&mut program(&[&args[..], &["--stream", "cuda"]].concat()));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("a CUDA stream"), "{stderr}");
    let stdout = String::from_utf8(output.stdout).unwrap();
    let results: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&results["verified"], &results["corrupted_with_fences"]), (&Value::from(120), &Value::from(0)));
    assert!(results["corrupted_without_fences"].as_u64().is_some_and(|pages| pages > 0));
}
