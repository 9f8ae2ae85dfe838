//! The types of the Store's calls, and its result codes.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::marker::PhantomData;
use std::mem::size_of;

use crate::types::BufferEntry;

/// A Store client. Known only by address, from [`StoreApi::create`](crate::StoreApi::create).
#[repr(C)]
#[derive(Debug)]
pub struct Store {
    opaque: [u8; 0],
}

/// What [`StoreApi::setup`](crate::StoreApi::setup) needs to know.
#[derive(Clone, Copy, Debug)]
pub struct StoreSetup<'a> {
    /// The address that other clients reach this one at, with or without a port. Without, Mooncake takes a free one from
    /// 12300 to 14300.
    pub local_hostname: &'a CStr,
    /// `P2PHANDSHAKE`, or a metadata server's URL.
    pub metadata_server: &'a CStr,
    /// Bytes of memory that this client adds to the Store, for values of all clients; 0 for none. Mooncake allocates them.
    pub segment_bytes: u64,
    /// Bytes of a buffer of the client's own. The calls in this crate use registered buffers instead, and need none of it
    /// but for values that lie on disk; 0 is allowed.
    pub buffer_bytes: u64,
    /// `tcp` or `rdma`.
    pub protocol: &'a CStr,
    /// The network cards, comma-separated; empty for those that Mooncake finds.
    pub device: &'a CStr,
    /// The master, `host:port`.
    pub master: &'a CStr,
}

/// One key of a batch, and the memory that its value comes from or goes to.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StoreItem<'a> {
    key: *const c_char,
    slices: *const BufferEntry,
    count: usize,
    borrowed: PhantomData<(&'a CStr, &'a [BufferEntry])>,
}

const _: () = assert!(size_of::<StoreItem>() == 24);

impl<'a> StoreItem<'a> {
    /// The value of `key`, spread over `slices` in that order.
    pub fn new(key: &'a CStr, slices: &'a [BufferEntry]) -> Self {
        Self { key: key.as_ptr(), slices: slices.as_ptr(), count: slices.len(), borrowed: PhantomData }
    }

    /// The key.
    pub fn key(&self) -> &'a CStr {
        // SAFETY: it is what `new` borrowed for `'a`.
        unsafe { CStr::from_ptr(self.key) }
    }

    /// The slices.
    pub fn slices(&self) -> &'a [BufferEntry] {
        // SAFETY: it is what `new` borrowed for `'a`.
        unsafe { std::slice::from_raw_parts(self.slices, self.count) }
    }
}

impl fmt::Debug for StoreItem<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreItem").field("key", &self.key()).field("slices", &self.slices()).finish()
    }
}

