//! What must hold after every turn.

use super::book::{Book, lock};
use super::program::{POLLED, PlanOp};
use super::record::{Record, Watch};
use super::world::World;
use crate::fence::FenceStatus;
use crate::transport::Nanos;
use crate::{CqeFlags, Ring, Submitter};

/// How seldom a polled fence that is waited for may be asked.
const ASK_AT_LEAST: Nanos = 5_000_000;

pub(super) fn is_overflowing(ring: &Ring) -> bool {
    ring.shared().overflowing.load(std::sync::atomic::Ordering::Relaxed)
}

impl World {
    /// The entries that a turn has to get on with.
    pub(super) fn before_turn(&mut self, core: usize) -> Vec<usize> {
        let turns = self.cores[core].turns;
        let mut book = lock(&self.book);
        book.turning = Some(core);
        book.offers.clear();
        book.issued_now.clear();
        book.again_now.clear();
        let now = self.now;
        for ring in book.rings.iter_mut().filter(|ring| ring.core == core) {
            if let Some(grace) = ring.grace.take() {
                ring.gives_up = Some(now + grace);
            }
        }
        let rings: Vec<_> = book.rings.iter().map(|ring| ring.core == core && !ring.finished).collect();
        book.forget_ended();
        let Book { open, records, .. } = &mut *book;
        for &uid in &*open {
            let record = &mut records[uid];
            let (issued, open) = (record.was_issued(), rings[record.ring]);
            if let Some(future) = record.future.as_mut().filter(|future| future.disowned && !issued && open) {
                future.unwanted = true;
            }
            if record.began.is_none() && record.submitted.is_some_and(|at| at <= turns) && rings[record.ring] {
                record.began = Some(now);
            }
        }
        if book.dead[core] {
            return Vec::new();
        }
        let live = book.open().filter(|(_, record)| {
            record.ended.is_none() && record.result.is_none() && record.began.is_some() && rings[record.ring]
        });
        // What the transport has may become ready again in this turn, for the next.
        let there = live.filter(|(_, record)| record.unresolved == 0 || !record.all_issued());
        let simple = there.filter(|(_, record)| !record.is_chained() && !book.rings[record.ring].drains);
        simple.filter(|(_, record)| book.is_ready(record)).map(|(uid, _)| uid).collect()
    }

    pub(super) fn after_turn(&mut self, core: usize, ready: Vec<usize>) {
        self.note_shifts(core);
        for ring in 0..self.rings.len() {
            if self.rings[ring].core == core {
                self.observe(ring);
            }
        }
        self.check_futures();
        let mut book = lock(&self.book);
        book.turning = None;
        // A turn that ended in a panic has told nobody what it took back.
        if !book.dead[core] {
            book.rings.iter_mut().filter(|ring| ring.core == core).for_each(|ring| ring.coming_back = 0);
        }
        book.check_drains_of_issued(|ring| self.is_hidden_ring(ring));
        drop(book);
        self.answer_calls();
        for ring in 0..self.rings.len() {
            if self.rings[ring].core == core {
                self.check_ring(ring);
            }
        }
        if !lock(&self.book).dead[core] {
            self.check_progress(core, ready);
        }
        self.check_regions();
    }

    /// Sees the completions that have become visible.
    fn observe(&mut self, at: usize) {
        let place = &self.rings[at];
        let queue = match (&place.ring, &place.ending) {
            (Some(ring), _) => Some(ring.reaping()),
            (None, ending) => ending.as_ref().map(|ending| &ending.rest),
        };
        let next = place.position..;
        let mut cqes: Vec<_> = next.map_while(|position| queue?.published_at(position)).collect();
        self.rings[at].position += cqes.len() as u64;
        let place = &self.rings[at];
        cqes.extend(place.ending.iter().flat_map(|ending| ending.closing.take_kept()));
        let overflowing = place.ring.as_ref().is_some_and(is_overflowing);
        let news = self.news_of(at);
        let mut book = lock(&self.book);
        book.rings[at].overflowing = overflowing;
        if !news.is_empty() {
            let queued: Vec<_> = cqes.iter().filter_map(|cqe| book.entry_of(at, cqe)).collect();
            for uid in queued.into_iter().chain(news.iter().map(|&future| self.futures[future].uid)) {
                book.records[uid].news = true;
            }
        }
        drop(book);
        for cqe in &cqes {
            if !news.is_empty() {
                self.hear_chain(&news, at, cqe);
            }
            lock(&self.book).observe(at, cqe);
        }
        news.into_iter().for_each(|future| self.hear(future));
        let Some(ending) = &self.rings[at].ending else { return };
        let mut book = lock(&self.book);
        if ending.closing.wait(std::time::Duration::ZERO) {
            book.rings[at].finished = true;
            book.say(|| format!("    ring {at} is closed"));
            let late = book.now.saturating_sub(ending.deadline);
            drop(book);
            self.closed(at, late);
        }
    }

