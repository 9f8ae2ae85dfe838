//! What entries can do. Build one with `new(..)`, turn it into an [`Entry`] with `build()`, add fences, flags and
//! `user_data`.

use std::time::{Duration, Instant};

use crate::clock;
use crate::engine::{Remote, Segment};
use crate::entry::{Args, Entry, Parts, Transfer};
use crate::region::{Registered, Slice};
use crate::ring::Messages;
use crate::sqe::{Opcode, op_flags};
use crate::store;
pub use crate::store::opcode::{Exist, Get, Put, Remove};

/// Does nothing: completes with 0 once its fences have signalled. For measuring, and for waking a reaper.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nop {
    args: Args,
}

impl Nop {
    /// A Nop.
    #[inline]
    pub fn new() -> Nop {
        Nop::default()
    }

    /// Completes with `res` instead: a negative errno is a failure, for trying what a failure does to a chain.
    #[inline]
    #[must_use]
    pub fn result(mut self, res: i32) -> Nop {
        self.args.len = res as u32;
        self
    }

    /// Fails when the poller takes it, with `-EINVAL` at the issue stage, and its whole chain with it: for trying what an
    /// entry does to its chain that went bad after it was accepted.
    #[inline]
    #[must_use]
    pub fn bad(mut self) -> Nop {
        self.args.op_flags = op_flags::NOP_BAD;
        self
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        Entry::new(Opcode::Nop, self.args)
    }
}

/// Completes with 0 when every fence on it has signalled, which is how a completion queue hears of a fence.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait;

