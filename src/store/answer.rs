//! What a Store's call says of one key, in its own numbers and in ours.

use crate::code::errno;

/// How the call for one key ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// Bytes, a truth value, or a negative errno; the stage of the latter is always `Transfer`.
    pub(crate) res: i32,
    pub(crate) detail: i32,
    /// Nothing touches the local range any more. If not, nobody will say when that is.
    pub(crate) quiet: bool,
}

/// Mooncake's numbers, from its `ErrorCode`.
pub(crate) mod code {
    pub(crate) const NO_SPACE: i32 = -200;
    pub(crate) const INVALID_KEY: i32 = -400;
    pub(crate) const INVALID_PARAMS: i32 = -600;
    pub(crate) const NOT_READY: i32 = -703;
    pub(crate) const NOT_FOUND: i32 = -704;
    pub(crate) const EXISTS: i32 = -705;
    pub(crate) const HAS_LEASE: i32 = -706;
    pub(crate) const LEASE_EXPIRED: i32 = -707;
    pub(crate) const HAS_TASK: i32 = -708;
    pub(crate) const IS_BUSY: i32 = -714;
    pub(crate) const TRANSFER_FAILED: i32 = -800;
    pub(crate) const CHECKSUM: i32 = -801;
    pub(crate) const RPC_FAILED: i32 = -900;
    pub(crate) const RPC_TIMEOUT: i32 = -901;
    pub(crate) const NOT_SUPPORTED: i32 = -1012;
}

impl Answer {
    pub(crate) fn done(res: u64) -> Answer {
        // More than a ring's entry can move is refused at its push.
        Answer { res: i32::try_from(res).unwrap_or(i32::MAX), detail: 0, quiet: true }
    }

    /// An object of `size` bytes does not fit.
    pub(crate) fn too_small(size: u64) -> Answer {
        Answer { res: -errno::EMSGSIZE, detail: i32::try_from(size).unwrap_or(i32::MAX), quiet: true }
    }

    /// The code that asks has panicked or thrown.
    pub(crate) const BROKEN: Answer = Answer { res: -errno::EPROTO, detail: 0, quiet: true };

    /// The Store gave up on moving the bytes, which may go on.
    pub(crate) const GIVEN_UP: Answer =
        Answer { res: -errno::ENOTRECOVERABLE, detail: code::TRANSFER_FAILED, quiet: false };

    /// From Mooncake's number.
    pub(crate) fn failed(code: i32) -> Answer {
        let errno = match code {
            code::NO_SPACE => errno::ENOSPC,
            code::INVALID_KEY | code::INVALID_PARAMS => errno::EINVAL,
            code::NOT_READY => errno::EAGAIN,
            code::NOT_FOUND => errno::ENOENT,
            code::EXISTS => errno::EEXIST,
            code::HAS_LEASE | code::HAS_TASK | code::IS_BUSY => errno::EBUSY,
            code::LEASE_EXPIRED => errno::EKEYEXPIRED,
            code::TRANSFER_FAILED => errno::EIO,
            code::CHECKSUM => errno::EBADMSG,
            code::RPC_FAILED => errno::ECONNRESET,
            code::RPC_TIMEOUT => errno::ETIMEDOUT,
            code::NOT_SUPPORTED => errno::EOPNOTSUPP,
            _ => errno::EREMOTEIO,
        };
        Answer { res: -errno, detail: code, quiet: true }
    }
}
