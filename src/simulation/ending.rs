//! The end of every program: everything is submitted, every fence is settled, everything that can end does, and the rings
//! are closed.

use super::book::{Mark, lock};
use super::program::{End, FenceEnd, HOSTS, POLLED, PlanOp, PolledEnd, TIMELINES, Waiting};
use super::record::{Truth, Watch};
use super::world::World;
use crate::opcode::Cancel;
use crate::transport::Nanos;

/// No program is awake for so many turns.
const MOST_TURNS: u32 = 20_000;
/// Nothing is due later, but for what never ends.
const HORIZON: Nanos = 10_000_000_000;
/// How much later than its bound a ring may be closed: a few turns.
const CLOSE_SLACK: Nanos = 20_000;
/// What a turn takes, at most.
const TURN: Nanos = 1_000;

impl World {
    pub(super) fn end(&mut self) {
        lock(&self.book).say(|| "the end begins".to_owned());
        lock(&self.book).no_more_faults();
        for ring in 0..self.rings.len() {
            for producer in 0..self.rings[ring].producers.len() {
                self.end_chain(ring, producer);
                self.submit_of(ring, producer);
            }
        }
        let end = self.program.ending.fences;
        (0..HOSTS).for_each(|host| self.end_host(host, end));
        (0..TIMELINES).for_each(|timeline| self.end_timeline(timeline, end));
        let answer = if end == FenceEnd::Signal { PolledEnd::Signal } else { PolledEnd::Fail(3) };
        (0..POLLED).for_each(|fence| self.answer(fence, answer));
        for (ring, uid) in self.endless() {
            let user_data = super::book::Book::user_data(uid, None);
            self.cancel_by_call(ring, Cancel::user_data(user_data), Mark::Entry(uid));
        }
        if self.program.ending.found {
            let mut book = lock(&self.book);
            book.find_lost();
            let wakers: Vec<_> = book.drivers.iter().map(|driver| driver.waker.clone()).collect();
            drop(book);
            wakers.iter().for_each(|waker| waker.wake());
        }
        self.rest();
        if self.is_wrong() {
            return;
        }
        self.check_all_ended(false);
        if self.program.ending.cancel && !self.is_wrong() {
            for ring in 0..self.rings.len() {
                self.cancel_by_call(ring, Cancel::any().detach(), Mark::Everything);
            }
            self.rest();
            self.check_all_ended(true);
        }
        if !self.is_wrong() {
            self.close_all();
        }
    }

    fn close_all(&mut self) {
        self.check_calls();
        self.check_pools();
        let closing = self.program.ending;
        if closing.alone {
            for engine in &mut self.engines {
                (engine.engine, engine.store) = (None, None);
                engine.regions.clear();
            }
        }
        self.closes_all = true;
        for ring in 0..self.rings.len() {
            if let Some(ending) = &mut self.rings[ring].ending {
                // Nobody may have given its core a turn before.
                ending.deadline = ending.deadline.max(self.now);
            }
            for producer in (1..self.rings[ring].producers.len()).rev() {
                self.remove_submitter(ring, producer);
            }
            self.close(ring, closing.grace);
        }
        self.rest();
        if self.is_wrong() {
            return;
        }
        let open = self.rings.iter().position(|ring| ring.ending.is_some());
        if let Some(ring) = open {
            self.violate(format!("ring {ring} is not closed, and nobody does anything about it"));
            return;
        }
        if self.cores.iter().any(|core| core.core.is_some()) {
            self.violate("all rings are closed, and a core is not done".into());
            return;
        }
        self.end_futures();
        self.check_last_words();
        lock(&self.book).check_cancel_counts();
        self.check_regions();
        // What never returned is let go of.
        lock(&self.book).find_lost();
        self.set_now(self.now + 1);
    }

    /// Gives turns as the pollers ask for them, until nobody has anything to do.
    fn rest(&mut self) {
        let start = self.now;
        let mut turns = 0;
        while !self.is_wrong() {
            self.open_gates();
            for ring in 0..self.rings.len() {
                self.reap(ring, usize::MAX);
            }
            let mut turned = false;
            for core in 0..self.cores.len() {
                if self.is_runnable(core) {
                    self.turn(core);
                    turned = true;
                    turns += 1;
                }
                if self.is_wrong() {
                    return;
                }
            }
            if turned {
                self.set_now(self.now + TURN);
                if turns > MOST_TURNS {
                    self.violate(format!("the pollers do not come to rest in {turns} turns"));
                }
                continue;
            }
            let Some(next) = self.next_moment() else { return };
            if next > start.saturating_add(HORIZON) {
                return;
            }
            self.set_now(next.max(self.now));
        }
    }

