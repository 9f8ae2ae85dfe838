//! The functions of a loaded engine.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

use crate::error::{CallError, NO_CODE, Reason};
use crate::image::Image;
use crate::load::Tables;
use crate::shim;
use crate::types::{BatchId, BufferEntry, SegmentId, TransferEngine, TransferRequest, TransferStatus, Transport};
use crate::version::{self, Version};

/// The functions of one loaded engine library, the same whatever it was loaded from. Lives for ever; from
/// [`Api::load`], [`Api::adopt`] or [`Api::load_from`].
///
/// Each method is one call of Mooncake's. A C++ exception in it ends as a [`CallError`] with the code
/// [`EXCEPTION`](crate::EXCEPTION). What Mooncake itself ends the process for (glog's FATAL, `abort`) does that.
///
/// # Threads
///
/// Any thread may call any method, several at once, with these limits:
///
/// * [`create_engine`](Self::create_engine) and [`install_transport`](Self::install_transport) are done before other
///   threads use the engine, and nothing uses it once [`destroy_engine`](Self::destroy_engine) has been called.
/// * One thread at a time for each batch. A batch is asked for status only after its submit has returned.
/// * `open_segment` (from a peer's name to its memory map) and the first submit to a peer may block on the network, opening
///   a peer that is stopped for a minute: not for threads that have to answer. Registering may write to the metadata server.
/// * After `fork`, a child may not use an engine of its parent's, nor destroy it (it hangs).
///
/// # Safety
///
/// Common to the methods that take an engine: it is one of *this* image's (made by this `Api`, or by the code that
/// [`Api::adopt`] found), it has been made completely, and it has not been destroyed, nor is it before the call returns. A
/// batch is the engine's and has not been freed. Where a method says no more than "As the type says", this is all.
#[derive(Debug)]
pub struct Api {
    source: *mut shim::Source,
    image: Image,
    path: PathBuf,
    wheel: Option<Version>,
}

// SAFETY: the pointers are a table of functions and a loader's handle, neither of which ever changes or goes away.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

/// Which requests of a submit an engine may treat as one unit of work.
///
/// Mooncake's TCP transport without its connection pool makes the connection in the submitting thread for a request that
/// is in no group, and in its own thread for one that is in a group. In one group requests go one after the other, so the
/// useful kind of group is that of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// No request is in a group.
    #[default]
    None,
    /// Each request is a group of its own. As [`None`](Self::None) where [`Api::has_task_groups`] says no.
    Each,
}

/// The least important messages that Mooncake still writes to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// Everything; Mooncake's default.
    Info = 0,
    /// Warnings and errors.
    Warning = 1,
    /// Errors.
    Error = 2,
    /// Only what ends the process.
    Fatal = 3,
}

static MADE: Tables<Api> = Tables::new();

