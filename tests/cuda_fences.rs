//! CUDA fences on entries of a ring. B1 to B6 are the ways in which programs that wait for CUDA
//! events by hand have gone wrong.
#![cfg(feature = "cuda")]

#[path = "common/gpu.rs"]
mod gpu;

use std::collections::{HashMap, HashSet};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, ptr, thread};

use cudarc::driver::sys::{self, CUstreamCaptureMode};
use fake_cuda::{Call, Driver, thread_id};
use gpu::{Gpu, LIMIT, Pinned, a_stream, set_current};
use moonring::code::errno;
use moonring::cuda::{Context, CudaError, RawHandle, Stream};
use moonring::{Cqe, Engine, Fence, Region, Registered, Ring, Segment, Stage, fence, opcode};

const PAGE: usize = 4096;
const OLD: u8 = 1;
const NEW: u8 = 2;

/// A ring over loopback, its own pages (old) and a peer's (new), and the driver for this test alone.
struct Setup {
    ring: Ring,
    ours: Registered,
    theirs: Registered,
    peer: Segment,
    gpu: Gpu,
}

fn setup() -> Setup {
    let gpu = gpu::gpu();
    let (engine, other) = (Engine::loopback(), Engine::loopback());
    let ours = engine.register(Region::alloc(256 * PAGE).unwrap()).unwrap();
    let theirs = other.register(Region::alloc(256 * PAGE).unwrap()).unwrap();
    ours.write_at(0, &[OLD; 256 * PAGE]).unwrap();
    theirs.write_at(0, &[NEW; 256 * PAGE]).unwrap();
    let peer = engine.open_segment(other.name(), LIMIT).unwrap();
    let ring = Ring::builder().build(256, &engine).unwrap();
    gpu.take_log();
    Setup { ring, ours, theirs, peer, gpu }
}

impl Setup {
    /// Loads a page from the peer once the fences have signalled.
    fn load(&mut self, page: usize, fences: &[&Fence]) {
        let local = self.ours.slice(page * PAGE..(page + 1) * PAGE).unwrap();
        let remote = self.peer.slice(&self.theirs.info(), (page * PAGE) as u64, PAGE as u64).unwrap();
        let entry = opcode::Read::new(local, remote).build().user_data(page as u64);
        let entry = fences.iter().fold(entry, |entry, fence| entry.wait(fence));
        self.ring.submission().push(entry).unwrap();
        self.ring.submit().unwrap();
    }

    /// What a page consists of; all bytes must be the same.
    fn page(&self, page: usize) -> u8 {
        let mut bytes = [0; PAGE];
        self.ours.read_at(page * PAGE, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == bytes[0]), "page {page} is mixed");
        bytes[0]
    }

    /// Reaps `count` completions, by user data.
    fn reap(&mut self, count: usize) -> HashMap<u64, Cqe> {
        self.ring.wait_timeout(count, LIMIT).unwrap();
        let cqes: HashMap<u64, Cqe> = self.ring.completion().map(|cqe| (cqe.user_data(), cqe)).collect();
        assert_eq!(cqes.len(), count, "{cqes:?}");
        cqes
    }

    fn loaded(&mut self, pages: &[usize]) {
        let cqes = self.reap(pages.len());
        for page in pages {
            let cqe = &cqes[&(*page as u64)];
            assert_eq!((cqe.result(), cqe.stage()), (Ok(PAGE as u32), Stage::Done), "page {page}");
            assert_eq!(self.page(*page), NEW);
        }
    }

    /// Nothing completes and nothing is written, although the poller had its turns.
    fn nothing_happens(&mut self, pages: &[usize]) {
        self.asked(5);
        assert_eq!(self.ring.completion().count(), 0);
        for page in pages {
            assert_eq!(self.page(*page), OLD, "page {page} was loaded early");
        }
    }

    /// Lets the poller ask the driver this often; on a real one, for a time.
    fn asked(&self, times: usize) {
        let Some(fake) = self.gpu.fake else { return thread::sleep(Duration::from_millis(5)) };
        let end = Instant::now() + LIMIT;
        let mut seen = 0;
        while seen < times {
            assert!(Instant::now() < end, "the poller asked {seen} times");
            seen += fake.take_log().iter().filter(|call| call.name == "cuEventQuery").count();
            thread::yield_now();
        }
    }
}

fn gate_failure(cqe: &Cqe) -> (i32, Stage, i32) {
    (cqe.res(), cqe.stage(), cqe.detail())
}

