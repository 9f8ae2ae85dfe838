//! What a simulation needs of a ring that no caller does: steps that do not block, and looks without consequences.

use std::sync::Arc;
use std::time::Duration;

use super::Ring;
use super::control::{Controller, Reply};
use super::halves::Completion;
use super::shared::Shared;
use crate::core::{Closing, Control};
use crate::cqe::Cqe;
use crate::opcode::{Cancel, Select};

impl Ring {
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.submission.pusher.shared
    }

    /// Units that its owner has taken ahead of its entries.
    pub(crate) fn spare_units(&self) -> u64 {
        self.submission.pusher.spare_units()
    }

    /// The reaping half, to look at.
    pub(crate) fn reaping(&self) -> &Completion {
        &self.completion
    }

    /// Closes the ring as [`close`](Self::close) does, without waiting for it.
    pub(crate) fn begin_close(self, grace: Duration) -> (Arc<Closing>, Completion) {
        let Ring { submission, mut completion } = self;
        drop(submission);
        let closing = Closing::new(grace, true);
        let hold = Arc::get_mut(&mut completion.hold).expect("the ring was not split");
        let poller = hold.poller.take().expect("it is closed once");
        poller.controls.send(Control::Close { ring: hold.ring, closing: Arc::clone(&closing) });
        (closing, completion)
    }
}

impl Completion {
    /// Completions that are published and were not read.
    pub(crate) fn ready(&self) -> usize {
        self.reaper.ready()
    }

    /// The completion at a position, if it is published and was not read.
    pub(crate) fn published_at(&self, position: u64) -> Option<Cqe> {
        self.reaper.published_at(position)
    }
}

impl Controller {
    pub(crate) fn begin_cancel(&self, cancel: Cancel) -> Arc<Reply<usize>> {
        let reply = Reply::new();
        let (op_flags, key) = cancel.parts();
        self.controls.send(Control::Cancel { ring: self.ring, op_flags, key, reply: Arc::clone(&reply) });
        reply
    }

    pub(crate) fn begin_quiesce(&self, select: Select) -> Arc<Reply<()>> {
        let reply = Reply::new();
        self.controls.send(Control::Quiesce { ring: self.ring, select, reply: Arc::clone(&reply) });
        reply
    }
}
