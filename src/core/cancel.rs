//! Cancelling and timeouts: ending entries before their time.

use std::sync::Arc;

use super::index::Index;
use super::slots::{Slot, State};
use super::{Core, RELEASE_BUDGET};
use crate::code::{Stage, errno};
use crate::cqe::{Cqe, CqeFlags};
use crate::fence::FenceInner;
use crate::opcode::Select;
use crate::ring::control::Reply;
use crate::ring::future::Route;
use crate::sqe::{Opcode, Sqe, op_flags};
use crate::trace::event;
use crate::transport::Nanos;

/// A caller that waits for quiet.
#[derive(Debug)]
pub(super) struct Quiescing {
    pub(super) select: Select,
    /// What was taken later does not count.
    pub(super) since: Nanos,
    pub(super) reply: Arc<Reply<()>>,
}

/// What cancelling did to an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Cancelled,
    /// The transport has it.
    TooLate,
}

impl Core {
    /// A Cancel or TimeoutRemove does its work, and has its result.
    pub(super) fn cancel(&mut self, by: u32) {
        let Sqe { op_flags, local, .. } = self.slots[by].sqe;
        let (cancelled, too_late) = self.cancel_matching(self.slots[by].ring, Some(by), op_flags, local);
        let res = match cancelled {
            _ if op_flags & op_flags::ALL != 0 => cancelled as i32,
            0 if too_late => -errno::EALREADY,
            0 => -errno::ENOENT,
            _ => 0,
        };
        self.conclude(by, res, if res < 0 { Stage::Cancel } else { Stage::Done }, 0);
    }

    /// Cancels what is meant, except `by` itself: how many, and whether the transport had one that was to be cancelled.
    pub(super) fn cancel_matching(&mut self, ring: u32, by: Option<u32>, op_flags: u16, key: u64) -> (usize, bool) {
        let all = op_flags & op_flags::ALL != 0;
        let (mut cancelled, mut too_late) = (0, false);
        let mut held = Vec::new();
        for slot in self.matches(ring, by, op_flags, key, all) {
            match self.cancel_one(slot, op_flags & op_flags::DETACH != 0) {
                Some(Outcome::Cancelled) => {
                    cancelled += 1;
                    held.extend((self.slots[slot].state == State::Held).then_some(slot));
                }
                Some(Outcome::TooLate) => too_late = true,
                None => continue,
            }
            if !all {
                break;
            }
        }
        // With the first of a chain its rest ends, so this comes when all that is meant has been found.
        held.into_iter().for_each(|slot| self.end_deferred(slot));
        (cancelled, too_late)
    }

    /// Nobody wants the entry any more that has this future.
    pub(super) fn disown(&mut self, entry: &FenceInner) {
        if let Some(token) = entry.route().and_then(Route::disown)
            && let Some(slot) = self.slots.find(token)
        {
            self.cancel_one(slot, false);
            self.end_deferred(slot);
        }
    }

    /// Answers the callers for whom nothing is left to wait for.
    #[inline]
    pub(super) fn answer_quiet(&mut self, ring: u32) {
        if self.ring_mut(ring).is_some_and(|ring| !ring.quiescing.is_empty()) {
            self.answer_some(ring);
        }
    }

    fn answer_some(&mut self, ring: u32) {
        let state = self.ring(ring);
        state.tell_ended();
        let mut waiting = std::mem::take(&mut state.quiescing);
        waiting.retain(|Quiescing { select, since, reply }| {
            let busy = self.scan(ring, |entry| {
                let touches = entry.state != State::Waiting || !entry.quiet;
                touches && entry.taken <= *since && is_selected(entry, *select)
            });
            if busy.is_empty() {
                reply.give(());
            }
            !busy.is_empty()
        });
        self.ring(ring).quiescing = waiting;
    }

    /// The slots that a Cancel means, oldest first; no more than one parked one unless `all` are asked for.
    fn matches(&mut self, ring: u32, by: Option<u32>, op_flags: u16, key: u64, all: bool) -> Vec<u32> {
        let select = Select { op_flags, key };
        if op_flags & (op_flags::ANY | op_flags::SEGMENT | op_flags::REGION) != 0 {
            let mut found = self.scan(ring, |entry| is_selected(entry, select));
            found.retain(|&slot| Some(slot) != by);
            return found;
        }
        let timeouts = op_flags & op_flags::TIMEOUTS != 0;
        let mut found = Vec::new();
        let mut next = self.rings[ring as usize].as_ref().and_then(|ring| ring.index.first(key));
        while let Some(slot) = next {
            next = Index::after(&mut self.slots, slot);
            let meant = !timeouts || self.slots[slot].state == State::Timing;
            if Some(slot) != by
                && meant
                && self.slots[slot].sqe.op != Opcode::LinkTimeout
                && !self.slots.member(slot).cancelled
            {
                found.push(slot);
                if !all {
                    return found;
                }
            }
        }
        if !timeouts {
            // With the transport, or waiting for nothing else: not in the index.
            let others = self.scan(ring, |entry| is_selected(entry, select));
            found.extend(others.into_iter().filter(|&slot| Some(slot) != by && !self.slots.member(slot).indexed));
        }
        found
    }

