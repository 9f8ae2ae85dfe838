//! The engine: what outlives a ring. Regions, segments and the transport under them.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::fork::{self, Home};
use crate::keep;
use crate::region::{self, Addresses, Region, RegionInfo, RegionInner, Registered, UnregisterError};
use crate::ring::share::STORE;
use crate::sqe::op_flags;
use crate::thread;
use crate::trace::event;
use crate::transport::{RawMemory, Transport, TransportError};

/// Registered memory, open segments and the transport. Cheap to clone; the last clone, ring or [`Registered`] ends it.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<EngineInner>,
}

struct EngineInner {
    /// Tells engines apart: a slice of one is refused by another's ring.
    id: u64,
    name: String,
    transport: Arc<dyn Transport>,
    /// Addresses of ours are given back only after the transport is closed.
    regions: Mutex<Regions>,
    /// Those that are registered, by number. Apart: `regions` is locked while the transport registers memory, and a push waits
    /// for nobody.
    by_number: Mutex<HashMap<NonZeroU64, Arc<RegionInner>>>,
    segments: Arc<Mutex<Segments>>,
    /// The names of the Store clients that it had so far.
    stores: Mutex<Vec<Box<str>>>,
    /// By name, and whether afresh.
    opening: Mutex<HashMap<(String, bool), Arc<Opening>>>,
    home: Home,
}

#[derive(Default)]
struct Segments {
    /// The newest handle of each name.
    by_name: HashMap<String, Segment>,
    /// Every handle, stale ones too: entries name their segment by this number.
    by_target: HashMap<u32, Segment>,
}

#[derive(Default)]
struct Regions {
    /// Those that are registered: entries name them by plain pointers.
    live: Vec<Arc<RegionInner>>,
    /// What is left of our own that are not any more.
    sealed: Vec<Addresses>,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The segments of every engine of the process, by its id: what one is called, whoever refuses it asks.
static SEGMENTS: Mutex<Vec<(u64, Weak<Mutex<Segments>>)>> = Mutex::new(Vec::new());

/// A number for an engine or a Store client, by which a core tells its drivers apart: of 28 bits, so that what names an engine
/// besides something else is small.
pub(crate) fn next_id() -> u64 {
    let id = NEXT_ID.fetch_add(1, Relaxed);
    assert!(id < 1 << 28, "a process makes fewer than 268 million engines and Store clients");
    id
}

impl Engine {
    /// An engine that copies inside this process. It needs nothing and really moves bytes; two of them reach each other
    /// by name. For tests, docs and a first look.
    pub fn loopback() -> Engine {
        Engine::over(Arc::new(crate::transport::loopback::Loopback::new()))
    }

    /// An engine over a simulated transport, see [`crate::sim`].
    pub fn sim(sim: crate::sim::Sim) -> Engine {
        Engine::over(Arc::new(sim.into_transport()))
    }

    /// An engine over any transport.
    #[cfg(feature = "unstable-transport")]
    pub fn with_transport(transport: Arc<dyn Transport>) -> Engine {
        Engine::over(transport)
    }

    pub(crate) fn over(transport: Arc<dyn Transport>) -> Engine {
        let engine = Engine {
            inner: Arc::new(EngineInner {
                id: next_id(),
                name: transport.name(),
                transport,
                regions: Mutex::default(),
                by_number: Mutex::default(),
                segments: Arc::default(),
                stores: Mutex::default(),
                opening: Mutex::default(),
                home: Home::here(),
            }),
        };
        lock(&SEGMENTS).push((engine.id(), Arc::downgrade(&engine.inner.segments)));
        engine
    }

    /// False in a forked child of the engine's process.
    pub(crate) fn is_here(&self) -> bool {
        self.inner.home.is_here()
    }

    fn check_home(&self, what: impl FnOnce() -> String) -> Result<(), TransportError> {
        let fail = || TransportError { what: what(), code: 0, why: fork::ENGINE_IS_ELSEWHERE.into() };
        if self.is_here() { Ok(()) } else { Err(fail()) }
    }

    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.inner.id
    }

    pub(crate) fn transport(&self) -> &Arc<dyn Transport> {
        &self.inner.transport
    }

    /// The name that peers give to [`open_segment`](Self::open_segment).
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Registers our own memory: entries may use it and peers reach it, from now until it is unregistered or the engine
    /// ends. Blocks while the transport tells its metadata; one registration or unregistration of an engine at a time.
    ///
    /// # Errors
    /// [`RegisterError`] with the region in it, unchanged.
    pub fn register(&self, region: Region) -> Result<Registered, RegisterError> {
        self.register_at(region, "cpu:0")
    }

