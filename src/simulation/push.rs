//! Pushing a program's entries, and what a push may answer.

use super::book::{Book, CancelBook, MESSAGE, Mark, Message, lock};
use super::program::{Feeds, Plan, PlanOp, Wait};
use super::record::{Record, Watch};
use super::store;
use super::strips;
use super::world::World;
use crate::entry::{EntryFlags, Other, Payload};
use crate::fence::Fence;
use crate::opcode;
use crate::ring::PushError;
use crate::store::request::Kind;
use crate::{Entry, EntryFuture, Refusal, Ring};
use std::time::Duration;

/// An entry and what the book needs of it.
struct Built {
    entry: Entry,
    record: Record,
    cancel: Option<CancelBook>,
    message: Option<Message>,
}

/// What an accepted entry feeds, beside a value of the timeline.
enum Fed {
    Nothing,
    Fence(Fence),
    Future(EntryFuture),
}

impl World {
    pub(super) fn push(&mut self, ring: usize, producer: u8, whole: bool, plans: &[Plan]) {
        if self.rings[ring].ring.is_none() && self.rings[ring].producers.len() == 1 {
            return;
        }
        let count = self.rings[ring].producers.len();
        let producer = producer as usize % count;
        if self.rings[ring].ring.is_none() && producer == 0 {
            return;
        }
        if whole {
            self.push_whole(ring, producer, plans);
            return;
        }
        for plan in plans {
            if !self.push_one(ring, producer, plan) {
                // A chain that finds no room is cut.
                self.end_chain(ring, producer);
                return;
            }
        }
    }

    fn push_one(&mut self, ring: usize, producer: usize, plan: &Plan) -> bool {
        let strips = self.engines[self.rings[ring].engine].strips;
        let uid = lock(&self.book).records.len();
        let messages = lock(&self.book).messages.len();
        let Some(Built { entry, record, cancel, message }) = self.build(ring, producer, plan, uid, messages) else {
            return true;
        };
        let progress = self.progress.clone();
        let place = &mut self.rings[ring];
        let from = &mut place.producers[producer];
        let owner = place.ring.as_mut();
        let pushed: Result<Fed, PushError> = match (&mut from.submitter, owner, plan.feeds) {
            (Some(to), _, Feeds::Nothing) => to.push(entry).map(|()| Fed::Nothing),
            (Some(to), _, Feeds::Fence) => to.push_fenced(entry).map(Fed::Fence),
            (Some(to), _, Feeds::Progress) => to.push_signalling(entry, &progress).map(|_| Fed::Nothing),
            (Some(to), _, Feeds::Future) => to.push_future(entry).map(Fed::Future),
            (None, Some(ring), Feeds::Nothing) => ring.submission().push(entry).map(|()| Fed::Nothing),
            (None, Some(ring), Feeds::Fence) => ring.submission().push_fenced(entry).map(Fed::Fence),
            (None, Some(ring), Feeds::Progress) => {
                ring.submission().push_signalling(entry, &progress).map(|_| Fed::Nothing)
            }
            (None, Some(ring), Feeds::Future) => ring.submission().push_future(entry).map(Fed::Future),
            (None, None, _) => return false,
        };
        match pushed {
            Ok(fed) => {
                self.check_push(ring, &record, None);
                self.accept(ring, producer, uid, record, cancel, message);
                let fence = match fed {
                    Fed::Nothing => return true,
                    Fed::Fence(fence) => fence,
                    Fed::Future(future) => self.keep_future(ring, uid, future),
                };
                lock(&self.book).records[uid].end_fence = Some(fence.clone());
                self.ends.push((uid, fence));
                true
            }
            Err(error) => {
                self.engines[self.rings[ring].engine].strips = strips;
                if let Some(message) = message {
                    lock(&self.book).rings[message.to].coming_back += 1;
                }
                self.check_push(ring, &record, Some(&error.reason));
                false
            }
        }
    }

