//! Host timelines: a 64-bit word that only grows, and a fence on each of its values.

use std::sync::Arc;

use super::{Failure, Fence, FenceStatus, Kind, pack, registration::Registrations, unpack};
use crate::code::errno;
use crate::sync::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct TimelineCell {
    value: AtomicU64,
    /// A packed failure, once no larger value will come.
    failed: AtomicU64,
    /// Cores that want to hear of every step.
    pub(crate) registrations: Registrations,
}

impl TimelineCell {
    /// Whether `value` has been reached, will never be, or is still to come.
    #[inline]
    pub(crate) fn status_at(&self, value: u64) -> FenceStatus {
        // The failure first: it is stored after the last value, so a value read after it is the last one, and a waiter
        // for a value that was reached is never told that it failed.
        let failed = self.failed.load(Ordering::Acquire);
        if self.value.load(Ordering::Acquire) >= value { FenceStatus::Signalled } else { unpack(failed) }
    }

    pub(crate) fn value(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }
}

/// A new timeline at `initial` and the one handle that moves it.
///
/// ```
/// use moonring::fence::{self, FenceStatus};
///
/// let (mut signaller, timeline) = fence::timeline(0);
/// let third = timeline.at(3);
/// signaller.signal(2)?;
/// assert_eq!(third.status(), FenceStatus::Pending);
/// signaller.signal(5)?;
/// assert_eq!(third.status(), FenceStatus::Signalled);
/// # Ok::<(), moonring::fence::BackwardsError>(())
/// ```
pub fn timeline(initial: u64) -> (TimelineSignaller, Timeline) {
    let cell = Arc::new(TimelineCell {
        value: AtomicU64::new(initial),
        failed: AtomicU64::new(pack(FenceStatus::Pending)),
        registrations: Registrations::new(),
    });
    (TimelineSignaller { cell: Arc::clone(&cell) }, Timeline { cell })
}

/// A 64-bit word that only grows. Clone it freely; any thread may read it and make fences on its values.
#[derive(Clone, Debug)]
pub struct Timeline {
    cell: Arc<TimelineCell>,
}

impl Timeline {
    /// A fence on `value`, any `u64`: signalled once the timeline has reached it, at once if it already has. Make it once and
    /// attach it to every entry that waits for the value: each call makes a new fence, with one small allocation.
    pub fn at(&self, value: u64) -> Fence {
        Fence::new(Kind::Point { timeline: Arc::clone(&self.cell), value })
    }

    /// The value reached so far.
    pub fn value(&self) -> u64 {
        self.cell.value()
    }
}

/// Moves a timeline. Dropped, it fails the fences on values that were not reached: their dependents complete with
/// `-ECANCELED` and `-EOWNERDEAD` as the cause.
#[derive(Debug)]
#[must_use = "dropping it fails the entries that wait for larger values"]
pub struct TimelineSignaller {
    cell: Arc<TimelineCell>,
}

impl TimelineSignaller {
    /// Moves the timeline to `value` and signals every fence at or below it. Never blocks. The present value again is
    /// allowed and changes nothing.
    ///
    /// # Errors
    /// [`BackwardsError`] if `value` is below the present one: a timeline only grows. Nothing changes then.
    pub fn signal(&mut self, value: u64) -> Result<(), BackwardsError> {
        let now = self.cell.value.load(Ordering::Relaxed);
        if value < now {
            return Err(BackwardsError { now, asked: value });
        }
        self.cell.value.store(value, Ordering::Release);
        self.cell.registrations.fire_all();
        Ok(())
    }

    /// Ends the timeline: no larger value will come. `errno`, a positive error number, travels to the dependents as the
    /// cause: they complete with `-ECANCELED` and `-errno` in `detail`. A number outside 1..=4095 is taken as `EIO`. Fences
    /// on values that were reached stay signalled.
    pub fn fail(self, errno: i32) {
        let errno = if (1..=4095).contains(&errno) { errno } else { errno::EIO };
        self.end(errno);
    }

    fn end(&self, errno: i32) {
        let failed = pack(FenceStatus::Failed(Failure::dependency(errno)));
        let pending = pack(FenceStatus::Pending);
        if self.cell.failed.compare_exchange(pending, failed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            self.cell.registrations.fire_all();
        }
    }
}

impl Drop for TimelineSignaller {
    fn drop(&mut self) {
        self.end(errno::EOWNERDEAD);
    }
}

/// A timeline was asked to move back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a timeline only grows: it is at {now} and was asked to go to {asked}")]
#[non_exhaustive]
pub struct BackwardsError {
    /// Where the timeline is.
    pub now: u64,
    /// Where it was asked to go.
    pub asked: u64,
}
