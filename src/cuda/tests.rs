//! The module against the fake driver or a real one, asked as a poller asks. What entries make of it: tests/cuda_fences.rs.

use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, thread};

use cudarc::driver::sys::{self, CUstreamCaptureMode, CUstreamCaptureStatus};
use fake_cuda::{Driver, Knob, thread_id};

use super::testing::{gpu, set_current, without_context};
use super::{Context, CudaCode, CudaError, RawHandle, Stream, available};
use crate::fence::{Failure, Fence, FenceStatus, Kind};

const PENDING: FenceStatus = FenceStatus::Pending;
const SIGNALLED: FenceStatus = FenceStatus::Signalled;

fn failed(detail: i32) -> FenceStatus {
    FenceStatus::Failed(Failure { errno: 5, detail })
}

/// The names of what this thread called since the last look.
fn calls(fake: &Driver) -> Vec<&'static str> {
    let mine = thread_id();
    fake.take_log().iter().filter(|call| call.thread == mine).map(|call| call.name).collect()
}

/// The second device's context, or, where there is none, the first's.
fn another_device() -> Context {
    Context::primary(1).or_else(|_| Context::primary(0)).unwrap()
}

/// Asks a fence here, as a poller does.
fn ask_here(fence: &Fence) -> FenceStatus {
    let Kind::Polled(polled) = &fence.0.kind else { panic!("a CUDA fence is polled") };
    polled.poll()
}

fn group(fence: &Fence) -> Option<(u64, u64)> {
    let Kind::Polled(polled) = &fence.0.kind else { panic!("a CUDA fence is polled") };
    polled.group()
}

fn elsewhere<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(f).join().unwrap())
}

/// Asks a fence on a thread of its own: asking changes the thread.
fn ask(fence: &Fence) -> FenceStatus {
    elsewhere(|| ask_here(fence))
}

#[track_caller]
fn becomes(fence: &Fence, status: FenceStatus) {
    let end = Instant::now() + Duration::from_secs(20);
    while ask(fence) != status {
        assert!(Instant::now() < end, "the fence stays {:?} and must become {status:?}", ask(fence));
    }
}

#[track_caller]
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        thread::yield_now();
    }
}

fn begin_capture(stream: RawHandle, mode: CUstreamCaptureMode) {
    // SAFETY: a live stream.
    unsafe { sys::cuStreamBeginCapture_v2(stream.cast(), mode) }.result().unwrap();
}

/// Ends a capture; true if it was whole.
fn end_capture(stream: RawHandle) -> bool {
    let mut graph = ptr::null_mut();
    // SAFETY: a live stream, an out pointer.
    unsafe { sys::cuStreamEndCapture(stream.cast(), &mut graph) }.result().is_ok() && !graph.is_null()
}

fn capture_is_whole(stream: RawHandle) -> bool {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a live stream, an out pointer.
    unsafe { sys::cuStreamIsCapturing(stream.cast(), &mut status) }.result().unwrap();
    status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
}

fn current() -> RawHandle {
    let mut context = ptr::null_mut();
    // SAFETY: an out pointer.
    unsafe { sys::cuCtxGetCurrent(&mut context) }.result().unwrap();
    context.cast()
}

/// A context that is not a primary one; it is current here then.
fn create_context() -> RawHandle {
    let mut context = ptr::null_mut();
    // SAFETY: an out pointer; no parameters.
    unsafe { sys::cuCtxCreate_v4(&mut context, ptr::null_mut(), 0, 0) }.result().unwrap();
    context.cast()
}

fn create_event() -> RawHandle {
    let mut event = ptr::null_mut();
    // SAFETY: an out pointer.
    unsafe { sys::cuEventCreate(&mut event, 2) }.result().unwrap();
    event.cast()
}

/// Records an event, in the current context.
fn record(event: RawHandle, stream: RawHandle) {
    // SAFETY: live handles.
    unsafe { sys::cuEventRecord(event.cast(), stream.cast()) }.result().unwrap();
}

