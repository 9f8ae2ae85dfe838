//! The slots: where an entry lives from the moment it cannot end at once until it is posted.

use static_assertions::{const_assert, const_assert_eq};

use crate::code::Stage;
use crate::entry::EntryFlags;
use crate::ring::shared::MAX_FENCES;
use crate::sqe::Sqe;
use crate::transport::{Nanos, Token};

/// No slot: the end of a list.
pub(crate) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Free,
    /// A member of a chain before its turn, or behind a drain.
    Held,
    /// Waits for fences.
    Gated,
    /// A Timeout that runs.
    Timing,
    /// A LinkTimeout whose entry has started.
    Guarding,
    /// Waits for its peer's turn.
    Ready,
    /// A vectored entry of which the transport has a part, and the rest waits for its peer's turn.
    Issuing,
    /// With the transport. A plain one already when it is offered to its driver, and no more if that leaves it.
    Issued,
    /// Its result is posted with MORE; the transport may still touch the local range.
    Overdue,
    /// Has a completion for which the CQ has no room.
    Waiting,
}

#[repr(C, align(64))]
#[derive(Debug)]
pub(crate) struct Slot {
    /// Larger than that of every entry that the core took before: an order, and what tells the entry from others that had the
    /// slot.
    sequence: u64,
    /// When it was taken, issued and landed. 0 for not yet.
    pub(crate) taken: Nanos,
    pub(crate) issued: Nanos,
    pub(crate) landed: Nanos,
    /// Neighbours in whichever list the state says.
    next: u32,
    prev: u32,
    pub(crate) ring: u32,
    /// Its peer's place in its ring's [`Peers`](super::met::Peers); [`NONE`] without.
    pub(super) peer: u32,
    /// The result, once there is one.
    pub(crate) res: i32,
    pub(crate) detail: i32,
    /// The stage's bits.
    pub(crate) flags: u16,
    pub(crate) state: State,
    /// Nothing touches the local range.
    pub(crate) quiet: bool,
    /// The result is posted; what waits for room is the NOTIF.
    pub(crate) notif: bool,
    /// Fences that have not signalled.
    pub(crate) pending: u8,
    /// Its [`Member`] was not made, or has nothing in it. Only [`Slots::member`] takes this back.
    plain: bool,
    pub(crate) sqe: Sqe,
}

const_assert_eq!(size_of::<Slot>(), 128);

impl Slot {
    /// True for a Read or Write with nothing before it but issue and end: it has no timer, fence, signal or link, and nothing in its
    /// [`Member`], which need not be looked at.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.plain
    }

    /// Gives the slot to an entry. Fields in their order, so that the constants side by side are one write.
    #[inline(always)]
    fn fill(
        &mut self,
        (sequence, taken, issued): (u64, Nanos, Nanos),
        (ring, peer): (u32, u32),
        state: State,
        plain: bool,
        sqe: &Sqe,
    ) {
        (self.sequence, self.taken, self.issued, self.landed) = (sequence, taken, issued, 0);
        (self.ring, self.peer) = (ring, peer);
        (self.flags, self.state, self.quiet, self.notif, self.pending, self.plain) = (0, state, true, false, 0, plain);
        self.sqe = *sqe;
    }

    /// Its result, which is known at `now`.
    #[inline(always)]
    pub(crate) fn set_result(&mut self, res: i32, stage: Stage, detail: i32, now: Nanos) {
        self.res = res;
        self.flags = (stage.bits() >> 16) as u16;
        self.detail = detail;
        self.landed = now;
    }
}

const_assert!(MAX_FENCES <= u8::MAX as usize);

/// What a slot has of the chain that it is in, and of the entries with its `user_data`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Member {
    /// The next of the chain, or [`NONE`].
    pub(crate) next: u32,
    /// A LinkTimeout's entry.
    pub(crate) guarded: u32,
    /// The longest time with the transport; 0 for no limit.
    pub(crate) transfer_limit: Nanos,
    /// Neighbours among the parked ones with the same `user_data`.
    pub(super) same_next: u32,
    pub(super) same_prev: u32,
    pub(super) indexed: bool,
    /// Its ring's drains wait for it.
    pub(crate) counted: bool,
    /// No completion if it succeeds.
    pub(crate) skip: bool,
    /// No completion however it ends: one before it in its chain stands for it.
    pub(crate) hidden: bool,
    /// Cancelled with the transport still at it: its end in flight is to come.
    pub(crate) detached: bool,
    /// It was to be skipped and failed: the rest of its chain is.
    pub(crate) skip_rest: bool,
    /// It failed its preparation.
    pub(crate) bad: bool,
    /// Cancelled before its turn came.
    pub(crate) cancelled: bool,
    /// The next entry of the merged operation that it is part of, or [`NONE`].
    pub(super) merged: u32,
    /// Part of an operation that counts for the first of its entries.
    pub(super) rides: bool,
    /// It was part of a merged operation that failed, and is tried alone.
    pub(super) again: bool,
}

