//! Posting: what an entry that has ended has to say, and what goes back with it.

use super::ring::RingState;
use super::slots::{Slot, Slots, State};
use crate::cqe::{Cqe, CqeFlags};

impl RingState {
    /// Posts what a slot has to say, or lets it wait for room. Frees the slot if that was the last of it.
    #[inline(always)]
    pub(super) fn post_slot(&mut self, slots: &mut Slots, slot: u32) {
        let entry = &mut slots[slot];
        if entry.is_plain() {
            if entry.quiet {
                self.end_use_with_completion(&mut entry.sqe);
            }
        } else {
            if entry.quiet {
                self.end_use(&mut entry.sqe);
            }
            // To a future every end is told, and it has room for it.
            let silent = !entry.sqe.is_routed() && slots.member(slot).is_silent();
            if silent {
                self.give_back(&slots[slot], true);
                slots.release(slot);
                return;
            }
        }
        let waits = self.is_overflowing() && !slots[slot].sqe.is_routed();
        if waits || !self.post_now(slots, slot) {
            self.wait_for_room(slots, slot);
        }
    }

    /// Posts what a slot has to say, before all that waits. False if there is no room.
    #[inline(always)]
    pub(super) fn post_now(&mut self, slots: &mut Slots, slot: u32) -> bool {
        let entry = &mut slots[slot];
        let cqe = cqe_of(entry);
        let routed = entry.sqe.is_routed();
        if !routed && !self.write(cqe) {
            return false;
        }
        if entry.quiet {
            self.give_back(entry, false);
        }
        if routed {
            // Before the future, which may push at once.
            self.publish();
            entry.sqe.answer(cqe);
        } else {
            self.publish_if_many();
        }
        if entry.quiet {
            slots.release(slot);
        } else {
            entry.state = State::Overdue;
        }
        true
    }
}

#[inline]
fn cqe_of(entry: &Slot) -> Cqe {
    let mut flags = CqeFlags::empty();
    flags.set(CqeFlags::MORE, !entry.quiet);
    flags.set(CqeFlags::NOTIF, entry.notif);
    let started = if entry.issued == 0 { entry.landed } else { entry.issued };
    let (gate, wire) = (started - entry.taken, entry.landed - started);
    let unquiet = u32::from(entry.flags) & CqeFlags::UNQUIET.bits();
    let stage = u32::from(entry.flags & 7) << 16;
    Cqe::new(entry.sqe.user_data, entry.res, flags.bits() | unquiet | stage, entry.detail, gate, wire)
}
