//! Fences: things that will have happened.
//!
//! A [`Fence`] is a dependency. Attach it to an entry with [`Entry::wait`](crate::Entry::wait) and the transport is not
//! called for that entry before the fence has signalled. One fence may be attached to any number of entries, of any
//! number of rings. Where fences come from:
//!
//! * [`host`]: a thread says that something is done ([`Signaller::signal`]);
//! * [`timeline()`]: a word that only grows, and [`Timeline::at`] a fence on each value;
//! * an entry that was pushed with [`push_fenced`](crate::SubmissionQueue::push_fenced): its own end;
//! * an entry with a future: [`EntryFuture::fence`](crate::EntryFuture::fence);
//! * [`progress()`]: a timeline whose values are the ends of entries, in the order of their pushes;
//! * `cuda::Stream::fence` (feature `cuda`): a CUDA event, recorded behind the work that is queued on a stream;
//! * `cuda::Timeline` (feature `cuda`): a word in pinned memory, which a stream moves.
//!
//! A fence signals or fails once and stays so. If it fails, the entries that wait for it complete at the gate, at the
//! first of their fences that failed, and are never issued:
//!
//! * after a host fence, a timeline or an entry with `-ECANCELED`, the root cause as a negative errno in
//!   [`Cqe::detail`](crate::Cqe::detail), which is kept from edge to edge;
//! * after a CUDA event or timeline with `-EIO`, the driver's `CUresult` in `detail`.
//!
//! Fences may be cloned, sent, asked and dropped by any thread. Dropping one that entries wait for changes nothing: they
//! keep it. What a thread did before it signalled is visible to the transport when it is called because of that signal.

mod progress;
mod registration;
mod timeline;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use event_listener::{Listener, listener};

#[cfg(any(feature = "cuda", all(test, loom)))]
pub(crate) use progress::mirrored;
pub use progress::{NotReservedError, Progress, progress};
pub(crate) use registration::{Inbox, Node, NodeKey, recheck_barrier};
pub(crate) use timeline::TimelineCell;
pub use timeline::{BackwardsError, Timeline, TimelineSignaller, timeline};
#[cfg(any(feature = "cuda", all(test, loom)))]
pub(crate) use timeline::{Mirror, landed};

use crate::code::errno;
use crate::ring::future::Route;
use crate::sync::{AtomicU64, Ordering};
use registration::Registrations;

/// What is known of a fence. `Signalled` and `Failed` are final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceStatus {
    /// It has not happened yet.
    Pending,
    /// It has happened.
    Signalled,
    /// It will never happen.
    Failed(Failure),
}

/// Why a fence failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The positive errno that dependents complete with.
    pub errno: i32,
    /// What goes into their completion's `detail`: the root errno as a negative number, or a driver's own number.
    pub detail: i32,
}

impl Failure {
    /// A dependency failed with `root`, a positive errno. A number that is none is taken as `EIO`.
    pub(crate) fn dependency(root: i32) -> Failure {
        let root = if (1..=4095).contains(&root) { root } else { errno::EIO };
        Failure { errno: errno::ECANCELED, detail: -root }
    }
}

const PENDING: u64 = 0;
const SIGNALLED: u64 = 1;
const FAILED: u64 = 2;

/// `FenceStatus` in one word: kind in the low two bits, errno in bits 2..32, detail above.
fn pack(status: FenceStatus) -> u64 {
    match status {
        FenceStatus::Pending => PENDING,
        FenceStatus::Signalled => SIGNALLED,
        FenceStatus::Failed(f) => FAILED | u64::from((f.errno as u32) << 2) | (u64::from(f.detail as u32) << 32),
    }
}

fn unpack(word: u64) -> FenceStatus {
    match word & 3 {
        PENDING => FenceStatus::Pending,
        SIGNALLED => FenceStatus::Signalled,
        _ => FenceStatus::Failed(Failure { errno: (word as u32 >> 2) as i32, detail: (word >> 32) as i32 }),
    }
}

/// A dependency that entries can wait for. Cheap to clone; see the [module](self).
#[derive(Clone)]
pub struct Fence(pub(crate) Arc<FenceInner>);

/// A fence that nobody announces: the poller asks it.
pub(crate) trait Polled: Send + Sync + fmt::Debug {
    /// Asks once, without blocking. Called from poller threads only, never for two fences of a group at a time by the
    /// same poller. A panic fails the fence.
    fn poll(&self) -> FenceStatus;

    /// The key of a group whose members signal in the order of the number beside it, so that only the oldest is asked;
    /// `None` stands alone.
    fn group(&self) -> Option<(u64, u64)>;

