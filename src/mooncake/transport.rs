//! The engine's side: one Transfer Engine, its peers and its end.

use std::any::Any;
use std::ffi::{CString, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, mpsc};
use std::time::{Duration, Instant};

use mooncake_sys::{
    Api, CallError, Grouping, OPCODE_READ, STATUS_COMPLETED, STATUS_PENDING, STATUS_WAITING, SegmentId, TransferEngine,
    TransferRequest,
};

use super::driver::MooncakeDriver;
use super::env;
use super::gpu::Copies;
use crate::keep;
use crate::thread;
use crate::transport::{Busy, Caps, Driver, PollerWaker, RawMemory, Transport, TransportError};

/// Most operations that one driver has in flight towards one peer.
const IN_FLIGHT: u32 = 256;
/// Most operations in one submit. With each answer COMPLETED Mooncake asks about all tasks of the batch, so what a batch costs the
/// poller grows with its square, and a submit of its own for each 32 costs less: 128 transfers of 64 KiB took 3,191 us in one
/// batch, 3,102 in two, 3,097 in four and 3,047 in eight, with a core for each engine's threads, and 128 of 4 KiB no more in
/// four than in one (TCP, 2 cores, 0.3.13.post1).
pub(super) const MAX_BATCH: u32 = u32::BITS;
/// Most bytes in one request that stands for several entries. Mooncake's TCP moves 16 MiB in requests of 128 or 256 KiB in 10 to 11 ms,
/// of 512 KiB or 1 MiB in 17 to 20 (measured on 2 cores, 0.3.13.post1).
const MAX_MERGED: u32 = 256 << 10;
/// How long the end of an engine is waited for. [M: 0.25 to 1 s, transfers to a stopped peer or not]
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// How long a zero-length request may take, which does not use the network.
const WARM_LIMIT: Duration = Duration::from_secs(5);

/// An engine's address. Any thread may call the engine.
#[derive(Clone, Copy)]
struct Handle(NonNull<TransferEngine>);

// SAFETY: Mooncake's engine is made for calls from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// What the transport and its drivers share.
pub(super) struct Shared {
    pub(super) api: &'static Api,
    /// `None` once it is destroyed. Held for reading over each call; drivers never wait for it.
    engine: RwLock<Option<Handle>>,
    name: String,
    /// Keeps an adopted engine alive; `None` if the engine is ours.
    owner: Option<Arc<dyn Any + Send + Sync>>,
    pub(super) grouping: Grouping,
    /// Most operations in flight towards one peer, over all drivers.
    pub(super) queue: u32,
    /// Opened segments, by the number that drivers know them by.
    peers: RwLock<Vec<Arc<Peer>>>,
    /// Operations started and not quiet, over all drivers.
    pub(super) unquiet: AtomicUsize,
    /// Memory was registered at some time, which a peer's late write may reach until the engine is gone.
    registered: AtomicBool,
    /// GPU memory that the CPU copies to.
    pub(super) copies: Copies,
}

/// A segment that was opened.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) segment: SegmentId,
    /// Operations in Mooncake's hands, from all drivers.
    in_flight: AtomicU32,
}

impl Peer {
    /// Takes places for up to `want` operations, so that there are never more than `limit`. How many.
    pub(super) fn take_places(&self, want: u32, limit: u32) -> u32 {
        let taken = |in_flight: u32| want.min(limit.saturating_sub(in_flight));
        let update = |in_flight| Some(in_flight + taken(in_flight));
        self.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).map_or(0, taken)
    }

    pub(super) fn give_places_back(&self, count: u32) {
        self.in_flight.fetch_sub(count, Ordering::Relaxed);
    }
}

/// An engine that is not destroyed while this lives.
pub(super) struct Live<'shared> {
    guard: RwLockReadGuard<'shared, Option<Handle>>,
}

impl Live<'_> {
    pub(super) fn engine(&self) -> NonNull<TransferEngine> {
        self.guard.expect("only made when it is there").0
    }
}

