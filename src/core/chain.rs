//! Chains and drains: what starts when something else has ended.
//!
//! A unit is a chain, or an entry alone. Its first member starts when it is taken, unless a drain holds it; each further one
//! when the one before has its result. Starting and failing members goes through a queue, so that a long chain neither
//! recurses nor makes a turn long.

use super::slots::{List, NONE, State};
use super::{BUDGET, Core, root_of};
use crate::code::{Stage, errno};
use crate::entry::EntryFlags;
use crate::sqe::{Opcode, Sqe, op_flags};

/// What a drain holds back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deferred {
    pub(super) head: u32,
    /// It waits for everything before it, and everything after it waits for it.
    drain: bool,
}

/// A step for a member of a chain whose time has come.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Start(u32),
    /// This one and the rest of its chain fail, because one before has: `root` is its errno. `hide`: without completions.
    Fail {
        slot: u32,
        hide: bool,
        root: i32,
    },
}

/// Whether a drain takes what was published before it on other queues. Not while another is at it: what is found then comes
/// before neither's end of the other queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gather {
    Yes,
    No,
}

impl Step {
    pub(super) fn slot(self) -> u32 {
        match self {
            Step::Start(slot) | Step::Fail { slot, .. } => slot,
        }
    }
}

impl Core {
    /// Takes a unit off the queues, whose first entry is `sqe`.
    pub(super) fn take_unit(&mut self, ring: u32, mut sqe: Sqe, gather: Gather) {
        let (mut head, mut last) = (NONE, NONE);
        let (mut drain, mut drain_next, mut bad) = (false, false, false);
        loop {
            let after = (last != NONE).then(|| self.slots[last].sqe.op);
            if after.is_some() || sqe.flags.intersects(EntryFlags::CHAINED) {
                sqe.never_merge();
            }
            let slot = self.take_slot(ring, &sqe);
            if let Some(route) = sqe.route() {
                self.slots.member(slot).cancelled = route.take(self.slots.token(slot));
            }
            if is_bad(&sqe, after) {
                self.slots.member(slot).bad = true;
                bad = true;
            }
            if sqe.flags.contains(EntryFlags::IO_DRAIN) {
                drain = true;
                // As io_uring has it: a drain within a chain is one before the chain and one after it.
                drain_next |= head != NONE;
            }
            if head == NONE {
                head = slot;
            } else {
                self.slots.member(last).next = slot;
            }
            last = slot;
            if !sqe.flags.intersects(EntryFlags::CHAINED) {
                break;
            }
            // A producer publishes closed chains only, so the next member is there.
            let Some(next) = self.ring(ring).next_of_unit() else { break };
            sqe = next;
        }
        if bad {
            self.fail_unit(head);
            return;
        }
        if drain && gather == Gather::Yes {
            self.take_earlier(ring);
        }
        let state = self.ring(ring);
        if !(state.is_draining() || drain) || bypasses_drains(&sqe, head == last) {
            self.start_unit(head);
            return;
        }
        let drain = drain || std::mem::take(&mut state.drain_next);
        state.drain_next = drain_next;
        state.deferred.push_back(Deferred { head, drain });
        let mut next = head;
        while next != NONE {
            self.park(next);
            next = self.slots.member(next).next;
        }
        if self.slots.member(head).cancelled {
            // Its future was dropped: it waits for no drain.
            self.end_deferred(head);
        }
        self.release_deferred(ring);
    }

    /// Takes a transfer that [starts at once](Sqe::starts_at_once), with what a unit of one and its start come to.
    pub(super) fn take_transfer(&mut self, ring: u32, sqe: &Sqe) {
        let state = self.ring(ring);
        let peer = state.meet(sqe);
        state.running += 1;
        let slot = self.slots.take_started(ring, sqe, peer, self.now);
        self.make_ready(slot);
    }

