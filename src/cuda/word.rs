//! Words in pinned memory that the host and the devices see under one name each.
//!
//! A word only grows, and its memory is not given back before its context is: what a stream still has queued for it may
//! come after its last user is gone. Its next user goes on from the value that it has.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::context::{ContextInner, Relaxed, lock};
use super::driver::{Driver, check, number};
use super::error::CudaError;

/// A word has two cache lines for itself: neighbours are fetched together.
const PLACE: usize = 128;
const SLAB: usize = 4096;

/// One context's words.
#[derive(Debug, Default)]
pub(super) struct Words {
    slabs: Vec<NonNull<u8>>,
    free: Vec<Place>,
    /// Those with the value that a stream still has to write: until then nobody else has them.
    awaited: Vec<(Place, u64)>,
}

// SAFETY: the pointers lead to pinned memory that is only touched by atomic operations.
unsafe impl Send for Words {}

#[derive(Clone, Copy, Debug)]
struct Place {
    host: NonNull<AtomicU64>,
    device: u64,
}

impl Words {
    /// Gives the memory back. The context is current, and nothing that is queued uses the words.
    pub(super) fn free(&mut self, driver: &Driver) {
        for slab in self.slabs.drain(..) {
            // SAFETY: allocated by `grow`, and forgotten here.
            unsafe { (driver.host_free)(slab.as_ptr().cast()) };
        }
    }

    fn take(&mut self, context: &ContextInner) -> Result<Place, CudaError> {
        let written = |(place, last): &(Place, u64)| read(place) == *last;
        if let Some(at) = self.awaited.iter().position(written) {
            return Ok(self.awaited.swap_remove(at).0);
        }
        if self.free.is_empty() {
            self.grow(context)?;
        }
        Ok(self.free.pop().expect("a slab has places"))
    }

    fn grow(&mut self, context: &ContextInner) -> Result<(), CudaError> {
        const PORTABLE_AND_MAPPED: u32 = 3;
        let driver = context.driver;
        let _current = context.enter()?;
        // Allocating would spoil another thread's capture.
        let _relaxed = Relaxed::enter(driver)?;
        let mut host = std::ptr::null_mut();
        // SAFETY: an out pointer.
        let code = unsafe { (driver.host_alloc)(&mut host, SLAB, PORTABLE_AND_MAPPED) };
        check("cuMemHostAlloc", SLAB as u64, code)?;
        let slab = NonNull::new(host.cast::<u8>()).expect("what is allocated is not at 0");
        self.slabs.push(slab);
        let mut device = 0;
        // SAFETY: an out pointer, and memory that was just allocated.
        let code = unsafe { (driver.host_device_pointer)(&mut device, host, 0) };
        check("cuMemHostGetDevicePointer", number(host), code)?;
        // SAFETY: the slab is ours, and has this many bytes.
        unsafe { slab.write_bytes(0, SLAB) };
        self.free.extend((0..SLAB).step_by(PLACE).map(|at| Place {
            // SAFETY: inside the slab; pages are aligned.
            host: unsafe { slab.add(at) }.cast(),
            device: device + at as u64,
        }));
        Ok(())
    }
}

fn read(place: &Place) -> u64 {
    // SAFETY: the slab lives as long as its context's `Words`, which whoever has a place keeps.
    unsafe { place.host.as_ref() }.load(Ordering::Acquire)
}

/// A word for one user.
#[derive(Debug)]
pub(super) struct Word {
    context: Arc<ContextInner>,
    place: Place,
    /// The last value that a stream was told to write.
    queued: AtomicU64,
}

// SAFETY: as for `Words`.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    pub(super) fn take(context: &Arc<ContextInner>) -> Result<Word, CudaError> {
        let place = lock(&context.words).take(context)?;
        Ok(Word { context: Arc::clone(context), place, queued: AtomicU64::new(read(&place)) })
    }

    /// What it shows. What a stream did before it wrote that is visible here afterwards.
    pub(super) fn value(&self) -> u64 {
        read(&self.place)
    }

    /// Moves it there, unless it is there or beyond: a store, no driver call.
    pub(super) fn raise(&self, to: u64) {
        // Before the word moves, everything else has: a device that sees the one sees the other.
        fence(Ordering::SeqCst);
        // SAFETY: as in `read`.
        unsafe { self.place.host.as_ref() }.fetch_max(to, Ordering::Release);
        self.queued.fetch_max(to, Ordering::Relaxed);
    }

    /// A stream is going to write this value.
    pub(super) fn will_be(&self, value: u64) {
        self.queued.store(value, Ordering::Relaxed);
    }

    /// Where devices see it.
    pub(super) fn device_address(&self) -> u64 {
        self.place.device
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        let last = *self.queued.get_mut();
        let mut words = lock(&self.context.words);
        if self.value() == last {
            words.free.push(self.place);
        } else {
            words.awaited.push((self.place, last));
        }
    }
}
