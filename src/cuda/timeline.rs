//! Timelines that a stream moves and entries wait for.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::RawHandle;
use super::context::{ContextInner, lock, unique_key};
use super::driver::{MemoryOperation, check, number};
use super::error::CudaError;
use super::event::{code_of, status_of};
use super::graph::Node;
use super::stream::Stream;
use super::word::Word;
use crate::code::errno;
use crate::fence::{Failure, Fence, FenceStatus, Polled};

/// A 64-bit number that the work on one stream moves, and that entries wait for without any driver call.
///
/// [`signal`](Self::signal) queues the next value behind the work that is on the stream; [`at`](Self::at) gives a fence on
/// it, for any number of entries. The number lives in pinned memory: the GPU writes it, and the poller reads it. So where
/// an event costs a driver call each time that it is asked, with locks that the application's launches want, this costs a
/// load. It can be part of a CUDA graph ([`capture_signal`](Self::capture_signal)), which an event cannot.
///
/// A device or a driver that cannot write memory from a stream makes it fall back to events: everything works but graphs,
/// and [`fallback`](Self::fallback) says why.
///
/// Clone it freely; any thread may use it. After a fault of the GPU no value comes any more: the poller asks the driver
/// when nothing has come for half a second or so, and fails the fences, with the driver's number as an event's.
#[derive(Clone, Debug)]
pub struct Timeline(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    stream: Stream,
    way: Way,
}

#[derive(Debug)]
enum Way {
    Word(Arc<Moved>),
    Events { why: CudaError, signalled: Mutex<Signalled> },
}

/// A word, and what is known of its future.
#[derive(Debug)]
struct Moved {
    word: Word,
    context: Arc<ContextInner>,
    /// Of the group that its points are asked in.
    group: u64,
    /// The last value queued. Held over the driver's call, so that values are in the order of the stream.
    queued: Mutex<u64>,
    /// The `CUresult` of a fault; 0 for none.
    fault: AtomicU32,
    /// Looks that found nothing since one that did.
    vain: AtomicU32,
}

/// The fences of the last values, oldest first.
#[derive(Debug, Default)]
struct Signalled {
    last: u64,
    fences: VecDeque<(u64, Fence)>,
}

/// Events that a timeline without a word keeps. For a value before the oldest that one's fence stands: later, never sooner.
const EVENTS_KEPT: usize = 64;
/// How many vain looks at a word in a row there are to one question to the driver. They are at intervals that grow to 5 ms,
/// so the first question comes after more than half a second.
const LOOKS_PER_QUESTION: u32 = 256;
/// A look at a word disturbs nobody.
const LEAST_INTERVAL: u64 = 1_000;

impl Stream {
    /// A new timeline that the work on this stream moves. Takes a word of pinned memory from the context's pool, which may
    /// allocate a page; values go on from what the word shows.
    ///
    /// # Errors
    /// What the driver says. That the device cannot do it is no error: then it [falls back](Timeline::fallback) to events.
    pub fn timeline(&self) -> Result<Timeline, CudaError> {
        let context = &self.context().0;
        let way = match context.device()?.memory_operations() {
            Ok(()) => {
                {
                    // Made now: a poller should not have to.
                    let _current = context.enter()?;
                    context.idle_stream()?;
                }
                let word = Word::take(context)?;
                let queued = Mutex::new(word.value());
                Way::Word(Arc::new(Moved {
                    word,
                    context: Arc::clone(context),
                    group: unique_key(),
                    queued,
                    fault: AtomicU32::new(0),
                    vain: AtomicU32::new(0),
                }))
            }
            Err(why) => Way::Events { why, signalled: Mutex::default() },
        };
        Ok(Timeline(Arc::new(Inner { stream: self.clone(), way })))
    }
}

