//! The CUDA driver that a test runs on: the fake one, or, with `MOONRING_LIBCUDA` set, whatever the loader finds.
//! moonring's own unit tests use this file too.
//!
//! A real driver has no controls: no injected errors, no switches, no log of calls. Parts that need them say so in a line
//! that begins with `NOT CHECKED`. What a real driver answers where no source tells is in lines that begin with `FACT`.
#![allow(dead_code, reason = "each test program uses its part")]

use std::env;
use std::ffi::c_void;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstreamCaptureMode};
use fake_cuda::{Call, Driver, Exclusive, Knob, thread_id};
use moonring::Registered;
use moonring::cuda::{self, Context, RawHandle, Stream};

/// Nothing here takes nearly as long.
pub const LIMIT: Duration = Duration::from_secs(20);

/// One test's use of the driver, alone in the process.
pub struct Gpu {
    /// The controls; `None` on a real driver.
    pub fake: Option<&'static Driver>,
    _alone: (Option<Exclusive>, Option<MutexGuard<'static, ()>>),
}

/// Answers to what is not known of real drivers, other than those that the fake gives at first.
const OTHER_ANSWERS: [Knob; 8] = [
    Knob::ContextlessCallsRefused(true),
    Knob::CaptureSameDeviceOnly(true),
    Knob::CapturedEventAfterEnd(1),
    Knob::DoneEventAfterFaultSticky(false),
    Knob::FlushFlagRefusal(801),
    Knob::ForeignMemopAccepted(true),
    Knob::IpcOpenInSameProcess(true),
    Knob::FreesWait(false),
];
const OTHER: &str = "MOONRING_FAKE_CUDA_OTHER_ANSWERS";

/// Runs this program's tests again, in a process of its own where the fake answers so; `test` is the one that calls this.
pub fn again_with_other_answers(test: &str) {
    if is_real() {
        println!("NOT CHECKED: {test}: a real driver has its own answers");
    } else if env::var_os(OTHER).is_none() {
        let mut again = Command::new(env::current_exe().unwrap());
        let output = again.args(["--skip", test]).env(OTHER, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Whether another driver than the fake is tested.
pub fn is_real() -> bool {
    env::var_os("MOONRING_LIBCUDA").is_some()
}

/// Takes the driver for a test.
pub fn gpu() -> Gpu {
    let gpu = without_context();
    if gpu.fake.is_none() {
        drop(gates());
    }
    gpu
}

/// Takes the driver for a test that holds no stream, and makes no context.
pub fn without_context() -> Gpu {
    static ALONE: Mutex<()> = Mutex::new(());
    let gpu = if is_real() {
        Gpu { fake: None, _alone: (None, Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))) }
    } else {
        let fake = fake_cuda::load().expect("the fake driver loads");
        let gpu = Gpu { fake: Some(fake), _alone: (Some(fake.exclusive()), None) };
        if env::var_os(OTHER).is_some() {
            for answer in OTHER_ANSWERS {
                fake.set(answer);
            }
            fake.set_unsafe("cuFlushGPUDirectRDMAWrites", true);
        }
        gpu
    };
    cuda::available().unwrap();
    gpu.take_log();
    gpu
}

impl Gpu {
    /// The controls, or `None` and a word about what is not checked.
    pub fn controls(&self, part: &str) -> Option<&'static Driver> {
        if self.fake.is_none() {
            println!("NOT CHECKED: {part}: a real device has no injected errors, no switches and no log of calls");
        }
        self.fake
    }

    /// Checks that no other thread than this has called the driver since the last look, where that can be known.
    #[track_caller]
    pub fn no_calls_of_others(&self, what: &str) {
        if self.controls(what).is_some() {
            assert_eq!(self.calls_of_others(), Vec::<&str>::new(), "{what}");
        }
    }

    /// All calls since the last look; none on a real driver.
    pub fn take_log(&self) -> Vec<Call> {
        self.fake.map_or_else(Vec::new, Driver::take_log)
    }

    /// What other threads than this called since the last look.
    pub fn calls_of_others(&self) -> Vec<&'static str> {
        let me = thread_id();
        self.take_log().into_iter().filter(|call| call.thread != me).map(|call| call.name).collect()
    }

