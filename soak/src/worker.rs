//! A thread with a ring: pushes what [`plan`](crate::plan) draws, and holds every completion against what is there.

use std::collections::HashMap;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use anyhow::Result;
use fastrand::Rng;
use moonring::fence::Signaller;
use moonring::{Cqe, CqeFlags, Entry, EntryFuture, Fence, Refusal, Region, Registered, Ring, Submitter};

use crate::HANGS;
use crate::crew::{Checked, Roster};
use crate::layout::{self, CELLS, CHUNKS, Cell};
use crate::op::{CellState, Content, Effect, FENCE_ERRNO, Kind, Lease, Op, Table};
use crate::pattern;
use crate::tally::{Anomaly, Tally};

/// Entries of a ring.
pub const CAPACITY: u32 = 256;
/// How long a ring is given to close: everything it has ends in that time.
const CLOSES: Duration = Duration::from_secs(25);
/// Questions to one peer that are not answered, at most: what is written to a stopped one must fit its pipe.
const QUESTIONS: usize = 64;

/// A fence that is to signal, or to fail.
#[derive(Debug)]
pub struct Gate {
    due: Instant,
    signaller: Signaller,
    pub fence: Fence,
    pub fails: bool,
    pub waiters: Vec<u64>,
}

/// What a buffer held when its last entry had ended.
#[derive(Clone, Copy, Debug)]
struct Seal {
    stamp: u64,
    len: usize,
}

/// What a worker is made of, on its own thread.
#[derive(Debug)]
pub struct Place {
    pub number: usize,
    pub seed: u64,
    pub ring: Ring,
    /// The peers that its engine reaches.
    pub peers: Range<usize>,
    pub roster: Arc<Roster>,
    pub answers: Receiver<Checked>,
    pub tally: Arc<Tally>,
    pub end: Instant,
}

#[derive(Debug)]
pub struct Worker {
    pub number: usize,
    pub rng: Rng,
    ring: Ring,
    /// A second way into the ring, for some.
    submitter: Option<Submitter>,
    pub region: Registered,
    pub peers: Range<usize>,
    roster: Arc<Roster>,
    tables: HashMap<usize, Rc<Table>>,
    answers: Receiver<Checked>,
    /// What peers were asked, by generation and cell.
    asked: HashMap<(u32, usize), (Rc<Table>, u64, Instant)>,
    pub ops: HashMap<u64, Op>,
    /// Those that came last, to cancel some of them.
    pub recent: Vec<u64>,
    futures: Vec<(EntryFuture<Arc<Lease>>, u64)>,
    pub gates: Vec<Gate>,
    free: Arc<Mutex<Vec<usize>>>,
    seals: [Option<Seal>; CHUNKS],
    ids: u64,
    stamps: u64,
    pub tally: Arc<Tally>,
    end: Instant,
}

/// Which way an entry is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Queue,
    Future,
}

impl Worker {
    pub fn new(place: Place) -> Result<Worker> {
        let Place { number, seed, ring, peers, roster, answers, tally, end } = place;
        let region = ring.engine().register(Region::alloc(layout::LOCAL_LEN)?)?;
        Ok(Worker {
            number,
            rng: Rng::with_seed(seed),
            ring,
            submitter: None,
            region,
            peers,
            roster,
            tables: HashMap::new(),
            answers,
            asked: HashMap::new(),
            ops: HashMap::new(),
            recent: Vec::new(),
            futures: Vec::new(),
            gates: Vec::new(),
            free: Arc::new(Mutex::new((0..CHUNKS).collect())),
            seals: [None; CHUNKS],
            ids: 0,
            stamps: (number as u64) << 56,
            tally,
            end,
        })
    }

    /// Until the time is up, and everything has ended.
    pub fn run(mut self) {
        self.begin();
        while !self.is_idle() && Instant::now() < self.end {
            self.turn(Instant::now());
        }
        let (mut depth, mut redraw) = (1, Instant::now());
        let mut replace = Instant::now() + self.some_time();
        let mut look = Instant::now();
        loop {
            let now = Instant::now();
            let ends = now >= self.end;
            if ends && (self.is_idle() || now >= self.end + HANGS) {
                break;
            }
            if now >= redraw {
                (depth, redraw) = (1 << self.rng.u32(0..9), now + Duration::from_millis(300));
            }
            if !ends && now >= replace {
                self.replace_ring();
                replace = Instant::now() + self.some_time();
            }
            if !ends && self.ops.len() < depth {
                let most = (depth - self.ops.len()).min(64);
                (0..self.rng.usize(1..=most)).for_each(|_| self.draw());
            }
            self.turn(now);
            if now.duration_since(look) > Duration::from_secs(1) {
                look = now;
                self.look_for_hangs(now);
            }
        }
        self.settle();
    }

