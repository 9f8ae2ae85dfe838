//! The submission queue's entry: one cache line, made at push and only there.

use std::ptr;
use std::sync::Arc;

use static_assertions::{const_assert, const_assert_eq};

use crate::code::{Stage, errno};
use crate::cqe::{Cqe, CqeFlags};
use crate::entry::EntryFlags;
use crate::fence::{FenceInner, TimelineCell};
use crate::region::RegionInner;
use crate::ring::future::Route;
use crate::ring::message::Mailbox;
use crate::ring::parts::{PartList, PartLists};
use crate::ring::shared::Shared;
use crate::spsc::Leftover;
use crate::store::request::Request;

/// What an entry does. The numbers are moonring's own; 0 is io_uring's Nop too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Opcode {
    Nop = 0,
    Wait = 1,
    Read = 2,
    Write = 3,
    Timeout = 4,
    LinkTimeout = 5,
    Cancel = 6,
    TimeoutUpdate = 7,
    Readv = 8,
    Writev = 9,
    MsgRing = 10,
    Get = 11,
    Put = 12,
    Exist = 13,
    Remove = 14,
}

impl Opcode {
    /// True if it is for a Store.
    pub(crate) fn is_store(self) -> bool {
        matches!(self, Opcode::Get | Opcode::Put | Opcode::Exist | Opcode::Remove)
    }

    /// True if its bytes move in parts.
    pub(crate) fn is_vectored(self) -> bool {
        matches!(self, Opcode::Readv | Opcode::Writev)
    }
}

/// `op_flags` of the opcodes that have some.
pub(crate) mod op_flags {
    /// Nop: fails its preparation.
    pub(crate) const NOP_BAD: u16 = 1;
    /// Timeout: running out is a success to links and skips.
    pub(crate) const ETIME_SUCCESS: u16 = 1 << 1;
    /// Timeout: again and again, `len` times, or for ever if that is 0.
    pub(crate) const MULTISHOT: u16 = 1 << 2;
    /// Timeout: `local` is a moment, not a span.
    pub(crate) const ABSOLUTE: u16 = 1 << 3;
    /// Cancel: every match, not the first; the result is how many.
    pub(crate) const ALL: u16 = 1 << 4;
    /// Cancel: matches everything.
    pub(crate) const ANY: u16 = 1 << 5;
    /// Cancel: an issued operation gets its result now, with MORE, and NOTIF when it is quiet.
    pub(crate) const DETACH: u16 = 1 << 6;
    /// Cancel: Timeouts only.
    pub(crate) const TIMEOUTS: u16 = 1 << 7;
    /// Cancel: `local` is a segment's number.
    pub(crate) const SEGMENT: u16 = 1 << 8;
    /// Cancel: `local` is a region's address.
    pub(crate) const REGION: u16 = 1 << 9;
    /// Read, Write: the remote registration, which the caller declared, goes on below the range.
    pub(crate) const MORE_BELOW: u16 = 1 << 10;
    /// Read, Write: it goes on above the range.
    pub(crate) const MORE_ABOVE: u16 = 1 << 11;
    /// Any: what its end feeds has a route, where its completions go.
    pub(crate) const ROUTED: u16 = 1 << 12;
    /// Any: it has a side block, a fence, or something that its end feeds. Set when it is written into its queue, so that one look
    /// at an entry's first word tells that there is nothing else to look at.
    pub(crate) const TIED: u16 = 1 << 13;
}

