//! `cargo xtask soak`: moonring on a real Mooncake whose peers are killed, stopped and restarted at random.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use crate::{command, setup};

/// What `cargo xtask soak` is asked for
#[derive(Debug, Args)]
pub struct Options {
    /// For how long, in minutes; fractions will do
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// What the faults and the entries are drawn from; one is made up and printed without
    #[arg(long)]
    seed: Option<u64>,
    /// Instead, measure what a sick peer costs the entries of another: 99th percentiles, as ratios to undisturbed ones
    #[arg(long, conflicts_with_all = ["minutes", "seed"])]
    peers: bool,
}

/// Sets up, then runs the soak. Standard output carries its JSON only.
pub fn soak(options: &Options) -> Result<ExitCode> {
    setup::setup()?;
    let mut cargo = command::cargo();
    cargo.args(["run", "--release", "--package", "moonring-soak", "--"]);
    if options.peers {
        cargo.arg("latency");
    } else {
        cargo.args(["run", "--minutes", &options.minutes.to_string()]);
        cargo.args(options.seed.map(|seed| format!("--seed={seed}")));
    }
    command::end_with_us(&mut cargo);
    let status = cargo.status().context("could not start cargo")?;
    // Killed by a signal: no exit code to hand on.
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}