    /// A waiting task was woken, and the units are counted.
    fn check_ring(&mut self, at: usize) {
        let place = &self.rings[at];
        let Some(ring) = &place.ring else { return };
        let mut book = lock(&self.book);
        if let Some(bell) = &place.listens
            && !bell.has_rung()
            && ring.reaping().ready() > 0
        {
            book.violate(format!("ring {at} has a completion, and the task that waits for it was not woken"));
        }
        let (least, most) = book.units(at);
        let owned = if place.shared_units { 0 } else { place.producers[0].unsubmitted.len() as u64 };
        let spare = self.spare_units(at);
        let outstanding = ring.shared().outstanding() - spare;
        if !(least.saturating_sub(owned)..=most.saturating_sub(owned)).contains(&outstanding) {
            book.violate(format!(
                "ring {at} counts {outstanding} outstanding, there are {least} to {most}, {owned} of them not submitted"
            ));
        }
        if outstanding + spare > book.rings[at].capacity + u64::from(Ring::CANCEL_RESERVE) {
            book.violate(format!("ring {at} has {outstanding} outstanding and less capacity"));
        }
    }

    /// Units of a ring that its producers have taken ahead of their entries.
    pub(super) fn spare_units(&self, at: usize) -> u64 {
        let place = &self.rings[at];
        let owner = place.ring.as_ref().map_or(0, Ring::spare_units);
        let submitters = place.producers.iter().filter_map(|producer| producer.submitter.as_ref());
        owner + submitters.map(Submitter::spare_units).sum::<u64>()
    }

    /// Whoever can go on does, and nobody is late.
    fn check_progress(&mut self, core: usize, ready: Vec<usize>) {
        let mut wrong = Vec::new();
        let mut book = lock(&self.book);
        for uid in ready {
            let record = &book.records[uid];
            if self.is_hidden_ring(record.ring) || record.result.is_some() || record.ended.is_some() {
                continue;
            }
            let quiet = book.may_be_silent(record);
            let stuck = match record.plan.op {
                PlanOp::Wait | PlanOp::Nop(_) | PlanOp::Cancel { .. } | PlanOp::Message { .. } => !quiet,
                PlanOp::Transfer { .. } if record.wholly_issued() || record.failed_at.is_some() => false,
                PlanOp::Transfer { .. } if book.again_now.contains(&uid) => false,
                PlanOp::Transfer { .. } => !quiet && book.could_have_been_issued(core, record),
                _ => false,
            };
            if stuck {
                wrong.push(format!("entry {uid}, {:?}, could go on and did not", record.plan));
            }
        }
        for (uid, record) in book.open() {
            // Whatever holds back the first of a chain, or one alone.
            let first = record.before.is_none() && record.began.is_some();
            let here = book.rings[record.ring].core == core && first;
            let unwanted = record.future.is_some_and(|future| future.unwanted);
            if here && unwanted && record.result.is_none() {
                wrong.push(format!("entry {uid}, {:?}, was cancelled by its future, and goes on", record.plan));
            }
        }
        for (due, uid) in self.dues(&book, core) {
            if due <= book.now {
                wrong.push(format!("entry {uid}, {:?}, was due at {due}", book.records[uid].plan));
            }
        }
        wrong.into_iter().for_each(|wrong| book.violate(wrong));
    }

    /// True if what has ended may not be visible.
    fn is_hidden_ring(&self, ring: usize) -> bool {
        self.rings[ring].ring.as_ref().is_none_or(is_overflowing)
    }

    /// When which entries' time has come that are easy to tell.
    fn dues(&self, book: &Book, core: usize) -> Vec<(Nanos, usize)> {
        let mut dues = Vec::new();
        let updates = |record: &Record| matches!(record.plan.op, PlanOp::Update(..));
        let updated = book.records.iter().any(updates);
        for (uid, record) in book.open() {
            let alone = !record.is_chained() && record.after.is_none() && !book.rings[record.ring].drains;
            let open = record.result.is_none() && record.ended.is_none() && !book.may_be_silent(record);
            let here = self.rings[record.ring].core == core && !self.is_hidden_ring(record.ring);
            if !here || !open {
                continue;
            }
            if let (Some(at), true) = (record.issued_at, record.plan.transfer_limit > 0) {
                dues.push((at + record.plan.transfer_limit, uid));
                continue;
            }
            let Some(began) = record.began.filter(|_| alone) else { continue };
            let gated = record.plan.gate_limit > 0 && !record.was_issued();
            match record.plan.op {
                PlanOp::Timeout { span, repeats: None, .. } if record.watches.is_empty() && !gated && !updated => {
                    dues.push((began + span, uid));
                }
                PlanOp::Transfer { .. } | PlanOp::Wait if gated => dues.push((began + record.plan.gate_limit, uid)),
                _ => {}
            }
        }
        dues
    }

