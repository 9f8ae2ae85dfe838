//! The ring: where entries go in and completions come out.

mod close;
pub(crate) mod control;
mod eventfd;
pub(crate) mod future;
mod halves;
pub(crate) mod message;
pub(crate) mod parts;
mod push;
mod reap;
mod regions;
pub(crate) mod share;
pub(crate) mod shared;
#[cfg(all(test, not(loom)))]
mod simulated;
pub(crate) mod stats;

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub use close::CloseReport;
pub use control::{ControlError, Controller};
pub use eventfd::EventFd;
pub use future::{Ended, EntryFuture};
pub use halves::{Completion, Submission};
pub use message::Messages;
pub use push::{OpenChain, PushChainError, PushError, Refusal, Submitter};
pub use reap::{CompletionQueue, Completions, WaitError};
pub use stats::{Counts, PeerStats, StageCounts, Stats};

use crate::core::{Control, MAX_SLOTS, Refused};
use crate::cqe::Cqe;
use crate::engine::Engine;
use crate::entry::Entry;
use crate::fence::{Fence, Progress};
use crate::fork;
use crate::poller::Poller;
use crate::spsc;
use crate::trace::event;
use halves::Hold;
use push::Pusher;
use reap::Reaper;
use shared::{Shared, slots_of};

/// Settings of a ring.
#[derive(Clone, Debug)]
pub struct Builder {
    idle: Duration,
    grace: Duration,
    attach: Option<Weak<Poller>>,
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

    /// Shares the poller thread of `other`, whatever engine it is on, instead of starting one; on the same engine, the two
    /// also share what the poller asks of the transport. Each ring has its turn. The thread keeps the [`idle`](Self::idle)
    /// time that its first ring asked for, and ends when the last of its rings is closed; a panic on it ends them all.
    /// io_uring's `ATTACH_WQ`.
    ///
    /// ```
    /// # use moonring::{Engine, Ring, opcode};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = Engine::loopback();
    /// let loads = Ring::builder().build(256, &engine)?;
    /// let mut stores = Ring::builder().attach(&loads).build(64, &engine)?;
    /// drop(loads); // the other goes on
    /// stores.submission().push(opcode::Nop::new().build())?;
    /// stores.submit_and_wait(1)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn attach(mut self, other: &Ring) -> Builder {
        self.attach = Some(Arc::downgrade(other.completion.hold.poller()));
        self
    }

    /// How long dropping the ring waits for transfers that are with the transport, 1 s unless set. 0 does not wait.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Builder {
        self.grace = grace;
        self
    }

    /// Builds a ring on `engine` that takes `entries` entries at a time, accepted and not ended, and starts its poller
    /// thread, unless it is [attached](Self::attach) to another's. Its completion queue has room
    /// for at least twice as many. Any number in the range will do, not only powers of two.
    ///
    /// # Errors
    /// `InvalidInput` if `entries` is not in 1..=[`Ring::MAX_ENTRIES`]; `NotConnected` if the ring that
    /// it is attached to is closed and was its poller's last, or if it or the engine was made before this process was forked
    /// off; `QuotaExceeded` if that poller's rings, each with its [reserve](Ring::CANCEL_RESERVE), have 2^24 - 1 entries
    /// together already, or would; otherwise what starting the thread says.
    pub fn build(self, entries: u32, engine: &Engine) -> io::Result<Ring> {
        if !(1..=Ring::MAX_ENTRIES).contains(&entries) {
            let text = format!("a ring of {entries} entries: it can have 1 to {}", Ring::MAX_ENTRIES);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        if !engine.is_here() {
            return Err(io::Error::new(io::ErrorKind::NotConnected, fork::ENGINE_IS_ELSEWHERE));
        }
        let poller = match &self.attach {
            None => Arc::new(Poller::spawn(slots_of(entries), self.idle)?),
            Some(other) => joined(other, entries)?,
        };
        Ok(self.on(poller, entries, engine))
    }

    /// The ring on a poller that has a place for it.
    fn on(&self, poller: Arc<Poller>, entries: u32, engine: &Engine) -> Ring {
        let controls = &poller.controls;
        let shared = Arc::new(Shared::new(engine.clone(), entries, Arc::clone(&controls.doorbell)));
        let (sq_in, sq) = spsc::ring(entries as usize);
        let (cq, cq_out) = spsc::ring(2 * entries as usize);
        let ring = controls.next_ring();
        controls.send(Control::Ring { ring, shared: Arc::clone(&shared), sq, cq });
        event!(DEBUG, ring, entries, engine = engine.name(), attached = self.attach.is_some(), "ring built");
        let threads_here = engine.transport().caps().threads_here;
        let pusher = Pusher::owner(Arc::clone(&shared), Arc::clone(controls), ring, sq_in);
        let hold = Arc::new(Hold { ring, grace: self.grace, poller: Some(poller) });
        Ring {
            submission: Submission::new(Arc::clone(&hold), pusher),
            completion: Completion { hold, reaper: Reaper::new(shared, cq_out, threads_here) },
        }
    }

    /// The ring alone: a test gives turns to a core with its controls. Attached, it is on the other's core.
    #[cfg(test)]
    pub(crate) fn without_poller(&self, entries: u32, engine: &Engine) -> Ring {
        let poller = match &self.attach {
            None => Arc::new(Poller::without_thread(slots_of(entries))),
            Some(other) => joined(other, entries).expect("the other ring lives"),
        };
        self.on(poller, entries, engine)
    }
}

