//! Timelines that entries move: values are reserved at push, and the word shows the completed prefix only.

use std::sync::{Arc, Weak};

use super::timeline::{Mirror, NEVER, TimelineCell};
use super::{Failure, Fence, FenceInner, FenceStatus, Kind, pack};
use crate::sync::{AtomicU64, Ordering, fence};

/// A place's state is the value that has ended there, and below it the errno that it failed with, 0 for none. 2^52
/// values last longer than any process.
const ERRNO_BITS: u32 = 12;

impl TimelineCell {
    fn place(&self, value: u64) -> &Arc<FenceInner> {
        &self.window[(value % self.window.len() as u64) as usize]
    }

    /// The next value and its place, or `None` if the one that has the place is not in the prefix yet.
    pub(crate) fn reserve(&self) -> Option<(u64, Arc<FenceInner>)> {
        let mut last = self.reserved.load(Ordering::Relaxed);
        loop {
            // Acquire: the place is not written for its last value any more, and if the word has gone past it because it
            // expired, that is counted. Saturating: `last` may be old.
            let ahead = last.saturating_sub(self.value.load(Ordering::Acquire));
            if ahead >= self.window.len() as u64 || !self.is_left(self.place(last + 1)) {
                return None;
            }
            match self.reserved.compare_exchange_weak(last, last + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => last = now,
            }
        }
        let value = last + 1;
        let place = Arc::clone(self.place(value));
        if let Kind::Place { value: own, .. } = &place.kind {
            // Whoever completes it has it through a queue from us.
            own.store(value, Ordering::Relaxed);
        }
        Some((value, place))
    }

    /// False if the entry that had the place last is on its way still, although its value has expired and the word gone on.
    fn is_left(&self, place: &Arc<FenceInner>) -> bool {
        if self.expiries.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let left = Arc::strong_count(place) == 1;
        // Whoever let go of it has read its value.
        fence(Ordering::Acquire);
        left
    }

    /// The entry that has reserved `value` ended. Moves the word as far as everything has; never blocks.
    pub(super) fn complete(&self, place: &FenceInner, value: u64, root: Option<i32>) {
        if end_place(place, value, root) {
            self.advance();
        }
    }

    /// Fails every value up to `value` whose entry has not ended with `errno`, and moves the word there. Their cores then end
    /// those entries, which find that they are told already. Never blocks.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only streams that wait have limits"))]
    pub(crate) fn expire(&self, value: u64, errno: i32) {
        // Before a place is left to its next value: see `is_left`. Relaxed: the word goes past the place after it.
        self.expiries.fetch_add(1, Ordering::Relaxed);
        for at in self.value() + 1..=value {
            end_place(self.place(at), at, Some(errno));
        }
        self.advance();
        // Once more, behind the word: a core that noticed the first count may have looked for late entries before the word was
        // past them. Release: who notices this one finds it there.
        self.expiries.fetch_add(1, Ordering::Release);
        self.registrations.fire_all();
    }

    /// The same, and the entries go on: only nobody waits for them any more.
    #[cfg(feature = "cuda")]
    pub(crate) fn abandon(&self, value: u64, errno: i32) {
        // Before the word goes on: who sees that a value has expired sees this.
        self.abandoned.store(true, Ordering::Relaxed);
        self.expire(value, errno);
    }

    /// True if entries whose value has expired are to end.
    pub(super) fn ends_late_entries(&self) -> bool {
        !self.abandoned.load(Ordering::Relaxed)
    }

    /// True if values of it may expire.
    pub(crate) fn may_expire(&self) -> bool {
        self.mirror.is_some()
    }

    /// Counts whenever values expire. A core that finds it larger than before looks for entries that are late.
    pub(crate) fn expiries(&self) -> u64 {
        self.expiries.load(Ordering::Acquire)
    }