impl Timeline {
    /// Queues the next value behind the work that is on the stream so far, and returns it. Never waits for the GPU; a few
    /// driver calls. Threads that signal one timeline wait for each other's call.
    ///
    /// # Errors
    /// [`CudaError::Capturing`] while the stream is being captured: use [`capture_signal`](Self::capture_signal).
    /// [`CudaError::OtherThreadsStream`], or what the driver says. No value is taken then.
    pub fn signal(&self) -> Result<u64, CudaError> {
        let Inner { stream, way } = &*self.0;
        match way {
            Way::Word(moved) => moved.queue(|value| {
                let _current = stream.enter()?;
                stream.refuse_capture()?;
                let address = moved.word.device_address();
                // SAFETY: a live stream; the word stays until the value is written, and its memory as long as the context.
                let code = unsafe { (moved.context.driver.write_value)(stream.as_raw(), address, value, 0) };
                check("cuStreamWriteValue64", number(stream.as_raw()), code)
            }),
            Way::Events { signalled, .. } => {
                let mut signalled = lock(signalled);
                let fence = stream.fence()?;
                signalled.last += 1;
                let last = signalled.last;
                signalled.fences.push_back((last, fence));
                if signalled.fences.len() > EVENTS_KEPT {
                    signalled.fences.pop_front();
                }
                Ok(last)
            }
        }
    }

    /// A fence on a value that [`signal`](Self::signal) or [`GraphSignal::next`] has returned, or one before it: signalled
    /// when all the work before it on the stream has run. With one small allocation, so make it once. The poller looks while
    /// an entry waits for it, as for any fence of CUDA.
    ///
    /// # Errors
    /// [`CudaError::NotSignalled`] if no signal has taken the value yet: waits point backwards, so they cannot form a cycle.
    pub fn at(&self, value: u64) -> Result<Fence, CudaError> {
        let last = self.last();
        if value > last {
            return Err(CudaError::NotSignalled { last, asked: value });
        }
        match &self.0.way {
            Way::Word(moved) => Ok(Fence::polled(Box::new(Point { timeline: Arc::clone(moved), value }))),
            Way::Events { signalled, .. } => {
                let signalled = lock(signalled);
                let at = signalled.fences.partition_point(|&(other, _)| other < value);
                match signalled.fences.get(at) {
                    Some((_, fence)) => Ok(fence.clone()),
                    // Before the first signal there is only 0, where it began.
                    None => Ok(Fence::reached()),
                }
            }
        }
    }

    /// What the stream has reached: a load, no driver call. A timeline that has fallen back to events knows of a value when
    /// a poller has seen its event.
    pub fn value(&self) -> u64 {
        match &self.0.way {
            Way::Word(moved) => moved.word.value(),
            Way::Events { signalled, .. } => {
                let signalled = lock(signalled);
                let done = |(_, fence): &&(u64, Fence)| fence.status() == FenceStatus::Signalled;
                signalled.fences.iter().rev().find(done).map_or(0, |&(value, _)| value)
            }
        }
    }

    /// The last value that was queued.
    pub fn last(&self) -> u64 {
        match &self.0.way {
            Way::Word(moved) => *lock(&moved.queued),
            Way::Events { signalled, .. } => lock(signalled).last,
        }
    }

    /// Why it uses events; `None` if it has a word in memory.
    pub fn fallback(&self) -> Option<&CudaError> {
        match &self.0.way {
            Way::Word(_) => None,
            Way::Events { why, .. } => Some(why),
        }
    }

    /// The stream.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Captures a signal: the stream is being captured into a graph, and each launch of that graph is to signal one value
    /// where this is called. [`GraphSignal::next`] chooses the value before each launch.
    ///
    /// # Safety
    /// The graph and what is made of it are not launched after the [`GraphSignal`] is gone, and not before its first
    /// [`next`](GraphSignal::next).
    ///
    /// # Errors
    /// [`CudaError::NotCapturing`] if the stream is not being captured, the reason of the [`fallback`](Self::fallback) if
    /// there is no word, or what the driver says.
    pub unsafe fn capture_signal(&self) -> Result<GraphSignal, CudaError> {
        let moved = self.word()?;
        let _current = self.0.stream.enter()?;
        // The value is replaced before the first launch.
        let node = Node::capture(&self.0.stream, MemoryOperation::WRITE, moved.word.device_address(), 0)?;
        Ok(GraphSignal { timeline: self.clone(), node })
    }

