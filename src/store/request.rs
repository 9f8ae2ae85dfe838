//! What an entry asks of a Store: an operation, a key, and where in local memory the object's bytes are.

use std::fmt;
use std::sync::Arc;

use super::client::ClientInner;
use crate::region::{RegionInner, Slice};
use crate::transport::RawMemory;

/// Most bytes of a key.
pub(crate) const MAX_KEY: usize = 4096;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Get,
    Put,
    Exist,
    Remove,
}

/// Made with the entry and shared by it, the ring and the worker that asks the Store, so that nothing is copied on the way.
pub(crate) struct Request {
    pub(crate) client: Arc<ClientInner>,
    pub(crate) kind: Kind,
    /// The key, and a zero byte.
    key: Box<str>,
    /// Where the object's bytes are, one slice after the other. While the entry is with a ring, each one's region has a use
    /// begun by it.
    slices: Box<[Slice]>,
}

/// Why a request cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// A region is unregistered.
    Unregistered(RawMemory),
    /// A region is not registered with the Store.
    NotInStore(RawMemory),
}

impl Request {
    pub(crate) fn new(client: Arc<ClientInner>, kind: Kind, key: Box<str>, slices: Box<[Slice]>) -> Arc<Request> {
        let mut key = String::from(key);
        key.push('\0');
        let key = key.into();
        Arc::new(Request { client, kind, key, slices })
    }

    pub(crate) fn key(&self) -> &str {
        &self.key[..self.key.len() - 1]
    }

    /// The key of a request that a ring has accepted, as C takes it.
    #[cfg(feature = "mooncake")]
    pub(crate) fn c_key(&self) -> &std::ffi::CStr {
        std::ffi::CStr::from_bytes_with_nul(self.key.as_bytes()).expect("keys with zero bytes are refused")
    }

    pub(crate) fn slices(&self) -> &[Slice] {
        &self.slices
    }

    /// Bytes of all slices: the most that a Get can bring, what a Put stores.
    pub(crate) fn len(&self) -> u64 {
        self.slices.iter().fold(0, |sum, slice| sum.saturating_add(slice.len))
    }

    /// Begins a use of each slice's region, or of none.
    pub(crate) fn begin_uses(&self) -> Result<(), Unusable> {
        // Over the uses' begin: a region that is taken from the Store has none.
        let registered = self.client.registered();
        for (at, slice) in self.slices.iter().enumerate() {
            let usable = match registered.iter().find(|known| known.number == slice.region) {
                Some(region) if region.begin_use() => Ok(()),
                Some(_) => Err(Unusable::Unregistered(slice.memory())),
                None => Err(Unusable::NotInStore(slice.memory())),
            };
            if usable.is_err() {
                self.regions(at).for_each(|region| region.end_use());
                return usable;
            }
        }
        Ok(())
    }

    pub(crate) fn end_uses(&self) {
        self.regions(self.slices.len()).for_each(|region| region.end_use());
    }

    /// True if a slice is in the region at `address`.
    pub(crate) fn uses_region(&self, address: u64) -> bool {
        self.regions(self.slices.len()).any(|region| region.memory.address == address)
    }

    /// Those of the first slices, which have a use begun, so that the engine has them.
    fn regions(&self, first: usize) -> impl Iterator<Item = Arc<RegionInner>> {
        let region = |slice: &Slice| self.client.engine.region(slice.region).expect("it is in use");
        self.slices[..first].iter().map(region)
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("kind", &self.kind)
            .field("key", &self.key())
            .field("slices", &self.slices)
            .finish()
    }
}
