//! Pushing: from an entry to one cache line in a queue, or back to the caller.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::shared::{LaneWord, Life, Shared};
use crate::core::{Control, Controls};
use crate::entry::{Entry, Transfer};
use crate::spsc::{self, Producer};
use crate::sqe::Sqe;
use crate::sync::Ordering;

/// Why an entry was not accepted, and the entry, unchanged.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct PushError {
    /// The entry, to push again.
    pub entry: Entry,
    /// Why.
    pub reason: Refusal,
}

/// Why a push was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// As many entries are outstanding as the ring has capacity for, those included that are pushed and not submitted.
    /// `EAGAIN` in io_uring's terms. For each completion that is reaped there is room for one more, but for one with `MORE`.
    #[error("the ring is full: {capacity} entries are outstanding; submit, reap completions and push again")]
    Full {
        /// The ring's capacity.
        capacity: u32,
    },
    /// Every side block is in use: an entry with two or more fences holds one from push until it leaves the gate, and a
    /// ring has an eighth as many as its capacity, at least one.
    #[error(
        "all {count} side blocks are in use by entries with several fences; push again when some have passed the gate, or give \
         the entry one fence"
    )]
    NoSideBlock {
        /// How many there are.
        count: u32,
    },
    /// Too many fences.
    #[error("the entry waits for {0} fences, at most {max} are possible; a timeline can stand for many", max = Entry::MAX_FENCES)]
    TooManyFences(usize),
    /// Too long for one entry.
    #[error("the entry moves {0} bytes, an entry moves less than 2 GiB; split it")]
    TooLong(u64),
    /// The local range belongs to another engine.
    #[error("the local range is registered with another engine than the ring's; register it with {0:?}")]
    ForeignSlice(String),
    /// The remote range belongs to another engine.
    #[error("the segment {0:?} was opened by another engine than the ring's; open it with the ring's")]
    ForeignSegment(String),
    /// The local range's region is unregistered.
    #[error("the local range {0} is not registered any more")]
    Unregistered(crate::RawMemory),
    /// The segment was reopened since.
    #[error("the segment handle {0:?} is stale: the segment was reopened; use the new handle")]
    StaleSegment(String),
    /// The remote range passes the end of the address space.
    #[error("the remote range {address:#x}+{len:#x} passes the end of the address space")]
    RemoteRange {
        /// Its address.
        address: u64,
        /// Its length.
        len: u64,
    },
    /// The ring was dropped; only a [`Submitter`] sees this.
    #[error("the ring is closed")]
    Closed,
    /// The ring's poller died.
    #[error("the ring's poller died: reap what is left and build a new ring")]
    PollerDead,
}

/// One queue's producing end: the owner's, or a submitter's lane.
#[derive(Debug)]
pub(super) struct Pusher {
    pub(super) shared: Arc<Shared>,
    sq: Producer<Sqe>,
    units: Units,
}

/// How a producer takes units of capacity.
#[derive(Debug)]
enum Units {
    /// Alone: counted here, and told when published.
    Own { accepted: u64, freed: u64 },
    /// With others.
    Shared,
}

impl Pusher {
    pub(super) fn owner(shared: Arc<Shared>, sq: Producer<Sqe>) -> Pusher {
        Pusher { shared, sq, units: Units::Own { accepted: 0, freed: 0 } }
    }

    /// From now on there are other producers.
    pub(super) fn share(&mut self) {
        if let Units::Own { accepted, .. } = self.units {
            self.shared.accepted.store(accepted, Ordering::Relaxed);
            self.units = Units::Shared;
        }
    }

    #[inline]
    fn take_unit(&mut self) -> bool {
        let Units::Own { accepted, freed } = &mut self.units else { return self.shared.take_unit() };
        if *accepted - *freed >= self.shared.capacity {
            // Acquire: with the unit comes the place in the SQ that its last user gave back before it.
            *freed = self.shared.freed.load(Ordering::Acquire);
            if *accepted - *freed >= self.shared.capacity {
                return false;
            }
        }
        *accepted += 1;
        true
    }

    /// Accepts the entry, unpublished, or gives it back.
    #[inline]
    #[allow(clippy::result_large_err, reason = "the error is the caller's entry")]
    pub(super) fn push(&mut self, mut entry: Entry) -> Result<(), PushError> {
        match self.lower(&entry) {
            Ok(mut sqe) => {
                if let Some(fence) = entry.fence.take().filter(|_| sqe.side == Sqe::NO_SIDE) {
                    sqe.fence = Arc::into_raw(fence.0);
                }
                let written = self.sq.write(sqe);
                debug_assert!(written.is_ok(), "a unit of capacity comes with a place in the queue");
                Ok(())
            }
            Err(reason) => Err(PushError { entry, reason }),
        }
    }

    /// Checks the entry and takes what it needs. Its single fence is moved in by the caller.
    #[inline]
    fn lower(&mut self, entry: &Entry) -> Result<Sqe, Refusal> {
        match self.shared.life() {
            Life::Open => {}
            Life::Closed => return Err(Refusal::Closed),
            Life::Dead => return Err(Refusal::PollerDead),
        }
        let mut sqe = Sqe { op: entry.op, user_data: entry.user_data, fence: ptr::null(), ..Sqe::EMPTY };
        if let Some(transfer) = &entry.transfer {
            self.check(transfer)?;
            sqe.local = transfer.local.address;
            sqe.len = transfer.local.len as u32;
            sqe.region = Arc::as_ptr(&transfer.local.region);
            sqe.remote = transfer.remote.address;
            sqe.target = transfer.remote.segment.inner.target;
        }
        if !entry.more_fences.is_empty() {
            sqe.side = self.take_side(entry)?;
        }
        if let Some(transfer) = &entry.transfer
            && !transfer.local.region.begin_use()
        {
            self.give_side_back(sqe.side);
            return Err(Refusal::Unregistered(transfer.local.region.memory));
        }
        if !self.take_unit() {
            sqe.end_use();
            self.give_side_back(sqe.side);
            return Err(Refusal::Full { capacity: self.shared.capacity as u32 });
        }
        Ok(sqe)
    }

