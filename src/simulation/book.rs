//! What the simulation itself knows of every entry, fence and operation, apart from the core, and what it holds against
//! what the core does.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::net;
use super::program::{Break, End, EnginePlan, Feeds, Plan, PlanOp, PolledEnd, Waiting, Whom};
use crate::code::{Stage, errno};
use crate::cqe::{Cqe, CqeFlags};
use crate::entry::EntryFlags;
use crate::fence::{Fence, FenceStatus};
use crate::transport::{Direction, Event, Nanos, Op, PollerWaker, Token};

/// The book, on the desk of everybody who writes in it.
pub(super) type Desk = Arc<Mutex<Book>>;

pub(super) fn lock(desk: &Desk) -> MutexGuard<'_, Book> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `user_data` of entries: this and their number.
const UNIQUE: u64 = 1 << 20;
/// Of messages.
pub(super) const MESSAGE: u64 = 1 << 40;
/// One region for each engine.
pub(super) const REGION: u64 = 1 << 30;
/// Of which each part of each entry has a piece.
const PIECE: u64 = 256;

/// A fence that an entry waits for.
#[derive(Clone, Debug)]
pub(super) enum Watch {
    Host(usize),
    Point(usize, u64),
    Polled(usize),
    /// The end of an entry.
    End(usize),
    Prefix,
}

/// What is known of a fence, by who settles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Truth {
    Pending,
    Signalled,
    /// With what its dependents have as errno and detail.
    Failed(i32, i32),
}

impl Truth {
    pub(super) fn dependency(root: i32) -> Truth {
        Truth::Failed(errno::ECANCELED, -root)
    }
}

#[derive(Debug, Default)]
pub(super) struct Timeline {
    pub(super) value: u64,
    pub(super) failed: Option<i32>,
}

#[derive(Debug, Default)]
pub(super) struct PolledBook {
    pub(super) answer: Option<PolledEnd>,
}

/// A completion that became visible.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) res: i32,
    pub(super) stage: Stage,
    pub(super) flags: CqeFlags,
    pub(super) detail: i32,
    /// Its place among all completions.
    pub(super) order: u64,
}

impl Seen {
    /// What the failure began with.
    fn root(&self) -> i32 {
        let at_gate = self.stage == Stage::Gate && self.res == -errno::ECANCELED && self.detail < 0;
        if at_gate { -self.detail } else { -self.res }
    }
}

#[derive(Debug)]
pub(super) struct Record {
    pub(super) ring: usize,
    pub(super) producer: u64,
    pub(super) plan: Plan,
    pub(super) flags: EntryFlags,
    pub(super) engine: usize,
    /// The transport's number of its peer.
    pub(super) target: Option<u32>,
    /// How many turns its core had had when it was submitted, and when the first one behind that was.
    pub(super) submitted: Option<u64>,
    pub(super) began: Option<Nanos>,
    pub(super) before: Option<usize>,
    pub(super) after: Option<usize>,
    pub(super) watches: Vec<(Watch, Fence)>,
    pub(super) end_fence: Option<Fence>,
    /// Whom it cancels, and the order of completions at which it was accepted.
    pub(super) accepted_order: u64,
    pub(super) issued: u128,
    /// The driver panicked while it was offered.
    pub(super) offered: bool,
    pub(super) issued_at: Option<Nanos>,
    /// Operations without a result, and those that may touch the local range.
    pub(super) unresolved: usize,
    pub(super) touching: usize,
    pub(super) results: Vec<(i32, Stage)>,
    /// When an operation was first told to have failed.
    pub(super) failed_at: Option<Nanos>,
    pub(super) result: Option<Seen>,
    pub(super) ended: Option<Seen>,
    pub(super) ticks: u32,
}

impl Record {
    pub(super) fn blank() -> Record {
        let plan = Plan {
            op: PlanOp::Wait,
            flags: EntryFlags::empty(),
            waits: Vec::new(),
            gate_limit: 0,
            transfer_limit: 0,
            key: None,
            feeds: Feeds::Nothing,
        };
        Record {
            ring: 0,
            producer: 0,
            plan,
            flags: EntryFlags::empty(),
            engine: 0,
            target: None,
            submitted: None,
            began: None,
            before: None,
            after: None,
            watches: Vec::new(),
            end_fence: None,
            accepted_order: 0,
            issued: 0,
            offered: false,
            issued_at: None,
            unresolved: 0,
            touching: 0,
            results: Vec::new(),
            failed_at: None,
            result: None,
            ended: None,
            ticks: 0,
        }
    }

    /// Parts that the transport is to have.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let parts = match &self.plan.op {
            PlanOp::Transfer { parts, .. } => &parts[..],
            _ => &[],
        };
        parts.iter().enumerate().map(|(at, &len)| (at, u64::from(len))).filter(|&(_, len)| len > 0)
    }

    fn bytes(&self) -> u64 {
        self.parts().map(|(_, len)| len).sum()
    }

    fn all_issued(&self) -> bool {
        self.issued.count_ones() as usize == self.parts().count()
    }

    pub(super) fn was_issued(&self) -> bool {
        self.issued != 0
    }

    pub(super) fn wholly_issued(&self) -> bool {
        self.all_issued()
    }

    fn skips(&self) -> bool {
        self.flags.contains(EntryFlags::CQE_SKIP_SUCCESS)
    }

    pub(super) fn is_chained(&self) -> bool {
        self.before.is_some() || self.flags.intersects(EntryFlags::CHAINED)
    }

    fn is_cancel(&self) -> bool {
        matches!(self.plan.op, PlanOp::Cancel { .. } | PlanOp::Remove(_) | PlanOp::Update(..))
    }

    pub(super) fn has_side(&self) -> bool {
        self.watches.len() > 1 || self.plan.gate_limit > 0 || self.plan.transfer_limit > 0
    }
}