impl Api {
    pub(crate) fn make(image: Image, path: &Path, wheel: Option<Version>) -> Result<&'static Self, Reason> {
        let in_wheel = wheel.is_some();
        let is_it =
            |api: &Self| api.image.handle() == image.handle() && api.path == path && api.wheel.is_some() == in_wheel;
        MADE.get(is_it, || {
            let request_bytes = wheel.as_ref().map_or(0, |version| version.request_bytes);
            let mut source = ptr::null_mut();
            let mut text = Text::new();
            let (at, room) = text.room();
            // SAFETY: the handle is a loaded image's, and `text` has the room that it says.
            match unsafe { shim::moonring_source(image.handle(), request_bytes, &mut source, at, room) } {
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

    /// Whether [`Grouping::Each`] has an effect: with wheels from 0.3.13. The C interface has no room for it.
    pub fn has_task_groups(&self) -> bool {
        self.wheel.as_ref().is_some_and(|version| version.request_bytes >= version::WITH_TASK_GROUP)
    }

    /// Whether the tasks of a refused submit may be asked about, and their batch freed: with wheels from 0.3.13. In older ones
    /// asking ends the process (a failed assertion) and the batch stays busy for ever. What a library does is not known,
    /// so this says no.
    pub fn can_ask_after_refusal(&self) -> bool {
        // The same version brought both.
        self.has_task_groups()
    }

    /// Sets what Mooncake (through glog) writes to standard error, for the whole process.
    ///
    /// The first call makes Mooncake read its environment variables (`MC_…`): set those before. Without this function,
    /// `MC_LOG_LEVEL=WARNING` or `ERROR` in the environment does the same for all but the first lines; `GLOG_minloglevel` does
    /// not last, because Mooncake overwrites it when it reads its settings. Fails with [`NO_CODE`](crate::NO_CODE)
    /// where the library keeps the two symbols that it takes to itself.
    pub fn set_log_level(&self, level: LogLevel) -> Result<(), CallError> {
        set_log_level(self.image, level)
    }

    /// `createTransferEngine`. `metadata`: `P2PHANDSHAKE`, or a metadata server's URL. `local_name`: the address, or name,
    /// that peers know the engine by; with `P2PHANDSHAKE` the engine picks a port itself and
    /// [`local_ip_and_port`](Self::local_ip_and_port) is the name to give to peers. `auto_discover`: install the
    /// transports that the machine's network cards suggest.
    ///
    /// The engine starts threads. **Metadata with a scheme that the library was not built for end the process**: the wheels
    /// have `http`, `https` and `etcd`, and take a text without a scheme, `p2phandshake` for one, for an etcd server.
    pub fn create_engine(
        &self,
        metadata: &CStr,
        local_name: &CStr,
        ip_or_host: &CStr,
        rpc_port: u64,
        auto_discover: bool,
    ) -> Result<NonNull<TransferEngine>, CallError> {
        let mut engine = ptr::null_mut();
        let call = || format!("createTransferEngine({metadata:?}, {local_name:?}, {ip_or_host:?}, {rpc_port})");
        check(
            // SAFETY: the strings end with a zero.
            |text, room| unsafe {
                shim::moonring_create(
                    self.source,
                    metadata.as_ptr(),
                    local_name.as_ptr(),
                    ip_or_host.as_ptr(),
                    rpc_port,
                    auto_discover,
                    &mut engine,
                    text,
                    room,
                )
            },
            call,
        )?;
        NonNull::new(engine).ok_or_else(|| CallError { call: call(), code: NO_CODE, message: String::new() })
    }

    /// `destroyTransferEngine`. Waits for the engine's threads; nothing touches memory on its behalf afterwards.
    ///
    /// # Safety
    ///
    /// As the type says, and: the engine was made by [`create_engine`](Self::create_engine) of this `Api`, no other call
    /// with it is running, and none follows. Its batches end with it.
    pub unsafe fn destroy_engine(&self, engine: NonNull<TransferEngine>) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_destroy(self.source, engine.as_ptr(), text, room) },
            || "destroyTransferEngine".into(),
        )
    }