    fn check(&self, transfer: &Transfer) -> Result<(), Refusal> {
        let Transfer { local, remote } = transfer;
        let engine = &self.shared.engine;
        if local.region.engine != engine.id() {
            return Err(Refusal::ForeignSlice(engine.name().to_owned()));
        }
        let segment = &remote.segment;
        if segment.inner.engine != engine.id() {
            return Err(Refusal::ForeignSegment(segment.name().to_owned()));
        }
        if segment.is_stale() {
            return Err(Refusal::StaleSegment(segment.name().to_owned()));
        }
        if local.len > i32::MAX as u64 {
            return Err(Refusal::TooLong(local.len));
        }
        if remote.address.checked_add(local.len).is_none() {
            return Err(Refusal::RemoteRange { address: remote.address, len: local.len });
        }
        Ok(())
    }

    fn take_side(&self, entry: &Entry) -> Result<u32, Refusal> {
        let fences = 1 + entry.more_fences.len();
        if fences > Entry::MAX_FENCES {
            return Err(Refusal::TooManyFences(fences));
        }
        let all = entry.fence.iter().chain(&entry.more_fences).map(|fence| &fence.0);
        let sides = &self.shared.sides;
        sides.fill(all).ok_or(Refusal::NoSideBlock { count: sides.count() as u32 })
    }

    fn give_side_back(&self, side: u32) {
        if side != Sqe::NO_SIDE {
            // SAFETY: the block was taken for an entry that is not pushed; its index is forgotten here.
            unsafe { self.shared.sides.empty(side) };
        }
    }

    /// Entries pushed and not submitted.
    pub(super) fn unpublished(&self) -> usize {
        self.sq.unpublished()
    }

    /// Units of capacity taken by entries that are not submitted, so that nobody may wait for them.
    pub(super) fn held_back(&self) -> usize {
        match self.units {
            Units::Own { .. } => 0,
            Units::Shared => self.unpublished(),
        }
    }

    /// Shows the core everything that was pushed, without waking it.
    #[inline]
    fn publish(&mut self) -> usize {
        if let Units::Own { accepted, .. } = self.units {
            // Before the entries: nobody sees more units given back than taken.
            self.shared.accepted.store(accepted, Ordering::Relaxed);
        }
        self.sq.publish()
    }

    /// Shows the core everything that was pushed and wakes it if it sleeps.
    #[inline]
    pub(super) fn submit(&mut self) -> usize {
        let count = self.publish();
        if count > 0 {
            self.shared.poller.ring_always();
        }
        count
    }
}

/// Pushes into a ring from another thread than its owner's. Each has a lane of its own to the poller: no other submitter's
/// entries come between those that one of them submits at once, and a preempted one holds up nobody else. Clone it for each thread; a clone's lane
/// takes 64 bytes for each entry of the ring's capacity.
///
/// Entries become visible to the poller with [`submit`](Self::submit). Dropping a submitter submits what it has pushed.
#[derive(Debug)]
pub struct Submitter {
    pusher: Pusher,
    controls: Arc<Controls>,
    ring: u32,
    lane: u32,
}

impl Submitter {
    pub(super) fn new(shared: Arc<Shared>, controls: Arc<Controls>, ring: u32) -> Submitter {
        let (sq, entries) = spsc::ring(shared.capacity as usize);
        let lane = shared.take_lane();
        shared.submitters.fetch_add(1, Relaxed);
        controls.send(Control::Lane { ring, lane, entries });
        Submitter { pusher: Pusher { shared, sq, units: Units::Shared }, controls, ring, lane }
    }

    /// Accepts an entry, or gives it back. Never blocks and calls no driver. The poller sees it after
    /// [`submit`](Self::submit).
    ///
    /// # Errors
    /// [`PushError`] with the entry in it, unchanged.
    #[allow(clippy::result_large_err, reason = "the error is the caller's entry")]
    pub fn push(&mut self, entry: Entry) -> Result<(), PushError> {
        self.pusher.push(entry)
    }

    /// Shows the poller everything that was pushed, at once, and wakes it if it sleeps. Returns how many entries. Never
    /// blocks.
    pub fn submit(&mut self) -> usize {
        let count = self.pusher.publish();
        if count > 0 {
            let word = LaneWord { lane: self.lane, count: count as u32 };
            let pushed = self.pusher.shared.published.push(word);
            debug_assert!(pushed.is_ok(), "each word stands for an outstanding entry, and there is a place for each");
            self.pusher.shared.poller.ring_always();
        }
        count
    }
}

impl Clone for Submitter {
    fn clone(&self) -> Submitter {
        Submitter::new(Arc::clone(&self.pusher.shared), Arc::clone(&self.controls), self.ring)
    }
}

impl Drop for Submitter {
    fn drop(&mut self) {
        self.submit();
        self.controls.send(Control::LaneGone { ring: self.ring, lane: self.lane });
        let shared = &self.pusher.shared;
        if shared.submitters.fetch_sub(1, Relaxed) == 1 {
            // A reaper that counted on us looks again.
            shared.reaper.ring_always();
        }
    }
}