    /// A poller that sleeps does not sleep past anything.
    pub(super) fn check_sleep(&self, core: usize, until: Option<Nanos>) {
        let mut book = lock(&self.book);
        if book.dead[core] {
            return;
        }
        let until_or_never = until.unwrap_or(Nanos::MAX);
        let missed: Vec<_> = self.dues(&book, core).into_iter().filter(|&(due, _)| due < until_or_never).collect();
        let awaits = (0..POLLED).any(|number| {
            book.open().any(|(_, record)| {
                let here = book.rings[record.ring].core == core && !book.rings[record.ring].closing;
                let waits = record.watches.iter().any(|(watch, fence)| {
                    matches!(watch, Watch::Polled(at) if *at == number) && fence.status() == FenceStatus::Pending
                });
                let alone = !record.is_chained() && !book.rings[record.ring].drains && !book.may_be_silent(record);
                here && waits
                    && alone
                    && !self.is_hidden_ring(record.ring)
                    && record.ended.is_none()
                    && record.began.is_some()
                    && record.plan.gate_limit == 0
            })
        });
        for (due, uid) in missed {
            let plan = book.records[uid].plan.clone();
            book.violate(format!("core {core} sleeps until {until:?}, and entry {uid}, {plan:?}, is due at {due}"));
        }
        // Whoever ends the engine of a ring wakes its core.
        let ending: Vec<_> = self.cores[core].core.iter().flat_map(crate::core::Core::ending_engines).collect();
        let closing = |&at: &usize| {
            let ring = &book.rings[at];
            let waits = !ring.finished && !ending.contains(&self.engines[self.rings[at].engine].id);
            ring.core == core && waits && ring.gives_up.is_some_and(|at| at < until_or_never)
        };
        if let Some(late) = (0..self.rings.len()).find(closing) {
            let gives_up = book.rings[late].gives_up;
            book.violate(format!(
                "core {core} sleeps until {until:?}, and ring {late}, which closes, waits to {gives_up:?}"
            ));
        }
        let now = book.now;
        if awaits && until.is_none_or(|until| until > now + ASK_AT_LEAST) {
            book.violate(format!(
                "core {core} sleeps until {until:?}, and an entry waits for a fence that is to be asked"
            ));
        }
    }

    /// Regions are in use as long as something may touch them, and by nobody else.
    pub(super) fn check_regions(&self) {
        let mut book = lock(&self.book);
        for (at, engine) in self.engines.iter().enumerate() {
            let mut bounds = vec![(0, 0); engine.regions.len()];
            for (_, record) in book.open().filter(|(_, record)| record.engine == at && record.uses_region()) {
                let Some((least, most)) = bounds.get_mut(record.region()) else { continue };
                let forever = record.ended.is_some_and(|seen| seen.flags.contains(CqeFlags::UNQUIET));
                *least += u64::from(record.touching > 0 || forever);
                *most += u64::from(record.ended.is_none() || forever);
            }
            for (number, (region, (least, most))) in engine.regions.iter().zip(bounds).enumerate() {
                let uses = region.region.uses();
                if !(least..=most).contains(&uses) {
                    book.violate(format!(
                        "region {number} of engine {at} has {uses} uses, there are {least} to {most}"
                    ));
                }
            }
        }
    }

    /// Calls that were answered.
    pub(super) fn answer_calls(&mut self) {
        let mut book = lock(&self.book);
        let order = book.order();
        self.cancels.retain(|call| {
            let Some(count) = call.reply.taken() else { return true };
            book.say(|| format!("    a cancel by call: {count}"));
            book.cancels[call.at].over = Some(order);
            book.cancelled_by_calls += count;
            false
        });
        self.quiesces.retain(|call| {
            if call.reply.taken().is_none() {
                return true;
            }
            if let Some(&uid) = call.means.iter().find(|&&uid| book.records[uid].touching > 0) {
                book.violate(format!("a call waited for quiet, and the buffer of entry {uid} is touched"));
            }
            false
        });
    }
}

impl Book {
    /// True if its peer had room for one operation more in the turn that has just ended.
    fn could_have_been_issued(&self, core: usize, record: &Record) -> bool {
        let Some(target) = record.target else { return false };
        if self.stale.contains(&(record.engine, target)) {
            return false;
        }
        let plan = self.plans[record.engine];
        let mine = |driver: usize| self.drivers[driver].core == core && self.drivers[driver].engine == record.engine;
        let mut offers = self.offers.iter().filter(|offer| offer.target == target && mine(offer.driver));
        match offers.next() {
            Some(offer) => {
                let batch = offer.taken >= plan.max_batch as usize;
                !offer.declined && !batch && !offer.most && offer.taken < offer.room
            }
            None => {
                let flying = (0..self.drivers.len()).filter(|&driver| mine(driver));
                let flying: usize = flying.map(|driver| self.flying(driver, target, true)).sum();
                // What has ended since has made room.
                flying < plan.max_in_flight as usize && !self.told_now(record.engine, target)
            }
        }
    }

    /// True if an operation towards the peer got its result in this very moment.
    fn told_now(&self, engine: usize, target: u32) -> bool {
        self.told_at.get(&(engine, target)) == Some(&self.now)
    }
}
