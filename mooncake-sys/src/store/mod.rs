//! The functions of a loaded Store client.

mod error;
mod shim;
mod types;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

pub use error::StoreError;
pub use types::*;

use crate::api::{self, LogLevel, Text};
use crate::error::{CallError, NO_CODE, Reason};
use crate::image::Image;
use crate::load::Tables;
use crate::types::BufferEntry;
use crate::version::Version;

/// The functions of one loaded Store library, the same whatever it was loaded from. Lives for ever; from
/// [`StoreApi::load`] or [`StoreApi::load_from`].
///
/// A Store keeps values by key in the memory of its clients; a master (`mooncake_master`, in the wheel beside the module) says
/// where. Each method is one call of Mooncake's. A C++ exception in it ends as a [`StoreError`] with the code
/// [`EXCEPTION`](crate::EXCEPTION), or, in a library, whose C interface swallows it, with [`STORE_INTERNAL`].
///
/// # What blocks
///
/// Every call that takes a store blocks: all but registering ask the master, and GET and PUT move the bytes before they
/// return. None of them has a limit of its own, and none can be cancelled.
///
/// # Threads
///
/// Any thread may call any method, several at once with the same store, with these limits:
///
/// * [`setup`](Self::setup) has returned before anything else is called with the store, and nothing is called once
///   [`destroy`](Self::destroy) was.
/// * After `fork`, a child may not use a store of its parent's, nor destroy it.
///
/// A store starts threads. The first in a process without Python also starts one that waits for SIGINT, SIGTERM and SIGHUP,
/// to take the stores down and then end the process; it blocks these and SIGUSR1 in the thread that makes the store, whose
/// mask [`create`](Self::create) restores, so a signal usually comes to the program's own threads as before. Stores not
/// destroyed when the process exits are taken down by a handler that Mooncake registers with `atexit`.
///
/// # Safety
///
/// Common to the methods that take a store: it was made by this `StoreApi`, it has been set up (but for
/// [`setup`](Self::setup) and [`destroy`](Self::destroy)), and it has not been destroyed, nor is it before the call returns.
/// Where a method says no more than "As the type says", this is all.
#[derive(Debug)]
pub struct StoreApi {
    source: *mut shim::Source,
    image: Image,
    path: PathBuf,
    wheel: Option<Version>,
}

// SAFETY: the pointers are a table of functions and a loader's handle, neither of which ever changes or goes away.
unsafe impl Send for StoreApi {}
// SAFETY: as above.
unsafe impl Sync for StoreApi {}

static MADE: Tables<StoreApi> = Tables::new();