    /// Holds a stream: what is queued from now on runs only after the release.
    pub fn hold(&self, stream: &Stream) -> Held {
        if let Some(fake) = self.fake {
            return Held(Some(fake.hold(stream.as_raw())), None);
        }
        let mut gate = gates().pop().expect("a test holds few streams at once");
        gate.closed += 1;
        with_current(stream.context().as_raw(), || {
            // SAFETY: a live stream, a word that is never freed.
            unsafe { sys::cuStreamWaitValue64_v2(stream.as_raw().cast(), gate.device, gate.closed, 0) }
                .result()
                .unwrap();
        });
        Held(None, Some(gate))
    }
}

/// A word of pinned memory for which streams of a real driver wait.
struct Gate {
    word: &'static AtomicU64,
    device: u64,
    /// How often it was closed. It is open when the word shows that.
    closed: u64,
}

/// The gates that nobody uses. They are made before the first test has a stream: allocating pinned memory may wait for
/// held streams, and would spoil a capture.
fn gates() -> MutexGuard<'static, Vec<Gate>> {
    const SIZE: usize = 4096;
    const PORTABLE_AND_MAPPED: u32 = 3;
    static GATES: OnceLock<Mutex<Vec<Gate>>> = OnceLock::new();
    let make = || {
        let (mut host, mut device) = (ptr::null_mut(), 0);
        let context = Context::primary(0).unwrap();
        with_current(context.as_raw(), || {
            // SAFETY: out pointers; the memory is ours and is never freed.
            unsafe {
                sys::cuMemHostAlloc(&mut host, SIZE, PORTABLE_AND_MAPPED).result().unwrap();
                sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0).result().unwrap();
                ptr::write_bytes(host.cast::<u8>(), 0, SIZE);
            }
        });
        // The memory is the context's.
        std::mem::forget(context);
        let gate = |at: usize| Gate {
            // SAFETY: aligned, inside the page, and used as an atomic only.
            word: unsafe { AtomicU64::from_ptr(host.byte_add(at).cast()) },
            device: device + at as u64,
            closed: 0,
        };
        Mutex::new((0..SIZE).step_by(64).map(gate).collect())
    };
    GATES.get_or_init(make).lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream held back. Dropping it lets the stream go on.
#[must_use]
pub struct Held(Option<fake_cuda::Hold>, Option<Gate>);

impl Held {
    pub fn release(self) {}
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.0.take());
        if let Some(gate) = self.1.take() {
            gate.word.store(gate.closed, Ordering::Release);
            gates().push(gate);
        }
    }
}

/// Runs `f` with this context current.
pub fn with_current(context: RawHandle, f: impl FnOnce()) {
    // SAFETY: a live context.
    unsafe { sys::cuCtxPushCurrent_v2(context.cast()) }.result().unwrap();
    f();
    let mut popped = ptr::null_mut();
    // SAFETY: an out pointer.
    unsafe { sys::cuCtxPopCurrent_v2(&mut popped) }.result().unwrap();
}

pub fn set_current(context: RawHandle) {
    // SAFETY: a live context or none.
    unsafe { sys::cuCtxSetCurrent(context.cast()) }.result().unwrap();
}

pub fn a_stream() -> Stream {
    Stream::new(&Context::primary(0).unwrap()).unwrap()
}

/// Waits until everything on the stream so far has run, or answers false when the limit has passed.
pub fn runs_within(stream: &Stream, limit: Duration) -> bool {
    set_current(stream.context().as_raw());
    let end = Instant::now() + limit;
    loop {
        // SAFETY: a live stream.
        match unsafe { sys::cuStreamQuery(stream.as_raw().cast()) } {
            sys::CUresult::CUDA_SUCCESS => return true,
            sys::CUresult::CUDA_ERROR_NOT_READY if Instant::now() < end => {
                std::thread::sleep(Duration::from_micros(200));
            }
            sys::CUresult::CUDA_ERROR_NOT_READY => return false,
            other => panic!("the stream answers {other:?}"),
        }
    }
}

