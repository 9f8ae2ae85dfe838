//! The two halves of a ring, which may live on two threads. The last of them to go closes it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::SubmissionQueue;
use super::control::Controller;
use super::eventfd::EventFd;
use super::message::Messages;
use super::push::{OpenChain, Pusher, Submitter};
use super::reap::{CompletionQueue, Completions, Reaper, WaitError};
use crate::core::{Closing, Control};
use crate::cqe::Cqe;
use crate::engine::Engine;
use crate::keep;
use crate::poller::Poller;
use crate::sync::Ordering;
use crate::trace::event;

static_assertions::assert_impl_all!(Submission: Send);
static_assertions::assert_impl_all!(Completion: Send);

/// What closing takes beyond the grace time, at most: the transport's own end.
const CLOSE_BOUND: Duration = Duration::from_secs(10);

/// A ring's hold on its poller, shared by its halves. Dropping the last closes the ring.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) ring: u32,
    pub(super) grace: Duration,
    /// Until it is closed.
    pub(super) poller: Option<Arc<Poller>>,
}

impl Hold {
    /// Closes the ring, unless it is. True if the core has let go of it in time.
    pub(super) fn close(&mut self, closing: &Arc<Closing>, grace: Duration) -> bool {
        let Some(poller) = self.poller.take() else { return true };
        if !poller.controls.is_here() {
            // A forked child: the ring, its thread and everything in flight are its parent's.
            keep::for_ever(poller);
            return false;
        }
        poller.controls.send(Control::Close { ring: self.ring, closing: Arc::clone(closing) });
        let closed = closing.wait(grace.saturating_add(CLOSE_BOUND));
        if !closed {
            event!(ERROR, ring = self.ring, "ring not closed in time: something holds its poller up");
            // It may never end, so nobody is to wait for it: this share is never given back.
            keep::for_ever(poller);
        } else if let Some(poller) = Arc::into_inner(poller) {
            // All of its rings are closed, so it ends.
            poller.join();
        }
        closed
    }

    pub(super) fn poller(&self) -> &Arc<Poller> {
        self.poller.as_ref().expect("only closing takes it")
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.close(&Closing::new(self.grace, false), self.grace);
    }
}

/// The submitting half of a ring, made by [`Ring::split`](crate::Ring::split). Can be sent to another thread.
///
/// Dropping it submits what was pushed, and wakes a waiting [`Completion`] half, which then learns that nobody is left to
/// submit. If the other half is gone already, it closes the ring, as dropping a [`Ring`](crate::Ring) does.
#[derive(Debug)]
pub struct Submission {
    // Before the pusher: while the ring closes, the engine still has a user on this thread, so it does not end on the poller.
    pub(super) hold: Arc<Hold>,
    pub(super) pusher: Pusher,
    /// Counted among the submitters that a waiting half may hope for.
    counted: bool,
}

impl Submission {
    pub(super) fn new(hold: Arc<Hold>, pusher: Pusher) -> Submission {
        Submission { hold, pusher, counted: false }
    }

    /// This ring as the target of messages, as [`Ring::messages`](crate::Ring::messages).
    pub fn messages(&mut self) -> Messages {
        self.pusher.share();
        let controls = Arc::clone(&self.hold.poller().controls);
        Messages::new(Arc::clone(&self.pusher.shared), controls, self.hold.ring)
    }

    /// Calls to the poller from any thread: cancelling, and waiting for quiet.
    pub fn controller(&self) -> Controller {
        let controls = Arc::clone(&self.hold.poller().controls);
        Controller { shared: Arc::clone(&self.pusher.shared), controls, ring: self.hold.ring }
    }

    /// From now on whoever waits does not know what this half will do.
    pub(super) fn count(&mut self) {
        self.pusher.shared.submitters.fetch_add(1, Ordering::Relaxed);
        self.counted = true;
    }

