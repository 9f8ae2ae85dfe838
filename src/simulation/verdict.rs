//! Verdicts: whether a completion can be, by all that the book knows.

use super::book::{Book, CancelBook, Mark};
use super::program::PlanOp;
use super::record::{Flight, Record, Seen, Truth};
use crate::code::{Stage, errno};
use crate::cqe::CqeFlags;
use crate::entry::EntryFlags;
use crate::transport::Nanos;

impl Book {
    /// What is wrong with a completion, if anything is.
    pub(super) fn wrong_end(&self, uid: usize, seen: Seen) -> Option<String> {
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
            let silent = self.may_be_silent(before)
                || matches!(before.plan.op, PlanOp::LinkTimeout(_))
                || self.may_be_unseen(record, before);
            return (!silent && !ended_by_closing).then(|| "it has ended before the one before it in its chain".into());
        }
        let started = matches!(seen.stage, Stage::Done | Stage::Transfer);
        let first = before.result.or(before.ended)?;
        let hard = before.flags.contains(EntryFlags::IO_HARDLINK);
        let failed = self.failed(before, first);
        (started && failed && !hard).then(|| format!("it was started behind {first:?}"))
    }

    /// True if another entry may have ended before this one has, and it does not show yet: a future needs no room.
    fn may_be_unseen(&self, record: &Record, before: &Record) -> bool {
        let waits = record.future.is_some() && before.future.is_none() && self.rings[record.ring].overflowing;
        // Which of two came first, to a queue and to a future, does not show.
        waits || (before.news && record.future.is_some() != before.future.is_some())
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
    pub(super) fn wrong_in_drains(&self, uid: usize) -> Option<String> {
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
            let ended = ended || self.may_be_unseen(record, other);
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
            PlanOp::Store { .. } => record.results == [(res, Stage::Transfer)] && flags.is_empty(),
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
            if other.result.is_none() && self.may_be_unseen(record, other) {
                return None;
            }
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
                if record.request.is_some() {
                    let ended = record.touching == 0 && seen.flags.contains(CqeFlags::MORE);
                    return ended.then(|| "it is called late, and the call had returned".into());
                }
                let known = |flight: &Flight| flight.is_of(uid) && flight.told == 0 && flight.result_due <= self.now;
                let missed = self.flights.iter().any(known)
                    && !self.flights.iter().any(|flight| {
                        flight.is_of(uid) && flight.told == 0 && flight.due(true).is_none_or(|due| due > self.now)
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
                // A future takes back nothing that the transport has.
                let issued = record.issued != 0;
                let named = |cancel: &CancelBook| self.may_mean(cancel, uid) && !(cancel.future && issued);
                let named = self.cancels.iter().any(named);
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
            Mark::Region => record.uses_region() && record.region() == 0,
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
            let by_future = record.future.is_some_and(|future| future.disowned);
            by_cancel
                && !by_future
                && !matches!(record.plan.op, PlanOp::LinkTimeout(_))
                && !record.after.is_some_and(guard)
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
            Mark::Region => record.uses_region() && record.region() == 0,
            Mark::Everything => true,
            Mark::Nobody => false,
        }
    }
}