/// The poller to attach to, with a place for a ring of `entries`.
fn joined(other: &Weak<Poller>, entries: u32) -> io::Result<Arc<Poller>> {
    let poller = other.upgrade();
    let joined = poller.as_ref().map_or(Err(Refused::Gone), |poller| poller.controls.join(slots_of(entries)));
    match (joined, poller) {
        (Ok(()), Some(poller)) => Ok(poller),
        (Err(Refused::Full(all)), _) => {
            let text = format!(
                "a ring of {entries} entries on a poller whose rings have {all}: together they can have {MAX_SLOTS}; do \
                 not attach it"
            );
            Err(io::Error::new(io::ErrorKind::QuotaExceeded, text))
        }
        (Err(Refused::Elsewhere), _) => {
            let text =
                "the ring to attach to belongs to the process that forked this one; attach to one that was built here";
            Err(io::Error::new(io::ErrorKind::NotConnected, text))
        }
        _ => {
            let text = "the ring to attach to is closed, and its poller with it; attach to one that lives, or to none";
            Err(io::Error::new(io::ErrorKind::NotConnected, text))
        }
    }
}

/// A submission queue, a completion queue and the poller thread between them.
///
/// The ring is owned by one thread at a time, which pushes without any locked instruction; other threads push through
/// [`Submitter`]s. Entries become visible to the poller with [`submit`](Self::submit), all that were pushed at once. To
/// submit on one thread and reap on another, [`split`](Self::split) it.
///
/// Dropping the ring ends what was not issued, waits for what was (see [`Builder::grace`]) and then, if transfers are
/// still running, for the transport to be closed if nobody else uses the engine; if somebody does, the engine and its
/// memory are kept for ever. Every clone of the engine, every [`Registered`](crate::Registered) and every other ring is
/// such a user. It returns within the grace time and 10 s. Completions that were not reaped are lost with it;
/// [`close`](Self::close) hands them over.
#[derive(Debug)]
pub struct Ring {
    // In this order: what was pushed is submitted before the ring closes.
    submission: Submission,
    completion: Completion,
}

#[cfg(test)]
impl Ring {
    pub(crate) fn controls(&self) -> Arc<crate::core::Controls> {
        Arc::clone(&self.completion.hold.poller().controls)
    }
}

impl Ring {
    /// Most entries of a ring.
    pub const MAX_ENTRIES: u32 = 1 << 20;
    /// How many [`Cancel`](crate::opcode::Cancel)s and [`TimeoutRemove`](crate::opcode::TimeoutRemove)s may be pushed on a full ring.
    pub const CANCEL_RESERVE: u32 = shared::CANCEL_RESERVE;

    /// Settings for a new ring.
    pub fn builder() -> Builder {
        Builder { idle: Duration::from_micros(100), grace: Duration::from_secs(1), attach: None }
    }