impl Shared {
    /// The engine; `None` if it is gone or just going. Never waits.
    pub(super) fn live(&self) -> Option<Live<'_>> {
        // Fails only while somebody writes or waits to: only `close` does.
        let guard = self.engine.try_read().ok()?;
        guard.is_some().then_some(Live { guard })
    }

    pub(super) fn peer(&self, target: u32) -> Option<Arc<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).get(target as usize).cloned()
    }

    /// Numbers a segment for drivers.
    pub(super) fn number(&self, segment: SegmentId) -> u32 {
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        // Opened again, a segment keeps Mooncake's number: what is in flight towards it counts together.
        let known = peers.iter().find(|peer| peer.segment == segment).cloned();
        peers.push(known.unwrap_or_else(|| Arc::new(Peer { segment, in_flight: AtomicU32::new(0) })));
        peers.len() as u32 - 1
    }

    fn live_for(&self, what: &str) -> Result<Live<'_>, TransportError> {
        let fail = |why: &str| TransportError { what: what.to_owned(), code: 0, why: why.into() };
        self.live().ok_or_else(|| fail("the engine is closed"))
    }

    /// Destroys the engine, which ends its transfers and its threads.
    fn destroy(self: &Arc<Self>) -> Result<(), Busy> {
        let shared = Arc::clone(self);
        let (done, ended) = mpsc::sync_channel(1);
        let helper = move || {
            let mut engine = shared.engine.write().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: we made the engine, the lock keeps every other call out, and nobody finds it afterwards.
            let gone = engine.take().is_none_or(|engine| unsafe { shared.api.destroy_engine(engine.0) }.is_ok());
            drop(engine);
            // Before the answer: what this keeps may belong to contexts that our caller's caller ends next.
            drop(shared);
            // Nobody listens any more if the limit has passed.
            let _ = done.send(gone);
        };
        thread::spawn("moonring-close", helper).map_err(|_| Busy)?;
        if ended.recv_timeout(CLOSE_LIMIT) == Ok(true) { Ok(()) } else { Err(Busy) }
    }

    /// Leaves an adopted engine to its owner.
    fn leave(&self, owner: &Arc<dyn Any + Send + Sync>) -> Result<(), Busy> {
        if self.unquiet.load(Ordering::Acquire) > 0 {
            keep::for_ever(Arc::clone(owner));
            return Err(Busy);
        }
        // The engine goes on, and with it peers that write to memory of ours.
        if self.registered.load(Ordering::Relaxed) { Err(Busy) } else { Ok(()) }
    }

    /// Fills Mooncake's caches for a segment, so that no submit has to ask the network for its description.
    fn warm(&self, live: &Live<'_>, segment: SegmentId) -> Result<(), CallError> {
        let request = TransferRequest {
            opcode: OPCODE_READ,
            source: NonNull::<c_void>::dangling().as_ptr(),
            target_id: segment,
            file_id: 0,
            target_offset: 0,
            length: 0,
        };
        let engine = live.engine();
        // SAFETY: the engine is live, the request touches no memory, and the batch is freed once, after its task has ended.
        unsafe {
            let batch = self.api.allocate_batch_id(engine, 1)?;
            if let Err(refused) = self.api.submit_transfer(engine, batch, &[request], Grouping::None) {
                if self.api.can_ask_after_refusal() {
                    let _ = self.api.free_batch_id(engine, batch);
                }
                return Err(refused);
            }
            let limit = Instant::now() + WARM_LIMIT;
            loop {
                let status = self.api.get_transfer_status(engine, batch, 0)?.status;
                match status {
                    STATUS_COMPLETED => return self.api.free_batch_id(engine, batch),
                    STATUS_WAITING | STATUS_PENDING if Instant::now() < limit => std::thread::yield_now(),
                    _ => {
                        let call = format!("a transfer of 0 bytes with segment {segment}");
                        return Err(CallError { call, code: status, message: "it did not complete".into() });
                    }
                }
            }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mooncake")
            .field("name", &self.name)
            .field("library", &self.api.path())
            .field("adopted", &self.owner.is_some())
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(super) struct Mooncake {
    pub(super) shared: Arc<Shared>,
}

impl Mooncake {
    /// # Safety
    /// `engine` is a live engine of `api`'s. Without an `owner` it is ours alone, made by `api`; with one it lives as long as
    /// the owner does.
    pub(super) unsafe fn new(
        api: &'static Api,
        engine: NonNull<TransferEngine>,
        name: String,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Mooncake {
        // Without the pool Mooncake connects in the submitting thread, except for requests in a group. Those in one cost more.
        let pool = if owner.is_none() { env::pool_is_on() } else { env::pool_is_on_for_others() };
        let shared = Shared {
            api,
            engine: RwLock::new(Some(Handle(engine))),
            name,
            owner,
            grouping: if pool { Grouping::None } else { Grouping::Each },
            queue: env::queue_per_peer(),
            peers: RwLock::default(),
            unquiet: AtomicUsize::new(0),
            registered: AtomicBool::new(false),
            copies: Copies::default(),
        };
        Mooncake { shared: Arc::new(shared) }
    }
}

// SAFETY: an operation becomes a Mooncake task with the same two ranges. It is reported quiet only when Mooncake has said
// COMPLETED or FAILED for its task, or that it started nothing: Mooncake's own ends, after which it leaves the local range
// alone. A destroyed engine has no threads left.
unsafe impl Transport for Mooncake {
    fn name(&self) -> String {
        self.shared.name.clone()
    }

    fn caps(&self) -> Caps {
        // A quarter of Mooncake's queue: up to four pollers may use one engine before they have to share.
        let max_in_flight_per_peer = (self.shared.queue / 4).clamp(1, IN_FLIGHT);
        Caps { threads_here: true, max_batch: MAX_BATCH, max_in_flight_per_peer, max_merged: MAX_MERGED }
    }

    fn driver(&self, _wake: PollerWaker) -> Box<dyn Driver> {
        // Mooncake tells nobody when a task ends: the driver asks, and says when it wants to ask again.
        Box::new(MooncakeDriver::new(Arc::clone(&self.shared)))
    }

    unsafe fn register(&self, memory: RawMemory, location: &str) -> Result<(), TransportError> {
        let what = format!("registering {memory} at {location:?}");
        let place = c_string(&what, location)?;
        let live = self.shared.live_for(&what)?;
        let (address, len) = (memory.address as *mut c_void, memory.len as usize);
        // SAFETY: the caller's promise, of which its memory's context is a part.
        unsafe { self.shared.copies.prepare(memory, location) }?;
        self.shared.registered.store(true, Ordering::Relaxed);
        // SAFETY: the engine is live; the memory stays mapped as Mooncake needs it, by the caller's word.
        unsafe { self.shared.api.register_local_memory(live.engine(), address, len, &place, true) }.map_err(|error| {
            self.shared.copies.forget(memory);
            transport_error(what, &error)
        })
    }

    unsafe fn adopt(&self, memory: RawMemory, location: &str) -> Result<(), TransportError> {
        // SAFETY: as in `register`.
        unsafe { self.shared.copies.prepare(memory, location) }
    }

    fn forget(&self, memory: RawMemory) {
        self.shared.copies.forget(memory);
    }

    fn unregister(&self, memory: RawMemory) -> Result<(), TransportError> {
        let what = format!("unregistering {memory}");
        let live = self.shared.live_for(&what)?;
        // SAFETY: the engine is live.
        unsafe { self.shared.api.unregister_local_memory(live.engine(), memory.address as *mut c_void) }
            .map_err(|error| transport_error(what, &error))?;
        self.shared.copies.forget(memory);
        Ok(())
    }

    fn open(&self, name: &str, fresh: bool) -> Result<u32, TransportError> {
        let shared = &self.shared;
        let what = format!("opening segment {name:?}");
        let text = c_string(&what, name)?;
        let live = shared.live_for(&what)?;
        let fail = |error: CallError| {
            let mut error = transport_error(what.clone(), &error);
            error.why += "; check that the peer runs, can be reached, and has that name (its Engine::name)";
            error
        };
        // SAFETY: the engine is live.
        let segment = unsafe {
            match fresh {
                true => shared.api.open_segment_no_cache(live.engine(), &text),
                false => shared.api.open_segment(live.engine(), &text),
            }
        };
        let segment = segment.map_err(fail)?;
        shared.warm(&live, segment).map_err(fail)?;
        Ok(shared.number(segment))
    }

    fn close(&self) -> Result<(), Busy> {
        match &self.shared.owner {
            None => self.shared.destroy(),
            Some(owner) => self.shared.leave(owner),
        }
    }
}

fn c_string(what: &str, text: &str) -> Result<CString, TransportError> {
    CString::new(text).map_err(|_| TransportError {
        what: what.to_owned(),
        code: 0,
        why: "the text has a zero byte, which Mooncake cannot take".into(),
    })
}

fn transport_error(what: String, error: &CallError) -> TransportError {
    TransportError { what, code: i64::from(error.code), why: error.to_string() }
}
