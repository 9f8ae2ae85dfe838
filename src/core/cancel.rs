//! Cancelling and timeouts: ending entries before their time.

use super::index::Index;
use super::slots::{Slot, State};
use super::{BUDGET, Core};
use crate::code::{Stage, errno};
use crate::cqe::{Cqe, CqeFlags};
use crate::sqe::{Opcode, Sqe, op_flags};

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
        let Sqe { op_flags, user_data: _, local, .. } = self.slots[by].sqe;
        let ring = self.slots[by].ring;
        let all = op_flags & op_flags::ALL != 0;
        let mut cancelled = 0;
        let mut too_late = false;
        for slot in self.matches(ring, by, op_flags, local, all) {
            match self.cancel_one(slot, op_flags & op_flags::DETACH != 0) {
                Some(Outcome::Cancelled) => cancelled += 1,
                Some(Outcome::TooLate) => too_late = true,
                None => continue,
            }
            if !all {
                break;
            }
        }
        let res = match () {
            () if all => cancelled,
            () if cancelled > 0 => 0,
            () if too_late => -errno::EALREADY,
            () => -errno::ENOENT,
        };
        self.conclude(by, res, if res < 0 { Stage::Cancel } else { Stage::Done }, 0);
    }

    /// The slots that a Cancel means, oldest first; no more than one parked one unless `all` are asked for.
    fn matches(&mut self, ring: u32, by: u32, op_flags: u16, key: u64, all: bool) -> Vec<u32> {
        if op_flags & (op_flags::ANY | op_flags::SEGMENT | op_flags::REGION) != 0 {
            let mut found = self.scan(ring, |entry| match () {
                () if op_flags & op_flags::SEGMENT != 0 => {
                    entry.sqe.is_transfer() && u64::from(entry.sqe.target) == key
                }
                () if op_flags & op_flags::REGION != 0 => entry.sqe.is_transfer() && entry.sqe.region_address() == key,
                () => true,
            });
            found.retain(|&slot| slot != by);
            return found;
        }
        let timeouts = op_flags & op_flags::TIMEOUTS != 0;
        let mut found = Vec::new();
        let mut next = self.rings[ring as usize].as_ref().and_then(|ring| ring.index.first(key));
        while let Some(slot) = next {
            next = Index::after(&mut self.slots, slot);
            let meant = !timeouts || self.slots[slot].state == State::Timing;
            if slot != by
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
            // With the transport, or on the way to it, without having waited: not in the index.
            let others = self.scan(ring, |entry| entry.sqe.user_data == key);
            found.extend(others.into_iter().filter(|&slot| slot != by && !self.slots.member(slot).indexed));
        }
        found
    }

    /// A ring's entries for which `meant` holds, oldest first.
    fn scan(&self, ring: u32, meant: impl Fn(&Slot) -> bool) -> Vec<u32> {
        let own = |slot: &u32| self.slots[*slot].ring == ring && meant(&self.slots[*slot]);
        let mut found: Vec<u32> = self.slots.in_use().filter(own).collect();
        found.sort_by_key(|&slot| self.slots[slot].taken);
        found
    }

    /// Cancels one entry, unless it has ended, is marked already, or is a LinkTimeout.
    fn cancel_one(&mut self, slot: u32, detach: bool) -> Option<Outcome> {
        if self.slots[slot].sqe.op == Opcode::LinkTimeout || self.slots.member(slot).cancelled {
            return None;
        }
        match self.slots[slot].state {
            State::Free | State::Guarding | State::Overdue | State::Waiting => return None,
            State::Held => self.cancel_held(slot),
            State::Issued if !detach => return Some(Outcome::TooLate),
            State::Gated | State::Timing | State::Ready | State::Issued => {
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
            State::Issued => {
                self.slots[slot].quiet = false;
                self.slots.member(slot).detached = true;
            }
            State::Free | State::Held | State::Timing | State::Guarding | State::Overdue | State::Waiting => {}
        }
        self.conclude(slot, -errno, stage, 0);
    }

    /// A member whose turn has not come keeps its place in the order of completions; a unit behind a drain ends at once.
    fn cancel_held(&mut self, slot: u32) {
        let ring = self.slots[slot].ring;
        let Some(at) = self.ring(ring).deferred.iter().position(|deferred| deferred.head == slot) else {
            self.slots.member(slot).cancelled = true;
            return;
        };
        self.leave_gate(slot);
        match self.end(slot, -errno::ECANCELED, Stage::Cancel, 0) {
            // What a hard link lets start stays behind the drain.
            Some(super::chain::Step::Start(rest)) => self.ring(ring).deferred[at].head = rest,
            step => {
                self.ring(ring).deferred.remove(at);
                self.steps.extend(step);
            }
        }
    }

    /// Starts a Timeout.
    pub(super) fn start_timeout(&mut self, slot: u32) {
        let Sqe { op_flags, local, .. } = self.slots[slot].sqe;
        let due = if op_flags & op_flags::ABSOLUTE != 0 { local } else { self.now.saturating_add(local) };
        self.slots[slot].state = State::Timing;
        self.timers.set(slot, due);
        self.park(slot);
    }

    /// A TimeoutUpdate does its work, and has its result.
    pub(super) fn update_timeout(&mut self, by: u32) {
        let Sqe { local: key, remote: span, .. } = self.slots[by].sqe;
        let ring = self.slots[by].ring;
        let found = self.matches(ring, by, op_flags::TIMEOUTS, key, false);
        if let Some(&slot) = found.first() {
            self.slots[slot].sqe.local = span;
            self.timers.set(slot, self.now.saturating_add(span));
            self.conclude(by, 0, Stage::Done, 0);
        } else {
            self.conclude(by, -errno::ENOENT, Stage::Cancel, 0);
        }
    }

    /// Lets a bounded number of slots know that their time has come.
    pub(super) fn expire(&mut self) -> bool {
        let mut any = false;
        let mut settled = false;
        for _ in 0..BUDGET {
            let Some((due, slot)) = self.timers.first().filter(|&(due, _)| due <= self.now) else { break };
            any = true;
            if self.slots[slot].state == State::Issued && !settled {
                // It may have ended: once in a turn every driver says what it knows.
                self.settle_drivers();
                settled = true;
                continue;
            }
            self.timers.remove(slot);
            match self.slots[slot].state {
                State::Timing => self.time_out(slot, due),
                State::Guarding => self.guard_fires(slot),
                State::Gated | State::Ready => self.cut_short(slot, errno::ETIME, Stage::Gate),
                State::Issued => self.cut_short(slot, errno::ETIME, Stage::Transfer),
                state => unreachable!("a slot in state {state:?} has no timer"),
            }
        }
        any
    }

    fn time_out(&mut self, slot: u32, due: u64) {
        let entry = &mut self.slots[slot];
        let Sqe { op_flags, local: span, user_data, .. } = entry.sqe;
        let ring = self.rings[entry.ring as usize].as_mut().expect("a ring outlives its entries");
        let again = op_flags & op_flags::MULTISHOT != 0 && entry.sqe.len != 1;
        // A tick that finds the CQ full is the last: it waits in its slot as any last completion does.
        if again && ring.has_room() {
            entry.sqe.len = entry.sqe.len.saturating_sub(1);
            let flags = CqeFlags::MORE.bits() | Stage::Done.bits();
            ring.post(Cqe::new(user_data, -errno::ETIME, flags, 0, self.now - entry.taken, 0));
            self.timers.set(slot, due.saturating_add(span.max(1)));
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
