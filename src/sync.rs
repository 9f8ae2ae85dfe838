//! What our own protocols are built on: std's atomics and other crates' queues, or loom's and doubles of those while a
//! model is being checked.

#[cfg(loom)]
mod doubles;

#[cfg(not(loom))]
pub(crate) use std::{
    cell::UnsafeCell,
    sync::{
        Arc, Condvar, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

#[cfg(not(loom))]
pub(crate) use {
    atomic_waker::AtomicWaker,
    crossbeam_queue::{ArrayQueue, SegQueue},
};

#[cfg(loom)]
pub(crate) use doubles::{ArrayQueue, AtomicWaker, OnceLock, SegQueue};
#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

/// Reads a cell.
///
/// # Safety
/// Nobody writes the cell meanwhile: loom checks it.
#[inline]
pub(crate) unsafe fn read<T: Copy>(cell: &UnsafeCell<T>) -> T {
    #[cfg(not(loom))]
    // SAFETY: the caller's.
    return unsafe { *cell.get() };
    #[cfg(loom)]
    // SAFETY: the caller's.
    return cell.with(|value| unsafe { *value });
}

/// Writes a cell.
///
/// # Safety
/// Nobody reads or writes the cell meanwhile: loom checks it.
#[inline]
pub(crate) unsafe fn write<T: Copy>(cell: &UnsafeCell<T>, value: T) {
    #[cfg(not(loom))]
    // SAFETY: the caller's.
    unsafe {
        *cell.get() = value;
    };
    #[cfg(loom)]
    // SAFETY: the caller's.
    cell.with_mut(|place| unsafe { *place = value });
}
