//! The clock of every core: nanoseconds since this module was first asked, from 1, because cores take 0 for "not yet".

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::transport::Nanos;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The time now.
pub(crate) fn now() -> Nanos {
    at(Instant::now())
}

/// A moment on the clock; what was before its start is its first.
pub(crate) fn at(moment: Instant) -> Nanos {
    let since = moment.saturating_duration_since(*START);
    // Of 64 bits throughout: a reading is made for each turn. They last for 584 years.
    since.as_secs().saturating_mul(1_000_000_000).saturating_add(u64::from(since.subsec_nanos())).min(Nanos::MAX - 1)
        + 1
}

/// The other way; `None` if that is more than an `Instant` can name.
pub(crate) fn instant(at: Nanos) -> Option<Instant> {
    START.checked_add(Duration::from_nanos(at - 1))
}