    /// When something happens that nobody in here makes happen.
    fn next_moment(&self) -> Option<Nanos> {
        let wakes = self.cores.iter().filter(|core| core.core.is_some()).filter_map(|core| core.asleep.flatten());
        let gates = self.engines.iter().filter_map(|engine| engine.closes_at);
        let book = lock(&self.book);
        let drivers = (0..book.drivers.len()).filter_map(|driver| {
            let wakes = book.plans[book.drivers[driver].engine].wait == Waiting::Wakes;
            book.next_look(driver).filter(|&at| wakes && at > self.now)
        });
        let shifts = book.shifts.iter().filter_map(|shift| shift.due);
        wakes.chain(gates).chain(drivers).chain(shifts).min()
    }

    /// A ring is closed.
    pub(super) fn closed(&mut self, at: usize, late: Nanos) {
        self.rings[at].ending = None;
        // Beyond the grace time it may end its engine, and others' rings on the way.
        let bound = self.program.ending.close.0 * self.program.engines.len() as u64 + CLOSE_SLACK;
        if late > bound && self.closes_all {
            self.violate(format!("ring {at} was closed {late} ns after its grace time"));
        }
    }

    /// The pollers are at rest, so everything has its result that is not stuck for a reason.
    fn check_all_ended(&mut self, cancelled: bool) {
        let mut stuck = self.stuck_for_a_reason();
        let mut book = lock(&self.book);
        if cancelled {
            // Only what is hard-linked to something that is not quiet waits on.
            for (uid, record) in book.records.iter().enumerate() {
                stuck[uid] =
                    book.waits_behind(record).is_some_and(|before| stuck[before] || book.records[before].touching > 0);
            }
        }
        let mut wrong = Vec::new();
        for (uid, record) in book.records.iter().enumerate() {
            let core = self.rings[record.ring].core;
            if book.dead[core] || book.rings[record.ring].closing || record.submitted.is_none() {
                continue;
            }
            let open = if record.touching > 0 { record.result.is_none() } else { record.ended.is_none() };
            if open && !stuck[uid] && !book.may_be_silent(record) {
                wrong.push(format!("entry {uid} on ring {}, {:?}, has not ended", record.ring, record.plan));
            }
        }
        wrong.into_iter().for_each(|wrong| book.violate(wrong));
    }

    /// Entries that wait for what never comes.
    fn stuck_for_a_reason(&self) -> Vec<bool> {
        let book = lock(&self.book);
        let mut stuck = vec![false; book.records.len()];
        let lost = |flight: &&super::record::Flight| match flight.end {
            End::Lost => true,
            End::Never => flight.told == 0,
            _ => false,
        };
        for (uid, record) in book.records.iter().enumerate() {
            let limited = record.plan.transfer_limit > 0 && record.plan.transfer_limit < HORIZON;
            let lost = book.flights.iter().filter(|flight| flight.is_of(uid)).any(|flight| lost(&flight));
            let dead = book.dead[self.rings[record.ring].core] || book.rings[record.ring].closing;
            // A call that never returns has its worker, and its keys.
            let hung = book.shifts.iter().any(|shift| shift.engine == record.engine && shift.due.is_none());
            let hangs = hung && record.request.is_some() && (record.unresolved > 0 || !record.was_issued());
            let lost = lost || hangs;
            stuck[uid] = (lost && !(limited && record.was_issued())) || dead || record.submitted.is_none();
        }
        loop {
            let mut more = Vec::new();
            for (uid, record) in book.records.iter().enumerate() {
                if stuck[uid] || (record.ended.is_some() && record.result.is_some()) {
                    continue;
                }
                let chain = book.waits_behind(record).is_some_and(|before| {
                    let unquiet = book.records[before].touching > 0;
                    stuck[before] || unquiet
                });
                let waits = record.watches.iter().any(|(watch, fence)| match watch {
                    Watch::End(of) => stuck[*of] && book.truth(watch, fence) == Truth::Pending,
                    Watch::Prefix => book.truth(watch, fence) == Truth::Pending,
                    _ => false,
                });
                let stuck_in_ring = |other: usize| stuck[other] && book.records[other].ring == record.ring;
                let drain = book.rings[record.ring].drains && (0..stuck.len()).any(stuck_in_ring);
                let clogged = record.target.is_some_and(|target| {
                    let flying = book.flights.iter().filter(|flight| {
                        flight.target == target
                            && book.drivers[flight.driver].engine == record.engine
                            && flight.told == 0
                    });
                    flying.count() >= book.plans[record.engine].max_in_flight as usize
                });
                // The end of an entry that comes after a drain which waits for us.
                let crossed =
                    record.watches.iter().any(|(watch, fence)| {
                        matches!(watch, Watch::End(_)) && book.truth(watch, fence) == Truth::Pending
                    }) && book.rings.iter().any(|ring| ring.drains);
                if chain || waits || drain || clogged || crossed {
                    more.push(uid);
                }
            }
            if more.is_empty() {
                return stuck;
            }
            more.into_iter().for_each(|uid| stuck[uid] = true);
        }
    }

