//! The GPU under test, or the fake one: the driver's functions, kernels, device memory, gates.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use std::{env, thread};

use anyhow::{Context as _, Result, bail, ensure};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use moonring::cuda::{Context, RawHandle, Stream};

use crate::checks::Skip;

/// Names the driver's library, a real one's; without it the fake driver is used. The test programs of the bundle read it too.
pub const REAL: &str = "MOONRING_LIBCUDA";

/// How long a wait may take before the check fails. On a real GPU all of them are short.
pub const LIMIT: Duration = Duration::from_secs(20);

macro_rules! functions {
    ($($name:ident($($arg:ty),*);)*) => {
        /// The driver's functions, under their own names, with codes as integers.
        #[allow(non_snake_case)]
        struct Driver { $($name: unsafe extern "C" fn($($arg),*) -> u32,)* }

        impl Driver {
            fn find(library: &'static Library) -> Result<Driver> {
                Ok(Driver {
                    // SAFETY: the signatures are those of cuda.h.
                    $($name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes())? },)*
                })
            }
        }
    };
}

functions! {
    cuInit(u32);
    cuDeviceGetCount(*mut i32);
    cuDeviceGetName(*mut c_char, i32, i32);
    cuDeviceGetAttribute(*mut i32, i32, i32);
    cuDriverGetVersion(*mut i32);
    cuCtxSetCurrent(RawHandle);
    cuStreamSynchronize(RawHandle);
    cuStreamQuery(RawHandle);
    cuStreamWaitValue64_v2(RawHandle, u64, u64, u32);
    cuStreamBeginCapture_v2(RawHandle, u32);
    cuStreamEndCapture(RawHandle, *mut RawHandle);
    cuStreamIsCapturing(RawHandle, *mut u32);
    cuGraphInstantiateWithFlags(*mut RawHandle, RawHandle, u64);
    cuGraphLaunch(RawHandle, RawHandle);
    cuGraphExecDestroy(RawHandle);
    cuGraphDestroy(RawHandle);
    cuMemAlloc_v2(*mut u64, usize);
    cuMemHostAlloc(*mut *mut c_void, usize, u32);
    cuMemHostGetDevicePointer_v2(*mut u64, *mut c_void, u32);
    cuModuleLoadData(*mut RawHandle, *const c_void);
    cuModuleGetFunction(*mut RawHandle, RawHandle, *const c_char);
    cuLaunchKernel(RawHandle, u32, u32, u32, u32, u32, u32, u32, RawHandle, *mut *mut c_void, *mut *mut c_void);
}

fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Ok(driver);
    }
    let path = match env::var_os(REAL) {
        Some(path) => path,
        None => {
            // Opened before anybody else asks for a driver, so that it is everybody's.
            fake_cuda::load().context("the fake driver does not load")?;
            fake_cuda::path().into()
        }
    };
    // SAFETY: a CUDA driver, whose initialisers may run in any program.
    let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
    let library = library.map_err(|error| Skip(format!("there is no CUDA driver {path:?}: {error:?}")))?;
    let found = Driver::find(Box::leak(Box::new(library)))?;
    Ok(DRIVER.get_or_init(|| found))
}

fn ok(call: &str, code: u32) -> Result<()> {
    ensure!(code == 0, "{call} answered {code}");
    Ok(())
}

/// Whether a real driver is used.
pub fn is_real() -> bool {
    env::var_os(REAL).is_some()
}

/// Device 0, its primary context, which is current on the thread that made this, and the kernels.
pub struct Device {
    driver: &'static Driver,
    pub context: Context,
    kernels: RawHandle,
}

/// What device 0 is called, and what a reader wants to know of it: driver version and attributes.
pub fn describe() -> Result<(String, String)> {
    let driver = driver()?;
    const NO_DEVICE: u32 = 100;
    let (mut count, mut version, mut name) = (0, 0, [0 as c_char; 128]);
    // SAFETY: out pointers, and a buffer of that length, in which the driver ends its text.
    let text = unsafe {
        let code = (driver.cuInit)(0);
        if code == NO_DEVICE {
            bail!(Skip("there is a CUDA driver, but no device".into()));
        }
        ok("cuInit", code)?;
        ok("cuDeviceGetCount", (driver.cuDeviceGetCount)(&mut count))?;
        if count == 0 {
            bail!(Skip("there is a CUDA driver, but no device".into()));
        }
        ok("cuDriverGetVersion", (driver.cuDriverGetVersion)(&mut version))?;
        ok("cuDeviceGetName", (driver.cuDeviceGetName)(name.as_mut_ptr(), 128, 0))?;
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    };
    let attributes: Vec<_> = [75, 76, 98, 100, 116, 117, 118, 122, 123, 125]
        .map(|which| {
            let mut value = 0;
            // SAFETY: an out pointer.
            match unsafe { (driver.cuDeviceGetAttribute)(&mut value, which, 0) } {
                0 => format!("{which} = {value}"),
                code => format!("{which}: error {code}"),
            }
        })
        .into();
    Ok((text, format!("driver {version}, devices {count}, attributes {}", attributes.join(", "))))
}

