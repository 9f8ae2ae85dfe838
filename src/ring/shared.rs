//! What the two ends of a ring and its core share.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::fmt;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_utils::CachePadded;

use super::eventfd::EventFd;
use super::parts::PartLists;
use super::share::Share;
use super::stats::Stats;
use crate::doorbell::Doorbell;
use crate::engine::Engine;
use crate::fence::FenceInner;
use crate::fork::Home;
use crate::sync::{ArrayQueue, AtomicBool, AtomicU64, AtomicUsize, OnceLock, Ordering};

/// Most fences on one entry.
pub(crate) const MAX_FENCES: usize = 64;

/// Units beyond the capacity, which only Cancels take.
pub(crate) const CANCEL_RESERVE: u32 = 4;

/// The part of the units that are left which a producer may take at once: one of so many.
const AT_ONCE: u64 = if cfg!(loom) { 1 } else { 8 };

/// The slots that a ring of this capacity has a right to.
pub(crate) const fn slots_of(capacity: u32) -> u32 {
    capacity + CANCEL_RESERVE
}

/// Whether a ring takes entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Open,
    Closed,
    /// Its poller died.
    Dead,
    /// This is a forked child of its process.
    Elsewhere,
}

/// What a ring's word has while it is not open: more than any home's number.
const CLOSED: u32 = u32::MAX - 1;
const DEAD: u32 = u32::MAX;

pub(crate) struct Shared {
    pub(crate) engine: Engine,
    /// Most entries accepted and not ended.
    pub(crate) capacity: u64,
    /// Units of capacity taken, ever. Written by producers.
    pub(crate) accepted: CachePadded<AtomicU64>,
    /// Units given back, ever. Written by the core.
    pub(crate) freed: CachePadded<AtomicU64>,
    /// The same, stored after the completions are visible: `freed` is stored before, so that whoever reaps a completion
    /// finds its unit given back. Apart from what producers read at each push, which would wait for it.
    pub(crate) settled: CachePadded<AtomicU64>,
    /// The home's number while the ring is open, so that one comparison tells that it is open and here.
    life: AtomicU32,
    home: Home,
    /// A completion waits in its slot for room in the CQ: the reaper wakes the poller when it has made some. Apart from what
    /// producers read at each push.
    pub(crate) overflowing: CachePadded<AtomicBool>,
    /// Wakes the poller.
    pub(crate) poller: Arc<Doorbell>,
    /// Wakes the reaper, by position in the CQ.
    pub(crate) reaper: Doorbell,
    /// For a foreign event loop, if there is one.
    pub(crate) eventfd: OnceLock<EventFd>,
    pub(crate) sides: Sides,
    /// Each segment's share, by the transport's number.
    shares: Mutex<HashMap<u32, Arc<Share>>>,
    /// Segments that entries were pushed to.
    segments: AtomicU32,
    pub(crate) lists: PartLists,
    /// Units that the sleeping reaper's own thread has taken and not submitted.
    pub(crate) held_back: AtomicUsize,
    /// Submitters that exist, and a submitting half on its own.
    pub(crate) submitters: AtomicUsize,
    /// One word for each publish of a submitter: its lane and how many entries.
    pub(crate) published: ArrayQueue<LaneWord>,
    /// The counts that the core leaves when it forgets the ring.
    pub(crate) last_stats: OnceLock<Stats>,
    /// Numbers of lanes that can be used again.
    pub(crate) free_lanes: Mutex<Vec<u32>>,
    /// The first lane number never used.
    lanes: AtomicU32,
}

/// A submitter has published `count` entries in `lane`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneWord {
    pub(crate) lane: u32,
    pub(crate) count: u32,
}

impl Shared {
    pub(crate) fn new(engine: Engine, capacity: u32, poller: Arc<Doorbell>) -> Shared {
        let home = Home::here();
        Shared {
            engine,
            capacity: u64::from(capacity),
            accepted: CachePadded::new(AtomicU64::new(0)),
            freed: CachePadded::new(AtomicU64::new(0)),
            settled: CachePadded::new(AtomicU64::new(0)),
            life: AtomicU32::new(home.0),
            home,
            overflowing: CachePadded::new(AtomicBool::new(false)),
            poller,
            reaper: Doorbell::new(),
            eventfd: OnceLock::new(),
            sides: Sides::new((capacity / 8).max(1)),
            shares: Mutex::default(),
            segments: AtomicU32::new(0),
            lists: PartLists::new((capacity as usize / 8).max(1)),
            held_back: AtomicUsize::new(0),
            submitters: AtomicUsize::new(0),
            // Each word stands for at least one accepted entry, so it never overflows.
            published: ArrayQueue::new(slots_of(capacity) as usize),
            last_stats: OnceLock::new(),
            free_lanes: Mutex::default(),
            lanes: AtomicU32::new(0),
        }
    }