    /// Whoever waited for quiet was told, unless something is not quiet.
    fn check_calls(&mut self) {
        let mut book = lock(&self.book);
        let mut wrong = Vec::new();
        for call in &self.quiesces {
            let gone = book.rings[call.ring].closing || book.dead[self.rings[call.ring].core];
            // What was submitted before the poller came to the call counts too.
            let busy = (0..book.records.len()).any(|uid| {
                let record = &book.records[uid];
                record.ring == call.ring && record.ended.is_none() && book.is_marked(call.mark, uid)
            });
            if !gone && !busy {
                wrong.push(format!("a call on ring {} waits for quiet, and it is", call.ring));
            }
        }
        for call in &self.cancels {
            let gone = book.rings[call.ring].closing || book.dead[self.rings[call.ring].core];
            if !gone {
                wrong.push(format!("a cancel on ring {} was not answered", call.ring));
            }
        }
        wrong.into_iter().for_each(|wrong| book.violate(wrong));
    }

    /// What entries hold from a ring's pools comes back.
    fn check_pools(&mut self) {
        let mut book = lock(&self.book);
        for (at, place) in self.rings.iter().enumerate() {
            let Some(ring) = &place.ring else { continue };
            let vectored = |record: &super::record::Record| match &record.plan.op {
                PlanOp::Transfer { vectored, .. } => *vectored,
                _ => false,
            };
            // One that ends in silence may be there still.
            let live: Vec<_> = book.live(at).map(|(_, record)| record).collect();
            let gated = live.iter().filter(|record| record.has_side() && !record.was_issued()).count();
            let listed = live.iter().filter(|record| vectored(record)).count();
            let sides = ring.shared().sides.count() - ring.shared().sides.unused();
            let lists = ring.shared().lists.in_use();
            if !book.dead[place.core] && (sides > gated || lists > listed) {
                book.violate(format!(
                    "ring {at} at rest has {sides} side blocks for {gated} entries and {lists} part lists for {listed}"
                ));
            }
        }
    }

    /// Every entry has had its last word, or a reason to say none; fences of ends agree with it.
    fn check_last_words(&mut self) {
        let mut book = lock(&self.book);
        let mut wrong = Vec::new();
        for (uid, record) in book.records.iter().enumerate() {
            // It came too late for a ring that closed.
            let late = record.began.is_none() && record.future.is_none();
            if let Some(fence) = &record.end_fence {
                let truth = book.truth(&Watch::Prefix, fence);
                if truth == Truth::Pending {
                    wrong.push(format!("entry {uid} is over, and its fence is pending"));
                }
                if let Some(first) = record.result {
                    let failed = first.res < 0 || first.flags.contains(crate::CqeFlags::MORE);
                    let lenient = matches!(record.plan.op, PlanOp::Timeout { success: true, .. });
                    if (truth == Truth::Signalled) == failed && !lenient {
                        wrong.push(format!("entry {uid} ended with {first:?}, and its fence is {truth:?}"));
                    }
                }
            }
            if record.ended.is_some() || late || record.plan.key.is_some() {
                continue;
            }
            let skips = record.skips() && record.future.is_none();
            if skips
                && !book.is_hidden(record)
                && let Some(why) = book.wrong_silence(record)
            {
                wrong.push(format!("entry {uid} on ring {}, {:?}, was silent: {why}", record.ring, record.plan));
            }
            if !(skips || book.may_be_silent(record)) {
                wrong.push(format!("entry {uid} on ring {}, {:?}, was lost", record.ring, record.plan));
            }
        }
        wrong.into_iter().for_each(|wrong| book.violate(wrong));
    }
}