/// A lowered entry. It owns a count of its one fence, or a side block with several, one of the fence that it feeds, and a
/// use of its region or a list of parts. Copying it
/// copies no ownership: exactly one copy is taken by the core, or discarded.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sqe {
    pub(crate) op: Opcode,
    pub(crate) flags: EntryFlags,
    pub(crate) op_flags: u16,
    /// Bytes to move; an injected or a message's result; repeats.
    pub(crate) len: u32,
    pub(crate) user_data: u64,
    /// The local range's address; nanoseconds of a timeout; what to cancel; a message's `user_data`.
    pub(crate) local: u64,
    /// The local range's region, with a use begun; null without. Alive as long as its engine, which the ring keeps. For a
    /// vectored entry its list of parts instead, from `Box::into_raw`; for a message the target's mailbox, as an `Arc`'s raw
    /// pointer, with a unit of the target's capacity; for a Store its request, as an `Arc`'s raw pointer.
    pub(crate) region: *const RegionInner,
    /// The remote range's address; a timeout's new nanoseconds; of one that runs, when it is due.
    pub(crate) remote: u64,
    /// The transport's number for the segment; a Store client's number, with [`STORE`](crate::ring::share::STORE).
    pub(crate) target: u32,
    /// Index of a side block, or [`Sqe::NO_SIDE`].
    pub(crate) side: u32,
    /// The one fence, as an `Arc`'s raw pointer; null without.
    pub(crate) fence: *const FenceInner,
    /// The fence that its end feeds, as an `Arc`'s raw pointer; null without.
    pub(crate) signal: *const FenceInner,
}

const_assert_eq!(size_of::<Sqe>(), 64);
const_assert!(align_of::<Sqe>() == 64);

// SAFETY: what the pointers lead to is Send and Sync, and ownership moves with the one copy that counts.
unsafe impl Send for Sqe {}

impl Sqe {
    pub(crate) const NO_SIDE: u32 = 0;
    /// The target of a vectored entry without parts.
    pub(crate) const NO_TARGET: u32 = u32::MAX;

    /// A Nop that owns nothing.
    pub(crate) const EMPTY: Sqe = Sqe {
        op: Opcode::Nop,
        flags: EntryFlags::empty(),
        op_flags: 0,
        len: 0,
        user_data: 0,
        local: 0,
        region: ptr::null(),
        remote: 0,
        target: 0,
        side: Sqe::NO_SIDE,
        fence: ptr::null(),
        signal: ptr::null(),
    };

    /// Takes the one fence out.
    pub(crate) fn take_fence(&mut self) -> Option<Arc<FenceInner>> {
        let fence = std::mem::replace(&mut self.fence, ptr::null());
        // SAFETY: a non-null `fence` came from `Arc::into_raw` at push and owns a count, which goes to the caller.
        (!fence.is_null()).then(|| unsafe { Arc::from_raw(fence) })
    }

    /// Tells the fence that its end feeds, if there is one and it was not told: `root` is the errno that it failed with. One
    /// with a route stays for the completions.
    #[inline]
    pub(crate) fn signal(&mut self, root: Option<i32>) {
        if self.is_routed() {
            // SAFETY: as below; it is kept.
            if let Some(signal) = unsafe { self.signal.as_ref() } {
                signal.tell(root);
            }
        } else if !self.signal.is_null() {
            let signal = std::mem::replace(&mut self.signal, ptr::null());
            // SAFETY: a non-null `signal` came from `Arc::into_raw` at push and owns a count, which is let go of here.
            unsafe { Arc::from_raw(signal) }.tell(root);
        }
    }

    /// The timeline that its end moves, if values of it may expire, and whether its own has.
    #[inline]
    pub(crate) fn expiring(&self) -> Option<(Arc<TimelineCell>, bool)> {
        // SAFETY: a non-null `signal` came from `Arc::into_raw` at push and owns a count.
        unsafe { self.signal.as_ref() }?.expiring()
    }

    /// True if its completions go to a future.
    #[inline]
    pub(crate) fn is_routed(&self) -> bool {
        self.op_flags & op_flags::ROUTED != 0
    }

    /// Where its completions go, until the last of them has.
    pub(crate) fn route(&self) -> Option<&Route> {
        if !self.is_routed() {
            return None;
        }
        // SAFETY: a non-null `signal` came from `Arc::into_raw` at push, and the one copy of the entry that counts owns a count.
        unsafe { self.signal.as_ref() }?.route()
    }

    /// Completes the future, and lets go of it with the last completion.
    pub(crate) fn answer(&mut self, cqe: Cqe) {
        if let Some(route) = self.route() {
            route.complete(cqe);
        }
        if !cqe.flags().contains(CqeFlags::MORE) {
            let signal = std::mem::replace(&mut self.signal, ptr::null());
            if !signal.is_null() {
                // SAFETY: as in `signal`.
                drop(unsafe { Arc::from_raw(signal) });
            }
        }
    }

