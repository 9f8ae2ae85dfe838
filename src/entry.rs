//! Entries: what a caller asks for, before a push lowers it.

use crate::engine::Remote;
use crate::fence::Fence;
use crate::region::Slice;
use crate::sqe::Opcode;

/// An operation to push. Built by [`opcode`](crate::opcode)'s types; owns what it refers to.
#[derive(Debug)]
#[must_use = "an entry does nothing until it is pushed"]
pub struct Entry {
    pub(crate) op: Opcode,
    pub(crate) user_data: u64,
    pub(crate) transfer: Option<Transfer>,
    pub(crate) fence: Option<Fence>,
    /// The second and further ones.
    pub(crate) more_fences: Vec<Fence>,
}

#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) local: Slice,
    pub(crate) remote: Remote,
}

impl Entry {
    /// Most fences on one entry.
    pub const MAX_FENCES: usize = crate::ring::shared::MAX_FENCES;

    pub(crate) fn new(op: Opcode, transfer: Option<Transfer>) -> Entry {
        Entry { op, user_data: 0, transfer, fence: None, more_fences: Vec::new() }
    }

    /// A number that comes back in the completion. Opaque, and need not be unique.
    pub fn user_data(mut self, user_data: u64) -> Entry {
        self.user_data = user_data;
        self
    }

    /// Waits for `fence` too: the entry is not issued before every fence on it has signalled. Up to
    /// [`MAX_FENCES`](Self::MAX_FENCES); the first costs nothing, more take one of the ring's side blocks.
    pub fn wait(mut self, fence: &Fence) -> Entry {
        if self.fence.is_none() {
            self.fence = Some(fence.clone());
        } else {
            self.more_fences.push(fence.clone());
        }
        self
    }
}
