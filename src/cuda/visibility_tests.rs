//! What GPU work sees of loads by another device, with every kind of device that the fake driver can be.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use fake_cuda::{Driver as Fake, Exclusive, Knob};

use super::{Context, CudaError, Progress, Release, Stream};
use crate::fence::{self, Failure, FenceStatus};
use crate::transport::{Busy, Caps, Driver, Event, Hint, Nanos, Op, PollerWaker, RawMemory, Transport, TransportError};
use crate::{Engine, Registered, Ring, Segment, opcode};

const SIZE: usize = 256;
const LONG: Duration = Duration::from_secs(100);
const OLD: u8 = 1;

/// A network card that writes GPU memory: the bytes are what `value` says.
#[derive(Debug)]
struct Card {
    fake: &'static Fake,
    value: Arc<AtomicU8>,
}

// SAFETY: an operation has written its range, of the fake's memory, when `submit` returns.
unsafe impl Transport for Card {
    fn name(&self) -> String {
        "card".into()
    }

    fn caps(&self) -> Caps {
        Caps { threads_here: false, max_batch: 16, max_in_flight_per_peer: 16, max_merged: 0 }
    }

    fn driver(&self, _wake: PollerWaker) -> Box<dyn Driver> {
        Box::new(CardDriver { fake: self.fake, value: Arc::clone(&self.value) })
    }

    unsafe fn register(&self, _memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        Ok(())
    }

    fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn open(&self, _name: &str, _fresh: bool) -> Result<u32, TransportError> {
        Ok(0)
    }

    fn close(&self) -> Result<(), Busy> {
        Ok(())
    }
}

#[derive(Debug)]
struct CardDriver {
    fake: &'static Fake,
    value: Arc<AtomicU8>,
}

impl Driver for CardDriver {
    fn submit(&mut self, _target: u32, ops: &[Op], _now: Nanos, out: &mut Vec<Event>) -> usize {
        for op in ops {
            self.fake.remote_write(op.local, &vec![self.value.load(Ordering::Relaxed); op.len as usize]);
            let stage = crate::Stage::Transfer;
            out.push(Event::Result { op: op.token, res: op.len as i32, stage, detail: 0, quiet: true });
        }
        ops.len()
    }

    fn poll(&mut self, _now: Nanos, _budget: u32, _out: &mut Vec<Event>) -> Hint {
        Hint::Sleep { until: None }
    }

    fn settle(&mut self, _now: Nanos, _out: &mut Vec<Event>) {}

    fn in_flight(&self) -> usize {
        0
    }
}

/// A page of GPU memory, loaded by the card, and pinned memory that a stream copies it to.
struct Setup {
    ring: Ring,
    page: Registered,
    peer: Segment,
    value: Arc<AtomicU8>,
    context: Context,
    stream: Stream,
    device: u64,
    seen: *mut c_void,
    fake: &'static Fake,
    _alone: Exclusive,
}

impl Setup {
    /// On a device with these attributes 118 and 117, with several paths to it or not.
    fn new(ordering: i32, options: i32, several: bool) -> Setup {
        let fake = fake_cuda::load().unwrap();
        let alone = fake.exclusive();
        fake.set(Knob::Attribute(118, ordering));
        fake.set(Knob::Attribute(117, options));
        fake.set(Knob::MultiPath(several));
        let context = Context::primary(0).unwrap();
        let stream = Stream::new(&context).unwrap();
        let (mut device, mut seen) = (0, ptr::null_mut());
        // SAFETY: a live context, out pointers, memory of this size.
        unsafe {
            sys::cuCtxSetCurrent(context.as_raw().cast()).result().unwrap();
            sys::cuMemAlloc_v2(&mut device, SIZE).result().unwrap();
            sys::cuMemsetD8_v2(device, OLD, SIZE).result().unwrap();
            sys::cuMemHostAlloc(&mut seen, SIZE, 2).result().unwrap();
        }
        let value = Arc::new(AtomicU8::new(OLD));
        let engine = Engine::over(Arc::new(Card { fake, value: Arc::clone(&value) }));
        // SAFETY: the memory outlives the ring.
        let page = unsafe { engine.register_foreign(device, SIZE as u64, "cuda:0") }.unwrap();
        let peer = engine.open_segment("peer", LONG).unwrap();
        let ring = Ring::builder().build(16, &engine).unwrap();
        Setup { ring, page, peer, value, context, stream, device, seen, fake, _alone: alone }
    }

    fn load(&mut self, value: u8, loads: &Progress, go: &crate::Fence) -> u64 {
        self.value.store(value, Ordering::Relaxed);
        let read = opcode::Read::new(self.page.slice(..).unwrap(), self.peer.at(4096)).build().wait(go);
        let value = self.ring.submission().push_signalling(read, loads.entries()).unwrap();
        self.ring.submit().unwrap();
        value
    }

    /// Queues work that looks at the page.
    fn look(&self) {
        // SAFETY: memory of this size that outlives the copy.
        unsafe { sys::cuMemcpyDtoHAsync_v2(self.seen, self.device, SIZE, self.stream.as_raw().cast()) }
            .result()
            .unwrap();
    }

    /// What that has seen, once it has run.
    fn seen(&self) -> u8 {
        assert!(self.runs(Duration::from_secs(20)), "the stream stands still");
        // SAFETY: the copy has been made; the bytes are any.
        let bytes = unsafe { std::slice::from_raw_parts(self.seen.cast::<u8>(), SIZE) };
        assert!(bytes.iter().all(|&byte| byte == bytes[0]));
        bytes[0]
    }

