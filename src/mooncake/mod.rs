//! Mooncake.
