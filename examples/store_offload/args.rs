//! The command line.

use clap::{Parser, ValueEnum};

use crate::common::args::{count, page_size};
use crate::common::stream::Compute;

/// Offloads KV-cache pages to a Store and loads them again, as an engine's connector does, with and without fences
///
/// Requests look their prompts' blocks up by the hash of the prefix, load what the Store has into pages that the compute
/// stream still copies into, and store what the stream has yet to write. With fences every byte that is loaded is right;
/// without them stores read pages too early, and late copies overwrite what was loaded. Every byte of every loaded page is
/// checked. Succeeds if no load is corrupted with fences and some are without.
#[derive(Debug, Parser)]
#[command(name = "store_offload")]
pub struct Args {
    /// The Store
    #[arg(long, value_enum, default_value_t = Backend::Mooncake)]
    pub store: Backend,

    /// Requests of each of the two runs; each prompt comes twice
    #[arg(long, value_name = "COUNT", default_value_t = 400, value_parser = clap::value_parser!(u32).range(2..))]
    pub requests: u32,

    /// Requests in flight at a time
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = count(64))]
    pub in_flight: usize,

    /// Documents that prompts begin with
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = count(65536))]
    pub documents: usize,

    /// Blocks of a document
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = count(1024))]
    pub document_blocks: usize,

    /// Blocks of a prompt after its document
    #[arg(long, value_name = "COUNT", default_value_t = 4, value_parser = count(1024))]
    pub question_blocks: usize,

    /// Bytes of a page, which holds a block's keys and values; a multiple of 8
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 10, value_parser = page_size)]
    pub page_size: usize,

    /// What runs the copies and the prefill
    #[arg(long, value_enum, default_value_t = Compute::Auto)]
    pub stream: Compute,

    /// Print the results as one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The Store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Mooncake's, with a master of this program's own; needs `cargo xtask setup`
    Mooncake,
    /// One in this process's memory; needs no set-up
    Memory,
}

impl Args {
    /// Blocks of a prompt.
    pub fn blocks(&self) -> usize {
        self.document_blocks + self.question_blocks
    }
}