    /// Moves the word as far as everything has ended.
    fn advance(&self) {
        let mut moved = false;
        loop {
            // After the place is stored, and after the word is moved: of two that complete neighbours at once, the later one
            // here sees what the other did, and goes on from there.
            fence(Ordering::SeqCst);
            let now = self.value.load(Ordering::Acquire);
            let next = now + 1;
            let state = self.place(next).state.load(Ordering::Acquire);
            if state >> ERRNO_BITS != next {
                break;
            }
            let errno = (state & ((1 << ERRNO_BITS) - 1)) as i32;
            // The first failure of all: nobody has moved past one, so all who get here store the same. Relaxed: whoever sees the
            // word that we move sees at least the `failed_from` that we see.
            if errno != 0 && self.failed_from.load(Ordering::Relaxed) == NEVER {
                self.failed.store(pack(FenceStatus::Failed(Failure::dependency(errno))), Ordering::Relaxed);
                self.failed_from.store(next, Ordering::Release);
            }
            moved |= self.value.compare_exchange(now, next, Ordering::Release, Ordering::Relaxed).is_ok();
        }
        if moved {
            if let Some(mirror) = &self.mirror {
                mirror.moved(self.value());
            }
            self.registrations.fire_all();
        }
    }
}

/// Writes a place's end, unless it has one. A value's end is never taken back, nor does an earlier value's come after it.
fn end_place(place: &FenceInner, value: u64, root: Option<i32>) -> bool {
    let errno = root.map_or(0, |root| -Failure::dependency(root).detail) as u64;
    let mut now = place.state.load(Ordering::Relaxed);
    while now >> ERRNO_BITS < value {
        let end = value << ERRNO_BITS | errno;
        // Release: the place, the word and what was done before go on to who waits.
        match place.state.compare_exchange_weak(now, end, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(other) => now = other,
        }
    }
    false
}

/// A timeline at 0 that entries move. Up to `window` values, at least one, may be reserved and not yet in its completed
/// prefix. Allocates here, and with each [`Progress::at`]; pushing and completing allocates nothing.
///
/// ```
/// use std::time::Duration;
/// use moonring::{Engine, Ring, fence::{self, FenceStatus}, opcode};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut ring = Ring::builder().build(8, &Engine::loopback())?;
/// let layers = fence::progress(8);
/// let mut last = 0;
/// for layer in 0..3 {
///     last = ring.submission().push_signalling(opcode::Nop::new().build().user_data(layer), &layers)?;
/// }
/// ring.submit()?;
/// let all = layers.at(last)?;
/// assert_eq!(all.wait_timeout(Duration::from_secs(5)), FenceStatus::Signalled);
/// assert_eq!(layers.value(), 3);
/// # Ok(())
/// # }
/// ```
pub fn progress(window: u32) -> Progress {
    mirrored(window, None)
}

/// The same, whose steps `mirror` hears of, and whose values may expire.
pub(crate) fn mirrored(window: u32, mirror: Option<Arc<dyn Mirror>>) -> Progress {
    let expires = mirror.is_some();
    let cell = Arc::new_cyclic(|timeline: &Weak<TimelineCell>| {
        let place =
            |_| FenceInner::new(Kind::Place { timeline: Weak::clone(timeline), value: AtomicU64::new(0), expires });
        TimelineCell::new(0, (0..window.max(1)).map(place).collect(), mirror)
    });
    Progress { cell }
}

/// A timeline whose values are the ends of entries. Clone it freely; any producer of any ring may push with it.
///
/// [`push_signalling`](crate::SubmissionQueue::push_signalling) reserves the next value, 1 first. The word shows the
/// completed *prefix*: it is at `v` once the entries of all values up to `v` have their results, however they were
/// reordered on the way, and then nothing touches the local ranges of those that succeeded.
///
/// When the prefix reaches the first value whose entry has failed, or has a result with `MORE`, that value and every later
/// one fail with its root errno, for good, before the word moves there. Values before it have signalled. The word goes on
/// and counts later entries as they end; that one of them succeeded is told by its completion. To go on after a failure,
/// make another.
#[derive(Clone, Debug)]
pub struct Progress {
    pub(crate) cell: Arc<TimelineCell>,
}

impl Progress {
    /// A fence on a value that was reserved: signalled once every entry up to it has succeeded. With one small allocation,
    /// so make it once.
    ///
    /// # Errors
    /// [`NotReservedError`] if no push has reserved the value yet: waits point backwards, so they cannot form a cycle.
    pub fn at(&self, value: u64) -> Result<Fence, NotReservedError> {
        let last = self.reserved();
        if value > last {
            return Err(NotReservedError { last, asked: value });
        }
        Ok(Fence::new(Kind::Point { timeline: Arc::clone(&self.cell), value }))
    }

    /// The completed prefix: how many entries, from the first, have all ended.
    pub fn value(&self) -> u64 {
        self.cell.value()
    }