    /// `getLocalIpAndPort`: the name to give to peers, with `P2PHANDSHAKE`.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn local_ip_and_port(&self, engine: NonNull<TransferEngine>) -> Result<String, CallError> {
        let mut name = Text::new();
        let (at, capacity) = name.room();
        check(
            // SAFETY: as promised by the caller; `name` has the room that it says.
            |text, room| unsafe {
                shim::moonring_local_ip_and_port(self.source, engine.as_ptr(), at, capacity, text, room)
            },
            || "getLocalIpAndPort".into(),
        )?;
        Ok(name.read())
    }

    /// `installTransport`: `tcp`, `rdma` or another that the library was built with.
    ///
    /// # Safety
    ///
    /// As the type says; `args` is null or what that transport wants (Mooncake's `installTransport` in its language).
    pub unsafe fn install_transport(
        &self,
        engine: NonNull<TransferEngine>,
        protocol: &CStr,
        args: *mut *mut c_void,
    ) -> Result<NonNull<Transport>, CallError> {
        let mut transport = ptr::null_mut();
        let call = || format!("installTransport({protocol:?})");
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_install(
                    self.source,
                    engine.as_ptr(),
                    protocol.as_ptr(),
                    args,
                    &mut transport,
                    text,
                    room,
                )
            },
            call,
        )?;
        NonNull::new(transport).ok_or_else(|| CallError { call: call(), code: NO_CODE, message: String::new() })
    }

    /// `uninstallTransport`.
    ///
    /// # Safety
    ///
    /// As the type says; no task of that transport is unfinished.
    pub unsafe fn uninstall_transport(
        &self,
        engine: NonNull<TransferEngine>,
        protocol: &CStr,
    ) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_uninstall(self.source, engine.as_ptr(), protocol.as_ptr(), text, room)
            },
            || format!("uninstallTransport({protocol:?})"),
        )
    }

    /// `openSegment`. Blocks on the network. Answers from a cache by name.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn open_segment(&self, engine: NonNull<TransferEngine>, name: &CStr) -> Result<SegmentId, CallError> {
        // SAFETY: as promised by the caller.
        unsafe { self.open(engine, name, false) }
    }

    /// `openSegmentNoCache`: asks the peer again, for one that has started anew under its old name.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn open_segment_no_cache(
        &self,
        engine: NonNull<TransferEngine>,
        name: &CStr,
    ) -> Result<SegmentId, CallError> {
        // SAFETY: as promised by the caller.
        unsafe { self.open(engine, name, true) }
    }

    unsafe fn open(&self, engine: NonNull<TransferEngine>, name: &CStr, fresh: bool) -> Result<SegmentId, CallError> {
        let mut segment = -1;
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_open(self.source, engine.as_ptr(), name.as_ptr(), fresh, &mut segment, text, room)
            },
            || format!("openSegment{}({name:?})", if fresh { "NoCache" } else { "" }),
        )?;
        Ok(segment)
    }

    /// `closeSegment`. Does nothing in the versions known.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn close_segment(&self, engine: NonNull<TransferEngine>, segment: SegmentId) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_close(self.source, engine.as_ptr(), segment, text, room) },
            || format!("closeSegment({segment})"),
        )
    }

    /// `removeLocalSegment`: takes the engine's own segment back from the metadata.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn remove_local_segment(&self, engine: NonNull<TransferEngine>, name: &CStr) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_remove_local(self.source, engine.as_ptr(), name.as_ptr(), text, room)
            },
            || format!("removeLocalSegment({name:?})"),
        )
    }

    /// `registerLocalMemory`. `location`: `cpu:0`, `cuda:1`, `*` to have Mooncake find out.
    ///
    /// # Safety
    ///
    /// As the type says. The memory stays mapped until it is unregistered *and* no peer uses it any more: unregistering
    /// does not stop a transfer. While it is registered with `remote_accessible`, any peer may read and write it at any
    /// time: no Rust reference to it may exist.
    pub unsafe fn register_local_memory(
        &self,
        engine: NonNull<TransferEngine>,
        addr: *mut c_void,
        length: usize,
        location: &CStr,
        remote_accessible: bool,
    ) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_register(
                    self.source,
                    engine.as_ptr(),
                    addr,
                    length,
                    location.as_ptr(),
                    remote_accessible,
                    text,
                    room,
                )
            },
            || format!("registerLocalMemory({addr:p}, {length}, {location:?})"),
        )
    }

    /// `unregisterLocalMemory`. Does not stop a transfer that uses the range.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn unregister_local_memory(
        &self,
        engine: NonNull<TransferEngine>,
        addr: *mut c_void,
    ) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_unregister(self.source, engine.as_ptr(), addr, text, room) },
            || format!("unregisterLocalMemory({addr:p})"),
        )
    }

    /// `registerLocalMemoryBatch`: several ranges, accessible to peers, with one update of the metadata.
    ///
    /// # Safety
    ///
    /// As for [`register_local_memory`](Self::register_local_memory), for each range.
    pub unsafe fn register_local_memory_batch(
        &self,
        engine: NonNull<TransferEngine>,
        buffers: &[BufferEntry],
        location: &CStr,
    ) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_register_batch(
                    self.source,
                    engine.as_ptr(),
                    buffers.as_ptr(),
                    buffers.len(),
                    location.as_ptr(),
                    text,
                    room,
                )
            },
            || format!("registerLocalMemoryBatch({buffers:?}, {location:?})"),
        )
    }

    /// `unregisterLocalMemoryBatch`.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn unregister_local_memory_batch(
        &self,
        engine: NonNull<TransferEngine>,
        addrs: &[*mut c_void],
    ) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_unregister_batch(self.source, engine.as_ptr(), addrs.as_ptr(), addrs.len(), text, room)
            },
            || format!("unregisterLocalMemoryBatch({addrs:?})"),
        )
    }

    /// `allocateBatchID`: a batch that takes up to `size` tasks in all its submits together.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn allocate_batch_id(&self, engine: NonNull<TransferEngine>, size: usize) -> Result<BatchId, CallError> {
        let mut batch = 0;
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_allocate(self.source, engine.as_ptr(), size, &mut batch, text, room) },
            || format!("allocateBatchID({size})"),
        )?;
        Ok(batch)
    }

    /// `submitTransfer`: adds tasks to a batch, in order, and starts them. May block while it connects.
    ///
    /// An error does not say that nothing was started. Where [`can_ask_after_refusal`](Self::can_ask_after_refusal) says so, ask
    /// for the status of the call's first task: "invalid argument" means that nothing was; else ask all of them until each has
    /// ended. Elsewhere ask nothing more about the batch, and free neither it nor its memory.
    ///
    /// # Safety
    ///
    /// As the type says. Each request's local range stays valid for the engine to read (a WRITE) or to write (a READ)
    /// until its task has ended COMPLETED or FAILED, or the engine is destroyed; for a READ, no Rust reference to it exists.
    pub unsafe fn submit_transfer(
        &self,
        engine: NonNull<TransferEngine>,
        batch: BatchId,
        requests: &[TransferRequest],
        grouping: Grouping,
    ) -> Result<(), CallError> {
        let first_group = match grouping {
            Grouping::None => 0,
            Grouping::Each => 1,
        };
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_submit(
                    self.source,
                    engine.as_ptr(),
                    batch,
                    requests.as_ptr(),
                    requests.len(),
                    first_group,
                    text,
                    room,
                )
            },
            || format!("submitTransfer(batch {batch:#x}, {} requests)", requests.len()),
        )
    }

    /// `getTransferStatus` of the `task`th task of a batch. Asking is also what makes some transports go on.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn get_transfer_status(
        &self,
        engine: NonNull<TransferEngine>,
        batch: BatchId,
        task: usize,
    ) -> Result<TransferStatus, CallError> {
        // An error leaves it unwritten: it is not looked at then.
        let mut status = TransferStatus::default();
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe {
                shim::moonring_status(self.source, engine.as_ptr(), batch, task, &mut status, text, room)
            },
            || format!("getTransferStatus(batch {batch:#x}, task {task})"),
        )?;
        Ok(status)
    }

    /// `freeBatchID`. Refused (4, batch busy) until a status call has *seen* each task COMPLETED or FAILED.
    ///
    /// # Safety
    ///
    /// As the type says. After success the batch is gone, and naming it again corrupts memory.
    pub unsafe fn free_batch_id(&self, engine: NonNull<TransferEngine>, batch: BatchId) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_free(self.source, engine.as_ptr(), batch, text, room) },
            || format!("freeBatchID({batch:#x})"),
        )
    }

    /// `syncSegmentCache`: asks all known peers for their memory again. Blocks on the network.
    ///
    /// # Safety
    ///
    /// As the type says.
    pub unsafe fn sync_segment_cache(&self, engine: NonNull<TransferEngine>) -> Result<(), CallError> {
        check(
            // SAFETY: as promised by the caller.
            |text, room| unsafe { shim::moonring_sync(self.source, engine.as_ptr(), text, room) },
            || "syncSegmentCache".into(),
        )
    }
}

