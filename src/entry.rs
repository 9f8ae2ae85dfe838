//! Entries: what a caller asks for, before a push lowers it.

use std::sync::Arc;
use std::time::Duration;

use bitflags::bitflags;

use crate::engine::{Place, Remote};
use crate::fence::Fence;
use crate::region::{RegionInner, Slice};
use crate::ring::Messages;
use crate::sqe::{Opcode, Sqe};
use crate::store::request::Request;

bitflags! {
    /// How an entry stands to the ones around it. The numbers are io_uring's.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct EntryFlags: u8 {
        /// Starts only when everything that the poller took before it has its result; what follows starts only when it has
        /// its own.
        const IO_DRAIN = 1 << 1;
        /// The next entry of the same submit starts when this one has succeeded; if it fails, the rest of the chain ends
        /// with `-ECANCELED`, unstarted.
        const IO_LINK = 1 << 2;
        /// The next entry starts when this one has ended, however it ended.
        const IO_HARDLINK = 1 << 3;
        /// No completion if it succeeds. If it fails in a chain, its own completion stands for the rest of the chain.
        const CQE_SKIP_SUCCESS = 1 << 6;
    }
}

impl EntryFlags {
    /// The entry has a follower.
    pub(crate) const CHAINED: EntryFlags = EntryFlags::IO_LINK.union(EntryFlags::IO_HARDLINK);
}

/// An operation to push. Built by [`opcode`](crate::opcode)'s types; owns what it refers to.
#[derive(Debug)]
#[must_use = "an entry does nothing until it is pushed"]
pub struct Entry {
    pub(crate) op: Opcode,
    pub(crate) flags: EntryFlags,
    pub(crate) op_flags: u16,
    pub(crate) len: u32,
    pub(crate) user_data: u64,
    pub(crate) payload: Payload,
    /// Longest times at the gate and with the transport, in microseconds; 0 for no limit.
    pub(crate) limits: [u32; 2],
    pub(crate) fence: Option<Fence>,
    /// The second and further ones.
    pub(crate) more_fences: Vec<Fence>,
}

#[derive(Clone, Debug)]
pub(crate) struct Transfer {
    pub(crate) local: Slice,
    pub(crate) remote: Place,
}

impl Transfer {
    /// What an SQE has of it; `region` with a use begun.
    #[inline]
    pub(crate) fn lowered(&self, region: *const RegionInner) -> Sqe {
        let Transfer { local, remote } = self;
        Sqe {
            local: local.address,
            len: local.len as u32,
            region,
            remote: remote.address,
            target: remote.target,
            ..Sqe::EMPTY
        }
    }
}

/// What an entry is about.
#[derive(Debug)]
pub(crate) enum Payload {
    Transfer(Transfer),
    Other(Other),
}

/// Apart, so that 0 in the place of a region's number can tell the two from each other: an entry is moved by value.
#[derive(Debug)]
pub(crate) enum Other {
    /// Numbers, as they go into the SQE.
    Values {
        local: u64,
        remote: u64,
        /// A message's target. Here, because a third variant would make every entry longer.
        target: Option<Messages>,
    },
    Parts(Box<Parts>),
    /// What a Store is asked.
    Store(Arc<Request>),
}

/// What an entry is about that owns nothing.
pub(crate) enum Numbers {
    Transfer(Transfer),
    Values { local: u64, remote: u64 },
}

impl Numbers {
    /// An entry's, with them.
    #[inline]
    pub(crate) fn payload(self) -> Payload {
        match self {
            Numbers::Transfer(transfer) => Payload::Transfer(transfer),
            Numbers::Values { local, remote } => Payload::Other(Other::Values { local, remote, target: None }),
        }
    }
}

/// The parts of a vectored entry.
#[derive(Debug)]
pub(crate) enum Parts {
    List(Vec<Transfer>),
    /// Pages of `page` bytes, counted from the start of both ranges: local and remote number.
    Pages {
        base: Transfer,
        page: u64,
        pages: Vec<(u32, u32)>,
    },
}

impl Parts {
    pub(crate) fn len(&self) -> usize {
        match self {
            Parts::List(list) => list.len(),
            Parts::Pages { pages, .. } => pages.len(),
        }
    }

    /// A part: the slice it is of, its local address, length and remote address. For pages only after a check of the page's place.
    pub(crate) fn get(&self, at: usize) -> (&Slice, u64, u64, u64) {
        match self {
            Parts::List(list) => {
                let Transfer { local, remote } = &list[at];
                (local, local.address, local.len, remote.address)
            }
            &Parts::Pages { ref base, page, ref pages } => {
                let (local, remote) = pages[at];
                let [local, remote] = [local, remote].map(|number| u64::from(number) * page);
                (&base.local, base.local.address + local, page, base.remote.address + remote)
            }
        }
    }
}

