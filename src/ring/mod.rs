//! The ring: where entries go in and completions come out.

pub(crate) mod control;
pub(crate) mod message;
mod push;
mod reap;
pub(crate) mod shared;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

pub use control::{ControlError, Controller};
pub use message::Messages;
pub use push::{OpenChain, PushChainError, PushError, Refusal, Submitter};
pub use reap::{CompletionQueue, Completions, WaitError};

use crate::core::{Closing, Control, Controls};
use crate::cqe::Cqe;
use crate::engine::Engine;
use crate::entry::Entry;
use crate::fence::{Fence, Progress};
use crate::{poller, spsc};
use push::Pusher;
use reap::Reaper;
use shared::Shared;

/// Settings of a ring.
#[derive(Clone, Debug)]
pub struct Builder {
    idle: Duration,
    grace: Duration,
}

impl Builder {
    /// How long the poller stays awake after its last work before it sleeps, 100 µs unless set. Awake it spins for a few
    /// microseconds, then gives its core away at every turn. io_uring's `sq_thread_idle`; 0 sleeps at once, and waking
    /// costs some 25 µs.
    #[must_use]
    pub fn idle(mut self, idle: Duration) -> Builder {
        self.idle = idle;
        self
    }

    /// How long dropping the ring waits for transfers that are with the transport, 1 s unless set. 0 does not wait.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Builder {
        self.grace = grace;
        self
    }

    /// Builds a ring on `engine` that takes `entries` entries at a time, accepted and not ended, and starts its poller
    /// thread. Its completion queue has room for at least twice as many. Any number in the range will do, not only powers of two.
    ///
    /// # Errors
    /// `InvalidInput` if `entries` is not in 1..=[`Ring::MAX_ENTRIES`]; otherwise what starting the thread says.
    pub fn build(self, entries: u32, engine: &Engine) -> io::Result<Ring> {
        if !(1..=Ring::MAX_ENTRIES).contains(&entries) {
            let text = format!("a ring of {entries} entries: it can have 1 to {}", Ring::MAX_ENTRIES);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut ring = self.without_poller(entries, engine);
        ring.poller = Some(poller::spawn(Arc::clone(&ring.controls), self.idle)?);
        Ok(ring)
    }

    /// The ring alone: somebody gives turns to a core with its controls.
    pub(crate) fn without_poller(&self, entries: u32, engine: &Engine) -> Ring {
        let controls = Arc::new(Controls::new());
        let shared = Arc::new(Shared::new(engine.clone(), entries, Arc::clone(&controls.doorbell)));
        let (sq_in, sq) = spsc::ring(entries as usize);
        let (cq, cq_out) = spsc::ring(2 * entries as usize);
        let ring = controls.next_ring();
        controls.send(Control::Ring { ring, shared: Arc::clone(&shared), sq, cq });
        let threads_here = engine.transport().caps().threads_here;
        Ring {
            pusher: Pusher::owner(Arc::clone(&shared), sq_in),
            reaper: Reaper::new(shared, cq_out, threads_here),
            controls,
            ring,
            grace: self.grace,
            poller: None,
        }
    }
}

/// A submission queue, a completion queue and the poller thread between them.
///
/// The ring is owned by one thread at a time, which pushes without any locked instruction; other threads push through
/// [`Submitter`]s. Entries become visible to the poller with [`submit`](Self::submit), all that were pushed at once.
///
/// Dropping the ring ends what was not issued, waits for what was (see [`Builder::grace`]) and then, if transfers are
/// still running, for the transport to be closed if nobody else uses the engine; if somebody does, the engine and its
/// memory are kept for ever. Every clone of the engine, every [`Registered`](crate::Registered) and every other ring is
/// such a user. It returns within the grace time and 10 s. Completions that were not reaped are lost with it.
#[derive(Debug)]
pub struct Ring {
    pusher: Pusher,
    reaper: Reaper,
    controls: Arc<Controls>,
    ring: u32,
    grace: Duration,
    poller: Option<JoinHandle<()>>,
}

#[cfg(all(test, loom))]
impl Ring {
    pub(crate) fn controls(&self) -> Arc<Controls> {
        Arc::clone(&self.controls)
    }
}

/// What closing takes beyond the grace time, at most: the transport's own end.
const CLOSE_BOUND: Duration = Duration::from_secs(10);

impl Ring {
    /// Most entries of a ring.
    pub const MAX_ENTRIES: u32 = 1 << 20;

    /// Settings for a new ring.
    pub fn builder() -> Builder {
        Builder { idle: Duration::from_micros(100), grace: Duration::from_secs(1) }
    }

