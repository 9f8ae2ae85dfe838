//! Pushing: from an entry to one cache line in a queue, or back to the caller.

use std::mem;
use std::num::NonZeroU64;
use std::ptr;
use std::sync::Arc;

use super::future::{EntryFuture, Route};
use super::parts::{MAX_PARTS, NoList, PartList};
use super::regions::Regions;
use super::share::{Exhausted, Known, Share, Shares};
use super::shared::{CANCEL_RESERVE, LaneWord, Life, Shared};
use crate::core::{Control, Controls};
use crate::engine::{self, Segment};
use crate::entry::{Entry, EntryFlags, Numbers, Other, Parts, Payload, Transfer};
use crate::fence::{Fence, FenceInner, Kind, Progress};
use crate::region::{Begun, RegionInner, Slice};
use crate::spsc::{self, Leftover, Producer};
use crate::sqe::{Opcode, Sqe, op_flags};
use crate::store::request::{self, MAX_KEY, Request, Unusable};
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
    /// As many entries are outstanding as the ring has capacity for, those included that are pushed and not submitted. A Cancel
    /// may go up to [`Ring::CANCEL_RESERVE`](crate::Ring::CANCEL_RESERVE) beyond that, where there is a place in the submission queue.
    /// `EAGAIN` in io_uring's terms. For each completion that is reaped there is room for one more, but for one with `MORE`.
    ///
    /// While a ring has [`Submitter`]s, whoever has pushed and not submitted yet may hold room for up to 15 entries more, which
    /// it is expected to push before it submits: as many as the last time, and an eighth of the room that there was at most.
    #[error("the ring is full: {capacity} entries are outstanding; submit, reap completions and push again")]
    Full {
        /// The ring's capacity.
        capacity: u32,
    },
    /// Every side block is in use: an entry with two or more fences, or with a limit, holds one from push until it leaves the
    /// gate, and a ring has an eighth as many as its capacity, at least one.
    #[error(
        "all {count} side blocks are in use by entries with several fences or with limits; push again when some have passed \
         the gate, or give the entry one fence and no limit"
    )]
    NoSideBlock {
        /// How many there are.
        count: u32,
    },
    /// Too many fences.
    #[error("the entry waits for {0} fences, at most {max} are possible; a timeline can stand for many", max = Entry::MAX_FENCES)]
    TooManyFences(usize),
    /// Every list of parts is in use: a vectored entry holds one until its local ranges are quiet, and a ring has an eighth as
    /// many as its capacity, at least one.
    #[error("all {count} part lists are in use by vectored entries; push again when some of them have completed")]
    NoPartList {
        /// How many there are.
        count: u32,
    },
    /// Too many parts.
    #[error("the entry has {0} parts, at most {max} are possible; split it", max = Entry::MAX_PARTS)]
    TooManyParts(usize),
    /// The parts go to more than one segment.
    #[error("part {part} goes to segment {segment:?}, those before it to another; split the entry by segments")]
    OtherSegment {
        /// The first part that goes elsewhere, counted from 0.
        part: u32,
        /// Where it goes.
        segment: Box<str>,
    },
    /// A local page lies outside.
    #[error(
        "local page {page} of {size} bytes: the local range has {len} bytes, and only whole pages of it can be used"
    )]
    LocalPage {
        /// Its number.
        page: u32,
        /// Bytes of a page.
        size: u64,
        /// The local range's bytes.
        len: u64,
    },
    /// As many entries and messages are outstanding at the target of a message as it has capacity for.
    #[error(
        "the ring that the message is for is full: it has {capacity} outstanding; push again when it has reaped some"
    )]
    TargetFull {
        /// The target's capacity.
        capacity: u32,
    },
    /// The target of a message is closed, or its poller died.
    #[error("the ring that the message is for is closed, or its poller died")]
    TargetClosed,
    /// The timeline that the entry was to move has as many values reserved beyond its completed prefix as its window holds.
    #[error("{window} values are reserved and not in the completed prefix; wait for some, or make a larger window")]
    WindowFull {
        /// The window.
        window: u32,
    },
    /// Too long for one entry.
    #[error("the entry moves {0} bytes, an entry moves less than 2 GiB; split it")]
    TooLong(u64),
    /// The local range belongs to another engine.
    #[error("the local range is registered with another engine than the ring's; register it with {0:?}")]
    ForeignSlice(Box<str>),
    /// The remote range belongs to another engine.
    #[error("the segment {0:?} was opened by another engine than the ring's; open it with the ring's")]
    ForeignSegment(Box<str>),
    /// The local range's region is unregistered.
    #[error("the local range {0} is not registered any more")]
    Unregistered(crate::RawMemory),
    /// The Store client belongs to another engine.
    #[error("the client of the Store {0:?} belongs to another engine than the ring's; connect one with the ring's")]
    ForeignStore(Box<str>),
    /// The key cannot be used.
    #[error("the key {0:?} cannot be used: a key has 1 to {MAX_KEY} bytes, none of them zero")]
    Key(Box<str>),
    /// The Put has no bytes: a Store keeps no empty objects.
    #[error("the Put of {0:?} has no bytes; a Store keeps objects of at least 1")]
    NoBytes(Box<str>),
    /// The local range's region is not registered with the Store.
    #[error("the local range {0} is not registered with the Store; register it with store::Client::register")]
    NotInStore(crate::RawMemory),
    /// The segment was reopened since.
    #[error("the segment handle {0:?} is stale: the segment was reopened; use the new handle")]
    StaleSegment(Box<str>),
    /// The segment's entries hold three quarters of the ring, the most once the ring has pushed to more than one segment.
    #[error("entries of the segment {segment:?} hold {limit} units, its share of the ring; reap its completions first")]
    SegmentShare {
        /// The segment's name.
        segment: Box<str>,
        /// How many entries it may have.
        limit: u32,
    },
    /// The segment is sick: an entry of its is overdue, its result told with `MORE` and no `NOTIF` yet, and until that comes
    /// the segment's share is an eighth of the ring.
    #[error(
        "the segment {segment:?} has an overdue entry and holds {limit} units, the share of a sick one; wait for NOTIF"
    )]
    SegmentOverdue {
        /// The segment's name.
        segment: Box<str>,
        /// How many entries it may have.
        limit: u32,
    },
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
    /// This is a forked child of the ring's process, which has the ring's thread.
    #[error("the ring belongs to the process that forked this one; build another here, with an engine built here")]
    Forked,
    /// The ring's poller died.
    #[error("the ring's poller died: reap what is left and build a new ring")]
    PollerDead,
}

