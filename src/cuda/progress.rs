//! Timelines that entries move and streams wait for.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::RawHandle;
use super::context::{Context, ContextInner, become_poller, is_poller, lock};
use super::device::Release;
use super::driver::{Driver, MemoryOperation, SUCCESS, check, number};
use super::error::CudaError;
use super::event::code_of;
use super::graph::Node;
use super::stream::Stream;
use super::word::Word;
use crate::code::errno;
use crate::fence::{self, Failure, Fence, Kind, Mirror, TimelineCell};

/// A timeline that entries move, as [`fence::Progress`], and that streams wait for: kernels and copies are queued behind
/// loads before those have ended, and no host thread has to launch them.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use moonring::cuda::{Context, Stream};
/// use moonring::fence::FenceStatus;
/// use moonring::{Engine, Ring, opcode};
///
/// let context = Context::primary(0)?;
/// let stream = Stream::new(&context)?;
/// let mut ring = Ring::builder().build(256, &Engine::loopback())?;
/// let loads = context.progress(64)?;
/// # let load = opcode::Nop::new().build();
/// let value = ring.submission().push_signalling(load, loads.entries())?;
/// ring.submit()?;
/// let loaded = loads.hold(&stream, value, Duration::from_secs(5))?;
/// // ... queue on stream.as_raw() the kernels that read what is loaded ...
/// // ... synchronise with them in whatever way; by then the fence is final ...
/// if loaded.status() != FenceStatus::Signalled {
///     // the kernels have run all the same: throw their results away
/// }
/// # Ok(())
/// # }
/// ```
///
/// The word that the streams wait for is in pinned memory, and the poller moves it with a store; where the device needs a
/// flush before (see [`release`](Self::release)), a helper thread makes it and moves the word then. No stream waits for
/// longer than its limit.
///
/// Keep holds few and short. A stream that waits holds up what CUDA makes wait for it: freeing memory, destroying the
/// context, the first launch of a kernel whose module is loaded lazily, and everybody behind that (set
/// `CUDA_MODULE_LOADING=EAGER`). If you can, launch after the completion instead. `docs/gpu.md` in the repository has the
/// whole story.
///
/// Clone it freely; any thread may use it. Keep one for as long as a stream waits: when the last clone is dropped, the streams
/// that still wait go on at once, and their fences fail with `EOWNERDEAD`. The entries go on.
#[derive(Clone, Debug)]
pub struct Progress(Arc<Owner>);

/// The clones' share.
#[derive(Debug)]
struct Owner(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<ContextInner>,
    entries: fence::Progress,
    way: Result<(Release, Arc<Gate>), CudaError>,
}

/// What streams wait for.
#[derive(Debug)]
struct Gate {
    context: Arc<ContextInner>,
    word: Word,
    /// The word's value at 0 of the timeline.
    base: u64,
    /// The entries' timeline.
    entries: OnceLock<Weak<TimelineCell>>,
    /// Where a flush is needed before the word moves.
    flush: Option<Flush>,
}

/// A helper thread flushes what the device has not shown yet.
#[derive(Debug)]
struct Flush {
    /// How far the entries have come.
    target: AtomicU64,
    /// The last user is gone.
    ended: AtomicBool,
    /// How far the word has: with a failure, as the entries' has one, or of a flush. Moved under `moving`.
    landed: Arc<TimelineCell>,
    moving: Mutex<()>,
    helper: Mutex<Option<JoinHandle<()>>>,
}