/// An operation that the transport has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) driver: usize,
    pub(super) target: u32,
    pub(super) token: Token,
    pub(super) uid: usize,
    pub(super) part: usize,
    pub(super) len: u64,
    pub(super) end: End,
    result_due: Nanos,
    lag: Nanos,
    /// Words said.
    pub(super) told: u8,
}

impl Flight {
    /// When its next word is due, if there is one.
    pub(super) fn due(&self, thorough: bool) -> Option<Nanos> {
        let due = match (self.end, self.told) {
            (End::Lost, _) => return None,
            (_, 0) => self.result_due,
            (End::Late(later) | End::Twice(later), 1) => self.result_due + later,
            _ => return None,
        };
        Some(if thorough { due } else { due + self.lag })
    }

    pub(super) fn over(&self) -> bool {
        match self.end {
            End::Late(_) | End::Twice(_) => self.told > 1,
            End::Never | End::Lost => false,
            _ => self.told > 0,
        }
    }

    fn resolved(&self) -> bool {
        self.told > 0
    }
}

#[derive(Debug)]
pub(super) struct DriverBook {
    pub(super) engine: usize,
    pub(super) core: usize,
    pub(super) waker: PollerWaker,
    linger: Nanos,
    gone: bool,
}

/// A cancel, by an entry or a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct CancelBook {
    pub(super) ring: usize,
    pub(super) whom: Mark,
    /// The entry, if it is one.
    pub(super) by: Option<usize>,
    pub(super) timeouts_only: bool,
    /// The order of completions at which a call was answered.
    pub(super) over: Option<u64>,
}

/// Whom a cancel means, in the world's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Entry(usize),
    Key(u8),
    Target(u32),
    Everything,
    Nobody,
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) res: i32,
    pub(super) seen: bool,
}

/// What a ring is to the book.
#[derive(Debug)]
pub(super) struct RingBook {
    pub(super) core: usize,
    pub(super) capacity: u64,
    pub(super) closing: bool,
    /// Units that refused pushes of messages took and give back in the next turn.
    pub(super) coming_back: u64,
    pub(super) deadline: Option<Nanos>,
    pub(super) finished: bool,
    pub(super) drains: bool,
    /// Segments that pushes came as far as taking a share of.
    pub(super) met: HashSet<u32>,
    pub(super) keys: [KeyBook; 2],
}

/// Entries that share a `user_data`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeyBook {
    pub(super) accepted: usize,
    pub(super) seen: usize,
}

/// What the drivers were offered in the present turn, for one peer.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) driver: usize,
    pub(super) target: u32,
    pub(super) room: usize,
    pub(super) taken: usize,
    pub(super) declined: bool,
}

#[derive(Debug, Default)]
pub(super) struct Book {
    pub(super) now: Nanos,
    pub(super) plans: Vec<EnginePlan>,
    pub(super) records: Vec<Record>,
    pub(super) flights: Vec<Flight>,
    pub(super) drivers: Vec<DriverBook>,
    pub(super) rings: Vec<RingBook>,
    pub(super) hosts: Vec<Truth>,
    pub(super) timelines: Vec<Timeline>,
    pub(super) polled: Vec<PolledBook>,
    pub(super) cancels: Vec<CancelBook>,
    pub(super) messages: Vec<Message>,
    /// Whose turn it is.
    pub(super) turning: Option<usize>,
    pub(super) dead: Vec<bool>,
    pub(super) offers: Vec<Offer>,
    /// Entries issued in the present turn.
    pub(super) issued_now: Vec<usize>,
    /// Of each engine: the transport is closed.
    pub(super) ended_engines: Vec<bool>,
    /// The rings use it alone, or it does not close: what runs cannot be stopped.
    pub(super) stale: HashSet<(usize, u32)>,
    pub(super) stalls: Vec<(usize, u32, Nanos)>,
    pub(super) partials: Vec<(usize, u32, u8)>,
    pub(super) breaks: Vec<(usize, Break)>,
    pub(super) targets: Vec<u32>,
    /// When each peer of an engine last told a result.
    pub(super) told_at: HashMap<(usize, u32), Nanos>,
    pub(super) order: u64,
    pub(super) cancelled_by_entries: usize,
    pub(super) cancelled_by_calls: usize,
    pub(super) faults: u64,
    pub(super) violations: Vec<String>,
    pub(super) trace: Option<Vec<String>>,
}

impl Book {
    pub(super) fn violate(&mut self, what: String) {
        self.say(|| format!("!!! {what}"));
        self.violations.push(what);
    }

