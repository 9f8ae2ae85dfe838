//! Memory that peers and entries reach.
//!
//! A peer may write a registered range at any time, and unregistering does not stop a write that is running. So a
//! [`Region`] is a mapping of its own: unregistering replaces its pages in place by inaccessible ones, and the addresses
//! are given back only when the engine is gone. Safe code never gets a reference into it: [`Registered::read_at`] and
//! [`Registered::write_at`] copy.

use std::fmt;
use std::io;
use std::mem;
use std::num::NonZeroU64;
use std::ops::{Bound, RangeBounds};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crossbeam_utils::CachePadded;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::bytes;
use crate::engine::Engine;
use crate::sync::{AtomicU64, Ordering};
use crate::transport::RawMemory;

/// Memory of our own, zeroed, page-aligned, not registered yet.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
}

impl Region {
    /// Maps `len` bytes of zeroed memory, rounded up to whole pages of 4 KiB. Nothing is touched: the kernel gives the
    /// pages at the first use.
    ///
    /// # Errors
    /// `InvalidInput` if `len` is 0; otherwise what `mmap` says, such as out of memory.
    pub fn alloc(len: usize) -> io::Result<Region> {
        Ok(Region { mapping: Mapping::new(len)? })
    }

    /// Bytes, after rounding up.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    #[inline]
    pub fn len(&self) -> usize {
        self.mapping.len
    }
}

#[derive(Debug)]
struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory; every access goes through raw pointers and atomic copies.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

const PAGE: usize = 4096;

impl Mapping {
    fn new(len: usize) -> io::Result<Mapping> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a region of 0 bytes: ask for at least 1"));
        }
        let rounded = len.checked_next_multiple_of(PAGE).filter(|&rounded| isize::try_from(rounded).is_ok());
        let Some(len) = rounded else {
            let text = format!("a region of {len} bytes: more than an address space holds");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        };
        // SAFETY: a new anonymous mapping at an address that the kernel chooses touches nothing of ours.
        let address = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        let address = NonNull::new(address.cast()).expect("the kernel maps nothing at address 0 unless asked to");
        Ok(Mapping { address, len })
    }

    /// Replaces the pages by inaccessible ones. Whoever still writes there is told so; nothing else can be mapped there.
    fn close(&self) -> io::Result<()> {
        // SAFETY: the range is our own mapping, and the caller has made sure that nothing in this process uses it; MAP_FIXED
        // replaces it atomically.
        unsafe {
            mmap_anonymous(
                self.address.as_ptr().cast(),
                self.len,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE,
            )?;
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is our own mapping; its owner drops it only when nothing can reach it any more.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "our own mapping can be unmapped");
    }
}

static NEXT_REGION: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);

/// In a region's number, below the engine's.
const SEQUENCE_BITS: u32 = 36;

/// A number for a region of an engine, which no other registration of the process has: one that registers a thousand times a
/// second begins again after two years.
fn next_number(engine: u64) -> NonZeroU64 {
    let sequence = NEXT_REGION.fetch_add(1, Relaxed) & ((1 << SEQUENCE_BITS) - 1);
    NonZeroU64::new(engine << SEQUENCE_BITS | sequence).expect("engines' numbers begin at 1")
}

#[derive(Debug)]
pub(crate) struct RegionInner {
    pub(crate) engine: u64,
    /// What slices name it by, see [`next_number`].
    pub(crate) number: NonZeroU64,
    pub(crate) memory: RawMemory,
    pub(crate) location: String,
    /// Foreign memory that somebody else has registered with the transport, and will unregister.
    pub(crate) known: bool,
    /// `None` for foreign memory.
    mapping: Option<Arc<Mapping>>,
    /// Foreign memory registered again, exactly: how often. Guarded by the engine's lock on its regions.
    pub(crate) registered: AtomicU32,
    /// Uses begun: entries accepted and copies made; and [`CLOSED`]. One word, so that a use begins either before the
    /// region is closed, and is counted, or after, and is refused. Written by callers; apart from `ended`, which pollers
    /// write.
    begun: CachePadded<AtomicU64>,
    ended: CachePadded<AtomicU64>,
}