impl Wait {
    /// A Wait; add what it waits for with [`Entry::wait`]. Without a fence it completes at once.
    #[inline]
    pub const fn new() -> Wait {
        Wait
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        Entry::new(Opcode::Wait, Args::default())
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
    #[inline]
    pub fn new(local: Slice, remote: Remote) -> Read {
        Read { transfer: (local, remote) }
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        let (local, remote) = self.transfer;
        Entry::transfer(Opcode::Read, local, remote)
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
    #[inline]
    pub fn new(local: Slice, remote: Remote) -> Write {
        Write { transfer: (local, remote) }
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        let (local, remote) = self.transfer;
        Entry::transfer(Opcode::Write, local, remote)
    }
}

/// Moves bytes from several places of a peer's memory into several of ours: a load in parts, with one completion.
///
/// Completes with the number of all bytes once every part has landed. If a part fails, no further one is issued, and the
/// entry completes with the first failure that was seen when the issued ones have their results: with `MORE` if one of them
/// may still touch its local range, and once more with `NOTIF` when none does. Any part may have moved then, or not.
///
/// Up to [`Entry::MAX_PARTS`] parts, all of one segment, together less than 2 GiB. It takes one of the ring's part lists
/// until its local ranges are quiet, of which there are an eighth of the ring's capacity.
#[derive(Debug)]
pub struct Readv {
    parts: Parts,
}

impl Readv {
    /// Reads each slice's bytes from the place beside it on. A part may have 0 bytes; without any the entry completes with 0
    /// after its fences, without the transport. All is checked at push.
    pub fn new(parts: impl IntoIterator<Item = (Slice, Remote)>) -> Readv {
        Readv { parts: list(parts) }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        Entry::vectored(Opcode::Readv, self.parts)
    }
}

/// Moves bytes from several places of our memory into several of a peer's: a store in parts, with one completion. As
/// [`Readv`]. After a failure the remote ranges are undefined until their owner has unregistered them, as after a [`Write`].
#[derive(Debug)]
pub struct Writev {
    parts: Parts,
}

impl Writev {
    /// Writes each slice's bytes to the place beside it on. See [`Readv::new`].
    pub fn new(parts: impl IntoIterator<Item = (Slice, Remote)>) -> Writev {
        Writev { parts: list(parts) }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        Entry::vectored(Opcode::Writev, self.parts)
    }
}

/// [`Readv`] by page numbers: pages of one size in one local range, from pages of that size in a peer's memory.
#[derive(Debug)]
pub struct ReadPages {
    parts: Parts,
}

impl ReadPages {
    /// For each pair of `pages`, a local and a remote number, reads the `page_size` bytes of the remote page, counted from
    /// `remote` on, into the local page, counted from the start of `local`. That every local page lies inside `local` is
    /// checked at push.
    pub fn new(
        local: Slice,
        remote: Remote,
        page_size: usize,
        pages: impl IntoIterator<Item = (u32, u32)>,
    ) -> ReadPages {
        ReadPages { parts: paged(local, remote, page_size, pages) }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        Entry::vectored(Opcode::Readv, self.parts)
    }
}

/// [`Writev`] by page numbers.
#[derive(Debug)]
pub struct WritePages {
    parts: Parts,
}

impl WritePages {
    /// For each pair of `pages`, a local and a remote number, writes the local page to the remote one. See
    /// [`ReadPages::new`].
    pub fn new(
        local: Slice,
        remote: Remote,
        page_size: usize,
        pages: impl IntoIterator<Item = (u32, u32)>,
    ) -> WritePages {
        WritePages { parts: paged(local, remote, page_size, pages) }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        Entry::vectored(Opcode::Writev, self.parts)
    }
}

fn list(parts: impl IntoIterator<Item = (Slice, Remote)>) -> Parts {
    Parts::List(parts.into_iter().map(|(local, remote)| Transfer { local, remote: remote.place }).collect())
}

fn paged(local: Slice, remote: Remote, page: usize, pages: impl IntoIterator<Item = (u32, u32)>) -> Parts {
    Parts::Pages {
        base: Transfer { local, remote: remote.place },
        page: page as u64,
        pages: pages.into_iter().collect(),
    }
}

fn nanos(span: Duration) -> u64 {
    span.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Completes with `-ETIME` when its time has come, counted from the moment it starts: after its fences, and after its
/// predecessor in a chain. To links that is a failure, unless [`etime_success`](Self::etime_success).
#[derive(Clone, Copy, Debug)]
pub struct Timeout {
    args: Args,
}

impl Timeout {
    /// After `span`, by value; more than 584 years is taken as that.
    #[inline]
    pub fn new(span: Duration) -> Timeout {
        Timeout { args: Args { local: nanos(span), ..Args::default() } }
    }

    /// At `moment`; one that has passed is due at once.
    #[inline]
    pub fn at(moment: Instant) -> Timeout {
        Timeout { args: Args { op_flags: op_flags::ABSOLUTE, local: clock::at(moment), ..Args::default() } }
    }

    /// Running out counts as a success to links and to `CQE_SKIP_SUCCESS`; the result stays `-ETIME`.
    #[inline]
    #[must_use]
    pub fn etime_success(mut self) -> Timeout {
        self.args.op_flags |= op_flags::ETIME_SUCCESS;
        self
    }

    /// Completes `repeats` times, one span apart, or for ever if 0; all completions but the last carry `MORE`. One
    /// that finds the completion queue full is the last. Has no effect on a Timeout made with [`at`](Self::at).
    #[inline]
    #[must_use]
    pub fn multishot(mut self, repeats: u32) -> Timeout {
        if self.args.op_flags & op_flags::ABSOLUTE == 0 {
            self.args.op_flags |= op_flags::MULTISHOT;
            self.args.len = repeats;
        }
        self
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        Entry::new(Opcode::Timeout, self.args)
    }
}

/// Limits the entry before it in a chain: if that has not ended after the span, counted from its start, it is cancelled,
/// and this completes with `-ETIME`. Otherwise this completes with `-ECANCELED`. Alone, first in a chain or behind another
/// LinkTimeout it fails with `-EINVAL`, and its chain with it.
///
/// An entry that the transport has is detached: it completes with `-ECANCELED` and `MORE`, and once more with `NOTIF` when
/// its local range is quiet.
#[derive(Clone, Copy, Debug)]
pub struct LinkTimeout {
    args: Args,
}

impl LinkTimeout {
    /// After `span`, by value.
    #[inline]
    pub fn new(span: Duration) -> LinkTimeout {
        LinkTimeout { args: Args { local: nanos(span), ..Args::default() } }
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        Entry::new(Opcode::LinkTimeout, self.args)
    }
}

/// Ends a Timeout early: completes with 0, the Timeout with `-ECANCELED`; or with `-ENOENT` if there is none.
#[derive(Clone, Copy, Debug)]
pub struct TimeoutRemove {
    args: Args,
}

impl TimeoutRemove {
    /// The oldest Timeout with this `user_data`.
    #[inline]
    pub fn new(user_data: u64) -> TimeoutRemove {
        TimeoutRemove { args: Args { local: user_data, op_flags: op_flags::TIMEOUTS, ..Args::default() } }
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        Entry::new(Opcode::Cancel, self.args)
    }
}

/// Posts a completion on another ring, or on the same: with a `user_data` and a result of the sender's choice. For steering
/// and waking another thread's completion loop. Completes with 0 once it is sent, after its fences as anything does.
///
/// The push takes a unit of the target's capacity, so the target's completion queue never loses one, and is refused
/// ([`Refusal::TargetFull`](crate::Refusal::TargetFull), [`TargetClosed`](crate::Refusal::TargetClosed)) if there is none.
/// If the target closes later this completes with `-EBADFD`. If this fails or is cancelled, nothing is posted and the unit
/// goes back.
#[derive(Clone, Debug)]
pub struct MsgRing {
    target: Messages,
    user_data: u64,
    res: u32,
}

impl MsgRing {
    /// A completion with this `user_data` and result for the ring that `target` is of, see
    /// [`Ring::messages`](crate::Ring::messages). A result above 2^31 - 1 is taken as that.
    pub fn new(target: &Messages, user_data: u64, res: u32) -> MsgRing {
        MsgRing { target: target.clone(), user_data, res: res.min(i32::MAX as u32) }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        Entry::message(self.target, self.user_data, self.res)
    }
}

/// Gives a running Timeout a new span, counted from now: completes with 0, or with `-ENOENT` if there is none.
#[derive(Clone, Copy, Debug)]
pub struct TimeoutUpdate {
    args: Args,
}

impl TimeoutUpdate {
    /// The oldest running Timeout with this `user_data`.
    #[inline]
    pub fn new(user_data: u64, span: Duration) -> TimeoutUpdate {
        TimeoutUpdate { args: Args { local: user_data, remote: nanos(span), ..Args::default() } }
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        Entry::new(Opcode::TimeoutUpdate, self.args)
    }
}

/// Which entries of a ring are meant.
#[derive(Clone, Copy, Debug)]
pub struct Select {
    pub(crate) op_flags: u16,
    pub(crate) key: u64,
}

impl Select {
    /// What has this `user_data`.
    #[inline]
    pub fn user_data(user_data: u64) -> Select {
        Select { op_flags: 0, key: user_data }
    }

    /// What goes to or comes from a segment.
    #[inline]
    pub fn segment(segment: &Segment) -> Select {
        Select { op_flags: op_flags::SEGMENT, key: u64::from(segment.inner.target) }
    }

    /// What goes to a Store, or comes from it.
    #[inline]
    pub fn store(client: &store::Client) -> Select {
        Select { op_flags: op_flags::SEGMENT, key: u64::from(client.inner.target) }
    }

    /// What uses a region.
    #[inline]
    pub fn region(region: &Registered) -> Select {
        Select { op_flags: op_flags::REGION, key: region.address() }
    }

    /// Everything.
    #[inline]
    pub fn any() -> Select {
        Select { op_flags: op_flags::ANY, key: 0 }
    }
}

/// Cancels entries of the same ring: what waits at the gate, for its turn in a chain, behind a drain, for its peer, and
/// Timeouts. Those complete with `-ECANCELED`, a member of a chain when its turn comes.
///
/// Completes with 0 if the first match, the oldest, was cancelled; with `-ENOENT` if there is none; with `-EALREADY` if the
/// transport has it: it then completes normally, unless [`detach`](Self::detach). With [`all`](Self::all) it completes
/// with the number cancelled. LinkTimeouts, and the Cancel itself, are never matched. Unless it is part of a chain or asks
/// for a drain itself, it does not wait for drains.
#[derive(Clone, Copy, Debug)]
pub struct Cancel {
    args: Args,
}

impl Cancel {
    /// The oldest entry that is selected.
    #[inline]
    pub fn new(select: Select) -> Cancel {
        let Select { op_flags, key } = select;
        Cancel { args: Args { local: key, op_flags, ..Args::default() } }
    }

    /// The oldest entry with this `user_data`.
    #[inline]
    pub fn user_data(user_data: u64) -> Cancel {
        Cancel::new(Select::user_data(user_data))
    }

    /// Everything in the ring.
    #[inline]
    pub fn any() -> Cancel {
        Cancel::new(Select::any()).all()
    }

    /// What it says, for a call without an entry.
    pub(crate) fn parts(self) -> (u16, u64) {
        (self.args.op_flags, self.args.local)
    }

    /// Every match, not only the oldest.
    #[inline]
    #[must_use]
    pub fn all(mut self) -> Cancel {
        self.args.op_flags |= op_flags::ALL;
        self
    }

    /// What the transport has gets its result, `-ECANCELED` with `MORE`, now, and `NOTIF` when its local range is quiet.
    #[inline]
    #[must_use]
    pub fn detach(mut self) -> Cancel {
        self.args.op_flags |= op_flags::DETACH;
        self
    }

    /// The entry.
    #[inline]
    pub fn build(self) -> Entry {
        Entry::new(Opcode::Cancel, self.args)
    }
}