    fn runs(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            // SAFETY: a live stream.
            match unsafe { sys::cuStreamQuery(self.stream.as_raw().cast()) } {
                sys::CUresult::CUDA_SUCCESS => return true,
                _ if Instant::now() > end => return false,
                _ => thread::sleep(Duration::from_micros(200)),
            }
        }
    }

    fn reap(&mut self) {
        self.ring.wait_timeout(1, LONG).unwrap();
        let cqe = self.ring.completion().next().unwrap();
        assert_eq!(cqe.result(), Ok(SIZE as u32));
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        if !thread::panicking() {
            // SAFETY: not used again.
            unsafe {
                sys::cuMemFreeHost(self.seen).result().unwrap();
                sys::cuMemFree_v2(self.device).result().unwrap();
                sys::cuCtxSetCurrent(ptr::null_mut()).result().unwrap();
            }
        }
    }
}

/// Attributes 118 and 117, several paths or not; and whether a stream that is simply let go would see old bytes.
const DEVICES: [(i32, i32, bool, bool); 8] = [
    (0, 0, false, true),
    (0, 1, false, true),
    (0, 2, false, true),
    (0, 3, false, true),
    (100, 0, false, false),
    (100, 1, false, false),
    (200, 1, false, false),
    (200, 1, true, true),
];

#[test]
fn a3_what_is_launched_after_the_completion_sees_the_load_on_every_device() {
    for (ordering, options, several, _) in DEVICES {
        let mut s = Setup::new(ordering, options, several);
        let loads = s.context.progress(4).unwrap();
        for value in 10..15 {
            s.load(value, &loads, &crate::Fence::reached());
            s.reap();
            s.look();
            assert_eq!(s.seen(), value, "118 = {ordering}, 117 = {options}, several paths: {several}");
        }
    }
}

#[test]
fn a_held_stream_sees_the_load_or_is_not_held() {
    for (ordering, options, several, stale) in DEVICES {
        let device = format!("118 = {ordering}, 117 = {options}, several paths: {several}");
        let mut s = Setup::new(ordering, options, several);
        let loads = s.context.progress(4).unwrap();
        // What would be seen without a word about it: the test can tell.
        let held = s.fake.hold(s.stream.as_raw());
        s.look();
        s.fake.remote_write(s.device, &[2; SIZE]);
        held.release();
        assert_eq!(s.seen(), if stale { OLD } else { 2 }, "{device}");
        for value in 10..15 {
            let (signaller, go) = fence::host();
            let at = s.load(value, &loads, &go);
            let loaded = match loads.hold(&s.stream, at, LONG) {
                Ok(loaded) => loaded,
                Err(CudaError::NoWriteOrder { .. } | CudaError::SeveralPaths { .. }) if stale => {
                    assert!(loads.release().is_err());
                    signaller.signal();
                    s.reap();
                    continue;
                }
                Err(error) => panic!("{device}: {error}"),
            };
            s.look();
            assert!(!s.runs(Duration::from_millis(5)), "{device}: not held");
            signaller.signal();
            assert_eq!(s.seen(), value, "{device}");
            assert_eq!(loaded.status(), FenceStatus::Signalled);
            s.reap();
        }
        let refused = several || (ordering == 0 && options & 1 == 0);
        assert_eq!(loads.release().is_err(), refused, "{device}");
    }
}

/// Launches a kernel for the first time, which holds the context until its streams are idle.
fn first_launch(context: &Context, other: &Stream) {
    let image = [include_bytes!("../../fixtures/fake-cuda/kernels.ptx").as_slice(), b"\0"].concat();
    let (mut module, mut function, mut nanos) = (ptr::null_mut(), ptr::null_mut(), 0_u64);
    let mut parameters = [(&raw mut nanos).cast::<c_void>()];
    // SAFETY: a live context and stream, PTX that ends with a zero, and the kernel's one parameter.
    unsafe {
        sys::cuCtxSetCurrent(context.as_raw().cast()).result().unwrap();
        sys::cuModuleLoadData(&mut module, image.as_ptr().cast()).result().unwrap();
        sys::cuModuleGetFunction(&mut function, module, c"spin".as_ptr()).result().unwrap();
        let (stream, none) = (other.as_raw().cast(), ptr::null_mut());
        sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters.as_mut_ptr(), none).result().unwrap();
        sys::cuModuleUnload(module).result().unwrap();
        sys::cuCtxSetCurrent(ptr::null_mut()).result().unwrap();
    }
}

/// Somebody holds the context's lock until the held stream is idle, so that every driver call about it waits.
#[test]
fn a_stream_is_released_although_the_context_is_locked() {
    for (ordering, release) in [(100, Release::Direct), (0, Release::Flushed)] {
        let mut s = Setup::new(ordering, 1, false);
        s.fake.set(Knob::LazyLoading(true));
        let loads = s.context.progress(4).unwrap();
        assert_eq!(loads.release(), Ok(release));
        let other = Stream::new(&s.context).unwrap();
        let (signaller, go) = fence::host();
        let at = s.load(7, &loads, &go);
        // A flush needs the context: there the limit is what ends the wait.
        let limit = if release == Release::Direct { LONG } else { Duration::from_millis(200) };
        let loaded = loads.hold(&s.stream, at, limit).unwrap();
        thread::scope(|scope| {
            let launch = scope.spawn(|| first_launch(&s.context, &other));
            thread::sleep(Duration::from_millis(50));
            assert!(!launch.is_finished(), "the lock is held");
            signaller.signal();
            launch.join().unwrap();
        });
        let expected = match release {
            Release::Direct => FenceStatus::Signalled,
            Release::Flushed => FenceStatus::Failed(Failure::dependency(crate::code::errno::ETIME)),
        };
        assert_eq!(loaded.status(), expected);
        s.reap();
    }
}
