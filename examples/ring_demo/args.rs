//! The command line.

use std::error::Error;

use clap::{Parser, ValueEnum};
use moonring::Engine;
#[cfg(feature = "mooncake")]
use moonring::mooncake::{self, LogLevel};

use crate::common::args::{count, page_size};
use crate::common::stream::Compute;

/// Loads KV-cache pages from a prefill side while the compute stream still copies into them, with and without fences
///
/// Each step queues copies into some pages, and a load of the same pages. With fences the loads wait for the copies and
/// every byte is right; without them late copies overwrite what was loaded. Every byte of every page is checked. Succeeds
/// if no page is corrupted with fences and some are without.
#[derive(Debug, Parser)]
#[command(name = "ring_demo")]
pub struct Args {
    /// What moves the bytes
    #[arg(long, value_enum, default_value_t = Transport::MooncakeTcp)]
    pub transport: Transport,

    /// Steps of each of the two runs
    #[arg(long, value_name = "COUNT", default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: u32,

    /// Pages that each step copies and loads
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = count(4096))]
    pub pages_per_step: usize,

    /// Bytes of a page, a multiple of 8
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 10, value_parser = page_size)]
    pub page_size: usize,

    /// Steps in flight at a time
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = count(64))]
    pub depth: usize,

    /// What runs the copies
    #[arg(long, value_enum, default_value_t = Compute::Auto)]
    pub stream: Compute,

    /// Print the results as one line of JSON
    #[arg(long)]
    pub json: bool,

    /// Be the prefill side of the demo that started this process
    #[arg(long, hide = true)]
    pub prefill: bool,
}

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// A real Mooncake over TCP between two processes; needs `cargo xtask setup`
    MooncakeTcp,
    /// Copies inside one process; needs no set-up
    Loopback,
}

impl Transport {
    /// Its name on the command line and in the results.
    pub fn name(self) -> &'static str {
        match self {
            Transport::MooncakeTcp => "mooncake-tcp",
            Transport::Loopback => "loopback",
        }
    }

    /// A new engine: the one line that differs between the transports.
    pub fn engine(self) -> Result<Engine, Box<dyn Error>> {
        match self {
            #[cfg(feature = "mooncake")]
            Transport::MooncakeTcp => Ok(mooncake::builder("127.0.0.1").log_level(LogLevel::Error).build()?),
            #[cfg(not(feature = "mooncake"))]
            Transport::MooncakeTcp => {
                Err("built without the feature `mooncake`: only --transport loopback works".into())
            }
            Transport::Loopback => Ok(Engine::loopback()),
        }
    }
}