    pub(crate) fn window(&self) -> u32 {
        self.cell.window.len() as u32
    }

    /// The last value reserved.
    pub fn reserved(&self) -> u64 {
        self.cell.reserved.load(Ordering::Relaxed)
    }

    /// The first value in the prefix that failed, and why.
    pub fn failure(&self) -> Option<(u64, Failure)> {
        self.cell.failure()
    }
}

/// A fence was asked for on a value that no push has reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no push has reserved the value {asked}: the last one is {last}; push with push_signalling first")]
#[non_exhaustive]
pub struct NotReservedError {
    /// The last value that was reserved.
    pub last: u64,
    /// The value asked for.
    pub asked: u64,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sim::Rng;

    fn failed(root: i32) -> FenceStatus {
        FenceStatus::Failed(Failure::dependency(root))
    }

    #[derive(Debug, Default)]
    struct Seen(AtomicU64);

    impl Mirror for Seen {
        fn moved(&self, value: u64) {
            self.0.fetch_max(value, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_expires_fails_and_its_entry_keeps_its_place() {
        let seen = Arc::new(Seen::default());
        let all = mirrored(2, Some(Arc::clone(&seen) as Arc<dyn Mirror>));
        let (first, late) = (all.cell.reserve().unwrap().1, all.cell.reserve().unwrap().1);
        first.tell(None);
        drop(first);
        all.cell.expire(2, 62);
        assert_eq!((all.value(), seen.0.load(Ordering::Relaxed)), (2, 2));
        assert_eq!(all.failure(), Some((2, Failure::dependency(62))));
        // The place of 1 is free for 3; that of 2 is not for 4, as long as its entry is on its way.
        let third = all.cell.reserve().unwrap();
        assert_eq!(third.0, 3);
        assert!(all.cell.reserve().is_none());
        late.tell(None);
        drop(late);
        assert_eq!(all.value(), 2, "it was told already");
        let fourth = all.cell.reserve().unwrap();
        fourth.1.tell(None);
        third.1.tell(None);
        assert_eq!((all.value(), seen.0.load(Ordering::Relaxed)), (4, 4));
        all.cell.expire(3, 62);
        assert_eq!((all.value(), all.at(1).unwrap().status()), (4, FenceStatus::Signalled));
    }

    #[test]
    fn the_word_shows_the_prefix_and_the_first_failure_stands() {
        let all = progress(4);
        let places: Vec<_> = (0..4).map(|_| all.cell.reserve().unwrap().1).collect();
        assert!(all.cell.reserve().is_none());
        let at: Vec<_> = (0..=4).map(|value| all.at(value).unwrap()).collect();
        assert!(all.at(5).is_err());
        places[3].tell(None);
        places[2].tell(Some(7));
        assert_eq!((all.value(), all.failure()), (0, None));
        places[0].tell(None);
        assert_eq!((all.value(), at[1].status(), at[2].status()), (1, FenceStatus::Signalled, FenceStatus::Pending));
        places[1].tell(Some(5));
        let got: Vec<_> = at.iter().map(Fence::status).collect();
        assert_eq!(got, [FenceStatus::Signalled, FenceStatus::Signalled, failed(5), failed(5), failed(5)]);
        assert_eq!((all.value(), all.failure()), (4, Some((2, Failure::dependency(5)))));
    }

    /// Threads complete in random orders; the word never passes one that has not ended, and ends at the last.
    #[test]
    fn threads_complete_in_random_orders() {
        for seed in 0..20 {
            println!("seed {seed}");
            let mut random = Rng(seed);
            let all = progress(16);
            for _ in 0..50 {
                let first = all.value();
                let mut places: Vec<_> = (0..16).map(|_| all.cell.reserve().unwrap()).collect();
                for at in (1..16).rev() {
                    places.swap(at, random.below(at as u64 + 1) as usize);
                }
                let last_to_end = places.last().unwrap().0;
                let (early, late) = places.split_at(15);
                std::thread::scope(|scope| {
                    for some in early.chunks(5) {
                        scope.spawn(|| some.iter().for_each(|(_, place)| place.tell(None)));
                    }
                });
                assert_eq!(all.value(), last_to_end - 1);
                late[0].1.tell(None);
                assert_eq!(all.value(), first + 16);
            }
        }
    }
}
