//! Messages: completions that entries of other rings post on this one.

use std::sync::Arc;

use super::shared::Shared;
use crate::core::{Control, Controls};
use crate::sync::Ordering;

/// Where messages to a ring go. Only the ring's core posts, so they arrive with what else other threads ask of it.
#[derive(Debug)]
pub(crate) struct Mailbox {
    /// Before `shared`, which the other ends of lanes on their way in there need.
    controls: Arc<Controls>,
    shared: Arc<Shared>,
    ring: u32,
}

impl Mailbox {
    pub(crate) fn is_open(&self) -> bool {
        self.shared.is_open()
    }

    pub(super) fn take_unit(&self) -> bool {
        self.shared.take_unit()
    }

    pub(super) fn capacity(&self) -> u32 {
        self.shared.capacity as u32
    }

    /// True if messages go to this ring.
    pub(crate) fn is_of(&self, ring: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, ring)
    }

    /// Posts a completion there, with the unit that was taken for it.
    pub(crate) fn send(&self, user_data: u64, res: i32) {
        self.controls.send(Control::Message { ring: self.ring, user_data, res });
    }

    /// The unit that was taken is not used.
    pub(crate) fn give_back(&self) {
        self.controls.send(Control::NoMessage { ring: self.ring });
    }
}

/// A ring as the target of [`MsgRing`](crate::opcode::MsgRing) entries, of the same or other rings. Clone it freely. An owner
/// that waits takes it as somebody who may still send.
#[derive(Debug)]
pub struct Messages {
    mailbox: Arc<Mailbox>,
}

impl Messages {
    pub(super) fn new(shared: Arc<Shared>, controls: Arc<Controls>, ring: u32) -> Messages {
        Messages::to(Arc::new(Mailbox { controls, shared, ring }))
    }

    fn to(mailbox: Arc<Mailbox>) -> Messages {
        mailbox.shared.submitters.fetch_add(1, Ordering::Relaxed);
        Messages { mailbox }
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }
}

impl Clone for Messages {
    fn clone(&self) -> Messages {
        Messages::to(Arc::clone(&self.mailbox))
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.mailbox.shared.submitter_gone();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::core::Core;
    use crate::doorbell::Doorbell;
    use crate::ring::push::Submitter;
    use crate::{Engine, opcode};

    /// An entry of a lane that the core never looked at has the ring itself as its target.
    #[test]
    fn a_message_to_its_own_ring_does_not_keep_it() {
        let controls = Arc::new(Controls::new(4));
        let shared = Arc::new(Shared::new(Engine::loopback(), 4, Arc::new(Doorbell::new())));
        let core = Core::new(Arc::clone(&controls), 0);
        let target = Messages::new(Arc::clone(&shared), Arc::clone(&controls), 0);
        let mut submitter = Submitter::new(Arc::clone(&shared), Arc::clone(&controls), 0);
        submitter.push(opcode::MsgRing::new(&target, 1, 2).build()).unwrap();
        let (ring, way) = (Arc::downgrade(&shared), Arc::downgrade(&controls));
        drop((target, shared, controls));
        drop(core);
        drop(submitter);
        assert!(way.upgrade().is_none() && ring.upgrade().is_none());
    }
}
