//! A compute stream: what is queued runs in order, and later. A CUDA stream where there is a GPU, otherwise a
//! thread with a queue of its own.

use std::error::Error;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use clap::ValueEnum;
use moonring::fence::{self, Fence, Signaller};
use moonring::{AccessError, Registered};

/// What runs the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compute {
    /// A CUDA stream where there is a driver, otherwise a thread
    Auto,
    /// A thread with a queue of its own
    Thread,
    /// A CUDA stream on device 0
    Cuda,
}

/// Queueing returns at once; whoever needs to know when the work has been done takes a [`fence`](Self::fence) behind it.
pub enum Stream {
    Thread(ThreadStream),
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaStream),
}

/// One piece of work on the pool.
pub type Work = Box<dyn FnOnce(&Registered) -> Result<(), AccessError> + Send>;

impl Stream {
    /// A stream that works on `pool`.
    pub fn start(compute: Compute, pool: Registered) -> Result<Stream, Box<dyn Error>> {
        match compute {
            Compute::Thread => Ok(Stream::Thread(ThreadStream::start(pool)?)),
            #[cfg(feature = "cuda")]
            Compute::Cuda => Ok(Stream::Cuda(cuda::CudaStream::start(pool)?)),
            #[cfg(feature = "cuda")]
            Compute::Auto if moonring::cuda::available().is_ok() => Ok(Stream::Cuda(cuda::CudaStream::start(pool)?)),
            #[cfg(not(feature = "cuda"))]
            Compute::Cuda => Err("built without the feature cuda: there are no CUDA streams here".into()),
            Compute::Auto => Ok(Stream::Thread(ThreadStream::start(pool)?)),
        }
    }

    /// What runs the work, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Stream::Thread(_) => "a thread",
            #[cfg(feature = "cuda")]
            Stream::Cuda(_) => "a CUDA stream",
        }
    }

    /// Queues a kernel that runs for so long.
    pub fn kernel(&self, time: Duration) -> Result<(), Box<dyn Error>> {
        self.queue(Box::new(move |_| {
            thread::sleep(time);
            Ok(())
        }))
    }

    /// Queues a copy of `len` bytes inside the pool.
    pub fn copy(&self, from: usize, to: usize, len: usize) -> Result<(), Box<dyn Error>> {
        self.queue(Box::new(move |pool| pool.copy_within(from, to, len)))
    }

    /// A fence that signals when everything queued so far has been done.
    pub fn fence(&self) -> Result<Fence, Box<dyn Error>> {
        match self {
            Stream::Thread(stream) => Ok(stream.fence()),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream.fence(),
        }
    }

    /// Queues any work on the pool.
    pub fn queue(&self, work: Work) -> Result<(), Box<dyn Error>> {
        match self {
            Stream::Thread(stream) => {
                stream.queue(Item::Work(work));
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream) => stream.queue(work),
        }
    }
}

/// A stream on a thread of its own.
pub struct ThreadStream {
    /// `None` once no more work will come.
    items: Option<Sender<Item>>,
    thread: Option<JoinHandle<()>>,
}

enum Item {
    Work(Work),
    Signal(Signaller),
}

impl ThreadStream {
    fn start(pool: Registered) -> std::io::Result<ThreadStream> {
        let (items, queued) = channel();
        let thread = thread::Builder::new().name("compute".into()).spawn(move || {
            if let Err(error) = run(&pool, &queued) {
                // The signallers that are still queued are dropped now, which fails their fences and with those every
                // entry that waits for one: nobody is left waiting.
                eprintln!("the compute stream failed: {error}");
            }
        })?;
        Ok(ThreadStream { items: Some(items), thread: Some(thread) })
    }

    fn fence(&self) -> Fence {
        let (signaller, fence) = fence::host();
        self.queue(Item::Signal(signaller));
        fence
    }

    fn queue(&self, item: Item) {
        if let Some(items) = &self.items {
            // A stream that has failed takes no more work. That need not be said here: a refused signaller is dropped,
            // and its fence fails.
            let _ = items.send(item);
        }
    }
}

fn run(pool: &Registered, queued: &Receiver<Item>) -> Result<(), AccessError> {
    for item in queued {
        match item {
            Item::Work(work) => work(pool)?,
            Item::Signal(signaller) => signaller.signal(),
        }
    }
    Ok(())
}

impl Drop for ThreadStream {
    fn drop(&mut self) {
        self.items = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The same on a CUDA stream. The pool is host memory, so the work is host functions that the stream runs in order.
#[cfg(feature = "cuda")]
mod cuda {
    use std::error::Error;
    use std::ffi::c_void;

    use cudarc::driver::sys;
    use moonring::cuda::{Context, Stream};
    use moonring::{Fence, Registered};

    use super::Work;

    pub struct CudaStream {
        stream: Stream,
        context: Context,
        pool: Registered,
    }

    impl CudaStream {
        pub fn start(pool: Registered) -> Result<CudaStream, Box<dyn Error>> {
            let context = Context::primary(0)?;
            Ok(CudaStream { stream: Stream::new(&context)?, context, pool })
        }

        pub fn fence(&self) -> Result<Fence, Box<dyn Error>> {
            Ok(self.stream.fence()?)
        }

        pub(super) fn queue(&self, work: Work) -> Result<(), Box<dyn Error>> {
            let call = Box::into_raw(Box::new((self.pool.clone(), work)));
            // SAFETY: the context and the stream are live; the function takes the box back, once.
            let queued = unsafe {
                sys::cuCtxSetCurrent(self.context.as_raw().cast())
                    .result()
                    .and_then(|()| sys::cuLaunchHostFunc(self.stream.as_raw().cast(), Some(run), call.cast()).result())
            };
            if queued.is_err() {
                // SAFETY: it was not queued, so the box is still ours.
                drop(unsafe { Box::from_raw(call) });
            }
            Ok(queued?)
        }
    }

    unsafe extern "C" fn run(call: *mut c_void) {
        // SAFETY: `queue` gave the box to this one call.
        let (pool, work) = *unsafe { Box::from_raw(call.cast::<(Registered, Work)>()) };
        if let Err(error) = work(&pool) {
            eprintln!("the compute stream failed: {error}");
        }
    }
}