/// A submit found its last entry linked to a follower that was not pushed. Nothing was submitted, and nothing is lost: push
/// the rest of the chain and submit again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the last entry is linked to a next one, which was not pushed: a chain is submitted whole; push its end, then submit"
)]
pub struct OpenChain;

/// A chain of which none was accepted.
#[derive(Debug, thiserror::Error)]
#[error("entry {at} of {}: {reason}", entries.len())]
pub struct PushChainError {
    /// All of its entries, unchanged.
    pub entries: Vec<Entry>,
    /// Which one was refused.
    pub at: usize,
    /// Why.
    pub reason: Refusal,
}

/// One queue's producing end: the owner's, or a submitter's lane.
#[derive(Debug)]
pub(super) struct Pusher {
    /// Before the queue, so that it is dropped before it: what is left in a queue may still be taken.
    begun: Begun,
    sq: Producer<Sqe>,
    units: Units,
    /// How many entries were submitted the last time.
    batch: u64,
    shares: Shares,
    regions: Regions,
    pub(super) controls: Arc<Controls>,
    pub(super) ring: u32,
    /// After the queue, and the controls with other queues in them, so that it is dropped after them: entries that no core took
    /// end their uses of regions, which the engine keeps.
    pub(super) shared: Arc<Shared>,
}

/// Most units that a producer among others takes at once.
const UNITS_AT_ONCE: u64 = 16;

/// How a producer takes units of capacity.
#[derive(Debug)]
enum Units {
    /// Alone: each entry written has taken one, which is told when it is published. So the positions that have a unit are known
    /// ahead, and [open](Producer::open).
    Own,
    /// With others, by exchanges on a shared word. Each takes some at once, as many as are missing to the size of the last
    /// batch. Those without an entry yet are the open positions, and go back with the next submit.
    Shared,
}

impl Pusher {
    pub(super) fn owner(shared: Arc<Shared>, controls: Arc<Controls>, ring: u32, sq: Producer<Sqe>) -> Pusher {
        Pusher {
            begun: Begun::NONE,
            shared,
            controls,
            ring,
            sq,
            units: Units::Own,
            batch: 0,
            shares: Shares::default(),
            regions: Regions::default(),
        }
    }

    /// Asks for what a submit writes, if that is some entries away.
    #[inline]
    pub(super) fn expect_submit(&self) {
        if self.batch >= 8 {
            self.sq.expect_publish();
        }
    }

    /// Looks whether the ring takes entries. If not, [`lower`](Self::lower) says so at the next push: there is no unit left to take
    /// without it. Once for each run of pushes, which need not look then.
    #[inline]
    pub(super) fn look(&mut self) {
        if !self.shared.is_open() {
            self.untake_units();
        }
    }

    /// From now on there are other producers.
    pub(super) fn share(&mut self) {
        if let Units::Own = self.units {
            self.shared.accepted.store(self.sq.position(), Ordering::Relaxed);
            self.sq.shut();
            self.units = Units::Shared;
        }
    }

    /// Takes a unit for the next entry, whose position is open then.
    #[inline]
    fn take_unit(&mut self) -> bool {
        self.sq.is_open() || self.take_unit_anew(self.shared.capacity, u64::MAX)
    }

