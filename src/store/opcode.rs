//! What entries can ask of a Store.

use super::client::Client;
use super::request::{Kind, Request};
use crate::entry::Entry;
use crate::region::Slice;
use crate::sqe::Opcode;

/// Loads an object from a Store: finds it by its key and copies it into local memory. Completes with the object's bytes.
///
/// The object may be shorter than the local memory, whose rest stays as it is. If it is longer, nothing is loaded, the entry
/// fails with `-EMSGSIZE` at the transfer stage, and `detail` has the object's size. After any other failure at that stage the
/// local memory may hold any mixture of old and new bytes. The Store is asked for the object, and its lease of it begins, only
/// after the entry's fences.
#[derive(Clone, Debug)]
pub struct Get {
    store: Client,
    key: Box<str>,
    slices: Vec<Slice>,
}

impl Get {
    /// Loads `key` into `slice`, which is of a region that is [registered](Client::register) with the Store. A key has 1 to
    /// 4,096 bytes, none of them zero. All is checked at push.
    pub fn new(store: &Client, key: impl Into<Box<str>>, slice: Slice) -> Get {
        Get::vectored(store, key, [slice])
    }

    /// Loads `key` into several slices, up to [`Entry::MAX_PARTS`], one after the other as it has bytes; together less than
    /// 2 GiB.
    pub fn vectored(store: &Client, key: impl Into<Box<str>>, slices: impl IntoIterator<Item = Slice>) -> Get {
        Get { store: store.clone(), key: key.into(), slices: slices.into_iter().collect() }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        entry(Opcode::Get, Kind::Get, self.store, self.key, self.slices)
    }
}

/// Stores local memory as an object, under a key. Completes with the number of bytes.
///
/// An object that is there already stays as it is, and the entry fails with `-EEXIST` at the transfer stage; but if another
/// client puts the key just before this does, Mooncake keeps that one's object and this completes as if it were its own.
#[derive(Clone, Debug)]
pub struct Put {
    store: Client,
    key: Box<str>,
    slices: Vec<Slice>,
}

impl Put {
    /// Stores `slice` as `key`. See [`Get::new`].
    pub fn new(store: &Client, key: impl Into<Box<str>>, slice: Slice) -> Put {
        Put::vectored(store, key, [slice])
    }

    /// Stores several slices as one object, one after the other. See [`Get::vectored`].
    pub fn vectored(store: &Client, key: impl Into<Box<str>>, slices: impl IntoIterator<Item = Slice>) -> Put {
        Put { store: store.clone(), key: key.into(), slices: slices.into_iter().collect() }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        entry(Opcode::Put, Kind::Put, self.store, self.key, self.slices)
    }
}

/// Asks a Store whether it has a key. Completes with 1 if it has and 0 if not; to links both are successes.
#[derive(Clone, Debug)]
pub struct Exist {
    store: Client,
    key: Box<str>,
}

impl Exist {
    /// Asks for `key`.
    pub fn new(store: &Client, key: impl Into<Box<str>>) -> Exist {
        Exist { store: store.clone(), key: key.into() }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        entry(Opcode::Exist, Kind::Exist, self.store, self.key, Vec::new())
    }
}

/// Removes an object from a Store. Completes with 0; with `-ENOENT` at the transfer stage if there is none, and with `-EBUSY`
/// while it is in use, such as under the lease of a Get.
#[derive(Clone, Debug)]
pub struct Remove {
    store: Client,
    key: Box<str>,
}

impl Remove {
    /// Removes `key`.
    pub fn new(store: &Client, key: impl Into<Box<str>>) -> Remove {
        Remove { store: store.clone(), key: key.into() }
    }

    /// The entry.
    pub fn build(self) -> Entry {
        entry(Opcode::Remove, Kind::Remove, self.store, self.key, Vec::new())
    }
}

fn entry(op: Opcode, kind: Kind, store: Client, key: Box<str>, slices: Vec<Slice>) -> Entry {
    Entry::store(op, Request::new(store.inner, kind, key, slices.into()))
}
