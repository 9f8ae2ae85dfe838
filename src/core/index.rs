//! Finding parked entries by `user_data`, which need not be unique: the oldest comes first.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::slots::{NONE, Slots};

/// For one ring: first and last slot of each `user_data`; the slots between are linked.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// An entry leaves it between its fence's signal and the transport's call: with the standard hash that took 13 ns more.
    ends: HashMap<u64, (u32, u32), RandomState>,
}

impl Index {
    /// For so many entries. Less than half full, the map cleans itself up in place and never allocates again.
    pub(super) fn with_capacity(entries: usize) -> Index {
        Index { ends: HashMap::with_capacity_and_hasher(2 * entries, RandomState::default()) }
    }

    pub(super) fn insert(&mut self, slots: &mut Slots, slot: u32) {
        let (_, last) = self.ends.entry(slots[slot].sqe.user_data).or_insert((slot, NONE));
        let before = std::mem::replace(last, slot);
        let member = slots.member(slot);
        (member.indexed, member.same_prev, member.same_next) = (true, before, NONE);
        if before != NONE {
            slots.member(before).same_next = slot;
        }
    }

    /// Takes a slot out, if it is in.
    #[inline]
    pub(super) fn remove(&mut self, slots: &mut Slots, slot: u32) {
        if !std::mem::take(&mut slots.member(slot).indexed) {
            return;
        }
        let member = slots.member(slot);
        // With nothing left of them the entry may be plain from here on.
        let next = std::mem::replace(&mut member.same_next, NONE);
        let prev = std::mem::replace(&mut member.same_prev, NONE);
        if prev != NONE {
            slots.member(prev).same_next = next;
        }
        if next != NONE {
            slots.member(next).same_prev = prev;
        }
        let user_data = slots[slot].sqe.user_data;
        if prev == NONE && next == NONE {
            self.ends.remove(&user_data);
        } else if let Some((first, last)) = self.ends.get_mut(&user_data) {
            if prev == NONE {
                *first = next;
            }
            if next == NONE {
                *last = prev;
            }
        }
    }

    /// The oldest with this `user_data`.
    pub(super) fn first(&self, user_data: u64) -> Option<u32> {
        self.ends.get(&user_data).map(|&(first, _)| first)
    }

    /// The next younger one with the same `user_data`.
    pub(super) fn after(slots: &mut Slots, slot: u32) -> Option<u32> {
        let next = slots.member(slot).same_next;
        (next != NONE).then_some(next)
    }
}