impl Device {
    pub fn open() -> Result<Device> {
        let driver = driver()?;
        let context = Context::primary(0)?;
        // It ends with the process. Releasing it waits for its streams, and after a failed check they may stand still.
        std::mem::forget(context.clone());
        let mut kernels = ptr::null_mut();
        let image = [fake_cuda::KERNELS.as_bytes(), b"\0"].concat();
        // SAFETY: a context that lives; an out pointer and PTX that ends with a zero.
        unsafe {
            ok("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(context.as_raw()))?;
            ok("cuModuleLoadData", (driver.cuModuleLoadData)(&mut kernels, image.as_ptr().cast()))?;
        }
        Ok(Device { driver, context, kernels })
    }

    /// A stream that is not joined with the legacy one.
    pub fn stream(&self) -> Result<Stream> {
        Ok(Stream::new(&self.context)?)
    }

    pub fn kernel(&self, name: &CStr) -> Result<Kernel> {
        let mut function = ptr::null_mut();
        // SAFETY: an out pointer; a module that is never unloaded.
        ok("cuModuleGetFunction", unsafe {
            (self.driver.cuModuleGetFunction)(&mut function, self.kernels, name.as_ptr())
        })?;
        Ok(Kernel { driver: self.driver, function })
    }

    /// Memory of the device, which ends with the process: freeing it waits for streams as well.
    pub fn memory(&self, len: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: an out pointer.
        ok("cuMemAlloc", unsafe { (self.driver.cuMemAlloc_v2)(&mut address, len) })?;
        Ok(address)
    }

    /// A 64-bit word of pinned memory that host and device see; 0 at first, never freed.
    pub fn word(&self) -> Result<Word> {
        let (mut host, mut device) = (ptr::null_mut(), 0);
        // SAFETY: out pointers; the memory is ours and is never freed.
        unsafe {
            ok("cuMemHostAlloc", (self.driver.cuMemHostAlloc)(&mut host, 4096, 3))?;
            host.cast::<u64>().write(0);
            ok("cuMemHostGetDevicePointer", (self.driver.cuMemHostGetDevicePointer_v2)(&mut device, host, 0))?;
            Ok(Word { host: AtomicU64::from_ptr(host.cast()), device })
        }
    }

    /// Lets what is queued on the stream from now on wait until the word has reached the value.
    pub fn gate(&self, stream: &Stream, word: &Word, value: u64) -> Result<()> {
        // SAFETY: a live stream; a word that is never freed.
        ok("cuStreamWaitValue64", unsafe {
            (self.driver.cuStreamWaitValue64_v2)(stream.as_raw(), word.device, value, 0)
        })
    }

    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        // SAFETY: a live stream.
        ok("cuStreamSynchronize", unsafe { (self.driver.cuStreamSynchronize)(stream.as_raw()) })
    }

    /// Waits for the stream without holding up anybody, and fails after a while.
    pub fn runs(&self, stream: &Stream) -> Result<()> {
        let end = Instant::now() + LIMIT;
        loop {
            // SAFETY: a live stream.
            match unsafe { (self.driver.cuStreamQuery)(stream.as_raw()) } {
                600 if Instant::now() < end => thread::sleep(Duration::from_micros(100)),
                600 => bail!("a stream stood still for {LIMIT:?}"),
                code => return ok("cuStreamQuery", code),
            }
        }
    }

    /// Begins a capture in GLOBAL mode, which every thread's unsafe calls would spoil.
    pub fn begin_capture(&self, stream: &Stream) -> Result<()> {
        // SAFETY: a live stream.
        ok("cuStreamBeginCapture", unsafe { (self.driver.cuStreamBeginCapture_v2)(stream.as_raw(), 0) })
    }

    /// Whether the stream's capture is whole so far.
    pub fn captures(&self, stream: &Stream) -> Result<bool> {
        let mut status = 0;
        // SAFETY: a live stream, an out pointer.
        ok("cuStreamIsCapturing", unsafe { (self.driver.cuStreamIsCapturing)(stream.as_raw(), &mut status) })?;
        Ok(status == 1)
    }

    pub fn end_capture(&self, stream: &Stream) -> Result<Graph> {
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live stream, out pointers.
        unsafe {
            ok("cuStreamEndCapture", (self.driver.cuStreamEndCapture)(stream.as_raw(), &mut graph))?;
            ok("cuGraphInstantiate", (self.driver.cuGraphInstantiateWithFlags)(&mut exec, graph, 0))?;
        }
        Ok(Graph { driver: self.driver, graph, exec })
    }
}

#[derive(Clone, Copy)]
pub struct Kernel {
    driver: &'static Driver,
    function: RawHandle,
}

// SAFETY: a handle that any thread may use.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Launches it. The parameters are what the kernel's PTX says; a 32-bit one takes the lower half.
    pub fn launch(&self, stream: &Stream, threads: u32, params: &[u64]) -> Result<()> {
        let blocks = threads.div_ceil(256);
        let mut values: Vec<*mut c_void> = params.iter().map(|p| ptr::from_ref(p).cast_mut().cast()).collect();
        // SAFETY: the driver copies the parameters during the call, and each has its size.
        ok("cuLaunchKernel", unsafe {
            (self.driver.cuLaunchKernel)(
                self.function,
                blocks,
                1,
                1,
                threads.min(256),
                1,
                1,
                0,
                stream.as_raw(),
                values.as_mut_ptr(),
                ptr::null_mut(),
            )
        })
    }
}

/// Of pinned memory; see [`Device::word`].
#[derive(Clone, Copy)]
pub struct Word {
    pub host: &'static AtomicU64,
    pub device: u64,
}

/// A graph and what was made of it.
pub struct Graph {
    driver: &'static Driver,
    graph: RawHandle,
    pub exec: RawHandle,
}

impl Graph {
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: live handles.
        ok("cuGraphLaunch", unsafe { (self.driver.cuGraphLaunch)(self.exec, stream.as_raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: not used again.
        unsafe {
            (self.driver.cuGraphExecDestroy)(self.exec);
            (self.driver.cuGraphDestroy)(self.graph);
        }
    }
}