    fn push_whole(&mut self, ring: usize, producer: usize, plans: &[Plan]) {
        let (first, messages) = {
            let book = lock(&self.book);
            (book.records.len(), book.messages.len())
        };
        let engine = self.rings[ring].engine;
        let strips = self.engines[engine].strips;
        let mut built: Vec<Built> = Vec::new();
        for plan in plans {
            let sent = built.iter().filter(|built| built.message.is_some()).count();
            let plan = Plan { feeds: Feeds::Nothing, ..plan.clone() };
            built.extend(self.build(ring, producer, &plan, first + built.len(), messages + sent));
        }
        let (entries, notes): (Vec<_>, Vec<_>) =
            built.into_iter().map(|built| (built.entry, (built.record, built.cancel, built.message))).unzip();
        let place = &mut self.rings[ring];
        let from = &mut place.producers[producer];
        let pushed = match (&mut from.submitter, &mut place.ring) {
            (Some(to), _) => to.push_chain(entries),
            (None, Some(ring)) => ring.submission().push_chain(entries),
            (None, None) => return,
        };
        let refused = pushed.err().map(|error| (error.at, error.reason));
        if refused.is_some() {
            self.engines[engine].strips = strips;
            for message in notes.iter().filter_map(|(_, _, message)| message.as_ref()) {
                lock(&self.book).rings[message.to].coming_back += 1;
            }
        }
        for (at, (record, cancel, message)) in notes.into_iter().enumerate() {
            match &refused {
                // What was accepted on the way was given back: it is not in the book. But the ring has met its peers.
                Some((which, why)) if at == *which => {
                    if *which == 0 {
                        self.check_push(ring, &record, Some(why));
                    } else if !is_early(why) {
                        lock(&self.book).rings[ring].met.extend(record.target);
                    }
                    return;
                }
                Some(_) => lock(&self.book).rings[ring].met.extend(record.target),
                None => {
                    self.check_push(ring, &record, None);
                    self.accept(ring, producer, first + at, record, cancel, message);
                }
            }
        }
    }

    fn accept(
        &mut self,
        ring: usize,
        producer: usize,
        uid: usize,
        mut record: Record,
        cancel: Option<CancelBook>,
        message: Option<Message>,
    ) {
        let mut book = lock(&self.book);
        let from = &mut self.rings[ring].producers[producer];
        record.before = from.open;
        if let Some(before) = from.open {
            book.records[before].after = Some(uid);
        }
        from.open = record.flags.intersects(EntryFlags::CHAINED).then_some(uid);
        from.unsubmitted.push(uid);
        if let Some(key) = record.plan.key {
            book.rings[ring].keys[key as usize].accepted += 1;
        }
        book.rings[ring].drains |= record.flags.contains(EntryFlags::IO_DRAIN);
        book.requests.extend(record.request.map(|request| (request, uid)));
        if let Some(place) = record.place {
            book.pieces.insert((record.engine, place.local), uid);
        }
        book.cancels.extend(cancel);
        book.messages.extend(message);
        book.say(|| format!("    entry {uid} on ring {ring}"));
        book.records.push(record);
        book.open.push(uid);
    }

