//! CUDA contexts: whose they are, which thread has which, and the pool of events of each.

use std::cell::Cell;
use std::collections::HashMap;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use crossbeam_queue::SegQueue;

use super::RawHandle;
use super::device::Device;
use super::driver::{Driver, check, number};
use super::error::CudaError;
use super::event::RawEvent;
use super::word::Words;

/// A CUDA context. Cheap to clone; streams and fences made from it keep it.
///
/// Each context has one pool of events, shared by everything in the process that names the same context, for as long
/// as one of them lives: keep one for as long as you make fences.
#[derive(Clone, Debug)]
pub struct Context(pub(super) Arc<ContextInner>);

/// Who ends the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The driver, when everybody has released it; we retained it once on this device.
    Primary(i32),
    /// Somebody else.
    Foreign,
}

#[derive(Debug)]
pub(super) struct ContextInner {
    pub(super) driver: &'static Driver,
    raw: Handle,
    id: u64,
    owner: Owner,
    /// Events that no fence uses. SegQueue: any thread may give one back, and none waits for another.
    pub(super) pool: SegQueue<RawEvent>,
    /// The order of records on each stream, by the stream's id.
    orders: Mutex<HashMap<u64, Weak<Order>>>,
    /// Pinned memory that streams and pollers share.
    pub(super) words: Mutex<Words>,
    /// A stream of our own that never has work, made when it is first needed.
    idle: Mutex<Option<Handle>>,
    device: OnceLock<Device>,
}

/// A handle that threads may share: the driver's functions take it from any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(pub(super) RawHandle);
// SAFETY: a handle is a name; the driver allows its use from every thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The order in which events are recorded on one stream, whatever objects name it. Whoever records holds the lock.
#[derive(Debug)]
pub(super) struct Order {
    /// Unique in the process.
    pub(super) key: u64,
    pub(super) recorded: Mutex<u64>,
}

/// Every context in use: the driver's id, whether we hold it, and its object.
static CONTEXTS: Mutex<Vec<(u64, Owner, Weak<ContextInner>)>> = Mutex::new(Vec::new());

impl Context {
    /// A device's primary context, which the CUDA runtime, PyTorch and cudarc use. Retained here and released when the
    /// last user of it is dropped.
    pub fn primary(ordinal: i32) -> Result<Context, CudaError> {
        let driver = Driver::get()?;
        let count = driver.device_count()?;
        if !(0..count).contains(&ordinal) {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let mut raw = ptr::null_mut();
        // SAFETY: an out pointer. The ordinal is one of the driver's: a `CUdevice` is its ordinal.
        let code = unsafe { (driver.primary_retain)(&mut raw, ordinal) };
        check("cuDevicePrimaryCtxRetain", ordinal as u64, code)?;
        ContextInner::share(driver, Handle(raw), Owner::Primary(ordinal))
    }

    /// The calling thread's current context, which must be the primary one of its device (the CUDA runtime's, PyTorch's,
    /// cudarc's). Retained as in [`primary`](Self::primary).
    pub fn current() -> Result<Context, CudaError> {
        let driver = Driver::get()?;
        let mut raw = ptr::null_mut();
        // SAFETY: an out pointer.
        check("cuCtxGetCurrent", 0, unsafe { (driver.context_current)(&mut raw) })?;
        if raw.is_null() {
            return Err(CudaError::NoCurrentContext);
        }
        let mut device = 0;
        // SAFETY: an out pointer.
        check("cuCtxGetDevice", number(raw), unsafe { (driver.context_device)(&mut device) })?;
        if let Some(primary) = Context::primary_if_active(device)?
            && primary.0.raw == Handle(raw)
        {
            return Ok(primary);
        }
        Err(CudaError::NotPrimary { context: number(raw) })
    }

    /// A device's primary context, if somebody has made it: retaining would activate one that nobody asked for.
    pub(super) fn primary_if_active(ordinal: i32) -> Result<Option<Context>, CudaError> {
        let driver = Driver::get()?;
        let (mut flags, mut active) = (0, 0);
        // SAFETY: out pointers, a device of the driver.
        let code = unsafe { (driver.primary_state)(ordinal, &mut flags, &mut active) };
        check("cuDevicePrimaryCtxGetState", ordinal as u64, code)?;
        if active != 0 { Context::primary(ordinal).map(Some) } else { Ok(None) }
    }

    /// Names a context that somebody else owns. It is never destroyed here.
    ///
    /// # Safety
    ///
    /// `context` is a valid `CUcontext`, and stays so until this, its clones and everything made from them (streams,
    /// fences, and the rings with entries that wait for those) are gone.
    pub unsafe fn adopt(context: RawHandle) -> Result<Context, CudaError> {
        if context.is_null() {
            return Err(CudaError::NoCurrentContext);
        }
        ContextInner::share(Driver::get()?, Handle(context), Owner::Foreign)
    }

    /// The `CUcontext`.
    pub fn as_raw(&self) -> RawHandle {
        self.0.raw.0
    }
}

impl ContextInner {
    /// The one object for a context, made if there is none.
    fn share(driver: &'static Driver, raw: Handle, owner: Owner) -> Result<Context, CudaError> {
        let mut new = ContextInner {
            driver,
            raw,
            id: 0,
            owner,
            pool: SegQueue::new(),
            orders: Mutex::default(),
            words: Mutex::default(),
            idle: Mutex::default(),
            device: OnceLock::new(),
        };
        // SAFETY: a context that the caller vouches for, an out pointer. A failure drops `new`, which releases what the
        // caller retained.
        check("cuCtxGetId", number(raw.0), unsafe { (driver.context_id)(raw.0, &mut new.id) })?;
        let new = Arc::new(new);
        let mut all = lock(&CONTEXTS);
        let known = all.iter().find_map(|(id, whose, it)| (*id == new.id && *whose == owner).then(|| it.upgrade())?);
        if let Some(known) = known {
            drop(all); // before `new`, whose end calls the driver
            return Ok(Context(known));
        }
        all.retain(|(.., other)| other.strong_count() > 0);
        all.push((new.id, owner, Arc::downgrade(&new)));
        Ok(Context(new))
    }

