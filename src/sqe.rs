//! The submission queue's entry: one cache line, made at push and only there.

use std::ptr;
use std::sync::Arc;

use static_assertions::{const_assert, const_assert_eq};

use crate::fence::FenceInner;
use crate::region::RegionInner;
use crate::spsc::Leftover;

/// What an entry does. The numbers are moonring's own; 0 is io_uring's Nop too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Opcode {
    Nop = 0,
    Wait = 1,
    Read = 2,
    Write = 3,
}

/// A lowered entry. It owns a count of its one fence, or a side block with several, and a use of its region. Copying it
/// copies no ownership: exactly one copy is taken by the core, or discarded.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sqe {
    pub(crate) op: Opcode,
    pub(crate) len: u32,
    pub(crate) user_data: u64,
    /// The local range's address.
    pub(crate) local: u64,
    /// The local range's region, with a use begun; null without. Alive as long as its engine, which the ring keeps.
    pub(crate) region: *const RegionInner,
    /// The remote range's address.
    pub(crate) remote: u64,
    /// The transport's number for the segment.
    pub(crate) target: u32,
    /// Index of a side block, or [`Sqe::NO_SIDE`].
    pub(crate) side: u32,
    /// The one fence, as an `Arc`'s raw pointer; null without.
    pub(crate) fence: *const FenceInner,
}

const_assert_eq!(size_of::<Sqe>(), 64);
const_assert!(align_of::<Sqe>() == 64);

// SAFETY: what the pointers lead to is Send and Sync, and ownership moves with the one copy that counts.
unsafe impl Send for Sqe {}

impl Sqe {
    pub(crate) const NO_SIDE: u32 = u32::MAX;

    /// A Nop that owns nothing.
    pub(crate) const EMPTY: Sqe = Sqe {
        op: Opcode::Nop,
        len: 0,
        user_data: 0,
        local: 0,
        region: ptr::null(),
        remote: 0,
        target: 0,
        side: Sqe::NO_SIDE,
        fence: ptr::null(),
    };

    /// Takes the one fence out.
    pub(crate) fn take_fence(&mut self) -> Option<Arc<FenceInner>> {
        let fence = std::mem::replace(&mut self.fence, ptr::null());
        // SAFETY: a non-null `fence` came from `Arc::into_raw` at push and owns a count, which goes to the caller.
        (!fence.is_null()).then(|| unsafe { Arc::from_raw(fence) })
    }

    /// Leaves the region in use for ever: something may touch it that cannot be stopped.
    pub(crate) fn forget_use(&mut self) {
        self.region = ptr::null();
    }

    /// Ends the use of the region.
    pub(crate) fn end_use(&mut self) {
        let region = std::mem::replace(&mut self.region, ptr::null());
        if !region.is_null() {
            // SAFETY: the engine keeps every region's `RegionInner` until it is dropped, and the ring keeps the engine.
            unsafe { &*region }.end_use();
        }
    }
}

impl Leftover for Sqe {
    /// Lets go of an entry that no core will take. A side block it has is the ring's, and goes with the ring.
    fn discard(mut self) {
        drop(self.take_fence());
        self.end_use();
    }
}
