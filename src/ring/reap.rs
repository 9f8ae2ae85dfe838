//! Reaping: completions out of the queue, without blocking, blocking, or async.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use futures_core::Stream;

use super::eventfd::EventFd;
use super::push::OpenChain;
use super::shared::{Life, Shared};
use super::stats::Stats;
use crate::cqe::Cqe;
use crate::spsc::{Consumer, Entries};
use crate::sync::{Ordering, fence};

/// So often a waiter looks for completions before it looks at anything else: a microsecond or two.
const LOOKS: u32 = if cfg!(loom) { 0 } else { 32 };
/// A waiter spins so long at first, unless the transport's threads want the core.
const SPIN: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 5 });
/// Then it yields, and after this it sleeps. Longer than one short transfer over TCP takes in a bad minute (130 us): to be woken makes it
/// half as long again.
const AWAKE: Duration = Duration::from_micros(if cfg!(loom) { 0 } else { 250 });
/// Who waits for more than twice as many is woken so many before the last, and is awake again when that comes. Where the
/// transport's threads want the core, it is not awake before that, unless its limit is near.
const AHEAD: usize = 4;

/// Why no completion is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// Waiting would never end: nothing submitted is outstanding, and no other submitter exists.
    #[error("nothing is outstanding and no other submitter exists: submit something first")]
    NothingOutstanding,
    /// The limit passed and nothing is ready.
    #[error("no completion within the limit")]
    TimedOut,
    /// Submitting first was refused; nothing was submitted.
    #[error(transparent)]
    OpenChain(#[from] OpenChain),
    /// This is a forked child of the ring's process: what comes, comes there.
    #[error("the ring belongs to the process that forked this one; build another here, with an engine built here")]
    Forked,
    /// The poller died; everything that was outstanding has been reaped.
    #[error("the ring's poller died: everything outstanding was ended, build a new ring")]
    PollerDead,
}

#[derive(Debug)]
pub(super) struct Reaper {
    shared: Arc<Shared>,
    cq: Consumer<Cqe>,
    threads_here: bool,
}

/// What a waiter finds when it looks.
enum Look {
    /// So many are ready, and no more are to be waited for.
    Ready(usize),
    /// None is ready and none can come.
    Never(WaitError),
    /// Wait for so many.
    Wait(usize),
}

impl Reaper {
    pub(super) fn new(shared: Arc<Shared>, cq: Consumer<Cqe>, threads_here: bool) -> Reaper {
        Reaper { shared, cq, threads_here }
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn ready(&self) -> usize {
        self.cq.ready()
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn published_at(&self, position: u64) -> Option<Cqe> {
        self.cq.published_at(position)
    }

    #[inline]
    pub(super) fn queue(&mut self) -> CompletionQueue<'_> {
        CompletionQueue { shared: &self.shared, entries: self.cq.entries() }
    }

    pub(super) fn completions(&mut self, held_back: usize) -> Completions<'_> {
        Completions { reaper: self, held_back }
    }

    pub(super) fn eventfd(&mut self) -> io::Result<EventFd> {
        if let Some(eventfd) = self.shared.eventfd.get() {
            return Ok(eventfd.clone());
        }
        let eventfd = self.shared.eventfd.get_or_init({
            let new = EventFd::new()?;
            || new
        });
        // Pairs with the doorbell's, which the core rings before it looks: either it sees the descriptor, or we see what it
        // published.
        fence(Ordering::SeqCst);
        eventfd.signal_if(|| self.cq.ready() > 0);
        Ok(eventfd.clone())
    }

    /// The counts that the core has left, if the ring is closed.
    pub(super) fn last_stats(&self) -> Option<Stats> {
        self.shared.last_stats.get().cloned()
    }

    fn look(&self, count: usize, held_back: usize) -> Look {
        if !self.shared.is_here() {
            return Look::Never(WaitError::Forked);
        }
        // In this order: what the last submitter pushed is counted once it is gone, and what is counted as settled has its
        // completions visible.
        let others = self.shared.submitters.load(Ordering::Acquire) > 0;
        let outstanding = (self.shared.outstanding() as usize).saturating_sub(held_back);
        let dead = self.shared.life() == Life::Dead;
        let ready = self.cq.ready();
        let count = count.min(self.cq.capacity());
        if ready >= count {
            return Look::Ready(ready);
        }
        if outstanding == 0 && (!others || dead) {
            return match (ready, dead) {
                (0, false) => Look::Never(WaitError::NothingOutstanding),
                (0, true) => Look::Never(WaitError::PollerDead),
                _ => Look::Ready(ready),
            };
        }
        // Alone, no more than what is outstanding can come: each entry has at least one completion.
        Look::Wait(if others { count } else { count.min(ready + outstanding) })
    }

