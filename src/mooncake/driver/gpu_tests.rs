//! Copies to GPU memory over the legacy stream, as Mooncake's TCP makes them: nobody is told before they have landed.

use std::ffi::c_void;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use fake_cuda::Knob;

use super::tests::{LATER, Said, Scripted};
use super::*;
use crate::cuda::testing::{Gpu, gpu, is_real};
use crate::cuda::{Context, Stream};
use crate::transport::{RawMemory, Transport};

/// So much that a real device's copy takes some time.
const SIZE: usize = 1 << 20;

/// An engine, and GPU memory that holds zeros.
struct Setup {
    scripted: Scripted,
    memory: RawMemory,
    context: Context,
    gpu: Gpu,
}

impl Setup {
    fn new() -> Setup {
        Setup::with(|| {
            let mut address = 0;
            // SAFETY: an out pointer, with a context current.
            unsafe { sys::cuMemAlloc_v2(&mut address, SIZE) }.result().unwrap();
            address
        })
    }

    fn with(allocate: impl FnOnce() -> u64) -> Setup {
        let gpu = gpu();
        let context = Context::primary(0).unwrap();
        // SAFETY: a live context.
        unsafe { sys::cuCtxSetCurrent(context.as_raw().cast()) }.result().unwrap();
        let address = allocate();
        // SAFETY: memory of this size.
        unsafe { sys::cuMemsetD8_v2(address, 0, SIZE) }.result().unwrap();
        let mut scripted = Scripted::new();
        scripted.direction = Direction::Read;
        scripted.local = address;
        Setup { scripted, memory: RawMemory { address, len: SIZE as u64 }, context, gpu }
    }

    /// Where copies take this long, if the driver can be told so.
    fn slow_copies(&self) {
        if let Some(fake) = self.gpu.fake {
            fake.set(Knob::CopyDelay(Duration::from_millis(200)));
        }
    }

    fn register(&self) {
        // SAFETY: the memory and its context outlive the engine.
        unsafe { self.scripted.transport.register(self.memory, "cuda:0") }.unwrap();
    }

    /// What Mooncake does when the bytes have come: copies them from memory that is not pinned, and says COMPLETED.
    fn arrives(&self, op: u64, value: u8) {
        let staged = vec![value; SIZE];
        // SAFETY: memory of this size, with its context current.
        unsafe { sys::cuMemcpyHtoD_v2(self.memory.address, staged.as_ptr().cast(), SIZE) }.result().unwrap();
        self.scripted.completes(op, SIZE as u64);
    }

    /// What work sees that is submitted now, to a stream that waits for no other.
    fn seen(&self) -> u8 {
        let stream = Stream::new(&self.context).unwrap();
        let mut bytes = vec![9; SIZE];
        let into = bytes.as_mut_ptr().cast::<c_void>();
        // SAFETY: memory of this size; the copy is waited for.
        unsafe {
            let stream = stream.as_raw().cast();
            sys::cuMemcpyDtoHAsync_v2(into, self.memory.address, SIZE, stream).result().unwrap();
            sys::cuStreamSynchronize(stream).result().unwrap();
        }
        assert!(bytes.iter().all(|&byte| byte == bytes[0]));
        bytes[0]
    }

    /// Looks until something is reported.
    fn reported(&mut self) -> Vec<(u64, Said)> {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            self.scripted.after(LATER);
            let reported = self.scripted.reported();
            if !reported.is_empty() {
                return reported;
            }
            assert!(Instant::now() < end, "nothing is reported");
        }
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        let _ = self.scripted.transport.close();
        // What the context is released by comes before the driver's reset, not from another thread after it.
        crate::cuda::stop_polling();
        // SAFETY: nobody uses the memory any more. What was mapped is not freed by this, and refused.
        unsafe {
            let _ = sys::cuMemFree_v2(self.memory.address);
            let _ = sys::cuCtxSetCurrent(ptr::null_mut());
        }
    }
}

fn done(op: u64) -> Vec<(u64, Said)> {
    vec![(op, Said::Result(SIZE as i32, Stage::Transfer, STATUS_COMPLETED, true))]
}

#[test]
fn memory_that_can_be_told_makes_copies_land_before_they_return() {
    let mut s = Setup::new();
    s.register();
    s.slow_copies();
    let (op, _) = s.scripted.submit(&[SIZE as u32]);
    s.arrives(op, 7);
    s.scripted.after(LATER);
    assert_eq!(s.scripted.reported(), done(op), "at the first look");
    assert_eq!(s.seen(), 7);
}

