//! What can go wrong in a call into the CUDA module.

use std::fmt;

/// Why a call into the CUDA module was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "no CUDA driver: the loader finds neither libcuda.so nor libcuda.so.1; install the NVIDIA driver, or add its \
         folder to LD_LIBRARY_PATH"
    )]
    NoDriver,
    /// The driver lacks a function that moonring needs.
    #[error("the CUDA driver has no function {function}: it is older than CUDA 12.0 or not a CUDA driver; update it")]
    MissingFunction {
        /// Its name.
        function: &'static str,
    },
    /// A driver call failed.
    #[error("{function}({argument:#x}) answered {code}")]
    Call {
        /// The driver's function.
        function: &'static str,
        /// The handle or number it was about.
        argument: u64,
        /// What it answered.
        code: CudaCode,
    },
    /// There is no such device.
    #[error("there is no CUDA device {ordinal}: this machine has {count}, numbered from 0")]
    NoDevice {
        /// The device asked for.
        ordinal: i32,
        /// How many there are.
        count: i32,
    },
    /// The calling thread has no current context.
    #[error(
        "this thread has no current CUDA context; call it on a thread that has one, or name the context or the stream"
    )]
    NoCurrentContext,
    /// The current context is not the primary context of a device.
    #[error(
        "the current CUDA context {context:#x} is not its device's primary one, so it may be destroyed at any time; \
         adopt it with Context::adopt"
    )]
    NotPrimary {
        /// The context.
        context: u64,
    },
    /// The stream is being captured into a graph.
    #[error(
        "CUDA stream {stream:#x} is being captured into a graph (status {status}): an event recorded now belongs to the \
         graph and never completes; make the fence before the capture begins or after it has ended"
    )]
    Capturing {
        /// The stream.
        stream: u64,
        /// 1: the capture is whole. 2: it was invalidated.
        status: u32,
    },
    /// The per-thread default stream was adopted by another thread.
    #[error(
        "CUDA stream 0x2 is the calling thread's default stream, and another thread adopted it; adopt it on the thread \
         that queues the work"
    )]
    OtherThreadsStream,
}

/// A code that the driver answered, as a number: drivers know more codes than any header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaCode(
    /// The `CUresult`.
    pub u32,
);

impl fmt::Display for CudaCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match super::driver::Driver::describe(self.0) {
            Some((name, text)) => write!(f, "{} ({name}: {text})", self.0),
            None => write!(f, "{}", self.0),
        }
    }
}