pub(crate) fn set_log_level(image: Image, level: LogLevel) -> Result<(), CallError> {
    check(
        // SAFETY: the handle is a loaded image's.
        |text, room| unsafe { shim::moonring_log_level(image.handle(), level as c_int, text, room) },
        || format!("set_log_level({level:?})"),
    )
}

/// Makes a call that leaves a text with its code; `name` is what it is called in an error.
fn check(call: impl FnOnce(*mut c_char, usize) -> c_int, name: impl FnOnce() -> String) -> Result<(), CallError> {
    let mut text = Text::new();
    let (at, room) = text.room();
    match call(at, room) {
        0 => Ok(()),
        code => Err(CallError { call: name(), code, message: text.read() }),
    }
}

/// Room for a text that a call leaves. On the stack and not cleared first, since most calls leave none.
pub(crate) struct Text(MaybeUninit<[u8; Self::BYTES]>);

impl Text {
    const BYTES: usize = 1024;

    pub(crate) fn new() -> Self {
        let mut text = Self(MaybeUninit::uninit());
        // SAFETY: the first byte is within.
        unsafe { text.0.as_mut_ptr().cast::<u8>().write(0) };
        text
    }

    pub(crate) fn room(&mut self) -> (*mut c_char, usize) {
        (self.0.as_mut_ptr().cast(), Self::BYTES)
    }

    pub(crate) fn read(&self) -> String {
        // SAFETY: it began as an empty text, and who writes into it ends with a zero within its room.
        let text = unsafe { CStr::from_ptr(self.0.as_ptr().cast()) };
        text.to_string_lossy().into_owned()
    }
}