fn create_event(context: &Context) -> RawHandle {
    set_current(context.as_raw());
    let mut event = ptr::null_mut();
    // SAFETY: an out pointer.
    unsafe { sys::cuEventCreate(&mut event, 2) }.result().unwrap();
    event.cast()
}

fn record(event: RawHandle, stream: &Stream) {
    // SAFETY: live handles.
    unsafe { sys::cuEventRecord(event.cast(), stream.as_raw().cast()) }.result().unwrap();
}

fn begin_capture(stream: &Stream) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream.
    unsafe { sys::cuStreamBeginCapture_v2(stream.as_raw().cast(), mode) }.result().unwrap();
}

/// Ends a capture; true if it was whole.
fn end_capture(stream: &Stream) -> bool {
    let mut graph = ptr::null_mut();
    // SAFETY: a live stream, an out pointer; the graph is not used again.
    unsafe {
        let whole = sys::cuStreamEndCapture(stream.as_raw().cast(), &mut graph).result().is_ok();
        whole && sys::cuGraphDestroy(graph).result().is_ok()
    }
}

// What the fence is for

#[test]
fn a_load_behind_a_copy_never_wins_with_the_fence_and_does_without() {
    let mut s = setup();
    let stream = a_stream();
    let pinned = Pinned::new(&s.ours, stream.context());
    for (page, fenced) in (0..100).map(|page| (page, page % 2 == 0)) {
        let held = s.gpu.hold(&stream);
        // As a cache manager copies a page before it lets it be overwritten.
        pinned.copy(&stream, page * PAGE, (100 + page) * PAGE, PAGE);
        let fence = stream.fence().unwrap();
        let fences = [&fence];
        s.load(page, if fenced { &fences } else { &[] });
        if fenced {
            s.nothing_happens(&[page]);
            held.release();
            s.loaded(&[page]);
        } else {
            s.loaded(&[page]); // did not wait for the copy, which comes now
            held.release();
            let (synced, after) = (stream.fence().unwrap(), opcode::Wait::new().build());
            s.ring.submission().push(after.wait(&synced)).unwrap();
            s.ring.submit().unwrap();
            s.reap(1);
        }
        assert_eq!(s.page(100 + page), if fenced { OLD } else { NEW }, "the copy of page {page}");
    }
}

#[test]
fn one_fence_for_many_entries_and_many_fences_for_one() {
    let mut s = setup();
    let (one, two) = (a_stream(), a_stream());
    let (held_one, held_two) = (s.gpu.hold(&one), s.gpu.hold(&two));
    let (first, second) = (one.fence().unwrap(), two.fence().unwrap());
    let pages: Vec<usize> = (0..50).collect();
    for &page in &pages {
        s.load(page, &[&first]);
    }
    s.load(50, &[&first, &second]);
    s.load(51, &[]);
    s.loaded(&[51]);
    s.nothing_happens(&pages);
    held_one.release();
    s.loaded(&pages);
    s.nothing_happens(&[50]);
    held_two.release();
    s.loaded(&[50]);
}

// The named mistakes

#[test]
fn b1_an_event_recorded_again_while_an_entry_waits() {
    let mut s = setup();
    let stream = a_stream();
    // A fence of a stream has its event for itself: later fences do not postpone it.
    let (held, fence) = (s.gpu.hold(&stream), stream.fence().unwrap());
    let held_later = s.gpu.hold(&stream);
    let later = stream.fence().unwrap();
    s.load(0, &[&fence]);
    s.load(1, &[&later]);
    s.nothing_happens(&[0, 1]);
    held.release();
    s.loaded(&[0]);
    s.nothing_happens(&[1]);
    held_later.release();
    s.loaded(&[1]);
    // An adopted event that its owner records again, against the rule: late, never early.
    let event = create_event(stream.context());
    let held = s.gpu.hold(&stream);
    record(event, &stream);
    // SAFETY: the event outlives the fence. Recording it again is what its contract asks not to do, for this test.
    let fence = unsafe { Fence::from_cuda_event(event, stream.context(), ()) };
    s.load(2, &[&fence]);
    let held_later = s.gpu.hold(&stream);
    record(event, &stream);
    held.release();
    s.nothing_happens(&[2]);
    held_later.release();
    s.loaded(&[2]);
}