    /// The same with a look at what the core gave back, unless `most` are taken. Opens at most `many` positions.
    #[inline(never)]
    fn take_unit_anew(&mut self, most: u64, many: u64) -> bool {
        if self.sq.go_on() {
            return true;
        }
        if !self.shared.is_open() {
            return false;
        }
        let next = self.sq.position();
        let end = match self.units {
            // Acquire: with the unit comes the place in the SQ that its last user gave back before it.
            Units::Own => (self.shared.freed.load(Ordering::Acquire) + most).min(next.saturating_add(many)),
            Units::Shared => {
                let missing = self.batch.saturating_sub(self.sq.unpublished() as u64);
                next + self.shared.take_units(most, missing.clamp(1, many.min(UNITS_AT_ONCE)))
            }
        };
        let there_is_one = self.sq.open(end);
        debug_assert!(there_is_one || end <= next, "a unit of capacity comes with a place in the queue");
        there_is_one
    }

    /// Takes a unit of the reserve, which comes without a place in the queue.
    #[cold]
    fn take_reserved(&mut self) -> bool {
        self.sq.has_room_now() && self.take_unit_anew(self.shared.capacity + u64::from(CANCEL_RESERVE), 1)
    }

    /// Accepts the entry, unpublished, or gives it back. Always in its caller, where what is known of the entry goes from
    /// registers into the queue.
    #[inline(always)]
    pub(super) fn push(&mut self, mut entry: Entry) -> Result<(), PushError> {
        let Some(numbers) = entry.numbers() else { return self.push_owning(entry) };
        let fence = entry.fence.take();
        let &Entry { op, flags, op_flags, len, user_data, .. } = &entry;
        // There is nothing to drop.
        mem::forget(entry);
        let lowered = match &numbers {
            Numbers::Transfer(transfer) => self.take_transfer(transfer).map(|region| transfer.lowered(region)),
            &Numbers::Values { local, remote } => self.take_unit().then_some(Sqe { len, local, remote, ..Sqe::EMPTY }),
        };
        if let Some(sqe) = lowered {
            self.write(Sqe { op, flags, op_flags, user_data, ..sqe }, fence);
            return Ok(());
        }
        // Made anew from its numbers, so that it is in memory here only.
        self.push_owning(Entry { flags, user_data, fence, ..Entry::about(op, op_flags, len, numbers.payload()) })
    }

    /// The same for any entry. Apart, because an SQE that is looked at and taken back is built in memory, not in registers.
    #[inline(never)]
    fn push_owning(&mut self, mut entry: Entry) -> Result<(), PushError> {
        match self.lower(&entry) {
            Ok(sqe) => {
                let fence = entry.fence.take();
                self.write(sqe, fence);
                Ok(())
            }
            Err(reason) => Err(PushError { entry, reason }),
        }
    }

    /// Accepts the entry, which feeds a fence of its own.
    pub(super) fn push_fenced(&mut self, entry: Entry) -> Result<Fence, PushError> {
        self.push_feeding(entry, || {
            let fence = Fence::new(Kind::Told);
            Ok((Arc::clone(&fence.0), fence))
        })
    }

    /// Accepts the entry, whose completions go to a future.
    pub(super) fn push_future(&mut self, entry: Entry) -> Result<EntryFuture, PushError> {
        let (controls, ring) = (Arc::clone(&self.controls), self.ring);
        self.push_feeding(entry, || {
            let end = FenceInner::new(Kind::Routed(Box::new(Route::new())));
            Ok((Arc::clone(&end), EntryFuture::new(end, controls, ring)))
        })
    }

    /// Accepts the entry, which moves a timeline, and returns its value there.
    pub(super) fn push_signalling(&mut self, entry: Entry, progress: &Progress) -> Result<u64, PushError> {
        self.push_feeding(entry, || match progress.cell.reserve() {
            Some((value, place)) => Ok((place, value)),
            None => Err(Refusal::WindowFull { window: progress.window() }),
        })
    }

    /// `signal` gives what the entry feeds, once nothing else is in the way.
    fn push_feeding<T>(
        &mut self,
        mut entry: Entry,
        signal: impl FnOnce() -> Result<(Arc<FenceInner>, T), Refusal>,
    ) -> Result<T, PushError> {
        let mut sqe = match self.lower(&entry) {
            Ok(sqe) => sqe,
            Err(reason) => return Err(PushError { entry, reason }),
        };
        match signal() {
            Ok((signal, answer)) => {
                if signal.route().is_some() {
                    sqe.op_flags |= op_flags::ROUTED;
                }
                sqe.signal = Arc::into_raw(signal);
                self.write(sqe, entry.fence.take());
                Ok(answer)
            }
            Err(reason) => {
                self.write(sqe, None);
                self.unpush();
                Err(PushError { entry, reason })
            }
        }
    }