    #[inline]
    pub(crate) fn life(&self) -> Life {
        if !self.is_here() {
            return Life::Elsewhere;
        }
        // Relaxed: nothing is handed over with it. Who is told that no more comes has looked at the queues by themselves.
        match self.life.load(Ordering::Relaxed) {
            DEAD => Life::Dead,
            CLOSED => Life::Closed,
            _ => Life::Open,
        }
    }

    /// True if its life is [`Life::Open`].
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        Home(self.life.load(Ordering::Relaxed)).is_here()
    }

    /// False in a forked child of the ring's process.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }

    /// It was closed, or its poller died, which is said of a closed one too.
    pub(crate) fn end(&self, dead: bool) {
        self.life.fetch_max(if dead { DEAD } else { CLOSED }, Ordering::Relaxed);
    }

    /// Entries accepted whose last completion is not visible yet.
    pub(crate) fn outstanding(&self) -> u64 {
        // `settled` first: read last, it could count units that `accepted` did not. Acquire: the completions of what is settled
        // are visible, and what was accepted before is counted.
        let settled = self.settled.load(Ordering::Acquire);
        self.accepted.load(Ordering::Relaxed).saturating_sub(settled)
    }

    /// True if a sleeping reaper sleeps for nothing: nobody else may submit, and nothing is outstanding but what its own thread
    /// has not submitted. Called after the doorbell's barrier: the last submitter that goes after this look finds the sleeper, or
    /// the sleeper's last look finds what is settled by now.
    pub(crate) fn sleeper_is_done(&self) -> bool {
        self.submitters.load(Ordering::Relaxed) == 0
            && self.outstanding() <= self.held_back.load(Ordering::Relaxed) as u64
    }

    /// A segment's share, made when the ring first meets it.
    pub(crate) fn share(&self, target: u32) -> Arc<Share> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let share = shares.entry(target).or_insert_with(|| {
            self.segments.fetch_add(1, Ordering::Relaxed);
            Arc::default()
        });
        Arc::clone(share)
    }

    /// True if entries were pushed to one segment at most.
    #[inline]
    pub(crate) fn has_one_segment(&self) -> bool {
        self.segments.load(Ordering::Relaxed) <= 1
    }

    /// A number for a new lane.
    pub(crate) fn take_lane(&self) -> u32 {
        if !self.is_here() {
            // Nothing will be pushed there, and a thread that is not here may hold the lock.
            return u32::MAX;
        }
        let mut free = self.free_lanes.lock().unwrap_or_else(PoisonError::into_inner);
        free.pop().unwrap_or_else(|| self.lanes.fetch_add(1, Ordering::Relaxed))
    }

    /// One who might have submitted, and has submitted all that it had, is gone.
    pub(crate) fn submitter_gone(&self) {
        // Release: whoever sees nobody left sees all that they submitted.
        if self.submitters.fetch_sub(1, Ordering::Release) == 1 {
            // A reaper that counted on it looks again.
            self.reaper.ring_always();
        }
    }

    /// Takes one unit of capacity, for producers that share them.
    pub(crate) fn take_unit(&self) -> bool {
        self.take_units(self.capacity, 1) > 0
    }

    /// Takes units, unless `most` are taken: so many as are `wanted`, or fewer where few are left, so that units which have no
    /// entry yet keep nobody out. How many.
    pub(crate) fn take_units(&self, most: u64, wanted: u64) -> u64 {
        loop {
            // `freed` first: read last, it could count units that `accepted` does not. Acquire: with the unit comes the place
            // in the SQ that its last user gave back before it.
            let freed = self.freed.load(Ordering::Acquire);
            let accepted = self.accepted.load(Ordering::Relaxed);
            let left = most.saturating_sub(accepted - freed);
            if left == 0 {
                return 0;
            }
            let count = wanted.min(left / AT_ONCE).max(1);
            let took =
                self.accepted.compare_exchange_weak(accepted, accepted + count, Ordering::Relaxed, Ordering::Relaxed);
            if took.is_ok() {
                return count;
            }
        }
    }

    /// Gives back units whose entries no core has seen.
    pub(crate) fn return_units(&self, count: u64) {
        self.accepted.fetch_sub(count, Ordering::Relaxed);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("capacity", &self.capacity)
            .field("outstanding", &self.outstanding())
            .field("life", &self.life())
            .finish_non_exhaustive()
    }
}