impl StoreApi {
    pub(crate) fn make(image: Image, path: &Path, wheel: Option<Version>) -> Result<&'static Self, Reason> {
        let in_wheel = wheel.is_some();
        let is_it =
            |api: &Self| api.image.handle() == image.handle() && api.path == path && api.wheel.is_some() == in_wheel;
        MADE.get(is_it, || {
            let mut source = ptr::null_mut();
            let mut text = Text::new();
            let (at, room) = text.room();
            // SAFETY: the handle is a loaded image's, and `text` has the room that it says.
            match unsafe { shim::moonring_store_source(image.handle(), in_wheel, &mut source, at, room) } {
                0 => Ok(Self { source, image, path: path.to_path_buf(), wheel }),
                NO_CODE => Err(Reason::MissingSymbols(text.read())),
                _ => Err(Reason::Loader(text.read())),
            }
        })
    }

    /// The file that was loaded, or its bare name where the loader found it on its search path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The wheel's version; `None` for a library, which does not tell.
    pub fn wheel_version(&self) -> Option<&str> {
        self.wheel.as_ref().map(|version| version.name.as_str())
    }

    /// Whether a value can be spread over several slices: with wheels. The C interface has no such calls.
    pub fn has_multi_buffers(&self) -> bool {
        self.wheel.is_some()
    }

    /// As [`Api::set_log_level`](crate::Api::set_log_level). An engine and a store out of one wheel share the level but not
    /// the settings, and whichever reads its settings later sets the level anew: call both functions, after both are loaded.
    pub fn set_log_level(&self, level: LogLevel) -> Result<(), CallError> {
        api::set_log_level(self.image, level)
    }

    /// `mooncake_store_create`: a client, not set up yet. Starts threads the first time; see the type.
    pub fn create(&self) -> Result<NonNull<Store>, StoreError> {
        let mut store = ptr::null_mut();
        let call = || "create".to_owned();
        // SAFETY: the table is a loaded image's.
        check(|text, room| unsafe { shim::moonring_store_create(self.source, &mut store, text, room) }, call)?;
        NonNull::new(store).ok_or_else(|| StoreError { call: call(), code: NO_CODE, message: String::new() })
    }

    /// `mooncake_store_setup`: connects to the master and adds this client's memory to the Store. Once for a store; after
    /// an error it can only be destroyed.
    ///
    /// Blocks on the network. Where `local_hostname` has no port Mooncake tries twenty of them (`MC_STORE_CLIENT_SETUP_RETRIES`),
    /// also when what is wrong is the master: without one that took more than a minute to fail (measured), and seconds with a
    /// port in the name.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn setup(&self, store: NonNull<Store>, setup: &StoreSetup<'_>) -> Result<(), StoreError> {
        let flat = shim::Setup {
            local_hostname: setup.local_hostname.as_ptr(),
            metadata_server: setup.metadata_server.as_ptr(),
            segment_bytes: setup.segment_bytes,
            buffer_bytes: setup.buffer_bytes,
            protocol: setup.protocol.as_ptr(),
            device: setup.device.as_ptr(),
            master: setup.master.as_ptr(),
        };
        check(
            // SAFETY: as promised by the caller; the strings end with a zero and live as long as `setup`.
            |text, room| unsafe { shim::moonring_store_setup(self.source, store.as_ptr(), &flat, text, room) },
            || format!("setup({setup:?})"),
        )
    }

    /// `mooncake_store_destroy`: takes this client's memory out of the Store, with the values in it, and ends the client.
    /// Blocks on the network and for the client's threads.
    ///
    /// # Safety
    ///
    /// As the type says, and: no other call with the store is running, and none follows.
    pub unsafe fn destroy(&self, store: NonNull<Store>) -> Result<(), StoreError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_store_destroy(self.source, store.as_ptr(), text, room) },
            || "destroy".into(),
        )
    }

    /// `mooncake_store_register_buffer`: memory that values can be read into and written from. Overlapping a registered
    /// buffer is an error.
    ///
    /// # Safety
    ///
    /// As the type says; the memory stays mapped until it is unregistered or the store destroyed.
    pub unsafe fn register_buffer(&self, store: NonNull<Store>, buffer: BufferEntry) -> Result<(), StoreError> {
        let BufferEntry { addr, length } = buffer;
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_store_register(self.source, store.as_ptr(), addr, length, text, room)
            },
            || format!("register_buffer({addr:?}, {length} bytes)"),
        )
    }

    /// `mooncake_store_unregister_buffer`.
    ///
    /// # Safety
    ///
    /// As the type says; no call that uses the buffer is running.
    pub unsafe fn unregister_buffer(&self, store: NonNull<Store>, addr: *mut c_void) -> Result<(), StoreError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_store_unregister(self.source, store.as_ptr(), addr, text, room) },
            || format!("unregister_buffer({addr:?})"),
        )
    }

    /// `mooncake_store_get_into`: the value of a key, whole, into memory. Answers its bytes, which may be fewer than the
    /// buffer has. [`STORE_NOT_FOUND`] if there is no such key; [`STORE_INVALID_PARAMS`] if the buffer is too small, and for
    /// bad arguments, so [`get_size`](Self::get_size) has to tell them apart; [`STORE_LEASE_EXPIRED`] if the value may have
    /// been evicted while it was read.
    ///
    /// # Safety
    ///
    /// As the type says. The buffer lies in registered memory, can be written until the call returns, and no Rust reference
    /// to it exists meanwhile. After an error its contents are undefined.
    pub unsafe fn get_into(&self, store: NonNull<Store>, key: &CStr, into: BufferEntry) -> Result<u64, StoreError> {
        let mut bytes = 0;
        check(
            // SAFETY: as promised by the caller; the key ends with a zero.
            |text, room| unsafe {
                shim::moonring_store_get(self.source, store.as_ptr(), key.as_ptr(), &into, &mut bytes, text, room)
            },
            || format!("get_into({key:?}, {} bytes)", into.length),
        )?;
        Ok(bytes as u64)
    }

    /// `mooncake_store_put_from`: makes memory the value of a key, in `replicas` copies. **A key that has a value keeps it,
    /// and the answer is success**; a PUT of 0 bytes stores nothing, and the answer is success.
    /// [`STORE_NO_SPACE`] if there is no room.
    ///
    /// # Safety
    ///
    /// As the type says. The buffer lies in registered memory and can be read until the call returns.
    pub unsafe fn put_from(
        &self,
        store: NonNull<Store>,
        key: &CStr,
        from: BufferEntry,
        replicas: usize,
    ) -> Result<(), StoreError> {
        check(
            // SAFETY: as promised by the caller; the key ends with a zero.
            |text, room| unsafe {
                shim::moonring_store_put(self.source, store.as_ptr(), key.as_ptr(), &from, replicas, text, room)
            },
            || format!("put_from({key:?}, {} bytes, {replicas} replicas)", from.length),
        )
    }

    /// `mooncake_store_batch_get_into`: as [`get_into`](Self::get_into) for several keys with one slice each. `results` has a
    /// place for each: bytes, or a negative code. An error leaves them undefined.
    ///
    /// **Name each key once**: of two items with one key Mooncake fills only the last one's buffer, and reports both as
    /// read.
    ///
    /// # Safety
    ///
    /// As [`get_into`](Self::get_into), for all slices.
    pub unsafe fn batch_get_into(
        &self,
        store: NonNull<Store>,
        items: &[StoreItem<'_>],
        results: &mut [i64],
    ) -> Result<(), StoreError> {
        one_slice("batch_get_into", items)?;
        // SAFETY: as promised by the caller.
        unsafe { self.get_batch("batch_get_into", store, items, false, results) }
    }

    /// `batch_get_into_multi_buffers`: as [`batch_get_into`](Self::batch_get_into), each value spread over its item's slices,
    /// less than 2 GiB in all. Fails with [`NO_CODE`] where [`has_multi_buffers`](Self::has_multi_buffers) says no.
    ///
    /// # Safety
    ///
    /// As [`get_into`](Self::get_into), for all slices.
    pub unsafe fn batch_get_into_multi_buffers(
        &self,
        store: NonNull<Store>,
        items: &[StoreItem<'_>],
        results: &mut [i64],
    ) -> Result<(), StoreError> {
        // SAFETY: as promised by the caller.
        unsafe { self.get_batch("batch_get_into_multi_buffers", store, items, true, results) }
    }

    /// `mooncake_store_batch_put_from`: as [`put_from`](Self::put_from) for several keys with one slice each. `results` has a
    /// place for each: 0, or a negative code. An error leaves them undefined. **Name each key once.**
    ///
    /// # Safety
    ///
    /// As [`put_from`](Self::put_from), for all slices.
    pub unsafe fn batch_put_from(
        &self,
        store: NonNull<Store>,
        items: &[StoreItem<'_>],
        replicas: usize,
        results: &mut [i64],
    ) -> Result<(), StoreError> {
        one_slice("batch_put_from", items)?;
        // SAFETY: as promised by the caller.
        unsafe { self.put_batch("batch_put_from", store, items, false, replicas, results) }
    }

    /// `batch_put_from_multi_buffers`: as [`batch_put_from`](Self::batch_put_from), each value gathered from its item's slices.
    /// Fails with [`NO_CODE`] where [`has_multi_buffers`](Self::has_multi_buffers) says no.
    ///
    /// # Safety
    ///
    /// As [`put_from`](Self::put_from), for all slices.
    pub unsafe fn batch_put_from_multi_buffers(
        &self,
        store: NonNull<Store>,
        items: &[StoreItem<'_>],
        replicas: usize,
        results: &mut [i64],
    ) -> Result<(), StoreError> {
        // SAFETY: as promised by the caller.
        unsafe { self.put_batch("batch_put_from_multi_buffers", store, items, true, replicas, results) }
    }

    /// `mooncake_store_is_exist`: whether a key has a value that can be read.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn is_exist(&self, store: NonNull<Store>, key: &CStr) -> Result<bool, StoreError> {
        let mut answer = 0;
        check(
            // SAFETY: as promised by the caller; the key ends with a zero.
            |text, room| unsafe {
                shim::moonring_store_exists(self.source, store.as_ptr(), key.as_ptr(), &mut answer, text, room)
            },
            || format!("is_exist({key:?})"),
        )?;
        Ok(answer == 1)
    }

    /// `mooncake_store_batch_is_exist`: as [`is_exist`](Self::is_exist) for several keys. `results` has a place for each: 1,
    /// 0, or a negative code. An error leaves them undefined.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn batch_is_exist(
        &self,
        store: NonNull<Store>,
        keys: &[&CStr],
        results: &mut [i64],
    ) -> Result<(), StoreError> {
        places("batch_is_exist", keys.len(), results)?;
        let at: Vec<*const c_char> = keys.iter().map(|key| key.as_ptr()).collect();
        let out = results.as_mut_ptr();
        check(
            // SAFETY: as promised by the caller; the keys end with a zero, and there is a result for each.
            |text, room| unsafe {
                shim::moonring_store_exists_batch(self.source, store.as_ptr(), at.as_ptr(), at.len(), out, text, room)
            },
            || format!("batch_is_exist({} keys)", keys.len()),
        )
    }

    /// `mooncake_store_get_size`: the bytes of a key's value. [`STORE_NOT_FOUND`] if there is no such key.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn get_size(&self, store: NonNull<Store>, key: &CStr) -> Result<u64, StoreError> {
        let mut bytes = 0;
        check(
            // SAFETY: as promised by the caller; the key ends with a zero.
            |text, room| unsafe {
                shim::moonring_store_size(self.source, store.as_ptr(), key.as_ptr(), &mut bytes, text, room)
            },
            || format!("get_size({key:?})"),
        )?;
        Ok(bytes as u64)
    }

    /// `mooncake_store_remove`. [`STORE_NOT_FOUND`] if there is no such key. Without `force`, [`STORE_HAS_LEASE`] while
    /// somebody reads the value, and for the lease's length (the master's `default_kv_lease_ttl`) after it was read or asked
    /// for. With `force`, whoever reads it may get other bytes.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn remove(&self, store: NonNull<Store>, key: &CStr, force: bool) -> Result<(), StoreError> {
        check(
            // SAFETY: as promised by the caller; the key ends with a zero.
            |text, room| unsafe {
                shim::moonring_store_remove(self.source, store.as_ptr(), key.as_ptr(), force, text, room)
            },
            || format!("remove({key:?}, force {force})"),
        )
    }

    /// # Safety
    ///
    /// As [`get_into`](Self::get_into), for all slices; each item has one unless `multi`.
    unsafe fn get_batch(
        &self,
        call: &str,
        store: NonNull<Store>,
        items: &[StoreItem<'_>],
        multi: bool,
        results: &mut [i64],
    ) -> Result<(), StoreError> {
        places(call, items.len(), results)?;
        let (at, count, out) = (items.as_ptr(), items.len(), results.as_mut_ptr());
        check(
            // SAFETY: as promised by the caller; there is a result for each item.
            |text, room| unsafe {
                shim::moonring_store_get_batch(self.source, store.as_ptr(), at, count, multi, out, text, room)
            },
            || format!("{call}({count} keys)"),
        )
    }

    /// # Safety
    ///
    /// As [`put_from`](Self::put_from), for all slices; each item has one unless `multi`.
    unsafe fn put_batch(
        &self,
        call: &str,
        store: NonNull<Store>,
        items: &[StoreItem<'_>],
        multi: bool,
        replicas: usize,
        results: &mut [i64],
    ) -> Result<(), StoreError> {
        places(call, items.len(), results)?;
        let (at, count, out) = (items.as_ptr(), items.len(), results.as_mut_ptr());
        check(
            // SAFETY: as promised by the caller; there is a result for each item.
            |text, room| unsafe {
                shim::moonring_store_put_batch(self.source, store.as_ptr(), at, count, multi, replicas, out, text, room)
            },
            || format!("{call}({count} keys, {replicas} replicas)"),
        )
    }
}

/// Refuses a batch that has not exactly one result for each key.
fn places(call: &str, keys: usize, results: &[i64]) -> Result<(), StoreError> {
    if results.len() == keys {
        return Ok(());
    }
    Err(refused(call, format!("room for {} results, for {keys} keys", results.len())))
}

/// Refuses a batch with an item that has not exactly one slice.
fn one_slice(call: &str, items: &[StoreItem<'_>]) -> Result<(), StoreError> {
    match items.iter().find(|item| item.slices().len() != 1) {
        None => Ok(()),
        Some(item) => {
            let (key, count) = (item.key(), item.slices().len());
            Err(refused(call, format!("{key:?} has {count} slices; this call takes one for each key")))
        }
    }
}

fn refused(call: &str, message: String) -> StoreError {
    StoreError { call: call.into(), code: STORE_INVALID_PARAMS, message }
}

/// Makes a call that leaves a text with its code; `name` is what it is called in an error.
fn check(call: impl FnOnce(*mut c_char, usize) -> c_int, name: impl FnOnce() -> String) -> Result<(), StoreError> {
    let mut text = Text::new();
    let (at, room) = text.room();
    match call(at, room) {
        0 => Ok(()),
        code => Err(StoreError { call: name(), code, message: text.read() }),
    }
}
