//! Mooncake's settings are environment variables, read when an engine is made.

use std::env;
use std::ffi::{CStr, CString, c_char};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::keep;

/// Held while this module reads or changes the environment.
static CHANGING: Mutex<()> = Mutex::new(());
/// The pool is on because this module turned it on: engines that others made before may be without.
static OURS: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    /// The process's environment: an array of `NAME=value` strings, ended by null.
    static mut environ: *mut *mut c_char;
}

/// TCP connections are kept, and made by the engine's own thread instead of the one that submits.
const POOL: &CStr = c"MC_TCP_ENABLE_CONNECTION_POOL=1";
const POOL_NAME: &str = "MC_TCP_ENABLE_CONNECTION_POOL";
const QUEUE_NAME: &str = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER";

/// Turns Mooncake's connection pool on for engines made from now on, unless the user has decided about it. Mooncake has no
/// other switch for it.
///
/// `setenv` would not do: it may move the array while another thread's `getenv` walks it. This puts a new array in its
/// place and leaves the old one, with all of its strings, where it is for ever, so a reader sees either whole. Only another
/// thread's `setenv` at this very moment may be lost, or lose this.
pub(crate) fn enable_pool() {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    if env::var_os(POOL_NAME).is_some() {
        return;
    }
    // SAFETY: the C library's pointer is aligned and lives for ever; nobody but the environment's writers changes it.
    let current = unsafe { AtomicPtr::from_ptr(&raw mut environ) };
    let old = current.load(Ordering::Acquire);
    let mut new: Vec<*mut c_char> = Vec::new();
    if !old.is_null() {
        // SAFETY: the array ends with null; reading it is what `getenv` does, in any thread.
        new.extend((0..).map(|at| unsafe { *old.add(at) }).take_while(|entry| !entry.is_null()));
    }
    new.push(CString::from(POOL).into_raw());
    // Before anybody can see the variable.
    OURS.store(true, Ordering::Relaxed);
    new.push(std::ptr::null_mut());
    let array = new.leak().as_mut_ptr();
    keep::for_ever(AtomicPtr::new(array));
    current.store(array, Ordering::Release);
}

/// Whether engines made now keep their connections, by Mooncake's own rule.
pub(super) fn pool_is_on() -> bool {
    env::var(POOL_NAME).is_ok_and(|value| !matches!(value.to_ascii_lowercase().as_str(), "0" | "false" | "no"))
}

/// The same of engines that somebody else made: only if it was somebody else who turned the pool on.
pub(super) fn pool_is_on_for_others() -> bool {
    pool_is_on() && !OURS.load(Ordering::Relaxed)
}

/// Transfers that Mooncake queues for one peer; more than that fail.
pub(super) fn queue_per_peer() -> u32 {
    env::var(QUEUE_NAME)
        .ok()
        .and_then(|value| value.parse().ok())
        .filter(|limit| (1..=65_535).contains(limit))
        .unwrap_or(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_switched_on_for_everybody_who_asks() {
        let before: Vec<_> = env::vars_os().filter(|(name, _)| name != POOL_NAME).collect();
        enable_pool();
        enable_pool();
        // SAFETY: the name ends with a zero; what it answers is never freed.
        let seen = unsafe { CStr::from_ptr(libc::getenv(c"MC_TCP_ENABLE_CONNECTION_POOL".as_ptr())) };
        assert_eq!(env::var(POOL_NAME).as_deref(), Ok(seen.to_str().unwrap()));
        let after: Vec<_> = env::vars_os().filter(|(name, _)| name != POOL_NAME).collect();
        assert_eq!(before, after);
        assert!(env::var_os(POOL_NAME).is_some());
    }

    #[test]
    fn a_pool_of_our_making_says_nothing_of_the_engines_of_others() {
        // What the process began with, not what this module has made of it.
        let first = std::fs::read("/proc/self/environ").unwrap();
        let theirs = first.split(|byte| *byte == 0).any(|entry| entry.starts_with(POOL_NAME.as_bytes()));
        enable_pool();
        assert_eq!(pool_is_on_for_others(), theirs && pool_is_on());
    }
}