impl Member {
    /// True if its end has no completion.
    #[inline]
    pub(crate) fn is_silent(&self) -> bool {
        self.skip || self.hidden
    }
}

const ALONE: Member = Member {
    next: NONE,
    guarded: NONE,
    transfer_limit: 0,
    same_next: NONE,
    same_prev: NONE,
    indexed: false,
    counted: false,
    skip: false,
    hidden: false,
    detached: false,
    skip_rest: false,
    bad: false,
    cancelled: false,
    merged: NONE,
    rides: false,
    again: false,
};

/// Of an entry alone that its ring's drains wait for.
const STARTED: Member = Member { counted: true, ..ALONE };

/// All slots of a core. A ring has a right to as many as its capacity and the reserve for Cancels.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    members: Vec<Member>,
    /// Of the entry taken last.
    sequence: u64,
    /// Free ones, last freed first: it is the warmest.
    free: Vec<u32>,
}

impl Slots {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn grow(&mut self, count: usize) {
        let first = self.slots.len();
        let end = first + count;
        assert!(end <= super::MAX_SLOTS as usize, "a core's rings are bounded so that a token names a slot in 24 bits");
        self.slots.extend((first..end).map(|_| Slot {
            sequence: 0,
            taken: 0,
            issued: 0,
            landed: 0,
            next: NONE,
            prev: NONE,
            ring: 0,
            peer: NONE,
            res: 0,
            detail: 0,
            flags: 0,
            state: State::Free,
            quiet: true,
            notif: false,
            pending: 0,
            plain: false,
            sqe: Sqe::EMPTY,
        }));
        self.members.resize(end, ALONE);
        self.free.extend((first..end).rev().map(|slot| slot as u32));
    }

    /// A free slot for an entry that was accepted: there always is one, acceptance took the right to it. It is held.
    pub(crate) fn take(&mut self, ring: u32, sqe: &Sqe, peer: u32, taken: Nanos) -> u32 {
        let index = self.next_free();
        self.slots[index as usize].fill((self.sequence, taken, 0), (ring, peer), State::Held, false, sqe);
        self.members[index as usize] = Member { skip: sqe.flags.contains(EntryFlags::CQE_SKIP_SUCCESS), ..ALONE };
        index
    }

    /// The same for one that [starts at once](Sqe::starts_at_once), and is to be lined up: as a drain sees it, it runs.
    #[inline]
    pub(crate) fn take_started(&mut self, ring: u32, sqe: &Sqe, peer: u32, now: Nanos) -> u32 {
        let index = self.next_free();
        self.slots[index as usize].fill((self.sequence, now, now), (ring, peer), State::Ready, true, sqe);
        if !sqe.flags.is_empty() {
            self.member(index).skip = true;
        }
        index
    }

    #[inline]
    fn next_free(&mut self) -> u32 {
        self.sequence += 1;
        self.free.pop().expect("every accepted entry has the right to a slot")
    }

    /// Which of two entries was taken first.
    pub(crate) fn sequence(&self, index: u32) -> u64 {
        self.slots[index as usize].sequence
    }

    /// What the slot has besides. That of a plain entry is made now, so that the entry is plain no more.
    #[inline]
    pub(crate) fn member(&mut self, index: u32) -> &mut Member {
        if std::mem::take(&mut self.slots[index as usize].plain) {
            self.members[index as usize] = STARTED;
        }
        &mut self.members[index as usize]
    }

    /// A Read or Write without a timer or fence goes to its peer: it is plain if it has nothing else either.
    pub(crate) fn note_plain(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.plain = slot.sqe.signal.is_null() && self.members[index as usize] == STARTED;
    }

    #[inline]
    pub(crate) fn release(&mut self, index: u32) {
        self.slots[index as usize].state = State::Free;
        self.free.push(index);
    }

    /// Frees the slot that a token names, if its entry is plain, with the transport, and of this ring and peer. What the entry had
    /// can be read there until the next is taken.
    #[inline]
    pub(crate) fn release_plain(&mut self, token: Token, of: (u32, u32)) -> Option<&Slot> {
        let slot = self.slots.get_mut(token.slot() as usize)?;
        let named = slot.plain && slot.state == State::Issued && token.is_of(slot.sequence);
        if !named || (slot.ring, slot.peer) != of {
            return None;
        }
        slot.state = State::Free;
        self.free.push(token.slot());
        Some(slot)
    }

    #[inline]
    pub(crate) fn token(&self, index: u32) -> Token {
        Token::new(index, self.slots[index as usize].sequence)
    }

    /// The slot that a token names, if it still is that entry's.
    #[inline]
    pub(crate) fn find(&self, token: Token) -> Option<u32> {
        let index = token.slot();
        let slot = self.slots.get(index as usize)?;
        (slot.state != State::Free && token.is_of(slot.sequence)).then_some(index)
    }

    /// The slots in use, by number.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.slots).filter(|(_, slot)| slot.state != State::Free).map(|(index, _)| index)
    }
}

impl std::ops::Index<u32> for Slots {
    type Output = Slot;

    #[inline]
    fn index(&self, index: u32) -> &Slot {
        &self.slots[index as usize]
    }
}

