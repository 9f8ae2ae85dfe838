//! The atomics that our own protocols are built on: std's, or loom's when a model is being checked.

#[cfg(not(loom))]
pub(crate) use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence},
};

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence},
};
