//! Fences for work on CUDA streams (feature `cuda`).
//!
//! [`Stream::fence`] records one event behind the work that is queued on a stream; the fence signals when the GPU has
//! come that far. Any number of entries may wait for it. Nobody waits in the driver: the poller asks, and only while
//! an entry waits.
//!
//! ```no_run
//! # fn main() -> Result<(), moonring::cuda::CudaError> {
//! use moonring::cuda::{Context, Stream};
//!
//! let context = Context::primary(0)?;
//! let stream = Stream::new(&context)?;
//! // ... queue kernels and copies on stream.as_raw() ...
//! let fence = stream.fence()?; // entries that wait for it are issued when those have run
//! # Ok(())
//! # }
//! ```
//!
//! [`Stream::timeline`] does the same with a word in pinned memory, which the poller reads without the driver, and which
//! works in CUDA graphs. The other way round, [`Context::progress`] makes a timeline that entries move and streams wait for.
//!
//! A framework's streams are adopted: [`Stream::adopt`], and [`Fence::from_cuda_event`](crate::Fence::from_cuda_event)
//! for events.
//!
//! # What a call costs whom
//!
//! The driver is looked for at the first call into this module, and never by a program that makes none. `fence()` asks
//! whether the stream is being captured, records, and creates an event when the context's pool has none left; it makes
//! no other driver call than to set and restore the thread's current context, and pushing an entry makes none at all.
//! [`Timeline::signal`] and [`Progress::hold`] cost about the same; making a timeline or a progress may allocate a page of
//! pinned memory. Dropping a fence makes no driver call unless it is the last user of its context. No call here
//! synchronises with a device, a context, a stream or an event.
//!
//! # What can go wrong with an event
//!
//! * A fault of the GPU shows at the next query of any event of its context: the fences fail, and the entries that wait
//!   for them complete with the driver's number in [`Cqe::detail`](crate::Cqe::detail).
//! * An event recorded into a graph capture has no completion to wait for: `fence()` refuses while its stream captures,
//!   and an adopted event that was captured fails its fence with 907 (`CUDA_ERROR_CAPTURED_EVENT`), or with what the
//!   driver says after the capture has ended. Asking about one invalidates its capture: do not adopt captured events.
//! * The poller's queries never disturb a capture by another thread: the poller's thread is in relaxed capture mode.

mod context;
mod device;
mod driver;
mod error;
mod event;
mod graph;
#[cfg_attr(not(feature = "mooncake"), allow(dead_code, reason = "Mooncake's TCP is what copies"))]
mod landing;
mod progress;
mod stream;
#[cfg(test)]
#[path = "../../tests/common/gpu.rs"]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod timeline;
#[cfg(test)]
mod visibility_tests;
mod word;

pub use context::Context;
#[cfg(all(test, feature = "mooncake"))]
pub(crate) use context::stop_polling;
pub use device::Release;
pub use error::{CudaCode, CudaError};
#[cfg(feature = "mooncake")]
pub(crate) use landing::{Landing, LegacyCopies};
pub use progress::{GraphHold, Progress};
pub use stream::Stream;
pub use timeline::{GraphSignal, Timeline};

/// A driver's handle: a `CUcontext`, `CUstream` or `CUevent`, or the runtime's `cudaStream_t` or `cudaEvent_t`, which
/// are the same pointers.
pub type RawHandle = *mut std::ffi::c_void;

/// Whether CUDA can be used: there is a driver, it is new enough, and it finds a device.
///
/// Loads the driver on the first call.
pub fn available() -> Result<(), CudaError> {
    driver::Driver::get()?.device_count().map(drop)
}

static_assertions::assert_impl_all!(Context: Send, Sync);
static_assertions::assert_impl_all!(Stream: Send, Sync);
static_assertions::assert_impl_all!(Timeline: Send, Sync);
static_assertions::assert_impl_all!(GraphSignal: Send, Sync);
static_assertions::assert_impl_all!(Progress: Send, Sync);
static_assertions::assert_impl_all!(GraphHold: Send, Sync);
static_assertions::assert_impl_all!(CudaError: Send, Sync);
