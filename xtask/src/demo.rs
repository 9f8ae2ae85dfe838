//! `cargo xtask demo` and `cargo xtask store`: the examples on a real Mooncake.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{command, setup};

/// Sets up what the ring demo needs and runs it with `args`; standard output carries the demo's own only.
pub fn demo(args: &[OsString]) -> Result<ExitCode> {
    run("ring_demo", args, ["--transport", "loopback"])
}

/// The same with the example of the Store.
pub fn store(args: &[OsString]) -> Result<ExitCode> {
    run("store_offload", args, ["--store", "memory"])
}

/// Runs an example, which with the option `inside` stays inside its process.
fn run(example: &str, args: &[OsString], inside: [&str; 2]) -> Result<ExitCode> {
    if needs_setup(args, inside) {
        setup::setup()?;
    }
    let status = command::cargo()
        .args(["run", "--release", "--package", "moonring", "--example", example, "--"])
        .args(args)
        .status()
        .context("could not start cargo")?;
    // Killed by a signal: no exit code to hand on.
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// What stays inside the process needs nothing, and asking for help runs nothing.
fn needs_setup(args: &[OsString], [option, value]: [&str; 2]) -> bool {
    let asks_help = args.iter().any(|arg| arg == "--help" || arg == "-h");
    let inside = args.iter().any(|arg| *arg == *format!("{option}={value}"))
        || args.windows(2).any(|pair| pair[0] == option && pair[1] == value);
    !asks_help && !inside
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_real_engine_needs_setup() {
        let needs = |line: &str| {
            let args: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            needs_setup(&args, ["--transport", "loopback"])
        };
        assert!(needs(""));
        assert!(needs("--json --steps 5"));
        assert!(needs("--transport mooncake-tcp"));
        assert!(needs("--name loopback"));
        assert!(!needs("--json --transport loopback"));
        assert!(!needs("--transport=loopback"));
        assert!(!needs("--help"));
    }
}