impl Context {
    /// A timeline at 0 that entries move and streams of this context wait for. Up to `window` values, at least one, may be
    /// reserved and not yet in its completed prefix, as for [`fence::progress`]. Takes a word of pinned memory from the
    /// context's pool, which may allocate a page; starts a thread where the device needs flushes.
    ///
    /// # Errors
    /// What the driver says. That streams cannot wait for loads on this device is no error here, but
    /// [`release`](Progress::release) and [`hold`](Progress::hold) give the reason.
    pub fn progress(&self, window: u32) -> Result<Progress, CudaError> {
        let context = &self.0;
        let release = match context.device()?.release() {
            Ok(release) => release,
            Err(why) => {
                let entries = fence::progress(window);
                return Ok(Progress::of(Inner { context: Arc::clone(context), entries, way: Err(why) }));
            }
        };
        let word = Word::take(context)?;
        let flush = (release == Release::Flushed).then(|| Flush {
            target: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            landed: fence::landed(),
            moving: Mutex::default(),
            helper: Mutex::default(),
        });
        let (context, base, entries) = (Arc::clone(context), word.value(), OnceLock::new());
        let gate = Arc::new(Gate { context: Arc::clone(&context), word, base, entries, flush });
        let entries = fence::mirrored(window, Some(Arc::clone(&gate) as Arc<dyn Mirror>));
        let _ = gate.entries.set(Arc::downgrade(&entries.cell));
        if let Some(flush) = &gate.flush {
            let own = Arc::clone(&gate);
            let helper = crate::thread::spawn("moonring-flush", move || own.help());
            *lock(&flush.helper) = Some(helper.map_err(|error| CudaError::Thread { why: error.to_string() })?);
        }
        Ok(Progress::of(Inner { context, entries, way: Ok((release, gate)) }))
    }
}

impl Progress {
    fn of(inner: Inner) -> Progress {
        Progress(Arc::new(Owner(Arc::new(inner))))
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.0.0
    }

    /// What entries are pushed with: [`push_signalling`](crate::SubmissionQueue::push_signalling) reserves its next value.
    ///
    /// Its fences tell of the entries. Where flushes are needed, those that [`hold`](Self::hold) gives are final later.
    pub fn entries(&self) -> &fence::Progress {
        &self.inner().entries
    }

    /// How a stream that waits is released, or why none may wait for loads on this device.
    ///
    /// # Errors
    /// [`CudaError::NoMemoryOperations`], [`CudaError::NoWriteOrder`] or [`CudaError::SeveralPaths`].
    pub fn release(&self) -> Result<Release, CudaError> {
        self.inner().way.as_ref().map(|(release, _)| *release).map_err(Clone::clone)
    }

    /// Lets the stream wait until every entry up to `value` has ended: what is queued on it from now on runs after that.
    /// A few driver calls; never waits for the GPU or for an entry.
    ///
    /// The fence is final before the stream goes on. It signals if all of them have succeeded and the device sees what
    /// they have loaded. It fails if one has not, with the root cause as any fence of a [`fence::Progress`]; if a flush
    /// failed, with `-EIO` in the place of the errno and the driver's number in `detail`; and if `limit` has passed, with
    /// `ETIME`: then those that had not ended are ended with `-ETIME`, see [`code`](crate::code), and the stream goes on.
    /// **The stream goes on in every case**, so look at the fence before using what ran behind it. After `-ETIME` with
    /// `MORE` the transport may still write to the local range while the kernels run.
    ///
    /// `limit` counts from now, whether the entries are submitted or not; more than a day is taken as a day.
    ///
    /// # Errors
    /// The reasons of [`release`](Self::release); [`CudaError::NotSignalled`] if no push has reserved the value;
    /// [`CudaError::BlockingStream`] and [`CudaError::OtherContext`] if it is the wrong stream, [`CudaError::Capturing`]
    /// while it is being captured: use [`capture_hold`](Self::capture_hold); or what the driver says. The stream does not
    /// wait then.
    pub fn hold(&self, stream: &Stream, value: u64, limit: Duration) -> Result<Fence, CudaError> {
        let gate = self.gate_for(stream)?;
        let _current = stream.enter()?;
        refuse_blocking(stream)?;
        stream.refuse_capture()?;
        self.wait_with(gate, value, limit, || {
            let driver = self.inner().context.driver;
            let (address, value) = (gate.word.device_address(), gate.base + value);
            // SAFETY: a live stream; the word's memory lives as long as the context.
            let code = unsafe { (driver.wait_value)(stream.as_raw(), address, value, 0) };
            check("cuStreamWaitValue64", number(stream.as_raw()), code)
        })
    }

