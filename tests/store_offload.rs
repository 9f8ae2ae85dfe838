//! The example of the Store, as a user runs it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use serde_json::Value;

#[cfg(feature = "cuda")]
#[path = "common/driver_by_name.rs"]
mod driver_by_name;

/// The example with arguments. `cargo test` builds it, `cargo test --test store_offload` does not.
fn example(args: &[&str]) -> Command {
    let test = env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/store_offload");
    assert!(program.exists(), "no {}; run `cargo build --example store_offload`", program.display());
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn results(output: &Output) -> Value {
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
    serde_json::from_str(stdout.lines().last().expect("it prints a line")).unwrap()
}

/// Runs the example with a few small requests and checks what it says.
fn run_and_check(store: &str) {
    const REQUESTS: u64 = 40;
    const DOCUMENTS: u64 = 4;
    const PAGE: u64 = 16384;
    let args = ["--json", "--store", store, "--requests=40", "--documents=4", "--page-size=16384"];
    let args = [&args[..], &["--document-blocks=5", "--question-blocks=3", "--in-flight=3"]].concat();
    let results = results(&example(&args).output().unwrap());
    let integer = |key: &str| results[key].as_u64().unwrap_or_else(|| panic!("{key} in {results}"));
    // Half of the prompts are new; each has a question of its own.
    let keys = DOCUMENTS * 5 + REQUESTS / 2 * 3;
    assert_eq!(integer("keys"), keys);
    // The second half finds everything, unless it comes while the same is still being stored.
    let (gets, blocks) = (integer("gets"), REQUESTS * 8);
    assert!((blocks / 2..=blocks - keys).contains(&gets), "{results}");
    assert_eq!(integer("bytes"), gets * PAGE);
    assert_eq!(integer("verified"), gets);
    assert_eq!(integer("corrupted_with_fences"), 0);
    assert!((1..=blocks).contains(&integer("corrupted_without_fences")), "{results}");
    assert!(results["operations_per_second"].as_f64().is_some_and(|rate| rate > 0.0), "{results}");
    let [p50, p99] = ["p50", "p99"].map(|key| results["get_us"][key].as_f64().unwrap());
    assert!(0.0 < p50 && p50 <= p99, "{results}");
}

#[test]
fn memory() {
    run_and_check("memory");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn mooncake() {
    run_and_check("mooncake");
}

/// Also when it is killed.
#[test]
#[ignore = "needs cargo xtask setup"]
fn the_master_ends_with_the_example() {
    for stop in [libc::SIGINT, libc::SIGKILL] {
        let mut running = example(&["--requests=1000000"]).spawn().unwrap();
        let mut stderr = BufReader::new(running.stderr.take().unwrap());
        let mut said = String::new();
        let master = loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "the example ended: {said}");
            if let Some(rest) = line.strip_prefix("the master is process ") {
                break rest.split(' ').next().unwrap().parse::<u32>().unwrap();
            }
            said += &line;
        };
        // Let requests run.
        thread::sleep(Duration::from_millis(300));
        assert!(runs(master));
        // SAFETY: `kill` takes numbers only.
        assert_eq!(unsafe { libc::kill(running.id() as i32, stop) }, 0);
        assert!(!running.wait().unwrap().success());
        let end = Instant::now() + Duration::from_secs(30);
        while runs(master) {
            assert!(Instant::now() < end, "process {master} outlives its example");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// False for a process that has ended, whether or not anybody has asked for its status: such a one has no command line.
fn runs(process: u32) -> bool {
    fs::read(format!("/proc/{process}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[test]
fn bad_arguments_are_named() {
    for (args, value) in [
        (["--requests", "1"], "'1'"),
        (["--page-size", "65537"], "'65537'"),
        (["--documents", "many"], "'many'"),
        (["--in-flight", "1000"], "'1000'"),
        (["--store", "pigeon"], "'pigeon'"),
    ] {
        let output = example(&args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(stderr.contains(value) && stderr.contains(args[0]), "{args:?}: {stderr}");
    }
}

/// With a CUDA stream in place of the thread.
#[cfg(feature = "cuda")]
#[test]
fn the_work_runs_on_a_cuda_stream_where_there_is_one() {
    let args = ["--json", "--store=memory", "--requests=20", "--page-size=16384", "--stream=cuda"];
    let output = driver_by_name::run_with_driver(&mut example(&args));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("a CUDA stream"), "{stderr}");
    let results = results(&output);
    assert_eq!((&results["verified"], &results["corrupted_with_fences"]), (&results["gets"], &Value::from(0)));
    assert!(results["corrupted_without_fences"].as_u64().is_some_and(|loads| loads > 0), "{results}");
}