    /// Takes the transfers that come behind such a one, from the same producer and to peers that the core knows, at most
    /// `most`, with what [`take_transfer`](Self::take_transfer) does for each: once for a run of them to one peer, where that
    /// is enough. How many.
    pub(super) fn take_transfers(&mut self, ring: u32, most: u32) -> u32 {
        let Core { rings, slots, peers, drivers, ready_peers, now, .. } = self;
        let Some(Some(state)) = rings.get_mut(ring as usize) else { return 0 };
        let mut left = most;
        while left > 0 {
            let Some((met, index, run)) = state.peek_run(left) else { break };
            let (mut entries, mut count) = (List::new(), 0);
            for sqe in run {
                let slot = slots.take_started(ring, sqe, met, *now);
                entries.push_back(slots, slot);
                count += 1;
            }
            state.leave_run(met, count);
            left -= count;
            let peer = &mut peers[index as usize];
            peer.line_up_all(slots, entries);
            if peer.takes_turn(drivers) {
                ready_peers.push_back(index);
            }
        }
        most - left
    }

    /// Takes what other producers published before the drain that was just taken: all of it is earlier.
    fn take_earlier(&mut self, ring: u32) {
        let from_lane = self.ring(ring).from_lane;
        let mut left = self.ring(ring).published_elsewhere();
        if left > 0 && !from_lane {
            // A lane is announced before anything is published from it.
            self.meet_lanes();
        }
        while left > 0 {
            let state = self.ring(ring);
            let next = if from_lane { state.next_of_owner() } else { state.next_of_lanes() };
            let Some(sqe) = next else { break };
            self.take_unit(ring, sqe, Gather::No);
            left -= usize::from(from_lane || !self.ring(ring).is_within_word());
        }
        self.ring(ring).from_lane = from_lane;
    }

    /// A member failed its preparation: the whole chain fails, hard links or not, drains or not.
    fn fail_unit(&mut self, head: u32) {
        self.slots[head].sqe.flags.remove(EntryFlags::IO_HARDLINK);
        let step = if self.slots.member(head).bad {
            self.end(head, -errno::EINVAL, Stage::Issue, 0)
        } else {
            self.end(head, -errno::ECANCELED, Stage::Gate, -errno::EINVAL)
        };
        self.fail_at_once(step);
    }

    /// Fails what is left of a unit that never started: no later drain has to wait for it, and no Cancel finds it.
    pub(super) fn fail_at_once(&mut self, mut step: Option<Step>) {
        while let Some(Step::Fail { slot, hide, root }) = step {
            step = self.fail_member(slot, hide, root);
        }
    }

    /// Counts a unit for its ring's drains and starts its first member.
    fn start_unit(&mut self, head: u32) {
        let ring = self.slots[head].ring;
        let alone = self.slots.member(head).next == NONE;
        let (mut next, mut members) = (head, 0);
        while next != NONE {
            self.slots.member(next).counted = true;
            members += 1;
            // The head too, although it may not wait: what has the same user_data is found in the order of the chain.
            if !alone {
                self.park(next);
            }
            next = self.slots.member(next).next;
        }
        self.ring(ring).running += members;
        self.enter(head);
    }

    /// Starts what drains held back and hold no longer.
    fn release_deferred(&mut self, ring: u32) -> bool {
        let mut any = false;
        for _ in 0..BUDGET {
            let Some(state) = self.ring_mut(ring) else { break };
            if state.running == 0 {
                state.barrier = false;
            }
            let Some(&Deferred { head, drain }) = state.deferred.front() else { break };
            if state.barrier || (drain && state.running > 0) {
                break;
            }
            state.deferred.pop_front();
            state.barrier = drain;
            any = true;
            self.start_unit(head);
        }
        any
    }

    /// Does the steps that are due, a bounded number, and releases what drains held.
    #[inline]
    pub(super) fn advance(&mut self) -> bool {
        let mut any = !self.steps.is_empty() && self.make_steps();
        for ring in 0..self.rings.len() as u32 {
            if self.ring_mut(ring).is_some_and(|ring| ring.is_draining()) {
                any |= self.release_deferred(ring);
            }
        }
        any
    }

    fn make_steps(&mut self) -> bool {
        let mut any = false;
        for _ in 0..BUDGET {
            let Some(step) = self.steps.pop_front() else { break };
            any = true;
            match step {
                Step::Start(slot) => self.enter(slot),
                Step::Fail { slot, hide, root } => {
                    if let Some(step) = self.fail_member(slot, hide, root) {
                        self.steps.push_front(step);
                    }
                }
            }
        }
        any
    }

