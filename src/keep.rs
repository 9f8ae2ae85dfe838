//! What is kept for ever: memory that a transport may still touch, and what a forked child may not let go of.
//!
//! It hangs on one list, so a memory checker finds it and takes nothing that is meant for a leak.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

struct Kept {
    _what: Box<dyn Send>,
    /// Kept before this.
    before: AtomicPtr<Kept>,
}

static LAST: AtomicPtr<Kept> = AtomicPtr::new(ptr::null_mut());

/// Never drops `what`. Takes no lock, so a forked child may call it.
pub(crate) fn for_ever(what: impl Send + 'static) {
    let kept: &Kept = Box::leak(Box::new(Kept { _what: Box::new(what), before: AtomicPtr::default() }));
    // Nobody walks the list, so nobody sees it between these two.
    kept.before.store(LAST.swap(ptr::from_ref(kept).cast_mut(), Relaxed), Relaxed);
}