/// Keeps the addresses of a region of our own, which a peer's late write may still reach.
#[derive(Debug)]
pub(crate) struct Addresses(#[expect(dead_code, reason = "only kept")] Arc<Mapping>);

/// In `begun`: new uses are refused.
const CLOSED: u64 = 1 << 63;

impl RegionInner {
    pub(crate) fn own(engine: u64, region: Region, location: &str) -> Arc<RegionInner> {
        let memory = RawMemory { address: region.mapping.address.addr().get() as u64, len: region.mapping.len as u64 };
        RegionInner::new(engine, memory, location, Some(Arc::new(region.mapping)), false)
    }

    pub(crate) fn foreign(engine: u64, memory: RawMemory, location: &str, known: bool) -> Arc<RegionInner> {
        RegionInner::new(engine, memory, location, None, known)
    }

    fn new(
        engine: u64,
        memory: RawMemory,
        location: &str,
        mapping: Option<Arc<Mapping>>,
        known: bool,
    ) -> Arc<RegionInner> {
        Arc::new(RegionInner {
            engine,
            number: next_number(engine),
            memory,
            location: location.to_owned(),
            known,
            mapping,
            registered: AtomicU32::new(1),
            begun: CachePadded::new(AtomicU64::new(0)),
            ended: CachePadded::new(AtomicU64::new(0)),
        })
    }

    pub(crate) fn is_own(&self) -> bool {
        self.mapping.is_some()
    }

    /// Takes the region back out, when registering it failed.
    pub(crate) fn into_region(self: Arc<Self>) -> Option<Region> {
        Arc::into_inner(Arc::into_inner(self)?.mapping?).map(|mapping| Region { mapping })
    }

    /// Begins a use; false if the region is unregistered. Every true is paired with one [`end_use`](Self::end_use).
    #[inline]
    pub(crate) fn begin_use(&self) -> bool {
        // Acquire: what was done while the region was closed is over before a use of it, if it was reopened.
        if self.begun.fetch_add(1, Ordering::Acquire) & CLOSED != 0 {
            // Taken back, and not ended: `ended` counts what was accepted only.
            self.begun.fetch_sub(1, Ordering::Relaxed);
            return false;
        }
        true
    }

    /// The caller's reference is good up to here: with the last use the region may be gone.
    #[inline]
    pub(crate) fn end_use(&self) {
        self.end_uses(1);
    }

    #[inline]
    fn end_uses(&self, count: u64) {
        self.ended.fetch_add(count, Ordering::Release);
    }

    /// Uses begun and not ended.
    pub(crate) fn uses(&self) -> u64 {
        // `ended` first: read last, it could count a use that `begun` did not. Acquire: what the uses did is over.
        let ended = self.ended.load(Ordering::Acquire);
        (self.begun.load(Ordering::Relaxed) & !CLOSED).saturating_sub(ended)
    }

    /// Refuses new uses, unless there are some: then it answers how many and changes nothing, not for a moment.
    pub(crate) fn close(&self) -> Result<(), u64> {
        // `ended` first: read last, it could count a use that `begun` did not. Acquire: what the uses did is over before
        // whatever follows.
        let ended = self.ended.load(Ordering::Acquire);
        let begun = self.begun.load(Ordering::Relaxed) & !CLOSED;
        if begun != ended {
            return Err(begun - ended);
        }
        match self.begun.compare_exchange(begun, begun | CLOSED, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Ok(()),
            // One began meanwhile.
            Err(now) => Err((now & !CLOSED) - ended),
        }
    }

    pub(crate) fn reopen(&self) {
        self.begun.fetch_and(!CLOSED, Ordering::Release);
    }

    /// After `close`: makes the pages of our own mapping inaccessible.
    pub(crate) fn seal(&self) -> io::Result<()> {
        self.mapping.as_ref().map_or(Ok(()), |mapping| mapping.close())
    }

    /// What keeps the addresses of our own mapping from being given back.
    pub(crate) fn addresses(&self) -> Option<Addresses> {
        self.mapping.clone().map(Addresses)
    }
}

/// Uses of one region that a producer has begun one after the other and not published. The first of them is counted in the
/// region, which keeps it open; the others are counted here until [`tell`](Self::tell), so that a run of entries with one region
/// costs the region's word two exchanges, not one each.
#[derive(Debug)]
pub(crate) struct Begun {
    /// With a use begun that no core can end; null without.
    region: *const RegionInner,
    /// Its number; 0 without.
    number: u64,
    more: u64,
}

// SAFETY: what the pointer leads to is Send and Sync.
unsafe impl Send for Begun {}

impl Begun {
    pub(crate) const NONE: Begun = Begun { region: ptr::null(), number: 0, more: 0 };

    /// Begins a further use of the same region; `None` if another one has this number, or none is begun.
    #[inline]
    pub(crate) fn again(&mut self, number: NonZeroU64) -> Option<*const RegionInner> {
        if self.number != number.get() {
            return None;
        }
        self.more += 1;
        Some(self.region)
    }

    /// Begins a use; `None` if the region is unregistered. Each use is paired with one [`undo`](Self::undo), or, after
    /// [`tell`](Self::tell), with one [`end_use`](RegionInner::end_use).
    pub(crate) fn begin(&mut self, region: &Arc<RegionInner>) -> Option<*const RegionInner> {
        if let Some(region) = self.again(region.number) {
            return Some(region);
        }
        self.tell();
        if !region.begin_use() {
            return None;
        }
        (self.region, self.number) = (Arc::as_ptr(region), region.number.get());
        Some(self.region)
    }

    /// Takes back the use begun last.
    ///
    /// # Safety
    /// It is of `region`, and no core was shown it.
    pub(crate) unsafe fn undo(&mut self, region: *const RegionInner) {
        if self.region == region && self.more > 0 {
            self.more -= 1;
            return;
        }
        if self.region == region {
            (self.region, self.number) = (ptr::null(), 0);
        }
        // SAFETY: the use that is ended here has kept the region, as the caller says.
        unsafe { &*region }.end_use();
    }

    /// Counts what was begun in the region. Before any of it is published: a core ends what it is shown, and fewer uses begun
    /// than ended would close the region under those that run.
    #[inline]
    pub(crate) fn tell(&mut self) {
        let more = mem::take(&mut self.more);
        let region = mem::replace(&mut self.region, ptr::null());
        self.number = 0;
        if more > 0 {
            // SAFETY: the first use keeps the region: no core was shown its entry.
            unsafe { &*region }.begun.fetch_add(more, Ordering::Relaxed);
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.tell();
    }
}

/// Uses of one region that a core has ended one after the other. The region hears of them with [`tell`](Self::tell), so that a run
/// of entries with one region costs the region's word one exchange. Until then they keep the region.
#[derive(Debug)]
pub(crate) struct Ended {
    region: *const RegionInner,
    count: u64,
}

// SAFETY: what the pointer leads to is Send and Sync.
unsafe impl Send for Ended {}

impl Ended {
    pub(crate) const NONE: Ended = Ended { region: ptr::null(), count: 0 };

    /// Ends a use.
    ///
    /// # Safety
    /// It was begun, and is nobody else's to end, or `region` is null. The region's engine lives until it is told.
    #[inline]
    pub(crate) unsafe fn end(&mut self, region: *const RegionInner) {
        if self.region != region {
            self.tell();
            self.region = region;
        }
        self.count += 1;
    }

    /// Before anybody hears that an entry has ended with whose use that of the region has ended, too.
    #[inline]
    pub(crate) fn tell(&mut self) {
        let count = mem::take(&mut self.count);
        let region = mem::replace(&mut self.region, ptr::null());
        // SAFETY: its engine does not let go of it while these uses are not ended.
        if let Some(region) = unsafe { region.as_ref() } {
            region.end_uses(count);
        }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.tell();
    }
}

/// A region that entries can use and peers can reach. Cheap to clone. Dropping every handle leaves it registered until
/// [`unregister`](Self::unregister) or the end of the engine, which each handle keeps alive.
#[derive(Clone)]
pub struct Registered {
    pub(crate) region: Arc<RegionInner>,
    pub(crate) engine: Engine,
}

impl Registered {
    /// Bytes.
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    #[inline]
    pub fn len(&self) -> usize {
        self.region.memory.len as usize
    }

    /// The first byte's address: what a peer adds an offset to.
    #[inline]
    pub fn address(&self) -> u64 {
        self.region.memory.address
    }

    /// A part of the region for an entry to read into or write from.
    ///
    /// # Errors
    /// [`RangeError`] if the range does not lie inside the region.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Slice, RangeError> {
        let (start, len) = self.check(range)?;
        Ok(Slice { region: self.region.number, address: self.region.memory.address + start as u64, len: len as u64 })
    }

    /// What a peer needs to know to reach this region. Send it by any means, see [`RegionInfo::to_bytes`].
    pub fn info(&self) -> RegionInfo {
        RegionInfo { segment: self.engine.name().to_owned(), address: self.address(), len: self.len() as u64 }
    }

    /// Copies bytes out. A transfer or a peer that writes the same bytes meanwhile gives old or new ones, byte by byte.
    ///
    /// # Errors
    /// [`AccessError`] if the range does not fit, the region is unregistered, or it is foreign memory, which only its
    /// owner may touch.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), AccessError> {
        let address = self.access(offset, into.len())?;
        // SAFETY: `access` checked the range against our own mapping and began a use, so it stays mapped until `end_use`;
        // `into` is the caller's alone.
        unsafe { bytes::copy(address as *const u8, into.as_mut_ptr(), into.len()) };
        self.region.end_use();
        Ok(())
    }

    /// Copies bytes in. See [`read_at`](Self::read_at).
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<(), AccessError> {
        let address = self.access(offset, from.len())?;
        // SAFETY: as in `read_at`.
        unsafe { bytes::copy(from.as_ptr(), address as *mut u8, from.len()) };
        self.region.end_use();
        Ok(())
    }

    /// Copies bytes from one place of the region to another that does not overlap it, as a copy-on-write of a page does.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at); [`AccessError::Overlap`] if the two ranges overlap. Nothing was copied then.
    pub fn copy_within(&self, from: usize, to: usize, len: usize) -> Result<(), AccessError> {
        if from.abs_diff(to) < len {
            return Err(AccessError::Overlap { from, to, len });
        }
        let source = self.access(from, len)?;
        let copied = self.access(to, len).map(|target| {
            // SAFETY: as in `read_at`, for both ranges, which were just checked not to overlap.
            unsafe { bytes::copy(source as *const u8, target as *mut u8, len) };
            self.region.end_use();
        });
        self.region.end_use();
        copied
    }

    /// Takes our own memory out of the engine. New entries with it are refused; a peer that still writes to it fails and
    /// changes nothing: its pages become inaccessible at once, and their addresses are given back only when the engine is
    /// gone, with about 40 bytes of ours. May block for the time that the transport needs to withdraw it.
    ///
    /// # Errors
    /// [`UnregisterError`]: busy while entries or copies use it, refused for foreign memory, or what the transport says. In
    /// these cases nothing has changed. Only after [`UnregisterError::Seal`] is it unregistered all the same, and a peer's
    /// late write may still change its bytes.
    pub fn unregister(&self) -> Result<(), UnregisterError> {
        if !self.region.is_own() {
            return Err(UnregisterError::Foreign);
        }
        self.engine.unregister(&self.region)
    }

    /// Takes foreign memory out of the engine; memory that was registered several times stays until the last of them.
    ///
    /// # Safety
    /// A write that a peer has running may go on after this returns: the caller keeps the memory mapped, and unused for
    /// anything else, until no peer writes it any more.
    ///
    /// # Errors
    /// [`UnregisterError`], and nothing has changed: busy while entries use it, however often it is registered.
    pub unsafe fn unregister_foreign(&self) -> Result<(), UnregisterError> {
        self.engine.unregister(&self.region)
    }

    fn check(&self, range: impl RangeBounds<usize>) -> Result<(usize, usize), RangeError> {
        let start = match range.start_bound() {
            Bound::Included(&start) => Some(start),
            Bound::Excluded(&before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let end = match range.end_bound() {
            Bound::Included(&last) => last.checked_add(1),
            Bound::Excluded(&end) => Some(end),
            Bound::Unbounded => Some(self.len()),
        };
        match (start, end) {
            (Some(start), Some(end)) if start <= end && end <= self.len() => Ok((start, end - start)),
            _ => Err(RangeError {
                start: start.unwrap_or(usize::MAX) as u64,
                end: end.unwrap_or(usize::MAX) as u64,
                len: self.len() as u64,
            }),
        }
    }

    /// Checks a range and begins a use of the region, which the caller ends.
    fn access(&self, offset: usize, len: usize) -> Result<u64, AccessError> {
        let range = RangeError {
            start: offset as u64,
            end: (offset as u64).saturating_add(len as u64),
            len: self.len() as u64,
        };
        if range.end > range.len {
            return Err(AccessError::Range(range));
        }
        if !self.region.is_own() {
            return Err(AccessError::Foreign);
        }
        if !self.region.begin_use() {
            return Err(AccessError::Unregistered);
        }
        Ok(self.region.memory.address + offset as u64)
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("memory", &self.region.memory)
            .field("location", &self.region.location)
            .finish()
    }
}

/// A part of a registered region: the local side of a transfer. Cheap to clone; holding one does not keep the region
/// registered, an entry with it is refused after `unregister`.
#[derive(Clone)]
pub struct Slice {
    /// Its region's number. Not a counted reference: slices are made, copied and let go of for each entry.
    pub(crate) region: NonZeroU64,
    pub(crate) address: u64,
    pub(crate) len: u64,
}

impl Slice {
    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// True if it has none. Such an entry completes at once with 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Slice {
    /// The engine that it is registered with.
    #[inline]
    pub(crate) fn engine(&self) -> u64 {
        self.region.get() >> SEQUENCE_BITS
    }

    pub(crate) fn memory(&self) -> RawMemory {
        RawMemory { address: self.address, len: self.len }
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slice({})", self.memory())
    }
}

/// Where a region is, for a peer to find: the segment to open, the address and the length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionInfo {
    /// What to give to [`Engine::open_segment`].
    pub segment: String,
    /// The first byte's address in its owner's space.
    pub address: u64,
    /// Bytes.
    pub len: u64,
}

const MAGIC: [u8; 4] = *b"MRI1";

impl RegionInfo {
    /// As bytes: `MRI1`, address and length as 8 bytes each, little-endian, then the segment's name in UTF-8.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.address.to_le_bytes());
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.segment.as_bytes());
        bytes
    }

    /// Back from [`to_bytes`](Self::to_bytes)'s form.
    ///
    /// # Errors
    /// [`InfoError`], which says what is wrong with the bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<RegionInfo, InfoError> {
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or(InfoError::Short(bytes.len()))?;
        if *magic != MAGIC {
            return Err(InfoError::Magic(*magic));
        }
        let (address, rest) = rest.split_first_chunk::<8>().ok_or(InfoError::Short(bytes.len()))?;
        let (len, name) = rest.split_first_chunk::<8>().ok_or(InfoError::Short(bytes.len()))?;
        let segment = std::str::from_utf8(name).map_err(|_| InfoError::Name)?.to_owned();
        let (address, len) = (u64::from_le_bytes(*address), u64::from_le_bytes(*len));
        if len == 0 || address.checked_add(len).is_none() {
            return Err(InfoError::Range { address, len });
        }
        Ok(RegionInfo { segment, address, len })
    }
}

