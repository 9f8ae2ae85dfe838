//! Merged entries: one operation with the transport, a completion each.
//!
//! Neighbours on a peer's ready list that lie side by side locally and remotely go to the transport as one operation, under
//! the token of the first; the others are linked behind it. Each keeps its slot, limit and result.

use super::Core;
use super::slots::{NONE, Slot, State};
use crate::code::Stage;
use crate::sqe::{Opcode, Sqe, op_flags};
use crate::transport::{Event, Op};

/// Makes `next` part of `op`, whose last entry so far is `last`, if it may be: `op` has at most `most` bytes then.
pub(super) fn extend(op: &mut Op, last: &Slot, next: &Slot, most: u32) -> bool {
    let (a, b) = (&last.sqe, &next.sqe);
    let len = u64::from(op.len) + u64::from(b.len);
    let up = borders(a, b);
    if !up && !borders(b, a) || a.op != b.op || a.region != b.region || last.ring != next.ring || len > u64::from(most)
    {
        return false;
    }
    // One direction only: after going up, `last` is at the top.
    if up && op.local + u64::from(op.len) == b.local {
        op.len = len as u32;
        return true;
    }
    if !up && op.local == a.local {
        (op.local, op.remote, op.len) = (b.local, b.remote, len as u32);
        return true;
    }
    false
}

/// True if `above` begins where `below` ends, on both sides, with no border of a remote registration between them: the bytes on
/// both sides of it are of declared registrations, and these do not overlap, so it is one.
fn borders(below: &Sqe, above: &Sqe) -> bool {
    // Only Reads and Writes have these flags; entries on one list have one peer.
    below.op_flags & op_flags::MORE_ABOVE != 0
        && above.op_flags & op_flags::MORE_BELOW != 0
        && below.local + u64::from(below.len) == above.local
        && below.remote + u64::from(below.len) == above.remote
}

impl Core {
    /// The transport has a word about an operation that is several entries'; `first` has its name.
    pub(super) fn land_merged(&mut self, first: u32, event: Event) {
        let mut next = first;
        while next != NONE {
            let slot = next;
            next = self.slots.member(slot).merged;
            let op = self.slots.token(slot);
            match event {
                Event::Quiet { detail, .. } => self.land_alone(slot, Event::Quiet { op, detail }),
                Event::Result { res, stage, detail, quiet, .. } => {
                    if quiet {
                        self.slots.member(slot).merged = NONE;
                    }
                    // A Write that failed on its way may still land: tried again it could follow a later one.
                    let harmless = self.slots[slot].sqe.op == Opcode::Read || stage == Stage::Issue;
                    if res < 0 && quiet && harmless && self.slots[slot].state == State::Issued {
                        self.try_alone(slot);
                        continue;
                    }
                    let res = if res < 0 { res } else { self.slots[slot].sqe.len as i32 };
                    self.land_alone(slot, Event::Result { op, res, stage, detail, quiet });
                }
            }
        }
    }

    /// Which of the parts is to blame is not known: each gets a try of its own, within the limit that began with the first.
    fn try_alone(&mut self, slot: u32) {
        self.left_flight(slot);
        self.slots[slot].sqe.never_merge();
        self.slots.member(slot).again = true;
        self.make_ready(slot);
    }
}
