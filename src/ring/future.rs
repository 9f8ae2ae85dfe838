//! Futures of single entries: their completions go to whoever pushed them, not into the ring's queue.
//!
//! A [`Route`] stands between the core, which stores an entry's completions there, and its [`EntryFuture`]. One word says
//! what is there, and who is to let go of the buffer: the future, or, if that is dropped first, the core.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::ptr;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::core::{Control, Controls};
use crate::cqe::{Cqe, CqeFlags, EntryError};
use crate::fence::{Fence, FenceInner};
use crate::keep;
use crate::sync::{self, AtomicBool, AtomicU8, AtomicU64, AtomicWaker, Ordering, UnsafeCell};
use crate::transport::Token;

/// The result is stored.
pub(crate) const RESULT: u8 = 1;
/// Nothing more comes: the local range is quiet, or never will be.
pub(crate) const LAST: u8 = 1 << 1;
/// The future is gone and has left its buffer.
const LEFT: u8 = 1 << 2;

/// Where an entry's completions go instead of the queue.
pub(crate) struct Route {
    /// [`RESULT`], [`LAST`], [`LEFT`]. Whoever of the core and the future sets the second of the last two has the buffer.
    state: AtomicU8,
    /// Written before `RESULT` is set, and not after.
    result: UnsafeCell<Cqe>,
    /// The second completion, if the first had `MORE`. Written before `LAST` is set.
    notif: UnsafeCell<Option<Cqe>>,
    /// Written before `LEFT` is set.
    buffer: UnsafeCell<Option<*mut dyn Send>>,
    waker: AtomicWaker,
    /// The core's own: the entry's token, 0 until it is taken.
    token: AtomicU64,
    /// The core's own: nobody wanted the entry before it was taken.
    unwanted: AtomicBool,
}

// SAFETY: the cells are written by one side each, before the bit in `state` that lets the other read them; the buffer, which
// is Send, is touched by the one whose bit comes second.
unsafe impl Sync for Route {}
// SAFETY: as above.
unsafe impl Send for Route {}

impl Route {
    pub(crate) fn new() -> Route {
        Route {
            state: AtomicU8::new(0),
            result: UnsafeCell::new(Cqe::new(0, 0, 0, 0, 0, 0)),
            notif: UnsafeCell::new(None),
            buffer: UnsafeCell::new(None),
            waker: AtomicWaker::new(),
            token: AtomicU64::new(0),
            unwanted: AtomicBool::new(false),
        }
    }

    /// The core took the entry; true if nobody wants it any more.
    pub(crate) fn take(&self, token: Token) -> bool {
        self.token.store(token.0, Ordering::Relaxed);
        self.unwanted.load(Ordering::Relaxed)
    }

    /// Nobody wants the entry: the core's token for it, or `None` if it is still to be taken. For the core alone.
    pub(crate) fn disown(&self) -> Option<Token> {
        self.unwanted.store(true, Ordering::Relaxed);
        let token = self.token.load(Ordering::Relaxed);
        (token != 0).then_some(Token(token))
    }

    /// The entry has a completion. Called by whoever has the entry, one after the other. Runs what its user has left: a waker,
    /// and the buffer's drop. Neither's panic goes further.
    pub(crate) fn complete(&self, cqe: Cqe) {
        let before = self.state.load(Ordering::Relaxed);
        if before & LAST != 0 {
            return;
        }
        // SAFETY: the future reads `result` after RESULT is set, and `notif` after LAST is.
        unsafe {
            if before & RESULT == 0 { sync::write(&self.result, cqe) } else { sync::write(&self.notif, Some(cqe)) }
        }
        let last = !cqe.flags().contains(CqeFlags::MORE);
        // Release: the completion, and what was done before, go to who sees the bits. Acquire: the buffer comes with `LEFT`.
        let before = self.state.fetch_or(if last { RESULT | LAST } else { RESULT }, Ordering::AcqRel);
        let buffer = if last && before & LEFT != 0 { self.take_buffer(cqe) } else { None };
        let waker = self.waker.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(buffer)));
        let _ = catch_unwind(AssertUnwindSafe(|| waker.map(Waker::wake)));
    }

    /// The buffer that the future has left, to be let go of; `None` if the transport may touch it for ever.
    fn take_buffer(&self, last: Cqe) -> Option<Box<dyn Send>> {
        // SAFETY: LEFT and LAST are set, and we set the second of them: nobody else has the buffer.
        let buffer = unsafe { sync::read(&self.buffer) }?;
        // SAFETY: it came from `Box::into_raw`, and with both bits set nobody asks for it again.
        let buffer = unsafe { Box::from_raw(buffer) };
        if last.flags().contains(CqeFlags::UNQUIET) {
            keep::for_ever(buffer);
            return None;
        }
        Some(buffer)
    }

    /// The future goes and leaves its buffer; true if the core will let go of it.
    pub(crate) fn leave(&self, buffer: Box<dyn Send>) -> bool {
        // Nobody is to be woken any more. One that comes in between is woken for nothing.
        drop(self.waker.take());
        // SAFETY: the core reads it after LEFT is set.
        unsafe { sync::write(&self.buffer, Some(Box::into_raw(buffer))) };
        if self.state.fetch_or(LEFT, Ordering::AcqRel) & LAST == 0 {
            return true;
        }
        drop(self.take_buffer(self.notif().unwrap_or_else(|| self.result())));
        false
    }

    pub(crate) fn has(&self, bit: u8) -> bool {
        self.state.load(Ordering::Acquire) & bit != 0
    }

    /// Pending until `bit` is set; `waker` is told then.
    pub(crate) fn poll(&self, bit: u8, waker: &Waker) -> Poll<()> {
        if !self.has(bit) {
            self.waker.register(waker);
            // Again: who sets it now finds the waker.
            if !self.has(bit) {
                return Poll::Pending;
            }
        }
        Poll::Ready(())
    }

    /// The result; RESULT is set.
    pub(crate) fn result(&self) -> Cqe {
        // SAFETY: RESULT is set, so it is not written any more.
        unsafe { sync::read(&self.result) }
    }

    /// The second completion; LAST is set.
    pub(crate) fn notif(&self) -> Option<Cqe> {
        // SAFETY: LAST is set, so it is not written any more.
        unsafe { sync::read(&self.notif) }
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route").field("state", &self.state.load(Ordering::Relaxed)).finish_non_exhaustive()
    }
}

