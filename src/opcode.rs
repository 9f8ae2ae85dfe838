//! What entries can do. Build one with `new(..)`, turn it into an [`Entry`] with `build()`, add fences and `user_data`.

use crate::engine::Remote;
use crate::entry::{Entry, Transfer};
use crate::region::Slice;
use crate::sqe::Opcode;

/// Does nothing: completes with 0 once its fences have signalled. For measuring, and for waking a reaper.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nop;

impl Nop {
    /// A Nop.
    pub const fn new() -> Nop {
        Nop
    }

    /// The entry.
    pub fn build(self) -> Entry {
        Entry::new(Opcode::Nop, None)
    }
}

/// Completes with 0 when every fence on it has signalled, which is how a completion queue hears of a fence.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait;

impl Wait {
    /// A Wait; add what it waits for with [`Entry::wait`]. Without a fence it completes at once.
    pub const fn new() -> Wait {
        Wait
    }

    /// The entry.
    pub fn build(self) -> Entry {
        Entry::new(Opcode::Wait, None)
    }
}

/// Moves bytes from a peer's memory into ours: a load. Completes with the number of bytes once they have landed. After a
/// failure the local range may hold any mixture of old and new bytes.
#[derive(Clone, Debug)]
pub struct Read {
    transfer: (Slice, Remote),
}

impl Read {
    /// Reads `local.len()` bytes, less than 2 GiB, from `remote` on. Lengths and ranges are checked at push. 0 bytes
    /// complete with 0 after the fences, without the transport.
    pub fn new(local: Slice, remote: Remote) -> Read {
        Read { transfer: (local, remote) }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        let (local, remote) = self.transfer;
        Entry::new(Opcode::Read, Some(Transfer { local, remote }))
    }
}

/// Moves bytes from our memory into a peer's: a store. Completes with the number of bytes once the peer has them.
///
/// After a failed Write the remote range is undefined until its owner has unregistered it: the peer may apply the old
/// bytes later, when nobody waits for them any more.
#[derive(Clone, Debug)]
pub struct Write {
    transfer: (Slice, Remote),
}

impl Write {
    /// Writes `local.len()` bytes, less than 2 GiB, to `remote` on. Lengths and ranges are checked at push. 0 bytes
    /// complete with 0 after the fences, without the transport.
    pub fn new(local: Slice, remote: Remote) -> Write {
        Write { transfer: (local, remote) }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        let (local, remote) = self.transfer;
        Entry::new(Opcode::Write, Some(Transfer { local, remote }))
    }
}
