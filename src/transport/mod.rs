//! What moves bytes.
//!
//! A [`Transport`] is the engine's side: any thread may call it, and it may block. Each poller has a [`Driver`] of it: one
//! thread, never blocking, reading no clock. The core calls a driver only for entries whose fences have signalled.

pub(crate) mod loopback;
pub mod sim;

use std::fmt;
use std::sync::Arc;

use crate::bytes;
use crate::code::Stage;
use crate::doorbell::Doorbell;

/// A moment or a span, in nanoseconds of the core's clock.
pub type Nanos = u64;

/// An operation's name between core and driver: unique for the life of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub(crate) u64);

impl Token {
    /// 24 bits of slot, 40 bits of the entry's number: a core that takes 100 million entries a second may repeat a token after
    /// 3 hours, and only a driver that answers for an operation of 3 hours ago would notice.
    #[inline]
    pub(crate) fn new(slot: u32, generation: u64) -> Token {
        Token(u64::from(slot) << 40 | (generation & ((1 << 40) - 1)))
    }

    #[inline]
    pub(crate) fn slot(self) -> u32 {
        (self.0 >> 40) as u32
    }

    /// True if it was made with this number.
    #[inline]
    pub(crate) fn is_of(self, generation: u64) -> bool {
        (self.0 ^ generation) << 24 == 0
    }
}

/// Which way the bytes go, seen from this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the remote range into the local one.
    Read,
    /// From the local range into the remote one.
    Write,
}

/// One operation to start.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// Its name in the [`Event`]s that follow.
    pub token: Token,
    /// Which way.
    pub direction: Direction,
    /// The local range's address, inside a registered region that stays mapped until the operation is quiet.
    pub local: u64,
    /// Bytes to move, of one entry or of neighbours merged; both ranges have this length.
    pub len: u32,
    /// The remote range's address in the peer's space.
    pub remote: u64,
}

impl Op {
    /// Does the operation by copying inside this process, if `memory` has the remote range in one piece. Bytes moved, or
    /// `None`. `near` is which one to look at first, and then the one that it was: the next operation's is mostly the same.
    ///
    /// # Safety
    /// The local range is mapped and the operation not reported quiet; the ranges in `memory` are mapped.
    pub(crate) unsafe fn copy_here(&self, memory: &[RawMemory], near: &mut usize) -> Option<i32> {
        let has = |range: &RawMemory| range.contains(self.remote, u64::from(self.len));
        if !memory.get(*near).is_some_and(has) {
            *near = memory.iter().position(has)?;
        }
        let (local, remote) = (self.local as *mut u8, self.remote as *mut u8);
        let (from, to) = match self.direction {
            Direction::Read => (remote, local),
            Direction::Write => (local, remote),
        };
        // SAFETY: both ranges are mapped, by the caller's word. Ranges that overlap are the entry's doing and give old or
        // new bytes: each access is atomic.
        unsafe { bytes::copy(from, to, self.len as usize) };
        Some(self.len as i32)
    }
}

/// What a driver has to say about an operation.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// How it ended: exactly once for each operation that `submit` took.
    Result {
        /// Which.
        op: Token,
        /// Bytes moved, or a negative errno.
        res: i32,
        /// [`Stage::Issue`] if nothing was started, [`Stage::Transfer`] otherwise; unused on success.
        stage: Stage,
        /// The transport's own number for a failure.
        detail: i32,
        /// True if nothing touches the local range any more. If false, [`Event::Quiet`] follows.
        quiet: bool,
    },
    /// The local range of an operation whose result was not quiet is now left alone.
    Quiet {
        /// Which.
        op: Token,
        /// The transport's last word.
        detail: i32,
    },
}

/// How the core's caller should wait before the next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Not at all: there is more to do.
    Now,
    /// Spin: only input from other threads can bring work, and it may come at any moment.
    Spin,
    /// Give the core away and come back: something is due within microseconds.
    Yield,
    /// Sleep until the doorbell rings, or this moment.
    Sleep {
        /// `None`: nothing is due, only the doorbell counts.
        until: Option<Nanos>,
    },
}

impl Hint {
    /// The more eager of two.
    pub(crate) fn sooner(self, other: Hint) -> Hint {
        use Hint::{Now, Sleep, Spin, Yield};
        match (self, other) {
            (Now, _) | (_, Now) => Now,
            (Yield, _) | (_, Yield) => Yield,
            (Spin, _) | (_, Spin) => Spin,
            (Sleep { until: a }, Sleep { until: b }) => Sleep { until: a.into_iter().chain(b).min() },
        }
    }
}

/// What a transport can do and how it wants to be treated.
#[derive(Clone, Debug)]
pub struct Caps {
    /// It has threads in this process that need a core while operations are in flight: never spin then.
    pub threads_here: bool,
    /// Most operations in one `submit`.
    pub max_batch: u32,
    /// Most operations in flight towards one peer. Those that a closed ring has left behind, because they could not be
    /// stopped, do not count.
    pub max_in_flight_per_peer: u32,
    /// Most bytes that neighbours are merged into one operation for; 0 if that gains nothing. See
    /// [`Segment::slice`](crate::Segment::slice).
    pub max_merged: u32,
}