/// Runs `inside` in a process of its own: this test alone.
fn in_child(test: &str, inside: impl FnOnce()) {
    const CHILD: &str = "MOONRING_CUDA_TEST_CHILD";
    if env::var_os(CHILD).is_some() {
        inside();
        std::process::exit(0);
    }
    let test = format!("cuda::tests::{test}");
    let mut child = Command::new(env::current_exe().unwrap());
    let output = child.args(["--exact", &test, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the child ended with {}:\n{err}", output.status);
    eprint!("{err}");
}

// Finding the driver

#[test]
fn without_a_driver_the_error_says_what_to_do() {
    in_child("without_a_driver_the_error_says_what_to_do", || {
        let loaded = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("cuda.so");
        assert!(!loaded(), "nothing asked for CUDA yet");
        match available() {
            Err(error @ CudaError::NoDriver) => assert!(error.to_string().contains("LD_LIBRARY_PATH"), "{error}"),
            _ if loaded() => eprintln!("NOT CHECKED: the error without a driver: this machine has one"),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_library_without_the_functions_is_an_error() {
    in_child("a_library_without_the_functions_is_an_error", || {
        fake_cuda::load_empty().unwrap();
        let error = available().unwrap_err();
        assert_eq!(error, CudaError::MissingFunction { function: "cuInit" });
        assert!(Context::primary(0).is_err());
        // SAFETY: refused before anybody looks at the handle.
        assert!(unsafe { Stream::adopt(ptr::null_mut()) }.is_err());
    });
}

#[test]
fn errors_name_the_call_the_value_and_the_code() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("errors of calls that fail") else { return };
    fake.fail_call("cuInit", 1, 100);
    let error = available().unwrap_err();
    assert_eq!(error, CudaError::Call { function: "cuInit", argument: 0, code: CudaCode(100) });
    assert_eq!(
        error.to_string(),
        "cuInit(0x0) answered 100 (CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected)"
    );
    fake.fail_call("cuInit", 1, 4711);
    assert_eq!(available().unwrap_err().to_string(), "cuInit(0x0) answered 4711");
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let _gpu = gpu();
    let mut count = 0;
    // SAFETY: an out pointer.
    unsafe { sys::cuDeviceGetCount(&mut count) }.result().unwrap();
    for ordinal in [count, -1] {
        let error = Context::primary(ordinal).unwrap_err();
        assert_eq!(error, CudaError::NoDevice { ordinal, count });
        let text = format!("there is no CUDA device {ordinal}: this machine has {count}, numbered from 0");
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn a_forked_child_is_told_and_dropping_there_is_harmless() {
    in_child("a_forked_child_is_told_and_dropping_there_is_harmless", || {
        let _gpu = gpu();
        let context = Context::primary(0).unwrap();
        let stream = Stream::new(&context).unwrap();
        let fence = stream.fence().unwrap();
        // SAFETY: the child calls the driver, which refuses, and leaves without destructors.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                // A driver that waits instead of refusing is stopped.
                libc::alarm(10);
                let is_3 = |error: CudaError| matches!(error, CudaError::Call { code: CudaCode(3), .. });
                let told = is_3(available().unwrap_err()) && is_3(stream.fence().unwrap_err());
                drop((fence, stream, context));
                libc::_exit(if told { 0 } else { 1 });
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        }
        becomes(&fence, SIGNALLED);
    });
}

// Making fences

#[test]
fn a_fence_follows_its_stream() {
    let gpu = gpu();
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let held = gpu.hold(&stream);
    let fence = stream.fence().unwrap();
    for _ in 0..20 {
        assert_eq!(ask(&fence), PENDING);
    }
    held.release();
    becomes(&fence, SIGNALLED);
    assert_eq!(fence.status(), PENDING, "only a poller settles");
}

#[test]
fn the_caller_only_asks_for_a_capture_and_records() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("the log of a caller's calls") else { return };
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    calls(fake);
    let first = stream.fence().unwrap();
    assert_eq!(
        calls(fake),
        [
            "cuCtxGetCurrent",
            "cuCtxPushCurrent_v2",
            "cuStreamIsCapturing",
            "cuEventCreate",
            "cuEventRecord",
            "cuCtxPopCurrent_v2"
        ]
    );
    drop((first.clone(), first));
    assert_eq!(calls(fake), [] as [&str; 0], "dropping calls nothing");
    set_current(context.as_raw());
    calls(fake);
    let again = stream.fence().unwrap();
    assert_eq!(calls(fake), ["cuCtxGetCurrent", "cuStreamIsCapturing", "cuEventRecord"], "the event is used again");
    let other = stream.fence().unwrap();
    assert!(calls(fake).contains(&"cuEventCreate"), "an event in use is not");
    drop((again, other));
    set_current(ptr::null_mut());
}

#[test]
fn the_current_context_stays_what_it_was() {
    let gpu = gpu();
    let other = create_context();
    let context = another_device();
    assert_eq!(current(), other);
    let stream = Stream::new(&context).unwrap();
    let fence = stream.fence().unwrap();
    assert_eq!(current(), other);
    if let Some(fake) = gpu.controls("the current context after a record that fails") {
        fake.fail_call("cuEventRecord", 1, 719);
        stream.fence().unwrap_err();
    }
    drop((fence, stream, context));
    assert_eq!(current(), other);
    // SAFETY: a context of this test.
    unsafe { sys::cuCtxDestroy_v2(other.cast()) }.result().unwrap();
    assert!(current().is_null());
}

#[test]
fn records_on_one_stream_are_one_group_in_order() {
    let _gpu = gpu();
    let context = Context::primary(0).unwrap();
    let (one, two) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    // SAFETY: `one` lives on.
    let same = unsafe { Stream::adopt(one.as_raw()) }.unwrap();
    let (a, b) = (one.fence().unwrap(), one.fence().unwrap());
    let (key, first) = group(&a).unwrap();
    assert_eq!(group(&b).unwrap(), (key, first + 1));
    assert_ne!(group(&two.fence().unwrap()).unwrap().0, key);
    // An adopted stream has a context of its own kind and so its own numbers; it agrees with itself.
    // SAFETY: as above.
    let again = unsafe { Stream::adopt(one.as_raw()) }.unwrap();
    let (c, d) = (same.fence().unwrap(), again.fence().unwrap());
    let (key, first) = group(&c).unwrap();
    assert_eq!(group(&d).unwrap(), (key, first + 1));
}

#[test]
fn numbers_and_records_agree_between_threads() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("the log of records of several threads") else { return };
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    fake.take_log();
    let fences = thread::scope(|scope| {
        let many = |_| scope.spawn(|| (0..200).map(|_| stream.fence().unwrap()).collect::<Vec<_>>());
        let threads: Vec<_> = (0..4).map(many).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let recorded: Vec<u64> =
        fake.take_log().iter().filter(|call| call.name == "cuEventRecord").map(|call| call.args[0]).collect();
    let mut numbered: Vec<(u64, u64)> =
        fences.iter().map(|fence| (group(fence).unwrap().1, event_of(fence, fake))).collect();
    numbered.sort_unstable();
    assert_eq!(numbered.into_iter().map(|(_, event)| event).collect::<Vec<_>>(), recorded);
}

/// The event of a fence, from what it asks the driver about.
fn event_of(fence: &Fence, fake: &Driver) -> u64 {
    elsewhere(|| {
        ask_here(fence);
        let mine = thread_id();
        let log = fake.take_log();
        let query = log.iter().find(|call| call.name == "cuEventQuery" && call.thread == mine);
        query.expect("it asked").args[0]
    })
}

#[test]
fn a_capturing_stream_makes_no_fence_and_its_capture_stays_whole() {
    let _gpu = gpu();
    let context = Context::primary(0).unwrap();
    set_current(context.as_raw());
    let stream = Stream::new(&context).unwrap();
    for mode in [
        CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ] {
        begin_capture(stream.as_raw(), mode);
        let error = stream.fence().unwrap_err();
        assert_eq!(error, CudaError::Capturing { stream: stream.as_raw().addr() as u64, status: 1 });
        assert!(end_capture(stream.as_raw()));
    }
    stream.fence().unwrap();
    // The legacy stream, while a blocking stream captures.
    let mut blocking = ptr::null_mut();
    // SAFETY: an out pointer.
    unsafe { sys::cuStreamCreate(&mut blocking, 0) }.result().unwrap();
    let blocking: RawHandle = blocking.cast();
    // SAFETY: the legacy stream of the current context, which `context` holds.
    let legacy = unsafe { Stream::adopt(ptr::null_mut()) }.unwrap();
    begin_capture(blocking, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
    let error = legacy.fence().unwrap_err();
    assert!(matches!(error, CudaError::Call { function: "cuStreamIsCapturing", code: CudaCode(906), .. }), "{error}");
    assert!(end_capture(blocking));
    legacy.fence().unwrap();
    drop(legacy);
    set_current(ptr::null_mut());
}

#[test]
fn a_record_that_fails_is_named_and_leaks_nothing() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("records that fail") else { return };
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    drop(stream.fence().unwrap());
    let before = fake.live();
    for code in [1, 400, 700, 917] {
        fake.fail_call("cuEventRecord", 1, code);
        let argument = stream.as_raw().addr() as u64;
        let error = CudaError::Call { function: "cuEventRecord", argument, code: CudaCode(code) };
        assert_eq!(stream.fence().unwrap_err(), error);
    }
    assert_eq!(fake.live(), before);
    becomes(&stream.fence().unwrap(), SIGNALLED);
    assert_eq!(fake.live(), before);
}

// Contexts and streams of others

#[test]
fn contexts_are_shared_counted_and_released() {
    let gpu = gpu();
    let counts = gpu.controls("which contexts, streams and events there are");
    let live = || counts.map(Driver::live);
    let before = live();
    let one = Context::primary(0).unwrap();
    let two = Context::primary(0).unwrap();
    assert!(Arc::ptr_eq(&one.0, &two.0), "one pool for one context");
    assert_eq!(live().map(|live| live.retained), before.map(|live| live.retained + 1));
    assert_eq!(Context::current().unwrap_err(), CudaError::NoCurrentContext);
    set_current(one.as_raw());
    let here = Context::current().unwrap();
    assert!(Arc::ptr_eq(&one.0, &here.0));
    let other = create_context();
    let error = CudaError::NotPrimary { context: other.addr() as u64 };
    assert_eq!(Context::current().unwrap_err(), error);
    // SAFETY: destroyed below, after `adopted`.
    let adopted = unsafe { Context::adopt(other) }.unwrap();
    let stream = Stream::new(&adopted).unwrap();
    becomes(&stream.fence().unwrap(), SIGNALLED);
    let made = |more: u64| before.map(|live| (live.streams + more, live.events + more));
    assert_eq!(live().map(|live| (live.streams, live.events)), made(1));
    drop((stream, adopted));
    assert_eq!(live().map(|live| (live.streams, live.events)), made(0), "while the context lives");
    // SAFETY: a context of this test.
    unsafe { sys::cuCtxDestroy_v2(other.cast()) }.result().unwrap();
    set_current(ptr::null_mut());
    drop((one, two, here));
    assert_eq!(live(), before);
}

/// Whether somebody has made the first device's primary context.
fn primary_is_active() -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: out pointers.
    unsafe { sys::cuDevicePrimaryCtxGetState(0, &mut flags, &mut active) }.result().unwrap();
    active != 0
}

#[test]
fn a_context_nobody_asked_for_is_not_made() {
    let gpu = without_context();
    let other = create_context();
    let (active, counts) = (primary_is_active(), gpu.controls("the log beside contexts of others"));
    let before = counts.map(Driver::live);
    if let Some(fake) = counts {
        calls(fake);
    }
    Context::current().unwrap_err();
    if let Some(fake) = counts {
        assert!(!calls(fake).contains(&"cuDevicePrimaryCtxRetain"), "that would have made the primary context");
    }
    // SAFETY: of the current context, which lives until the end.
    let stream = unsafe { Stream::adopt(1 as RawHandle) }.unwrap();
    assert_eq!(stream.context().as_raw(), other);
    becomes(&stream.fence().unwrap(), SIGNALLED);
    let contexts = |live: fake_cuda::Live| (live.contexts, live.retained);
    assert_eq!(counts.map(Driver::live).map(contexts), before.map(contexts));
    assert_eq!(primary_is_active(), active);
    drop(stream);
    // SAFETY: a context of this test.
    unsafe { sys::cuCtxDestroy_v2(other.cast()) }.result().unwrap();
}

#[test]
fn default_streams_are_those_of_the_adopting_thread() {
    let gpu = gpu();
    for handle in [0, 1, 2] {
        // SAFETY: refused: there is no current context.
        let error = unsafe { Stream::adopt(handle as RawHandle) }.unwrap_err();
        assert!(matches!(error, CudaError::Call { function: "cuStreamGetCtx", code: CudaCode(201), .. }), "{error}");
    }
    let context = Context::primary(0).unwrap();
    set_current(context.as_raw());
    // SAFETY: of the context above.
    let (legacy, mine) = unsafe { (Stream::adopt(1 as RawHandle), Stream::adopt(2 as RawHandle)) };
    let (legacy, mine) = (legacy.unwrap(), mine.unwrap());
    set_current(ptr::null_mut());
    let held = gpu.hold(&Stream::new(&context).unwrap());
    becomes(&legacy.fence().unwrap(), SIGNALLED);
    becomes(&mine.fence().unwrap(), SIGNALLED);
    elsewhere(|| {
        becomes(&legacy.fence().unwrap(), SIGNALLED);
        assert_eq!(mine.fence().unwrap_err(), CudaError::OtherThreadsStream);
    });
    held.release();
}

#[test]
fn the_last_user_on_a_poller_does_not_wait_for_the_context() {
    let gpu = gpu();
    let counts = gpu.controls("the end of a context whose last user was a poller");
    let before = counts.map(Driver::live);
    let context = another_device();
    let stream = Stream::new(&context).unwrap();
    let held = gpu.hold(&stream);
    let fence = stream.fence().unwrap();
    drop((stream, context));
    // Releasing the context waits for the held stream. This thread must come back although nobody lets it go on.
    elsewhere(|| {
        assert_eq!(ask_here(&fence), PENDING);
        drop(fence);
    });
    held.release();
    eventually("the context is released", || counts.map(Driver::live) == before);
}

// Asking

#[test]
fn a_poller_changes_its_mode_once_and_never_synchronises() {
    let gpu = gpu();
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let held = gpu.hold(&stream);
    let fences = [stream.fence().unwrap(), stream.fence().unwrap()];
    gpu.take_log();
    let log = elsewhere(|| {
        for fence in fences.iter().cycle().take(6) {
            assert_eq!(ask_here(fence), PENDING);
        }
        assert!(current().is_null(), "nothing stays current");
        gpu.take_log()
    });
    held.release();
    if gpu.controls("the log of a poller's calls").is_none() {
        return;
    }
    let exchanges: Vec<_> = log.iter().filter(|call| call.name == "cuThreadExchangeStreamCaptureMode").collect();
    assert_eq!(exchanges.len(), 1);
    assert_eq!(exchanges[0].args, [2]);
    assert_eq!(log.iter().filter(|call| call.name == "cuEventQuery").count(), 6);
    assert!(log.iter().all(|call| !call.name.contains("Synchronize")), "{log:?}");
}

#[test]
fn asking_never_disturbs_another_threads_capture() {
    let gpu = gpu();
    let fake = gpu.controls("captures beside drivers that refuse more, or less");
    for (refused, same_device) in [(false, false), (false, true), (true, false), (true, true)] {
        if let Some(fake) = fake {
            fake.set(Knob::ContextlessCallsRefused(refused));
            fake.set(Knob::CaptureSameDeviceOnly(same_device));
        }
        let context = Context::primary(0).unwrap();
        let (stream, captured) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
        let held = gpu.hold(&stream);
        let fence = stream.fence().unwrap();
        set_current(context.as_raw());
        begin_capture(captured.as_raw(), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        assert_eq!(ask(&fence), PENDING);
        held.release();
        becomes(&fence, SIGNALLED);
        let other = stream.fence().unwrap(); // on a stream that is not captured
        assert!(capture_is_whole(captured.as_raw()));
        assert!(end_capture(captured.as_raw()));
        becomes(&other, SIGNALLED);
        set_current(ptr::null_mut());
    }
}

#[test]
fn every_code_but_not_ready_is_final() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("answers of all kinds") else { return };
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    for code in [1, 3, 4, 201, 400, 700, 719, 900, 907, 917, 4711] {
        let fence = stream.fence().unwrap();
        fake.fail_call("cuEventQuery", 1, code);
        assert_eq!(ask(&fence), failed(code as i32));
    }
    for function in ["cuThreadExchangeStreamCaptureMode", "cuCtxGetCurrent", "cuCtxPushCurrent_v2"] {
        let fence = stream.fence().unwrap();
        fake.fail_call(function, 1, 709);
        assert_eq!(ask(&fence), failed(709), "{function}");
        becomes(&fence, SIGNALLED);
    }
}

#[test]
fn a_sick_event_fails_its_own_fence_only() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("one event that fails") else { return };
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let sick = stream.fence().unwrap();
    let event = event_of(&sick, fake);
    let well = stream.fence().unwrap();
    fake.fail_event(event as RawHandle, 700);
    assert_eq!(ask(&sick), failed(700));
    becomes(&well, SIGNALLED);
    // The sick event is recorded again and well.
    drop(sick);
    becomes(&stream.fence().unwrap(), SIGNALLED);
}

#[test]
fn a_fault_fails_all_and_shutting_down_too() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("faults, and a driver that goes down") else { return };
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    for sticky in [true, false] {
        fake.set(Knob::DoneEventAfterFaultSticky(sticky));
        let held = fake.hold(stream.as_raw());
        let (one, two) = (stream.fence().unwrap(), stream.fence().unwrap());
        fake.fault(719);
        assert_eq!((ask(&one), ask(&two)), (failed(719), failed(719)));
        assert!(matches!(stream.fence().unwrap_err(), CudaError::Call { code: CudaCode(719), .. }));
        fake.fault(0);
        held.release();
    }
    let fence = stream.fence().unwrap();
    fake.shutdown(true);
    assert_eq!(ask(&fence), failed(4));
    assert!(matches!(stream.fence().unwrap_err(), CudaError::Call { code: CudaCode(4), .. }));
    fake.shutdown(false);
}

// Adopted events

#[test]
fn an_adopted_event_stands_alone_and_keeps_its_owner() {
    let gpu = gpu();
    struct Owner(Arc<AtomicUsize>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let dropped = Arc::new(AtomicUsize::new(0));
    let context = Context::primary(0).unwrap();
    set_current(context.as_raw());
    let stream = Stream::new(&context).unwrap();
    let held = gpu.hold(&stream);
    let event = create_event();
    record(event, stream.as_raw());
    // SAFETY: recorded above, destroyed below, after the fence.
    let fence = unsafe { Fence::from_cuda_event(event, &context, Owner(Arc::clone(&dropped))) };
    assert_eq!(group(&fence), None);
    assert_eq!(ask(&fence), PENDING);
    held.release();
    becomes(&fence, SIGNALLED);
    drop(fence.clone());
    assert_eq!(dropped.load(Ordering::Relaxed), 0);
    drop(fence);
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    // SAFETY: the event is this test's: adopting does not take it.
    unsafe { sys::cuEventDestroy_v2(event.cast()) }.result().unwrap();
    set_current(ptr::null_mut());
}

#[test]
fn an_adopted_event_that_was_captured_fails() {
    let gpu = gpu();
    let context = Context::primary(0).unwrap();
    set_current(context.as_raw());
    let stream = Stream::new(&context).unwrap();
    let event = create_event();
    // SAFETY: what its contract forbids, for the answer; the event outlives the fence.
    let fence = unsafe { Fence::from_cuda_event(event, &context, ()) };
    begin_capture(stream.as_raw(), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
    record(event, stream.as_raw());
    assert_eq!(ask(&fence), failed(907));
    assert!(!end_capture(stream.as_raw()), "asking invalidates the capture");
    match gpu.controls("what a captured event may answer after its capture") {
        Some(fake) => {
            for code in [907, 1] {
                fake.set(Knob::CapturedEventAfterEnd(code));
                assert_eq!(ask(&fence), failed(code as i32));
            }
        }
        None => println!("FACT a fence of a captured event after its capture: {:?}", ask(&fence)),
    }
    set_current(ptr::null_mut());
}

#[test]
fn rounds_leak_nothing() {
    let gpu = gpu();
    let counts = gpu.controls("how many events there are");
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    drop(stream.fence().unwrap());
    let before = counts.map(Driver::live);
    for _ in 0..2000 {
        // Dropped before it has completed, as often as not.
        drop(stream.fence().unwrap());
    }
    assert_eq!(counts.map(Driver::live), before);
    let kept: Vec<_> = (0..50).map(|_| stream.fence().unwrap()).collect();
    assert_eq!(counts.map(|fake| fake.live().events), before.map(|live| live.events + 49));
    drop(kept);
    drop((stream, context));
}
