//! Vectored entries: several operations with the transport, one completion.
//!
//! An entry may be issued over several turns, as its peer has room. Its parts' results are counted in its
//! [`PartList`](crate::ring::parts::PartList); none of them has an identity of its own.

use super::Core;
use super::slots::State;
use crate::code::Stage;
use crate::ring::parts::PartFailure;
use crate::transport::Event;

impl Core {
    /// The transport has a word about a part.
    pub(super) fn land_part(&mut self, slot: u32, event: Event) {
        let Some(parts) = self.slots[slot].sqe.parts_mut() else { return };
        let last_word = match event {
            Event::Result { res, stage, detail, quiet, .. } => {
                parts.land(res, stage, detail, quiet);
                self.left_flight(slot);
                detail
            }
            Event::Quiet { detail, .. } => {
                parts.quieten();
                detail
            }
        };
        self.settle_parts(slot, last_word);
    }

    /// The parts that were not issued are not to be: the entry fails when the others have their results.
    pub(super) fn stop_issuing(&mut self, slot: u32, errno: i32, stage: Stage) {
        if let Some(parts) = self.slots[slot].sqe.parts_mut() {
            parts.fail(PartFailure { res: -errno, stage, detail: 0 });
        }
        self.settle_parts(slot, 0);
    }

    /// Ends an entry whose last result is there, or tells that it is quiet at last.
    fn settle_parts(&mut self, slot: u32, last_word: i32) {
        let Some(parts) = self.slots[slot].sqe.parts() else { return };
        let (failed, result, quiet) = (parts.has_failed(), parts.result(), parts.is_quiet());
        if failed && self.slots[slot].state == State::Issuing {
            self.leave_ready(slot);
            self.slots[slot].state = State::Issued;
        }
        if self.slots[slot].state != State::Issued {
            // Its result is told already, unless more of it is to be issued.
            if quiet && self.slots[slot].state != State::Issuing {
                self.quieten(slot, last_word);
            }
            return;
        }
        if let Some(result) = result {
            self.slots[slot].quiet = quiet;
            match result {
                Ok(moved) => self.conclude(slot, moved, Stage::Done, 0),
                Err(PartFailure { res, stage, detail }) => self.conclude(slot, res, stage, detail),
            }
        }
    }
}
