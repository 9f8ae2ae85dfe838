//! The driver's functions that moonring calls, found when first needed.
//!
//! cudarc finds and loads the library. The functions are declared here, with codes as integers: cudarc's type of a code
//! is a closed enum, in which a code of a newer driver would be undefined behaviour, and its own look-ups panic where a
//! function is missing.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;
use static_assertions::const_assert_eq;

use super::RawHandle;
use super::error::{CudaCode, CudaError};

pub(super) const SUCCESS: u32 = 0;
pub(super) const NOT_READY: u32 = 600;

macro_rules! functions {
    ($($name:ident: $function:literal ($($arg:ty),*);)*) => {
        /// The functions, by the names of `cuda.h`.
        #[derive(Debug)]
        pub(super) struct Driver {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> u32,)*
        }

        impl Driver {
            fn find() -> Result<Driver, CudaError> {
                // SAFETY: opening the library runs its initialisers. A CUDA driver's may run in any program.
                if !unsafe { sys::is_culib_present() } {
                    return Err(CudaError::NoDriver);
                }
                // SAFETY: as above; the call panics only if there is no library, and there is one.
                let library = unsafe { sys::culib() };
                Ok(Driver {
                    $($name: {
                        // SAFETY: the signature is that of cuda.h; a `CUresult` is an int-sized number. The library is
                        // never unloaded.
                        let found = unsafe { library.get(concat!($function, "\0").as_bytes()) };
                        *found.map_err(|_| CudaError::MissingFunction { function: $function })?
                    },)*
                })
            }
        }
    };
}

functions! {
    init: "cuInit"(u32);
    error_name: "cuGetErrorName"(u32, *mut *const c_char);
    error_string: "cuGetErrorString"(u32, *mut *const c_char);
    device_count: "cuDeviceGetCount"(*mut i32);
    primary_retain: "cuDevicePrimaryCtxRetain"(*mut RawHandle, i32);
    primary_release: "cuDevicePrimaryCtxRelease_v2"(i32);
    primary_state: "cuDevicePrimaryCtxGetState"(i32, *mut u32, *mut i32);
    context_current: "cuCtxGetCurrent"(*mut RawHandle);
    context_push: "cuCtxPushCurrent_v2"(RawHandle);
    context_pop: "cuCtxPopCurrent_v2"(*mut RawHandle);
    context_device: "cuCtxGetDevice"(*mut i32);
    context_flags: "cuCtxGetFlags"(*mut u32);
    context_id: "cuCtxGetId"(RawHandle, *mut u64);
    device_attribute: "cuDeviceGetAttribute"(*mut i32, i32, i32);
    event_create: "cuEventCreate"(*mut RawHandle, u32);
    event_record: "cuEventRecord"(RawHandle, RawHandle);
    event_query: "cuEventQuery"(RawHandle);
    event_destroy: "cuEventDestroy_v2"(RawHandle);
    stream_create: "cuStreamCreate"(*mut RawHandle, u32);
    stream_destroy: "cuStreamDestroy_v2"(RawHandle);
    stream_query: "cuStreamQuery"(RawHandle);
    stream_flags: "cuStreamGetFlags"(RawHandle, *mut u32);
    stream_context: "cuStreamGetCtx"(RawHandle, *mut RawHandle);
    stream_id: "cuStreamGetId"(RawHandle, *mut u64);
    stream_capturing: "cuStreamIsCapturing"(RawHandle, *mut u32);
    capture_info: "cuStreamGetCaptureInfo_v2"(RawHandle, *mut u32, *mut u64, *mut RawHandle, *mut *const RawHandle, *mut usize);
    exchange_capture_mode: "cuThreadExchangeStreamCaptureMode"(*mut u32);
    write_value: "cuStreamWriteValue64_v2"(RawHandle, u64, u64, u32);
    wait_value: "cuStreamWaitValue64_v2"(RawHandle, u64, u64, u32);
    add_memory_node: "cuGraphAddBatchMemOpNode"(*mut RawHandle, RawHandle, *const RawHandle, usize, *const MemoryNode);
    set_memory_node: "cuGraphExecBatchMemOpNodeSetParams"(RawHandle, RawHandle, *const MemoryNode);
    host_alloc: "cuMemHostAlloc"(*mut *mut c_void, usize, u32);
    host_free: "cuMemFreeHost"(*mut c_void);
    host_device_pointer: "cuMemHostGetDevicePointer_v2"(*mut u64, *mut c_void, u32);
    pointer_attribute: "cuPointerGetAttribute"(*mut c_void, i32, u64);
    set_pointer_attribute: "cuPointerSetAttribute"(*const c_void, i32, u64);
    flush_writes: "cuFlushGPUDirectRDMAWrites"(u32, u32);
}