/// The pool of side blocks: an eighth of the ring. A block is owned by whoever holds its number. They begin at 1, so that an entry
/// without one has a zero there, as nearly everywhere.
pub(crate) struct Sides {
    blocks: Box<[UnsafeCell<Side>]>,
    free: ArrayQueue<u32>,
}

// SAFETY: a block is touched only by the one that took its index out of `free`, or was handed it with an entry.
unsafe impl Sync for Sides {}
// SAFETY: the pointers in the blocks are owned counts of `FenceInner`, which is Send and Sync.
unsafe impl Send for Sides {}

/// What an entry carries that does not fit into its cache line: limits, and several fences, each an owned `Arc` as a raw
/// pointer.
struct Side {
    limits: [u32; 2],
    fences: [*const FenceInner; MAX_FENCES],
    count: usize,
}

impl Sides {
    fn new(count: u32) -> Sides {
        let empty = || UnsafeCell::new(Side { limits: [0; 2], fences: [ptr::null(); MAX_FENCES], count: 0 });
        let free = ArrayQueue::new(count as usize);
        for number in 1..=count {
            free.push(number).expect("the queue has a place for each block");
        }
        Sides { blocks: (0..count).map(|_| empty()).collect(), free }
    }

    pub(crate) fn count(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that nobody has.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn unused(&self) -> usize {
        self.free.len()
    }

    fn block(&self, number: u32) -> &UnsafeCell<Side> {
        &self.blocks[Sides::index(number)]
    }

    /// A block's place among all.
    pub(crate) fn index(number: u32) -> usize {
        number as usize - 1
    }

    /// Takes a block for these, at most [`MAX_FENCES`] fences; `None` if all blocks are in use.
    pub(crate) fn fill<'a>(&self, limits: [u32; 2], fences: impl Iterator<Item = &'a Arc<FenceInner>>) -> Option<u32> {
        let number = self.free.pop()?;
        // SAFETY: the number just came out of `free`, so the block is ours.
        let side = unsafe { &mut *self.block(number).get() };
        (side.limits, side.count) = (limits, 0);
        for (place, fence) in side.fences.iter_mut().zip(fences) {
            *place = Arc::into_raw(Arc::clone(fence));
            side.count += 1;
        }
        Some(number)
    }

    /// The limits in a block, in nanoseconds; 0 for none.
    ///
    /// # Safety
    /// The caller holds the block `number`.
    pub(crate) unsafe fn limits(&self, number: u32) -> [u64; 2] {
        // SAFETY: the caller holds the block.
        unsafe { &*self.block(number).get() }.limits.map(|micros| u64::from(micros) * 1000)
    }

    /// Shows the fences of a block.
    ///
    /// # Safety
    /// The caller holds the block `number`, and does not empty it meanwhile.
    pub(crate) unsafe fn fences(&self, number: u32) -> impl Iterator<Item = Arc<FenceInner>> + '_ {
        // SAFETY: the caller holds the block.
        let side = unsafe { &*self.block(number).get() };
        side.fences[..side.count].iter().map(|&fence| {
            // SAFETY: each pointer is an owned count from `into_raw`; a new one is made for the caller.
            unsafe {
                Arc::increment_strong_count(fence);
                Arc::from_raw(fence)
            }
        })
    }

    /// Lets go of a block's fences and gives it back.
    ///
    /// # Safety
    /// The caller holds the block `number`, and forgets it.
    pub(crate) unsafe fn empty(&self, number: u32) {
        // SAFETY: the caller holds the block.
        let side = unsafe { &mut *self.block(number).get() };
        for fence in &side.fences[..side.count] {
            // SAFETY: an owned count from `into_raw`, let go of once: `count` is reset below.
            drop(unsafe { Arc::from_raw(*fence) });
        }
        side.count = 0;
        self.free.push(number).expect("a block that was out has its place");
    }
}

impl Drop for Sides {
    fn drop(&mut self) {
        for side in &mut self.blocks {
            let side = side.get_mut();
            for fence in &side.fences[..side.count] {
                // SAFETY: an owned count from `into_raw`; blocks that were emptied have none.
                drop(unsafe { Arc::from_raw(*fence) });
            }
        }
    }
}