/// An opcode's own settings, as they go into the SQE.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Args {
    pub(crate) op_flags: u16,
    pub(crate) len: u32,
    pub(crate) local: u64,
    pub(crate) remote: u64,
}

impl Entry {
    /// Most fences on one entry.
    pub const MAX_FENCES: usize = crate::ring::shared::MAX_FENCES;
    /// Most parts of one vectored entry.
    pub const MAX_PARTS: usize = crate::ring::parts::MAX_PARTS;

    #[inline]
    pub(crate) fn new(op: Opcode, args: Args) -> Entry {
        let Args { op_flags, len, local, remote } = args;
        Entry::about(op, op_flags, len, Payload::Other(Other::Values { local, remote, target: None }))
    }

    /// One without fences, limits or flags.
    #[inline]
    pub(crate) fn about(op: Opcode, op_flags: u16, len: u32, payload: Payload) -> Entry {
        let flags = EntryFlags::empty();
        Entry { op, flags, op_flags, len, user_data: 0, payload, limits: [0; 2], fence: None, more_fences: vec![] }
    }

    /// The numbers of an entry that owns nothing but a fence, if it has one: no limit, no list. So there is nothing else to it that
    /// does not fit into an SQE, or that would have to be dropped.
    #[inline]
    pub(crate) fn numbers(&self) -> Option<Numbers> {
        if self.more_fences.capacity() > 0 || self.limits != [0; 2] {
            return None;
        }
        match &self.payload {
            Payload::Transfer(transfer) => Some(Numbers::Transfer(transfer.clone())),
            &Payload::Other(Other::Values { local, remote, target: None }) => Some(Numbers::Values { local, remote }),
            Payload::Other(_) => None,
        }
    }

    /// True if it has one fence at most, and no limit.
    pub(crate) fn needs_no_side(&self) -> bool {
        self.more_fences.is_empty() && self.limits == [0; 2]
    }

    pub(crate) fn vectored(op: Opcode, parts: Parts) -> Entry {
        Entry::about(op, 0, 0, Payload::Other(Other::Parts(Box::new(parts))))
    }

    #[inline]
    pub(crate) fn transfer(op: Opcode, local: Slice, remote: Remote) -> Entry {
        let op_flags = remote.more(local.len);
        Entry::about(op, op_flags, 0, Payload::Transfer(Transfer { local, remote: remote.place }))
    }

    pub(crate) fn store(op: Opcode, request: Arc<Request>) -> Entry {
        Entry::about(op, 0, 0, Payload::Other(Other::Store(request)))
    }

    pub(crate) fn message(target: Messages, user_data: u64, res: u32) -> Entry {
        let payload = Payload::Other(Other::Values { local: user_data, remote: 0, target: Some(target) });
        Entry::about(Opcode::MsgRing, 0, res, payload)
    }

    /// Adds flags: links, drains, no completion on success.
    #[inline]
    pub fn flags(mut self, flags: EntryFlags) -> Entry {
        self.flags |= flags;
        self
    }

    /// A number that comes back in the completion. Opaque, and need not be unique.
    #[inline]
    pub fn user_data(mut self, user_data: u64) -> Entry {
        self.user_data = user_data;
        self
    }

    /// The longest time from the moment its turn has come until it is issued. Past it the entry completes with `-ETIME` at the
    /// gate and is never issued. Takes one of the ring's side blocks.
    ///
    /// Limits are rounded up to whole microseconds, at least one; more than 71 minutes are no limit.
    #[inline]
    pub fn gate_limit(mut self, limit: Duration) -> Entry {
        self.limits[0] = micros(limit);
        self
    }

    /// The longest time from issue to landing. Past it the entry completes with `-ETIME` at the transfer stage and `MORE`, and
    /// once more with `NOTIF` when the transport has let go of the local range. An entry that had ended before its limit is
    /// not called late. Takes one of the ring's side blocks, the same as [`gate_limit`](Self::gate_limit).
    #[inline]
    pub fn transfer_limit(mut self, limit: Duration) -> Entry {
        self.limits[1] = micros(limit);
        self
    }

    /// Waits for `fence` too: the entry is not issued before every fence on it has signalled. Up to
    /// [`MAX_FENCES`](Self::MAX_FENCES); the first costs nothing, more take one of the ring's side blocks.
    #[inline]
    pub fn wait(mut self, fence: &Fence) -> Entry {
        if self.fence.is_none() {
            self.fence = Some(fence.clone());
        } else {
            self.more_fences.push(fence.clone());
        }
        self
    }
}

fn micros(limit: Duration) -> u32 {
    limit.as_nanos().div_ceil(1000).max(1).try_into().unwrap_or(0)
}