    /// The same for a graph that is built by hand: adds a node behind `after`, any number of nodes of `graph`.
    ///
    /// # Safety
    /// As for [`capture_signal`](Self::capture_signal); `graph` is a valid `CUgraph` and `after` are nodes of it.
    ///
    /// # Errors
    /// As for [`capture_signal`](Self::capture_signal).
    pub unsafe fn add_signal(&self, graph: RawHandle, after: &[RawHandle]) -> Result<GraphSignal, CudaError> {
        let moved = self.word()?;
        let address = moved.word.device_address();
        // SAFETY: the caller's promise.
        let node = unsafe { Node::add(&moved.context, graph, after, MemoryOperation::WRITE, address, 0) }?;
        Ok(GraphSignal { timeline: self.clone(), node })
    }

    fn word(&self) -> Result<&Arc<Moved>, CudaError> {
        match &self.0.way {
            Way::Word(moved) => Ok(moved),
            Way::Events { why, .. } => Err(why.clone()),
        }
    }
}

impl Moved {
    /// Takes the next value if `call` queues it.
    fn queue(&self, call: impl FnOnce(u64) -> Result<(), CudaError>) -> Result<u64, CudaError> {
        let mut queued = lock(&self.queued);
        let next = *queued + 1;
        call(next)?;
        self.word.will_be(next);
        *queued = next;
        Ok(next)
    }

    /// Asks the driver whether there still is anything to wait for.
    fn ask_for_fault(&self) -> u32 {
        let asked = code_of(&self.context, || {
            let idle = self.context.idle_stream()?;
            // SAFETY: a live stream of ours, never captured.
            Ok(unsafe { (self.context.driver.stream_query)(idle) })
        });
        match status_of(asked) {
            FenceStatus::Failed(_) => asked,
            FenceStatus::Pending | FenceStatus::Signalled => 0,
        }
    }
}

/// One value.
#[derive(Debug)]
struct Point {
    timeline: Arc<Moved>,
    value: u64,
}

impl Polled for Point {
    fn poll(&self) -> FenceStatus {
        let Moved { word, fault, vain, .. } = &*self.timeline;
        if word.value() >= self.value {
            // What moves has no fault.
            vain.store(0, Ordering::Relaxed);
            return FenceStatus::Signalled;
        }
        let mut code = fault.load(Ordering::Acquire);
        if code == 0 && vain.fetch_add(1, Ordering::Relaxed) % LOOKS_PER_QUESTION == LOOKS_PER_QUESTION - 1 {
            code = self.timeline.ask_for_fault();
            fault.store(code, Ordering::Release);
        }
        match code {
            0 => FenceStatus::Pending,
            // It may have come just before the fault.
            _ if word.value() >= self.value => FenceStatus::Signalled,
            code => FenceStatus::Failed(Failure { errno: errno::EIO, detail: code as i32 }),
        }
    }

    fn group(&self) -> Option<(u64, u64)> {
        Some((self.timeline.group, self.value))
    }

    fn least_interval(&self) -> u64 {
        LEAST_INTERVAL
    }
}

/// A signal in a CUDA graph. Each launch signals the value that was chosen before it: the number only grows, and a launch
/// is never taken for an earlier one.
#[derive(Debug)]
pub struct GraphSignal {
    timeline: Timeline,
    node: Node,
}

impl GraphSignal {
    /// Takes the timeline's next value for the next launch of `exec`. [`Timeline::at`] gives a fence on it.
    ///
    /// # Safety
    /// `exec` is a valid `CUgraphExec` made of the graph, and the graph has not been destroyed. The launch follows on the
    /// timeline's stream, before anything else signals the timeline: what is queued in another order lets entries go early.
    ///
    /// # Errors
    /// What the driver says. No value is taken then, and `exec` keeps the one that it had: do not launch it.
    pub unsafe fn next(&mut self, exec: RawHandle) -> Result<u64, CudaError> {
        let moved = self.timeline.word()?;
        // SAFETY: the caller's promise.
        moved.queue(|value| unsafe { self.node.set(exec, value) })
    }

    /// The `CUgraphNode`, to put others behind it.
    pub fn node(&self) -> RawHandle {
        self.node.as_raw()
    }

    /// The timeline.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }
}