macro_rules! codes {
    ($($(#[$doc:meta])* $constant:ident = $code:literal, $name:literal;)*) => {
        $($(#[$doc])* pub const $constant: i32 = $code;)*

        /// What one of the Store's codes means.
        pub fn store_code_name(code: i32) -> Option<&'static str> {
            match code {
                $($code => Some($name),)*
                _ => None,
            }
        }
    };
}

codes! {
    /// A Store code: an error inside Mooncake, or a C++ exception that the C interface has swallowed.
    STORE_INTERNAL = -1, "internal error";
    /// A Store code: a buffer of Mooncake's own is too small.
    STORE_BUFFER_OVERFLOW = -10, "buffer overflow";
    /// A Store code: index of a shard out of range.
    STORE_SHARD_OUT_OF_RANGE = -100, "shard index out of range";
    /// A Store code: the master knows no segment to take memory from.
    STORE_SEGMENT_NOT_FOUND = -101, "segment not found";
    /// A Store code: the segment is there already.
    STORE_SEGMENT_EXISTS = -102, "segment already exists";
    /// A Store code: the master does not know this client.
    STORE_CLIENT_NOT_FOUND = -103, "client not found";
    /// A Store code: no space for the value, also after eviction.
    STORE_NO_SPACE = -200, "no space";
    /// A Store code: a wrong version.
    STORE_INVALID_VERSION = -300, "invalid version";
    /// A Store code: a key that the master does not take.
    STORE_INVALID_KEY = -400, "invalid key";
    /// A Store code: a write failed.
    STORE_WRITE_FAILED = -500, "write failed";
    /// A Store code: bad arguments. Also the answer to a GET whose buffer is too small, to memory that is not registered, and
    /// of a client that is not set up.
    STORE_INVALID_PARAMS = -600, "invalid parameters";
    /// A Store code: this client may not do that.
    STORE_ILLEGAL_CLIENT = -601, "illegal client";
    /// A Store code: not a write that can be done now.
    STORE_INVALID_WRITE = -700, "invalid write";
    /// A Store code: not a read that can be done now.
    STORE_INVALID_READ = -701, "invalid read";
    /// A Store code: no usable replica.
    STORE_INVALID_REPLICA = -702, "invalid replica";
    /// A Store code: the value is still being written.
    STORE_NOT_READY = -703, "replica not ready";
    /// A Store code: there is no such key.
    STORE_NOT_FOUND = -704, "object not found";
    /// A Store code: the key has a value.
    STORE_EXISTS = -705, "object already exists";
    /// A Store code: somebody reads the value, or has read it just now; it cannot be removed without `force`.
    STORE_HAS_LEASE = -706, "object has lease";
    /// A Store code: the lease ended before the transfer did; what was read may be another value's bytes.
    STORE_LEASE_EXPIRED = -707, "lease expired";
    /// A Store code: the value is being replicated.
    STORE_REPLICATING = -708, "object has a replication task";
    /// A Store code: the value is not being replicated.
    STORE_NOT_REPLICATING = -709, "object has no replication task";
    /// A Store code: there is no such replica.
    STORE_REPLICA_NOT_FOUND = -710, "replica not found";
    /// A Store code: the replica is there already.
    STORE_REPLICA_EXISTS = -711, "replica already exists";
    /// A Store code: the replica was there once.
    STORE_REPLICA_GONE = -712, "replica is gone";
    /// A Store code: the replica is not in this client's memory.
    STORE_REPLICA_NOT_LOCAL = -713, "replica not in local memory";
    /// A Store code: the replicas are in use.
    STORE_REPLICA_BUSY = -714, "object replicas are busy";
    /// A Store code: a transfer failed.
    STORE_TRANSFER_FAILED = -800, "transfer failed";
    /// A Store code: the bytes read are not those written.
    STORE_CHECKSUM_MISMATCH = -801, "checksum mismatch";
    /// A Store code: the master, or another client, could not be asked.
    STORE_RPC_FAILED = -900, "RPC failed";
    /// A Store code: the master, or another client, did not answer in time.
    STORE_RPC_TIMEOUT = -901, "RPC timed out";
    /// A Store code: not in the state that the Store is in.
    STORE_UNAVAILABLE_IN_STATUS = -1010, "unavailable in the current status";
    /// A Store code: not in the mode that the Store is in.
    STORE_UNAVAILABLE_IN_MODE = -1011, "unavailable in the current mode";
    /// A Store code: not supported in this mode.
    STORE_NOT_SUPPORTED = -1012, "not supported";
    /// A Store code: the file is not there.
    STORE_FILE_NOT_FOUND = -1100, "file not found";
    /// A Store code: the file cannot be opened.
    STORE_FILE_OPEN_FAILED = -1101, "file cannot be opened";
    /// A Store code: the file cannot be read.
    STORE_FILE_READ_FAILED = -1102, "file cannot be read";
    /// A Store code: the file cannot be written.
    STORE_FILE_WRITE_FAILED = -1103, "file cannot be written";
    /// A Store code: the tenant has used up its memory.
    STORE_QUOTA_EXCEEDED = -1700, "tenant quota exceeded";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_gives_back_what_it_was_made_of() {
        let slices = [BufferEntry { addr: 8 as *mut _, length: 3 }];
        let item = StoreItem::new(c"k", &slices);
        assert_eq!((item.key(), item.slices().len(), item.slices()[0].length), (c"k", 1, 3));
        assert!(StoreItem::new(c"k", &[]).slices().is_empty());
        assert!(format!("{item:?}").contains("\"k\""));
    }

    #[test]
    fn codes_have_names() {
        assert_eq!(store_code_name(STORE_NOT_FOUND), Some("object not found"));
        assert_eq!(store_code_name(0), None);
    }
}