/// With memory that cannot be told, not registered yet; `None` and a word about it where all memory can.
fn untellable() -> Option<Setup> {
    let s = Setup::with(mapped);
    let on = 1_u32;
    let sync = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
    // SAFETY: memory of this test, and a value of the attribute's type.
    let told = unsafe { sys::cuPointerSetAttribute((&raw const on).cast(), sync, s.memory.address) };
    println!("FACT row 24: memory that is mapped piece by piece, told to make copies synchronous, answers {told:?}");
    if told == sys::CUresult::CUDA_SUCCESS {
        assert!(is_real());
        println!("NOT CHECKED: memory that cannot be told to make copies synchronous: this device has none");
        return None;
    }
    Some(s)
}

/// GPU memory that is mapped piece by piece, as PyTorch's expandable segments are; for good.
fn mapped() -> u64 {
    let (mut address, mut handle, mut piece) = (0, 0, 0);
    // SAFETY: of a device's memory 0 is a valid value in every field; out pointers; a range that is mapped as a whole.
    unsafe {
        let mut properties: sys::CUmemAllocationProp = std::mem::zeroed();
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        sys::cuMemGetAllocationGranularity(&mut piece, &properties, least).result().unwrap();
        let len = SIZE.next_multiple_of(piece);
        sys::cuMemAddressReserve(&mut address, len, 0, 0, 0).result().unwrap();
        sys::cuMemCreate(&mut handle, len, &properties, 0).result().unwrap();
        sys::cuMemMap(address, len, 0, handle, 0).result().unwrap();
        let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
        access.location = properties.location;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        sys::cuMemSetAccess(address, len, &access, 1).result().unwrap();
    }
    address
}

/// Where the memory cannot be told, and its context was not.
fn untold() -> Option<Setup> {
    let s = untellable()?;
    s.register();
    s.slow_copies();
    Some(s)
}

#[test]
fn other_memory_is_waited_for() {
    let Some(mut s) = untold() else { return };
    for value in 1..5 {
        let (op, _) = s.scripted.submit(&[SIZE as u32]);
        s.arrives(op, value);
        // It ends soon, however long the batch was silent.
        assert_eq!(s.scripted.after(LATER), Hint::Yield);
        assert_eq!(s.scripted.reported(), [], "the copy has only begun");
        assert_eq!(s.reported(), done(op));
        assert_eq!(s.seen(), value);
        s.scripted.after(1);
        assert_eq!(s.scripted.batches(), 0);
    }
    // Writes bring nothing here.
    s.scripted.direction = Direction::Write;
    let (op, _) = s.scripted.submit(&[SIZE as u32]);
    s.scripted.completes(op, SIZE as u64);
    s.scripted.after(LATER);
    assert_eq!(s.scripted.reported(), done(op));
}

#[test]
fn one_event_stands_for_all_that_ended_before_it() {
    let Some(mut s) = untold() else { return };
    let (first, _) = s.scripted.submit(&[SIZE as u32; 3]);
    s.arrives(first, 1);
    s.arrives(first + 2, 2);
    s.gpu.take_log();
    s.scripted.after(LATER);
    if let Some(fake) = s.gpu.controls("how many events are recorded behind copies") {
        let records = fake.take_log().iter().filter(|call| call.name == "cuEventRecord").count();
        assert_eq!(records, 1);
    }
    s.arrives(first + 1, 3);
    let mut all = s.reported();
    while all.len() < 3 {
        all.extend(s.reported());
    }
    all.sort_by_key(|&(op, _)| op);
    assert_eq!(all, [done(first), done(first + 1), done(first + 2)].concat());
    s.scripted.after(1);
    assert_eq!((s.seen(), s.scripted.batches()), (3, 0));
}

#[test]
fn a_context_that_waits_for_copies_needs_no_events() {
    let Some(mut s) = untellable() else { return };
    let mut flags = 0;
    // SAFETY: an out pointer; the context is current.
    unsafe {
        sys::cuCtxGetFlags(&mut flags).result().unwrap();
        sys::cuCtxSetFlags(flags | 0x80).result().unwrap();
    }
    s.register();
    s.slow_copies();
    let (op, _) = s.scripted.submit(&[SIZE as u32]);
    s.arrives(op, 7);
    s.scripted.after(LATER);
    assert_eq!(s.scripted.reported(), done(op));
    assert_eq!(s.seen(), 7);
    // SAFETY: as above.
    unsafe { sys::cuCtxSetFlags(flags).result().unwrap() };
}

