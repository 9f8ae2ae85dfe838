//! moonring's checks and measurements on a GPU; without one, on the fake CUDA driver. `cargo xtask gpu` puts this program
//! into a bundle, with what it needs to run on a machine that has neither Rust nor a network.
//!
//! The last line that it writes to standard output is one JSON object; what happens meanwhile goes to standard error.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;

mod bundle;
mod checks;
mod device;
mod measure;
mod programs;
mod report;
mod transfers;

use checks::{CHECKS, Skip};

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
    /// Run the measurements in this process
    #[arg(long, hide = true)]
    measure: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match (&cli.check, cli.measure) {
        (Some(name), _) => check(name),
        _ if cli.describe => report::describe(),
        (None, true) => measure::all().map(|numbers| {
            println!("{numbers}");
            ExitCode::SUCCESS
        }),
        (None, false) => report::run(cli.fake),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// The exit code of a check that this machine cannot do.
const SKIPPED: u8 = 77;

fn check(name: &str) -> Result<ExitCode> {
    let Some((_, check)) = CHECKS.iter().find(|(known, _)| *known == name) else {
        bail!("there is no check called {name:?}");
    };
    match check() {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => match error.downcast_ref::<Skip>() {
            Some(why) => {
                eprintln!("{why}");
                Ok(ExitCode::from(SKIPPED))
            }
            None => Err(error),
        },
    }
}