    fn some_time(&mut self) -> Duration {
        Duration::from_millis(self.rng.u64(4_000..25_000))
    }

    fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.asked.is_empty()
    }

    /// Submits, signals, reaps.
    fn turn(&mut self, now: Instant) {
        self.submit();
        let mut at = 0;
        while at < self.gates.len() {
            if self.gates[at].due <= now {
                let gate = self.gates.swap_remove(at);
                self.fire(gate);
            } else {
                at += 1;
            }
        }
        // Nothing may be outstanding, or it takes longer.
        let _ = self.ring.wait_timeout(1, Duration::from_millis(2));
        let cqes: Vec<Cqe> = self.ring.completion().collect();
        cqes.into_iter().for_each(|cqe| self.complete(cqe));
        self.poll_futures();
        while let Ok(checked) = self.answers.try_recv() {
            self.checked(&checked);
        }
    }

    fn submit(&mut self) {
        let owner = self.ring.submit();
        let submitter = self.submitter.as_mut().map_or(Ok(0), Submitter::submit);
        if owner.is_err() || submitter.is_err() {
            self.tally.anomaly(Anomaly::Result, format_args!("submit: {owner:?}, {submitter:?}"));
        }
    }

    // What plan.rs builds with.

    pub fn id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// A stamp that nobody has, and `count` behind it.
    pub fn stamps(&mut self, count: usize) -> u64 {
        let first = self.stamps;
        self.stamps += count as u64;
        first
    }

    /// The cells in a peer as it is now.
    pub fn table(&mut self, peer: usize) -> Rc<Table> {
        let present = self.roster.get(peer);
        let table = self.tables.get(&peer).filter(|table| Arc::ptr_eq(&table.peer, &present));
        if let Some(table) = table {
            return Rc::clone(table);
        }
        if let Some(old) = self.tables.remove(&peer) {
            // It answers no more, or just has.
            let old = old.peer.process.generation;
            self.asked.retain(|&(generation, _), _| generation != old);
        }
        let cells = std::array::from_fn(|number| {
            let first = Cell { worker: self.number, number }.first_stamp(present.process.generation);
            CellState { content: Content::Known(first), readers: 0, writer: false, checking: false }
        });
        let table = Rc::new(Table { peer: present, cells: cells.into() });
        self.tables.insert(peer, Rc::clone(&table));
        table
    }

    /// A chunk that nobody uses, in which nothing has changed since the last one had it.
    pub fn lease(&mut self, big: bool) -> Option<Arc<Lease>> {
        let chunk = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            let fitting: Vec<usize> = (0..free.len()).filter(|&at| layout::chunk_is_big(free[at]) == big).collect();
            free.swap_remove(self.rng.choice(fitting)?)
        };
        if let Some(Seal { stamp, len }) = self.seals[chunk].take()
            && let Some(at) = pattern::first_wrong(&self.region, layout::chunk_offset(chunk), len, stamp, 0)
        {
            self.tally.anomaly(Anomaly::Touched, format_args!("a buffer, byte {at} of {len}"));
        }
        Some(Arc::new(Lease { chunk, free: Arc::clone(&self.free) }))
    }

    /// A fence that signals soon, or fails: its place in `gates`.
    pub fn gate(&mut self) -> usize {
        if self.gates.is_empty() || self.gates.len() < 24 && self.rng.bool() {
            let (signaller, fence) = moonring::fence::host();
            let due = Instant::now() + Duration::from_micros(self.rng.u64(0..60_000));
            let fails = self.rng.u32(0..12) == 0;
            if fails {
                self.tally.fault("fence_that_fails");
            }
            self.gates.push(Gate { due, signaller, fence, fails, waiters: Vec::new() });
            return self.gates.len() - 1;
        }
        self.rng.usize(0..self.gates.len())
    }

    /// Pushes entries that belong together, or one alone; false if they were refused.
    pub fn push(&mut self, mut entries: Vec<(Entry, u64, Op)>, way: Way) -> bool {
        let now = Instant::now();
        let by_submitter = self.submitter.is_some() && self.rng.bool();
        let (ids, ops): (Vec<u64>, Vec<Op>);
        let refused = if let [_] = &entries[..] {
            let (entry, id, op) = entries.remove(0);
            let entry = entry.user_data(id);
            let result = match (way, &mut self.submitter) {
                (Way::Queue, Some(submitter)) if by_submitter => submitter.push(entry),
                (Way::Queue, _) => self.ring.submission().push(entry),
                (Way::Future, submitter) => {
                    let future = match submitter {
                        Some(submitter) if by_submitter => submitter.push_future(entry),
                        _ => self.ring.submission().push_future(entry),
                    };
                    let lease = op.lease.as_ref().expect("a transfer has a buffer");
                    future.map(|future| self.futures.push((future.keep(Arc::clone(lease)), id)))
                }
            };
            (ids, ops) = (vec![id], vec![op]);
            result.err().map(|error| error.reason)
        } else {
            let (chain, rest): (Vec<Entry>, Vec<(u64, Op)>) =
                entries.into_iter().map(|(entry, id, op)| (entry.user_data(id), (id, op))).unzip();
            (ids, ops) = rest.into_iter().unzip();
            let result = match &mut self.submitter {
                Some(submitter) if by_submitter => submitter.push_chain(chain),
                _ => self.ring.submission().push_chain(chain),
            };
            result.err().map(|error| error.reason)
        };
        for (id, mut op) in ids.into_iter().zip(ops) {
            if refused.is_some() {
                self.let_go(op, Effect::Nothing);
                continue;
            }
            op.born = now;
            self.recent.push(id);
            self.ops.insert(id, op);
        }
        if self.recent.len() > 64 {
            self.recent.drain(..32);
        }
        match &refused {
            None
            | Some(
                Refusal::Full { .. }
                | Refusal::NoSideBlock { .. }
                | Refusal::NoPartList { .. }
                | Refusal::SegmentShare { .. }
                | Refusal::SegmentOverdue { .. }
                | Refusal::StaleSegment(_),
            ) => {}
            Some(other) => self.tally.anomaly(Anomaly::Result, format_args!("a push was refused: {other:?}")),
        }
        refused.is_none()
    }

    pub fn controller(&self) -> moonring::Controller {
        self.ring.controller()
    }

    /// Drops one of the futures.
    pub fn drop_a_future(&mut self) {
        if self.futures.is_empty() {
            return;
        }
        let at = self.rng.usize(0..self.futures.len());
        let (future, id) = self.futures.swap_remove(at);
        let detached = self.rng.bool();
        if let Some(op) = self.ops.remove(&id) {
            // Nobody will say what it does, or when: its buffer comes back by itself.
            self.let_go(op, Effect::Unknown);
        }
        if detached {
            future.detach();
        }
        self.tally.operation();
    }

    // What happens to entries.

    /// The moment before a fence signals: what waits for it must not have started.
    fn fire(&mut self, gate: Gate) {
        for id in &gate.waiters {
            let Some(op) = self.ops.get_mut(id).filter(|_| !gate.fails) else { continue };
            op.fences -= 1;
            if op.kind == Kind::Read {
                check_untouched(&self.region, op, Anomaly::Early, &self.tally);
            } else if op.fences == 0 {
                for (at, part) in op.parts.iter().enumerate() {
                    pattern::fill(&self.region, part.local, part.len, op.stamp + at as u64, part.at);
                }
            }
        }
        if gate.fails { gate.signaller.fail(FENCE_ERRNO) } else { gate.signaller.signal() }
    }

    fn complete(&mut self, cqe: Cqe) {
        let id = cqe.user_data();
        let is_future = self.futures.iter().any(|&(_, of)| of == id);
        let Some(op) = self.ops.get_mut(&id).filter(|_| !is_future) else {
            self.tally.anomaly(Anomaly::Doubled, format_args!("nobody waits for {cqe:?}"));
            return;
        };
        let (notif, more) = (cqe.flags().contains(CqeFlags::NOTIF), cqe.flags().contains(CqeFlags::MORE));
        if notif != op.result.is_some() || notif && more {
            self.tally.anomaly(Anomaly::Doubled, format_args!("{cqe:?} after {:?}", op.result));
        }
        if more {
            judge(op, &cqe, &self.tally);
            op.result = Some(cqe);
            return;
        }
        let op = self.ops.remove(&id).expect("it was there");
        match op.result {
            Some(first) => self.ended(op, first, Some(cqe)),
            None => self.ended(op, cqe, None),
        }
    }

    fn poll_futures(&mut self) {
        let mut at = 0;
        while at < self.futures.len() {
            let Poll::Ready(ended) = Pin::new(&mut self.futures[at].0).poll(&mut Context::from_waker(Waker::noop()))
            else {
                at += 1;
                continue;
            };
            let (_, id) = self.futures.swap_remove(at);
            drop(ended.buffer);
            if let Some(op) = self.ops.remove(&id) {
                self.ended(op, ended.completion, ended.notif);
            }
        }
    }

    /// An entry has ended: are its result and its bytes what they should be?
    fn ended(&mut self, op: Op, first: Cqe, notif: Option<Cqe>) {
        self.tally.operation();
        if notif.is_none() || op.result.is_none() {
            judge(&op, &first, &self.tally);
        }
        if let Some(notif) = notif.filter(|notif| notif.flags().contains(CqeFlags::UNQUIET)) {
            self.tally.anomaly(Anomaly::Hang, format_args!("{notif:?}"));
        }
        let effect = op.effect(&first, notif.as_ref());
        if op.kind == Kind::Read {
            match effect {
                Effect::Moved => self.check_read(&op, &first),
                Effect::Nothing => check_untouched(&self.region, &op, Anomaly::Early, &self.tally),
                Effect::Unknown => {}
            }
        }
        self.let_go(op, effect);
    }

    fn check_read(&self, op: &Op, first: &Cqe) {
        let Some(table) = &op.table else { return };
        for part in &op.parts {
            // Nobody writes a cell that is read, but for the member in front in its chain, which has ended.
            let Content::Known(stamp) = table.cells.borrow()[part.cell].content else { continue };
            self.tally.verified();
            if let Some(at) = pattern::first_wrong(&self.region, part.local, part.len, stamp, part.at) {
                let untouched = pattern::first_wrong(&self.region, part.local, part.len, op.stamp, part.at).is_none();
                self.tally.anomaly(
                    Anomaly::Bytes,
                    format_args!("read byte {at} of {part:?}, nothing there: {untouched}, {first:?}, {:?}", op.causes),
                );
            }
        }
    }

    /// Gives back what an entry has used.
    fn let_go(&mut self, op: Op, effect: Effect) {
        if let Some(table) = &op.table {
            for (at, part) in op.parts.iter().enumerate() {
                let stamp = op.stamp + at as u64;
                let mut cells = table.cells.borrow_mut();
                let cell = &mut cells[part.cell];
                if op.kind == Kind::Read {
                    cell.readers -= 1;
                    continue;
                }
                cell.writer = false;
                match effect {
                    Effect::Nothing => {}
                    // Rejected, or never there: not a byte of it is for this cell.
                    _ if op.causes.bad_target => {}
                    Effect::Moved => cell.content = Content::Known(stamp),
                    Effect::Unknown => {
                        cell.content = Content::Poisoned;
                        table.peer.poisoned.fetch_add(1, Relaxed);
                    }
                }
                drop(cells);
                if effect != Effect::Unknown {
                    // Also what was never issued, now and then: the old bytes are there.
                    self.ask(table, part.cell, effect);
                }
            }
        }
        if let Some(lease) = op.lease.filter(|lease| Arc::strong_count(lease) == 1) {
            let start = layout::chunk_offset(lease.chunk);
            let len = op.parts.iter().map(|part| part.local + part.len - start).max().unwrap_or(0);
            let stamp = self.stamps(1);
            pattern::fill(&self.region, start, len, stamp, 0);
            self.seals[lease.chunk] = Some(Seal { stamp, len });
        }
    }

    /// Asks the peer what a cell holds.
    fn ask(&mut self, table: &Rc<Table>, cell: usize, effect: Effect) {
        let state = &mut table.cells.borrow_mut()[cell];
        let Content::Known(stamp) = state.content else { return };
        let generation = table.peer.process.generation;
        let many = self.asked.keys().filter(|(of, _)| *of == generation).count() >= QUESTIONS;
        let seldom = effect == Effect::Nothing && self.rng.u32(0..8) > 0;
        let current = self.tables.values().any(|present| Rc::ptr_eq(present, table));
        if many || seldom || state.checking || state.writer || !current {
            return;
        }
        if table.peer.process.ask(self.number, cell, stamp) {
            state.checking = true;
            self.asked.insert((generation, cell), (Rc::clone(table), stamp, Instant::now()));
        }
    }

    fn checked(&mut self, checked: &Checked) {
        let Some((table, stamp, _)) = self.asked.remove(&(checked.generation, checked.cell)) else { return };
        table.cells.borrow_mut()[checked.cell].checking = false;
        self.tally.verified();
        if let Some(at) = checked.wrong {
            let what = format_args!("the peer does not have byte {at} of cell {} with {stamp:#x}", checked.cell);
            self.tally.anomaly(Anomaly::Bytes, what);
        }
    }

    fn look_for_hangs(&mut self, now: Instant) {
        for (id, op) in &mut self.ops {
            if now.duration_since(op.born) > HANGS && !std::mem::replace(&mut op.told, true) {
                self.tally.anomaly(Anomaly::Hang, format_args!("entry {id}: {op:?}"));
            }
        }
        // A peer that was killed answers nothing; one that lives does when it goes on.
        let roster: Vec<u32> = self.peers.clone().map(|peer| self.roster.get(peer).process.generation).collect();
        self.asked.retain(|(generation, _), _| roster.contains(generation));
    }

    /// Closes the ring around whatever it has, and takes a new one on the same poller.
    fn replace_ring(&mut self) {
        self.submit();
        let new = Ring::builder().attach(&self.ring).build(CAPACITY, self.ring.engine());
        let mut new = match new {
            Ok(new) => new,
            Err(error) => {
                self.tally.anomaly(Anomaly::Result, format_args!("a ring could not be attached: {error}"));
                return;
            }
        };
        self.tally.fault("ring_closed");
        self.submitter = self.rng.bool().then(|| new.submitter());
        let old = std::mem::replace(&mut self.ring, new);
        self.close(old);
    }

    fn close(&mut self, ring: Ring) {
        for op in self.ops.values_mut() {
            op.causes.closed = true;
        }
        let report = ring.close(CLOSES);
        report.completions.iter().for_each(|&cqe| self.complete(cqe));
        self.poll_futures();
        if !report.finished || report.unquiet > 0 {
            self.tally.anomaly(Anomaly::Hang, format_args!("a ring was closed: {report:?}"));
        }
        let total = report.stats.unwrap_or_default().total;
        if total.outstanding != 0 || total.accepted != total.ok + total.failed + total.cancelled {
            self.tally.anomaly(Anomaly::Result, format_args!("counts of a closed ring: {total:?}"));
        }
        self.told_lost();
    }

    fn told_lost(&mut self) {
        let lost: Vec<u64> = self.ops.keys().copied().collect();
        for id in lost {
            let op = self.ops.remove(&id).expect("it is there");
            self.tally.anomaly(Anomaly::Lost, format_args!("entry {id}: {op:?}"));
        }
        self.futures.clear();
    }

    /// The end: everything has come, and every buffer back.
    fn settle(mut self) {
        for (_, cell) in self.asked.keys() {
            self.tally.anomaly(Anomaly::Hang, format_args!("a peer does not say what cell {cell} holds"));
        }
        self.told_lost();
        let engine = self.ring.engine().clone();
        let last = Ring::builder().attach(&self.ring).build(1, &engine);
        drop(self.submitter.take());
        match last {
            Ok(last) => {
                let old = std::mem::replace(&mut self.ring, last);
                self.close(old);
            }
            Err(error) => self.tally.anomaly(Anomaly::Result, format_args!("a ring could not be attached: {error}")),
        }
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).len();
        if free < CHUNKS {
            self.tally.anomaly(Anomaly::Lost, format_args!("{} buffers did not come back", CHUNKS - free));
        }
        // Whatever has come late shows in the seals.
        for (chunk, seal) in self.seals.iter().enumerate() {
            let Some(Seal { stamp, len }) = *seal else { continue };
            if let Some(at) = pattern::first_wrong(&self.region, layout::chunk_offset(chunk), len, stamp, 0) {
                self.tally.anomaly(Anomaly::Touched, format_args!("a buffer, byte {at} of {len}"));
            }
        }
        if let Err(error) = self.region.unregister() {
            self.tally.anomaly(Anomaly::Lost, format_args!("the region is still in use: {error}"));
        }
    }
}

fn judge(op: &Op, cqe: &Cqe, tally: &Tally) {
    if let Some(anomaly) = op.judge(cqe) {
        tally.anomaly(anomaly, format_args!("{cqe:?} of {:?} {:?}, {} fences", op.kind, op.causes, op.fences));
    }
}

/// The buffer of a Read that was not issued.
fn check_untouched(region: &Registered, op: &Op, anomaly: Anomaly, tally: &Tally) {
    for part in &op.parts {
        tally.verified();
        if let Some(at) = pattern::first_wrong(region, part.local, part.len, op.stamp, part.at) {
            tally.anomaly(anomaly, format_args!("byte {at} of {part:?} has changed before its Read was issued"));
        }
    }
}

const _: () = assert!(CELLS < 1 << 16, "a cell's number fits its stamp");
