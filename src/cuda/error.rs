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
    /// The stream is not being captured into a graph, or its capture was invalidated.
    #[error("CUDA stream {stream:#x} is not being captured into a graph: call it between begin and end of the capture")]
    NotCapturing {
        /// The stream.
        stream: u64,
    },
    /// A fence was asked for on a value that nothing was told to signal.
    #[error("nothing is to signal the value {asked} yet: the last one is {last}; signal, or push the entry, first")]
    NotSignalled {
        /// The last value queued.
        last: u64,
        /// The value asked for.
        asked: u64,
    },
    /// Streams of the device cannot write and wait for memory.
    #[error(
        "streams of CUDA device {device} cannot write or wait for 64-bit words in memory (device attribute 122 is 0); use \
         Stream::fence, and launch what needs a load after its completion"
    )]
    NoMemoryOperations {
        /// The device.
        device: i32,
    },
    /// The device may show a waiting stream a load's bytes later than its completion, and cannot be told to hurry.
    #[error(
        "CUDA device {device} does not order writes of other devices (attribute 118 is {ordering}) and has no call to \
         flush them (attribute 117 is {options}): a stream must not wait for a load; launch what needs it after its \
         completion"
    )]
    NoWriteOrder {
        /// The device.
        device: i32,
        /// Its attribute `GPU_DIRECT_RDMA_WRITES_ORDERING`.
        ordering: i32,
        /// Its attribute `GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`.
        options: i32,
    },
    /// Bytes and completions may come to the device by different ways, and no flush covers all of them.
    #[error(
        "CUDA device {device} shares the host's page tables (attribute 100), as where GPU and CPU are linked by \
         NVLink-C2C: a load's bytes and its completion may take different ways, so a stream must not wait for a load; \
         read back through the network card what was loaded, then launch what needs it"
    )]
    SeveralPaths {
        /// The device.
        device: i32,
    },
    /// The stream is joined with the legacy default stream.
    #[error(
        "CUDA stream {stream:#x} is a blocking one: while it waits, so does the legacy default stream, and with it \
         Mooncake's copies over TCP, perhaps those it waits for; use one made with CU_STREAM_NON_BLOCKING"
    )]
    BlockingStream {
        /// The stream.
        stream: u64,
    },
    /// Stream and timeline are of different contexts.
    #[error("CUDA stream {stream:#x} is not of the timeline's context; make a timeline for its context")]
    OtherContext {
        /// The stream.
        stream: u64,
    },
    /// The memory is none that CUDA knows.
    #[error("the memory at {address:#x} is not CUDA's: register it with the location that it has, such as cpu:0")]
    NotGpuMemory {
        /// Its address.
        address: u64,
    },
    /// A helper thread could not be started.
    #[error("a thread for CUDA could not be started: {why}")]
    Thread {
        /// What the system says.
        why: String,
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
