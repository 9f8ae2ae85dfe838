//! The parts: programs that print lines, each of them `bench: ` and a JSON object with one key, which says what it is:
//!
//! | key | value |
//! | --- | --- |
//! | `result` | `id`, `state`, `value`, `unit`, `peer`, `peer_value`, `higher`: more is better |
//! | `note` | a sentence for the reader |
//! | `point` | `plot`, `curve`, `state`, `x`, `y` |
//! | `histogram` | `curve`, `state`, `bins`: pairs of an upper edge in microseconds and a percentage |
//! | `probe`, `ping_pong` | a time of the fixed loop, or of a word's way between the cores and back, in nanoseconds |
//! | `waited` | seconds of waiting for NEAR |

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::Options;
use super::results::Results;
use super::targets::IDS;
use crate::{command, setup};

/// Longest time to wait for the cores to be near each other, in seconds, over all parts.
const NEAR_WAIT: f64 = 300.0;
const NEAR_WAIT_QUICK: f64 = 4.0;

/// A part: its name, and what is added to `cargo` to run it.
struct Part {
    name: &'static str,
    cargo: &'static [&'static str],
    /// Takes `--quick` and `--near-wait`, as those in `benches/ring` do.
    rounds: bool,
}

const RING: &[&str] = &["bench", "--quiet", "--package", "moonring", "--all-features", "--bench", "ring", "--"];

const PARTS: [Part; 5] = [
    Part { name: "memory", cargo: RING, rounds: true },
    Part { name: "nop", cargo: RING, rounds: true },
    Part { name: "gate", cargo: RING, rounds: true },
    Part { name: "mooncake", cargo: RING, rounds: true },
    Part { name: "idle", cargo: RING, rounds: true },
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
    build.args(["bench", "--no-run", "--package", "moonring", "--all-features", "--bench", "ring"]);
    command::run(&mut build)?;
    let near_wait = if options.quick { NEAR_WAIT_QUICK } else { NEAR_WAIT };
    let mut good = true;
    for part in &PARTS {
        if !options.parts.is_empty() && !options.parts.iter().any(|name| name == part.name) {
            continue;
        }
        let mut cargo = command::cargo();
        cargo.args(part.cargo);
        if part.rounds {
            let left = (near_wait - results.waited).max(0.0);
            cargo.args([part.name, "--near-wait", &left.to_string()]);
            cargo.args(options.quick.then_some("--quick"));
        }
        good &= run_one(part.name, &mut cargo, results)?;
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

/// Where cargo builds.
pub fn target_folder() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| crate::project_root().join("target"), PathBuf::from)
}
