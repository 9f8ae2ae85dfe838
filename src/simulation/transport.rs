//! The book as the transport has it: what it is offered, takes and tells, and whether it should have been asked at all.

use super::book::{Book, DriverBook, Offer};
use super::net;
use super::program::{Break, End, EnginePlan, Fate, PlanOp, Waiting};
use super::record::{Flight, Truth};
use crate::core::BUDGET;
use crate::entry::EntryFlags;
use crate::transport::{Direction, Event, Nanos, Op, PollerWaker};

impl Book {
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
        let (gone, others) = std::mem::take(&mut self.flights).into_iter().partition(ours);
        self.flights = others;
        for flight in gone {
            for uid in flight.entries() {
                let record = &mut self.records[uid];
                if !flight.resolved() {
                    record.unresolved -= 1;
                    record.touching -= 1;
                } else if matches!(flight.end, End::Late(_) | End::Never) {
                    record.touching -= 1;
                }
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
        self.shifts.iter_mut().for_each(|shift| shift.due = shift.due.or(Some(now + 1)));
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
    pub(super) fn offered(&mut self, driver: usize, target: u32, ops: &[Op], now: Nanos) -> usize {
        let count = ops.len();
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
        let entries: usize = ops.iter().map(|op| self.parts_of(engine, op).map_or(0, |parts| parts.len())).sum();
        let most = entries >= BUDGET as usize;
        self.offers.push(Offer { driver, target, room, taken: take, declined: take < count, most });
        if take < count {
            self.say(|| format!("    peer {target} takes {take} of {count}"));
        }
        take
    }

    /// The driver panics: these may have been started.
    pub(super) fn was_offered(&mut self, engine: usize, ops: &[Op]) {
        for (uid, _) in ops.iter().filter_map(|op| self.parts_of(engine, op)).flatten().collect::<Vec<_>>() {
            self.records[uid].offered = true;
        }
    }

    /// The parts of entries that an operation is, one beside the other in local memory from its first byte to its last.
    fn parts_of(&self, engine: usize, op: &Op) -> Option<Vec<(usize, usize)>> {
        let (mut parts, mut at) = (Vec::with_capacity(1), op.local);
        let end = op.local + u64::from(op.len);
        while at < end {
            let (uid, part) = self.piece_at(engine, at)?;
            at += self.records[uid].len_of(part)?;
            parts.push((uid, part));
        }
        (at == end).then_some(parts)
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
        let Some(parts) = self.parts_of(self.drivers[driver].engine, op) else {
            self.violate(format!("an operation that is no entries' from end to end: {op:?}"));
            return;
        };
        let mut remote = op.remote;
        for &(uid, part) in &parts {
            let len = self.records[uid].len_of(part).unwrap_or_default();
            let own = Op { local: self.records[uid].local(uid, part), remote, len: len as u32, ..*op };
            if let Some(why) = self.wrong_to_issue(driver, target, uid, part, &own) {
                self.violate(format!("entry {uid}, part {part}: {why}"));
            }
            remote += len;
        }
        if parts.len() > 1 {
            if let Some(why) = self.wrong_to_merge(driver, &parts, op) {
                self.violate(format!("{parts:?} are merged: {why}"));
            }
            self.merged += 1;
        }
        for &(uid, part) in &parts {
            let record = &mut self.records[uid];
            record.issued |= 1 << part;
            record.issued_at.get_or_insert(now);
            record.unresolved += 1;
            record.touching += 1;
            self.issued_now.push(uid);
        }
        let fates = parts.iter().filter_map(|&(uid, part)| match self.records[uid].plan.op {
            // Parts have no identity of their own: that each has one result is a driver's duty.
            PlanOp::Transfer { fate: Fate { end: End::Twice(_), after, lag }, vectored: true, .. } => {
                Some((Fate { end: End::Lands, after, lag }, part))
            }
            PlanOp::Transfer { fate, .. } => Some((fate, part)),
            _ => None,
        });
        let fates: Vec<_> = fates.collect();
        let worst = fates.iter().find(|(fate, _)| fate.end != End::Lands).or(fates.first());
        let Some(&(Fate { after, lag, end }, part)) = worst else { return };
        let spread = part as u64 * 7_919 % 20_000;
        let faulty = !matches!(end, End::Lands | End::AtOnce(true));
        let result_due = now + after + spread;
        let ((uid, part), riders) = (parts[0], parts[1..].iter().map(|&(uid, _)| uid).collect());
        let len = u64::from(op.len);
        let flight = Flight { driver, target, token: op.token, uid, part, riders, len, end, result_due, lag, told: 0 };
        self.faults += u64::from(faulty) + u64::from(lag > 0);
        self.say(|| format!("    issue {} to peer {target}: {end:?} after {}", flight.name(), result_due - now));
        self.flights.push(flight);
        if matches!(end, End::AtOnce(_)) {
            net::tell(self, self.flights.len() - 1, out);
            self.flights.pop();
        }
    }

    /// What is in the way of entries being one operation, each of which may be issued.
    fn wrong_to_merge(&self, driver: usize, parts: &[(usize, usize)], op: &Op) -> Option<String> {
        let most = self.plans[self.drivers[driver].engine].max_merged;
        if op.len > most {
            return Some(format!("{} bytes, and the transport takes {most}", op.len));
        }
        let first = &self.records[parts[0].0];
        let registration = first.place.and_then(|place| place.registration);
        for &(uid, _) in parts {
            let record = &self.records[uid];
            if record.is_chained() {
                return Some(format!("{uid} is in a chain"));
            }
            if record.again {
                return Some(format!("{uid} was part of one that failed"));
            }
            if record.ring != first.ring || record.region() != first.region() {
                return Some(format!("{uid} is another ring's, or of another region"));
            }
            if registration.is_none() || record.place.and_then(|place| place.registration) != registration {
                return Some(format!("{uid} is of another registration than {registration:?}"));
            }
        }
        None
    }

    fn wrong_to_issue(&self, driver: usize, target: u32, uid: usize, part: usize, op: &Op) -> Option<String> {
        let record = &self.records[uid];
        let PlanOp::Transfer { write, ref parts, .. } = record.plan.op else {
            return Some("issued, and is no transfer".into());
        };
        let direction = if write { Direction::Write } else { Direction::Read };
        let right = (direction, record.remote(uid, part), parts.get(part).map(|&len| u32::from(len)), Some(target));
        if (op.direction, op.remote, Some(op.len), record.target) != right {
            return Some(format!("issued as {op:?} to {target}, asked for {right:?} to {:?}", record.target));
        }
        if (self.drivers[driver].engine, self.drivers[driver].core) != (record.engine, self.rings[record.ring].core) {
            return Some("issued to another engine's driver, or on another core".into());
        }
        if record.issued & 1 << part != 0 {
            return Some("issued twice".into());
        }
        self.wrong_to_start(uid)
    }

    /// What is in the way of an entry being given to whoever does it.
    pub(super) fn wrong_to_start(&self, uid: usize) -> Option<String> {
        let record = &self.records[uid];
        if record.submitted.is_none() {
            return Some("issued before it was submitted".into());
        }
        if let Some(seen) = record.result.or(record.ended) {
            return Some(format!("issued after its end {seen:?}"));
        }
        if record.future.is_some_and(|future| future.unwanted) {
            return Some("issued, and its future had cancelled it".into());
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

    /// The transport gives a result of an operation or says that it is quiet.
    pub(super) fn told(&mut self, flight: usize, event: Event) {
        let flight = &self.flights[flight];
        let (name, part, entries) = (flight.name(), flight.part, flight.entries().collect::<Vec<_>>());
        self.say(|| format!("    the transport says of {name}: {event:?}"));
        for &uid in &entries {
            let record = &mut self.records[uid];
            let Event::Result { res, stage, quiet, .. } = event else {
                record.touching -= 1;
                continue;
            };
            record.unresolved -= 1;
            record.touching -= usize::from(quiet);
            if let Some(target) = record.target {
                self.told_at.insert((record.engine, target), self.now);
            }
            if res < 0 && entries.len() > 1 && record.is_harmless(stage, quiet) {
                // It is not known which of them is to blame.
                (record.again, record.issued) = (true, 0);
                self.again_now.push(uid);
            } else if res < 0 {
                record.results.push((res, stage));
                record.failed_at.get_or_insert(self.now);
            } else {
                let own = if entries.len() > 1 { record.len_of(part).unwrap_or_default() as i32 } else { res };
                record.results.push((own, stage));
            }
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
}