    /// `held_back` units are taken by entries that are not submitted.
    pub(super) fn wait(&mut self, count: usize, limit: Option<Duration>, held_back: usize) -> Result<usize, WaitError> {
        // First at the one word that a completion moves. To look at the others would take them off the core, which writes them
        // beside it.
        if !self.threads_here && limit.is_none_or(|limit| limit > SPIN) && self.shared.is_here() {
            for _ in 0..LOOKS {
                let ready = self.cq.ready();
                if ready >= count {
                    return Ok(ready);
                }
                std::hint::spin_loop();
            }
        }
        let mut start = Instant::now();
        let deadline = limit.and_then(|limit| start.checked_add(limit));
        let mut woken_ahead = false;
        loop {
            let want = match self.look(count, held_back) {
                Look::Ready(ready) => return Ok(ready),
                Look::Never(error) => return Err(error),
                Look::Wait(want) => want,
            };
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                let ready = self.cq.ready();
                return if ready > 0 { Ok(ready) } else { Err(WaitError::TimedOut) };
            }
            let waited = now - start;
            let ahead = !woken_ahead && want > self.cq.ready() + 2 * AHEAD;
            // A sleep would overshoot it.
            let soon = deadline.is_some_and(|deadline| deadline - now < AWAKE);
            if waited < AWAKE && (soon || !(self.threads_here && ahead)) {
                if waited < SPIN && !self.threads_here {
                    std::hint::spin_loop();
                } else {
                    yield_now();
                }
                continue;
            }
            let until = if ahead { want - AHEAD } else { want };
            let is_over = || self.cq.ready() >= until || !matches!(self.look(count, held_back), Look::Wait(_));
            // Before the doorbell's barrier, which the core has too before it reads this.
            self.shared.held_back.store(held_back, Ordering::Relaxed);
            self.shared.reaper.park(self.cq.position() + until as u64, deadline, is_over);
            if ahead && self.cq.ready() >= until {
                (woken_ahead, start) = (true, Instant::now());
            }
        }
    }

    /// Until `min_wait` for `count`, from then on for one.
    pub(super) fn wait_min(
        &mut self,
        count: usize,
        min_wait: Duration,
        limit: Duration,
        held_back: usize,
    ) -> Result<usize, WaitError> {
        let start = Instant::now();
        match self.wait(count, Some(min_wait.min(limit)), held_back) {
            Err(WaitError::TimedOut) if min_wait < limit => {
                self.wait(1, Some(limit.saturating_sub(start.elapsed())), held_back)
            }
            ended => ended,
        }
    }

    fn poll_next(&mut self, context: &mut Context<'_>, held_back: usize) -> Poll<Result<Cqe, WaitError>> {
        loop {
            // What a forked child has are copies.
            if self.shared.is_here()
                && let Some(cqe) = self.cq.next()
            {
                drop(self.queue());
                return Poll::Ready(Ok(cqe));
            }
            match self.look(1, held_back) {
                Look::Ready(_) => {}
                Look::Never(error) => return Poll::Ready(Err(error)),
                Look::Wait(_) => {
                    let position = self.cq.position() + 1;
                    self.shared.held_back.store(held_back, Ordering::Relaxed);
                    let ready = || !matches!(self.look(1, held_back), Look::Wait(_));
                    if !self.shared.reaper.poll(position, context.waker(), ready) {
                        return Poll::Pending;
                    }
                }
            }
        }
    }

    pub(super) async fn next(&mut self, held_back: usize) -> Result<Cqe, WaitError> {
        poll_fn(|context| self.poll_next(context, held_back)).await
    }
}

/// The reaping end, borrowed from its ring: an iterator over the completions that are ready, which never blocks. Dropping
/// it gives the room of what it returned back. Forgetting it instead, with [`forget`](std::mem::forget), may lose completions that
/// it has not returned.
#[derive(Debug)]
pub struct CompletionQueue<'ring> {
    shared: &'ring Shared,
    entries: Entries<'ring, Cqe>,
}

impl CompletionQueue<'_> {
    /// Completions ready to reap.
    pub fn len(&self) -> usize {
        self.entries.ready()
    }

    /// True if none is ready.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Most completions it holds. More wait, in order, with the poller.
    pub fn capacity(&self) -> usize {
        self.entries.capacity()
    }
}

impl Iterator for CompletionQueue<'_> {
    type Item = Cqe;

    #[inline]
    fn next(&mut self) -> Option<Cqe> {
        self.entries.next()
    }
}

impl Drop for CompletionQueue<'_> {
    /// Gives room back to the core, which may have completions waiting for it.
    #[inline]
    fn drop(&mut self) {
        let CompletionQueue { shared, entries } = self;
        if entries.release() > 0 {
            // Pairs with the one of the core's doorbell: either we see the flag, or its last look at the CQ sees our room.
            fence(Ordering::SeqCst);
            if shared.overflowing.load(Ordering::Relaxed) {
                shared.poller.ring_always();
            }
            if let Some(eventfd) = shared.eventfd.get() {
                // Either we see what came meanwhile, or the core sees that the queue was empty.
                eventfd.signal_if(|| entries.ready() > 0);
            }
        }
    }
}

