//! What the simulation itself knows of every entry, fence and operation, apart from the core, and what it holds against
//! what the core does.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::program::{Break, EnginePlan, PlanOp, PolledEnd, Whom};
use super::record::{Flight, Record, Seen, Truth, Watch};
use super::store::Shift;
use crate::code::{Stage, errno};
use crate::cqe::{Cqe, CqeFlags};
use crate::fence::{Fence, FenceStatus};
use crate::transport::{Nanos, PollerWaker};

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
/// Of which each part of each entry has a piece,
const PIECE: u64 = 256;
/// or, if it lies on a strip, a piece of that.
pub(super) const STRIPS_AT: u64 = REGION + (1 << 24);

#[derive(Debug, Default)]
pub(super) struct Timeline {
    pub(super) value: u64,
    pub(super) failed: Option<i32>,
}

#[derive(Debug, Default)]
pub(super) struct PolledBook {
    pub(super) answer: Option<PolledEnd>,
}

#[derive(Debug)]
pub(super) struct DriverBook {
    pub(super) engine: usize,
    pub(super) core: usize,
    pub(super) waker: PollerWaker,
    pub(super) linger: Nanos,
    pub(super) gone: bool,
}

/// A cancel, by an entry or a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct CancelBook {
    pub(super) ring: usize,
    pub(super) whom: Mark,
    /// The entry, if it is one.
    pub(super) by: Option<usize>,
    pub(super) timeouts_only: bool,
    /// By a future, of its own entry.
    pub(super) future: bool,
    /// The order of completions at which a call was answered.
    pub(super) over: Option<u64>,
}

/// Whom a cancel means, in the world's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Entry(usize),
    Key(u8),
    Target(u32),
    /// The engine's first region.
    Region,
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
    /// Until its core hears of the closing.
    pub(super) grace: Option<Nanos>,
    /// When its core is to stop waiting for what is in flight.
    pub(super) gives_up: Option<Nanos>,
    pub(super) finished: bool,
    /// Completions wait for room.
    pub(super) overflowing: bool,
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
    /// As many entries as are offered at once.
    pub(super) most: bool,
}

#[derive(Debug, Default)]
pub(super) struct Book {
    pub(super) now: Nanos,
    pub(super) plans: Vec<EnginePlan>,
    pub(super) records: Vec<Record>,
    /// Those of them that something is still to come of.
    pub(super) open: Vec<usize>,
    pub(super) flights: Vec<Flight>,
    /// Which entry has the piece of an engine's strip that begins at an address.
    pub(super) pieces: HashMap<(usize, u64), usize>,
    /// Which entry last asked a Store what a request does.
    pub(super) requests: HashMap<usize, usize>,
    /// Workers of Stores that have something to do.
    pub(super) shifts: Vec<Shift>,
    /// What Stores have: an engine's, under a key, so many bytes.
    pub(super) objects: HashMap<(usize, u8), u8>,
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
    /// Entries that are to be tried again since the present turn.
    pub(super) again_now: Vec<usize>,
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
    /// Operations of several entries.
    pub(super) merged: u64,
    /// Keys that Stores were asked for.
    pub(super) asked: u64,
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

    /// Which part of which entry has the piece of local memory that begins at an address.
    pub(super) fn piece_at(&self, engine: usize, local: u64) -> Option<(usize, usize)> {
        if local >= STRIPS_AT {
            return self.pieces.get(&(engine, local)).map(|&uid| (uid, 0));
        }
        let number = local.checked_sub(REGION)? / PIECE;
        let (uid, part) = ((number / 8) as usize, (number % 8) as usize);
        (Book::local(uid, part) == local && uid < self.records.len()).then_some((uid, part))
    }

    pub(super) fn remote(uid: usize, part: usize) -> u64 {
        (uid as u64) << 16 | (part as u64) << 8
    }

    pub(super) fn user_data(uid: usize, key: Option<u8>) -> u64 {
        key.map_or(UNIQUE + uid as u64, u64::from)
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
        self.open().filter(move |(_, record)| record.ring == ring && record.ended.is_none())
    }

    /// Entries that have not ended, those that the transport may touch for ever, and some that have ended in this turn.
    pub(super) fn open(&self) -> impl Iterator<Item = (usize, &Record)> {
        self.open.iter().map(|&uid| (uid, &self.records[uid]))
    }

    pub(super) fn forget_ended(&mut self) {
        let records = &self.records;
        self.open.retain(|&uid| records[uid].ended.is_none_or(|seen| seen.flags.contains(CqeFlags::UNQUIET)));
    }

    /// True if it may have ended without a word: it was to be silent, or a silent one before it stands for it. A future hears of
    /// every end.
    pub(super) fn may_be_silent(&self, record: &Record) -> bool {
        record.future.is_none() && (record.skips() || record.plan.key.is_some() || self.is_hidden(record))
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

    /// Whom its turn waits for in its chain: a LinkTimeout before it only watches that one.
    pub(super) fn waits_behind(&self, record: &Record) -> Option<usize> {
        let before = record.before?;
        match self.records[before].plan.op {
            PlanOp::LinkTimeout(_) => self.records[before].before,
            _ => Some(before),
        }
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
        let seen = Seen::of(cqe, self.order);
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
        if self.records[uid].future.is_some() {
            self.violate(format!("entry {uid} has a future, and ring {ring} a completion of it: {cqe:?}"));
        }
        self.observe_entry(uid, seen, cqe);
    }

    /// Which entry a ring's completion is of, if it has a `user_data` of its own.
    pub(super) fn entry_of(&self, ring: usize, cqe: &Cqe) -> Option<usize> {
        let uid = cqe.user_data().checked_sub(UNIQUE)? as usize;
        self.records.get(uid).is_some_and(|record| record.ring == ring).then_some(uid)
    }

    /// The future of an entry is told.
    pub(super) fn observe_future(&mut self, uid: usize, cqe: &Cqe) {
        self.order += 1;
        self.say(|| format!("    the future of entry {uid}: {cqe:?}"));
        if cqe.user_data() != Book::user_data(uid, None) {
            self.violate(format!("the future of entry {uid} is told somebody else's end: {cqe:?}"));
        }
        self.observe_entry(uid, Seen::of(cqe, self.order), cqe);
    }

    fn observe_entry(&mut self, uid: usize, seen: Seen, cqe: &Cqe) {
        let ring = self.records[uid].ring;
        self.records[uid].news = false;
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

    pub(super) fn note_cancels(&mut self, uid: usize, seen: Seen) {
        if let PlanOp::Cancel { all, .. } = self.records[uid].plan.op
            && seen.stage == Stage::Done
        {
            self.cancelled_by_entries += if all { seen.res as usize } else { 1 };
        } else if matches!(self.records[uid].plan.op, PlanOp::Remove(_)) && seen.stage == Stage::Done {
            self.cancelled_by_entries += 1;
        }
    }

    pub(super) fn observe_message(&mut self, ring: usize, number: usize, seen: Seen) {
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

    pub(super) fn observe_key(&mut self, ring: usize, key: usize, seen: Seen) {
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
        Whom::Region => Mark::Region,
        Whom::Any => Mark::Everything,
    }
}
