//! What lies where: each worker has its own cells in each peer's memory, and its own chunks of ours.

/// Threads with a ring each.
pub const WORKERS: usize = 4;
/// Bytes of a small cell, a page.
pub const PAGE: usize = 4096;
/// Small cells of a worker in a peer.
pub const SMALL: usize = 64;
/// Cells of a worker in a peer that take a while to move.
const BIG: usize = 2;
/// Bytes of such a cell.
pub const BIG_LEN: usize = 1 << 20;
/// Cells of a worker in a peer.
pub const CELLS: usize = SMALL + BIG;
/// Bytes of a worker in a peer.
const SHARE: usize = SMALL * PAGE + BIG * BIG_LEN;
/// Bytes of a peer's region.
pub const PEER_LEN: usize = WORKERS * SHARE;

/// Pages of a small chunk.
pub const CHUNK_PAGES: usize = 16;
/// Small chunks of a worker here.
const SMALL_CHUNKS: usize = 96;
/// Chunks for big cells.
const BIG_CHUNKS: usize = 4;
/// Chunks of a worker.
pub const CHUNKS: usize = SMALL_CHUNKS + BIG_CHUNKS;
/// Bytes of a worker's region here.
pub const LOCAL_LEN: usize = SMALL_CHUNKS * CHUNK_PAGES * PAGE + BIG_CHUNKS * BIG_LEN;

/// A range of a peer's memory that is written as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub worker: usize,
    pub number: usize,
}

impl Cell {
    /// Where it is in the peer's region.
    pub fn offset(self) -> usize {
        let inside =
            if self.number < SMALL { self.number * PAGE } else { SMALL * PAGE + (self.number - SMALL) * BIG_LEN };
        self.worker * SHARE + inside
    }

    pub fn len(self) -> usize {
        if self.number < SMALL { PAGE } else { BIG_LEN }
    }

    /// What it holds when a peer has started. No worker uses such a stamp.
    pub fn first_stamp(self, generation: u32) -> u64 {
        0xff << 56 | u64::from(generation) << 24 | (self.worker as u64) << 16 | self.number as u64
    }
}

/// All cells of a peer.
pub fn all() -> impl Iterator<Item = Cell> {
    (0..WORKERS).flat_map(|worker| (0..CELLS).map(move |number| Cell { worker, number }))
}

/// Where a chunk is in the worker's region.
pub fn chunk_offset(chunk: usize) -> usize {
    let small = chunk.min(SMALL_CHUNKS) * CHUNK_PAGES * PAGE;
    small + chunk.saturating_sub(SMALL_CHUNKS) * BIG_LEN
}

pub fn chunk_is_big(chunk: usize) -> bool {
    chunk >= SMALL_CHUNKS
}