    /// True if it has more to it than its numbers.
    #[inline]
    pub(crate) fn is_tied(&self) -> bool {
        self.side != Sqe::NO_SIDE || !self.fence.is_null() || !self.signal.is_null()
    }

    /// True if it ends at once with 0: no fence, no flag, nothing injected. Of an entry from a queue.
    #[inline]
    pub(crate) fn is_plain_nop(&self) -> bool {
        const { assert!(Opcode::Nop as u8 == 0) };
        let first = self.first_word();
        debug_assert!(first != 0 || !self.is_tied());
        first == 0
    }

    /// Opcode, flags and length, written so that it compiles to one load, as the entry was written.
    #[inline]
    fn first_word(&self) -> u64 {
        self.op as u64 | u64::from(self.flags.bits()) << 8 | u64::from(self.op_flags) << 16 | u64::from(self.len) << 32
    }

    /// True if it goes to its peer as soon as it is taken, unless a drain holds it: a Read or Write that has bytes to move, waits
    /// for nothing and is no part of a chain. Of an entry from a queue.
    #[inline]
    pub(crate) fn starts_at_once(&self) -> bool {
        const { assert!(Opcode::Read as u8 & 1 == 0 && Opcode::Read as u8 | 1 == Opcode::Write as u8) };
        // All but which of the two opcodes, and whether a success is told.
        const LOOKED_AT: u64 =
            !1 & 0xff | (!EntryFlags::CQE_SKIP_SUCCESS.bits() as u64) << 8 | (op_flags::TIED as u64) << 16;
        let first = self.first_word();
        first & LOOKED_AT == Opcode::Read as u64 && first >> 32 > 0
    }

    /// True if a transport or a Store does it.
    pub(crate) fn is_transfer(&self) -> bool {
        matches!(self.op, Opcode::Read | Opcode::Write) || self.op.is_vectored() || self.op.is_store()
    }

    /// True if its caller said of the remote registration what it takes to merge it with a neighbour.
    #[inline]
    pub(crate) fn may_merge(&self) -> bool {
        self.op_flags & (op_flags::MORE_BELOW | op_flags::MORE_ABOVE) != 0
    }

    /// Takes back what its caller said of the remote registration, so that it is issued alone.
    #[inline]
    pub(crate) fn never_merge(&mut self) {
        self.op_flags &= !(op_flags::MORE_BELOW | op_flags::MORE_ABOVE);
    }

    /// The peer whose share it takes a unit of.
    #[inline]
    pub(crate) fn peer(&self) -> Option<u32> {
        (self.is_transfer() && self.target != Sqe::NO_TARGET).then_some(self.target)
    }

    /// What a vectored entry has in the place of its region.
    pub(crate) fn place_of(parts: Box<PartList>) -> *const RegionInner {
        Box::into_raw(parts).cast_const().cast()
    }

    /// A vectored entry's parts, until its uses are ended.
    #[inline]
    pub(crate) fn parts(&self) -> Option<&PartList> {
        // SAFETY: a vectored entry's pointer is null or came from `place_of`, and the one copy of the entry that counts owns
        // the list.
        self.op.is_vectored().then(|| unsafe { self.region.cast::<PartList>().as_ref() }).flatten()
    }

    /// The same, to count in.
    pub(crate) fn parts_mut(&mut self) -> Option<&mut PartList> {
        // SAFETY: as above.
        self.op.is_vectored().then(|| unsafe { self.region.cast_mut().cast::<PartList>().as_mut() }).flatten()
    }

    fn take_parts(&mut self) -> Option<Box<PartList>> {
        let parts = std::mem::replace(&mut self.region, ptr::null()).cast_mut().cast::<PartList>();
        // SAFETY: as above; it is forgotten here.
        (!parts.is_null()).then(|| unsafe { Box::from_raw(parts) })
    }

    /// True if a local range of it is in the region at `address`.
    pub(crate) fn uses_region(&self, address: u64) -> bool {
        if self.op.is_vectored() {
            return self.parts().is_some_and(|parts| parts.uses_region(address));
        }
        if self.op.is_store() {
            return self.request().is_some_and(|request| request.uses_region(address));
        }
        // SAFETY: as in `end_use`.
        unsafe { self.region.as_ref() }.is_some_and(|region| region.memory.address == address)
    }