    /// The submission queue. Looks whether the ring takes entries; pushes into the queue need not look again.
    #[inline]
    pub fn submission(&mut self) -> SubmissionQueue<'_> {
        self.submission.submission()
    }

    /// The completion queue: an iterator over what is there, which never blocks. Drop it to give the room back.
    #[inline]
    pub fn completion(&mut self) -> CompletionQueue<'_> {
        self.completion.completion()
    }

    /// Shows the poller everything that was pushed, at once, and wakes it if it sleeps. Returns how many entries. Never
    /// blocks.
    ///
    /// # Errors
    /// [`OpenChain`] if the last entry is linked to a next one; nothing is submitted then.
    #[inline]
    pub fn submit(&mut self) -> Result<usize, OpenChain> {
        self.submission.submit()
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
        self.completion.reaper.wait(count, None, self.submission.pusher.held_back())
    }

    /// The same for at most `limit`. Returns what is ready then, if anything is.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), and [`WaitError::TimedOut`] if nothing is ready at the limit: io_uring's `ETIME`.
    pub fn wait_timeout(&mut self, count: usize, limit: Duration) -> Result<usize, WaitError> {
        self.completion.reaper.wait(count, Some(limit), self.submission.pusher.held_back())
    }

    /// Blocks until `count` completions are ready to reap, until `min_wait` has passed and one is, or until `limit`. Returns
    /// how many are. So a burst costs one wake-up, and a lone completion is held up for `min_wait` at most. io_uring's
    /// `min_wait_usec`.
    ///
    /// # Errors
    /// As [`wait_timeout`](Self::wait_timeout).
    pub fn wait_min(&mut self, count: usize, min_wait: Duration, limit: Duration) -> Result<usize, WaitError> {
        self.completion.reaper.wait_min(count, min_wait, limit, self.submission.pusher.held_back())
    }

    /// The next completion, for async code. Dropping the future loses nothing.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub async fn next(&mut self) -> Result<Cqe, WaitError> {
        self.completion.reaper.next(self.submission.pusher.held_back()).await
    }

    /// Completions as a [`Stream`](futures_core::Stream), which ends when everything submitted has completed and no other
    /// submitter exists.
    pub fn completions(&mut self) -> Completions<'_> {
        self.completion.reaper.completions(self.submission.pusher.held_back())
    }

    /// The ring's descriptor for foreign event loops, see [`EventFd`]: made at the first call, the same one at each further.
    /// If completions are ready, it is readable at once. Rings without one pay nothing for it.
    ///
    /// # Errors
    /// What the system says, such as that the process has too many descriptors.
    pub fn eventfd(&mut self) -> io::Result<EventFd> {
        self.completion.eventfd()
    }

    /// A submitter for another thread. From the first one on, the owner's pushes take an atomic exchange each, for good.
    /// Allocates its lane, see [`Submitter`]; an owner that waits takes it as somebody who may still push.
    pub fn submitter(&mut self) -> Submitter {
        self.submission.submitter()
    }

    /// The two halves, each for a thread of its own. The ring closes when both are dropped.
    ///
    /// From now on whoever waits does not know what the other half will do: waiting with nothing outstanding is no error
    /// while it lives. There is no way back to a `Ring`.
    ///
    /// ```
    /// # use moonring::{Engine, Ring, WaitError, opcode};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (mut submission, mut completion) = Ring::builder().build(64, &Engine::loopback())?.split();
    /// let producer = std::thread::spawn(move || {
    ///     for n in 0..10 {
    ///         submission.submission().push(opcode::Nop::new().build().user_data(n)).unwrap();
    ///     }
    ///     submission.submit().unwrap();
    /// });
    /// completion.wait(10)?;
    /// assert_eq!(completion.completion().map(|completion| completion.user_data()).sum::<u64>(), 45);
    /// producer.join().unwrap();
    /// assert_eq!(completion.wait(1), Err(WaitError::NothingOutstanding));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "dropping both halves closes the ring"]
    pub fn split(mut self) -> (Submission, Completion) {
        self.submission.count();
        (self.submission, self.completion)
    }

    /// This ring as the target of messages: completions that entries of other rings post here. From the first one on, the
    /// owner's pushes take an atomic exchange each, for good.
    pub fn messages(&mut self) -> Messages {
        self.submission.messages()
    }

    /// Calls to the poller from any thread: cancelling, and waiting for quiet.
    pub fn controller(&self) -> Controller {
        self.submission.controller()
    }

    /// What the ring has counted, as [`Controller::stats`].
    ///
    /// # Errors
    /// As there.
    pub fn stats(&self) -> Result<Stats, ControlError> {
        self.controller().stats()
    }

    /// The engine it was built on.
    pub fn engine(&self) -> &Engine {
        self.submission.engine()
    }
}

/// The producing end, borrowed from its ring.
#[derive(Debug)]
pub struct SubmissionQueue<'ring> {
    pusher: &'ring mut Pusher,
}

impl SubmissionQueue<'_> {
    /// Accepts an entry, or gives it back. Never blocks and calls no driver. The poller sees it after [`Ring::submit`]
    /// or [`Submission::submit`].
    ///
    /// # Errors
    /// [`PushError`] with the entry in it, unchanged.
    #[inline(always)]
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

    /// Accepts an entry whose completions go to a future, not into the completion queue. [`EntryFuture`] says what becomes of
    /// both when one is dropped. The future hears of every end: `CQE_SKIP_SUCCESS` does what it does to the rest of a chain and
    /// no more, and of a multishot Timeout only the last completion comes. Allocates the future's state.
    ///
    /// Waiting on the ring counts completions of its queue, so it ends with
    /// [`NothingOutstanding`](WaitError::NothingOutstanding) when entries with futures were all there was.
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub fn push_future(&mut self, entry: Entry) -> Result<EntryFuture, PushError> {
        self.pusher.push_future(entry)
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

    /// Takes the link off the last entry that was pushed, so that what was pushed can be submitted: the way out for a chain
    /// that finds the ring full before its end. [`push_chain`](Self::push_chain) does not get there.
    pub fn end_chain(&mut self) {
        self.pusher.close_chain();
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
