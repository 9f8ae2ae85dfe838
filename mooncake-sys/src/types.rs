//! The types and constants of Mooncake's `transfer_engine_c.h`.

use std::ffi::{c_int, c_void};
use std::mem::{offset_of, size_of};

/// A Transfer Engine. Known only by address: from [`Api::create_engine`](crate::Api::create_engine), or from
/// `get_engine_ptr()` of Mooncake's Python class, which answers the same pointer.
#[repr(C)]
#[derive(Debug)]
pub struct TransferEngine {
    opaque: [u8; 0],
}

/// A transport installed in an engine. Known only by address, owned by the engine.
#[repr(C)]
#[derive(Debug)]
pub struct Transport {
    opaque: [u8; 0],
}

/// A segment: what an engine knows of a peer. Never negative.
pub type SegmentId = i32;

/// The segment of the engine itself.
pub const LOCAL_SEGMENT: SegmentId = 0;

/// A batch of tasks. It is an address in disguise: a batch that was freed must not be named again.
pub type BatchId = u64;

/// [`TransferRequest::opcode`]: from the segment into local memory.
pub const OPCODE_READ: c_int = 0;
/// [`TransferRequest::opcode`]: from local memory to the segment.
pub const OPCODE_WRITE: c_int = 1;

/// [`TransferStatus::status`]: not started.
pub const STATUS_WAITING: c_int = 0;
/// [`TransferStatus::status`]: running.
pub const STATUS_PENDING: c_int = 1;
/// [`TransferStatus::status`]: a failure; the request was invalid.
pub const STATUS_INVALID: c_int = 2;
/// [`TransferStatus::status`]: a failure; canceled.
pub const STATUS_CANCELED: c_int = 3;
/// [`TransferStatus::status`]: the only success.
pub const STATUS_COMPLETED: c_int = 4;
/// [`TransferStatus::status`]: given up on, but **not an end**: late data may still arrive, and the batch cannot be freed.
pub const STATUS_TIMEOUT: c_int = 5;
/// [`TransferStatus::status`]: a failure. The end here, not at the peer, which may apply a WRITE later.
pub const STATUS_FAILED: c_int = 6;

/// `transfer_request_t`: one task of a submit.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransferRequest {
    /// [`OPCODE_READ`] or [`OPCODE_WRITE`].
    pub opcode: c_int,
    /// The local address.
    pub source: *mut c_void,
    /// The peer.
    pub target_id: SegmentId,
    /// Unused by memory transfers: 0. Only some versions of the header name it; in the others its place is padding.
    pub file_id: u32,
    /// The address in the peer's memory, absolute.
    pub target_offset: u64,
    /// Bytes. 0 completes at once, unchecked.
    pub length: u64,
}

/// `transfer_status_t`: where a task is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStatus {
    /// One of the `STATUS_` constants. A number that is none of them is a failure.
    pub status: c_int,
    /// Bytes moved; may be stale in the poll that first answers [`STATUS_COMPLETED`].
    pub transferred_bytes: u64,
}

/// `buffer_entry_t`: one range of a batch registration.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BufferEntry {
    /// First byte.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
}

const _: () = {
    assert!(size_of::<c_int>() == 4);
    assert!(size_of::<usize>() == 8, "Mooncake and its layouts are 64-bit");

    assert!(size_of::<TransferRequest>() == 40);
    assert!(offset_of!(TransferRequest, opcode) == 0);
    assert!(offset_of!(TransferRequest, source) == 8);
    assert!(offset_of!(TransferRequest, target_id) == 16);
    assert!(offset_of!(TransferRequest, file_id) == 20);
    assert!(offset_of!(TransferRequest, target_offset) == 24);
    assert!(offset_of!(TransferRequest, length) == 32);

    assert!(size_of::<TransferStatus>() == 16);
    assert!(offset_of!(TransferStatus, status) == 0);
    assert!(offset_of!(TransferStatus, transferred_bytes) == 8);

    assert!(size_of::<BufferEntry>() == 16);
    assert!(offset_of!(BufferEntry, addr) == 0);
    assert!(offset_of!(BufferEntry, length) == 8);
};
