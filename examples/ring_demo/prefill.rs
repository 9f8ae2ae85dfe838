//! The prefill side: it owns pages and does nothing but let the decode side read them.

use std::error::Error;

use moonring::{Engine, Region, RegionInfo, Registered};

use crate::args::Args;
use crate::pages;

/// The prefill side, for as long as this lives.
pub struct Prefill {
    /// Where its pages are.
    pub info: RegionInfo,
    /// How many. Page `n` has the content called `n`.
    pub pages: usize,
    /// Keeps the engine, and with it the pages.
    _memory: Registered,
}

impl Prefill {
    /// Starts one that has twice as many pages as the decode side can load at a time.
    pub fn start(args: &Args) -> Result<Prefill, Box<dyn Error>> {
        let pages = 2 * args.depth * args.pages_per_step;
        let memory = make_pages(&Engine::loopback(), pages, args.page_size)?;
        Ok(Prefill { info: memory.info(), pages, _memory: memory })
    }
}

fn make_pages(engine: &Engine, count: usize, size: usize) -> Result<Registered, Box<dyn Error>> {
    let region = Region::alloc(count * size)
        .map_err(|error| format!("no memory for the prefill side's {count} pages of {size} bytes: {error}"))?;
    let region = engine.register(region)?;
    let mut page = vec![0; size];
    for n in 0..count {
        pages::fill(n as u64, &mut page);
        region.write_at(n * size, &page)?;
    }
    Ok(region)
}