    /// The submission queue.
    #[inline]
    pub fn submission(&mut self) -> SubmissionQueue<'_> {
        SubmissionQueue { pusher: &mut self.pusher }
    }

    /// The completion queue: an iterator over what is there, which never blocks. Drop it to give the room back.
    #[inline]
    pub fn completion(&mut self) -> CompletionQueue<'_> {
        self.reaper.queue()
    }

    /// Shows the poller everything that was pushed, at once, and wakes it if it sleeps. Returns how many entries. Never
    /// blocks.
    ///
    /// # Errors
    /// [`OpenChain`] if the last entry is linked to a next one; nothing is submitted then.
    #[inline]
    pub fn submit(&mut self) -> Result<usize, OpenChain> {
        self.pusher.submit()
    }

    /// Submits, then waits until `count` completions are ready to reap. Returns how many are.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), and [`WaitError::OpenChain`] as [`submit`](Self::submit).
    pub fn submit_and_wait(&mut self, count: usize) -> Result<usize, WaitError> {
        self.submit()?;
        self.wait(count)
    }

    /// Blocks until `count` completions are ready to reap, and returns how many are. Returns fewer, at least one, when
    /// everything submitted has completed and no other submitter exists: no more can come. More than the completion queue
    /// holds is taken as that many; 0 returns at once.
    ///
    /// # Errors
    /// [`WaitError::NothingOutstanding`] if none is ready and none can come: while a [`Submitter`] exists, one can.
    /// [`WaitError::PollerDead`] if none is ready and the poller died.
    pub fn wait(&mut self, count: usize) -> Result<usize, WaitError> {
        self.reaper.wait(count, None, self.pusher.held_back())
    }

    /// The same for at most `limit`. Returns what is ready then, if anything is.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), and [`WaitError::TimedOut`] if nothing is ready at the limit: io_uring's `ETIME`.
    pub fn wait_timeout(&mut self, count: usize, limit: Duration) -> Result<usize, WaitError> {
        self.reaper.wait(count, Some(limit), self.pusher.held_back())
    }

    /// The next completion, for async code. Dropping the future loses nothing.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub async fn next(&mut self) -> Result<Cqe, WaitError> {
        self.reaper.next(self.pusher.held_back()).await
    }

    /// Completions as a [`Stream`](futures_core::Stream), which ends when everything submitted has completed and no other
    /// submitter exists.
    pub fn completions(&mut self) -> Completions<'_> {
        self.reaper.completions(self.pusher.held_back())
    }

    /// A submitter for another thread. From the first one on, the owner's pushes take an atomic exchange each, for good.
    /// Allocates its lane, see [`Submitter`]; an owner that waits takes it as somebody who may still push.
    pub fn submitter(&mut self) -> Submitter {
        self.pusher.share();
        Submitter::new(Arc::clone(&self.pusher.shared), Arc::clone(&self.controls), self.ring)
    }

    /// This ring as the target of messages: completions that entries of other rings post here. From the first one on, the
    /// owner's pushes take an atomic exchange each, for good.
    pub fn messages(&mut self) -> Messages {
        self.pusher.share();
        Messages::new(Arc::clone(&self.pusher.shared), Arc::clone(&self.controls), self.ring)
    }

    /// Calls to the poller from any thread: cancelling, and waiting for quiet.
    pub fn controller(&self) -> Controller {
        let shared = Arc::clone(&self.pusher.shared);
        Controller { shared, controls: Arc::clone(&self.controls), ring: self.ring }
    }

    /// The engine it was built on.
    pub fn engine(&self) -> &Engine {
        &self.pusher.shared.engine
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.pusher.close_chain();
        let submitted = self.pusher.submit();
        debug_assert!(submitted.is_ok(), "the chain was just closed");
        let closing = Closing::new(self.grace);
        self.controls.send(Control::Close { ring: self.ring, closing: Arc::clone(&closing) });
        let closed = closing.wait(self.grace.saturating_add(CLOSE_BOUND));
        if let Some(poller) = self.poller.take()
            && closed
        {
            // It has no rings left, so it ends.
            let _ = poller.join();
        }
    }
}

/// The producing end, borrowed from its ring.
#[derive(Debug)]
pub struct SubmissionQueue<'ring> {
    pusher: &'ring mut Pusher,
}

impl SubmissionQueue<'_> {
    /// Accepts an entry, or gives it back. Never blocks and calls no driver. The poller sees it after [`Ring::submit`].
    ///
    /// # Errors
    /// [`PushError`] with the entry in it, unchanged.
    #[inline]
    pub fn push(&mut self, entry: Entry) -> Result<(), PushError> {
        self.pusher.push(entry)
    }

    /// Accepts an entry and gives a fence on its end, for entries of any ring and for threads to wait for: it signals when the
    /// entry has succeeded and nothing touches its local range any more, and fails with the root cause when the entry has
    /// failed, `MORE` or not. With one small allocation. `CQE_SKIP_SUCCESS` changes nothing.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_fenced(&mut self, entry: Entry) -> Result<Fence, PushError> {
        self.pusher.push_fenced(entry)
    }

    /// Accepts an entry whose end moves a timeline, and returns the value that it has reserved there. Allocates nothing.
    ///
    /// # Errors
    /// As [`push`](Self::push), and [`Refusal::WindowFull`].
    pub fn push_signalling(&mut self, entry: Entry, progress: &Progress) -> Result<u64, PushError> {
        self.pusher.push_signalling(entry, progress)
    }

    /// Accepts all of the entries, or gives all of them back: for a chain, which is submitted whole. Never blocks. They may
    /// be any entries, linked or not.
    ///
    /// # Errors
    /// [`PushChainError`] with the entries in it, and which of them was refused.
    pub fn push_chain(&mut self, entries: Vec<Entry>) -> Result<(), PushChainError> {
        self.pusher.push_chain(entries)
    }

    /// Entries pushed and not submitted.
    pub fn len(&self) -> usize {
        self.pusher.unpublished()
    }

    /// True if everything pushed is submitted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Most entries that can be outstanding: accepted, from all producers, and without their last completion in the queue.
    pub fn capacity(&self) -> usize {
        self.pusher.shared.capacity as usize
    }
}
