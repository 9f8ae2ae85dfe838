//! The models of the lock-free protocols, which loom goes through.

use std::process::Command;

use crate::command;

/// `cargo test` of the library for loom; a part of a model's name selects. Loom is optimised, because it tries many thousands of
/// interleavings; moonring itself takes little of the time, and is built often, once for each planted bug. With its debug
/// assertions, which are part of what the models check, and without features, which no model needs.
pub fn cargo() -> Command {
    let mut cargo = command::cargo();
    cargo.env("RUSTFLAGS", "--cfg loom").args([
        "test",
        "--release",
        "--package",
        "moonring",
        "--lib",
        "--no-default-features",
        "--config=profile.release.package.moonring.debug-assertions=true",
        "--config=profile.release.package.moonring.opt-level=1",
    ]);
    cargo
}

/// All models. One at a time: what they take is memory and a whole core.
pub fn all() -> Command {
    let mut cargo = cargo();
    cargo.args(["--", "models::", "--test-threads=1"]);
    cargo
}
