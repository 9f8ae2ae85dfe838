//! A transport whose operations end when the test says so, one by one and in any order.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use moonring::code::errno;
use moonring::transport::{
    Busy, Caps, Direction, Driver, Event, Hint, Nanos, Op, PollerWaker, RawMemory, Transport, TransportError,
};
use moonring::{Engine, Stage};

use crate::common::LIMIT;

/// Starts what it is given and waits to be told what becomes of it. Its engine is its own peer, by the names `held/0`,
/// `held/1` and so on.
#[derive(Clone, Debug)]
pub struct Held {
    state: Arc<Mutex<State>>,
    caps: Caps,
    longest_region: u64,
}

#[derive(Debug, Default)]
struct State {
    /// In the order in which they came.
    running: Vec<Op>,
    issued: usize,
    calls: usize,
    /// Most operations at a time; what is beyond is left in the submit.
    room: Option<usize>,
    opened: u32,
    told: VecDeque<Event>,
    wakers: Vec<PollerWaker>,
}

impl Held {
    pub fn new() -> Held {
        let caps = Caps { threads_here: true, max_batch: 64, max_in_flight_per_peer: 256, max_merged: 0 };
        Held { state: Arc::default(), caps, longest_region: u64::MAX }
    }

    /// Takes no more than `room` operations at a time.
    pub fn with_room(self, room: usize) -> Held {
        self.state().room = Some(room);
        self
    }

    /// Refuses to register more than `bytes` in one piece.
    pub fn longest_region(mut self, bytes: u64) -> Held {
        self.longest_region = bytes;
        self
    }

    pub fn engine(&self) -> Engine {
        Engine::with_transport(Arc::new(self.clone()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Operations that were started so far.
    pub fn issued(&self) -> usize {
        self.state().issued
    }

    /// Submits that started some.
    pub fn calls(&self) -> usize {
        self.state().calls
    }

    /// Operations that may still touch memory.
    pub fn running(&self) -> usize {
        self.state().running.len()
    }

    /// Waits until so many operations were started, and no more.
    pub fn await_issued(&self, count: usize) {
        let end = Instant::now() + LIMIT;
        while self.issued() < count {
            assert!(Instant::now() < end, "{} of {count} operations started", self.issued());
            std::thread::yield_now();
        }
        assert_eq!(self.issued(), count);
    }

    fn tell(&self, event: Event) {
        let wakers = {
            let mut state = self.state();
            state.told.push_back(event);
            state.wakers.clone()
        };
        wakers.iter().for_each(PollerWaker::wake);
    }

    /// Copies the bytes of the `at`th that runs and ends it.
    pub fn land(&self, at: usize) {
        let op = self.state().running.remove(at);
        copy(&op);
        let (res, stage) = (op.len as i32, Stage::Transfer);
        self.tell(Event::Result { op: op.token, res, stage, detail: 0, quiet: true });
    }

    /// Lands everything that runs.
    pub fn land_all(&self) {
        while self.running() > 0 {
            self.land(0);
        }
    }

    /// Ends the `at`th that runs with an error, moving nothing.
    pub fn fail(&self, at: usize, errno: i32, stage: Stage) {
        let op = self.state().running.remove(at);
        self.tell(Event::Result { op: op.token, res: -errno, stage, detail: -7, quiet: true });
    }

    /// Reports a time-out of the `at`th that runs, which goes on all the same.
    pub fn time_out(&self, at: usize) {
        let op = self.state().running[at];
        let (res, stage) = (-errno::ETIMEDOUT, Stage::Transfer);
        self.tell(Event::Result { op: op.token, res, stage, detail: 0, quiet: false });
    }

    /// Copies the bytes of the `at`th, after its time-out was reported, and leaves its memory alone.
    pub fn land_late(&self, at: usize) {
        let op = self.state().running.remove(at);
        copy(&op);
        self.tell(Event::Quiet { op: op.token, detail: 1 });
    }
}

/// On the test's own thread, so that it is ordered with what the test does to the same memory.
fn copy(op: &Op) {
    let (local, remote) = (op.local as *mut u8, op.remote as *mut u8);
    let (from, to) = match op.direction {
        Direction::Read => (remote, local),
        Direction::Write => (local, remote),
    };
    // SAFETY: the local range is mapped until the operation is told to be quiet. The remote one is in a region that the test
    // keeps, by the address of its own process, and the two regions are not the same.
    unsafe { std::ptr::copy_nonoverlapping(from, to, op.len as usize) };
}

// SAFETY: an operation copies between its own two ranges, before it is told to be quiet.
unsafe impl Transport for Held {
    fn name(&self) -> String {
        "held/0".into()
    }

    fn caps(&self) -> Caps {
        self.caps.clone()
    }

    fn driver(&self, wake: PollerWaker) -> Box<dyn Driver> {
        self.state().wakers.push(wake);
        Box::new(HeldDriver(self.clone()))
    }

    unsafe fn register(&self, memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        if memory.len > self.longest_region {
            let why = format!("one piece is at most {} bytes", self.longest_region);
            return Err(TransportError { what: format!("registering {memory}"), code: -1, why });
        }
        Ok(())
    }

    fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn open(&self, name: &str, _fresh: bool) -> Result<u32, TransportError> {
        if !name.starts_with("held/") {
            return Err(TransportError { what: format!("opening {name:?}"), code: -1, why: "no peer".into() });
        }
        let mut state = self.state();
        state.opened += 1;
        Ok(state.opened - 1)
    }

    fn close(&self) -> Result<(), Busy> {
        if self.running() == 0 { Ok(()) } else { Err(Busy) }
    }
}

#[derive(Debug)]
struct HeldDriver(Held);

impl Driver for HeldDriver {
    fn submit(&mut self, _target: u32, ops: &[Op], _now: Nanos, _out: &mut Vec<Event>) -> usize {
        let mut state = self.0.state();
        let room = state.room.map_or(ops.len(), |room| room - state.running.len());
        let taken = &ops[..ops.len().min(room)];
        state.running.extend(taken);
        state.issued += taken.len();
        state.calls += usize::from(!taken.is_empty());
        taken.len()
    }

    fn poll(&mut self, _now: Nanos, _budget: u32, out: &mut Vec<Event>) -> Hint {
        out.extend(self.0.state().told.drain(..));
        Hint::Sleep { until: None }
    }

    fn settle(&mut self, now: Nanos, out: &mut Vec<Event>) {
        self.poll(now, u32::MAX, out);
    }

    fn in_flight(&self) -> usize {
        let state = self.0.state();
        state.running.len() + state.told.len()
    }

    fn has_input(&self) -> bool {
        !self.0.state().told.is_empty()
    }
}