/// One stream memory operation of a graph's node: `CUstreamBatchMemOpParams` of `cuda.h`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct MemoryOperation {
    /// [`WAIT`](Self::WAIT) or [`WRITE`](Self::WRITE).
    pub(super) operation: u32,
    /// A device's address.
    pub(super) address: u64,
    pub(super) value: u64,
    /// 0: wait until the word is not below the value; write behind everything before.
    pub(super) flags: u32,
    /// Not used by the driver.
    pub(super) alias: u64,
    pub(super) unused: u64,
}

impl MemoryOperation {
    pub(super) const WAIT: u32 = 4;
    pub(super) const WRITE: u32 = 5;
}

const_assert_eq!(size_of::<MemoryOperation>(), 48);

/// A graph's node of such operations: `CUDA_BATCH_MEM_OP_NODE_PARAMS` of `cuda.h`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct MemoryNode {
    pub(super) context: RawHandle,
    pub(super) count: u32,
    pub(super) operations: *const MemoryOperation,
    pub(super) flags: u32,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();

impl Driver {
    /// The driver, found and initialised.
    pub(super) fn get() -> Result<&'static Driver, CudaError> {
        let driver = Driver::loaded()?;
        // Cheap after the first time, and in a forked child the one call that says what is wrong.
        // SAFETY: takes a number.
        check("cuInit", 0, unsafe { (driver.init)(0) })?;
        Ok(driver)
    }

    fn loaded() -> Result<&'static Driver, CudaError> {
        static LOADING: Mutex<()> = Mutex::new(());
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        // A failure is not kept: the driver may be there next time.
        let _one = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        match DRIVER.get() {
            Some(driver) => Ok(driver),
            None => {
                let found = Driver::find()?;
                Ok(DRIVER.get_or_init(|| found))
            }
        }
    }

    pub(super) fn device_count(&self) -> Result<i32, CudaError> {
        let mut count = 0;
        // SAFETY: an out pointer.
        check("cuDeviceGetCount", 0, unsafe { (self.device_count)(&mut count) })?;
        Ok(count)
    }

    /// The driver's name and text for a code, if it is loaded and knows the code.
    pub(super) fn describe(code: u32) -> Option<(&'static str, &'static str)> {
        let driver = DRIVER.get()?;
        let ask = |function: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
            let mut text = ptr::null();
            // SAFETY: an out pointer.
            let known = unsafe { function(code, &mut text) } == SUCCESS && !text.is_null();
            // SAFETY: the driver's texts are static strings.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_str().ok()).flatten()
        };
        Some((ask(driver.error_name)?, ask(driver.error_string)?))
    }
}

/// Turns a code into a result. `argument` is what the call was about.
pub(super) fn check(function: &'static str, argument: u64, code: u32) -> Result<(), CudaError> {
    match code {
        SUCCESS => Ok(()),
        code => Err(CudaError::Call { function, argument, code: CudaCode(code) }),
    }
}

/// A handle as errors show it.
pub(super) fn number(handle: RawHandle) -> u64 {
    handle.addr() as u64
}