    /// The entry of a plan, or `None` if what it is about is not there.
    fn build(&mut self, ring: usize, producer: usize, plan: &Plan, uid: usize, messages: usize) -> Option<Built> {
        let engine = self.rings[ring].engine;
        let (plan, place) = &self.engines[engine].strips.lay(plan);
        let place = *place;
        let (mut cancel, mut message, mut target) = (None, None, None);
        let cancels = |mark: Mark, timeouts_only| {
            Some(CancelBook { ring, whom: mark, by: Some(uid), timeouts_only, future: false, over: None })
        };
        let entry = match plan.op {
            PlanOp::Nop(res) => opcode::Nop::new().result(res).build(),
            PlanOp::Bad => opcode::Nop::new().bad().build(),
            PlanOp::Wait => opcode::Wait::new().build(),
            PlanOp::Transfer { write, peer, ref parts, vectored, .. } => {
                let world = &self.engines[engine];
                let segment = world.peers[peer as usize % world.peers.len()].clone();
                let region = world.regions.get(place.map_or(0, |place| place.region))?;
                // A vectored entry without a part has no segment.
                target = (!parts.is_empty()).then_some(segment.inner.target);
                let ends = parts.iter().enumerate().map(|(at, &len)| {
                    let local = place.map_or(Book::local(uid, at), |place| place.local);
                    let start = (local - region.address()) as usize;
                    let slice = region.slice(start..start + usize::from(len)).expect("the region is large");
                    let remote = match place {
                        Some(place) => strips::remote(&segment, place, u64::from(len)),
                        None => segment.at(Book::remote(uid, at)),
                    };
                    (slice, remote)
                });
                let mut ends: Vec<_> = ends.collect();
                match (vectored, write) {
                    (true, true) => opcode::Writev::new(ends).build(),
                    (true, false) => opcode::Readv::new(ends).build(),
                    (false, _) => {
                        let (local, remote) = ends.pop().expect("it has a part");
                        if write {
                            opcode::Write::new(local, remote).build()
                        } else {
                            opcode::Read::new(local, remote).build()
                        }
                    }
                }
            }
            PlanOp::Timeout { span, repeats, success } => {
                let mut timeout = opcode::Timeout::new(Duration::from_nanos(span));
                if let Some(repeats) = repeats {
                    timeout = timeout.multishot(repeats);
                }
                if success { timeout.etime_success().build() } else { timeout.build() }
            }
            PlanOp::LinkTimeout(span) => opcode::LinkTimeout::new(Duration::from_nanos(span)).build(),
            PlanOp::Cancel { what, all, detach } => {
                let (select, mark) = self.select(ring, what);
                cancel = cancels(mark, false);
                let mut entry = opcode::Cancel::new(select);
                if all {
                    entry = entry.all();
                }
                if detach { entry.detach().build() } else { entry.build() }
            }
            PlanOp::Remove(whom) | PlanOp::Update(whom, _) => {
                let (_, mark) = self.select(ring, whom);
                let user_data = match mark {
                    Mark::Entry(whom) => Book::user_data(whom, None),
                    _ => u64::MAX,
                };
                match plan.op {
                    PlanOp::Update(_, span) => {
                        opcode::TimeoutUpdate::new(user_data, Duration::from_nanos(span)).build()
                    }
                    _ => {
                        cancel = cancels(mark, true);
                        opcode::TimeoutRemove::new(user_data).build()
                    }
                }
            }
            PlanOp::Store { ask, key, len, .. } => {
                let world = &self.engines[engine];
                let store = world.store.as_ref()?;
                target = Some(store.inner.target);
                let start = (Book::local(uid, 0) - super::book::REGION) as usize;
                let slice = world.regions.first()?.slice(start..start + usize::from(len)).expect("the region is large");
                let key = store::key(key);
                match ask {
                    Kind::Get => crate::store::opcode::Get::new(store, key, slice).build(),
                    Kind::Put => crate::store::opcode::Put::new(store, key, slice).build(),
                    Kind::Exist => crate::store::opcode::Exist::new(store, key).build(),
                    Kind::Remove => crate::store::opcode::Remove::new(store, key).build(),
                }
            }
            PlanOp::Message { ring: to, res } => {
                let to = to as usize % self.rings.len();
                let place = &mut self.rings[to];
                if place.messages.is_none() {
                    place.messages = Some(place.ring.as_mut()?.messages());
                    place.shared_units = true;
                }
                message = Some(Message { from: uid, to, res: res as i32, seen: false });
                opcode::MsgRing::new(place.messages.as_ref()?, MESSAGE + messages as u64, res).build()
            }
        };
        let watches = self.watches(plan);
        let mut entry = entry.flags(plan.flags).user_data(Book::user_data(uid, plan.key));
        for (_, fence) in &watches {
            entry = entry.wait(fence);
        }
        if plan.gate_limit > 0 {
            entry = entry.gate_limit(Duration::from_nanos(plan.gate_limit));
        }
        if plan.transfer_limit > 0 {
            entry = entry.transfer_limit(Duration::from_nanos(plan.transfer_limit));
        }
        let request = match &entry.payload {
            Payload::Other(Other::Store(request)) => Some(store::name_of(request)),
            _ => None,
        };
        let order = lock(&self.book).order();
        let number = self.rings[ring].producers[producer].number;
        let record = Record { place, request, ..Record::new(ring, number, plan, engine, target, order, watches) };
        Some(Built { entry, record, cancel, message })
    }

    fn watches(&self, plan: &Plan) -> Vec<(Watch, Fence)> {
        let watch = |wait: &Wait| match *wait {
            Wait::Host(at) => Some((Watch::Host(at as usize), self.hosts[at as usize].1.clone())),
            Wait::Point(at, value) => {
                let at = at as usize % self.timelines.len();
                Some((Watch::Point(at, value), self.timelines[at].1.at(value)))
            }
            Wait::Polled(at) => Some((Watch::Polled(at as usize), self.polled[at as usize].clone())),
            Wait::End(back) => {
                let (uid, fence) = self.ends.iter().rev().nth(back as usize)?;
                Some((Watch::End(*uid), fence.clone()))
            }
            Wait::Prefix(back) => {
                let value = self.progress.reserved().checked_sub(u64::from(back)).filter(|&value| value > 0)?;
                Some((Watch::Prefix, self.progress.at(value).expect("it is reserved")))
            }
        };
        plan.waits.iter().filter_map(watch).collect()
    }

