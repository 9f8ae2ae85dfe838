//! Whether this is the process that something was made in.
//!
//! A forked child has a copy of its parent's memory and one of its threads: no poller, no engine's thread, and locks that
//! other threads held stay locked. So whatever would wait for another thread, or take a lock that one may hold, asks first.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How often this process and its ancestors were forked off, since [`Home::here`] was first called.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Said of an engine whose process is another.
pub(crate) const ENGINE_IS_ELSEWHERE: &str =
    "the engine belongs to the process that forked this one; build another here";

/// Only adds to a word, which is allowed in a child of a process with many threads.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Relaxed);
}

/// The process that something was made in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Home(pub(crate) u32);

impl Home {
    /// This process. Forks are noticed from the first call on.
    pub(crate) fn here() -> Home {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler is a function of ours that only adds to a static word.
            let failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            // It fails for want of memory only, at the first ring or engine of a process.
            assert_eq!(failed, 0, "no memory for a fork handler");
        });
        Home(GENERATION.load(Relaxed))
    }

    /// False in a forked child of it.
    #[inline]
    pub(crate) fn is_here(self) -> bool {
        self.0 == GENERATION.load(Relaxed)
    }
}
