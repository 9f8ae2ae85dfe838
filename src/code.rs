//! Result codes: which stage ended an entry, and the errno that it ended with.

use std::fmt;

/// The error numbers that moonring uses, as Linux numbers them.
#[allow(missing_docs, reason = "the names are errno(3)'s")]
pub mod errno {
    pub const ENOENT: i32 = 2;
    pub const EIO: i32 = 5;
    pub const EAGAIN: i32 = 11;
    pub const EFAULT: i32 = 14;
    pub const EBUSY: i32 = 16;
    pub const EEXIST: i32 = 17;
    pub const EINVAL: i32 = 22;
    pub const ENOSPC: i32 = 28;
    pub const ETIME: i32 = 62;
    pub const EPROTO: i32 = 71;
    pub const EBADMSG: i32 = 74;
    pub const EBADFD: i32 = 77;
    pub const EMSGSIZE: i32 = 90;
    pub const EOPNOTSUPP: i32 = 95;
    pub const ECONNRESET: i32 = 104;
    pub const ENOBUFS: i32 = 105;
    pub const ESHUTDOWN: i32 = 108;
    pub const ETIMEDOUT: i32 = 110;
    pub const EALREADY: i32 = 114;
    pub const ESTALE: i32 = 116;
    pub const EREMOTEIO: i32 = 121;
    pub const ECANCELED: i32 = 125;
    pub const EKEYEXPIRED: i32 = 127;
    pub const EOWNERDEAD: i32 = 130;
    pub const ENOTRECOVERABLE: i32 = 131;
}

/// Where in its life an entry ended. Together with the errno it names the cause: see `docs/semantics.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// It did its work: the result is a byte count, or `-ETIME` of a timeout whose time came.
    Done,
    /// It was waiting: for its fences, its turn in a chain, or its peer. The transport was never called for it.
    Gate,
    /// The transport refused it, or it failed its preparation. Nothing was started.
    Issue,
    /// The transport had started it. Bytes may have moved.
    Transfer,
    /// It was cancelled; or it is a Cancel, and what it meant could not be.
    Cancel,
    /// Its ring was closed, or its poller died.
    Shutdown,
}

impl Stage {
    pub(crate) const fn bits(self) -> u32 {
        (match self {
            Stage::Done => 0,
            Stage::Gate => 1,
            Stage::Issue => 2,
            Stage::Transfer => 3,
            Stage::Cancel => 4,
            Stage::Shutdown => 5,
        }) << Self::SHIFT
    }

    pub(crate) const fn from_bits(flags: u32) -> Stage {
        match (flags >> Self::SHIFT) & 7 {
            0 => Stage::Done,
            1 => Stage::Gate,
            2 => Stage::Issue,
            3 => Stage::Transfer,
            4 => Stage::Cancel,
            _ => Stage::Shutdown,
        }
    }

    const SHIFT: u32 = 16;
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Done => "done",
            Stage::Gate => "gate",
            Stage::Issue => "issue",
            Stage::Transfer => "transfer",
            Stage::Cancel => "cancel",
            Stage::Shutdown => "shutdown",
        })
    }
}
