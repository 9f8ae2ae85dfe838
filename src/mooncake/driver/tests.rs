//! The driver on an engine that answers as it is told, in a time that the tests make.

use std::ffi::{CStr, c_int, c_long, c_void};

use mooncake_sys::{Api, Source, TransferEngine};
use std::ptr::NonNull;

use super::super::transport::Mooncake;
use super::*;
use crate::transport::Transport;

/// An engine that answers as it is told, and a driver on it.
pub(super) struct Scripted {
    engine: NonNull<TransferEngine>,
    library: *mut c_void,
    pub(super) transport: Mooncake,
    pub(super) driver: Box<dyn Driver>,
    now: Nanos,
    next: u64,
    events: Vec<Event>,
    /// What operations do, and with which local range.
    pub(super) direction: Direction,
    pub(super) local: u64,
}

impl Drop for Scripted {
    fn drop(&mut self) {
        assert_eq!(self.transport.close(), Ok(()));
    }
}

impl Scripted {
    pub(super) fn new() -> Scripted {
        let path = fake_mooncake::scripted();
        // SAFETY: it has the C interface's names and types.
        let api = unsafe { Api::load_from(&Source::Library(path.clone())) }.unwrap();
        let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: loaded before, so this only counts.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        let engine = api.create_engine(c"", c"", c"", 0, false).unwrap();
        // SAFETY: the engine is new and nobody else's.
        let transport = unsafe { Mooncake::new(api, engine, "scripted:1".into(), None) };
        assert_eq!(transport.open("peer", false), Ok(0));
        let doorbell = Arc::new(crate::doorbell::Doorbell::new());
        let driver = transport.driver(crate::transport::PollerWaker(doorbell));
        let (direction, local) = (Direction::Write, 4096);
        Scripted { engine, library, transport, driver, now: 1, next: 1, events: Vec::new(), direction, local }
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the library is never unloaded.
        let symbol = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?}");
        symbol
    }

    /// What the task of operation `op` answers from now on.
    fn answer(&self, op: u64, rc: i32, status: i32, bytes: u64, stale: i32) {
        type Task = unsafe extern "C" fn(*mut TransferEngine, u64, c_int, c_int, u64, c_int);
        // SAFETY: the function has this type, and the engine lives.
        unsafe {
            std::mem::transmute::<*mut c_void, Task>(self.symbol(c"scripted_task"))(
                self.engine.as_ptr(),
                op,
                rc,
                status,
                bytes,
                stale,
            );
        }
    }

    pub(super) fn completes(&self, op: u64, bytes: u64) {
        self.answer(op, 0, STATUS_COMPLETED, bytes, 0);
    }

    fn set(&self, name: &CStr, value: i32) {
        type Set = unsafe extern "C" fn(*mut TransferEngine, c_int);
        // SAFETY: as above, for the functions that take one number.
        unsafe { std::mem::transmute::<*mut c_void, Set>(self.symbol(name))(self.engine.as_ptr(), value) }
    }

    fn allocations_fail(&self, code: i64) {
        type Set = unsafe extern "C" fn(*mut TransferEngine, i64);
        let set = self.symbol(c"scripted_allocate");
        // SAFETY: as above.
        unsafe { std::mem::transmute::<*mut c_void, Set>(set)(self.engine.as_ptr(), code) }
    }

    fn count(&self, what: i32) -> c_long {
        type Count = unsafe extern "C" fn(*mut TransferEngine, c_int) -> c_long;
        let count = self.symbol(c"scripted_count");
        // SAFETY: as above.
        unsafe { std::mem::transmute::<*mut c_void, Count>(count)(self.engine.as_ptr(), what) }
    }

    /// Batches that are not freed; nothing wrong was done so far.
    pub(super) fn batches(&self) -> c_long {
        assert_eq!(self.count(3), 0, "a batch was used after it was freed, or a task that it does not have");
        self.count(0)
    }

    /// Batches freed, besides the one that opening the segment took.
    fn freed(&self) -> c_long {
        self.count(1) - 1
    }

    /// Submits operations of these lengths; the number of the first. How many were taken.
    pub(super) fn submit(&mut self, lens: &[u32]) -> (u64, usize) {
        let first = self.next;
        let op = |(at, &len): (usize, &u32)| Op {
            token: Token::new(0, first + at as u64),
            direction: self.direction,
            local: self.local,
            len,
            remote: first + at as u64,
        };
        let ops: Vec<Op> = lens.iter().enumerate().map(op).collect();
        self.next += lens.len() as u64;
        let taken = self.driver.submit(0, &ops, self.now, &mut self.events);
        (first, taken)
    }

    /// Lets time pass, and looks once.
    pub(super) fn after(&mut self, time: Nanos) -> Hint {
        self.now += time;
        self.driver.poll(self.now, 1024, &mut self.events)
    }

    /// Everything that was reported since the last time, by operation: a result, or the last word.
    pub(super) fn reported(&mut self) -> Vec<(u64, Said)> {
        let said = |event| match event {
            Event::Result { op, res, stage, detail, quiet } => (op.0, Said::Result(res, stage, detail, quiet)),
            Event::Quiet { op, detail } => (op.0, Said::Quiet(detail)),
        };
        self.events.drain(..).map(said).collect()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    Result(i32, Stage, i32, bool),
    Quiet(i32),
}