    /// The same with Mooncake's name for where the memory lives, such as `cpu:1` for the second NUMA node.
    ///
    /// # Errors
    /// [`RegisterError`] with the region in it, unchanged.
    pub fn register_at(&self, region: Region, location: &str) -> Result<Registered, RegisterError> {
        let what = || format!("registering {} bytes", region.len());
        if let Err(cause) = self.check_home(what) {
            return Err(RegisterError { region: Some(region), cause });
        }
        let region = RegionInner::own(self.inner.id, region, location);
        let mut regions = self.inner.lock_regions();
        // SAFETY: our own mapping stays mapped until this engine's transport is closed, which ends all use of it, and safe
        // code reaches its bytes only by atomic copies.
        if let Err(cause) = unsafe { self.inner.transport.register(region.memory, location) } {
            let region = region.into_region().expect("nobody else has the region yet");
            return Err(RegisterError { region: Some(region), cause });
        }
        regions.live.push(Arc::clone(&region));
        lock(&self.inner.by_number).insert(region.number, Arc::clone(&region));
        drop(regions);
        Ok(Registered { region, engine: self.clone() })
    }

    /// Registers memory that something else owns: GPU memory, another engine's pool. The exact same range again is
    /// counted, and stays registered until it was unregistered as often. `location` is Mooncake's, such as `cuda:0`.
    ///
    /// Mooncake's TCP copies to GPU memory (a location that begins with `cuda`) with the CPU. So that nobody is told of such a
    /// copy before it has landed, the memory is marked `SYNC_MEMOPS`, or the poller waits for an event behind it (features
    /// `cuda` and `mooncake`; `docs/gpu.md` in the repository).
    ///
    /// # Safety
    /// The memory stays mapped until it is unregistered and no peer writes it any more, or the engine is gone; so does GPU
    /// memory's context, until no operation with it runs. From now on any peer may change it at any time: no Rust reference
    /// to it may be used while one can.
    ///
    /// # Errors
    /// [`RegisterError`]: an empty or wrapping range, one that overlaps another without being equal to it, or what the
    /// transport says.
    pub unsafe fn register_foreign(&self, address: u64, len: u64, location: &str) -> Result<Registered, RegisterError> {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { self.enter_foreign(address, len, location, false) }
    }

    /// Names memory that somebody else has registered with an adopted engine ([`mooncake::adopt`](crate::mooncake::adopt)), so
    /// that entries may use it. The transport is not asked, and unregistering it here only ends its use in entries. Otherwise
    /// as [`register_foreign`](Self::register_foreign).
    ///
    /// # Safety
    /// As for [`register_foreign`](Self::register_foreign); and the whole range is registered with the engine, and stays so
    /// until it was unregistered here.
    ///
    /// # Errors
    /// As for [`register_foreign`](Self::register_foreign).
    #[cfg(feature = "mooncake")]
    pub unsafe fn adopt_registration(
        &self,
        address: u64,
        len: u64,
        location: &str,
    ) -> Result<Registered, RegisterError> {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { self.enter_foreign(address, len, location, true) }
    }

    /// # Safety
    /// As for the two callers above; `known` tells that the transport has the range already.
    unsafe fn enter_foreign(
        &self,
        address: u64,
        len: u64,
        location: &str,
        known: bool,
    ) -> Result<Registered, RegisterError> {
        let memory = RawMemory { address, len };
        let refuse = |why: String| {
            Err(RegisterError {
                region: None,
                cause: TransportError { what: format!("registering {memory}"), code: 0, why },
            })
        };
        let Some(end) = address.checked_add(len).filter(|_| len > 0 && address > 0) else {
            return refuse("the range is empty, starts at address 0 or passes the end of the address space".into());
        };
        self.check_home(|| format!("registering {memory}")).map_err(|cause| RegisterError { region: None, cause })?;
        let mut regions = self.inner.lock_regions();
        for other in &regions.live {
            if other.memory == memory && !other.is_own() && other.known == known {
                region::add_registration(other);
                return Ok(Registered { region: Arc::clone(other), engine: self.clone() });
            }
            if other.memory.address < end && address < other.memory.address + other.memory.len {
                return refuse(format!("it overlaps {}, which is registered; unregister that first", other.memory));
            }
        }
        let transport = &self.inner.transport;
        // SAFETY: the caller's promise is the one that both ask for.
        let entered = unsafe {
            match known {
                true => transport.adopt(memory, location),
                false => transport.register(memory, location),
            }
        };
        if let Err(cause) = entered {
            return Err(RegisterError { region: None, cause });
        }
        let region = RegionInner::foreign(self.inner.id, memory, location, known);
        regions.live.push(Arc::clone(&region));
        lock(&self.inner.by_number).insert(region.number, Arc::clone(&region));
        drop(regions);
        Ok(Registered { region, engine: self.clone() })
    }