    /// Captures a wait: the stream is being captured into a graph, and each launch of that graph is to wait for a value
    /// where this is called. [`GraphHold::next`] chooses the value before each launch.
    ///
    /// # Safety
    /// The graph and what is made of it are not launched after the [`GraphHold`] is gone. A launch without a
    /// [`next`](GraphHold::next) before it waits for what the one before waited for, the first for nothing.
    ///
    /// # Errors
    /// As for [`hold`](Self::hold), and [`CudaError::NotCapturing`] if the stream is not being captured.
    pub unsafe fn capture_hold(&self, stream: &Stream) -> Result<GraphHold, CudaError> {
        let gate = self.gate_for(stream)?;
        let _current = stream.enter()?;
        let node = Node::capture(stream, MemoryOperation::WAIT, gate.word.device_address(), gate.base)?;
        Ok(GraphHold { progress: self.clone(), node })
    }

    /// The same for a graph that is built by hand: adds a node behind `after`, any number of nodes of `graph`.
    ///
    /// # Safety
    /// As for [`capture_hold`](Self::capture_hold); `graph` is a valid `CUgraph` and `after` are nodes of it. It is launched
    /// on streams of this context that are not joined with its legacy default stream.
    ///
    /// # Errors
    /// As for [`capture_hold`](Self::capture_hold).
    pub unsafe fn add_hold(&self, graph: RawHandle, after: &[RawHandle]) -> Result<GraphHold, CudaError> {
        let gate = self.gate()?;
        let address = gate.word.device_address();
        // SAFETY: the caller's promise.
        let node =
            unsafe { Node::add(&self.inner().context, graph, after, MemoryOperation::WAIT, address, gate.base) }?;
        Ok(GraphHold { progress: self.clone(), node })
    }

    fn gate(&self) -> Result<&Arc<Gate>, CudaError> {
        self.inner().way.as_ref().map(|(_, gate)| gate).map_err(Clone::clone)
    }

    fn gate_for(&self, stream: &Stream) -> Result<&Arc<Gate>, CudaError> {
        let gate = self.gate()?;
        if stream.context().0.as_raw() != self.inner().context.as_raw() {
            return Err(CudaError::OtherContext { stream: number(stream.as_raw()) });
        }
        Ok(gate)
    }

    /// Makes sure that the wait which `call` queues will end, and gives the fence on it.
    fn wait_with(
        &self,
        gate: &Gate,
        value: u64,
        limit: Duration,
        call: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Fence, CudaError> {
        let last = self.inner().entries.reserved();
        if value > last {
            return Err(CudaError::NotSignalled { last, asked: value });
        }
        Limits::start(self.inner().context.driver)?;
        call()?;
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Limits::add(Limited { progress: Arc::clone(self.inner()), value, end: Instant::now() + limit.min(DAY) });
        Ok(Fence::new(Kind::Point { timeline: Arc::clone(gate.landed(&self.inner().entries)), value }))
    }
}

fn refuse_blocking(stream: &Stream) -> Result<(), CudaError> {
    const NON_BLOCKING: u32 = 1;
    let mut flags = 0;
    // SAFETY: a live stream, an out pointer.
    let code = unsafe { (stream.context().0.driver.stream_flags)(stream.as_raw(), &mut flags) };
    check("cuStreamGetFlags", number(stream.as_raw()), code)?;
    if flags & NON_BLOCKING == 0 { Err(CudaError::BlockingStream { stream: number(stream.as_raw()) }) } else { Ok(()) }
}

/// A wait in a CUDA graph. Each launch waits for the value that was chosen before it, so a launch never passes on an
/// earlier one's loads.
#[derive(Debug)]
pub struct GraphHold {
    progress: Progress,
    node: Node,
}

impl GraphHold {
    /// Lets the next launch of `exec` wait until every entry up to `value` has ended, as [`Progress::hold`] does with a
    /// stream; `limit` counts from now.
    ///
    /// # Safety
    /// `exec` is a valid `CUgraphExec` made of the graph, and the graph has not been destroyed.
    ///
    /// # Errors
    /// [`CudaError::NotSignalled`] if no push has reserved the value, or what the driver says. `exec` then waits for what it
    /// waited for before: do not launch it.
    pub unsafe fn next(&mut self, exec: RawHandle, value: u64, limit: Duration) -> Result<Fence, CudaError> {
        let gate = self.progress.gate()?;
        // SAFETY: the caller's promise.
        self.progress.wait_with(gate, value, limit, || unsafe { self.node.set(exec, gate.base + value) })
    }

