//! What sources leave open about CUDA drivers, and what devices may answer: fences and timelines hold with every setting of the
//! fake driver. Its switches are what this is about, so it does not run on a real one.
#![cfg(feature = "cuda")]

#[path = "common/mod.rs"]
mod common;
#[path = "common/gpu.rs"]
mod gpu;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::Setup;
use cudarc::driver::sys;
use fake_cuda::{Driver, Knob};
use gpu::*;
use moonring::code::errno;
use moonring::cuda::{Context, Release, Stream};
use moonring::fence::{Failure, FenceStatus, host};
use moonring::{Fence, opcode};

const PAGE: usize = 4096;
const ORDERING: i32 = 118;
const FLUSH_OPTIONS: i32 = 117;

/// One thing that differs from the usual driver.
#[derive(Clone, Copy, Debug)]
enum Setting {
    Knob(Knob),
    /// Whether a stream capture refuses this function.
    Unsafe(&'static str, bool),
}

impl Setting {
    fn apply(self, fake: &Driver) {
        match self {
            Setting::Knob(knob) => fake.set(knob),
            Setting::Unsafe(function, on) => fake.set_unsafe(function, on),
        }
    }
}

/// Every setting that is not the usual one.
const SETTINGS: &[Setting] = &[
    Setting::Knob(Knob::ContextlessCallsRefused(true)),
    Setting::Knob(Knob::CaptureSameDeviceOnly(true)),
    Setting::Knob(Knob::CapturedEventAfterEnd(1)),
    Setting::Knob(Knob::DoneEventAfterFaultSticky(false)),
    Setting::Knob(Knob::CopyDelay(Duration::from_millis(2))),
    Setting::Knob(Knob::FlushFlagRefusal(801)),
    Setting::Knob(Knob::ForeignMemopAccepted(true)),
    Setting::Knob(Knob::MultiPath(true)),
    Setting::Knob(Knob::LazyLoading(true)),
    Setting::Knob(Knob::IpcOpenInSameProcess(true)),
    Setting::Knob(Knob::FreesWait(false)),
    Setting::Knob(Knob::LaunchQueue(16)),
    Setting::Knob(Knob::Attribute(98, 1)),
    Setting::Knob(Knob::Attribute(FLUSH_OPTIONS, 0)),
    Setting::Knob(Knob::Attribute(FLUSH_OPTIONS, 3)),
    Setting::Knob(Knob::Attribute(ORDERING, 0)),
    Setting::Knob(Knob::Attribute(ORDERING, 200)),
    Setting::Knob(Knob::Attribute(122, 0)),
    Setting::Knob(Knob::Attribute(123, 0)),
    Setting::Knob(Knob::Attribute(125, 0)),
    Setting::Unsafe("cuEventQuery", false),
    Setting::Unsafe("cuFlushGPUDirectRDMAWrites", true),
    Setting::Unsafe("cuEventCreate", true),
    Setting::Unsafe("cuEventDestroy_v2", true),
];

/// A load behind a copy: the copy's page is the old one, and the load's is there in the end.
fn loads_behind_copies(gpu: &Gpu, fence: impl FnOnce(&Stream) -> Fence) {
    let mut s = Setup::loopback(16);
    s.ours.write_at(0, &[1; 2 * PAGE]).unwrap();
    s.theirs.write_at(0, &[2; PAGE]).unwrap();
    let stream = a_stream();
    let pinned = Pinned::new(&s.ours, stream.context());
    let held = gpu.hold(&stream);
    pinned.copy(&stream, 0, PAGE, PAGE);
    let load = s.read(0, PAGE).wait(&fence(&stream));
    s.push(load);
    s.ring.submit().unwrap();
    thread::sleep(Duration::from_millis(2));
    assert_eq!(s.ring.completion().count(), 0, "the load did not wait");
    held.release();
    let cqes = common::reap_exactly(&mut s.ring, 1);
    assert_eq!(cqes[0].result(), Ok(PAGE as u32));
    let mut pages = [0; 2 * PAGE];
    s.ours.read_at(0, &mut pages).unwrap();
    assert!(pages[..PAGE].iter().all(|&byte| byte == 2) && pages[PAGE..].iter().all(|&byte| byte == 1));
    drop(pinned);
}

/// The poller asks for an event while another stream is captured.
fn a_capture_stays_whole(gpu: &Gpu) {
    let mut s = Setup::loopback(16);
    let (held_stream, captured) = (a_stream(), a_stream());
    let held = gpu.hold(&held_stream);
    let fence = held_stream.fence().unwrap();
    s.push(opcode::Wait::new().build().wait(&fence));
    s.ring.submit().unwrap();
    begin_capture(&captured);
    assert!(captured.fence().is_err());
    thread::sleep(Duration::from_millis(3));
    drop(end_capture(&captured)); // and it is whole
    held.release();
    assert!(common::reap_exactly(&mut s.ring, 1)[0].result().is_ok());
}

/// A copy that is queued before another device's write into the memory that it reads, and held until an entry has ended that
/// ends after the write. True if streams may wait for entries here: then the copy has seen the write.
fn a_held_copy_sees_the_load(fake: &Driver) -> bool {
    let mut s = Setup::loopback(16);
    let context = Context::primary(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let loads = context.progress(8).unwrap();
    if loads.release().is_err() {
        return false;
    }
    set_current(context.as_raw());
    let (mut device, mut pinned) = (0, ptr::null_mut::<c_void>());
    // SAFETY: out pointers; both are freed when the stream has come to its end.
    unsafe {
        sys::cuMemAlloc_v2(&mut device, PAGE).result().unwrap();
        sys::cuMemHostAlloc(&mut pinned, PAGE, 0).result().unwrap();
        sys::cuMemsetD8Async(device, 1, PAGE, stream.as_raw().cast()).result().unwrap();
    }
    runs(&stream);
    let (written, behind_write) = host();
    let load = opcode::Nop::new().build().wait(&behind_write);
    let value = s.ring.submission().push_signalling(load, loads.entries()).unwrap();
    s.ring.submit().unwrap();
    let held = loads.hold(&stream, value, LIMIT).unwrap();
    // SAFETY: buffers of that length, as above.
    unsafe { sys::cuMemcpyDtoHAsync_v2(pinned, device, PAGE, stream.as_raw().cast()) }.result().unwrap();
    fake.remote_write(device, &[2; PAGE]);
    written.signal();
    runs(&stream);
    assert_eq!(held.status(), FenceStatus::Signalled);
    common::reap_exactly(&mut s.ring, 1);
    // SAFETY: the copy has been made; nothing else uses either.
    unsafe {
        let seen = std::slice::from_raw_parts(pinned.cast::<u8>(), PAGE);
        assert!(seen.iter().all(|&byte| byte == 2), "the held copy read what was there before the write");
        sys::cuMemFree_v2(device).result().unwrap();
        sys::cuMemFreeHost(pinned).result().unwrap();
    }
    true
}

fn everything_holds(gpu: &Gpu, fake: &Driver, settings: &[Setting]) {
    settings.iter().for_each(|setting| setting.apply(fake));
    loads_behind_copies(gpu, |stream| stream.fence().unwrap());
    loads_behind_copies(gpu, |stream| {
        let timeline = stream.timeline().unwrap();
        timeline.at(timeline.signal().unwrap()).unwrap()
    });
    a_capture_stays_whole(gpu);
    // What a device is known by decides whether streams may wait: an unordered one without a flush, one with several ways, and
    // one without memory operations must not.
    let last = |attribute, usual| {
        let set = settings.iter().rev().find_map(|setting| match setting {
            Setting::Knob(Knob::Attribute(which, value)) if *which == attribute => Some(*value),
            _ => None,
        });
        set.unwrap_or(usual)
    };
    let several = settings.iter().any(|setting| matches!(setting, Setting::Knob(Knob::MultiPath(true))));
    let ordered = last(ORDERING, 100) >= 100 || last(FLUSH_OPTIONS, 1) & 1 != 0;
    assert_eq!(a_held_copy_sees_the_load(fake), ordered && !several && last(122, 1) != 0);
}

#[test]
fn each_setting_alone() {
    for setting in SETTINGS {
        let gpu = gpu();
        let Some(fake) = gpu.controls("settings") else { return };
        println!("{setting:?}");
        everything_holds(&gpu, fake, &[*setting]);
    }
}

#[test]
fn settings_together() {
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..40 {
        let gpu = gpu();
        let Some(fake) = gpu.controls("settings") else { return };
        let settings: Vec<Setting> = SETTINGS.iter().copied().filter(|_| random.u8(..4) == 0).collect();
        println!("{settings:?}");
        everything_holds(&gpu, fake, &settings);
    }
}

/// A fault fails what waits, whatever an event that was done before it answers.
#[test]
fn a_fault_with_either_answer_of_done_events() {
    for sticky in [true, false] {
        let gpu = gpu();
        let Some(fake) = gpu.controls("faults") else { return };
        fake.set(Knob::DoneEventAfterFaultSticky(sticky));
        let mut s = Setup::loopback(16);
        let stream = a_stream();
        let held = gpu.hold(&stream);
        let fence = stream.fence().unwrap();
        s.push(opcode::Wait::new().build().wait(&fence));
        s.ring.submit().unwrap();
        fake.fault(700);
        let cqe = common::reap_exactly(&mut s.ring, 1)[0];
        assert!(cqe.result().is_err() && cqe.detail() == 700, "{cqe:?}");
        fake.fault(0);
        held.release();
    }
}

/// Row 18: a first launch holds the context's lock until a held stream goes on, which waits for an entry, whose event the
/// poller cannot ask for without that lock. The limit ends it.
#[test]
fn a_first_launch_holds_a_stream_for_no_longer_than_its_limit() {
    let gpu = gpu();
    let Some(fake) = gpu.controls("the lock of a context") else { return };
    let mut s = Setup::loopback(16);
    let context = Context::primary(0).unwrap();
    let (waiting, other, launching) = (a_stream(), a_stream(), a_stream());
    let loads = context.progress(8).unwrap();
    assert_eq!(loads.release(), Ok(Release::Direct));
    fake.set(Knob::LazyLoading(true));
    let held_other = gpu.hold(&other);
    let entry = opcode::Nop::new().build().wait(&other.fence().unwrap());
    let value = s.ring.submission().push_signalling(entry, loads.entries()).unwrap();
    s.ring.submit().unwrap();
    let held = loads.hold(&waiting, value, Duration::from_millis(200)).unwrap();
    let launched = AtomicBool::new(false);
    thread::scope(|scope| {
        let (launching, launched) = (&launching, &launched);
        scope.spawn(move || {
            launch_spin(launching);
            launched.store(true, Ordering::SeqCst);
        });
        while !fake.take_log().iter().any(|call| call.name == "cuLaunchKernel") {
            thread::yield_now();
        }
        held_other.release();
        let end = Instant::now() + LIMIT;
        while held.status() == FenceStatus::Pending {
            assert!(Instant::now() < end, "the limit did not end the wait");
            thread::sleep(Duration::from_millis(1));
        }
    });
    assert!(launched.load(Ordering::SeqCst), "the launch went on with the stream");
    // Whether the poller got its answer before the launch took the lock is a matter of luck.
    let late = FenceStatus::Failed(Failure { errno: errno::ECANCELED, detail: -errno::ETIME });
    assert!([late, FenceStatus::Signalled].contains(&held.status()), "{:?}", held.status());
    common::reap_exactly(&mut s.ring, 1);
    runs(&waiting);
}

/// Launches a kernel that has not been launched before.
fn launch_spin(stream: &Stream) {
    let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
    let image = [fake_cuda::KERNELS.as_bytes(), b"\0"].concat();
    let mut nanos = 0u64;
    let mut values = [(&raw mut nanos).cast::<c_void>()];
    set_current(stream.context().as_raw());
    // SAFETY: out pointers; PTX that ends with a zero; the kernel's one parameter has 8 bytes.
    unsafe {
        sys::cuModuleLoadData(&mut module, image.as_ptr().cast()).result().unwrap();
        sys::cuModuleGetFunction(&mut function, module, c"spin".as_ptr()).result().unwrap();
        let stream = stream.as_raw().cast();
        let code = sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, values.as_mut_ptr(), ptr::null_mut());
        code.result().unwrap();
    }
}
