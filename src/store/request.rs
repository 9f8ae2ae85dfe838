//! What an entry asks of a Store: an operation, a key, and where in local memory the object's bytes are.

use std::fmt;
use std::sync::{Arc, OnceLock};

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
    /// Where the object's bytes are, one slice after the other.
    slices: Box<[Slice]>,
    /// Each one's region, found when a ring accepts the entry. While it is with the ring, each has a use begun by it.
    regions: OnceLock<Box<[Arc<RegionInner>]>>,
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
        Arc::new(Request { client, kind, key, slices, regions: OnceLock::new() })
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
        let mut begun = Vec::with_capacity(self.slices.len());
        for slice in &self.slices {
            let refused = match registered.iter().find(|known| known.number == slice.region) {
                Some(region) if region.begin_use() => {
                    begun.push(Arc::clone(region));
                    continue;
                }
                Some(_) => Unusable::Unregistered(slice.memory()),
                None => Unusable::NotInStore(slice.memory()),
            };
            begun.iter().for_each(|region| region.end_use());
            return Err(refused);
        }
        // A ring that could not take the entry may have found them before: a number names one region for ever.
        self.regions.get_or_init(|| begun.into());
        Ok(())
    }

    pub(crate) fn end_uses(&self) {
        self.regions().for_each(|region| region.end_use());
    }

    /// True if a slice is in the region at `address`.
    pub(crate) fn uses_region(&self, address: u64) -> bool {
        self.regions().any(|region| region.memory.address == address)
    }

    /// The slices' regions, once uses of them are begun.
    fn regions(&self) -> impl Iterator<Item = &RegionInner> {
        self.regions.get().into_iter().flatten().map(Arc::as_ref)
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