    /// The shortest time between two looks, in nanoseconds: what asking costs others.
    fn least_interval(&self) -> u64;
}

#[derive(Debug)]
pub(crate) enum Kind {
    /// Somebody calls [`FenceInner::settle`].
    Told,
    /// A value of a timeline.
    Point { timeline: Arc<TimelineCell>, value: u64 },
    /// A place in a timeline's window, for the entry that has reserved `value`. Never waited for: its timeline moves.
    /// `expires`: that may go on without the entry.
    Place { timeline: Weak<TimelineCell>, value: AtomicU64, expires: bool },
    /// The poller asks and settles.
    Polled(Box<dyn Polled>),
    /// Told as the end of an entry that has a future.
    Routed(Box<Route>),
}

/// State and list lie together, on one cache line: who signals fetches it once.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct FenceInner {
    state: AtomicU64,
    /// The cores that want to hear of it.
    pub(crate) registrations: Registrations,
    pub(crate) kind: Kind,
}

impl FenceInner {
    pub(crate) fn new(kind: Kind) -> Arc<FenceInner> {
        Arc::new(FenceInner { state: AtomicU64::new(PENDING), registrations: Registrations::new(), kind })
    }

    /// The timeline that it is a value of.
    #[cfg(all(test, loom))]
    pub(crate) fn timeline(&self) -> Option<&Arc<TimelineCell>> {
        match &self.kind {
            Kind::Point { timeline, .. } => Some(timeline),
            Kind::Told | Kind::Place { .. } | Kind::Polled(_) | Kind::Routed(_) => None,
        }
    }

    /// Where the completions of its entry go, if that has a future.
    pub(crate) fn route(&self) -> Option<&Route> {
        match &self.kind {
            Kind::Routed(route) => Some(route),
            Kind::Told | Kind::Point { .. } | Kind::Place { .. } | Kind::Polled(_) => None,
        }
    }

    #[inline]
    pub(crate) fn status(&self) -> FenceStatus {
        match &self.kind {
            Kind::Point { timeline, value } => timeline.status_at(*value),
            Kind::Told | Kind::Place { .. } | Kind::Polled(_) | Kind::Routed(_) => {
                unpack(self.state.load(Ordering::Acquire))
            }
        }
    }

    /// Sets the final state, once, and tells every registered core. Never blocks, allocates nothing.
    pub(crate) fn settle(&self, status: FenceStatus) {
        debug_assert!(status != FenceStatus::Pending);
        // Two pollers may ask a shared event at once: the first answer stands. Release: what was done before goes on to who
        // sees the state.
        if self.state.compare_exchange(PENDING, pack(status), Ordering::Release, Ordering::Relaxed).is_ok() {
            self.registrations.close(status == FenceStatus::Signalled);
        }
    }

    /// The entry that feeds it has ended: with the positive errno `root`, or with success. Called once; never blocks.
    pub(crate) fn tell(&self, root: Option<i32>) {
        match &self.kind {
            Kind::Place { timeline, value, .. } => {
                // If it is gone, nobody can wait for the value.
                if let Some(timeline) = timeline.upgrade() {
                    timeline.complete(self, value.load(Ordering::Relaxed), root);
                }
            }
            _ => {
                self.settle(root.map_or(FenceStatus::Signalled, |root| FenceStatus::Failed(Failure::dependency(root))))
            }
        }
    }

    /// For an entry that feeds it: the timeline, if values of it may expire, and whether this one has, so that the entry is
    /// to end.
    pub(crate) fn expiring(&self) -> Option<(Arc<TimelineCell>, bool)> {
        match &self.kind {
            Kind::Place { timeline, value, expires: true } => {
                let timeline = timeline.upgrade()?;
                // The word goes past an entry that has told nothing only then.
                let expired = timeline.value() >= value.load(Ordering::Relaxed) && timeline.ends_late_entries();
                Some((timeline, expired))
            }
            _ => None,
        }
    }
}

impl Fence {
    pub(crate) fn new(kind: Kind) -> Fence {
        Fence(FenceInner::new(kind))
    }

    /// A fence that a poller asks until it answers.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "CUDA's are the polled fences"))]
    pub(crate) fn polled(polled: Box<dyn Polled>) -> Fence {
        Fence::new(Kind::Polled(polled))
    }

    /// Asks a polled fence once, as a poller does, and settles it if it has an answer.
    #[cfg(feature = "mooncake")]
    pub(crate) fn ask(&self) -> FenceStatus {
        let known = self.status();
        let Kind::Polled(polled) = &self.0.kind else { return known };
        if known != FenceStatus::Pending {
            return known;
        }
        let answer = polled.poll();
        if answer != FenceStatus::Pending {
            self.0.settle(answer);
        }
        answer
    }

