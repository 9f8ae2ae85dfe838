//! The only way in moonring to sleep and to be woken.
//!
//! A sleeper *arms* the doorbell with the position that it waits for, then looks at every one of its inputs once
//! more, and only then sleeps. Whoever makes input available does so first and *rings* afterwards. Both sides have a
//! SeqCst barrier between their store and their load, so at least one of them sees the other: either the sleeper
//! finds the input, or the ringer finds the sleeper. Acquire and release are not enough for that, not even on x86:
//! a store and a later load of another word may swap. io_uring's `NEED_WAKEUP` flag is the same protocol.
//!
//! Ringing costs one barrier and one load while nobody sleeps. The sleeper's side may block; the ringer's side takes
//! event-listener's internal lock only when it really wakes somebody.

use std::task::Waker;
use std::time::Instant;

use event_listener::{Event, Listener, listener};

use crate::fork::Home;
use crate::sync::{AtomicU64, AtomicWaker, Ordering, fence};

/// Armed with this, nothing wakes: nobody sleeps.
const AWAKE: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct Doorbell {
    /// The position that the sleeper waits for, or [`AWAKE`]. io_uring calls the poller's flag `NEED_WAKEUP`.
    armed: AtomicU64,
    threads: Event,
    task: AtomicWaker,
    home: Home,
}

impl Doorbell {
    pub(crate) fn new() -> Self {
        Doorbell { armed: AtomicU64::new(AWAKE), threads: Event::new(), task: AtomicWaker::new(), home: Home::here() }
    }

    /// Wakes the sleeper if it waits for `position` or an earlier one; true if one sleeps on, for a later one. Call it after
    /// the input is visible.
    #[inline]
    pub(crate) fn ring(&self, position: u64) -> bool {
        // Pairs with the barrier in `arm`: our input was stored before it, the sleeper's word is loaded after it.
        fence(Ordering::SeqCst);
        let armed = self.armed.load(Ordering::Relaxed);
        if armed <= position {
            self.wake();
            return false;
        }
        armed != AWAKE
    }

    /// Wakes the sleeper whatever it waits for: something it must look at has changed.
    pub(crate) fn ring_always(&self) {
        self.ring(AWAKE - 1);
    }

    #[cold]
    fn wake(&self) {
        // In a forked child nobody sleeps, and a thread that it does not have may hold the lock. Relaxed: nothing is handed over
        // with the word; the sleeper looks at its inputs, and both ways to wake it have orders of their own.
        if self.home.is_here() && self.armed.swap(AWAKE, Ordering::Relaxed) != AWAKE {
            self.threads.notify(usize::MAX);
            self.task.wake();
        }
    }

    /// The position that a sleeper waits for.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn armed(&self) -> Option<u64> {
        Some(self.armed.load(Ordering::Relaxed)).filter(|&armed| armed != AWAKE)
    }

    fn arm(&self, position: u64) {
        debug_assert!(position < AWAKE);
        self.set(position);
        // Pairs with the barrier in `ring`: armed before, inputs looked at after.
        fence(Ordering::SeqCst);
    }

    /// Blocks the thread until the doorbell is rung for `position` or `deadline` passes, unless `ready` says, after
    /// arming, that there is input already. May return early; callers look again.
    pub(crate) fn park(&self, position: u64, deadline: Option<Instant>, ready: impl FnOnce() -> bool) {
        // Listen before arming: a ring that follows finds the listener.
        listener!(self.threads => listener);
        self.arm(position);
        if !ready() {
            match deadline {
                None => listener.wait(),
                Some(deadline) => {
                    listener.wait_deadline(deadline);
                }
            }
        }
        self.set(AWAKE);
    }

    /// The same for a task: registers `waker` and arms; true if there is input already, so that the task goes on.
    pub(crate) fn poll(&self, position: u64, waker: &Waker, ready: impl FnOnce() -> bool) -> bool {
        self.task.register(waker);
        self.arm(position);
        let ready = ready();
        if ready {
            self.set(AWAKE);
        }
        ready
    }

    /// By exchange, as the ringers do: a store would do too, and who goes to sleep has the time, but between stores and
    /// exchanges loom shows orders that cannot be.
    fn set(&self, position: u64) {
        self.armed.swap(position, Ordering::Relaxed);
    }
}