/// Wakes the poller from a transport's own thread: after [`Driver::has_input`] or [`Driver::has_room`] says so.
#[cfg_attr(not(feature = "unstable-transport"), allow(dead_code, reason = "none of the transports here needs it"))]
#[derive(Clone, Debug)]
pub struct PollerWaker(pub(crate) Arc<Doorbell>);

#[cfg_attr(not(feature = "unstable-transport"), allow(dead_code, reason = "as above"))]
impl PollerWaker {
    /// Wakes the poller if it sleeps. Never blocks.
    pub fn wake(&self) {
        self.0.ring_always();
    }
}

/// Memory by address, as transports see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMemory {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub len: u64,
}

impl RawMemory {
    /// True if `len` bytes from `address` on lie inside.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|offset| offset.saturating_add(len) <= self.len)
    }
}

impl fmt::Display for RawMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.address, self.len)
    }
}

/// A transport refused or failed something outside a transfer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {why} (code {code})")]
pub struct TransportError {
    /// What was asked, with its values.
    pub what: String,
    /// The transport's own number.
    pub code: i64,
    /// What that means and what to do.
    pub why: String,
}

/// Operations are still running and cannot be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

/// The engine's side of a transport. Any thread may call it, and calls may block.
///
/// # Safety
/// Implementors promise that an operation touches only its own local range and the peer's, and that a quiet result is
/// true: after it, nothing under the transport touches the local range for that operation.
pub unsafe trait Transport: Send + Sync + fmt::Debug + 'static {
    /// The name that peers open.
    fn name(&self) -> String;

    /// What it can do. Constant.
    fn caps(&self) -> Caps;

    /// A driver for one poller.
    fn driver(&self, wake: PollerWaker) -> Box<dyn Driver>;

    /// Lets peers reach `memory` and operations use it as their local range. `location` is Mooncake's, such as `cpu:0`.
    ///
    /// # Safety
    /// The memory stays mapped until it is unregistered and quiet, and the caller accepts that peers change it.
    ///
    /// # Errors
    /// What the transport says, with the range.
    unsafe fn register(&self, memory: RawMemory, location: &str) -> Result<(), TransportError>;

    /// The same memory was registered with the transport by somebody else, who unregisters it too.
    ///
    /// # Safety
    /// As for `register`.
    ///
    /// # Errors
    /// What the transport says, with the range; it is not used then.
    unsafe fn adopt(&self, _memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        Ok(())
    }

    /// Undoes `adopt`: nothing uses the memory as a local range any more.
    fn forget(&self, _memory: RawMemory) {}

    /// Undoes `register`. A peer's running operation may go on: the caller deals with that.
    ///
    /// # Errors
    /// What the transport says, with the range.
    fn unregister(&self, memory: RawMemory) -> Result<(), TransportError>;

    /// Finds a peer and makes it ready for drivers, who know it by the number returned. No two calls return the same number,
    /// also for one name: handles of before a reopen are told apart by it. `fresh`: forget what is cached under that name
    /// first.
    ///
    /// # Errors
    /// What the transport says, with the name.
    fn open(&self, name: &str, fresh: bool) -> Result<u32, TransportError>;

    /// Ends the transport as its last user: blocks, within a bound of seconds, until nothing touches any local memory for
    /// it any more, peers' requests included. Afterwards only drops follow.
    ///
    /// # Errors
    /// [`Busy`] if that could not be had; the caller then keeps memory and transport for ever.
    fn close(&self) -> Result<(), Busy>;
}

/// A poller's side of a transport: one thread, never blocks, reads no clock.
pub trait Driver: Send + fmt::Debug {
    /// Starts a prefix of `ops`, all towards `target`, and says how many. What it takes ends in one [`Event::Result`], in
    /// `out` at once or from `poll` later; what it leaves is offered again after a later `poll`.
    fn submit(&mut self, target: u32, ops: &[Op], now: Nanos, out: &mut Vec<Event>) -> usize;

    /// Looks for ends, at most about `budget` of them, and says how to wait for the rest.
    fn poll(&mut self, now: Nanos, budget: u32, out: &mut Vec<Event>) -> Hint;

    /// Looks for every end there is, due or not: an operation that has ended is neither called late nor given up.
    fn settle(&mut self, now: Nanos, out: &mut Vec<Event>);

    /// What there is for `poll` to look after: 0 if it need not be called.
    fn in_flight(&self) -> usize;

    /// The poller's last look before it sleeps: true if `poll` would find something that another thread has told the driver.
    /// Such a thread does so first, and [wakes](PollerWaker::wake) the poller afterwards. A driver that only asks has none.
    fn has_input(&self) -> bool {
        false
    }

    /// False if `submit` would take nothing now. The driver then wakes the poller when that changes.
    fn has_room(&self) -> bool {
        true
    }

    /// True if nobody will use it again.
    fn is_over(&self) -> bool {
        false
    }
}