/// Completions as a stream, borrowed from their ring. It ends when nothing is outstanding and no other submitter exists, or
/// when the poller died and all is reaped; asked again after more was submitted, it goes on. Dropping it loses nothing.
#[derive(Debug)]
pub struct Completions<'ring> {
    reaper: &'ring mut Reaper,
    held_back: usize,
}

impl Stream for Completions<'_> {
    type Item = Cqe;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Cqe>> {
        let Completions { reaper, held_back } = self.get_mut();
        reaper.poll_next(context, *held_back).map(Result::ok)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;
    use crate::fence::{self, Signaller};
    use crate::{Engine, Ring, opcode};

    const MANY: usize = 20;

    /// Waits on the ring's shared part until its sleeper is armed for a position.
    fn armed_for(shared: &Shared, position: usize) {
        let end = Instant::now() + Duration::from_secs(20);
        while shared.reaper.armed() != Some(position as u64) {
            assert!(Instant::now() < end, "{:?}, not {position}", shared.reaper.armed());
            yield_now();
        }
    }

    /// Submits so many entries that end when the signaller says.
    fn push(ring: &mut Ring, count: usize) -> Signaller {
        let (signaller, fence) = fence::host();
        for _ in 0..count {
            ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
        }
        ring.submit().unwrap();
        signaller
    }

    #[test]
    fn a_sleeper_is_woken_before_the_last_completions() {
        for threads_here in [false, true] {
            let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
            ring.completion.reaper.threads_here = threads_here;
            let shared = Arc::clone(&ring.completion.reaper.shared);
            let most = push(&mut ring, MANY - AHEAD);
            let rest = push(&mut ring, AHEAD);
            let waiter = thread::spawn(move || ring.wait(MANY));
            armed_for(&shared, MANY - AHEAD);
            most.signal();
            // It has been awake in between, and sleeps for all of them now.
            armed_for(&shared, MANY);
            rest.signal();
            assert_eq!(waiter.join().unwrap(), Ok(MANY));
        }
        // Who waits for few is woken by the last.
        let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
        let shared = Arc::clone(&ring.completion.reaper.shared);
        let few = push(&mut ring, 2 * AHEAD);
        let waiter = thread::spawn(move || ring.wait(2 * AHEAD));
        armed_for(&shared, 2 * AHEAD);
        few.signal();
        assert_eq!(waiter.join().unwrap(), Ok(2 * AHEAD));
    }

    #[test]
    fn what_was_not_taken_is_still_there() {
        let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
        for user_data in 0..50 {
            ring.submission().push(opcode::Nop::new().build().user_data(user_data)).unwrap();
        }
        ring.submit().unwrap();
        ring.wait(50).unwrap();
        for first in (0..50).step_by(5) {
            let mut completion = ring.completion();
            let taken: Vec<u64> = completion.by_ref().take(5).map(|cqe| cqe.user_data()).collect();
            assert_eq!(taken, Vec::from_iter(first..first + 5));
            assert_eq!(completion.len(), 45 - first as usize);
        }
        assert_eq!(ring.completion().next().map(|cqe| cqe.user_data()), None);
    }

    /// How often this thread has gone to sleep.
    fn sleeps() -> u32 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.unwrap().trim().parse().unwrap()
    }

    #[test]
    fn a_sleeper_sleeps_on_while_others_submit() {
        let ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
        let shared = Arc::clone(&ring.completion.reaper.shared);
        let controller = ring.controller();
        let (mut submission, mut completion) = ring.split();
        let waiter = thread::spawn(move || {
            let before = sleeps();
            (completion.wait(100), sleeps() - before)
        });
        armed_for(&shared, 100 - AHEAD);
        for _ in 0..60 {
            submission.submission().push(opcode::Nop::new().build()).unwrap();
            submission.submit().unwrap();
            while shared.outstanding() > 0 || shared.reaper.armed().is_none() {
                yield_now();
            }
            // In a further turn: who was to be woken is.
            controller.stats().unwrap();
        }
        // Nobody may submit from now on, and all that comes is less than what it waits for.
        let (signaller, fence) = fence::host();
        for _ in 0..MANY {
            submission.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
        }
        drop(submission);
        armed_for(&shared, 60 + MANY - AHEAD);
        signaller.signal();
        let (ready, slept) = waiter.join().unwrap();
        assert_eq!(ready, Ok(60 + MANY));
        assert!(slept < 30, "{slept} sleeps");
    }

    #[test]
    fn a_short_limit_is_not_slept_for() {
        let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
        ring.completion.reaper.threads_here = true;
        let signaller = push(&mut ring, MANY);
        let before = sleeps();
        for _ in 0..100 {
            assert_eq!(ring.wait_timeout(MANY, AWAKE / 2), Err(WaitError::TimedOut));
        }
        let slept = sleeps() - before;
        assert!(slept < 50, "{slept} sleeps");
        signaller.signal();
        assert_eq!(ring.wait(MANY), Ok(MANY));
    }
}