    pub(super) fn say(&mut self, what: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:>10}  {}", what()));
        }
    }

    pub(super) fn order(&self) -> u64 {
        self.order
    }

    /// The numbers that an entry's part has with the transport.
    pub(super) fn local(uid: usize, part: usize) -> u64 {
        REGION + (uid as u64 * 8 + part as u64) * PIECE
    }

    pub(super) fn remote(uid: usize, part: usize) -> u64 {
        (uid as u64) << 16 | (part as u64) << 8
    }

    pub(super) fn user_data(uid: usize, key: Option<u8>) -> u64 {
        key.map_or(UNIQUE + uid as u64, u64::from)
    }

    // What the transport asks.

    pub(super) fn new_driver(&mut self, engine: usize, waker: PollerWaker) -> usize {
        let core = self.turning.unwrap_or(usize::MAX);
        self.drivers.push(DriverBook { engine, core, waker, linger: 0, gone: false });
        self.drivers.len() - 1
    }

    pub(super) fn drop_driver(&mut self, driver: usize) {
        self.drivers[driver].gone = true;
    }

    pub(super) fn new_target(&mut self, engine: usize) -> u32 {
        self.targets.resize(self.plans.len(), 0);
        self.targets[engine] += 1;
        self.targets[engine] - 1
    }

    /// The transport is closed: nothing touches anything any more.
    pub(super) fn end_engine(&mut self, engine: usize) {
        self.ended_engines[engine] = true;
        let drivers = &self.drivers;
        let ours = |flight: &Flight| drivers[flight.driver].engine == engine;
        let gone: Vec<Flight> = self.flights.iter().copied().filter(ours).collect();
        self.flights.retain(|flight| drivers[flight.driver].engine != engine);
        for flight in gone {
            let record = &mut self.records[flight.uid];
            if !flight.resolved() {
                record.unresolved -= 1;
                record.touching -= 1;
            } else if matches!(flight.end, End::Late(_) | End::Never) {
                record.touching -= 1;
            }
        }
    }

    pub(super) fn stall(&mut self, engine: usize, target: u32, until: Nanos) {
        self.faults += 1;
        self.stalls.push((engine, target, until));
    }

    pub(super) fn partial(&mut self, engine: usize, target: u32, take: u8) {
        self.faults += 1;
        self.partials.push((engine, target, take));
    }

    pub(super) fn break_at(&mut self, engine: usize, at: Break) {
        self.breaks.push((engine, at));
    }

    pub(super) fn no_more_faults(&mut self) {
        self.stalls.clear();
        self.partials.clear();
        self.breaks.clear();
    }

    /// What is lost turns up.
    pub(super) fn find_lost(&mut self) {
        let now = self.now;
        for flight in &mut self.flights {
            match flight.end {
                End::Lost => (flight.end, flight.result_due) = (End::Lands, now + 1),
                End::Never => flight.end = End::Late((now + 1).saturating_sub(flight.result_due)),
                _ => {}
            }
        }
    }

    pub(super) fn linger(&mut self, engine: usize, until: Nanos) {
        self.faults += 1;
        self.drivers.iter_mut().filter(|driver| driver.engine == engine).for_each(|driver| driver.linger = until);
    }

    pub(super) fn breaks_at(&mut self, engine: usize, mut at: impl FnMut(Break) -> bool) -> bool {
        let found = self.breaks.iter().position(|&(of, kind)| of == engine && at(kind));
        if let Some(found) = found {
            let (_, at) = self.breaks.remove(found);
            self.faults += 1;
            self.say(|| format!("    the driver panics: {at:?}"));
        }
        found.is_some()
    }

    /// A driver is offered operations for a peer; how many it takes.
    pub(super) fn offered(&mut self, driver: usize, target: u32, count: usize, now: Nanos) -> usize {
        let engine = self.drivers[driver].engine;
        let EnginePlan { max_batch, max_in_flight, .. } = self.plans[engine];
        if self.drivers[driver].gone || self.ended_engines[engine] {
            self.violate(format!("engine {engine} was called after its end"));
        }
        if count == 0 || count > max_batch as usize {
            self.violate(format!("a batch of {count}, and the transport takes {max_batch}"));
        }
        let running = self.flying(driver, target, false);
        if running + count > max_in_flight as usize {
            self.violate(format!("{count} more for peer {target}, which has {running} of {max_in_flight}"));
        }
        if self.stale.contains(&(engine, target)) {
            self.violate(format!("peer {target} was reopened, and is offered {count} operations"));
        }
        self.stalls.retain(|&(.., until)| until > now);
        let mut take = count;
        if self.stalls.iter().any(|&(of, peer, _)| (of, peer) == (engine, target)) {
            take = 0;
        }
        if let Some(at) = self.partials.iter().position(|&(of, peer, _)| (of, peer) == (engine, target)) {
            take = take.min(self.partials.swap_remove(at).2 as usize);
        }
        let room = (max_in_flight as usize).saturating_sub(self.flying(driver, target, true));
        self.offers.push(Offer { driver, target, room, taken: take, declined: take < count });
        if take < count {
            self.say(|| format!("    peer {target} takes {take} of {count}"));
        }
        take
    }

    /// The driver panics: these may have been started.
    pub(super) fn was_offered(&mut self, ops: &[Op]) {
        for op in ops {
            if let Some(record) = self.records.get_mut((op.remote >> 16) as usize) {
                record.offered = true;
            }
        }
    }

    /// Operations towards a peer without a result; without those that a closed ring may have left behind.
    pub(super) fn flying(&self, driver: usize, target: u32, left_behind: bool) -> usize {
        let ours = |flight: &&Flight| {
            let ring = &self.rings[self.records[flight.uid].ring];
            let left = ring.deadline.is_some_and(|deadline| deadline <= self.now);
            flight.driver == driver && flight.target == target && !flight.resolved() && (left_behind || !left)
        };
        self.flights.iter().filter(ours).count()
    }

    /// The transport starts an operation.
    pub(super) fn issue(&mut self, driver: usize, target: u32, op: &Op, now: Nanos, out: &mut Vec<Event>) {
        let (uid, part) = ((op.remote >> 16) as usize, (op.remote >> 8 & 0xff) as usize);
        if uid >= self.records.len() {
            self.violate(format!("an operation of no entry: {op:?}"));
            return;
        }
        if let Some(why) = self.wrong_to_issue(driver, target, uid, part, op) {
            self.violate(format!("entry {uid}, part {part}: {why}"));
        }
        let record = &mut self.records[uid];
        record.issued |= 1 << part;
        record.issued_at.get_or_insert(now);
        record.unresolved += 1;
        record.touching += 1;
        let PlanOp::Transfer { fate, vectored, .. } = record.plan.op else { return };
        // Parts have no identity of their own: that each has one result is a driver's duty.
        let end = if vectored && matches!(fate.end, End::Twice(_)) { End::Lands } else { fate.end };
        let spread = part as u64 * 7_919 % 20_000;
        let faulty = !matches!(end, End::Lands | End::AtOnce(true));
        let (result_due, lag) = (now + fate.after + spread, fate.lag);
        let len = u64::from(op.len);
        let flight = Flight { driver, target, token: op.token, uid, part, len, end, result_due, lag, told: 0 };
        self.faults += u64::from(faulty) + u64::from(lag > 0);
        self.flights.push(flight);
        self.issued_now.push(uid);
        self.say(|| format!("    issue {uid}.{part} to peer {target}: {end:?} after {}", result_due - now));
        if matches!(end, End::AtOnce(_)) {
            net::tell(self, self.flights.len() - 1, out);
            self.flights.pop();
        }
    }

    fn wrong_to_issue(&self, driver: usize, target: u32, uid: usize, part: usize, op: &Op) -> Option<String> {
        let record = &self.records[uid];
        let PlanOp::Transfer { write, ref parts, .. } = record.plan.op else {
            return Some("issued, and is no transfer".into());
        };
        let direction = if write { Direction::Write } else { Direction::Read };
        let right = (direction, Book::local(uid, part), parts.get(part).map(|&len| u32::from(len)), Some(target));
        if (op.direction, op.local, Some(op.len), record.target) != right {
            return Some(format!("issued as {op:?} to {target}, asked for {right:?} to {:?}", record.target));
        }
        if (self.drivers[driver].engine, self.drivers[driver].core) != (record.engine, self.rings[record.ring].core) {
            return Some("issued to another engine's driver, or on another core".into());
        }
        if record.issued & 1 << part != 0 {
            return Some("issued twice".into());
        }
        if record.submitted.is_none() {
            return Some("issued before it was submitted".into());
        }
        if let Some(seen) = record.result.or(record.ended) {
            return Some(format!("issued after its end {seen:?}"));
        }
        if record.failed_at.is_some_and(|at| at < self.now) {
            return Some("a further part is issued after one has failed".into());
        }
        for (watch, fence) in &record.watches {
            let truth = self.truth(watch, fence);
            if truth != Truth::Signalled {
                return Some(format!("issued, and its fence {watch:?} is {truth:?}"));
            }
        }
        let before = record.before.map(|before| &self.records[before])?;
        let hard = before.flags.contains(EntryFlags::IO_HARDLINK);
        if before.result.is_none() && before.ended.is_none() && (before.unresolved > 0 || before.began.is_none()) {
            return Some("issued before the one before it in its chain has ended".into());
        }
        if before.touching > 0 {
            return Some("issued while the one before it in its chain is not quiet".into());
        }
        let failed = before.results.iter().any(|&(res, _)| res < 0);
        (failed && !hard).then(|| "issued, and the one before it in its chain has failed".into())
    }

    /// The transport gives a result or says that it is quiet.
    pub(super) fn told(&mut self, uid: usize, part: usize, event: Event) {
        self.say(|| format!("    the transport says of {uid}.{part}: {event:?}"));
        let record = &mut self.records[uid];
        match event {
            Event::Result { res, stage, quiet, .. } => {
                record.unresolved -= 1;
                record.touching -= usize::from(quiet);
                record.results.push((res, stage));
                if res < 0 {
                    record.failed_at.get_or_insert(self.now);
                }
                if let Some(target) = record.target {
                    self.told_at.insert((record.engine, target), self.now);
                }
            }
            Event::Quiet { .. } => record.touching -= 1,
        }
    }

    pub(super) fn next_look(&self, driver: usize) -> Option<Nanos> {
        let flights = self.flights.iter().filter(|flight| flight.driver == driver);
        let due = flights.filter_map(|flight| flight.due(false)).min();
        let linger = Some(self.drivers[driver].linger).filter(|&linger| linger > self.now);
        due.into_iter().chain(linger).min()
    }

    /// True if the driver wakes its poller for something that is due after `before` and not after `now`.
    pub(super) fn wakes_between(&self, driver: usize, before: Nanos, now: Nanos) -> bool {
        let DriverBook { engine, linger, .. } = self.drivers[driver];
        let flights = self.flights.iter().filter(|flight| flight.driver == driver);
        let mut due = flights.filter_map(|flight| flight.due(false)).chain([linger]);
        self.plans[engine].wait == Waiting::Wakes && due.any(|due| before < due && due <= now)
    }

    pub(super) fn looked_after(&self, driver: usize) -> usize {
        let lingers = self.drivers[driver].linger > self.now;
        self.flights.iter().filter(|flight| flight.driver == driver).count() + usize::from(lingers)
    }

    /// A core asks a polled fence: none but the oldest of its stream that it does not know to be final.
    pub(super) fn asked(&mut self, number: usize, group: Option<(u64, u64)>) {
        if self.turning.is_none() {
            self.violate(format!("the polled fence {number} is asked by a caller"));
        }
        let _ = group;
    }

    // What the world asks.

    pub(super) fn truth(&self, watch: &Watch, fence: &Fence) -> Truth {
        match *watch {
            Watch::Host(host) => self.hosts[host],
            Watch::Point(timeline, value) => {
                let Timeline { value: at, failed } = self.timelines[timeline];
                match failed {
                    _ if at >= value => Truth::Signalled,
                    Some(root) => Truth::dependency(root),
                    None => Truth::Pending,
                }
            }
            Watch::Polled(number) => match self.polled[number].answer {
                None => Truth::Pending,
                Some(PolledEnd::Signal) => Truth::Signalled,
                Some(PolledEnd::Fail(detail)) => Truth::Failed(errno::EIO, detail),
                Some(PolledEnd::Panic) => Truth::Failed(errno::EPROTO, 0),
            },
            Watch::End(of) => {
                let of = &self.records[of];
                let unfinished = of.unresolved > 0 || of.touching > 0 || (of.was_issued() && !of.all_issued());
                match fence.status() {
                    FenceStatus::Signalled if unfinished => Truth::Pending,
                    status => settled(status),
                }
            }
            Watch::Prefix => settled(fence.status()),
        }
    }

    /// True if a core that looked would know that all its fences have signalled.
    pub(super) fn is_ready(&self, record: &Record) -> bool {
        let ready = |(watch, fence): &(Watch, Fence)| match watch {
            Watch::Polled(_) => fence.status() == FenceStatus::Signalled,
            _ => self.truth(watch, fence) == Truth::Signalled,
        };
        record.watches.iter().all(ready)
    }

    pub(super) fn live(&self, ring: usize) -> impl Iterator<Item = (usize, &Record)> {
        self.records.iter().enumerate().filter(move |(_, record)| record.ring == ring && record.ended.is_none())
    }

    /// True if it may have ended without a word: it was to be silent, or a silent one before it stands for it.
    pub(super) fn may_be_silent(&self, record: &Record) -> bool {
        record.skips() || record.plan.key.is_some() || self.is_hidden(record)
    }

    /// What is wrong with having ended without a word, if anything is.
    pub(super) fn wrong_silence(&self, record: &Record) -> Option<String> {
        if matches!(record.plan.op, PlanOp::LinkTimeout(_)) {
            return None;
        }
        if record.touching > 0 || record.unresolved > 0 || !record.all_issued() {
            return Some("the transport has it, or never had".into());
        }
        if record.results.iter().any(|&(res, _)| res < 0) {
            return Some("the transport failed it".into());
        }
        let open = record.watches.iter().find(|(watch, fence)| self.truth(watch, fence) != Truth::Signalled);
        open.map(|(watch, _)| format!("its fence {watch:?} has not signalled"))
    }

    pub(super) fn is_hidden(&self, record: &Record) -> bool {
        let mut before = record.before;
        while let Some(at) = before {
            let other = &self.records[at];
            if other.skips() {
                return true;
            }
            before = other.before;
        }
        false
    }

    /// A ring's units in use: at least and at most.
    pub(super) fn units(&self, ring: usize) -> (u64, u64) {
        let (mut least, mut most) = (0, 0);
        for (_, record) in self.live(ring) {
            if record.plan.key.is_some() {
                continue;
            }
            most += 1;
            least += u64::from(!self.may_be_silent(record));
        }
        let keys: usize = self.rings[ring].keys.iter().map(|key| key.accepted - key.seen).sum();
        let skipping = |record: &Record| record.plan.key.is_some() && (record.skips() || record.before.is_some());
        let silent = self.records.iter().filter(|record| record.ring == ring && skipping(record)).count();
        let messages = self.messages.iter().filter(|message| message.to == ring && !message.seen).count() as u64;
        let most = most + keys as u64 + messages + self.rings[ring].coming_back;
        (least + keys.saturating_sub(silent) as u64, most)
    }

    /// A completion has become visible on a ring.
    pub(super) fn observe(&mut self, ring: usize, cqe: &Cqe) {
        self.order += 1;
        let seen =
            Seen { res: cqe.res(), stage: cqe.stage(), flags: cqe.flags(), detail: cqe.detail(), order: self.order };
        let user_data = cqe.user_data();
        self.say(|| format!("    ring {ring}: {cqe:?}"));
        if user_data >= MESSAGE {
            self.observe_message(ring, (user_data - MESSAGE) as usize, seen);
            return;
        }
        if user_data < UNIQUE {
            self.observe_key(ring, user_data as usize, seen);
            return;
        }
        let uid = (user_data - UNIQUE) as usize;
        if uid >= self.records.len() || self.records[uid].ring != ring {
            self.violate(format!("ring {ring} has a completion for nobody: {cqe:?}"));
            return;
        }
        if let Some(why) = self.wrong_end(uid, seen) {
            let plan = self.records[uid].plan.clone();
            self.violate(format!("entry {uid} on ring {ring}, {plan:?}: {why}: {cqe:?}"));
        }
        self.note_cancels(uid, seen);
        let record = &mut self.records[uid];
        if seen.flags.contains(CqeFlags::MORE) {
            if matches!(record.plan.op, PlanOp::Timeout { .. }) {
                record.ticks += 1;
            } else {
                record.result = Some(seen);
            }
        } else {
            record.result.get_or_insert(seen);
            record.ended = Some(seen);
        }
    }

    fn note_cancels(&mut self, uid: usize, seen: Seen) {
        if let PlanOp::Cancel { all, .. } = self.records[uid].plan.op
            && seen.stage == Stage::Done
        {
            self.cancelled_by_entries += if all { seen.res as usize } else { 1 };
        } else if matches!(self.records[uid].plan.op, PlanOp::Remove(_)) && seen.stage == Stage::Done {
            self.cancelled_by_entries += 1;
        }
    }

    fn observe_message(&mut self, ring: usize, number: usize, seen: Seen) {
        let Some(message) = self.messages.get_mut(number) else {
            self.violate(format!("ring {ring} has a message that nobody sent: {seen:?}"));
            return;
        };
        let right = (message.to, message.res, Stage::Done, CqeFlags::empty(), false);
        let got = (ring, seen.res, seen.stage, seen.flags, message.seen);
        message.seen = true;
        let from = message.from;
        if got != right {
            self.violate(format!("message {number} is {got:?}, sent as {right:?}"));
        }
        if let Some(ended) = self.records[from].ended
            && ended.stage != Stage::Done
        {
            self.violate(format!("message {number} has come, and its sender ended with {ended:?}"));
        }
    }

    fn observe_key(&mut self, ring: usize, key: usize, seen: Seen) {
        let book = &mut self.rings[ring].keys[key];
        book.seen += 1;
        if book.seen > book.accepted {
            self.violate(format!("more completions with the user_data {key} than entries on ring {ring}"));
        }
        if seen.stage == Stage::Done {
            let ready = |record: &&Record| {
                let own = record.ring == ring && record.plan.key == Some(key as u8);
                own && record.watches.iter().all(|(watch, fence)| self.truth(watch, fence) == Truth::Signalled)
            };
            if self.records.iter().find(ready).is_none() {
                self.violate(format!("a Wait with the user_data {key} succeeded, and none had its fences signalled"));
            }
        }
    }

    /// What is wrong with a completion, if anything is.
    fn wrong_end(&self, uid: usize, seen: Seen) -> Option<String> {
        let record = &self.records[uid];
        let Seen { res, stage, flags, detail, .. } = seen;
        let wrong = |what: &str| Some(what.to_owned());
        if record.submitted.is_none() {
            return wrong("it has ended before it was submitted");
        }
        if record.ended.is_some() {
            return wrong("it has ended before");
        }
        let unquiet = flags.contains(CqeFlags::UNQUIET);
        let dead = self.dead[self.rings[record.ring].core];
        let ring = &self.rings[record.ring];
        if unquiet && !(dead || ring.closing) {
            return wrong("UNQUIET on a ring that works");
        }
        if unquiet && !record.was_issued() && !record.offered {
            return wrong("UNQUIET, and it was never issued");
        }
        if !unquiet && !flags.contains(CqeFlags::MORE) && record.touching > 0 {
            return wrong("its last word, and the transport still touches its buffer");
        }
        if let Some(first) = record.result {
            // The second completion.
            let right = flags.contains(CqeFlags::NOTIF) && res == 0 && !flags.contains(CqeFlags::MORE);
            let stage_kept = stage == first.stage || stage == Stage::Shutdown;
            return if right && stage_kept { None } else { wrong("a second completion that is no NOTIF") };
        }
        if flags.contains(CqeFlags::NOTIF) {
            return wrong("a NOTIF without a result before it");
        }
        let more = flags.contains(CqeFlags::MORE);
        let timeout = matches!(record.plan.op, PlanOp::Timeout { .. });
        if more && !timeout && !record.was_issued() {
            return wrong("MORE, and it was never issued");
        }
        if more && timeout && res != -errno::ETIME {
            return wrong("MORE on a Timeout that does not tick");
        }
        let chain = self.wrong_in_chain(record, seen);
        if chain.is_some() {
            return chain;
        }
        if matches!(stage, Stage::Done | Stage::Transfer)
            && let Some(why) = self.wrong_in_drains(uid)
        {
            return Some(why);
        }
        match stage {
            Stage::Done => self.wrong_success(record, seen),
            Stage::Gate => self.wrong_at_gate(record, seen),
            Stage::Issue => self.wrong_at_issue(record, seen),
            Stage::Transfer => self.wrong_transfer(uid, seen),
            Stage::Cancel => self.wrong_cancel(uid, seen),
            Stage::Shutdown => match -res {
                _ if detail != 0 => wrong("a detail at shutdown"),
                errno::ESHUTDOWN if !ring.closing => wrong("shut down on a ring that is not closed"),
                errno::ESHUTDOWN if record.was_issued() && record.all_issued() => wrong("shut down, and it was issued"),
                errno::EOWNERDEAD if !dead => wrong("the owner lives"),
                errno::ESHUTDOWN | errno::EOWNERDEAD => None,
                _ => wrong("no errno of shutdown's"),
            },
        }
    }

    /// Completions of a chain come in its order, and behind a failure nothing succeeds.
    fn wrong_in_chain(&self, record: &Record, seen: Seen) -> Option<String> {
        let before = &self.records[record.before?];
        if matches!(record.plan.op, PlanOp::LinkTimeout(_)) {
            return None;
        }
        let ended_by_closing = seen.stage == Stage::Shutdown || seen.stage == Stage::Transfer;
        if before.ended.is_none() && before.result.is_none() {
            let silent = self.may_be_silent(before) || matches!(before.plan.op, PlanOp::LinkTimeout(_));
            return (!silent && !ended_by_closing).then(|| "it has ended before the one before it in its chain".into());
        }
        let started = matches!(seen.stage, Stage::Done | Stage::Transfer);
        let first = before.result.or(before.ended)?;
        let hard = before.flags.contains(EntryFlags::IO_HARDLINK);
        let failed = self.failed(before, first);
        (started && failed && !hard).then(|| format!("it was started behind {first:?}"))
    }

    fn failed(&self, record: &Record, seen: Seen) -> bool {
        match record.plan.op {
            PlanOp::Timeout { success: true, .. } if seen.res == -errno::ETIME && seen.stage == Stage::Done => false,
            // It has left the chain.
            PlanOp::LinkTimeout(_) => record.before.is_some_and(|before| {
                let before = &self.records[before];
                let hard = before.flags.contains(EntryFlags::IO_HARDLINK);
                !hard && before.result.is_some_and(|first| self.failed(before, first))
            }),
            _ => seen.res < 0 || seen.flags.contains(CqeFlags::MORE),
        }
    }

    /// The first entry of an entry's chain.
    fn head(&self, uid: usize) -> usize {
        let mut head = uid;
        while let Some(before) = self.records[head].before {
            head = before;
        }
        head
    }

    fn chain(&self, head: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(head), |&at| self.records[at].after)
    }

    fn is_bad_chain(&self, head: usize) -> bool {
        let guard = |at: usize| matches!(self.records[at].plan.op, PlanOp::LinkTimeout(_));
        self.chain(head).any(|at| {
            let record = &self.records[at];
            matches!(record.plan.op, PlanOp::Bad) || (guard(at) && record.before.is_none_or(guard))
        })
    }

    fn bypasses(&self, uid: usize) -> bool {
        let record = &self.records[uid];
        let plain = record.watches.is_empty() && !record.has_side() && !record.flags.contains(EntryFlags::IO_DRAIN);
        record.is_cancel() && !record.is_chained() && record.after.is_none() && plain
    }

    /// What an entry that was started would have had to wait for, by the drains of its own producer.
    fn wrong_in_drains(&self, uid: usize) -> Option<String> {
        let record = &self.records[uid];
        if !self.rings[record.ring].drains || self.bypasses(uid) {
            return None;
        }
        let head = self.head(uid);
        let drains = |at: usize| self.chain(at).any(|at| self.records[at].flags.contains(EntryFlags::IO_DRAIN));
        let own = |&(at, other): &(usize, &Record)| {
            at < head && other.ring == record.ring && other.producer == record.producer && other.submitted.is_some()
        };
        let drained = drains(head);
        for (at, other) in self.records.iter().enumerate().filter(own) {
            let ended = other.result.is_some() || other.ended.is_some() || self.may_be_silent(other);
            if ended || self.bypasses(at) {
                continue;
            }
            let other_head = self.head(at);
            if drained || (drains(other_head) && !self.is_bad_chain(other_head)) {
                return Some(format!("it was started, and by a drain it comes after entry {at}, which has not ended"));
            }
        }
        None
    }

    /// `hidden`: what has ended on that ring may not be visible.
    pub(super) fn check_drains_of_issued(&mut self, hidden: impl Fn(usize) -> bool) {
        for uid in std::mem::take(&mut self.issued_now) {
            if !hidden(self.records[uid].ring)
                && let Some(why) = self.wrong_in_drains(uid)
            {
                self.violate(format!("entry {uid}: {why}"));
            }
        }
    }

    fn wrong_success(&self, record: &Record, seen: Seen) -> Option<String> {
        let Seen { res, flags, .. } = seen;
        // What a LinkTimeout waits for has no meaning.
        let guard = matches!(record.plan.op, PlanOp::LinkTimeout(_));
        for (watch, fence) in record.watches.iter().filter(|_| !guard) {
            let truth = self.truth(watch, fence);
            if truth != Truth::Signalled {
                return Some(format!("it went on, and its fence {watch:?} is {truth:?}"));
            }
        }
        let late = |span: Nanos| record.began.is_some_and(|began| began + span <= self.now);
        let right = match record.plan.op {
            PlanOp::Nop(wanted) => res == wanted,
            PlanOp::Wait | PlanOp::Message { .. } => res == 0,
            PlanOp::Transfer { .. } => {
                let told: i64 = record.results.iter().map(|&(res, _)| i64::from(res)).sum();
                let all_well = record.results.iter().all(|&(res, _)| res >= 0);
                let whole = record.bytes() == 0 || (record.all_issued() && record.unresolved == 0);
                whole && all_well && res as u64 == record.bytes() && told == i64::from(res) && flags.is_empty()
            }
            PlanOp::Timeout { repeats, .. } => {
                let last = !flags.contains(CqeFlags::MORE);
                let ticks = repeats.is_none_or(|most| most == 0 || record.ticks + u32::from(!last) < most.max(1));
                res == -errno::ETIME && (last || (repeats.is_some() && ticks))
            }
            PlanOp::LinkTimeout(span) => res == -errno::ETIME && late(span),
            PlanOp::Cancel { all, .. } => res >= 0 && (all || res == 0),
            PlanOp::Remove(_) | PlanOp::Update(..) => res == 0,
            PlanOp::Bad => false,
        };
        (!right).then(|| "it cannot have succeeded so".into())
    }

    fn wrong_at_gate(&self, record: &Record, seen: Seen) -> Option<String> {
        let Seen { res, detail, .. } = seen;
        if record.was_issued() {
            return Some("it ended at the gate, and was issued".into());
        }
        let by_fence =
            record.watches.iter().any(|(watch, fence)| self.truth(watch, fence) == Truth::Failed(-res, detail));
        if by_fence {
            return None;
        }
        if res == -errno::ETIME && record.plan.gate_limit > 0 && detail == 0 {
            let early = record.began.is_none_or(|began| began + record.plan.gate_limit > self.now);
            return early.then(|| "its gate limit has not passed".into());
        }
        if res != -errno::ECANCELED {
            return Some("nothing that it waits for failed so".into());
        }
        // A member of its chain failed: one before it, or any that failed its preparation.
        let mut before = record.before;
        while let Some(at) = before {
            let other = &self.records[at];
            if other.result.is_some_and(|first| first.root() == -detail && self.failed(other, first)) {
                return None;
            }
            before = other.before;
        }
        let uid = self.records.iter().position(|other| std::ptr::eq(other, record)).unwrap_or_default();
        let bad = detail == -errno::EINVAL && self.is_bad_chain(self.head(uid));
        (!bad).then(|| "neither a fence nor a member of its chain failed so".into())
    }

    fn wrong_at_issue(&self, record: &Record, seen: Seen) -> Option<String> {
        let res = seen.res;
        let right = match record.plan.op {
            PlanOp::Nop(wanted) => res == wanted && wanted < 0,
            PlanOp::Bad | PlanOp::LinkTimeout(_) => res == -errno::EINVAL,
            PlanOp::Message { .. } => res == -errno::EBADFD,
            PlanOp::Transfer { .. } => {
                let stale = record.target.is_some_and(|target| self.stale.contains(&(record.engine, target)));
                (res == -errno::ESTALE && stale && !record.all_issued())
                    || record.results.contains(&(res, Stage::Issue))
            }
            _ => false,
        };
        (!right).then(|| "nobody refused it so".into())
    }

    fn wrong_transfer(&self, uid: usize, seen: Seen) -> Option<String> {
        let record = &self.records[uid];
        let Seen { res, .. } = seen;
        if !record.was_issued() {
            return Some("a transfer's failure, and it was never issued".into());
        }
        if record.results.contains(&(res, Stage::Transfer)) {
            return None;
        }
        match -res {
            errno::ESHUTDOWN if self.rings[record.ring].closing => None,
            errno::ETIME if record.plan.transfer_limit > 0 => {
                let limit = record.issued_at.map_or(Nanos::MAX, |at| at + record.plan.transfer_limit);
                if limit > self.now {
                    return Some("its transfer limit has not passed".into());
                }
                let known = |flight: &Flight| flight.uid == uid && flight.told == 0 && flight.result_due <= self.now;
                let missed = self.flights.iter().any(known)
                    && !self.flights.iter().any(|flight| {
                        flight.uid == uid && flight.told == 0 && flight.due(true).is_none_or(|due| due > self.now)
                    });
                missed.then(|| "it is called late, and had ended".into())
            }
            _ => Some("the transport did not say so".into()),
        }
    }

    fn wrong_cancel(&self, uid: usize, seen: Seen) -> Option<String> {
        let record = &self.records[uid];
        match (-seen.res, &record.plan.op) {
            (errno::ENOENT, _) if record.is_cancel() => None,
            (errno::EALREADY, PlanOp::Cancel { detach: false, .. }) => None,
            // Its entry has ended first.
            (errno::ECANCELED, PlanOp::LinkTimeout(_)) => None,
            (errno::ECANCELED, _) => {
                let guarded =
                    record.after.is_some_and(|after| matches!(self.records[after].plan.op, PlanOp::LinkTimeout(_)));
                let named = self.cancels.iter().any(|cancel| self.may_mean(cancel, uid));
                (!guarded && !named).then(|| "nobody cancelled it".into())
            }
            _ => Some("no end of a cancel's".into()),
        }
    }

    fn may_mean(&self, cancel: &CancelBook, uid: usize) -> bool {
        let record = &self.records[uid];
        let over = match cancel.by {
            Some(by) if by == uid => return false,
            Some(by) => self.records[by].ended.map(|seen| seen.order),
            None => cancel.over,
        };
        if cancel.ring != record.ring || over.is_some_and(|over| over < record.accepted_order) {
            return false;
        }
        if cancel.timeouts_only && !matches!(record.plan.op, PlanOp::Timeout { .. }) {
            return false;
        }
        match cancel.whom {
            Mark::Entry(whom) => whom == uid,
            Mark::Key(key) => record.plan.key == Some(key),
            Mark::Target(target) => record.target == Some(target),
            Mark::Everything => true,
            Mark::Nobody => false,
        }
    }

    /// Entries that were cancelled are counted by somebody.
    pub(super) fn check_cancel_counts(&mut self) {
        let guard = |after: usize| matches!(self.records[after].plan.op, PlanOp::LinkTimeout(_));
        let cancelled = |record: &&Record| {
            let by_cancel =
                record.result.is_some_and(|seen| seen.stage == Stage::Cancel && seen.res == -errno::ECANCELED);
            by_cancel && !matches!(record.plan.op, PlanOp::LinkTimeout(_)) && !record.after.is_some_and(guard)
        };
        let ended = self.records.iter().filter(cancelled).count();
        let silent = self.records.iter().any(|record| record.is_cancel() && self.may_be_silent(record));
        let counted = self.cancelled_by_entries + self.cancelled_by_calls;
        if ended > counted && !silent {
            self.violate(format!("{ended} entries were cancelled, and cancels tell of {counted}"));
        }
    }

    /// What selects an entry for a call that waits for quiet.
    pub(super) fn is_marked(&self, mark: Mark, uid: usize) -> bool {
        let record = &self.records[uid];
        match mark {
            Mark::Entry(whom) => whom == uid,
            Mark::Key(key) => record.plan.key == Some(key),
            Mark::Target(target) => record.target == Some(target),
            Mark::Everything => true,
            Mark::Nobody => false,
        }
    }
}

fn settled(status: FenceStatus) -> Truth {
    match status {
        FenceStatus::Pending => Truth::Pending,
        FenceStatus::Signalled => Truth::Signalled,
        FenceStatus::Failed(why) => Truth::Failed(why.errno, why.detail),
    }
}

/// Kept so that a program's `Whom` has a place in the book's terms.
pub(super) fn mark_of(whom: Whom, back: Option<usize>, target: Option<u32>) -> Mark {
    match whom {
        Whom::Back(_) => back.map_or(Mark::Nobody, Mark::Entry),
        Whom::Key(key) => Mark::Key(key),
        Whom::Peer(_) => target.map_or(Mark::Nobody, Mark::Target),
        Whom::Region | Whom::Any => Mark::Everything,
    }
}
