//! Timelines: a 64-bit word that only grows, and a fence on each of its values.

use std::sync::Arc;

use super::{Failure, Fence, FenceInner, FenceStatus, Kind, pack, registration::Registrations, unpack};
use crate::code::errno;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// Value and list lie together, on one cache line: who moves it fetches it once.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct TimelineCell {
    pub(super) value: AtomicU64,
    /// Cores that want to hear of every step.
    pub(crate) registrations: Registrations,
    /// The first value that failed, and with it every larger one; [`NEVER`] if none has. Stored before `value` reaches it.
    pub(super) failed_from: AtomicU64,
    /// Why, packed. Stored before `failed_from`.
    pub(super) failed: AtomicU64,
    /// Where the ends of entries wait until all before them have ended: one place for each value that may be reserved
    /// beyond `value`. Empty for a timeline that a thread moves.
    pub(super) window: Box<[Arc<FenceInner>]>,
    /// The last value that an entry has reserved.
    pub(super) reserved: AtomicU64,
    /// Counts whenever values are failed because their time is up, whose entries are still on their way: before the word goes past
    /// them, and after.
    pub(super) expiries: AtomicU64,
    /// Those entries go on: nobody waits for them any more.
    pub(super) abandoned: AtomicBool,
    /// Hears of every step; with it values may expire.
    pub(super) mirror: Option<Arc<dyn Mirror>>,
}

/// Hears of a timeline's steps.
pub(crate) trait Mirror: Send + Sync + std::fmt::Debug {
    /// The timeline has come to `value`, or further by now. Several threads may say so at once, in any order. Never blocks.
    fn moved(&self, value: u64);
}

/// No value has failed.
pub(super) const NEVER: u64 = u64::MAX;

impl TimelineCell {
    pub(super) fn new(value: u64, window: Box<[Arc<FenceInner>]>, mirror: Option<Arc<dyn Mirror>>) -> TimelineCell {
        TimelineCell {
            value: AtomicU64::new(value),
            failed_from: AtomicU64::new(NEVER),
            failed: AtomicU64::new(pack(FenceStatus::Pending)),
            registrations: Registrations::new(),
            window,
            reserved: AtomicU64::new(value),
            expiries: AtomicU64::new(0),
            abandoned: AtomicBool::new(false),
            mirror,
        }
    }

    /// Whether `value` has been reached, will never be, or is still to come.
    #[inline]
    pub(crate) fn status_at(&self, value: u64) -> FenceStatus {
        // The word first: a failure is stored before the word reaches its value, so who sees the one sees the other.
        let reached = self.value.load(Ordering::Acquire) >= value;
        let failed_from = self.failed_from.load(Ordering::Acquire);
        if failed_from <= value && failed_from != NEVER {
            let failed = unpack(self.failed.load(Ordering::Relaxed));
            debug_assert!(failed != FenceStatus::Pending, "it is stored before `failed_from`");
            return failed;
        }
        if reached { FenceStatus::Signalled } else { FenceStatus::Pending }
    }

    pub(crate) fn value(&self) -> u64 {
        self.value.load(Ordering::Acquire)
    }

    /// The first value that failed, and why.
    pub(crate) fn failure(&self) -> Option<(u64, Failure)> {
        let value = self.failed_from.load(Ordering::Acquire);
        if value == NEVER {
            return None;
        }
        let FenceStatus::Failed(why) = unpack(self.failed.load(Ordering::Relaxed)) else {
            unreachable!("it is stored before `failed_from`")
        };
        Some((value, why))
    }

    /// Moves it to `value`, unless it is there or beyond; with a failure it and every later value fail from the next one on,
    /// if none has failed yet. One thread at a time.
    #[cfg(any(feature = "cuda", all(test, loom)))]
    pub(crate) fn move_to(&self, value: u64, failure: Option<(u64, Failure)>) {
        let now = self.value();
        if value <= now {
            return;
        }
        if let Some((from, why)) = failure
            && self.failed_from.load(Ordering::Relaxed) == NEVER
        {
            self.failed.store(pack(FenceStatus::Failed(why)), Ordering::Relaxed);
            self.failed_from.store(from.max(now + 1), Ordering::Release);
        }
        self.value.store(value, Ordering::Release);
        self.registrations.fire_all();
    }
}

/// A timeline at 0 that [`TimelineCell::move_to`] moves.
#[cfg(any(feature = "cuda", all(test, loom)))]
pub(crate) fn landed() -> Arc<TimelineCell> {
    Arc::new(TimelineCell::new(0, Box::default(), None))
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
    let cell = Arc::new(TimelineCell::new(initial, Box::default(), None));
    (TimelineSignaller { cell: Arc::clone(&cell) }, Timeline { cell })
}

/// A 64-bit word that only grows. Clone it freely; any thread may read it and make fences on its values.
///
/// A poller that has waited for it stays on its list, with about 580 bytes, when it has ended. Rings that come and go while a
/// timeline lives share one better, see [`Builder::attach`](crate::Builder::attach).
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
        self.end(errno);
    }

    fn end(&self, errno: i32) {
        let cell = &self.cell;
        // Nobody else ends it, or moves it.
        if cell.failed_from.load(Ordering::Relaxed) == NEVER {
            cell.failed.store(pack(FenceStatus::Failed(Failure::dependency(errno))), Ordering::Relaxed);
            cell.failed_from.store(cell.value().saturating_add(1), Ordering::Release);
            cell.registrations.fire_all();
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