impl std::ops::IndexMut<u32> for Slots {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }
}

/// A list of slots, linked through them. A slot is on one list at most.
#[derive(Debug)]
pub(crate) struct List {
    head: u32,
    tail: u32,
}

impl List {
    pub(crate) const fn new() -> List {
        List { head: NONE, tail: NONE }
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head == NONE
    }

    pub(crate) fn front(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    /// The one after `slot`.
    pub(crate) fn after(&self, slots: &Slots, slot: u32) -> Option<u32> {
        let next = slots[slot].next;
        (next != NONE).then_some(next)
    }

    /// The one before `slot`, which is on this list.
    pub(crate) fn before(&self, slots: &Slots, slot: u32) -> Option<u32> {
        let before = slots[slot].prev;
        (before != NONE).then_some(before)
    }

    #[inline]
    pub(crate) fn push_back(&mut self, slots: &mut Slots, slot: u32) {
        slots[slot].next = NONE;
        slots[slot].prev = self.tail;
        if self.tail == NONE {
            self.head = slot;
        } else {
            slots[self.tail].next = slot;
        }
        self.tail = slot;
    }

    /// Puts another list behind this one.
    #[inline]
    pub(crate) fn append(&mut self, slots: &mut Slots, other: List) {
        if self.tail == NONE {
            *self = other;
        } else if other.head != NONE {
            slots[self.tail].next = other.head;
            slots[other.head].prev = self.tail;
            self.tail = other.tail;
        }
    }

    /// Takes out everything up to `slot`, which is on this list.
    #[inline]
    pub(crate) fn remove_through(&mut self, slots: &mut Slots, slot: u32) {
        self.head = slots[slot].next;
        if self.head == NONE { self.tail = NONE } else { slots[self.head].prev = NONE }
    }

    /// Takes out a slot that is on this list.
    #[inline]
    pub(crate) fn remove(&mut self, slots: &mut Slots, slot: u32) {
        let (next, prev) = (slots[slot].next, slots[slot].prev);
        if prev == NONE {
            self.head = next
        } else {
            slots[prev].next = next
        }
        if next == NONE { self.tail = prev } else { slots[next].prev = prev }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_token_finds_nothing() {
        let mut slots = Slots::default();
        slots.grow(1);
        let slot = slots.take(0, &Sqe::EMPTY, NONE, 0);
        slots[slot].state = State::Issued;
        let old = slots.token(slot);
        assert_eq!(slots.find(old), Some(slot));
        slots.release(slot);
        assert_eq!(slots.find(old), None);
        let again = slots.take(0, &Sqe::EMPTY, NONE, 0);
        slots[again].state = State::Issued;
        assert_eq!(again, slot);
        assert_eq!(slots.find(old), None);
    }

    #[test]
    fn a_run_takes_nothing_but_what_was_issued_to_its_peer() {
        let mut slots = Slots::default();
        slots.grow(2);
        let transfer = |slots: &mut Slots, state| {
            let slot = slots.take_started(1, &Sqe::EMPTY, 2, 3);
            slots[slot].state = state;
            slots.token(slot)
        };
        let issued = transfer(&mut slots, State::Issued);
        assert!(slots.release_plain(issued, (1, 3)).is_none() && slots.release_plain(issued, (0, 2)).is_none());
        assert_eq!(slots.release_plain(issued, (1, 2)).map(|slot| slot.taken), Some(3));
        assert!(slots.release_plain(issued, (1, 2)).is_none(), "a second word about it");
        let tied = transfer(&mut slots, State::Issued);
        assert!(slots.release_plain(issued, (1, 2)).is_none(), "the slot is another's");
        slots.member(tied.slot()).transfer_limit = 1;
        assert!(slots.release_plain(tied, (1, 2)).is_none());
        let ready = transfer(&mut slots, State::Ready);
        assert!(slots.release_plain(ready, (1, 2)).is_none());
        assert_eq!(slots.in_use().count(), 2);
    }

    /// Four slots on a list.
    fn four() -> (Slots, List) {
        let (mut slots, mut list) = (Slots::default(), List::new());
        slots.grow(4);
        (0..4).for_each(|slot| list.push_back(&mut slots, slot));
        (slots, list)
    }

    #[test]
    fn lists_keep_order_and_lose_any_member() {
        let (mut slots, mut list) = four();
        list.remove(&mut slots, 0);
        list.remove(&mut slots, 2);
        list.remove(&mut slots, 3);
        assert_eq!(list.front(), Some(1));
        list.remove(&mut slots, 1);
        assert!(list.is_empty());
    }

    #[test]
    fn lists_lose_their_first_members_at_once() {
        let (mut slots, mut list) = four();
        list.remove_through(&mut slots, 1);
        list.remove(&mut slots, 2);
        assert_eq!(list.front(), Some(3));
        list.remove_through(&mut slots, 3);
        assert!(list.is_empty());
        list.push_back(&mut slots, 0);
        assert_eq!((list.front(), list.after(&slots, 0)), (Some(0), None));
    }
}