#[test]
fn b2_an_event_that_was_never_recorded_is_no_fence() {
    let mut s = setup();
    let stream = a_stream();
    // There is no fence before the record, and none if it fails.
    for code in [400, 719] {
        let Some(fake) = s.gpu.controls("b2: a record that fails") else { break };
        fake.fail_call("cuEventRecord", 1, code);
        let error = stream.fence().unwrap_err();
        assert!(matches!(error, CudaError::Call { function: "cuEventRecord", .. }), "{error}");
    }
    // The event used again is pending from its new record on, not done from its old one.
    let first = stream.fence().unwrap();
    s.load(0, &[&first]);
    s.loaded(&[0]);
    drop(first);
    let events = s.gpu.fake.map(|fake| fake.live().events);
    let held = s.gpu.hold(&stream);
    let second = stream.fence().unwrap();
    assert_eq!(s.gpu.fake.map(|fake| fake.live().events), events, "the same event");
    s.load(1, &[&second]);
    s.nothing_happens(&[1]);
    held.release();
    s.loaded(&[1]);
}

#[test]
fn b3_dropping_everything_while_an_entry_waits() {
    let mut s = setup();
    let before = s.gpu.controls("b3: what is left over").map(Driver::live);
    let context = Context::primary(0).unwrap();
    let mut events = None;
    for round in 0..300 {
        let stream = Stream::new(&context).unwrap();
        let held = s.gpu.hold(&stream);
        let fence = stream.fence().unwrap();
        let page = round % 200;
        s.load(page, &[&fence]);
        drop((fence, stream));
        assert_eq!(s.ring.completion().count(), 0);
        held.release();
        s.loaded(&[page]);
        // The poller lets go of the fence just after the completion.
        let now = s.gpu.fake.map_or(0, |fake| fake.live().events);
        assert!(now <= *events.get_or_insert(now) + 2, "{now} events after {round} rounds");
    }
    // The context too, and the poller is its last user.
    let stream = Stream::new(&context).unwrap();
    let held = s.gpu.hold(&stream);
    s.load(200, &[&stream.fence().unwrap()]);
    drop((stream, context));
    s.nothing_happens(&[200]);
    held.release();
    s.loaded(&[200]);
    let end = Instant::now() + LIMIT;
    while s.gpu.fake.map(Driver::live) != before {
        assert!(Instant::now() < end, "{before:?} became {:?}", s.gpu.fake.map(Driver::live));
        thread::yield_now();
    }
}

#[test]
fn b4_polling_beside_graph_captures() {
    let mut s = setup();
    let stream = a_stream();
    let captured = a_stream();
    let held = s.gpu.hold(&stream);
    let fences: Vec<_> = (0..100).map(|_| stream.fence().unwrap()).collect();
    for (page, fence) in fences.iter().enumerate() {
        s.load(page, &[fence]);
    }
    set_current(captured.context().as_raw());
    for round in 0..50 {
        begin_capture(&captured);
        if round % 10 == 0 {
            s.asked(3);
        }
        let error = captured.fence().unwrap_err();
        assert!(matches!(error, CudaError::Capturing { status: 1, .. }), "{error}");
        if let Some(fake) = s.gpu.fake.filter(|_| round == 25) {
            fake.delay(stream.as_raw(), Duration::from_millis(1));
        }
        assert!(end_capture(&captured), "capture {round} was spoiled");
    }
    begin_capture(&captured);
    held.release();
    s.loaded(&(0..100).collect::<Vec<_>>());
    assert!(end_capture(&captured), "the last capture was spoiled");
    // An event of a capture, adopted against the rule.
    let event = create_event(captured.context());
    begin_capture(&captured);
    record(event, &captured);
    assert!(end_capture(&captured));
    // SAFETY: the event outlives the fence. Its contract forbids a captured event, for this test.
    let fence = unsafe { Fence::from_cuda_event(event, captured.context(), ()) };
    s.load(100, &[&fence]);
    let (res, stage, code) = gate_failure(&s.reap(1)[&100]);
    // Not known for certain of a real driver, once the capture has ended.
    println!("FACT an entry behind an event of a capture that has ended: {res} at {stage:?}, CUDA code {code}");
    if s.gpu.fake.is_some() {
        assert_eq!((res, stage, [1, 907].contains(&code)), (-errno::EIO, Stage::Gate, true));
        assert_eq!(s.page(100), OLD);
    }
}

