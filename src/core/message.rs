//! Messages from ring to ring, of this core or another.

use super::Core;
use crate::code::{Stage, errno};
use crate::sqe::{Opcode, Sqe};

impl Core {
    /// A MsgRing does its work, and has its result.
    pub(super) fn send_message(&mut self, slot: u32) {
        let sqe = &mut self.slots[slot].sqe;
        let (user_data, res) = (sqe.local, sqe.len as i32);
        debug_assert_eq!(sqe.op, Opcode::MsgRing);
        match sqe.take_mailbox() {
            Some(target) if target.is_open() => {
                target.send(user_data, res);
                self.conclude(slot, 0, Stage::Done, 0);
            }
            // The unit goes down with the ring.
            _ => self.conclude(slot, -errno::EBADFD, Stage::Issue, 0),
        }
    }

    /// A message has come for a ring: it ends where it begins, like an entry that has nothing to do.
    pub(super) fn post_message(&mut self, ring: u32, user_data: u64, res: i32) {
        // Counted as an entry.
        let slot = self.take_slot(ring, &Sqe { user_data, ..Sqe::EMPTY });
        self.conclude(slot, res, Stage::Done, 0);
    }
}
