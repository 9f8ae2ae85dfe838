//! moonring's project commands: `cargo xtask <command>`.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod command;
mod conformance;
mod demo;
mod gpu;
mod loom;
mod memcheck;
mod pins;
mod planted;
mod setup;
mod sim;
mod soak;
mod system;
mod test;
mod wheel;

/// moonring's project commands
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Fetch a real Mooncake and the system libraries it needs; does nothing when they are there
    Setup,
    /// Set up, then run the ring demo
    #[command(disable_help_flag = true)]
    Demo {
        /// Arguments of the demo, such as --json or --help
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Set up, then run the example that offloads pages to Mooncake's Store
    #[command(disable_help_flag = true)]
    Store {
        /// Arguments of the example, such as --json or --help
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Set up, then run every test of the workspace and print the totals
    Test {
        /// Arguments of the test programs, such as a part of a test's name or --nocapture
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Compare moonring and the kernel's io_uring with a model of the rules, on random programs; prints JSON
    Conformance {
        /// How many programs each runs
        #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..))]
        programs: u64,
        /// Seed of the first program
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Measure the ring side by side with what it replaces; prints a table and writes a report with plots
    Bench(bench::Options),
    /// Build target/gpu/bundle.tar.gz, which checks and measures moonring on any machine with a GPU, and run it here
    Gpu,
    /// Simulate the core on random programs with faults, in virtual time; prints JSON
    Sim {
        /// How many seeds
        #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
        seeds: u64,
        /// The first seed; 1 without
        #[arg(long)]
        seed: Option<u64>,
        /// 1,000 peers and 1,000,000 entries through one core instead
        #[arg(long, conflicts_with_all = ["seeds", "seed"])]
        scale: bool,
    },
    /// Set up, then run on a real Mooncake while its peers are killed, stopped and restarted at random; prints JSON
    Soak(soak::Options),
    /// Run the tests that reach unsafe code and the C++ shim under valgrind and gcc's sanitizers; prints JSON
    Memcheck {
        /// A part of the name of a part; all parts without
        part: Option<String>,
    },
    /// Plant each bug of tests/planted in a copy of the tree and show which check catches it
    Planted {
        /// Parts of patches' names; all patches without
        names: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Task::Setup => setup::setup().map(|()| ExitCode::SUCCESS),
        Task::Demo { args } => demo::demo(&args),
        Task::Store { args } => demo::store(&args),
        Task::Test { args } => test::test(&args),
        Task::Conformance { programs, seed } => conformance::conformance(programs, seed),
        Task::Bench(options) => bench::bench(&options),
        Task::Gpu => gpu::gpu(),
        Task::Sim { scale: true, .. } => sim::scale(),
        Task::Sim { seeds, seed, .. } => sim::sim(seeds, seed),
        Task::Soak(options) => soak::soak(&options),
        Task::Memcheck { part } => memcheck::memcheck(part.as_deref()),
        Task::Planted { names } => planted::planted(&names),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}

/// The folder of the workspace, whatever the current one is.
fn project_root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}
