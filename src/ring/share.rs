//! Shares: how much of a ring the entries of one segment, or of one Store, may take, so that a sick peer does not eat it.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use crossbeam_utils::CachePadded;

use crate::engine::Segment;
use crate::sync::{AtomicU64, Ordering};

/// One segment's part of one ring. Shared by the ring's producers and its core.
#[derive(Debug, Default)]
pub(crate) struct Share {
    /// Units taken by the segment's entries, ever. Written by producers.
    taken: CachePadded<AtomicU64>,
    /// Units given back, ever. Written by the core.
    given_back: CachePadded<AtomicU64>,
    /// Entries whose result is told while the transport still has them. Written by the core.
    overdue: AtomicU32,
}

/// A segment has all that it may have: so many entries, and whether that is because some are overdue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exhausted {
    pub(crate) limit: u32,
    pub(crate) overdue: bool,
}

impl Share {
    /// Called by the core alone, so that it needs no exchange.
    #[inline]
    pub(crate) fn give_back(&self, count: u64) {
        let given_back = self.given_back.load(Ordering::Relaxed);
        self.given_back.store(given_back + count, Ordering::Relaxed);
    }

    /// An entry became overdue.
    pub(crate) fn add_overdue(&self) {
        self.overdue.fetch_add(1, Ordering::Relaxed);
    }

    /// An overdue entry became quiet.
    pub(crate) fn remove_overdue(&self) {
        self.overdue.fetch_sub(1, Ordering::Relaxed);
    }
}

/// In the number of a peer: it is a Store client, not a segment.
pub(crate) const STORE: u32 = 1 << 31;

/// A peer's place in a table that has both, segments and Store clients.
#[inline]
pub(crate) fn place(peer: u32) -> usize {
    ((peer & !STORE) as usize) << 1 | (peer >> 31) as usize
}

/// A share as one producer knows it.
#[derive(Debug)]
pub(crate) struct Known {
    share: Arc<Share>,
    /// `None` for a Store.
    segment: Option<Segment>,
    /// Units given back, as last seen: the core's count is looked at only when this one leaves no room, because to read what the
    /// other side keeps writing takes a cache miss.
    given_back: u64,
}

impl Known {
    /// Takes a unit. `alone`: the ring has pushed to no other segment, so there is nobody to leave room for. `sole`: there is no
    /// other producer, so it needs no exchange.
    #[inline]
    pub(crate) fn take(&mut self, capacity: u64, alone: bool, sole: bool) -> Result<(), Exhausted> {
        if !sole {
            return self.take_beside_others(capacity, alone);
        }
        let taken = self.share.taken.load(Ordering::Relaxed);
        if !alone {
            self.check(taken, capacity)?;
        }
        self.share.taken.store(taken + 1, Ordering::Relaxed);
        Ok(())
    }

    #[inline(never)]
    fn take_beside_others(&mut self, capacity: u64, alone: bool) -> Result<(), Exhausted> {
        let mut taken = self.share.taken.load(Ordering::Relaxed);
        loop {
            if !alone {
                self.check(taken, capacity)?;
            }
            let took = self.share.taken.compare_exchange_weak(taken, taken + 1, Ordering::Relaxed, Ordering::Relaxed);
            match took {
                Ok(_) => return Ok(()),
                Err(now) => taken = now,
            }
        }
    }

    /// Whether there is room for one more than `taken`.
    #[inline(never)]
    fn check(&mut self, taken: u64, capacity: u64) -> Result<(), Exhausted> {
        let overdue = self.share.overdue.load(Ordering::Relaxed) > 0;
        let limit = if overdue { capacity / 8 } else { capacity * 3 / 4 }.max(1);
        // Of units taken after that count was read some may be given back already.
        if taken.saturating_sub(self.given_back) >= limit {
            self.given_back = self.share.given_back.load(Ordering::Relaxed);
        }
        if taken.saturating_sub(self.given_back) >= limit {
            return Err(Exhausted { limit: limit as u32, overdue });
        }
        Ok(())
    }

    /// True if the segment was reopened since.
    #[inline]
    pub(crate) fn is_stale(&self) -> bool {
        self.segment.as_ref().is_some_and(Segment::is_stale)
    }

    /// Takes a unit back that no core has seen.
    pub(crate) fn untake(&self) {
        self.share.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The shares that one producer has met, by the peer's [`place`], without a lock.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    known: Vec<Option<Known>>,
}

impl Shares {
    /// A peer's share, if it was met.
    #[inline]
    pub(crate) fn known(&self, target: u32) -> Option<&Known> {
        self.known.get(place(target))?.as_ref()
    }

    /// The same, to take a unit of.
    #[inline]
    pub(crate) fn known_mut(&mut self, target: u32) -> Option<&mut Known> {
        self.known.get_mut(place(target))?.as_mut()
    }

    /// A peer's share; `meet` finds or makes it, and the segment, the first time.
    #[inline(always)]
    pub(crate) fn of(&mut self, target: u32, meet: impl FnOnce(u32) -> (Arc<Share>, Option<Segment>)) -> &mut Known {
        let at = place(target);
        if self.known(target).is_none() {
            self.add(at, meet(target));
        }
        self.known[at].as_mut().expect("it was there, or was added")
    }

    #[cold]
    fn add(&mut self, at: usize, (share, segment): (Arc<Share>, Option<Segment>)) {
        if self.known.len() <= at {
            self.known.resize_with(at + 1, || None);
        }
        self.known[at] = Some(Known { share, segment, given_back: 0 });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_three_quarters_and_an_eighth_with_something_overdue() {
        let share = Arc::<Share>::default();
        let mut shares = Shares::default();
        let known = shares.of(3, |_| (Arc::clone(&share), None));
        for _ in 0..12 {
            known.take(16, false, false).unwrap();
        }
        assert_eq!(known.take(16, false, false), Err(Exhausted { limit: 12, overdue: false }));
        known.take(16, true, true).unwrap();
        share.add_overdue();
        for _ in 0..12 {
            share.give_back(1);
        }
        known.take(16, false, false).unwrap();
        assert_eq!(known.take(16, false, false), Err(Exhausted { limit: 2, overdue: true }));
        share.remove_overdue();
        known.take(16, false, false).unwrap();
    }
}