/// The end of one entry, as a future: made by [`push_future`](crate::SubmissionQueue::push_future). Its completions are not
/// in the ring's completion queue.
///
/// It is ready when nothing touches the entry's local range any more, and gives back the buffer that it [keeps](Self::keep),
/// with the [result](Ended). [`result`](Self::result) is ready as soon as the result is known, which is earlier for an
/// entry whose result comes with [`MORE`](CqeFlags::MORE): past its `transfer_limit`, or cancelled with `detach`.
///
/// The entry must have been submitted. It ends by itself: polling moves nothing, so any executor will do, and it may be sent
/// to another. A ring that is closed, or whose poller has died, ends it like all of its entries, with an error.
///
/// # Dropping it
/// asks the poller to [`cancel`](Self::cancel) the entry. If that is not issued when the poller hears of it, it never is, and
/// its unit of the ring's capacity comes back; in a chain it fails its followers. A transfer that was issued cannot be taken
/// back: it goes on, and keeps its unit. The buffer is dropped when nothing touches it any more, by the poller's thread, so
/// its `drop` should be short, and must not close a ring. [`detach`](Self::detach) lets the entry run all the same.
/// Forgetting the future (`mem::forget`) leaks the buffer.
///
/// ```
/// # use std::future::Future;
/// # use std::time::Duration;
/// # use moonring::{Engine, Region, Ring, opcode};
/// # #[derive(Debug)] struct Page(usize);
/// # fn block_on<F: Future>(future: F) -> F::Output {
/// #     let mut future = std::pin::pin!(future);
/// #     let mut context = std::task::Context::from_waker(std::task::Waker::noop());
/// #     loop {
/// #         if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut context) { return output }
/// #     }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # block_on(async {
/// # let engine = Engine::loopback();
/// # let pool = engine.register(Region::alloc(1 << 20)?)?;
/// # let peer = engine.open_segment(engine.name(), Duration::from_secs(1))?;
/// let mut ring = Ring::builder().build(64, &engine)?;
/// let page = Page(3); // from a pool, to which its drop returns it
/// let local = pool.slice(page.0 * 4096..(page.0 + 1) * 4096)?;
/// let load = opcode::Read::new(local, peer.slice(&pool.info(), 0, 4096)?).build();
/// let future = ring.submission().push_future(load)?.keep(page);
/// ring.submit()?;
/// let ended = future.await;
/// assert_eq!(ended.result()?, 4096);
/// let page = ended.buffer.expect("only a torn down ring keeps it");
/// # assert_eq!(page.0, 3);
/// # Ok(())
/// # })
/// # }
/// ```
#[must_use = "dropping the future cancels its entry, unless that was issued"]
pub struct EntryFuture<T: Send + 'static = ()> {
    /// Until it was ready.
    entry: Option<Handle>,
    buffer: Option<T>,
}

/// An entry on its way.
struct Handle {
    /// Of the kind that has a route.
    fence: Arc<FenceInner>,
    controls: Arc<Controls>,
    ring: u32,
}

impl Handle {
    fn route(&self) -> &Route {
        self.fence.route().expect("made with a route")
    }