    /// A fence that has signalled.
    #[cfg(feature = "cuda")]
    pub(crate) fn reached() -> Fence {
        let fence = Fence::new(Kind::Told);
        fence.0.settle(FenceStatus::Signalled);
        fence
    }

    /// What is known now. Never blocks and calls no driver: a CUDA event, and a value of a stream's timeline, read as pending
    /// until a poller has seen them done, which it does only while an entry waits for them. To learn of one, push a [`Wait`](crate::opcode::Wait).
    pub fn status(&self) -> FenceStatus {
        self.0.status()
    }

    /// Blocks the thread until the fence has signalled or failed, for at most `limit`: what is known then. A CUDA event is
    /// looked at only while an entry waits for it, so this alone does not learn of one. In a forked child a fence of before the
    /// fork is not waited for: who signals it is in the parent.
    ///
    /// An entry's fence needs nobody to reap its ring, but the entry must have been submitted.
    pub fn wait_timeout(&self, limit: Duration) -> FenceStatus {
        let end = Instant::now().checked_add(limit);
        let heard_of = match &self.0.kind {
            Kind::Point { timeline, .. } => &timeline.registrations,
            Kind::Told | Kind::Place { .. } | Kind::Polled(_) | Kind::Routed(_) => &self.0.registrations,
        };
        let mut status = self.status();
        while status == FenceStatus::Pending && heard_of.home.is_here() {
            // Listen before looking: whoever settles it after the look finds the listener.
            listener!(heard_of.threads => listener);
            recheck_barrier();
            status = self.status();
            if status != FenceStatus::Pending {
                break;
            }
            match end {
                None => listener.wait(),
                Some(end) => {
                    if listener.wait_deadline(end).is_none() {
                        return self.status();
                    }
                }
            }
            status = self.status();
        }
        status
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fence").field(&self.status()).finish()
    }
}

/// A new host fence and the one handle that signals it. Costs one small allocation; never blocks.
///
/// ```
/// use moonring::fence::{self, FenceStatus};
///
/// let (signaller, fence) = fence::host();
/// assert_eq!(fence.status(), FenceStatus::Pending);
/// signaller.signal();
/// assert_eq!(fence.status(), FenceStatus::Signalled);
/// ```
pub fn host() -> (Signaller, Fence) {
    let fence = Fence::new(Kind::Told);
    (Signaller { fence: Some(Arc::clone(&fence.0)) }, fence)
}

/// Signals one host fence, once. Dropped without a word it fails the fence: its dependents complete with `-ECANCELED`
/// and `-EOWNERDEAD` as the cause, instead of waiting for ever.
#[derive(Debug)]
#[must_use = "dropping a signaller fails the entries that wait for its fence"]
pub struct Signaller {
    fence: Option<Arc<FenceInner>>,
}

impl Signaller {
    /// It has happened. Everything this thread did before is visible to whatever runs because of it. Never blocks.
    pub fn signal(mut self) {
        self.settle(FenceStatus::Signalled);
    }

    /// It will never happen. `errno`, a positive error number such as 5 for `EIO`, travels to the dependents as the
    /// cause: they complete with `-ECANCELED` and `-errno` in `detail`. A number outside 1..=4095 is taken as `EIO`. Never
    /// blocks.
    pub fn fail(mut self, errno: i32) {
        self.settle(FenceStatus::Failed(Failure::dependency(errno)));
    }

    fn settle(&mut self, status: FenceStatus) {
        if let Some(fence) = self.fence.take() {
            fence.settle(status);
        }
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        self.settle(FenceStatus::Failed(Failure::dependency(errno::EOWNERDEAD)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_survives_packing() {
        for status in [
            FenceStatus::Pending,
            FenceStatus::Signalled,
            FenceStatus::Failed(Failure { errno: 125, detail: -130 }),
            FenceStatus::Failed(Failure { errno: 4095, detail: i32::MIN }),
            FenceStatus::Failed(Failure { errno: 5, detail: 700 }),
        ] {
            assert_eq!(unpack(pack(status)), status);
        }
    }

    #[test]
    fn a_dropped_signaller_fails_its_fence() {
        let (signaller, fence) = host();
        drop(signaller);
        assert_eq!(
            fence.status(),
            FenceStatus::Failed(Failure { errno: errno::ECANCELED, detail: -errno::EOWNERDEAD })
        );
    }

    #[test]
    fn the_first_answer_stands() {
        let (signaller, fence) = host();
        signaller.fail(7);
        fence.0.settle(FenceStatus::Signalled);
        assert_eq!(fence.status(), FenceStatus::Failed(Failure { errno: errno::ECANCELED, detail: -7 }));
    }
}