    /// Leaves the regions in use for ever: something may touch them that cannot be stopped.
    pub(crate) fn forget_use(&mut self) {
        if self.op.is_vectored() {
            drop(self.take_parts());
        }
        drop(self.take_request());
        self.region = ptr::null();
    }

    /// Gives a message its target, with a unit taken there.
    pub(crate) fn set_mailbox(&mut self, target: Arc<Mailbox>) {
        debug_assert_eq!(self.op, Opcode::MsgRing);
        self.region = Arc::into_raw(target).cast();
    }

    /// A message's target, and with it the unit.
    pub(crate) fn take_mailbox(&mut self) -> Option<Arc<Mailbox>> {
        if self.op != Opcode::MsgRing {
            return None;
        }
        let target = std::mem::replace(&mut self.region, ptr::null()).cast::<Mailbox>();
        // SAFETY: a message's non-null pointer came from `set_mailbox` and owns a count, which goes to the caller.
        (!target.is_null()).then(|| unsafe { Arc::from_raw(target) })
    }

    /// True for a message whose target is this ring.
    pub(crate) fn is_message_to(&self, ring: &Arc<Shared>) -> bool {
        // SAFETY: a message's non-null pointer came from `set_mailbox`, and the one copy of the entry that counts owns the count.
        self.op == Opcode::MsgRing && unsafe { self.region.cast::<Mailbox>().as_ref() }.is_some_and(|to| to.is_of(ring))
    }

    /// Gives an entry for a Store its request, with the uses of its regions begun.
    pub(crate) fn set_request(&mut self, request: Arc<Request>) {
        debug_assert!(self.op.is_store());
        self.region = Arc::into_raw(request).cast();
    }

    /// What a Store is asked, until its uses are ended.
    pub(crate) fn request(&self) -> Option<&Request> {
        // SAFETY: the pointer of an entry for a Store is null or came from `set_request`, and the one copy of the entry that
        // counts owns the count.
        self.op.is_store().then(|| unsafe { self.region.cast::<Request>().as_ref() }).flatten()
    }

    fn take_request(&mut self) -> Option<Arc<Request>> {
        if !self.op.is_store() {
            return None;
        }
        let request = std::mem::replace(&mut self.region, ptr::null()).cast::<Request>();
        // SAFETY: as above; it is forgotten here.
        (!request.is_null()).then(|| unsafe { Arc::from_raw(request) })
    }

    /// A Read's or Write's region, whose use the caller ends.
    #[inline]
    pub(crate) fn take_region(&mut self) -> Option<*const RegionInner> {
        let plain = matches!(self.op, Opcode::Read | Opcode::Write) && !self.region.is_null();
        plain.then(|| std::mem::replace(&mut self.region, ptr::null()))
    }

    /// Ends the uses of regions; of a message's target, if it was not sent. A vectored entry's list goes back to its pool, if
    /// that is there.
    #[inline]
    pub(crate) fn end_use(&mut self, lists: Option<&PartLists>) {
        if self.op.is_vectored() {
            if let Some(mut parts) = self.take_parts() {
                parts.end_uses();
                if let Some(lists) = lists {
                    lists.give_back(parts);
                }
            }
            return;
        }
        if let Some(target) = self.take_mailbox() {
            target.give_back();
        }
        if let Some(request) = self.take_request() {
            request.end_uses();
        }
        let region = std::mem::replace(&mut self.region, ptr::null());
        if !region.is_null() {
            // SAFETY: a use of the region was begun at push and is ended here. Until then the engine, which the ring keeps, does
            // not let go of its `RegionInner`.
            unsafe { &*region }.end_use();
        }
    }
}

impl Leftover for Sqe {
    /// Lets go of an entry that no core will take. A side block it has is the ring's, and goes with the ring; so did its
    /// pool of part lists.
    fn discard(mut self) {
        drop(self.take_fence());
        self.signal(Some(errno::ESHUTDOWN));
        self.end_use(None);
        if self.is_routed() {
            self.answer(Cqe::new(self.user_data, -errno::ESHUTDOWN, Stage::Shutdown.bits(), 0, 0, 0));
        }
    }
}