/// Bytes that are no [`RegionInfo`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InfoError {
    /// Too few.
    #[error("a region's description has at least 20 bytes, these are {0}")]
    Short(usize),
    /// It begins otherwise.
    #[error("a region's description begins with MRI1, these bytes begin with {0:02x?}")]
    Magic([u8; 4]),
    /// The segment's name is not UTF-8.
    #[error("the segment's name in a region's description is not UTF-8")]
    Name,
    /// The range is empty or passes the end of the address space.
    #[error("a region's description names the impossible range {address:#x}+{len:#x}")]
    Range {
        /// Its address.
        address: u64,
        /// Its length.
        len: u64,
    },
}

/// A range that does not lie inside its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the range {start}..{end} does not lie inside a region of {len} bytes")]
pub struct RangeError {
    /// First byte asked for.
    pub start: u64,
    /// First byte not asked for.
    pub end: u64,
    /// The region's bytes.
    pub len: u64,
}

/// Bytes could not be copied into or out of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The range does not fit.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The region is unregistered, its pages are gone.
    #[error("the region is unregistered: its bytes are gone; copy them out before unregistering")]
    Unregistered,
    /// Foreign memory.
    #[error("the region is foreign memory (register_foreign): only its owner may read or write it")]
    Foreign,
    /// The two ranges of a copy overlap.
    #[error("the ranges {from}+{len} and {to}+{len} overlap")]
    Overlap {
        /// The source's offset.
        from: usize,
        /// The target's offset.
        to: usize,
        /// Bytes.
        len: usize,
    },
}

