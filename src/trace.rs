//! Events of the `tracing` crate (feature `tracing`), about what happens to rings, engines, segments and peers, never to a
//! single entry.

/// Tells an event of a level: fields, then the text, as `tracing`'s own macros take them. Nothing without the feature. It may
/// be the poller's thread, and the subscriber's code is the application's: its panic goes no further.
#[cfg(feature = "tracing")]
macro_rules! event {
    ($level:ident, $($what:tt)+) => {{
        let tell = std::panic::AssertUnwindSafe(|| tracing::event!(target: "moonring", tracing::Level::$level, $($what)+));
        let _ = std::panic::catch_unwind(tell);
    }};
}

#[cfg(not(feature = "tracing"))]
macro_rules! event {
    ($($what:tt)+) => {{}};
}

pub(crate) use event;