    /// A ring's entries for which `meant` holds, oldest first.
    fn scan(&self, ring: u32, meant: impl Fn(&Slot) -> bool) -> Vec<u32> {
        let own = |slot: &u32| self.slots[*slot].ring == ring && meant(&self.slots[*slot]);
        let mut found: Vec<u32> = self.slots.in_use().filter(own).collect();
        found.sort_unstable_by_key(|&slot| self.slots.sequence(slot));
        found
    }

    /// Cancels one entry, unless it has ended, is marked already, or is a LinkTimeout.
    fn cancel_one(&mut self, slot: u32, detach: bool) -> Option<Outcome> {
        if self.slots[slot].sqe.op == Opcode::LinkTimeout || self.slots.member(slot).cancelled {
            return None;
        }
        match self.slots[slot].state {
            State::Free | State::Guarding | State::Overdue | State::Waiting => return None,
            State::Held => self.slots.member(slot).cancelled = true,
            State::Issuing | State::Issued if !detach => return Some(Outcome::TooLate),
            State::Gated | State::Timing | State::Ready | State::Issuing | State::Issued => {
                self.cut_short(slot, errno::ECANCELED, Stage::Cancel);
            }
        }
        Some(Outcome::Cancelled)
    }

    /// Ends an entry that has started. What the transport has is detached: its end is told later.
    pub(super) fn cut_short(&mut self, slot: u32, errno: i32, stage: Stage) {
        match self.slots[slot].state {
            State::Gated => self.leave_gate(slot),
            State::Ready => self.leave_ready(slot),
            State::Issuing | State::Issued => {
                if self.slots[slot].state == State::Issuing {
                    self.leave_ready(slot);
                }
                match self.slots[slot].sqe.parts() {
                    Some(parts) => self.slots[slot].quiet = parts.is_quiet(),
                    None => {
                        self.slots[slot].quiet = false;
                        self.slots.member(slot).detached = true;
                    }
                }
            }
            State::Free | State::Held | State::Timing | State::Guarding | State::Overdue | State::Waiting => {}
        }
        self.conclude(slot, -errno, stage, 0);
    }

    /// A cancelled entry ends at once, with what fails behind it, if it is a unit behind a drain or the first of one. Any other
    /// whose turn has not come keeps its place in the order of completions.
    pub(super) fn end_deferred(&mut self, mut slot: u32) {
        let ring = self.slots[slot].ring;
        while self.slots[slot].state == State::Held && self.slots.member(slot).cancelled {
            let Some(at) = self.ring(ring).deferred.iter().position(|deferred| deferred.head == slot) else { return };
            match self.end(slot, -errno::ECANCELED, Stage::Cancel, 0) {
                Some(super::chain::Step::Start(rest)) => {
                    // What a hard link lets start stays behind the drain, unless it was cancelled before.
                    self.ring(ring).deferred[at].head = rest;
                    slot = rest;
                }
                failed => {
                    // Nothing behind it waits for the unit from here on.
                    self.ring(ring).deferred.remove(at);
                    self.fail_at_once(failed);
                    return;
                }
            }
        }
    }

    /// Starts a Timeout.
    pub(super) fn start_timeout(&mut self, slot: u32) {
        let Sqe { op_flags, local, .. } = self.slots[slot].sqe;
        let due = if op_flags & op_flags::ABSOLUTE != 0 { local } else { self.now.saturating_add(local) };
        self.slots[slot].state = State::Timing;
        self.slots[slot].sqe.remote = due;
        self.timers.set(slot, due);
        self.park(slot);
    }

    /// A TimeoutUpdate does its work, and has its result.
    pub(super) fn update_timeout(&mut self, by: u32) {
        let Sqe { local: key, remote: span, .. } = self.slots[by].sqe;
        let ring = self.slots[by].ring;
        let found = self.matches(ring, Some(by), op_flags::TIMEOUTS, key, false);
        if let Some(&slot) = found.first() {
            let due = self.now.saturating_add(span);
            (self.slots[slot].sqe.local, self.slots[slot].sqe.remote) = (span, due);
            self.timers.set(slot, due);
            self.conclude(by, 0, Stage::Done, 0);
        } else {
            self.conclude(by, -errno::ENOENT, Stage::Cancel, 0);
        }
    }

