//! `cargo xtask demo`: the ring demo on a real Mooncake.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::{command, setup};

/// Sets up what the demo needs and runs it with `args`; standard output carries the demo's own only.
pub fn demo(args: &[OsString]) -> Result<ExitCode> {
    if needs_setup(args) {
        setup::setup()?;
    }
    let status = command::cargo()
        .args(["run", "--release", "--package", "moonring", "--example", "ring_demo", "--"])
        .args(args)
        .status()
        .context("could not start cargo")?;
    // Killed by a signal: no exit code to hand on.
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// The loopback transport runs inside the demo, and asking for help runs nothing.
fn needs_setup(args: &[OsString]) -> bool {
    let asks_help = args.iter().any(|arg| arg == "--help" || arg == "-h");
    let loopback = args.iter().any(|arg| arg == "--transport=loopback")
        || args.windows(2).any(|pair| pair[0] == "--transport" && pair[1] == "loopback");
    !asks_help && !loopback
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_real_engine_needs_setup() {
        let needs = |line: &str| needs_setup(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>());
        assert!(needs(""));
        assert!(needs("--json --steps 5"));
        assert!(needs("--transport mooncake-tcp"));
        assert!(needs("--name loopback"));
        assert!(!needs("--json --transport loopback"));
        assert!(!needs("--transport=loopback"));
        assert!(!needs("--help"));
    }
}