    /// Makes the context current here until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Current, CudaError> {
        Current::enter(self.driver, self.raw)
    }

    pub(super) fn as_raw(&self) -> RawHandle {
        self.raw.0
    }

    /// What the context's device can do.
    pub(super) fn device(&self) -> Result<&Device, CudaError> {
        if let Some(known) = self.device.get() {
            return Ok(known);
        }
        let _current = self.enter()?;
        let found = Device::of_current(self.driver)?;
        Ok(self.device.get_or_init(|| found))
    }

    /// A stream that never has work, to ask about the context. The context is current.
    pub(super) fn idle_stream(&self) -> Result<RawHandle, CudaError> {
        const NON_BLOCKING: u32 = 1;
        let mut idle = lock(&self.idle);
        if let Some(known) = *idle {
            return Ok(known.0);
        }
        // No source says whether making a stream would spoil another thread's capture.
        let _relaxed = Relaxed::enter(self.driver)?;
        let mut raw = ptr::null_mut();
        // SAFETY: an out pointer.
        check("cuStreamCreate", NON_BLOCKING.into(), unsafe { (self.driver.stream_create)(&mut raw, NON_BLOCKING) })?;
        *idle = Some(Handle(raw));
        Ok(raw)
    }

    /// The order of records on the stream with this id.
    pub(super) fn order(&self, stream: u64) -> Arc<Order> {
        let mut orders = lock(&self.orders);
        if let Some(known) = orders.get(&stream).and_then(Weak::upgrade) {
            return known;
        }
        let new = Arc::new(Order { key: unique_key(), recorded: Mutex::new(0) });
        orders.retain(|_, other| other.strong_count() > 0);
        orders.insert(stream, Arc::downgrade(&new));
        new
    }
}

/// A number for a group of fences that signal in order.
pub(super) fn unique_key() -> u64 {
    static KEYS: AtomicU64 = AtomicU64::new(0);
    KEYS.fetch_add(1, Ordering::Relaxed)
}

impl Drop for ContextInner {
    fn drop(&mut self) {
        let rest = Rest {
            driver: self.driver,
            raw: self.raw,
            owner: self.owner,
            events: std::mem::take(&mut self.pool),
            words: std::mem::take(&mut *lock(&self.words)),
            idle: lock(&self.idle).take(),
        };
        if IS_POLLER.get() {
            // Releasing a context may wait for its streams, and a poller waits for nothing. If there can be no thread,
            // the context stays: better than a ring that stands still.
            let _ = crate::thread::spawn("moonring-cuda", move || rest.end());
        } else {
            rest.end();
        }
    }
}