    /// Ends an entry that is late, at the stage that it has come to.
    fn cut_late(&mut self, slot: u32) {
        let began = match self.slots[slot].state {
            State::Issuing | State::Issued => true,
            // Tried once, merged, and to be tried again.
            State::Ready => self.slots.member(slot).again,
            _ => false,
        };
        self.cut_short(slot, errno::ETIME, if began { Stage::Transfer } else { Stage::Gate });
    }

    /// Lets a bounded number of slots know that their time has come.
    #[inline]
    pub(super) fn expire(&mut self) -> bool {
        self.timers.first().is_some_and(|(due, _)| due <= self.now) && self.expire_some()
    }

    fn expire_some(&mut self) -> bool {
        let mut any = false;
        let mut settled = false;
        let (mut at_gate, mut with_transport) = (0, 0);
        for _ in 0..RELEASE_BUDGET {
            let Some((_, slot)) = self.timers.first().filter(|&(due, _)| due <= self.now) else { break };
            any = true;
            let limited = match self.slots[slot].state {
                State::Guarding => self.slots.member(slot).guarded,
                _ => slot,
            };
            if matches!(self.slots[limited].state, State::Issuing | State::Issued) && !settled {
                // It may have ended: once in a turn every driver says what it knows.
                self.settle_drivers();
                settled = true;
                continue;
            }
            self.timers.remove(slot);
            match self.slots[slot].state {
                State::Timing => self.time_out(slot),
                State::Guarding => self.guard_fires(slot),
                State::Gated | State::Ready => {
                    at_gate += 1;
                    self.cut_late(slot);
                }
                State::Issuing | State::Issued => {
                    with_transport += 1;
                    self.cut_late(slot);
                }
                state => unreachable!("a slot in state {state:?} has no timer"),
            }
        }
        if at_gate + with_transport > 0 {
            event!(DEBUG, at_gate, with_transport, "limits passed");
        }
        any
    }

    /// Ends the entries whose values have expired: a stream waited for them as long as it was to. One whose turn has not come
    /// ends when it does.
    #[inline]
    pub(super) fn end_expired(&mut self) -> bool {
        self.gate.take_expired() && self.cut_expired()
    }

    fn cut_expired(&mut self) -> bool {
        let expired = |slot: &u32| self.slots[*slot].sqe.expiring().is_some_and(|(_, expired)| expired);
        let all: Vec<u32> = self.slots.in_use().filter(expired).collect();
        if all.iter().any(|&slot| matches!(self.slots[slot].state, State::Issuing | State::Issued)) {
            // As in `expire`: what has ended is not called late.
            self.settle_drivers();
        }
        for slot in all {
            match self.slots[slot].state {
                State::Gated | State::Timing | State::Ready | State::Issuing | State::Issued => self.cut_late(slot),
                State::Free | State::Held | State::Guarding | State::Overdue | State::Waiting => {}
            }
        }
        true
    }

    fn time_out(&mut self, slot: u32) {
        let entry = &mut self.slots[slot];
        let Sqe { op_flags, local: span, remote: due, user_data, .. } = entry.sqe;
        let ring = self.rings[entry.ring as usize].as_mut().expect("a ring outlives its entries");
        let again = op_flags & op_flags::MULTISHOT != 0 && entry.sqe.len != 1;
        // A tick that finds the CQ full is the last: it waits in its slot as any last completion does.
        // To a future only the last one matters.
        if again && (entry.sqe.is_routed() || ring.has_room()) {
            entry.sqe.len = entry.sqe.len.saturating_sub(1);
            if !entry.sqe.is_routed() {
                let flags = CqeFlags::MORE.bits() | Stage::Done.bits();
                ring.post(Cqe::new(user_data, -errno::ETIME, flags, 0, self.now - entry.taken, 0));
            }
            let next = due.saturating_add(span.max(1));
            entry.sqe.remote = next;
            // One that is behind ticks in the next turn again, when all others have had theirs that were due by now.
            self.timers.set(slot, next.max(self.now.saturating_add(1)));
            return;
        }
        self.conclude(slot, -errno::ETIME, Stage::Done, 0);
    }

    fn guard_fires(&mut self, guard: u32) {
        let slot = self.slots.member(guard).guarded;
        let taken = self.take_guard(slot);
        debug_assert_eq!(taken, Some(guard));
        self.conclude(guard, -errno::ETIME, Stage::Done, 0);
        self.cut_short(slot, errno::ECANCELED, Stage::Cancel);
    }
}

fn is_selected(entry: &Slot, select: Select) -> bool {
    let Slot { sqe, .. } = entry;
    match select.op_flags {
        flags if flags & op_flags::SEGMENT != 0 => sqe.is_transfer() && u64::from(sqe.target) == select.key,
        flags if flags & op_flags::REGION != 0 => sqe.is_transfer() && sqe.uses_region(select.key),
        flags if flags & op_flags::ANY != 0 => true,
        _ => sqe.user_data == select.key,
    }
}
