//! The paged pool: memory for the KV cache, in pages that requests take and give back.

use std::collections::VecDeque;
use std::error::Error;

use moonring::{Engine, Region, Registered, Slice};

use crate::common::pages;

/// What the page of [`Pool::SHARED`] holds: contents that no block has.
const SHARED_CONTENT: u64 = 0;

/// A page's number.
pub type Page = usize;

/// The pool.
pub struct Pool {
    pub memory: Registered,
    size: usize,
    /// The page that was free longest comes first.
    free: VecDeque<Page>,
}

impl Pool {
    /// A page that is never free: what copies are made of.
    pub const SHARED: Page = 0;

    /// A pool of so many free pages, and the shared one.
    pub fn new(engine: &Engine, count: usize, size: usize) -> Result<Pool, Box<dyn Error>> {
        let bytes = (1 + count).checked_mul(size).ok_or("more memory than there can be")?;
        let region =
            Region::alloc(bytes).map_err(|error| format!("no memory for {count} pages of {size} bytes: {error}"))?;
        let memory = engine.register(region)?;
        let mut page = vec![0; size];
        pages::fill(SHARED_CONTENT, &mut page);
        memory.write_at(Pool::SHARED * size, &page)?;
        Ok(Pool { memory, size, free: (1..=count).collect() })
    }

    /// Takes pages, or none if there are not so many.
    pub fn take(&mut self, count: usize) -> Option<Vec<Page>> {
        (count <= self.free.len()).then(|| self.free.drain(..count).collect())
    }

    /// Takes pages back that nothing touches any more.
    pub fn give_back(&mut self, pages: Vec<Page>) {
        self.free.extend(pages);
    }

    /// Where a page begins.
    pub fn offset(&self, page: Page) -> usize {
        page * self.size
    }

    /// A page, for an entry.
    pub fn slice(&self, page: Page) -> Result<Slice, Box<dyn Error>> {
        let at = self.offset(page);
        Ok(self.memory.slice(at..at + self.size)?)
    }
}