    /// A member that never started fails with its chain. One that failed its preparation keeps its own errno, and is never
    /// hidden. Returns the next.
    fn fail_member(&mut self, slot: u32, hide: bool, root: i32) -> Option<Step> {
        let member = self.slots.member(slot);
        let next = std::mem::replace(&mut member.next, NONE);
        (member.skip, member.hidden) = (false, hide && !member.bad);
        let (bad, cancelled) = (member.bad, member.cancelled);
        if bad {
            self.end(slot, -errno::EINVAL, Stage::Issue, 0);
        } else if cancelled {
            self.end(slot, -errno::ECANCELED, Stage::Cancel, 0);
        } else {
            self.end(slot, -errno::ECANCELED, Stage::Gate, -root);
        }
        (next != NONE).then_some(Step::Fail { slot: next, hide, root })
    }

    /// What follows a member that has its result, `failed` or not.
    pub(super) fn follow(&mut self, slot: u32, failed: bool) -> Option<Step> {
        let rest = std::mem::replace(&mut self.slots.member(slot).next, NONE);
        if rest == NONE {
            return None;
        }
        let entry = &self.slots[slot];
        let (hard, quiet, root) = (entry.sqe.flags.contains(EntryFlags::IO_HARDLINK), entry.quiet, root_of(entry));
        if failed && !hard {
            let hide = self.slots.member(slot).skip_rest;
            return Some(Step::Fail { slot: rest, hide, root });
        }
        if !quiet {
            // A hard link holds until the local range is left alone.
            self.slots.member(slot).next = rest;
            return None;
        }
        Some(Step::Start(rest))
    }

    /// Lets a LinkTimeout watch the entry before it, which starts now.
    pub(super) fn arm_guard(&mut self, slot: u32) {
        let guard = self.slots.member(slot).next;
        if guard == NONE || self.slots[guard].sqe.op != Opcode::LinkTimeout {
            return;
        }
        self.unpark(guard);
        self.slots[guard].state = State::Guarding;
        self.slots.member(guard).guarded = slot;
        self.timers.set(guard, self.now.saturating_add(self.slots[guard].sqe.local));
    }

    /// Takes the LinkTimeout out of the chain behind its entry, if there is one.
    pub(super) fn take_guard(&mut self, slot: u32) -> Option<u32> {
        let guard = self.slots.member(slot).next;
        // One that failed its preparation guards nothing, and has an errno of its own.
        if guard == NONE || self.slots[guard].sqe.op != Opcode::LinkTimeout || self.slots.member(guard).bad {
            return None;
        }
        let rest = std::mem::replace(&mut self.slots.member(guard).next, NONE);
        self.slots.member(slot).next = rest;
        Some(guard)
    }

    /// Makes an entry that waits findable by its `user_data`.
    pub(super) fn park(&mut self, slot: u32) {
        let ring = self.slots[slot].ring;
        if !self.slots.member(slot).indexed {
            let state = self.rings[ring as usize].as_mut().expect("a ring outlives its entries");
            state.index.insert(&mut self.slots, slot);
        }
    }

    #[inline]
    pub(super) fn unpark(&mut self, slot: u32) {
        if self.slots.member(slot).indexed {
            self.leave_index(slot);
        }
    }

    fn leave_index(&mut self, slot: u32) {
        let ring = self.slots[slot].ring;
        let state = self.rings[ring as usize].as_mut().expect("a ring outlives its entries");
        state.index.remove(&mut self.slots, slot);
    }
}

/// True if an entry fails its preparation; `after` is the opcode before it in its chain.
fn is_bad(sqe: &Sqe, after: Option<Opcode>) -> bool {
    match sqe.op {
        Opcode::Nop => sqe.op_flags & op_flags::NOP_BAD != 0,
        Opcode::LinkTimeout => after.is_none_or(|before| before == Opcode::LinkTimeout),
        _ => false,
    }
}

/// Cancelling waits for no drain that it is not itself part of: what it is to cancel may be what the drain waits for.
fn bypasses_drains(sqe: &Sqe, alone: bool) -> bool {
    let cancels = matches!(sqe.op, Opcode::Cancel | Opcode::TimeoutUpdate);
    let waits = !sqe.fence.is_null() || sqe.side != Sqe::NO_SIDE;
    cancels && alone && !waits && !sqe.flags.contains(EntryFlags::IO_DRAIN)
}
