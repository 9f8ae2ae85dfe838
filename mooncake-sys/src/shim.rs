//! The functions of `shim/shim.cpp`.

use std::ffi::{c_char, c_int, c_void};

use crate::types::{BufferEntry, TransferEngine, TransferRequest, TransferStatus, Transport};

/// `Source` in the shim: a table of the functions of one loaded engine library. Never freed.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Source {
    opaque: [u8; 0],
}

type Engine = *mut TransferEngine;

// Each leaves a text in `text`, which must have room for `capacity` bytes, at least one.
unsafe extern "C" {
    pub(crate) fn moonring_source(
        handle: *mut c_void,
        request_bytes: usize,
        source: *mut *mut Source,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_log_level(handle: *mut c_void, level: c_int, text: *mut c_char, capacity: usize) -> c_int;
    pub(crate) fn moonring_create(
        s: *mut Source,
        metadata: *const c_char,
        name: *const c_char,
        host: *const c_char,
        port: u64,
        discover: bool,
        engine: *mut Engine,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_destroy(s: *mut Source, engine: Engine, text: *mut c_char, capacity: usize) -> c_int;
    pub(crate) fn moonring_local_ip_and_port(
        s: *mut Source,
        engine: Engine,
        out: *mut c_char,
        out_capacity: usize,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_install(
        s: *mut Source,
        engine: Engine,
        protocol: *const c_char,
        args: *mut *mut c_void,
        transport: *mut *mut Transport,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_uninstall(
        s: *mut Source,
        engine: Engine,
        protocol: *const c_char,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_open(
        s: *mut Source,
        engine: Engine,
        name: *const c_char,
        fresh: bool,
        segment: *mut i32,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_close(
        s: *mut Source,
        engine: Engine,
        segment: i32,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_remove_local(
        s: *mut Source,
        engine: Engine,
        name: *const c_char,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_register(
        s: *mut Source,
        engine: Engine,
        addr: *mut c_void,
        length: usize,
        location: *const c_char,
        remote: bool,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_unregister(
        s: *mut Source,
        engine: Engine,
        addr: *mut c_void,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_register_batch(
        s: *mut Source,
        engine: Engine,
        buffers: *const BufferEntry,
        count: usize,
        location: *const c_char,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_unregister_batch(
        s: *mut Source,
        engine: Engine,
        addrs: *const *mut c_void,
        count: usize,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_allocate(
        s: *mut Source,
        engine: Engine,
        size: usize,
        batch: *mut u64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_submit(
        s: *mut Source,
        engine: Engine,
        batch: u64,
        requests: *const TransferRequest,
        count: usize,
        first_group: u64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_status(
        s: *mut Source,
        engine: Engine,
        batch: u64,
        task: usize,
        status: *mut TransferStatus,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_free(
        s: *mut Source,
        engine: Engine,
        batch: u64,
        text: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(crate) fn moonring_sync(s: *mut Source, engine: Engine, text: *mut c_char, capacity: usize) -> c_int;
}