    pub(crate) fn unregister(&self, region: &Arc<RegionInner>) -> Result<(), UnregisterError> {
        self.check_home(|| format!("unregistering {}", region.memory))?;
        let mut regions = self.inner.lock_regions();
        let Some(index) = regions.live.iter().position(|live| Arc::ptr_eq(live, region)) else {
            return Err(UnregisterError::NotRegistered);
        };
        region.close().map_err(UnregisterError::Busy)?;
        if !region::remove_registration(region) {
            region.reopen();
            return Ok(());
        }
        if region.known {
            self.inner.transport.forget(region.memory);
        } else if let Err(cause) = self.inner.transport.unregister(region.memory) {
            region::add_registration(region);
            region.reopen();
            return Err(cause.into());
        }
        let sealed = region.seal();
        // No entry names it any more: it was closed without a use, and none has begun since.
        regions.live.swap_remove(index);
        lock(&self.inner.by_number).remove(&region.number);
        regions.sealed.extend(region.addresses());
        sealed.map_err(UnregisterError::Seal)
    }

    /// Finds the peer called `name` (its [`name`](Self::name), which its [`RegionInfo`] carries) and makes it ready: the
    /// transport's caches then know it. Blocks for at most `limit`; the look-up runs on a thread of its own, because the
    /// transport may block in it for much longer when the peer is stopped, and keeps the engine alive until it returns. A
    /// name that is open already is answered at once with the same handle, whether the peer still runs or not.
    ///
    /// What is known of a peer stays until the engine ends: about 250 bytes for each name that was found and 120 for each time
    /// it was [reopened](Self::reopen_segment), and about 900 bytes in each ring that pushes to it, until the ring ends. Mooncake
    /// keeps more; `docs/semantics.md` in the repository has the table.
    ///
    /// # Errors
    /// [`OpenError::Limit`] after `limit` (a later call joins the same look-up), or what the transport says.
    pub fn open_segment(&self, name: &str, limit: Duration) -> Result<Segment, OpenError> {
        self.check_home(|| format!("opening segment {name:?}"))?;
        if let Some(open) = lock(&self.inner.segments).by_name.get(name) {
            return Ok(open.clone());
        }
        self.look_up(name, false, limit)
    }

    /// Looks a peer up afresh, after it was restarted under the same name. Older handles become stale: entries with them
    /// are refused, and those that were accepted and not issued fail with `-ESTALE`, instead of going to a wrong place.
    ///
    /// # Errors
    /// As [`open_segment`](Self::open_segment). Older handles are stale even then. If a look-up of that name is running
    /// already, this call joins it.
    pub fn reopen_segment(&self, name: &str, limit: Duration) -> Result<Segment, OpenError> {
        self.check_home(|| format!("opening segment {name:?}"))?;
        self.forget_segment(name);
        self.look_up(name, true, limit)
    }

    /// Makes the handles of a name stale.
    fn forget_segment(&self, name: &str) {
        let mut segments = lock(&self.inner.segments);
        if let Some(old) = segments.by_name.remove(name) {
            old.inner.stale.store(true, Relaxed);
        }
        // Look-ups that run may find what was cached before. None ends meanwhile: that takes the lock.
        let opening = lock(&self.inner.opening);
        for fresh in [false, true] {
            if let Some(running) = opening.get(&(name.to_owned(), fresh)) {
                running.outdated.store(true, Relaxed);
            }
        }
    }

    /// Looks a peer up on the caller's thread.
    #[cfg(test)]
    pub(crate) fn open_here(&self, name: &str, fresh: bool) -> Segment {
        if fresh {
            self.forget_segment(name);
        }
        let opening = Arc::<Opening>::default();
        let (name, opened) = (name.to_owned(), Arc::clone(&opening));
        Helper { engine: self.clone(), name, fresh, opening }.run();
        opened.wait(Duration::ZERO).expect("it has run").expect("the transport finds it")
    }

    fn look_up(&self, name: &str, fresh: bool, limit: Duration) -> Result<Segment, OpenError> {
        let opening = {
            let mut all = lock(&self.inner.opening);
            let key = (name.to_owned(), fresh);
            if let Some(running) = all.get(&key) {
                Arc::clone(running)
            } else {
                let opening = Arc::new(Opening::default());
                let helper =
                    Helper { engine: self.clone(), name: name.to_owned(), fresh, opening: Arc::clone(&opening) };
                thread::spawn("moonring-open", move || helper.run()).map_err(OpenError::Thread)?;
                all.insert(key, Arc::clone(&opening));
                opening
            }
        };
        opening
            .wait(limit)
            .ok_or_else(|| OpenError::Limit { name: name.to_owned(), limit })?
            .map_err(OpenError::Transport)
    }

