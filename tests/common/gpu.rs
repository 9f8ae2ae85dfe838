//! The CUDA driver that a test runs on: the fake one, or, with `MOONRING_LIBCUDA` set, whatever the loader finds.
//!
//! A real driver has no controls. Parts that need them say so in a line that begins with `NOT CHECKED`.
#![allow(dead_code, reason = "each test program uses its part")]

use std::env;
use std::ffi::c_void;
use std::process::Command;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
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
            println!("NOT CHECKED: {part}: this is not the fake driver and has no controls");
        }
        self.fake
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
        let (host, device) = word();
        set_current(stream.context().as_raw());
        // SAFETY: a live stream, a word that is never freed.
        unsafe { sys::cuStreamWaitValue64_v2(stream.as_raw().cast(), device, 1, 0) }.result().unwrap();
        set_current(ptr::null_mut());
        Held(None, Some(host))
    }
}

/// A word of pinned memory of this process's, for good.
fn word() -> (&'static AtomicU64, u64) {
    let (mut host, mut device) = (ptr::null_mut(), 0);
    let context = Context::primary(0).unwrap();
    set_current(context.as_raw());
    // SAFETY: out pointers; the memory is ours and is never freed.
    let word = unsafe {
        sys::cuMemHostAlloc(&mut host, 4096, 3).result().unwrap();
        sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0).result().unwrap();
        host.cast::<u64>().write(0);
        AtomicU64::from_ptr(host.cast())
    };
    std::mem::forget(context);
    (word, device)
}

/// A stream held back. Dropping it lets the stream go on.
#[must_use]
pub struct Held(Option<fake_cuda::Hold>, Option<&'static AtomicU64>);

impl Held {
    pub fn release(self) {}
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.0.take());
        if let Some(word) = self.1 {
            word.store(1, Ordering::Release);
        }
    }
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

/// Tells the driver about a region, so that copies of it are not staged.
pub struct Pinned(*mut c_void, Context);

impl Pinned {
    pub fn new(region: &Registered, context: &Context) -> Pinned {
        let pointer = region.address() as *mut c_void;
        set_current(context.as_raw());
        // SAFETY: the region outlives this.
        unsafe { sys::cuMemHostRegister_v2(pointer, region.len(), 2) }.result().unwrap();
        Pinned(pointer, context.clone())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        set_current(self.1.as_raw());
        // SAFETY: registered in `new`.
        unsafe { sys::cuMemHostUnregister(self.0) }.result().unwrap();
    }
}

/// Queues a copy of `len` bytes from one offset of a pinned region to another.
pub fn copy(stream: &Stream, region: &Registered, from: usize, to: usize, len: usize) {
    let at = |offset: usize| region.address() + offset as u64;
    set_current(stream.context().as_raw());
    // SAFETY: ranges of the region, which outlives the copy; racing with it is what the tests are about.
    unsafe { sys::cuMemcpyAsync(at(to), at(from), len, stream.as_raw().cast()) }.result().unwrap();
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