    /// The `CUgraphNode`, to put others behind it.
    pub fn node(&self) -> RawHandle {
        self.node.as_raw()
    }
}

impl Inner {
    /// A stream has waited as long as it was to: what has not ended fails, and is ended, then the stream goes on. No driver
    /// call.
    fn expire(&self, value: u64) {
        self.entries.cell.expire(value, errno::ETIME);
        self.release(value, errno::ETIME);
    }

    /// Nobody is left to wait for: streams that do go on.
    fn abandon(&self, value: u64) {
        self.entries.cell.abandon(value, errno::EOWNERDEAD);
        self.release(value, errno::EOWNERDEAD);
    }

    /// Where the word does not follow the entries at once.
    fn release(&self, value: u64, errno: i32) {
        if let Ok((_, gate)) = &self.way
            && let Some(flush) = &gate.flush
        {
            // Not after the flush: that may be what hangs.
            gate.land(flush, value, Some(Failure::dependency(errno)));
        }
    }

    /// True if nobody waits for the value any more.
    fn has_passed(&self, value: u64) -> bool {
        match &self.way {
            Ok((_, gate)) => gate.landed(&self.entries).value() >= value,
            Err(_) => true,
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let waited = Limits::forget(&self.0);
        if let Some(value) = waited.into_iter().filter(|&value| !self.0.has_passed(value)).max() {
            self.0.abandon(value);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Ok((_, gate)) = &self.way else { return };
        let Some(flush) = &gate.flush else { return };
        flush.ended.store(true, Ordering::Release);
        if let Some(helper) = lock(&flush.helper).take() {
            helper.thread().unpark();
            // It uses the context until it ends, after one flush at most. Who must wait for nothing leaves it to itself.
            if !is_poller() {
                let _ = helper.join();
            }
        }
    }
}

impl Gate {
    /// The timeline that moves with the word.
    fn landed<'a>(&'a self, entries: &'a fence::Progress) -> &'a Arc<TimelineCell> {
        self.flush.as_ref().map_or(&entries.cell, |flush| &flush.landed)
    }

    /// Moves the word, and before it what tells of it: the entries' failure, or `own` for what the word had not reached.
    fn land(&self, flush: &Flush, to: u64, own: Option<Failure>) {
        let _one = lock(&flush.moving);
        let next = flush.landed.value() + 1;
        let entries = self.entries.get().and_then(Weak::upgrade).and_then(|cell| cell.failure());
        let failure = match (entries.filter(|&(from, _)| from <= to), own) {
            (Some((from, why)), None) => Some((from, why)),
            (Some((from, why)), Some(_)) if from <= next => Some((from, why)),
            (_, Some(own)) => Some((next, own)),
            (None, None) => None,
        };
        flush.landed.move_to(to, failure);
        self.word.raise(self.base + to);
    }

    /// The helper thread: flushes, then lets the word follow the entries.
    fn help(&self) {
        let Some(flush) = &self.flush else { return };
        let mut landed = 0;
        while !flush.ended.load(Ordering::Acquire) {
            let target = flush.target.load(Ordering::Acquire);
            if target == landed {
                thread::park();
                continue;
            }
            const CURRENT_CONTEXT: u32 = 0;
            const TO_OWNER: u32 = 100;
            let code = code_of(&self.context, || {
                // SAFETY: takes numbers.
                Ok(unsafe { (self.context.driver.flush_writes)(CURRENT_CONTEXT, TO_OWNER) })
            });
            let failure = (code != SUCCESS).then_some(Failure { errno: errno::EIO, detail: code as i32 });
            self.land(flush, target, failure);
            landed = target;
        }
    }
}

impl Mirror for Gate {
    fn moved(&self, value: u64) {
        match &self.flush {
            None => self.word.raise(self.base + value),
            Some(flush) => {
                flush.target.fetch_max(value, Ordering::AcqRel);
                // Locked otherwise only to be set, and by the end of the last user.
                if let Some(helper) = &*lock(&flush.helper) {
                    helper.thread().unpark();
                }
            }
        }
    }
}

/// A stream that waits, at most until then.
#[derive(Debug)]
struct Limited {
    progress: Arc<Inner>,
    value: u64,
    end: Instant,
}

/// Every stream that waits in this process, and the thread that sees to it that none does for too long. A thread of its
/// own: pollers and flushes may be what does not come on.
#[derive(Debug)]
struct Limits {
    all: Mutex<Watched>,
    news: Condvar,
}

#[derive(Debug)]
struct Watched {
    running: bool,
    waits: Vec<Limited>,
}

static LIMITS: Limits = Limits { all: Mutex::new(Watched { running: false, waits: Vec::new() }), news: Condvar::new() };

impl Limits {
    /// Starts the thread, if it does not run.
    fn start(driver: &'static Driver) -> Result<(), CudaError> {
        let mut all = lock(&LIMITS.all);
        if !all.running {
            let spawned = crate::thread::spawn("moonring-limits", || {
                // If it is the last to let go of something, others wait for its end.
                let _ = become_poller(driver);
                Limits::run();
            });
            spawned.map_err(|error| CudaError::Thread { why: error.to_string() })?;
            all.running = true;
        }
        Ok(())
    }

    fn add(wait: Limited) {
        let mut all = lock(&LIMITS.all);
        let passed: Vec<Limited> = all.waits.extract_if(.., |wait| wait.progress.has_passed(wait.value)).collect();
        let first = all.waits.iter().map(|wait| wait.end).min();
        let sooner = first.is_none_or(|first| wait.end < first);
        if !wait.progress.has_passed(wait.value) {
            all.waits.push(wait);
        }
        drop(all);
        drop(passed); // whose end may be that of a context
        if sooner {
            LIMITS.news.notify_one();
        }
    }

    /// Takes out everything that waits for `progress`: what for.
    fn forget(progress: &Arc<Inner>) -> Vec<u64> {
        let mut all = lock(&LIMITS.all);
        let own: Vec<Limited> = all.waits.extract_if(.., |wait| Arc::ptr_eq(&wait.progress, progress)).collect();
        own.iter().map(|wait| wait.value).collect()
    }

    fn run() {
        let mut all = lock(&LIMITS.all);
        loop {
            let now = Instant::now();
            let over = |wait: &mut Limited| wait.end <= now || wait.progress.has_passed(wait.value);
            let over: Vec<Limited> = all.waits.extract_if(.., over).collect();
            if !over.is_empty() {
                drop(all);
                for Limited { progress, value, .. } in over {
                    if !progress.has_passed(value) {
                        progress.expire(value);
                    }
                }
                all = lock(&LIMITS.all);
                continue;
            }
            let next = all.waits.iter().map(|wait| wait.end).min();
            all = match next {
                None => LIMITS.news.wait(all).unwrap_or_else(PoisonError::into_inner),
                Some(end) => {
                    let left = end.saturating_duration_since(now);
                    LIMITS.news.wait_timeout(all, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
