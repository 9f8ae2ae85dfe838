//! The slots: where an entry lives from the moment it cannot end at once until it is posted.

use static_assertions::const_assert_eq;

use crate::sqe::Sqe;
use crate::transport::{Nanos, Token};

/// No slot: the end of a list.
pub(crate) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Free,
    /// Waits for fences.
    Gated,
    /// Waits for its peer's turn.
    Ready,
    /// With the transport.
    Issued,
    /// Its result is posted with MORE; the transport may still touch the local range.
    Overdue,
    /// Has a completion for which the CQ has no room.
    Waiting,
}

#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) generation: u64,
    /// When it was taken, issued and landed. 0 for not yet.
    pub(crate) taken: Nanos,
    pub(crate) issued: Nanos,
    pub(crate) landed: Nanos,
    /// Neighbours in whichever list the state says.
    next: u32,
    prev: u32,
    pub(crate) ring: u32,
    /// Fences that have not signalled.
    pub(crate) pending: u32,
    /// The result, once there is one.
    pub(crate) res: i32,
    pub(crate) detail: i32,
    /// The stage's bits.
    pub(crate) flags: u16,
    pub(crate) state: State,
    /// Nothing touches the local range.
    pub(crate) quiet: bool,
    /// The result is posted; what waits for room is the NOTIF.
    pub(crate) notif: bool,
    pub(crate) sqe: Sqe,
}

