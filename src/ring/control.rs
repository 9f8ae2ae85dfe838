//! Calls to a ring's poller from any thread: cancelling, and waiting for quiet.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::shared::Shared;
use super::stats::Stats;
use crate::core::{Control, Controls};
use crate::opcode::{Cancel, Select};

/// How often a caller looks whether the poller that is to answer still lives.
const LOOK: Duration = Duration::from_millis(10);
/// How long the counts are waited for.
const STATS_LIMIT: Duration = Duration::from_secs(1);

/// An answer that the poller owes a caller.
#[derive(Debug)]
pub(crate) struct Reply<T> {
    answer: Mutex<Option<T>>,
    given: Condvar,
}

impl<T> Reply<T> {
    pub(super) fn new() -> Arc<Reply<T>> {
        Arc::new(Reply { answer: Mutex::new(None), given: Condvar::new() })
    }

    /// The answer, if it was given.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn taken(&self) -> Option<T> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn give(&self, answer: T) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        self.given.notify_all();
    }

    /// Blocks until there is an answer, `end` passes, or `gone` says that none will come.
    fn wait(&self, end: Option<Instant>, gone: impl Fn() -> bool) -> Option<T> {
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            // In this order: an answer that was given before the poller went counts.
            let gone = gone();
            if let Some(answer) = answer.take() {
                return Some(answer);
            }
            let left = end.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()).min(LOOK));
            if gone || left.is_zero() {
                return None;
            }
            answer = self.given.wait_timeout(answer, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Talks to a ring's poller from any thread, besides the queues: works on a full ring, and takes no unit of its capacity.
/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct Controller {
    pub(super) shared: Arc<Shared>,
    pub(super) controls: Arc<Controls>,
    pub(super) ring: u32,
}

impl Controller {
    /// Cancels what was submitted before this call, as a [`Cancel`] entry would, and returns how many entries it cancelled;
    /// without [`Cancel::all`] at most one. Posts no completion of its own; the cancelled entries have theirs. Blocks for a
    /// turn or two of the poller.
    ///
    /// # Errors
    /// [`ControlError::Gone`] if the ring is closed or its poller died; [`ControlError::Forked`] in a forked child.
    pub fn cancel(&self, cancel: Cancel) -> Result<usize, ControlError> {
        self.check_home()?;
        let reply = Reply::new();
        let (op_flags, key) = cancel.parts();
        self.controls.send(Control::Cancel { ring: self.ring, op_flags, key, reply: Arc::clone(&reply) });
        reply.wait(None, || self.is_gone()).ok_or(ControlError::Gone)
    }

    /// Blocks until nothing that was submitted to this ring before this call and is selected touches its local range any more:
    /// it has ended, and the transport has let go of it. For at most `limit`.
    ///
    /// # Errors
    /// [`ControlError::Limit`] if the limit passes first; [`ControlError::Gone`] and [`ControlError::Forked`] as for [`cancel`](Self::cancel).
    pub fn quiesce(&self, select: Select, limit: Duration) -> Result<(), ControlError> {
        self.check_home()?;
        let reply = Reply::new();
        self.controls.send(Control::Quiesce { ring: self.ring, select, reply: Arc::clone(&reply) });
        let end = Instant::now().checked_add(limit);
        match reply.wait(end, || self.is_gone()) {
            Some(()) => Ok(()),
            None if self.is_gone() => Err(ControlError::Gone),
            None => Err(ControlError::Limit(limit)),
        }
    }

    /// The ring's counts, see [`Stats`]. Blocks for a turn or two of the poller, at most 1 s. Of a ring whose poller died these
    /// are the counts with everything that was ended because of that; of a ring that is closed the last ones, for ever.
    ///
    /// # Errors
    /// [`ControlError::NoAnswer`] if the poller does not answer within 1 s: something holds it up, such as a driver's call.
    /// [`ControlError::Forked`] in a forked child.
    pub fn stats(&self) -> Result<Stats, ControlError> {
        self.check_home()?;
        let last = || self.shared.last_stats.get().cloned();
        if let Some(stats) = last() {
            return Ok(stats);
        }
        let reply = Reply::new();
        self.controls.send(Control::Stats { ring: self.ring, reply: Arc::clone(&reply) });
        let end = Instant::now().checked_add(STATS_LIMIT);
        let answer = reply.wait(end, || self.shared.last_stats.get().is_some());
        answer.or_else(last).ok_or(ControlError::NoAnswer(STATS_LIMIT))
    }

    fn check_home(&self) -> Result<(), ControlError> {
        if self.controls.is_here() { Ok(()) } else { Err(ControlError::Forked) }
    }

    fn is_gone(&self) -> bool {
        !self.shared.is_open()
    }
}

/// A call to the poller had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The limit passed.
    #[error("not quiet within {0:?}: the transport still has some of it")]
    Limit(Duration),
    /// The poller is there and did not answer in time.
    #[error(
        "the ring's poller did not answer within {0:?}: a call of its transport's driver, or of a fence, holds it up"
    )]
    NoAnswer(Duration),
    /// This is a forked child of the ring's process.
    #[error("the ring belongs to the process that forked this one, and so does its poller")]
    Forked,
    /// There is nobody to ask.
    #[error("the ring is closed, or its poller died")]
    Gone,
}