    fn cancel(&self) {
        self.controls.send(Control::Disown { ring: self.ring, entry: Arc::clone(&self.fence) });
    }
}

/// What became of an entry with a future.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Ended<T> {
    /// Its result.
    pub completion: Cqe,
    /// The second completion, if the result came with [`MORE`](CqeFlags::MORE).
    pub notif: Option<Cqe>,
    /// What the future has kept. `None` if the last completion says [`UNQUIET`](CqeFlags::UNQUIET): it may be touched for ever,
    /// and is never dropped.
    pub buffer: Option<T>,
}

impl<T> Ended<T> {
    /// Bytes moved, or what went wrong.
    ///
    /// # Errors
    /// [`EntryError`] if the entry failed.
    pub fn result(&self) -> Result<u32, EntryError> {
        self.completion.result()
    }
}

impl EntryFuture {
    pub(super) fn new(fence: Arc<FenceInner>, controls: Arc<Controls>, ring: u32) -> EntryFuture {
        EntryFuture { entry: Some(Handle { fence, controls, ring }), buffer: Some(()) }
    }

    /// Owns `buffer` from now on, and gives it back when nothing touches the entry's local range any more: whatever stands for
    /// that range, such as a page that its pool must not give to somebody else meanwhile.
    ///
    /// It is about whose turn it is, not about memory: moonring's own regions stay mapped, and cannot be unregistered while the
    /// entry uses them, with or without it. A `buffer` with a handle on the engine counts as a user of the engine.
    pub fn keep<T: Send + 'static>(mut self, buffer: T) -> EntryFuture<T> {
        EntryFuture { entry: self.entry.take(), buffer: Some(buffer) }
    }
}

impl<T: Send + 'static> EntryFuture<T> {
    /// The result, as soon as it is known: with [`MORE`](CqeFlags::MORE) if the transport may still touch the local range.
    /// Await the future itself for the buffer. Dropping what this returns loses nothing.
    ///
    /// # Panics
    /// If the future itself was ready before.
    pub async fn result(&mut self) -> Cqe {
        let route = self.entry().route();
        poll_fn(|context| route.poll(RESULT, context.waker())).await;
        route.result()
    }

    /// Asks the poller to cancel the entry, as a [`Cancel`](crate::opcode::Cancel) does without `detach`: what was not issued
    /// ends with `-ECANCELED`, at once, or when its turn in its chain has come; what was issued completes normally. Never
    /// blocks, and works on a full ring. The future is ready as ever.
    pub fn cancel(&self) {
        if let Some(entry) = &self.entry {
            entry.cancel();
        }
    }

    /// A fence on the entry's end, as [`push_fenced`](crate::SubmissionQueue::push_fenced) gives one. Dropping the future
    /// cancels the entry all the same, and the fence fails then.
    ///
    /// # Panics
    /// If the future was ready before.
    pub fn fence(&self) -> Fence {
        Fence(Arc::clone(&self.entry().fence))
    }

    /// Lets the entry run, and nobody hear of it. The buffer is dropped by the poller's thread when it is quiet.
    pub fn detach(mut self) {
        self.leave();
    }

    fn entry(&self) -> &Handle {
        self.entry.as_ref().expect("a future that was ready is not asked again")
    }

    /// Leaves the buffer to the core; the entry that is still running, if it is.
    fn leave(&mut self) -> Option<Handle> {
        let entry = self.entry.take()?;
        let buffer: Box<dyn Send> = Box::new(self.buffer.take());
        entry.route().leave(buffer).then_some(entry)
    }
}

impl<T: Send + 'static> Future for EntryFuture<T> {
    type Output = Ended<T>;

    /// # Panics
    /// If it was ready before.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Ended<T>> {
        let this = self.get_mut();
        let route = this.entry().route();
        if route.poll(LAST, context.waker()).is_pending() {
            return Poll::Pending;
        }
        let (completion, notif) = (route.result(), route.notif());
        let mut buffer = this.buffer.take();
        if notif.unwrap_or(completion).flags().contains(CqeFlags::UNQUIET) {
            keep::for_ever(buffer.take());
        }
        this.entry = None;
        Poll::Ready(Ended { completion, notif, buffer })
    }
}

/// The buffer is not pinned: it is given back by value.
impl<T: Send + 'static> Unpin for EntryFuture<T> {}

impl<T: Send + 'static> Drop for EntryFuture<T> {
    fn drop(&mut self) {
        if let Some(entry) = self.leave() {
            entry.cancel();
        }
    }
}

impl<T: Send + 'static> fmt::Debug for EntryFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fence = self.entry.as_ref().map(|entry| ptr::from_ref(&*entry.fence));
        f.debug_struct("EntryFuture").field("entry", &fence).finish_non_exhaustive()
    }
}