/// A region was not unregistered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnregisterError {
    /// So many uses of it are outstanding: entries accepted and not quiet, and copies that run. Reads and Writes that were pushed
    /// one after the other and are not submitted yet may count as one.
    #[error("busy: {0} outstanding uses of the region; reap their completions and unregister again")]
    Busy(u64),
    /// It was unregistered before.
    #[error("the region is not registered any more")]
    NotRegistered,
    /// It is foreign memory.
    #[error("the region is foreign memory: its owner unregisters it with unregister_foreign, which is unsafe")]
    Foreign,
    /// The transport refused.
    #[error(transparent)]
    Transport(#[from] crate::transport::TransportError),
    /// The pages could not be taken away from peers.
    #[error("the region's pages could not be replaced: {0}")]
    Seal(#[source] io::Error),
}

/// Counts for tests and engines; relaxed because the engine's lock orders it.
pub(crate) fn add_registration(region: &RegionInner) {
    region.registered.fetch_add(1, Relaxed);
}

/// True if that was the last registration.
pub(crate) fn remove_registration(region: &RegionInner) -> bool {
    region.registered.fetch_sub(1, Relaxed) == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_round_trips_and_names_what_is_wrong() {
        let info = RegionInfo { segment: "127.0.0.1:16384".into(), address: 0x7f00_0000_0000, len: 4096 };
        let bytes = info.to_bytes();
        assert_eq!(RegionInfo::from_bytes(&bytes), Ok(info.clone()));
        assert_eq!(RegionInfo::from_bytes(&bytes[..19]), Err(InfoError::Short(19)));
        assert_eq!(RegionInfo::from_bytes(b"nonsense nonsense nonsense"), Err(InfoError::Magic(*b"nons")));
        let wraps = RegionInfo { address: u64::MAX - 10, ..info };
        assert!(matches!(RegionInfo::from_bytes(&wraps.to_bytes()), Err(InfoError::Range { .. })));
    }

    #[test]
    fn impossible_regions_are_refused() {
        assert_eq!(Region::alloc(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(Region::alloc(usize::MAX - 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(Region::alloc(1).unwrap().len(), 4096);
    }
}