#[test]
fn b5_an_error_is_an_end_and_not_a_not_yet() {
    let mut s = setup();
    let Some(fake) = s.gpu.controls("b5: events that fail, and faults") else { return };
    let (sick, well) = (a_stream(), Stream::new(&Context::primary(1).unwrap()).unwrap());
    let (held_sick, held_well) = (s.gpu.hold(&sick), s.gpu.hold(&well));
    fake.take_log();
    let a = sick.fence().unwrap();
    let record = fake.take_log().into_iter().find(|call| call.name == "cuEventRecord").unwrap();
    let b = well.fence().unwrap();
    for page in 0..3 {
        s.load(page, &[&a]);
    }
    s.load(3, &[&a, &b]);
    s.load(4, &[&b]);
    s.load(5, &[]);
    s.loaded(&[5]);
    fake.fail_event(record.args[0] as RawHandle, 700);
    let cqes = s.reap(4);
    for page in 0..4 {
        assert_eq!(gate_failure(&cqes[&(page as u64)]), (-errno::EIO, Stage::Gate, 700));
        assert_eq!(s.page(page), OLD, "page {page} was loaded all the same");
    }
    s.nothing_happens(&[4]);
    held_well.release();
    s.loaded(&[4]);
    held_sick.release();
    // A fault: everything that waits ends, and so does the ring.
    let held = s.gpu.hold(&sick);
    let fence = sick.fence().unwrap();
    s.load(6, &[&fence]);
    s.nothing_happens(&[6]);
    fake.fault(719);
    assert_eq!(gate_failure(&s.reap(1)[&6]), (-errno::EIO, Stage::Gate, 719));
    s.load(7, &[]);
    s.loaded(&[7]);
    drop(s.ring);
    fake.fault(0);
    held.release();
}

/// A context that is not its device's primary one, with a stream that somebody else made; nothing is current afterwards.
fn foreign() -> (RawHandle, RawHandle) {
    let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: out pointers; no parameters.
    unsafe {
        sys::cuCtxCreate_v4(&mut context, ptr::null_mut(), 0, 0).result().unwrap();
        sys::cuStreamCreate(&mut stream, 0).result().unwrap();
    }
    set_current(ptr::null_mut());
    (context.cast(), stream.cast())
}

#[test]
fn b6_contexts_of_two_devices_and_of_others_and_none_but_those() {
    let mut s = setup();
    let (context, stream) = foreign();
    let mut streams = vec![a_stream()];
    // SAFETY: destroyed at the end, after everything that is made of them.
    streams.push(unsafe { Stream::adopt(stream) }.unwrap());
    assert_eq!(streams[1].context().as_raw(), context);
    match Context::primary(1) {
        Ok(second) => streams.push(Stream::new(&second).unwrap()),
        Err(error) => println!("NOT CHECKED: b6: a second device: {error}"),
    }
    let with_ours = s.gpu.controls("b6: which contexts there are").map(Driver::live);
    // Before the holds: allocating may wait for held streams.
    let timelines: Vec<_> = streams.iter().map(|stream| stream.timeline().unwrap()).collect();
    let held: Vec<_> = streams.iter().map(|stream| s.gpu.hold(stream)).collect();
    let fences: Vec<_> = streams.iter().map(|stream| stream.fence().unwrap()).collect();
    let pages: Vec<usize> = (0..streams.len()).collect();
    for page in &pages {
        let value = timelines[*page].signal().unwrap();
        s.load(*page, &[&fences[*page], &timelines[*page].at(value).unwrap()]);
    }
    s.asked(20);
    s.nothing_happens(&pages);
    for held in held.into_iter().rev() {
        held.release();
    }
    s.loaded(&pages);
    if let (Some(now), Some(with_ours)) = (s.gpu.fake.map(Driver::live), with_ours) {
        assert_eq!((now.contexts, now.retained), (with_ours.contexts, with_ours.retained));
    }
    drop((fences, timelines, streams, s.ring));
    // SAFETY: a context of this test, and nothing of it is used any more.
    unsafe { sys::cuCtxDestroy_v2(context.cast()) }.result().unwrap();
}

#[test]
fn b6_default_streams_join_what_they_join() {
    let mut s = setup();
    let context = Context::primary(0).unwrap();
    set_current(context.as_raw());
    let mut blocking = ptr::null_mut();
    // SAFETY: an out pointer.
    unsafe { sys::cuStreamCreate(&mut blocking, 0) }.result().unwrap();
    // SAFETY: of the context above, which outlives them.
    let [legacy, mine, blocking] =
        [ptr::null_mut(), 2 as RawHandle, blocking.cast()].map(|raw| unsafe { Stream::adopt(raw) }.unwrap());
    let free = a_stream();
    set_current(ptr::null_mut());
    // Before the hold: allocating may wait for held streams.
    let timeline = legacy.timeline().unwrap();
    let held = s.gpu.hold(&blocking);
    let fences = [&legacy, &free].map(|stream| stream.fence().unwrap());
    let value = timeline.signal().unwrap();
    // Behind the legacy stream, which waits.
    let behind = mine.fence().unwrap();
    s.load(0, &[&fences[0]]);
    s.load(1, &[&fences[1]]);
    s.load(2, &[&timeline.at(value).unwrap()]);
    s.load(3, &[&behind]);
    s.loaded(&[1]);
    s.nothing_happens(&[0, 2, 3]);
    held.release();
    s.loaded(&[0, 2, 3]);
    let raw = blocking.as_raw();
    drop(blocking);
    set_current(context.as_raw());
    // SAFETY: a stream of this test.
    unsafe { sys::cuStreamDestroy_v2(raw.cast()) }.result().unwrap();
    set_current(ptr::null_mut());
}