    /// Accepts all of the entries, or none.
    pub(super) fn push_chain(&mut self, entries: Vec<Entry>) -> Result<(), PushChainError> {
        for at in 0..entries.len() {
            match self.lower(&entries[at]) {
                Ok(sqe) => self.write(sqe, entries[at].fence.clone()),
                Err(reason) => {
                    (0..at).for_each(|_| self.unpush());
                    return Err(PushChainError { entries, at, reason });
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn write(&mut self, mut sqe: Sqe, fence: Option<Fence>) {
        if let Some(fence) = fence.filter(|_| sqe.side == Sqe::NO_SIDE) {
            sqe.fence = Arc::into_raw(fence.0);
        }
        if sqe.is_tied() {
            sqe.op_flags |= op_flags::TIED;
        }
        let written = self.sq.write_opened(sqe);
        debug_assert!(written.is_ok(), "a unit was taken");
    }

    /// Takes back the entry pushed last, which is not published.
    fn unpush(&mut self) {
        if let Some(mut sqe) = self.sq.unwrite() {
            self.give_share_back(&sqe);
            self.let_go(&mut sqe);
            sqe.discard();
            self.untake_units();
        }
    }

    /// Gives back the units that have no entry: one that was taken for an entry which is refused, and others with it, because there
    /// may be no submit that gives them back.
    fn untake_units(&mut self) {
        let count = self.sq.opened();
        self.sq.shut();
        if let Units::Shared = self.units
            && count > 0
        {
            self.shared.return_units(count);
        }
    }

    /// Takes what a transfer to a segment needs that was met, unless something is in the way: then [`lower`](Self::lower) finds
    /// out what. Its region, with a use begun.
    #[inline(always)]
    fn take_transfer(&mut self, transfer: &Transfer) -> Option<*const RegionInner> {
        let Transfer { local, remote } = transfer;
        let engine = self.shared.engine.id();
        let usable = local.engine() == engine && remote.engine() == engine;
        if usable && check_range(local.len, remote.address).is_ok() && self.take_met_share(remote.target) {
            if let Some(region) = self.begin_use(local) {
                if self.take_unit() {
                    return Some(region);
                }
                // SAFETY: it was begun last, for an entry that is not pushed.
                unsafe { self.begun.undo(region) };
            }
            self.untake_share(remote.target);
        }
        None
    }

    /// Begins a use of the region that a slice of the ring's engine is of; `None` if that is unregistered.
    #[inline]
    fn begin_use(&mut self, slice: &Slice) -> Option<*const RegionInner> {
        self.begun.again(slice.region).or_else(|| self.begin_other(slice.region))
    }

    #[inline(never)]
    fn begin_other(&mut self, region: NonZeroU64) -> Option<*const RegionInner> {
        let region = self.regions.of(region, &self.shared.engine)?;
        self.begun.begin(region)
    }

    /// Checks the entry and takes what it needs. Its single fence is moved in by the caller.
    fn lower(&mut self, entry: &Entry) -> Result<Sqe, Refusal> {
        match self.shared.life() {
            Life::Open => {}
            Life::Closed => return Err(Refusal::Closed),
            Life::Dead => return Err(Refusal::PollerDead),
            Life::Elsewhere => return Err(Refusal::Forked),
        }
        let &Entry { op, flags, op_flags, len, user_data, .. } = entry;
        let mut sqe = Sqe { op, flags, op_flags, len, user_data, ..Sqe::EMPTY };
        match &entry.payload {
            &Payload::Other(Other::Values { local, remote, ref target }) => {
                if target.as_ref().is_some_and(|target| !target.mailbox().is_open()) {
                    return Err(Refusal::TargetClosed);
                }
                (sqe.local, sqe.remote) = (local, remote);
            }
            Payload::Transfer(transfer) => {
                self.check(transfer)?;
                sqe = Sqe { op, flags, op_flags, user_data, ..transfer.lowered(ptr::null()) };
            }
            Payload::Other(Other::Parts(parts)) => (sqe.len, sqe.target) = self.check_parts(parts)?,
            Payload::Other(Other::Store(request)) => (sqe.len, sqe.target) = self.check_request(request)?,
        }
        if !entry.needs_no_side() {
            sqe.side = self.take_side(entry)?;
        }
        match &entry.payload {
            Payload::Other(Other::Values { .. }) => {}
            Payload::Transfer(transfer) => {
                let Some(region) = self.begin_use(&transfer.local) else {
                    self.give_side_back(sqe.side);
                    return Err(Refusal::Unregistered(transfer.local.memory()));
                };
                sqe.region = region;
            }
            Payload::Other(Other::Store(request)) => match begin_uses(request) {
                Ok(()) => sqe.set_request(Arc::clone(request)),
                Err(reason) => {
                    self.give_side_back(sqe.side);
                    return Err(reason);
                }
            },
            Payload::Other(Other::Parts(parts)) => match self.take_list(parts) {
                Ok(list) => sqe.region = Sqe::place_of(list),
                Err(reason) => {
                    self.give_side_back(sqe.side);
                    return Err(reason);
                }
            },
        }
        if let Some(peer) = sqe.peer()
            && let Err(Exhausted { limit, overdue }) = self.take_share(peer)
        {
            self.let_go(&mut sqe);
            let segment = self.peer_name(peer);
            return Err(match overdue {
                true => Refusal::SegmentOverdue { segment, limit },
                false => Refusal::SegmentShare { segment, limit },
            });
        }
        if !self.take_unit() && (op != Opcode::Cancel || !self.take_reserved()) {
            self.give_share_back(&sqe);
            self.let_go(&mut sqe);
            return Err(Refusal::Full { capacity: self.shared.capacity as u32 });
        }
        if let Payload::Other(Other::Values { target: Some(target), .. }) = &entry.payload {
            let target = target.mailbox();
            if !target.take_unit() {
                self.give_side_back(sqe.side);
                self.untake_units();
                return Err(Refusal::TargetFull { capacity: target.capacity() });
            }
            sqe.set_mailbox(Arc::clone(target));
        }
        Ok(sqe)
    }

    /// Gives back what an entry had taken first that is refused, or taken back: its uses, and its side block.
    fn let_go(&mut self, sqe: &mut Sqe) {
        match sqe.take_region() {
            // SAFETY: the entry is the last that was lowered, and is not published.
            Some(region) => unsafe { self.begun.undo(region) },
            None => sqe.end_use(Some(&self.shared.lists)),
        }
        self.give_side_back(mem::replace(&mut sqe.side, Sqe::NO_SIDE));
    }

    #[inline(always)]
    fn check(&self, transfer: &Transfer) -> Result<(), Refusal> {
        self.check_ends(transfer)?;
        check_range(transfer.local.len, transfer.remote.address)
    }

    #[inline(always)]
    fn check_ends(&self, transfer: &Transfer) -> Result<(), Refusal> {
        let Transfer { local, remote } = transfer;
        let engine = &self.shared.engine;
        if local.engine() != engine.id() {
            return Err(Refusal::ForeignSlice(engine.name().into()));
        }
        if remote.engine() != engine.id() {
            return Err(Refusal::ForeignSegment(engine::segment_name(remote)));
        }
        if self.is_stale(remote.target) {
            return Err(Refusal::StaleSegment(self.peer_name(remote.target)));
        }
        Ok(())
    }

    /// What a peer of the ring's engine is called.
    #[cold]
    fn peer_name(&self, peer: u32) -> Box<str> {
        self.shared.engine.peer_name(peer).unwrap_or_default().into()
    }

    /// True if the segment was reopened since.
    #[inline]
    fn is_stale(&self, target: u32) -> bool {
        self.shares.known(target).map_or_else(|| self.is_stale_unmet(target), Known::is_stale)
    }

    /// The same of one whose share was not met: a stale one gets none.
    #[cold]
    fn is_stale_unmet(&self, target: u32) -> bool {
        self.shared.engine.segment(target).is_some_and(|segment| segment.is_stale())
    }

    #[inline(always)]
    fn take_share(&mut self, peer: u32) -> Result<(), Exhausted> {
        let Pusher { shared, shares, units, .. } = self;
        let share = shares.of(peer, |peer| meet(shared, peer));
        let sole = matches!(units, Units::Own);
        share.take(shared.capacity, shared.has_one_segment(), sole)
    }

    /// The same of a segment that is not stale and that was met.
    #[inline(always)]
    fn take_met_share(&mut self, target: u32) -> bool {
        let Pusher { shared, shares, units, .. } = self;
        let Some(share) = shares.known_mut(target).filter(|share| !share.is_stale()) else { return false };
        share.take(shared.capacity, shared.has_one_segment(), matches!(units, Units::Own)).is_ok()
    }

    fn untake_share(&self, peer: u32) {
        self.shares.known(peer).expect("a unit of it was taken").untake();
    }

    fn give_share_back(&self, sqe: &Sqe) {
        if let Some(target) = sqe.peer() {
            self.untake_share(target);
        }
    }

    /// Checks a vectored entry: its length and its segment's number.
    #[inline(never)]
    fn check_parts(&self, parts: &Parts) -> Result<(u32, u32), Refusal> {
        if parts.len() > MAX_PARTS {
            return Err(Refusal::TooManyParts(parts.len()));
        }
        let mut target = Sqe::NO_TARGET;
        match parts {
            Parts::List(list) => {
                for (part, transfer) in list.iter().enumerate() {
                    self.check(transfer)?;
                    target = list[0].remote.target;
                    if transfer.remote.target != target {
                        let segment = self.peer_name(transfer.remote.target);
                        return Err(Refusal::OtherSegment { part: part as u32, segment });
                    }
                }
            }
            &Parts::Pages { ref base, page: size, ref pages } => {
                self.check_ends(base)?;
                target = base.remote.target;
                check_range(size, 0)?;
                // A page's number has 32 bits and its length 31, so no product passes 63.
                for &(page, remote) in pages {
                    let len = base.local.len;
                    if u64::from(page) * size + size > len {
                        return Err(Refusal::LocalPage { page, size, len });
                    }
                    let address = base.remote.address.checked_add(u64::from(remote) * size);
                    check_range(size, address.unwrap_or(u64::MAX))?;
                }
            }
        }
        let total = (0..parts.len()).map(|at| parts.get(at).2).sum();
        check_range(total, 0)?;
        Ok((total as u32, target))
    }

    /// Checks what a Store is asked: how many bytes and the client's number.
    #[inline(never)]
    fn check_request(&self, request: &Request) -> Result<(u32, u32), Refusal> {
        let engine = &self.shared.engine;
        if request.client.engine.id() != engine.id() {
            return Err(Refusal::ForeignStore(request.client.name().into()));
        }
        let key = request.key();
        if key.is_empty() || key.len() > MAX_KEY || key.contains('\0') {
            return Err(Refusal::Key(key.into()));
        }
        if request.slices().len() > MAX_PARTS {
            return Err(Refusal::TooManyParts(request.slices().len()));
        }
        if request.slices().iter().any(|slice| slice.engine() != engine.id()) {
            return Err(Refusal::ForeignSlice(engine.name().into()));
        }
        check_range(request.len(), 0)?;
        if request.kind == request::Kind::Put && request.len() == 0 {
            return Err(Refusal::NoBytes(key.into()));
        }
        Ok((request.len() as u32, request.client.target))
    }

    #[inline(never)]
    fn take_list(&mut self, parts: &Parts) -> Result<Box<PartList>, Refusal> {
        let Pusher { shared, regions, .. } = self;
        let lists = &shared.lists;
        lists.fill(parts, regions, &shared.engine).map_err(|why| match why {
            NoList::InUse => Refusal::NoPartList { count: lists.most() as u32 },
            NoList::Unregistered(memory) => Refusal::Unregistered(memory),
        })
    }

    fn take_side(&self, entry: &Entry) -> Result<u32, Refusal> {
        let fences = usize::from(entry.fence.is_some()) + entry.more_fences.len();
        if fences > Entry::MAX_FENCES {
            return Err(Refusal::TooManyFences(fences));
        }
        let all = entry.fence.iter().chain(&entry.more_fences).map(|fence| &fence.0);
        let sides = &self.shared.sides;
        sides.fill(entry.limits, all).ok_or(Refusal::NoSideBlock { count: sides.count() as u32 })
    }

    fn give_side_back(&self, side: u32) {
        if side != Sqe::NO_SIDE {
            // SAFETY: the block was taken for an entry that is not pushed; its index is forgotten here.
            unsafe { self.shared.sides.empty(side) };
        }
    }

    /// Units taken ahead of their entries.
    #[cfg(all(test, not(loom)))]
    pub(super) fn spare_units(&self) -> u64 {
        match self.units {
            Units::Own => 0,
            Units::Shared => self.sq.opened(),
        }
    }

    /// Entries pushed and not submitted.
    pub(super) fn unpublished(&self) -> usize {
        self.sq.unpublished()
    }

    /// Units of capacity taken by entries that are not submitted, so that nobody may wait for them.
    pub(super) fn held_back(&self) -> usize {
        match self.units {
            Units::Own => 0,
            // A message to this ring has taken one for each of its ends.
            Units::Shared => {
                let taken = self.sq.written().map(|sqe| 1 + usize::from(sqe.is_message_to(&self.shared)));
                self.sq.opened() as usize + taken.sum::<usize>()
            }
        }
    }

    /// Shows the core everything that was pushed, without waking it.
    #[inline]
    fn publish(&mut self) -> usize {
        self.begun.tell();
        self.batch = self.sq.unpublished() as u64;
        match self.units {
            // Before the entries: nobody sees more units given back than taken.
            Units::Own => self.shared.accepted.store(self.sq.position(), Ordering::Relaxed),
            // Before the submitter may go: whoever sees that nobody is left must not wait for these.
            Units::Shared => self.untake_units(),
        }
        self.sq.publish()
    }

    /// Shows the core everything that was pushed and wakes it if it sleeps.
    #[inline]
    pub(super) fn submit(&mut self) -> Result<usize, OpenChain> {
        if self.is_chain_open() {
            return Err(OpenChain);
        }
        if !self.shared.is_here() {
            // What is unpublished here is the parent's, to submit there.
            return Ok(0);
        }
        let count = self.publish();
        if count > 0 {
            self.shared.poller.ring_always();
        }
        Ok(count)
    }

    /// True if the last entry pushed is linked to the next.
    #[inline]
    fn is_chain_open(&self) -> bool {
        self.sq.last().is_some_and(|last| last.flags.intersects(EntryFlags::CHAINED))
    }

    /// Ends an open chain with its last entry so far, so that it can be submitted.
    pub(super) fn close_chain(&mut self) {
        self.sq.amend(|last| last.flags.remove(EntryFlags::CHAINED));
    }
}

/// A peer's share, and the segment if it is one, for a producer that has not met it.
#[cold]
fn meet(shared: &Shared, peer: u32) -> (Arc<Share>, Option<Segment>) {
    (shared.share(peer), shared.engine.segment(peer))
}

#[inline(never)]
fn begin_uses(request: &Request) -> Result<(), Refusal> {
    request.begin_uses().map_err(|why| match why {
        Unusable::Unregistered(memory) => Refusal::Unregistered(memory),
        Unusable::NotInStore(memory) => Refusal::NotInStore(memory),
    })
}

#[inline]
fn check_range(len: u64, remote: u64) -> Result<(), Refusal> {
    if len > i32::MAX as u64 {
        return Err(Refusal::TooLong(len));
    }
    if remote.checked_add(len).is_none() {
        return Err(Refusal::RemoteRange { address: remote, len });
    }
    Ok(())
}

/// Pushes into a ring from another thread than its owner's. Each has a lane of its own to the poller: no other submitter's
/// entries come between those that one of them submits at once, and a preempted one holds up nobody else. Clone it for each thread; a clone's lane
/// takes 64 bytes for each entry of the ring's capacity.
///
/// Entries become visible to the poller with [`submit`](Self::submit). Dropping a submitter submits what it has pushed.
#[derive(Debug)]
pub struct Submitter {
    pusher: Pusher,
    lane: u32,
}

impl Submitter {
    pub(super) fn new(shared: Arc<Shared>, controls: Arc<Controls>, ring: u32) -> Submitter {
        let (sq, entries) = spsc::ring(shared.capacity as usize);
        let lane = shared.take_lane();
        shared.submitters.fetch_add(1, Ordering::Relaxed);
        controls.send(Control::Lane { ring, lane, entries });
        let pusher = Pusher {
            begun: Begun::NONE,
            shared,
            controls,
            ring,
            sq,
            units: Units::Shared,
            batch: 0,
            shares: Shares::default(),
            regions: Regions::default(),
        };
        Submitter { pusher, lane }
    }

    /// As if its last batch had been of so many entries.
    #[cfg(all(test, loom))]
    pub(crate) fn expect(&mut self, entries: u64) {
        self.pusher.batch = entries;
    }

    #[cfg(all(test, not(loom)))]
    pub(crate) fn spare_units(&self) -> u64 {
        self.pusher.spare_units()
    }

    /// Accepts an entry, or gives it back. Never blocks and calls no driver. The poller sees it after
    /// [`submit`](Self::submit).
    ///
    /// # Errors
    /// [`PushError`] with the entry in it, unchanged.
    #[inline(always)]
    pub fn push(&mut self, entry: Entry) -> Result<(), PushError> {
        self.pusher.look();
        self.pusher.push(entry)
    }

    /// Takes the link off the last entry that was pushed, so that what was pushed can be submitted.
    pub fn end_chain(&mut self) {
        self.pusher.close_chain();
    }

    /// Accepts an entry and gives a fence on its end, as [`SubmissionQueue::push_fenced`](super::SubmissionQueue::push_fenced).
    /// If the ring was closed before the entry was submitted, the fence fails when the submitter is dropped.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_fenced(&mut self, entry: Entry) -> Result<Fence, PushError> {
        self.pusher.push_fenced(entry)
    }

    /// Accepts an entry whose completions go to a future, as
    /// [`SubmissionQueue::push_future`](super::SubmissionQueue::push_future).
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_future(&mut self, entry: Entry) -> Result<EntryFuture, PushError> {
        self.pusher.push_future(entry)
    }

    /// Accepts an entry whose end moves a timeline, as
    /// [`SubmissionQueue::push_signalling`](super::SubmissionQueue::push_signalling).
    ///
    /// # Errors
    /// As [`push`](Self::push), and [`Refusal::WindowFull`].
    pub fn push_signalling(&mut self, entry: Entry, progress: &Progress) -> Result<u64, PushError> {
        self.pusher.push_signalling(entry, progress)
    }

    /// Accepts all of the entries, or gives all of them back. Never blocks. See [`push`](Self::push).
    ///
    /// # Errors
    /// [`PushChainError`] with the entries in it, and which of them was refused.
    pub fn push_chain(&mut self, entries: Vec<Entry>) -> Result<(), PushChainError> {
        self.pusher.push_chain(entries)
    }

    /// Shows the poller everything that was pushed, at once, and wakes it if it sleeps. Returns how many entries. Never
    /// blocks.
    ///
    /// # Errors
    /// [`OpenChain`] if the last entry is linked to a next one; nothing is submitted then.
    pub fn submit(&mut self) -> Result<usize, OpenChain> {
        if self.pusher.is_chain_open() {
            return Err(OpenChain);
        }
        if !self.pusher.shared.is_here() {
            return Ok(0);
        }
        let count = self.pusher.publish();
        if count > 0 {
            let word = LaneWord { lane: self.lane, count: count as u32 };
            let pushed = self.pusher.shared.published.push(word);
            debug_assert!(pushed.is_ok(), "each word stands for an outstanding entry, and there is a place for each");
            self.pusher.shared.poller.ring_always();
        }
        Ok(count)
    }
}

impl Clone for Submitter {
    fn clone(&self) -> Submitter {
        let Pusher { shared, controls, ring, .. } = &self.pusher;
        Submitter::new(Arc::clone(shared), Arc::clone(controls), *ring)
    }
}

impl Drop for Submitter {
    fn drop(&mut self) {
        self.pusher.close_chain();
        let submitted = self.submit();
        debug_assert!(submitted.is_ok(), "the chain was just closed");
        self.pusher.controls.send(Control::LaneGone { ring: self.pusher.ring, lane: self.lane });
        self.pusher.shared.submitter_gone();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Weak;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use super::*;
    use crate::fence::{FenceStatus, Polled};
    use crate::transport::Transport;
    use crate::{Engine, Fence, Region, Ring, UnregisterError, fence, opcode};

    const LIMIT: Duration = Duration::from_secs(10);

    /// Tells, when it is let go of, whether the engine is still there.
    #[derive(Debug)]
    struct Probe {
        transport: Weak<dyn Transport>,
        alive: Arc<AtomicBool>,
    }

    impl Polled for Probe {
        fn poll(&self) -> FenceStatus {
            FenceStatus::Pending
        }

        fn group(&self) -> Option<(u64, u64)> {
            None
        }

        fn least_interval(&self) -> u64 {
            0
        }
    }

    impl Drop for Probe {
        fn drop(&mut self) {
            self.alive.store(self.transport.strong_count() > 0, Ordering::Relaxed);
        }
    }

    /// An entry holds its region by a plain pointer, which the engine keeps valid.
    #[test]
    fn what_no_core_took_is_let_go_of_before_the_engine() {
        let engine = Engine::loopback();
        let alive = Arc::new(AtomicBool::new(false));
        let probe = Probe { transport: Arc::downgrade(engine.transport()), alive: Arc::clone(&alive) };
        let mut ring = Ring::builder().build(4, &engine).unwrap();
        let mut submitter = ring.submitter();
        submitter.push(opcode::Wait::new().build().wait(&Fence::polled(Box::new(probe)))).unwrap();
        drop(ring);
        drop(engine);
        drop(submitter);
        assert!(alive.load(Ordering::Relaxed));
    }
    /// Entries name regions by number, and a producer finds the ones that it met lately without asking the engine.
    #[test]
    fn each_region_has_its_own_uses() {
        let engine = Engine::loopback();
        let peer = engine.open_segment(engine.name(), LIMIT).unwrap();
        let (signaller, fence) = fence::host();
        let mut ring = Ring::builder().build(64, &engine).unwrap();
        let regions: Vec<_> = (0..40).map(|_| engine.register(Region::alloc(64).unwrap()).unwrap()).collect();
        for region in regions.iter().chain(&regions) {
            let entry = opcode::Read::new(region.slice(..8).unwrap(), peer.at(regions[0].address())).build();
            if ring.submission().len() < 60 {
                ring.submission().push(entry.wait(&fence)).unwrap();
            }
        }
        ring.submit().unwrap();
        for (at, region) in regions.iter().enumerate() {
            let uses = if at < 20 { 2 } else { 1 };
            assert!(matches!(region.unregister(), Err(UnregisterError::Busy(busy)) if busy == uses), "region {at}");
        }
        signaller.signal();
        ring.wait(60).unwrap();
        assert!(ring.completion().all(|cqe| cqe.result() == Ok(8)));
        for region in &regions {
            region.unregister().unwrap();
            let entry = opcode::Read::new(region.slice(..8).unwrap(), peer.at(0)).build();
            assert!(matches!(ring.submission().push(entry).unwrap_err().reason, Refusal::Unregistered(_)));
        }
    }

    /// In a lane of 64 places a run ends at the 32nd.
    #[test]
    fn units_beyond_a_run_are_not_lost() {
        let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
        let mut submitter = ring.submitter();
        for entries in [24, 9] {
            (0..entries).for_each(|_| submitter.push(opcode::Nop::new().build()).unwrap());
            submitter.submit().unwrap();
        }
        assert_eq!(ring.wait(33), Ok(33));
        let start = std::time::Instant::now();
        while submitter.pusher.shared.outstanding() > 0 {
            assert!(start.elapsed() < LIMIT, "{} units are out", submitter.pusher.shared.outstanding());
            std::thread::yield_now();
        }
    }

    #[test]
    fn an_entry_that_has_outlived_its_engine_is_refused() {
        let engine = Engine::loopback();
        let region = engine.register(Region::alloc(64).unwrap()).unwrap();
        let peer = engine.open_segment(engine.name(), LIMIT).unwrap();
        let other = Engine::loopback();
        let gone = other.register(Region::alloc(64).unwrap()).unwrap().slice(..8).unwrap();
        let away = other.open_segment(engine.name(), LIMIT).unwrap().at(region.address());
        let mut ring = Ring::builder().build(4, &engine).unwrap();
        let mut refused = |local, remote| ring.submission().push(opcode::Read::new(local, remote).build()).unwrap_err();
        let own = region.slice(..8).unwrap();
        let named = refused(own.clone(), away.clone()).reason;
        assert_eq!(named, Refusal::ForeignSegment(engine.name().into()));
        let alive = Arc::downgrade(other.transport());
        drop(other);
        // The thread that has opened the segment may have it a little longer.
        while alive.strong_count() > 0 {
            std::thread::yield_now();
        }
        assert!(matches!(refused(gone, peer.at(region.address())).reason, Refusal::ForeignSlice(_)));
        assert!(matches!(refused(own, away).reason, Refusal::ForeignSegment(name) if name.contains("has ended")));
    }
}
