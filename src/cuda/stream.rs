//! CUDA streams: where fences are recorded.

use std::ptr;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use super::RawHandle;
use super::context::{Context, Current, Handle, Order, lock};
use super::driver::{Driver, check, number};
use super::error::CudaError;
use super::event::PooledEvent;
use crate::fence::Fence;

/// The handle that means the calling thread's default stream.
const PER_THREAD: usize = 2;

/// A CUDA stream that fences can be made of. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    raw: Handle,
    /// Made here, and destroyed here.
    owned: bool,
    /// For the per-thread default stream: whose.
    thread: Option<ThreadId>,
    order: Arc<Order>,
}

impl Stream {
    /// A new stream, not joined with the legacy default stream (`CU_STREAM_NON_BLOCKING`). It is destroyed with its last
    /// clone; work that is queued on it then still runs, and fences made of it still signal.
    pub fn new(context: &Context) -> Result<Stream, CudaError> {
        const NON_BLOCKING: u32 = 1;
        let _current = context.0.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: an out pointer.
        let code = unsafe { (context.0.driver.stream_create)(&mut raw, NON_BLOCKING) };
        check("cuStreamCreate", NON_BLOCKING.into(), code)?;
        Stream::with(context.clone(), Handle(raw), true)
    }

    /// Names a stream that somebody else owns, such as PyTorch's `torch.cuda.current_stream().cuda_stream`. It is never
    /// destroyed here.
    ///
    /// Its context is found here and now: the default streams, handles 0, 1 and 2, are those of the calling thread's
    /// current context. Handle 2 is this thread's own and makes fences on this thread only.
    ///
    /// Adopting costs a few driver calls; keep the result for as long as you use the stream. Where streams come and go,
    /// keep a [`Context`] for theirs, so that its pool of events stays.
    ///
    /// # Safety
    ///
    /// `stream` is a valid `CUstream`, and stays so until this and its clones are gone. Its context stays until those,
    /// the fences made of it, and the rings with entries that wait for them are gone.
    pub unsafe fn adopt(stream: RawHandle) -> Result<Stream, CudaError> {
        let driver = Driver::get()?;
        let mut context = ptr::null_mut();
        // SAFETY: a stream that the caller vouches for, an out pointer.
        check("cuStreamGetCtx", number(stream), unsafe { (driver.stream_context)(stream, &mut context) })?;
        // SAFETY: the context of a stream that the caller vouches for.
        let context = unsafe { Context::adopt(context) }?;
        let _current = context.0.enter()?;
        Stream::with(context.clone(), Handle(stream), false)
    }

    /// The context is current.
    fn with(context: Context, raw: Handle, owned: bool) -> Result<Stream, CudaError> {
        let mut id = 0;
        // SAFETY: a live stream, an out pointer.
        let code = unsafe { (context.0.driver.stream_id)(raw.0, &mut id) };
        // The id is the stream's for ever; handles come back.
        let order = context.0.order(id);
        let thread = (raw.0.addr() == PER_THREAD).then(|| thread::current().id());
        let stream = Stream(Arc::new(Inner { context, raw, owned, thread, order }));
        check("cuStreamGetId", number(raw.0), code)?; // after `stream`, whose drop destroys what was created
        Ok(stream)
    }

    /// A fence that signals when the work queued on this stream so far has run.
    ///
    /// Records one event; see the [module](super) for what that costs. Threads that make fences of one stream at a time
    /// wait for each other's record.
    pub fn fence(&self) -> Result<Fence, CudaError> {
        let Inner { context, raw, order, .. } = &*self.0;
        // Held over the record: the numbers are in the order of the records.
        let mut recorded = lock(&order.recorded);
        let _current = self.enter()?;
        self.refuse_capture()?;
        let fence = PooledEvent::take(&context.0)?.record(*raw, (order.key, *recorded))?;
        *recorded += 1;
        Ok(fence)
    }

    /// Makes the stream's context current, on a thread that may use the stream.
    pub(super) fn enter(&self) -> Result<Current, CudaError> {
        if self.0.thread.is_some_and(|thread| thread != thread::current().id()) {
            return Err(CudaError::OtherThreadsStream);
        }
        self.0.context.0.enter()
    }

    /// 0: no capture, 1: a whole one, 2: one that was invalidated. The stream is entered.
    pub(super) fn capture_status(&self) -> Result<u32, CudaError> {
        let mut status = 0;
        // SAFETY: a live stream, an out pointer.
        let code = unsafe { (self.0.context.0.driver.stream_capturing)(self.as_raw(), &mut status) };
        check("cuStreamIsCapturing", number(self.as_raw()), code)?;
        Ok(status)
    }

    pub(super) fn refuse_capture(&self) -> Result<(), CudaError> {
        match self.capture_status()? {
            0 => Ok(()),
            status => Err(CudaError::Capturing { stream: number(self.as_raw()), status }),
        }
    }

    /// The stream's context.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The `CUstream`.
    pub fn as_raw(&self) -> RawHandle {
        self.0.raw.0
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_current) = self.context.0.enter()
        {
            // SAFETY: created by `Stream::new`, and nobody uses it any more. Queued work still runs.
            unsafe { (self.context.0.driver.stream_destroy)(self.raw.0) };
        }
    }
}