#[test]
fn a_capture_is_waited_for_and_stays_whole() {
    let Some(mut s) = untold() else { return };
    let (op, _) = s.scripted.submit(&[SIZE as u32]);
    s.arrives(op, 5);
    let mut blocking = ptr::null_mut();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: an out pointer, a live stream.
    unsafe {
        sys::cuStreamCreate(&mut blocking, 0).result().unwrap();
        sys::cuStreamBeginCapture_v2(blocking, mode).result().unwrap();
    }
    // On a thread of its own, as a poller.
    let driver = &mut s.scripted.driver;
    let looks = || {
        let mut out = Vec::new();
        for look in 1..=20 {
            driver.poll(look * LATER, 1024, &mut out);
        }
        out.len()
    };
    assert_eq!(std::thread::scope(|scope| scope.spawn(looks).join().unwrap()), 0);
    s.scripted.after(20 * LATER);
    let mut graph = ptr::null_mut();
    // SAFETY: a live stream, an out pointer.
    unsafe { sys::cuStreamEndCapture(blocking, &mut graph) }.result().expect("the capture is whole");
    assert_eq!(s.reported(), done(op));
    assert_eq!(s.seen(), 5);
    // SAFETY: of this test.
    unsafe {
        sys::cuGraphDestroy(graph).result().unwrap();
        sys::cuStreamDestroy_v2(blocking).result().unwrap();
    }
}

#[test]
fn a_copy_that_the_gpu_fails_fails_its_operation() {
    let Some(mut s) = untold() else { return };
    let Some(fake) = s.gpu.controls("copies that fail") else { return };
    let (op, _) = s.scripted.submit(&[SIZE as u32]);
    s.arrives(op, 5);
    fake.fail_call("cuEventQuery", 1, 700);
    s.scripted.after(LATER);
    assert_eq!(s.reported(), [(op, Said::Result(-errno::EFAULT, Stage::Transfer, 700, true))]);
    let (op, _) = s.scripted.submit(&[SIZE as u32]);
    s.arrives(op, 5);
    fake.fail_call("cuEventRecord", 1, 719);
    assert_eq!(s.reported(), [(op, Said::Result(-errno::EFAULT, Stage::Transfer, 719, true))]);
}

/// Otherwise it would hold on to the context, and other memory at the address be taken for it.
#[test]
fn memory_that_somebody_else_has_registered_is_forgotten_when_it_is_unregistered() {
    let Some(s) = untellable() else { return };
    let shared = &s.scripted.transport.shared;
    let engine = crate::Engine::over(Arc::new(super::super::transport::Mooncake { shared: Arc::clone(shared) }));
    let RawMemory { address, len } = s.memory;
    for _ in 0..2 {
        // SAFETY: the memory and its context outlive the engine.
        let memory = unsafe { engine.adopt_registration(address, len, "cuda:0") }.unwrap();
        assert!(shared.copies.to(address).is_some());
        // SAFETY: no peer writes it.
        unsafe { memory.unregister_foreign() }.unwrap();
        assert!(shared.copies.to(address).is_none());
    }
}

/// As some read `cuda.h`: memory without a context answers with an error, not with null.
#[test]
fn memory_of_no_context_is_registered() {
    let s = Setup::with(mapped);
    if let Some(fake) = s.gpu.controls("memory that has no context and says so by an error") {
        fake.fail_call("cuPointerGetAttribute", 2, 1);
    }
    s.register();
}

#[test]
fn what_is_no_gpu_memory_is_not_registered_as_such() {
    let s = Setup::new();
    let memory = RawMemory { address: 4096, len: 4096 };
    // SAFETY: refused.
    let error = unsafe { s.scripted.transport.register(memory, "cuda:0") }.unwrap_err();
    assert!(error.why.contains("0x1000 is not CUDA's"), "{error}");
    // SAFETY: the library moves nothing.
    unsafe { s.scripted.transport.register(memory, "cpu:0") }.unwrap();
    // With RDMA nothing is asked.
    s.scripted.transport.shared.copies.never();
    // SAFETY: as above.
    unsafe { s.scripted.transport.register(memory, "cuda:0") }.unwrap();
}