#[test]
fn b6_without_cuda_no_driver_is_loaded() {
    const CHILD: &str = "MOONRING_CUDA_TEST_CHILD";
    if env::var_os(CHILD).is_none() {
        let mut child = Command::new(env::current_exe().unwrap());
        child.args(["--exact", "b6_without_cuda_no_driver_is_loaded"]).env(CHILD, "1");
        let output = child.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let mut ring = Ring::builder().build(8, &Engine::loopback()).unwrap();
    let (signaller, fence) = fence::host();
    ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
    signaller.signal();
    ring.submit_and_wait(1).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("cuda.so"), "{maps}");
    if gpu::is_real() {
        return;
    }
    fake_cuda::load().unwrap();
    assert!(std::fs::read_to_string("/proc/self/maps").unwrap().contains("cuda.so"), "so it would have been seen");
}

#[test]
fn open_questions_answered_the_other_way() {
    gpu::again_with_other_answers("open_questions_answered_the_other_way");
}

// What the driver's log shows

fn of_thread(log: &[Call], mine: bool) -> Vec<&Call> {
    let me = thread_id();
    log.iter().filter(|call| (call.thread == me) == mine).collect()
}

#[test]
fn the_log_of_calls_keeps_the_promises() {
    let mut s = setup();
    let Some(fake) = s.gpu.controls("the log of calls") else { return };
    let streams = [a_stream(), a_stream()];
    fake.take_log();
    let started = Instant::now();
    let mut expected = HashMap::<u64, Vec<u64>>::new(); // events of each stream, in order
    let mut fences = Vec::new(); // kept, so that each has an event of its own
    for round in 0..20 {
        for stream in &streams {
            fake.delay(stream.as_raw(), Duration::from_millis(1));
            let fence = stream.fence().unwrap();
            s.load(2 * round, &[&fence]);
            s.load(2 * round + 1, &[&fence]);
            fences.push(fence);
        }
    }
    s.ring.wait_timeout(80, LIMIT).unwrap();
    assert_eq!(s.ring.completion().count(), 80);
    let elapsed = started.elapsed();
    let log = fake.take_log();
    assert!(log.iter().all(|call| !call.name.contains("Synchronize")), "nobody synchronises");
    for call in of_thread(&log, true) {
        let allowed = ["cuEventRecord", "cuEventCreate", "cuStreamIsCapturing"];
        let current = ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"];
        assert!(allowed.contains(&call.name) || current.contains(&call.name), "the pushing thread called {call:?}");
        if call.name == "cuEventRecord" {
            expected.entry(call.args[1]).or_default().push(call.args[0]);
        }
    }
    assert_eq!(expected.values().map(Vec::len).collect::<Vec<_>>(), [20, 20]);
    let polled = of_thread(&log, false);
    assert_eq!(polled.iter().map(|call| call.thread).collect::<HashSet<_>>().len(), 1, "one poller");
    let modes = polled.iter().filter(|call| call.name == "cuThreadExchangeStreamCaptureMode");
    assert_eq!(modes.count(), 1, "the poller changes its capture mode once");
    for events in expected.values() {
        // Only the oldest is asked, until it is done.
        let mut asked = polled.iter().filter(|call| call.name == "cuEventQuery" && events.contains(&call.args[0]));
        let mut pending = 0;
        for event in events {
            loop {
                let call = asked.next().expect("every event is asked until it is done");
                assert_eq!(call.args[0], *event, "asked out of order");
                if call.result == Some(0) {
                    break;
                }
                assert_eq!(call.result, Some(600));
                pending += 1;
            }
        }
        assert_eq!(asked.next(), None);
        // Not more often than every 5 us.
        let most = elapsed.as_micros() / 5 + 1;
        assert!(pending <= most, "{pending} vain queries of one stream in {elapsed:?}");
    }
}
