//! CUDA events as polled fences.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::context::{Context, ContextInner, Handle, become_poller};
use super::driver::{NOT_READY, SUCCESS, check, number};
use super::error::CudaError;
use super::{CudaCode, RawHandle};
use crate::code::errno;
use crate::fence::{Failure, Fence, FenceStatus, Polled};

/// A query takes driver locks that the application's launches want.
const LEAST_INTERVAL: u64 = 5_000;

/// An event of a pool.
#[derive(Debug)]
pub(super) struct RawEvent(pub(super) Handle);

/// One record of an event of the context's pool. The event goes back when the fence is gone: then nobody can ask for
/// this record any more, and the next one may overwrite it, whether it has completed or not.
#[derive(Debug)]
pub(super) struct PooledEvent {
    context: Arc<ContextInner>,
    event: Handle,
    /// The stream, and the number of the record on it.
    group: (u64, u64),
}

impl PooledEvent {
    /// An event to record. The context is current.
    pub(super) fn take(context: &Arc<ContextInner>) -> Result<PooledEvent, CudaError> {
        const DISABLE_TIMING: u32 = 2;
        let event = match context.pool.pop() {
            Some(event) => event.0,
            None => {
                let mut event = std::ptr::null_mut();
                // SAFETY: an out pointer.
                let code = unsafe { (context.driver.event_create)(&mut event, DISABLE_TIMING) };
                check("cuEventCreate", DISABLE_TIMING.into(), code)?;
                Handle(event)
            }
        };
        Ok(PooledEvent { context: Arc::clone(context), event, group: (0, 0) })
    }

    /// Records it on a stream. The context is current and the stream's order is locked.
    pub(super) fn record(mut self, stream: Handle, group: (u64, u64)) -> Result<Fence, CudaError> {
        // SAFETY: the event is live and this fence's alone; the stream's owner vouches for it.
        let code = unsafe { (self.context.driver.event_record)(self.event.0, stream.0) };
        check("cuEventRecord", number(stream.0), code)?;
        self.group = group;
        Ok(Fence::polled(Box::new(self)))
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        self.context.pool.push(RawEvent(self.event));
    }
}

impl Polled for PooledEvent {
    fn poll(&self) -> FenceStatus {
        query(&self.context, self.event)
    }

    fn group(&self) -> Option<(u64, u64)> {
        Some(self.group)
    }

    fn least_interval(&self) -> u64 {
        LEAST_INTERVAL
    }
}

/// Somebody else's event. It stands alone: where it was recorded is not known.
struct AdoptedEvent {
    context: Arc<ContextInner>,
    event: Handle,
    _owner: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for AdoptedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptedEvent").field("event", &self.event).finish_non_exhaustive()
    }
}

impl Polled for AdoptedEvent {
    fn poll(&self) -> FenceStatus {
        query(&self.context, self.event)
    }

    fn group(&self) -> Option<(u64, u64)> {
        None
    }

    fn least_interval(&self) -> u64 {
        LEAST_INTERVAL
    }
}

/// Asks the driver once.
fn query(context: &ContextInner, event: Handle) -> FenceStatus {
    // SAFETY: the event is live: it is this fence's, or its owner's word stands for it.
    status_of(code_of(context, || Ok(unsafe { (context.driver.event_query)(event.0) })))
}

/// What the driver answers to a poller's question.
pub(super) fn code_of(context: &ContextInner, ask: impl FnOnce() -> Result<u32, CudaError>) -> u32 {
    let asked = || {
        become_poller(context.driver)?;
        let _current = context.enter()?;
        ask()
    };
    match asked() {
        Ok(code) => code,
        Err(CudaError::Call { code: CudaCode(code), .. }) => code,
        Err(_) => unreachable!("a driver call fails with a code"),
    }
}

/// Only 600 means "not yet"; every other code is final.
pub(super) fn status_of(code: u32) -> FenceStatus {
    match code {
        SUCCESS => FenceStatus::Signalled,
        NOT_READY => FenceStatus::Pending,
        code => FenceStatus::Failed(Failure { errno: errno::EIO, detail: code as i32 }),
    }
}

impl Fence {
    /// A fence for an event that somebody else made and recorded: PyTorch's, or another library's.
    ///
    /// It signals when the record that the event carries *at each query* has completed. An event that was never
    /// recorded reads as done; one that is recorded again before the fence has signalled makes it wait for the new
    /// record. So record first, adopt then, and do not record again before the fence is done;
    /// [`Stream::fence`](super::Stream::fence) has none of these traps.
    ///
    /// `owner` is whatever keeps the event alive. It is dropped with the last clone of the fence, possibly by a
    /// poller's thread; give `()` if something else does.
    ///
    /// # Safety
    ///
    /// `event` is a valid `CUevent` of `context`. It has been recorded on a stream that was not being captured. It is
    /// neither destroyed nor recorded again before this fence and its clones are gone, or before it has signalled.
    pub unsafe fn from_cuda_event(event: RawHandle, context: &Context, owner: impl Any + Send + Sync) -> Fence {
        let context = Arc::clone(&context.0);
        Fence::polled(Box::new(AdoptedEvent { context, event: Handle(event), _owner: Box::new(owner) }))
    }
}
