//! A descriptor that foreign event loops can wait for: readable when completions may be there.
//!
//! A write costs a system call, so the core makes one only when the completion queue was empty before: whoever was told
//! reaps until nothing is left. A reaper that leaves some behind, or whose room the core had not seen yet, makes the write
//! itself. So the descriptor is readable, or was read since, whenever completions wait for a reaper that went away.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::fork::Home;
use crate::sync::{AtomicBool, Ordering, fence};

/// A ring's eventfd, for event loops such as epoll, libuv or tokio's `AsyncFd`. From [`Ring::eventfd`](crate::Ring::eventfd).
///
/// It becomes readable when completions come into an empty queue, once for all that are published together, and when a
/// reaper leaves some behind. It is a hint and not a count: [`clear`](Self::clear) it, then reap until nothing is left, in
/// this order. Completions that were reaped otherwise meanwhile leave it readable, too. Entries without a completion never
/// signal; the poller's death does.
///
/// Clones are the same descriptor, which stays open as long as one lives, or the ring.
#[derive(Clone, Debug)]
pub struct EventFd {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    fd: OwnedFd,
    on: AtomicBool,
    home: Home,
}

static_assertions::assert_impl_all!(EventFd: Send, Sync);

impl EventFd {
    pub(super) fn new() -> io::Result<EventFd> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(EventFd { inner: Arc::new(Inner { fd, on: AtomicBool::new(true), home: Home::here() }) })
    }

    /// Makes it unreadable. True if it was readable. Never blocks. Does nothing in a forked child, which has the descriptor in
    /// common with its parent.
    pub fn clear(&self) -> bool {
        // The only error that an eventfd has here is that there is nothing to read.
        self.inner.home.is_here() && rustix::io::read(&self.inner.fd, &mut [0; 8]).is_ok()
    }

    /// No signals from now on, as with io_uring's `CQ_EVENTFD_DISABLED`: for a caller that is busy reaping anyway.
    pub fn mute(&self) {
        self.inner.on.store(false, Ordering::Relaxed);
    }

    /// Signals again, and once at once: completions may have come meanwhile.
    pub fn unmute(&self) {
        self.inner.on.store(true, Ordering::Relaxed);
        // Pairs with the core's: either it sees the switch, or who reaps after this signal sees its completions.
        fence(Ordering::SeqCst);
        self.write();
    }

    /// Makes it readable, unless it is muted or `news` says that there is nothing to tell. A SeqCst barrier comes before this,
    /// and after what `news` was made of.
    pub(crate) fn signal_if(&self, news: impl FnOnce() -> bool) {
        if self.inner.on.load(Ordering::Relaxed) && news() {
            self.write();
        }
    }

    fn write(&self) {
        if self.inner.home.is_here() {
            // It fails only if the count is full; then it is readable.
            let _ = rustix::io::write(&self.inner.fd, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.fd.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.inner.fd.as_raw_fd()
    }
}
