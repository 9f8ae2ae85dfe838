//! moonring's checks and measurements on a GPU; without one, on the fake CUDA driver. `cargo xtask gpu` puts this program
//! into a bundle, with what it needs to run on a machine that has neither Rust nor a network.
//!
//! The last line that it writes to standard output is one JSON object; what happens meanwhile goes to standard error.

use std::io::{self, Read as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;

mod bundle;
mod checks;
mod device;
mod measure;
mod programs;
mod report;
mod transfers;

use checks::{CHECKS, Skip};
use device::Device;
use measure::MEASUREMENTS;

/// moonring's checks and measurements on a GPU, or on the fake driver where there is none
#[derive(Debug, Parser)]
struct Cli {
    /// Use the fake driver although there is a GPU
    #[arg(long)]
    fake: bool,
    /// Say what the device is
    #[arg(long, hide = true)]
    describe: bool,
    /// Run one check in this process
    #[arg(long, hide = true)]
    check: Option<String>,
    /// Use the driver until standard input ends
    #[arg(long, hide = true)]
    keep: bool,
    /// Load the engine
    #[arg(long, hide = true)]
    engine: bool,
    /// Take one measurement in this process
    #[arg(long, hide = true)]
    measure: Option<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match (&cli.check, &cli.measure) {
        (Some(name), _) => find("check", CHECKS, name).and_then(|check| check()),
        (None, Some(name)) => find("measurement", MEASUREMENTS, name)
            .and_then(|measurement| measurement(&Device::open()?))
            .map(|number| println!("{number}")),
        (None, None) if cli.describe => device::describe().map(|(name, more)| println!("{name}\n{more}")),
        (None, None) if cli.keep => {
            device::describe().and_then(|_| Ok(io::stdin().read_to_end(&mut Vec::new()).map(drop)?))
        }
        (None, None) if cli.engine => transfers::engine().map(drop),
        (None, None) => return report::run(cli.fake),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<Skip>() => {
            eprintln!("{error}");
            ExitCode::from(SKIPPED)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The exit code of what this machine cannot do.
const SKIPPED: u8 = 77;

fn find<T>(what: &str, all: &'static [(&str, T)], name: &str) -> Result<&'static T> {
    let found = all.iter().find(|(known, _)| *known == name);
    Ok(&found.with_context(|| format!("there is no {what} called {name:?}"))?.1)
}