    /// A number for a new Store client.
    pub(crate) fn next_store(&self, name: &str) -> u32 {
        let mut stores = lock(&self.inner.stores);
        stores.push(name.into());
        STORE | (stores.len() as u32 - 1)
    }

    /// What the segment or the Store client is called that entries name by `peer`.
    pub(crate) fn peer_name(&self, peer: u32) -> Option<String> {
        match peer & STORE {
            0 => self.segment(peer).map(|segment| segment.name().to_owned()),
            _ => lock(&self.inner.stores).get((peer & !STORE) as usize).map(|name| name.to_string()),
        }
    }

    /// The region that slices name by `number`, if it is registered here.
    pub(crate) fn region(&self, number: NonZeroU64) -> Option<Arc<RegionInner>> {
        lock(&self.inner.by_number).get(&number).cloned()
    }

    /// The segment that entries name by `target`.
    pub(crate) fn segment(&self, target: u32) -> Option<Segment> {
        lock(&self.inner.segments).by_target.get(&target).cloned()
    }

    /// Handles on the engine: users', rings', regions'.
    pub(crate) fn users(&self) -> usize {
        Arc::strong_count(&self.inner)
    }

    /// Keeps everything for ever: a transfer could not be stopped and may still touch memory.
    pub(crate) fn leak(&self) {
        event!(ERROR, engine = self.name(), "engine and memory are kept for ever: a transfer could not be stopped");
        keep::for_ever(self.clone());
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("name", &self.inner.name)
            .field("transport", &self.inner.transport)
            .finish_non_exhaustive()
    }
}

/// What the segment is called that some engine of the process opened.
pub(crate) fn segment_name(place: &Place) -> Box<str> {
    let all = lock(&SEGMENTS);
    let segments = all.iter().find(|&&(id, _)| id == place.engine()).and_then(|(_, segments)| segments.upgrade());
    let name = segments.and_then(|segments| Some(lock(&segments).by_target.get(&place.target)?.name().into()));
    name.unwrap_or_else(|| "(of an engine that has ended)".into())
}

impl EngineInner {
    fn lock_regions(&self) -> MutexGuard<'_, Regions> {
        lock(&self.regions)
    }
}

impl Drop for EngineInner {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // A forked child: the transport is its parent's, and its locks may be held for ever.
            let regions = std::mem::take(self.regions.get_mut().unwrap_or_else(PoisonError::into_inner));
            keep::for_ever((Arc::clone(&self.transport), regions));
            return;
        }
        lock(&SEGMENTS).retain(|&(id, _)| id != self.id);
        if self.transport.close().is_ok() {
            event!(DEBUG, engine = self.name, "engine ended");
        } else {
            event!(WARN, engine = self.name, "engine not ended: its regions' addresses are kept for ever");
            // Something may still write there: never give the addresses back. Pages that no operation uses can go.
            let regions = std::mem::take(&mut *self.lock_regions());
            for region in &regions.live {
                if region.close().is_ok() {
                    if !region.known {
                        let _ = self.transport.unregister(region.memory);
                    }
                    let _ = region.seal();
                }
            }
            keep::for_ever(regions);
        }
    }
}

/// Locks, whatever a panicking holder left: every critical section here leaves its data whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A look-up in progress, which any number of callers wait for.
#[derive(Default)]
struct Opening {
    result: Mutex<Option<Result<Segment, TransportError>>>,
    done: Condvar,
    /// The name was reopened since it began.
    outdated: AtomicBool,
}