/// What is left to give back when nobody uses a context any more.
struct Rest {
    driver: &'static Driver,
    raw: Handle,
    owner: Owner,
    events: SegQueue<RawEvent>,
    words: Words,
    idle: Option<Handle>,
}

impl Rest {
    fn end(mut self) {
        // Freeing would spoil another thread's capture.
        let _relaxed = Relaxed::enter(self.driver);
        if let Ok(_current) = Current::enter(self.driver, self.raw) {
            if let Some(idle) = self.idle {
                // SAFETY: made by `idle_stream`, and nobody else knew it.
                unsafe { (self.driver.stream_destroy)(idle.0) };
            }
            self.words.free(self.driver);
            for event in self.events {
                // SAFETY: nobody else has the event: it was in the pool. A driver that is going down refuses, and then
                // has taken the event with it.
                unsafe { (self.driver.event_destroy)(event.0.0) };
            }
        }
        if let Owner::Primary(device) = self.owner {
            // SAFETY: retained once by `Context::primary`.
            unsafe { (self.driver.primary_release)(device) };
        }
    }
}

thread_local! {
    /// This thread asks events and has left the global capture mode.
    static IS_POLLER: Cell<bool> = const { Cell::new(false) };
}

/// A test's thread that has asked events is the test's again: contexts that it lets go of end at once.
#[cfg(all(test, feature = "mooncake"))]
pub(crate) fn stop_polling() {
    IS_POLLER.set(false);
}

/// Takes this thread out of the mode in which its queries would disturb another thread's capture; once.
pub(super) fn become_poller(driver: &Driver) -> Result<(), CudaError> {
    if !IS_POLLER.get() {
        exchange_mode(driver, RELAXED)?;
        IS_POLLER.set(true);
    }
    Ok(())
}

/// True if this thread waits for nothing.
pub(super) fn is_poller() -> bool {
    IS_POLLER.get()
}

const RELAXED: u32 = 2;

/// Sets this thread's capture mode; the one before.
fn exchange_mode(driver: &Driver, to: u32) -> Result<u32, CudaError> {
    let mut mode = to;
    // SAFETY: an in-out pointer.
    let code = unsafe { (driver.exchange_capture_mode)(&mut mode) };
    check("cuThreadExchangeStreamCaptureMode", to.into(), code)?;
    Ok(mode)
}

/// For a caller's thread: while this lives, its calls disturb no other thread's capture, and its own captures stay what
/// they are.
#[derive(Debug)]
pub(super) struct Relaxed {
    driver: &'static Driver,
    before: u32,
    /// Modes are a thread's.
    _thread: PhantomData<*const ()>,
}

impl Relaxed {
    pub(super) fn enter(driver: &'static Driver) -> Result<Relaxed, CudaError> {
        Ok(Relaxed { driver, before: exchange_mode(driver, RELAXED)?, _thread: PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        let _ = exchange_mode(self.driver, self.before);
    }
}

/// A context is current on this thread; dropping it restores the one before.
#[derive(Debug)]
pub(super) struct Current {
    driver: &'static Driver,
    pushed: bool,
    /// Contexts are current on a thread.
    _thread: PhantomData<*const ()>,
}

impl Current {
    fn enter(driver: &'static Driver, context: Handle) -> Result<Current, CudaError> {
        let mut now = ptr::null_mut();
        // SAFETY: an out pointer.
        check("cuCtxGetCurrent", 0, unsafe { (driver.context_current)(&mut now) })?;
        let pushed = Handle(now) != context;
        if pushed {
            // SAFETY: the context is retained, or its owner's word stands for it.
            check("cuCtxPushCurrent", number(context.0), unsafe { (driver.context_push)(context.0) })?;
        }
        Ok(Current { driver, pushed, _thread: PhantomData })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: an out pointer; `enter` pushed the context on this thread.
            unsafe { (self.driver.context_pop)(&mut popped) };
        }
    }
}

/// The guarded data are whole between any two statements, so a panic elsewhere has not hurt them.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
