//! What a peer's process does: it keeps memory for others to read and write, and says what is in it.
//!
//! It takes lines on standard input and answers on standard output, marked, because Mooncake may print there too.

use std::io::{self, Write};

use anyhow::{Context, Result, bail};
use clap::Args;
use moonring::{Region, mooncake};

use crate::layout::{self, Cell};
use crate::pattern;

/// What marks an answer.
pub const MARK: &str = "@peer ";

/// What a peer is told when it starts.
#[derive(Debug, Args)]
pub struct Options {
    /// Which incarnation of a peer it is: part of what its memory holds at first
    #[arg(long)]
    pub generation: u32,
    /// A metadata server's URL; without, engines ask each other
    #[arg(long, requires = "name")]
    pub metadata: Option<String>,
    /// The engine's name at the metadata server
    #[arg(long)]
    pub name: Option<String>,
    /// The process that has started it
    #[arg(long)]
    pub parent: u32,
}

/// Serves until its input ends, or its parent.
pub fn serve(options: &Options) -> Result<()> {
    // The kernel kills a peer whose parent ends, unless that has happened before it was told to.
    // SAFETY: a plain system call.
    if unsafe { libc::getppid() } as u32 != options.parent {
        bail!("the process that started this peer is gone");
    }
    let mut builder = mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal);
    if let (Some(url), Some(name)) = (&options.metadata, &options.name) {
        builder = builder.metadata(mooncake::Metadata::Http(url.clone())).name(name);
    }
    let engine = builder.build()?;
    let region = engine.register(Region::alloc(layout::PEER_LEN)?)?;
    for cell in layout::all() {
        pattern::fill(&region, cell.offset(), cell.len(), cell.first_stamp(options.generation), 0);
    }
    let answer = |text: String| -> io::Result<()> {
        let mut out = io::stdout().lock();
        writeln!(out, "\n{MARK}{text}")?;
        out.flush()
    };
    answer(format!("hello {} {} {}", engine.name(), region.address(), region.len()))?;
    for line in io::stdin().lines() {
        let line = line?;
        match line.split(' ').collect::<Vec<_>>()[..] {
            // check <worker> <cell> <stamp>: does the cell hold the pattern?
            ["check", worker, number, stamp] => {
                let cell = Cell { worker: worker.parse()?, number: number.parse()? };
                let wrong = pattern::first_wrong(&region, cell.offset(), cell.len(), stamp.parse()?, 0);
                let wrong = wrong.map_or("-".to_owned(), |at| at.to_string());
                answer(format!("checked {worker} {number} {wrong}"))?;
            }
            // Ends the engine as it should end, which takes its entries out of the metadata.
            ["leave"] => {
                drop((region, engine));
                answer("left".into())?;
                break;
            }
            _ => bail!("no such command: {line:?}"),
        }
    }
    io::stdout().flush().context("the parent is gone")?;
    // SAFETY: ends the process at once, without the engine's second of tidying up.
    unsafe { libc::_exit(0) }
}