#[track_caller]
pub fn runs(stream: &Stream) {
    assert!(runs_within(stream, LIMIT), "the stream stands still");
}

#[track_caller]
pub fn stands_still(stream: &Stream) {
    assert!(!runs_within(stream, Duration::from_millis(10)), "the stream went on");
}

/// Tells the driver about a region, so that copies of it are not staged; and memory of the device by way of which it is
/// copied. A real driver's caller waits for a copy from host memory to host memory, which work on a stream must not do.
pub struct Pinned {
    region: u64,
    device: u64,
    context: Context,
}

impl Pinned {
    pub fn new(region: &Registered, context: &Context) -> Pinned {
        let mut device = 0;
        with_current(context.as_raw(), || {
            // SAFETY: the region outlives this; an out pointer.
            unsafe {
                let pointer = region.address() as *mut c_void;
                sys::cuMemHostRegister_v2(pointer, region.len(), 2).result().unwrap();
                sys::cuMemAlloc_v2(&mut device, region.len()).result().unwrap();
            }
        });
        Pinned { region: region.address(), device, context: context.clone() }
    }

    /// Queues a copy of `len` bytes from one offset of the region to another.
    pub fn copy(&self, stream: &Stream, from: usize, to: usize, len: usize) {
        let at = |offset: usize| (self.region + offset as u64) as *mut c_void;
        let (device, queue) = (self.device + from as u64, stream.as_raw().cast());
        with_current(stream.context().as_raw(), || {
            // SAFETY: ranges of the region, which outlives the copy; racing with it is what the tests are about.
            unsafe {
                sys::cuMemcpyHtoDAsync_v2(device, at(from), len, queue).result().unwrap();
                sys::cuMemcpyDtoHAsync_v2(at(to), device, len, queue).result().unwrap();
            }
        });
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // After a failed test streams may stand still, and freeing may wait for them.
        if std::thread::panicking() {
            return;
        }
        with_current(self.context.as_raw(), || {
            // SAFETY: registered and allocated in `new`.
            unsafe {
                sys::cuMemFree_v2(self.device).result().unwrap();
                sys::cuMemHostUnregister(self.region as *mut c_void).result().unwrap();
            }
        });
    }
}

pub fn begin_capture(stream: &Stream) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    set_current(stream.context().as_raw());
    // SAFETY: a live stream.
    unsafe { sys::cuStreamBeginCapture_v2(stream.as_raw().cast(), mode) }.result().unwrap();
}

/// A graph and an executable of it, for good: tests are short.
pub struct Graph {
    pub graph: RawHandle,
    pub exec: RawHandle,
}

/// Ends a capture that must be whole.
pub fn end_capture(stream: &Stream) -> Graph {
    let mut graph = ptr::null_mut();
    // SAFETY: a live stream, an out pointer.
    unsafe { sys::cuStreamEndCapture(stream.as_raw().cast(), &mut graph) }.result().unwrap();
    instantiate(graph.cast())
}

pub fn new_graph() -> RawHandle {
    let mut graph = ptr::null_mut();
    // SAFETY: an out pointer.
    unsafe { sys::cuGraphCreate(&mut graph, 0) }.result().unwrap();
    graph.cast()
}

pub fn instantiate(graph: RawHandle) -> Graph {
    let mut exec = ptr::null_mut();
    // SAFETY: an out pointer, a graph of this test.
    unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph.cast(), 0) }.result().unwrap();
    Graph { graph, exec: exec.cast() }
}

impl Graph {
    pub fn launch(&self, stream: &Stream) {
        // SAFETY: handles of this test.
        unsafe { sys::cuGraphLaunch(self.exec.cast(), stream.as_raw().cast()) }.result().unwrap();
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: handles of this test, not used again.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.exec.cast());
            let _ = sys::cuGraphDestroy(self.graph.cast());
        }
    }
}