    /// The submission queue, as [`Ring::submission`](crate::Ring::submission).
    #[inline]
    pub fn submission(&mut self) -> SubmissionQueue<'_> {
        self.pusher.expect_submit();
        self.pusher.look();
        SubmissionQueue { pusher: &mut self.pusher }
    }

    /// As [`Ring::submit`](crate::Ring::submit).
    ///
    /// # Errors
    /// [`OpenChain`] if the last entry is linked to a next one; nothing is submitted then.
    #[inline]
    pub fn submit(&mut self) -> Result<usize, OpenChain> {
        self.pusher.submit()
    }

    /// A submitter for a further thread, as [`Ring::submitter`](crate::Ring::submitter).
    pub fn submitter(&mut self) -> Submitter {
        self.pusher.share();
        Submitter::new(Arc::clone(&self.pusher.shared), Arc::clone(&self.hold.poller().controls), self.hold.ring)
    }

    /// The engine that the ring was built on.
    pub fn engine(&self) -> &Engine {
        &self.pusher.shared.engine
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.pusher.close_chain();
        let submitted = self.pusher.submit();
        debug_assert!(submitted.is_ok(), "the chain was just closed");
        if self.counted {
            self.pusher.shared.submitter_gone();
        }
    }
}

/// The reaping half of a ring, made by [`Ring::split`](crate::Ring::split). Can be sent to another thread.
///
/// While the [`Submission`] half or a [`Submitter`] exists, waiting is no error, whatever is outstanding: somebody may
/// submit. Dropping it loses what was not reaped; completions of later entries fill the queue, and then pushes are refused.
/// If the other half is gone already, it closes the ring, as dropping a [`Ring`](crate::Ring) does.
#[derive(Debug)]
pub struct Completion {
    // Before the reaper, as in the other half.
    pub(super) hold: Arc<Hold>,
    pub(super) reaper: Reaper,
}

impl Completion {
    /// The completion queue: an iterator over what is there, which never blocks. Drop it to give the room back.
    #[inline]
    pub fn completion(&mut self) -> CompletionQueue<'_> {
        self.reaper.queue()
    }

    /// As [`Ring::wait`](crate::Ring::wait).
    ///
    /// # Errors
    /// [`WaitError::NothingOutstanding`] if none is ready and none can come: the other half and all submitters are gone.
    /// [`WaitError::PollerDead`] if none is ready and the poller died.
    pub fn wait(&mut self, count: usize) -> Result<usize, WaitError> {
        self.reaper.wait(count, None, 0)
    }

    /// As [`Ring::wait_timeout`](crate::Ring::wait_timeout).
    ///
    /// # Errors
    /// As [`wait`](Self::wait), and [`WaitError::TimedOut`] if nothing is ready at the limit.
    pub fn wait_timeout(&mut self, count: usize, limit: Duration) -> Result<usize, WaitError> {
        self.reaper.wait(count, Some(limit), 0)
    }

    /// As [`Ring::wait_min`](crate::Ring::wait_min).
    ///
    /// # Errors
    /// As [`wait_timeout`](Self::wait_timeout).
    pub fn wait_min(&mut self, count: usize, min_wait: Duration, limit: Duration) -> Result<usize, WaitError> {
        self.reaper.wait_min(count, min_wait, limit, 0)
    }

    /// The next completion, for async code. Dropping the future loses nothing.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub async fn next(&mut self) -> Result<Cqe, WaitError> {
        self.reaper.next(0).await
    }

    /// Completions as a [`Stream`](futures_core::Stream), which ends when everything submitted has completed, and the other
    /// half and all submitters are gone.
    pub fn completions(&mut self) -> Completions<'_> {
        self.reaper.completions(0)
    }

    /// As [`Ring::eventfd`](crate::Ring::eventfd).
    ///
    /// # Errors
    /// What the system says, such as that the process has too many descriptors.
    pub fn eventfd(&mut self) -> io::Result<EventFd> {
        self.reaper.eventfd()
    }
}
