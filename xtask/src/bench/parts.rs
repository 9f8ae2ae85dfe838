//! The parts: programs that print lines, each of them `bench: ` and a JSON object whose key says what it is. The simulation
//! prints `simulation: ` and an object in which the names of results are keys.
//!
//! | key | value |
//! | --- | --- |
//! | `result` | `id`, `state`, `value`, `unit`, `peer`, `peer_value`, `higher`: more is better |
//! | `note` | a sentence for the reader |
//! | `point` | `plot`, `curve`, `state`, `x`, `y` |
//! | `histogram` | `curve`, `state`, `bins`: pairs of an upper edge in microseconds and a percentage |
//! | `probe`, `ping_pong` | a time of the fixed loop, or of a message's way between the cores and back, in nanoseconds |
//! | `disturbed` | whether somebody took a core away in a measurement whose threads have one each, however often repeated |
//! | `waited` | seconds of waiting for NEAR |

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Options;
use super::results::{Line, Results};
use super::targets::IDS;
use crate::{command, setup};

/// Longest time to wait for the cores to be near each other, in seconds, over all parts.
const NEAR_WAIT: f64 = 300.0;
const NEAR_WAIT_QUICK: f64 = 3.0;

/// A part: its name, and what is added to `cargo` to run it.
struct Part {
    name: &'static str,
    cargo: &'static [&'static str],
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A part of `benches/ring`: it takes `--quick` and `--near-wait`.
    Ring,
    /// The simulation: a test that prints one object, in which results are keys.
    Simulation,
    /// A criterion program: its estimates are read from where criterion leaves them.
    Criterion,
}

const RING: &[&str] = &["bench", "--quiet", "--package", "moonring", "--all-features", "--bench", "ring", "--"];
const MICRO: &[&str] = &["bench", "--quiet", "--package", "moonring", "--all-features", "--bench", "micro", "--"];

const SIMULATION: &[&str] = &["test", "--quiet", "--release", "--package", "moonring", "--lib", "--"];

const PARTS: [Part; 8] = [
    Part { name: "memory", cargo: RING, kind: Kind::Ring },
    Part { name: "micro", cargo: MICRO, kind: Kind::Criterion },
    Part { name: "sim", cargo: SIMULATION, kind: Kind::Simulation },
    Part { name: "nop", cargo: RING, kind: Kind::Ring },
    Part { name: "gate", cargo: RING, kind: Kind::Ring },
    Part { name: "mooncake", cargo: RING, kind: Kind::Ring },
    Part { name: "store", cargo: RING, kind: Kind::Ring },
    Part { name: "idle", cargo: RING, kind: Kind::Ring },
];

/// Runs the parts that are asked for. False if one of them failed.
pub fn run(options: &Options, results: &mut Results) -> Result<bool> {
    for name in &options.parts {
        let known: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        ensure!(known.contains(&name.as_str()), "there is no part {name:?}; the parts are {}", known.join(", "));
    }
    if let Err(error) = setup::setup() {
        results.notes.push(format!("there is no Mooncake: {error:#}"));
    }
    let mut build = command::cargo();
    build.args(["bench", "--no-run", "--package", "moonring", "--all-features", "--bench", "ring", "--bench", "micro"]);
    command::run(&mut build)?;
    let mut build = command::cargo();
    build.args(["test", "--no-run", "--release", "--package", "moonring", "--lib"]);
    command::run(&mut build)?;
    let near_wait = if options.quick { NEAR_WAIT_QUICK } else { NEAR_WAIT };
    let mut good = true;
    for part in &PARTS {
        if !options.parts.is_empty() && !options.parts.iter().any(|name| name == part.name) {
            continue;
        }
        let mut cargo = command::cargo();
        cargo.args(part.cargo);
        match part.kind {
            Kind::Ring => {
                let left = (near_wait - results.waited).max(0.0);
                cargo.args([part.name, "--near-wait", &left.to_string()]);
                cargo.args(options.quick.then_some("--quick"));
            }
            Kind::Simulation => {
                cargo.args(["simulation::scale::a_thousand_peers_share_one_core", "--exact", "--nocapture"]);
            }
            Kind::Criterion => {
                let seconds = if options.quick { ["0.1", "0.5"] } else { ["1", "3"] };
                cargo.args(["--noplot", "--warm-up-time", seconds[0], "--measurement-time", seconds[1]]);
            }
        }
        let start = SystemTime::now();
        good &= run_one(part.name, &mut cargo, results)?;
        if part.kind == Kind::Criterion {
            take_estimates(start, results);
        }
    }
    if results.waited >= near_wait {
        results
            .notes
            .push(format!("the cores were not near each other for long enough within {near_wait} s of waiting"));
    }
    Ok(good)
}

fn run_one(name: &str, cargo: &mut Command, results: &mut Results) -> Result<bool> {
    eprintln!("measuring {name}");
    let start = Instant::now();
    // Its standard error is progress, and shown.
    let output = cargo
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not start `{}`", command::shown(cargo)))?;
    results.take(&String::from_utf8_lossy(&output.stdout));
    eprintln!("{name} took {:.1} s", start.elapsed().as_secs_f64());
    for id in IDS.iter().filter(|id| id.part == name) {
        if !results.lines.iter().any(|line| line.id == id.name) {
            results.notes.push(format!("part {name} has no result for {}", id.name));
        }
    }
    if !output.status.success() {
        results.notes.push(format!("part {name} failed: it ended with {}", output.status));
    }
    Ok(output.status.success())
}

/// Takes the medians that criterion has left since `start`, each under its benchmark's name.
fn take_estimates(start: SystemTime, results: &mut Results) {
    let folders = fs::read_dir(target_folder().join("criterion")).into_iter().flatten().flatten();
    for folder in folders {
        let path = folder.path().join("new/estimates.json");
        let is_new = path.metadata().and_then(|file| file.modified()).is_ok_and(|modified| modified >= start);
        let estimates: Option<Value> = fs::read_to_string(&path).ok().and_then(|text| serde_json::from_str(&text).ok());
        if let Some(median) = estimates.filter(|_| is_new).and_then(|all| all["median"]["point_estimate"].as_f64()) {
            let id = format!("micro_{}", folder.file_name().to_string_lossy());
            results.lines.push(Line::alone(id, median, "ns"));
        }
    }
}

/// Where cargo builds.
pub fn target_folder() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| crate::project_root().join("target"), PathBuf::from)
}