/// Long enough for any look to be due.
pub(super) const LATER: Nanos = RARELY + 1;

#[test]
fn a_silent_batch_is_asked_ever_more_rarely() {
    assert_eq!(pause(0), 1);
    assert_eq!(pause(EAGER - 1), 1);
    assert_eq!(pause(16_000_000), 1_000_000);
    assert_eq!(pause(3_600_000_000_000), RARELY);
}

#[test]
fn each_end_of_a_task_has_its_own_result() {
    use Stage::Transfer;
    let quiet = |res, detail| Said::Result(res, Transfer, detail, true);
    let unquiet = |errno: i32, detail| Said::Result(-errno, Transfer, detail, false);
    // (rc, status, bytes, stale), result
    let ends = [
        ((0, 4, 100, 0), quiet(100, 4)),
        ((0, 4, 100, 1), quiet(100, 4)),
        ((0, 4, 99, 0), quiet(-errno::EBADMSG, 4)),
        ((0, 4, 0, 0), quiet(-errno::EBADMSG, 4)),
        ((0, 6, 50, 0), quiet(-errno::EIO, 6)),
        ((0, 2, 0, 0), unquiet(errno::EINVAL, 2)),
        ((0, 3, 0, 0), unquiet(errno::ECANCELED, 3)),
        ((0, 5, 0, 0), unquiet(errno::ETIMEDOUT, 5)),
        ((0, 7, 100, 0), unquiet(errno::EPROTO, 7)),
        ((0, -1, 0, 0), unquiet(errno::EPROTO, -1)),
        ((202, 0, 0, 0), unquiet(errno::EREMOTEIO, 202)),
    ];
    for ((rc, status, bytes, stale), expected) in ends {
        let mut it = Scripted::new();
        let (op, taken) = it.submit(&[100]);
        assert_eq!(taken, 1);
        it.after(LATER);
        assert_eq!(it.reported(), []);
        it.answer(op, rc, status, bytes, stale);
        it.after(LATER);
        let is_quiet = matches!(expected, Said::Result(.., true));
        assert_eq!(it.reported(), [(op, expected)]);
        it.after(1);
        assert_eq!(it.batches(), c_long::from(!is_quiet));
        assert_eq!(it.driver.in_flight() > 0, !is_quiet);
        if !is_quiet {
            // Said once, and asked about until its end.
            it.after(LATER);
            assert_eq!(it.reported(), []);
            it.answer(op, 0, STATUS_FAILED, 0, 0);
            it.after(LATER);
            assert_eq!(it.reported(), [(op, Said::Quiet(6))]);
            it.after(1);
            assert_eq!(it.batches(), 0);
            assert_eq!(it.driver.in_flight(), 0);
        }
        assert_eq!(it.freed(), 1, "a batch is freed once");
        assert_eq!(it.transport.shared.unquiet.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn who_has_the_byte_count_does_not_ask_for_it() {
    // The count, how many answers are without it, and how often the task is asked then.
    for (bytes, stale, asks) in [(100, 0, 1), (100, 1, 2), (99, 0, 2)] {
        let mut it = Scripted::new();
        let (op, _) = it.submit(&[100]);
        it.answer(op, 0, STATUS_COMPLETED, bytes, stale);
        let before = it.count(2);
        it.after(LATER);
        assert_eq!(it.count(2) - before, asks, "{bytes} bytes, {stale} stale answers");
    }
}

#[test]
fn ends_are_seen_in_whatever_order_they_come() {
    let mut it = Scripted::new();
    let (first, _) = it.submit(&[100; MAX_BATCH as usize]);
    for at in (0..u64::from(MAX_BATCH)).rev() {
        it.completes(first + at, 100);
        it.after(LATER);
        assert_eq!(it.reported(), [(first + at, Said::Result(100, Stage::Transfer, 4, true))]);
    }
    assert_eq!(it.batches(), 1, "it is freed after those who wait have heard of its last end");
    it.after(1);
    assert_eq!((it.batches(), it.driver.in_flight()), (0, 0));
}

#[test]
fn most_looks_are_at_the_first_tasks() {
    let mut it = Scripted::new();
    let (first, _) = it.submit(&[100; MAX_BATCH as usize]);
    let mut asked = it.count(2);
    let mut calls = |it: &Scripted| it.count(2) - std::mem::replace(&mut asked, it.count(2));
    it.after(1);
    assert_eq!(calls(&it), c_long::from(RUNNING));
    // Those that have ended are not counted among those that run.
    (0..20).for_each(|at| it.completes(first + at, 100));
    it.completes(first + 31, 100);
    it.after(1);
    assert_eq!(it.reported().len(), 20);
    assert_eq!(calls(&it), 20 + c_long::from(RUNNING));
    it.after(WHOLE - 2);
    assert_eq!(it.reported(), [(first + 31, Said::Result(100, Stage::Transfer, 4, true))]);
    assert_eq!(calls(&it), c_long::from(MAX_BATCH) - 20);
    it.after(1);
    assert_eq!(calls(&it), c_long::from(RUNNING));
    // Who ends an operation early knows of every end.
    it.completes(first + 30, 100);
    it.driver.settle(it.now, &mut it.events);
    assert_eq!(it.reported(), [(first + 30, Said::Result(100, Stage::Transfer, 4, true))]);
}

#[test]
fn a_small_operation_does_not_share_a_batch_with_a_large_one() {
    let mut it = Scripted::new();
    let (first, taken) = it.submit(&[SMALL, SMALL + 1, 1, 1 << 30]);
    assert_eq!((taken, it.batches()), (4, 2));
    it.completes(first, u64::from(SMALL));
    it.completes(first + 2, 1);
    it.after(1);
    assert_eq!(it.reported().len(), 2);
    it.after(1);
    assert_eq!(it.batches(), 1, "the small ones' batch is freed while the large ones run");
}

#[test]
fn a_driver_that_goes_frees_what_has_ended() {
    let mut it = Scripted::new();
    let (first, _) = it.submit(&[100, SMALL + 1]);
    it.completes(first, 100);
    it.after(1);
    assert_eq!(it.reported().len(), 1);
    // As when its last ring closes in the next turn.
    it.driver = it.transport.driver(crate::transport::PollerWaker(Arc::new(crate::doorbell::Doorbell::new())));
    assert_eq!((it.batches(), it.freed()), (1, 1), "the large one's task runs");
}

#[test]
fn a_batch_that_cannot_be_freed_stops_nobody() {
    let mut it = Scripted::new();
    it.set(c"scripted_busy", 3);
    let (stuck, _) = it.submit(&[100]);
    it.completes(stuck, 100);
    it.after(1);
    assert_eq!(it.reported().len(), 1);
    it.after(1);
    assert_eq!(it.batches(), 1);
    assert!(it.driver.in_flight() > 0, "it is tried again");
    it.after(LATER);
    it.after(LATER);
    let (next, _) = it.submit(&[100]);
    it.completes(next, 100);
    it.after(LATER);
    assert_eq!(it.reported(), [(next, Said::Result(100, Stage::Transfer, 4, true))]);
    it.after(LATER);
    assert_eq!((it.batches(), it.freed(), it.driver.in_flight()), (0, 2, 0));
}

#[test]
fn a_refused_submit_of_a_library_that_cannot_be_asked_is_given_up() {
    let mut it = Scripted::new();
    it.set(c"scripted_submit", 201);
    let (first, taken) = it.submit(&[100, 100]);
    assert_eq!(taken, 2);
    let lost = |op| (op, Said::Result(-errno::ENOTRECOVERABLE, Stage::Transfer, 201, false));
    assert_eq!(it.reported(), [lost(first), lost(first + 1)]);
    let asked = it.count(2);
    it.after(LATER);
    assert_eq!((it.count(2), it.batches()), (asked, 1), "its batch is neither asked nor freed");
    assert_eq!(it.transport.shared.unquiet.load(Ordering::Relaxed), 2, "its memory may still be used");
    // Others go on.
    it.set(c"scripted_submit", 0);
    let (next, _) = it.submit(&[100]);
    it.completes(next, 100);
    it.after(LATER);
    assert_eq!(it.reported(), [(next, Said::Result(100, Stage::Transfer, 4, true))]);
    it.after(1);
    assert_eq!(it.batches(), 1);
}

#[test]
fn without_a_batch_nothing_is_started() {
    let mut it = Scripted::new();
    it.allocations_fail(-302);
    let (first, taken) = it.submit(&[100, 1 << 20]);
    assert_eq!(taken, 2);
    let refused = |op| (op, Said::Result(-errno::ENOBUFS, Stage::Issue, -302, true));
    assert_eq!(it.reported(), [refused(first), refused(first + 1)]);
    assert_eq!((it.driver.in_flight(), it.transport.shared.unquiet.load(Ordering::Relaxed)), (0, 0));
    it.allocations_fail(0);
    let (next, _) = it.submit(&[100]);
    it.completes(next, 100);
    it.after(1);
    assert_eq!(it.reported(), [(next, Said::Result(100, Stage::Transfer, 4, true))]);
}

#[test]
fn a_silent_peer_costs_little_and_does_not_slow_another_batch() {
    let mut it = Scripted::new();
    let (silent, _) = it.submit(&[100; 16]);
    // Ten seconds of one look each 20 µs, which is more often than a poller turns.
    let mut hint = Hint::Now;
    for _ in 0..500_000 {
        hint = it.after(20_000);
    }
    // At most 5 eager looks, 16 per octave of age, then one each 5 ms, one in 8 at 16 tasks and the others at 8.
    let asked = it.count(2);
    assert!((1000..(5 + 16 * 17 + 2000) * 9).contains(&asked), "{asked} status calls");
    let Hint::Sleep { until: Some(until) } = hint else { panic!("{hint:?}") };
    assert!(until > it.now && until <= it.now + RARELY);
    // A new batch is looked at in each turn, and its news do not wait for the old one.
    let (next, _) = it.submit(&[100]);
    assert_eq!(it.after(1000), Hint::Yield);
    it.completes(next, 100);
    it.after(1000);
    assert_eq!(it.reported(), [(next, Said::Result(100, Stage::Transfer, 4, true))]);
    // And the silent one's end is seen within eight of its pauses, that of one of its first tasks within one.
    it.completes(silent + 15, 100);
    let looks = (0..SHORT).take_while(|_| it.after(RARELY) != Hint::Yield).count();
    assert!(looks < SHORT as usize, "it has news, so it is asked eagerly again");
    assert_eq!(it.reported(), [(silent + 15, Said::Result(100, Stage::Transfer, 4, true))]);
    it.after(10_000_000_000);
    it.completes(silent + 7, 100);
    assert_eq!(it.after(RARELY), Hint::Yield);
    assert_eq!(it.reported(), [(silent + 7, Said::Result(100, Stage::Transfer, 4, true))]);
}

#[test]
fn pollers_of_one_engine_share_mooncakes_queue() {
    let mut it = Scripted::new();
    let queue = it.transport.shared.queue as usize;
    assert!(it.transport.caps().max_in_flight_per_peer as usize <= queue / 4);
    let mut taken = 0;
    let first = it.next;
    for _ in 0..queue / MAX_BATCH as usize + 2 {
        taken += it.submit(&[100; MAX_BATCH as usize]).1;
    }
    assert_eq!(taken, queue);
    it.completes(first, 100);
    it.after(1);
    assert_eq!(it.reported().len(), 1);
    assert_eq!(it.submit(&[100; 2]).1, 1);
}

#[test]
fn after_the_engines_end_nothing_is_asked() {
    let mut it = Scripted::new();
    it.submit(&[100]);
    assert_eq!(it.transport.close(), Ok(()));
    // The scripted engine is freed: any call would crash, or be seen by a memory checker.
    assert_eq!(it.after(LATER), Hint::Sleep { until: None });
    assert_eq!(it.driver.in_flight(), 0);
    let (op, taken) = it.submit(&[100]);
    assert_eq!(taken, 1);
    assert_eq!(it.reported(), [(op, Said::Result(-errno::ESHUTDOWN, Stage::Issue, 0, true))]);
    assert!(it.transport.open("peer", true).unwrap_err().why.contains("closed"));
    assert_eq!(it.transport.close(), Ok(()));
}

/// On a real engine, which can say what a refused submit has started.
#[test]
#[ignore = "needs cargo xtask setup"]
fn an_unknown_segment_fails_its_own_entries_only() {
    let engine = || {
        let api = Api::load().unwrap_or_else(|error| panic!("{error}"));
        api.set_log_level(mooncake_sys::LogLevel::Fatal).unwrap();
        let engine = api.create_engine(c"P2PHANDSHAKE", c"127.0.0.1", c"", 0, false).unwrap();
        // SAFETY: the engine is new and nobody else's.
        unsafe {
            api.install_transport(engine, c"tcp", std::ptr::null_mut()).unwrap();
            let name = api.local_ip_and_port(engine).unwrap();
            Mooncake::new(api, engine, name, None)
        }
    };
    let (near, far) = (engine(), engine());
    let known = near.open(&far.name(), false).unwrap();
    let unknown = near.shared.number(4711);
    let region = crate::region::RegionInner::own(0, crate::Region::alloc(4096).unwrap(), "cpu:0");
    let memory = region.memory;
    // SAFETY: the region outlives both engines' use of it, and nothing refers to it.
    unsafe {
        near.register(memory, "cpu:0").unwrap();
        far.register(memory, "cpu:0").unwrap();
    }
    let mut driver = near.driver(crate::transport::PollerWaker(Arc::new(crate::doorbell::Doorbell::new())));
    let op = |number| Op {
        token: Token::new(0, number),
        direction: Direction::Write,
        local: memory.address,
        len: 16,
        remote: memory.address,
    };
    let mut events = Vec::new();
    assert_eq!(driver.submit(known, &[op(1)], 1, &mut events), 1);
    assert_eq!(driver.submit(unknown, &[op(2), op(3)], 1, &mut events), 2);
    let start = std::time::Instant::now();
    while events.len() < 3 {
        assert!(start.elapsed().as_secs() < 20);
        std::thread::yield_now();
        driver.poll(start.elapsed().as_nanos() as Nanos + 2, 10, &mut events);
    }
    for event in events {
        let Event::Result { op, res, stage, detail, quiet } = event else { panic!("{event:?}") };
        let expected = match op.0 {
            1 => (16, Stage::Transfer, STATUS_COMPLETED, true),
            _ => (-errno::EINVAL, Stage::Issue, INVALID_ARGUMENT, true),
        };
        assert_eq!((res, stage, detail, quiet), expected, "{op:?}");
    }
    driver.poll(start.elapsed().as_nanos() as Nanos + 3, 10, &mut Vec::new());
    assert_eq!((driver.in_flight(), near.shared.unquiet.load(Ordering::Relaxed)), (0, 0));
    assert_eq!((near.close(), far.close()), (Ok(()), Ok(())));
    drop(region);
}