    /// Whether a push's answer can be, by what the book knows of the ring.
    fn check_push(&mut self, ring: usize, record: &Record, refusal: Option<&Refusal>) {
        let mut book = lock(&self.book);
        let (least, most) = book.units(ring);
        let (capacity, spare) = (book.rings[ring].capacity, self.spare_units(ring));
        let dead = book.dead[self.rings[ring].core];
        let stale = record.target.is_some_and(|target| book.stale.contains(&(record.engine, target)));
        let early = refusal.is_some_and(is_early);
        let share = record.target.filter(|_| !early).map(|target| {
            book.rings[ring].met.insert(target);
            let alone = book.rings[ring].met.len() == 1;
            let overflowing = self.rings[ring].ring.as_ref().is_some_and(super::checks::is_overflowing);
            (book.share(ring, target, overflowing), alone)
        });
        let eighth = (capacity / 8).max(1) as usize;
        let cancels = matches!(record.plan.op, PlanOp::Cancel { .. } | PlanOp::Remove(_));
        let reserve = if cancels { u64::from(Ring::CANCEL_RESERVE) } else { 0 };
        let wrong = match refusal {
            None if least >= capacity + reserve => Some(format!("accepted, and {least} of {capacity} units are taken")),
            None if stale => Some("accepted, and its segment was reopened".to_owned()),
            None => share.and_then(|(share, alone)| {
                let limit = if share.overdue.0 > 0 { capacity / 8 } else { capacity * 3 / 4 }.max(1);
                (!alone && share.taken.0 >= limit).then(|| format!("accepted, and its peer has {share:?} of {limit}"))
            }),
            Some(Refusal::Full { .. }) if most + spare >= capacity => None,
            Some(Refusal::SegmentShare { limit, .. }) => {
                let share = share.map(|(share, alone)| (share.taken.1 >= u64::from(*limit), alone));
                (share != Some((true, false)) || u64::from(*limit) != (capacity * 3 / 4).max(1))
                    .then(|| format!("its peer has not its share: {share:?}"))
            }
            Some(Refusal::SegmentOverdue { limit, .. }) => {
                let share =
                    share.map(|(share, alone)| (share.taken.1 >= u64::from(*limit), share.overdue.1 > 0, alone));
                (share != Some((true, true, false)) || u64::from(*limit) != (capacity / 8).max(1))
                    .then(|| format!("its peer is not sick: {share:?}"))
            }
            Some(Refusal::NoSideBlock { .. }) => {
                let users = book.live(ring).filter(|(_, record)| record.has_side()).count();
                (users < eighth).then(|| format!("{users} entries with side blocks"))
            }
            Some(Refusal::NoPartList { .. }) => {
                let vectored = |record: &Record| matches!(record.plan.op, PlanOp::Transfer { vectored: true, .. });
                let kept =
                    |record: &Record| record.ended.is_none_or(|seen| seen.flags.contains(crate::CqeFlags::UNQUIET));
                let mine = book.records.iter().filter(|record| record.ring == ring);
                let users = mine.filter(|record| vectored(record) && kept(record)).count();
                (users < eighth).then(|| format!("{users} vectored entries"))
            }
            Some(Refusal::PollerDead) if dead => None,
            Some(Refusal::Closed) if book.rings[ring].closing => None,
            Some(Refusal::StaleSegment(_)) if stale => None,
            Some(Refusal::TargetFull { .. } | Refusal::TargetClosed) if record.is_message() => None,
            Some(Refusal::WindowFull { .. }) if record.plan.feeds == Feeds::Progress => None,
            Some(other) => Some(format!("refused with {other:?}, and {most} of {capacity} units are taken")),
        };
        if let Some(wrong) = wrong {
            let plan = &record.plan;
            book.violate(format!("a push to ring {ring} of {plan:?}: {wrong}"));
        }
    }
}

/// True if a push was refused before it came to its peer's share.
fn is_early(why: &Refusal) -> bool {
    matches!(
        why,
        Refusal::Closed
            | Refusal::PollerDead
            | Refusal::StaleSegment(_)
            | Refusal::TargetClosed
            | Refusal::NoSideBlock { .. }
            | Refusal::NoPartList { .. }
    )
}

/// What a peer has of a ring: at least and at most.
#[derive(Clone, Copy, Debug)]
struct ShareBook {
    taken: (u64, u64),
    overdue: (u64, u64),
}

impl Book {
    fn share(&self, ring: usize, target: u32, overflowing: bool) -> ShareBook {
        let mut share = ShareBook { taken: (0, 0), overdue: (0, 0) };
        for (_, record) in self.live(ring).filter(|(_, record)| record.target == Some(target)) {
            let overdue = record.result.is_some();
            share.taken.0 += u64::from(!self.may_be_silent(record));
            share.taken.1 += 1;
            share.overdue.0 += u64::from(overdue && record.touching > 0);
            share.overdue.1 += u64::from(overdue || (overflowing && record.was_issued()) || self.may_be_silent(record));
        }
        share
    }
}

impl Record {
    fn new(
        ring: usize,
        producer: u64,
        plan: &Plan,
        engine: usize,
        target: Option<u32>,
        accepted_order: u64,
        watches: Vec<(Watch, Fence)>,
    ) -> Record {
        let (flags, plan) = (plan.flags, plan.clone());
        Record { ring, producer, flags, plan, engine, target, accepted_order, watches, ..Record::blank() }
    }

    fn is_message(&self) -> bool {
        matches!(self.plan.op, PlanOp::Message { .. })
    }
}
