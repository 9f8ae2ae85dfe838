//! The functions of `shim/store.cpp`.

use std::ffi::{c_char, c_int, c_void};

use super::types::{Store, StoreItem};
use crate::types::BufferEntry;

/// `StoreSource` in the shim: a table of the functions of one loaded Store library. Never freed.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Source {
    opaque: [u8; 0],
}

/// `Setup` in the shim.
#[repr(C)]
pub(super) struct Setup {
    pub(super) local_hostname: *const c_char,
    pub(super) metadata_server: *const c_char,
    pub(super) segment_bytes: u64,
    pub(super) buffer_bytes: u64,
    pub(super) protocol: *const c_char,
    pub(super) device: *const c_char,
    pub(super) master: *const c_char,
}

const _: () = assert!(size_of::<Setup>() == 56);

// Each leaves a text in `text`, which must have room for `capacity` bytes, at least one.
unsafe extern "C" {
    pub(super) fn moonring_store_source(
        handle: *mut c_void,
        wheel: bool,
        source: *mut *mut Source,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_create(
        s: *mut Source,
        store: *mut *mut Store,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_destroy(
        s: *mut Source,
        store: *mut Store,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_setup(
        s: *mut Source,
        store: *mut Store,
        setup: *const Setup,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_register(
        s: *mut Source,
        store: *mut Store,
        addr: *mut c_void,
        length: usize,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_unregister(
        s: *mut Source,
        store: *mut Store,
        addr: *mut c_void,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_get(
        s: *mut Source,
        store: *mut Store,
        key: *const c_char,
        into: *const BufferEntry,
        bytes: *mut i64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_put(
        s: *mut Source,
        store: *mut Store,
        key: *const c_char,
        from: *const BufferEntry,
        replicas: usize,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_get_batch(
        s: *mut Source,
        store: *mut Store,
        items: *const StoreItem<'_>,
        count: usize,
        multi: bool,
        results: *mut i64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_put_batch(
        s: *mut Source,
        store: *mut Store,
        items: *const StoreItem<'_>,
        count: usize,
        multi: bool,
        replicas: usize,
        results: *mut i64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_exists(
        s: *mut Source,
        store: *mut Store,
        key: *const c_char,
        answer: *mut i64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_exists_batch(
        s: *mut Source,
        store: *mut Store,
        keys: *const *const c_char,
        count: usize,
        results: *mut i64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_size(
        s: *mut Source,
        store: *mut Store,
        key: *const c_char,
        bytes: *mut i64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn moonring_store_remove(
        s: *mut Source,
        store: *mut Store,
        key: *const c_char,
        force: bool,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
}
