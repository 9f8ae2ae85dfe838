//! The completion queue's entry.

use std::fmt;
use std::time::Duration;

use bitflags::bitflags;
use static_assertions::const_assert_eq;

use crate::code::{Stage, errno};
use crate::spsc::Leftover;
use crate::transport::Nanos;

bitflags! {
    /// What a completion says besides its result. `MORE` and `NOTIF` have io_uring's numbers. Most completions have none.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct CqeFlags: u32 {
        /// One more completion follows: the result is known, but the transport may still touch the local range. Or a
        /// multishot Timeout goes on.
        const MORE = 1 << 1;
        /// The second completion: the local range is left alone from now on. Its result is 0, its `user_data`, stage and
        /// times are the first one's, its `detail` is the transport's last word.
        const NOTIF = 1 << 3;
        /// The ring was closed, or its poller died, around a transfer that could not be stopped: the local range may be touched
        /// for ever, and its memory is kept for ever. With `NOTIF` for an entry whose result was posted before.
        const UNQUIET = 1 << 8;
    }
}

/// A completion: 32 bytes, plain data.
// Aligned, so that none lies on two cache lines.
#[repr(C, align(32))]
#[derive(Clone, Copy)]
pub struct Cqe {
    user_data: u64,
    res: i32,
    /// [`CqeFlags`] and the stage.
    flags: u32,
    /// The detail below, the gate span's low 32 bits above.
    detail_and_gate: u64,
    /// The gate span's high 16 bits below, the wire span's 48 above.
    gate_and_wire: u64,
}

const_assert_eq!(size_of::<Cqe>(), 32);

const SPAN_MAX: u64 = (1 << 48) - 1;

impl Cqe {
    pub(crate) fn new(user_data: u64, res: i32, flags: u32, detail: i32, gate: Nanos, wire: Nanos) -> Cqe {
        // Whole words: fields written narrow and read back wide cost more than the rest of a Nop's turn.
        let [gate, wire] = [gate, wire].map(|span| span.min(SPAN_MAX));
        let detail_and_gate = u64::from(detail as u32) | gate << 32;
        Cqe { user_data, res, flags, detail_and_gate, gate_and_wire: gate >> 32 | wire << 16 }
    }

    /// The entry's own, untouched.
    #[inline]
    pub fn user_data(&self) -> u64 {
        self.user_data
    }

    /// Bytes moved, or a negative errno, as io_uring's `res`; for a Cancel of all, how many. 0 for what moves none: a Nop, a
    /// Wait, a `NOTIF`.
    #[inline]
    pub fn res(&self) -> i32 {
        self.res
    }

    /// Bytes moved, or what went wrong.
    ///
    /// # Errors
    /// [`EntryError`] if the entry failed.
    #[inline]
    pub fn result(&self) -> Result<u32, EntryError> {
        u32::try_from(self.res).map_err(|_| EntryError {
            errno: self.res.saturating_neg(),
            stage: self.stage(),
            detail: self.detail(),
        })
    }

    /// `MORE`, `NOTIF`, `UNQUIET`. The last completion of an entry carries no `MORE`.
    #[inline]
    pub fn flags(&self) -> CqeFlags {
        CqeFlags::from_bits_truncate(self.flags)
    }

    /// Where the entry ended.
    #[inline]
    pub fn stage(&self) -> Stage {
        Stage::from_bits(self.flags)
    }

    /// How the entry ended, as [`Stats`](crate::Stats) counts it; `None` with `MORE`, because another completion follows. A
    /// `NOTIF` is [`Outcome::Failed`], or [`Outcome::Cancelled`]: its entry's result came with `MORE`.
    #[inline]
    pub fn outcome(&self) -> Option<Outcome> {
        let flags = self.flags();
        (!flags.contains(CqeFlags::MORE)).then(|| Outcome::of(self.stage(), self.res, flags.contains(CqeFlags::NOTIF)))
    }

    /// More about a failure. At the gate the errno, as a negative number, of the host fence, timeline or member of its chain
    /// that failed, the driver's `CUresult` after a failed CUDA event. At issue and transfer the transport's own number:
    /// Mooncake's code or task status. 0 if there is no more to say; what it is after a success has no meaning.
    #[inline]
    pub fn detail(&self) -> i32 {
        self.detail_and_gate as i32
    }

    /// From the moment that the poller took the entry until it was issued, or ended without: the wait for its fences and
    /// for its peer's turn. Resolved to a poller's turn, in nanoseconds, at most 2^48 - 1 of them (78 hours).
    pub fn gate_time(&self) -> Duration {
        Duration::from_nanos(self.detail_and_gate >> 32 | (self.gate_and_wire & 0xffff) << 32)
    }

    /// From issued to landed; 0 for what is never issued. Resolved to a poller's turn, so 0 for a transport that moves
    /// the bytes within one, as loopback does. At most 2^48 - 1 ns.
    pub fn wire_time(&self) -> Duration {
        Duration::from_nanos(self.gate_and_wire >> 16)
    }
}

impl fmt::Debug for Cqe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cqe")
            .field("user_data", &self.user_data)
            .field("res", &self.res)
            .field("stage", &self.stage())
            .field("flags", &self.flags())
            .field("detail", &self.detail())
            .field("gate_time", &self.gate_time())
            .field("wire_time", &self.wire_time())
            .finish()
    }
}

impl Leftover for Cqe {
    fn discard(self) {}
}

/// How an entry ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It did its work: it ended at [`Stage::Done`]. `-ETIME` of a Timeout that ran out is such an end.
    Ok,
    /// Something went wrong, here or in what it depended on.
    Failed,
    /// Somebody cancelled it: `-ECANCELED` at [`Stage::Cancel`].
    Cancelled,
}

impl Outcome {
    /// By an entry's last completion.
    #[inline]
    pub(crate) fn of(stage: Stage, res: i32, notif: bool) -> Outcome {
        match stage {
            Stage::Done if !notif => Outcome::Ok,
            Stage::Cancel if notif || res == -errno::ECANCELED => Outcome::Cancelled,
            _ => Outcome::Failed,
        }
    }
}

/// An entry failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryError {
    /// The positive errno.
    pub errno: i32,
    /// Where the entry ended. One pair of stage and errno per cause: see `docs/semantics.md`.
    pub stage: Stage,
    /// See [`Cqe::detail`].
    pub detail: i32,
}

impl fmt::Display for EntryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = std::io::Error::from_raw_os_error(self.errno);
        write!(f, "ended at the stage {}: {text}", self.stage)?;
        if self.detail != 0 { write!(f, ", detail {}", self.detail) } else { Ok(()) }
    }
}

impl std::error::Error for EntryError {}

impl From<EntryError> for std::io::Error {
    fn from(error: EntryError) -> std::io::Error {
        std::io::Error::new(std::io::Error::from_raw_os_error(error.errno).kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_kept_and_saturate() {
        let cqe = Cqe::new(1, 2, 0, 3, 0x1234_5678_9abc, u64::MAX);
        assert_eq!(cqe.gate_time().as_nanos(), 0x1234_5678_9abc);
        assert_eq!(cqe.wire_time().as_nanos(), u128::from(SPAN_MAX));
    }
}
