//! Side by side: the ring, what it replaces, and what it costs. `cargo xtask bench` runs the parts, each in a process of its
//! own, and makes tables and pictures of what they say; `out.rs` has the form.

mod gate;
mod idle;
mod machine;
mod memory;
mod mooncake;
mod nop;
mod out;
mod python;
mod queues;
mod rounds;
mod store;
mod uring;
mod watched;

use std::time::Duration;

use clap::Parser;

/// A part measures some of the results.
type Part = fn(&mut Settings);

/// A further part is a line here and one for each of its results in xtask's list.
const PARTS: [(&str, Part); 6] = [
    ("nop", nop::measure),
    ("gate", gate::measure),
    ("mooncake", mooncake::measure),
    ("store", store::measure),
    ("idle", idle::measure),
    ("memory", memory::measure),
];

/// Benchmarks of the ring, side by side with what it replaces
#[derive(Debug, Parser)]
struct Cli {
    /// What to measure: nop, gate, mooncake, store, idle, memory; everything without
    parts: Vec<String>,
    /// Fewer rounds
    #[arg(long)]
    quick: bool,
    /// How long to wait for the cores to be near each other, in seconds
    #[arg(long, default_value_t = 0.0)]
    near_wait: f64,
    /// Serve as a Mooncake peer until standard input ends
    #[arg(long, hide = true)]
    serve: bool,
    /// Lend memory to the Store of this master until standard input ends
    #[arg(long, hide = true, value_name = "MASTER")]
    serve_store: Option<String>,
    /// What cargo adds
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug)]
struct Settings {
    quick: bool,
    near_wait: Duration,
}

impl Settings {
    fn rounds(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }
}

fn main() {
    // As somebody does who calls Mooncake directly, and who is asked to by `mooncake::adopt`: the loops and the ring share an
    // engine, and its connections are kept.
    // SAFETY: there is no other thread yet.
    unsafe { std::env::set_var("MC_TCP_ENABLE_CONNECTION_POOL", "1") };
    machine::look_at_cores();
    let cli = Cli::parse();
    if cli.serve {
        return idle::serve();
    }
    if let Some(master) = cli.serve_store {
        return store::serve(&master);
    }
    let mut settings = Settings { quick: cli.quick, near_wait: Duration::from_secs_f64(cli.near_wait) };
    for name in &cli.parts {
        assert!(PARTS.iter().any(|(known, _)| known == name), "no part {name}");
    }
    for (name, measure) in PARTS {
        if cli.parts.is_empty() || cli.parts.iter().any(|wanted| wanted == name) {
            measure(&mut settings);
        }
    }
}
