//! Posting: what an entry that has ended has to say, and what goes back with it.

use super::ring::{PUBLISH_EVERY, RingState};
use super::slots::{Slot, Slots, State};
use crate::code::Stage;
use crate::cqe::{Cqe, CqeFlags};
use crate::sqe::Opcode;
use crate::transport::{Event, Nanos};

impl RingState {
    /// Ends and posts what the first of `events` are about, as long as these are plain entries `of` this ring and one peer which
    /// ended well and are quiet, the CQ has room, and it is not time to publish. How many.
    ///
    /// Of each entry nothing is looked at twice, and what goes back is added up: no other thread hears of it before the publish.
    pub(super) fn post_run(&mut self, slots: &mut Slots, of: (u32, u32), events: &[Event], now: Nanos) -> usize {
        if self.is_closing() || self.is_overflowing() {
            return 0;
        }
        let RingState { cq, ended, .. } = self;
        let (mut moved, mut written) = (0, 0);
        let most = events.len().min(PUBLISH_EVERY - cq.unpublished());
        let count = cq.write_many(events[..most].iter().map_while(|event| {
            let &Event::Result { op, res: res @ 0.., quiet: true, .. } = event else { return None };
            let Slot { sqe, taken, issued, .. } = slots.release_plain(op, of)?;
            // SAFETY: the use was begun at push, and the entry that was just let go of had it. The ring keeps the engine longer than
            // this.
            unsafe { ended.end(sqe.region) };
            moved += res as u64;
            written += if sqe.op == Opcode::Write { res as u64 } else { 0 };
            Some(Cqe::new(sqe.user_data, res, Stage::Done.bits(), 0, issued - taken, now - issued))
        }));
        if count > 0 {
            self.running -= count;
            self.peers[of.1].share.give_back(count as u64);
            self.count_moved(of.1, count as u64, [moved - written, written]);
            self.give_back_units(count as u64);
            self.publish_if_many();
        }
        count
    }

    /// Posts what a slot has to say, or lets it wait for room. Frees the slot if that was the last of it.
    pub(super) fn post_slot(&mut self, slots: &mut Slots, slot: u32) {
        let entry = &mut slots[slot];
        if entry.quiet {
            self.end_use(&mut entry.sqe);
        }
        // To a future every end is told, and it has room for it.
        let routed = entry.sqe.is_routed();
        if !routed && slots.member(slot).is_silent() {
            self.give_back(&slots[slot], true);
            slots.release(slot);
            return;
        }
        let waits = self.is_overflowing() && !routed;
        if waits || !self.post_now(slots, slot) {
            self.wait_for_room(slots, slot);
        }
    }

    /// Posts what a slot has to say, before all that waits. False if there is no room.
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