impl Opening {
    fn wait(&self, limit: Duration) -> Option<Result<Segment, TransportError>> {
        let end = Instant::now().checked_add(limit);
        let mut result = lock(&self.result);
        loop {
            if let Some(result) = &*result {
                return Some(result.clone());
            }
            let left = end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            result = self.done.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

struct Helper {
    engine: Engine,
    name: String,
    fresh: bool,
    opening: Arc<Opening>,
}

impl Helper {
    fn run(self) {
        let inner = &self.engine.inner;
        let result = inner.transport.open(&self.name, self.fresh).map(|target| Segment {
            inner: Arc::new(SegmentInner {
                engine: inner.id,
                name: self.name.clone(),
                target,
                stale: AtomicBool::new(false),
            }),
        });
        // In this order, so that a caller finds the segment or the look-up at every moment.
        if let Ok(segment) = &result {
            let mut segments = lock(&inner.segments);
            segments.by_target.insert(segment.inner.target, segment.clone());
            if self.opening.outdated.load(Relaxed) {
                segment.inner.stale.store(true, Relaxed);
            } else {
                segments.by_name.insert(self.name.clone(), segment.clone());
            }
        }
        match &result {
            Ok(_) => event!(DEBUG, engine = inner.name, segment = self.name, again = self.fresh, "segment opened"),
            Err(_error) => {
                event!(WARN, engine = inner.name, segment = self.name, again = self.fresh, error = %_error, "segment not opened");
            }
        }
        lock(&inner.opening).remove(&(self.name.clone(), self.fresh));
        *lock(&self.opening.result) = Some(result);
        self.opening.done.notify_all();
    }
}

pub(crate) struct SegmentInner {
    pub(crate) engine: u64,
    name: String,
    pub(crate) target: u32,
    stale: AtomicBool,
}

/// A peer that is open. Cheap to clone; good for entries of rings on the engine that opened it. It does not keep the
/// engine alive and is never closed: Mooncake keeps what it knows of a peer.
#[derive(Clone)]
pub struct Segment {
    pub(crate) inner: Arc<SegmentInner>,
}

impl Segment {
    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// A place in the peer's memory, by its address there. Nothing is checked here: only the peer knows what it has
    /// registered.
    #[inline]
    pub fn at(&self, address: u64) -> Remote {
        let SegmentInner { engine, target, .. } = *self.inner;
        Remote { place: Place { engine: engine as u32, target, address }, below: 0, above: 0 }
    }

    /// A place in a region that the peer has described, checked against it. Entries with such a remote range may be merged:
    /// Reads or Writes that become ready one after another, alone and not in a chain, adjacent on both sides, up or down, of
    /// one ring, local region and remote region, can be one request to a transport that gains from it, Mooncake does. Each
    /// still has its own result. If a merged Read fails, or a merged Write is rejected outright, each part is tried once
    /// more alone.
    ///
    /// # Errors
    /// [`RangeError`](crate::RangeError) if `offset..offset + len` does not lie inside the region.
    #[inline]
    pub fn slice(&self, info: &RegionInfo, offset: u64, len: u64) -> Result<Remote, crate::RangeError> {
        match offset.checked_add(len) {
            Some(end) if end <= info.len => {
                let (below, above) = (offset, info.len - offset);
                Ok(Remote { below, above, ..self.at(info.address + offset) })
            }
            end => Err(crate::RangeError { start: offset, end: end.unwrap_or(u64::MAX), len: info.len }),
        }
    }

    #[inline]
    pub(crate) fn is_stale(&self) -> bool {
        self.inner.stale.load(Relaxed)
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("name", &self.inner.name).field("stale", &self.is_stale()).finish()
    }
}

/// An address in a peer's memory. It names the segment by number, which counts nothing: places are made and let go of for each
/// entry.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    engine: u32,
    pub(crate) target: u32,
    pub(crate) address: u64,
}

/// The remote side of a transfer: an address in a peer's memory.
#[derive(Clone, Debug)]
pub struct Remote {
    pub(crate) place: Place,
    /// Bytes of the declared registration below the address, and from it on; 0 if none was declared.
    below: u64,
    above: u64,
}

impl Place {
    /// The engine that opened the segment.
    #[inline]
    pub(crate) fn engine(&self) -> u64 {
        u64::from(self.engine)
    }
}

impl Remote {
    /// Whether the declared registration goes on below and above the first `len` bytes, as an SQE says it.
    #[inline]
    pub(crate) fn more(&self, len: u64) -> u16 {
        let more = |there, flag| if there { flag } else { 0 };
        more(self.below > 0, op_flags::MORE_BELOW) | more(self.above > len, op_flags::MORE_ABOVE)
    }

    /// The address in the peer's space.
    pub fn address(&self) -> u64 {
        self.place.address
    }
}

/// Memory could not be registered.
#[derive(Debug, thiserror::Error)]
#[error("{cause}")]
pub struct RegisterError {
    /// The region, unchanged; `None` for foreign memory.
    pub region: Option<Region>,
    /// Why.
    #[source]
    pub cause: TransportError,
}

/// A segment could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The limit passed. The look-up goes on; opening the name again joins it.
    #[error("segment {name:?} was not found within {limit:?}; the peer may be stopped or unreachable")]
    Limit {
        /// The segment's name.
        name: String,
        /// The limit that passed.
        limit: Duration,
    },
    /// The transport says no.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The helper thread could not be started.
    #[error("the look-up's thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
}
