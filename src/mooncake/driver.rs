//! A poller's side: tasks in batches, each asked about until it has ended.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use mooncake_sys::{
    BatchId, CallError, EXCEPTION, OPCODE_READ, OPCODE_WRITE, STATUS_CANCELED, STATUS_COMPLETED, STATUS_FAILED,
    STATUS_INVALID, STATUS_PENDING, STATUS_TIMEOUT, STATUS_WAITING, TransferRequest, TransferStatus,
};

use super::gpu::{Copy, Landed, Look};
use super::transport::{Live, MAX_BATCH, Peer, Shared};
use crate::code::{Stage, errno};
use crate::transport::{Direction, Driver, Event, Hint, Nanos, Op, Token};

/// Operations up to this length share batches, longer ones have their own: a batch is freed when its last task has ended.
const SMALL: u32 = 64 << 10;
/// How long after its last news a batch is asked about in every turn.
const EAGER: Nanos = 100_000;
/// The longest time between two looks at a batch.
const RARELY: Nanos = 5_000_000;
/// A look ends after so many tasks that still run, because those behind them most often do too.
const RUNNING: u32 = 8;
/// So long after a look at all tasks of a batch the next one is at all of them, but not before so many short ones.
const WHOLE: Nanos = 50_000;
const SHORT: Nanos = 8;
/// The shortest time between two looks at a copy to a GPU: the driver takes locks that the application's launches want.
const COPY_PAUSE: Nanos = 5_000;
/// A look that is due sooner is yielded for: a sleep would overshoot it.
const SLEEP_LEAST: Nanos = 50_000;

/// Mooncake's code for a batch that it does not free yet.
const BATCH_BUSY: i32 = 4;
/// Mooncake's code for a task that a batch does not have.
const INVALID_ARGUMENT: i32 = 1;

pub(super) struct MooncakeDriver {
    shared: Arc<Shared>,
    /// The shared table as far as it was needed here, without its lock.
    peers: Vec<Option<Arc<Peer>>>,
    /// Places for batches; those not in `due` are in `spare`.
    batches: Vec<Batch>,
    spare: Vec<u32>,
    /// Every batch that is not freed, by the moment of the next look.
    due: BinaryHeap<Reverse<(Nanos, u32)>>,
    /// Scratch, empty between calls.
    requests: Vec<TransferRequest>,
}

// SAFETY: the addresses in the scratch vector are only that, and it is empty between calls; all else is `Send`.
unsafe impl Send for MooncakeDriver {}

#[derive(Debug, Default)]
struct Batch {
    id: BatchId,
    peer: Option<Arc<Peer>>,
    tasks: Vec<Task>,
    /// Tasks that have not ended, one bit each.
    running: u32,
    /// Those of them whose result was given already.
    told: u32,
    /// When a task ended last, or was found to be COMPLETED with its copy on the way, or the batch began.
    news: Nanos,
    /// When all that ran were asked about last, or the batch began.
    whole: Nanos,
}

#[derive(Debug)]
struct Task {
    op: Token,
    len: u32,
    /// What it brings to the local range.
    copy: Copy,
}

/// What Mooncake says of a task.
enum Word {
    Running,
    /// It is COMPLETED, and what it has brought is on its way to the GPU.
    Copied,
    /// It has ended: its result, and Mooncake's number.
    Ended {
        res: i32,
        detail: i32,
    },
    /// It is given up on, and may go on.
    Lost {
        errno: i32,
        detail: i32,
    },
}

impl MooncakeDriver {
    pub(super) fn new(shared: Arc<Shared>) -> MooncakeDriver {
        MooncakeDriver {
            shared,
            peers: Vec::new(),
            batches: Vec::new(),
            spare: Vec::new(),
            due: BinaryHeap::new(),
            requests: Vec::with_capacity(MAX_BATCH as usize),
        }
    }

    fn peer(&mut self, target: u32) -> Option<Arc<Peer>> {
        let at = target as usize;
        if self.peers.len() <= at {
            self.peers.resize(at + 1, None);
        }
        let place = &mut self.peers[at];
        if place.is_none() {
            *place = self.shared.peer(target);
        }
        place.clone()
    }

    /// A place for a batch, with no tasks.
    fn place(&mut self) -> u32 {
        self.spare.pop().unwrap_or_else(|| {
            // It grows to what comes: a peer that is silent for long may have hundreds of short ones.
            self.batches.push(Batch::default());
            self.batches.len() as u32 - 1
        })
    }

    /// Starts those of `ops` that are of one size class, as one batch. They have their places at the peer.
    fn start(&mut self, live: &Live<'_>, peer: &Arc<Peer>, ops: &[Op], small: bool, now: Nanos, out: &mut Vec<Event>) {
        let place = self.place();
        let batch = &mut self.batches[place as usize];
        for op in ops.iter().filter(|op| (op.len <= SMALL) == small) {
            let through = match op.direction {
                Direction::Read => self.shared.copies.to(op.local),
                Direction::Write => None,
            };
            batch.tasks.push(Task { op: op.token, len: op.len, copy: through.map_or(Copy::Direct, Copy::Through) });
            self.requests.push(TransferRequest {
                opcode: match op.direction {
                    Direction::Read => OPCODE_READ,
                    Direction::Write => OPCODE_WRITE,
                },
                source: op.local as *mut c_void,
                target_id: peer.segment,
                file_id: 0,
                target_offset: op.remote,
                length: u64::from(op.len),
            });
        }
        let count = batch.tasks.len();
        if count == 0 {
            self.spare.push(place);
            return;
        }
        let Shared { api, grouping, unquiet, .. } = &*self.shared;
        unquiet.fetch_add(count, Ordering::Relaxed);
        let engine = live.engine();
        // SAFETY: the engine is live. Each local range stays valid until we report its operation quiet, which we do only after
        // its task has ended, or was not started.
        let begun = unsafe {
            api.allocate_batch_id(engine, count).map_err(Refused::Batch).and_then(|id| {
                batch.id = id;
                let Err(error) = api.submit_transfer(engine, id, &self.requests, *grouping) else { return Ok(()) };
                if !api.can_ask_after_refusal() {
                    return Err(Refused::Unknown(error));
                }
                match api.get_transfer_status(engine, id, 0) {
                    Err(no_task) if no_task.code == INVALID_ARGUMENT => {
                        // Nothing was started. A batch without tasks is free at once; if not, it is only lost.
                        let _ = api.free_batch_id(engine, id);
                        Err(Refused::Submit(error))
                    }
                    // Some were started: each has its own end.
                    _ => Ok(()),
                }
            })
        };
        self.requests.clear();
        match begun {
            Ok(()) => {
                batch.peer = Some(Arc::clone(peer));
                batch.running = u32::MAX >> (u32::BITS as usize - count);
                batch.told = 0;
                (batch.news, batch.whole) = (now, now);
                self.due.push(Reverse((now + 1, place)));
            }
            Err(refused) => {
                let (stage, errno, detail, quiet) = refused.result();
                for task in batch.tasks.drain(..) {
                    out.push(Event::Result { op: task.op, res: -errno, stage, detail, quiet });
                }
                self.spare.push(place);
                peer.give_places_back(count as u32);
                if quiet {
                    unquiet.fetch_sub(count, Ordering::Release);
                }
            }
        }
    }

    /// Asks about the running tasks of a batch, unless `whole` often about the first few of them only; or frees it if there are
    /// none. How long to wait before the next look, or `None` if there is none.
    fn look(&mut self, live: &Live<'_>, place: u32, whole: bool, now: Nanos, out: &mut Vec<Event>) -> Option<Nanos> {
        let batch = &mut self.batches[place as usize];
        if batch.running == 0 {
            let news = batch.news;
            return (!self.free(live, place)).then(|| pause(now - news));
        }
        let whole = whole || now - batch.whole >= WHOLE.max(SHORT * pause(now - batch.news));
        if whole {
            batch.whole = now;
        }
        let mut left = batch.running;
        let (mut ended, mut running) = (0, 0);
        let (mut copied, mut copies) = (0_u32, Look::default());
        while left != 0 && (whole || running < RUNNING) {
            let task = left.trailing_zeros();
            let bit = 1 << task;
            left ^= bit;
            let Task { op, len, copy } = &mut batch.tasks[task as usize];
            let op = *op;
            let word = match copy {
                // COMPLETED, and asked about already.
                Copy::Behind(_) => Word::Ended { res: *len as i32, detail: STATUS_COMPLETED },
                _ => ask(&self.shared, live, batch.id, task as usize, *len),
            };
            match landed(word, copy, &mut copies) {
                Word::Running => running += 1,
                Word::Copied => copied |= bit,
                Word::Ended { res, detail } => {
                    out.push(match batch.told & bit {
                        0 => Event::Result { op, res, stage: Stage::Transfer, detail, quiet: true },
                        _ => Event::Quiet { op, detail },
                    });
                    batch.running ^= bit;
                    ended += 1;
                }
                Word::Lost { errno, detail } => {
                    if batch.told & bit == 0 {
                        batch.told |= bit;
                        out.push(Event::Result { op, res: -errno, stage: Stage::Transfer, detail, quiet: false });
                    }
                }
            }
        }
        let mut pause_least = 1;
        while copied != 0 {
            let task = copied.trailing_zeros();
            copied ^= 1 << task;
            if copies.follow(&mut batch.tasks[task as usize].copy) {
                batch.news = now;
            }
            pause_least = COPY_PAUSE;
        }
        if ended > 0 {
            batch.news = now;
            self.shared.unquiet.fetch_sub(ended, Ordering::Release);
            if let Some(peer) = &batch.peer {
                peer.give_places_back(ended as u32);
            }
        }
        // After its last end a batch is freed at the next look: first those who wait hear of it.
        Some(pause(now - batch.news).max(pause_least))
    }

    /// True if the batch is done with.
    fn free(&mut self, live: &Live<'_>, place: u32) -> bool {
        let batch = &mut self.batches[place as usize];
        // SAFETY: the engine is live. Every task was seen to have ended, and the batch's number is forgotten unless it stays.
        match unsafe { self.shared.api.free_batch_id(live.engine(), batch.id) } {
            Err(error) if error.code == BATCH_BUSY => false,
            // Whether it is freed after another error is not known, so it is never named again.
            Ok(()) | Err(_) => {
                batch.tasks.clear();
                batch.peer = None;
                self.spare.push(place);
                true
            }
        }
    }
}

/// How long to leave a batch alone that had its last news so long ago.
fn pause(age: Nanos) -> Nanos {
    if age < EAGER { 1 } else { (age / 16).min(RARELY) }
}

/// A task has not ended before its bytes are where they are to go.
fn landed(word: Word, copy: &Copy, copies: &mut Look) -> Word {
    match word {
        Word::Ended { res, .. } if res >= 0 => match copies.landed(copy) {
            Landed::Yes => word,
            Landed::NotYet => Word::Copied,
            Landed::Failed(code) => Word::Ended { res: -errno::EFAULT, detail: code as i32 },
        },
        word => word,
    }
}

fn ask(shared: &Shared, live: &Live<'_>, batch: BatchId, task: usize, len: u32) -> Word {
    // SAFETY: the engine is live, and the batch is not freed before all of its tasks have ended.
    let status = || unsafe { shared.api.get_transfer_status(live.engine(), batch, task) };
    let lost = |errno, detail| Word::Lost { errno, detail };
    let first = status();
    match first.as_ref().map(|status| status.status) {
        Ok(STATUS_WAITING | STATUS_PENDING) => Word::Running,
        Ok(STATUS_COMPLETED) => {
            // Mooncake reads the count before the state, and both without a barrier: only behind one are the bytes there, and a
            // count that is not whole may be an old one. Only then is a second answer worth its price (see `MAX_BATCH`).
            fence(Ordering::Acquire);
            let is_whole = |status: TransferStatus| status.transferred_bytes == u64::from(len);
            let whole = first.is_ok_and(is_whole) || status().is_ok_and(is_whole);
            Word::Ended { res: if whole { len as i32 } else { -errno::EBADMSG }, detail: STATUS_COMPLETED }
        }
        Ok(STATUS_FAILED) => Word::Ended { res: -errno::EIO, detail: STATUS_FAILED },
        Ok(STATUS_TIMEOUT) => lost(errno::ETIMEDOUT, STATUS_TIMEOUT),
        Ok(STATUS_INVALID) => lost(errno::EINVAL, STATUS_INVALID),
        Ok(STATUS_CANCELED) => lost(errno::ECANCELED, STATUS_CANCELED),
        Ok(unknown) => lost(errno::EPROTO, unknown),
        Err(error) => lost(errno::EREMOTEIO, error.code),
    }
}

/// A submit that was refused.
enum Refused {
    /// There was no batch to be had. Nothing was started.
    Batch(CallError),
    /// Nothing was started.
    Submit(CallError),
    /// What was started cannot be asked.
    Unknown(CallError),
}

impl Refused {
    /// Stage, errno, detail, and whether the local ranges are quiet.
    fn result(&self) -> (Stage, i32, i32, bool) {
        match self {
            Refused::Batch(error) => (Stage::Issue, errno::ENOBUFS, error.code, true),
            Refused::Submit(error) => {
                let errno = match error.code {
                    INVALID_ARGUMENT => errno::EINVAL,
                    2 => errno::EBUSY,
                    3 => errno::EFAULT,
                    8 => errno::EOPNOTSUPP,
                    EXCEPTION => errno::EPROTO,
                    _ => errno::EIO,
                };
                (Stage::Issue, errno, error.code, true)
            }
            Refused::Unknown(error) => (Stage::Transfer, errno::ENOTRECOVERABLE, error.code, false),
        }
    }
}

impl Driver for MooncakeDriver {
    fn submit(&mut self, target: u32, ops: &[Op], now: Nanos, out: &mut Vec<Event>) -> usize {
        let shared = Arc::clone(&self.shared);
        let (Some(live), Some(peer)) = (shared.live(), self.peer(target)) else {
            let closed = |op: &Op| Event::Result {
                op: op.token,
                res: -errno::ESHUTDOWN,
                stage: Stage::Issue,
                detail: 0,
                quiet: true,
            };
            out.extend(ops.iter().map(closed));
            return ops.len();
        };
        let taken = peer.take_places(ops.len().min(MAX_BATCH as usize) as u32, shared.queue) as usize;
        for small in [true, false] {
            self.start(&live, &peer, &ops[..taken], small, now, out);
        }
        taken
    }

    fn poll(&mut self, now: Nanos, budget: u32, out: &mut Vec<Event>) -> Hint {
        let shared = Arc::clone(&self.shared);
        let Some(live) = shared.live() else {
            // The engine's end was the end of everything that ran on it.
            self.due.clear();
            return Hint::Sleep { until: None };
        };
        let enough = out.len() + budget as usize;
        while let Some(&Reverse((due, place))) = self.due.peek() {
            if due > now {
                let soon = due - now < SLEEP_LEAST;
                return if soon { Hint::Yield } else { Hint::Sleep { until: Some(due) } };
            }
            if out.len() >= enough {
                return Hint::Now;
            }
            self.due.pop();
            if let Some(pause) = self.look(&live, place, false, now, out) {
                self.due.push(Reverse((now + pause, place)));
            }
        }
        Hint::Sleep { until: None }
    }

    fn settle(&mut self, now: Nanos, out: &mut Vec<Event>) {
        let shared = Arc::clone(&self.shared);
        let Some(live) = shared.live() else { return };
        let mut again = BinaryHeap::with_capacity(self.due.len());
        for Reverse((due, place)) in std::mem::take(&mut self.due) {
            if let Some(pause) = self.look(&live, place, true, now, out) {
                // Whoever looks more often than is due does not move what is due.
                again.push(Reverse((due.max(now).min(now + pause), place)));
            }
        }
        self.due = again;
    }

    fn in_flight(&self) -> usize {
        self.due.len()
    }
}

impl Drop for MooncakeDriver {
    /// A ring may close between a batch's last end and the look that frees it. What still runs is left to the engine.
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(live) = shared.live() else { return };
        for Reverse((_, place)) in std::mem::take(&mut self.due) {
            if self.batches[place as usize].running == 0 {
                self.free(&live, place);
            }
        }
    }
}

impl fmt::Debug for MooncakeDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MooncakeDriver").field("batches", &self.due.len()).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "cuda"))]
mod gpu_tests;
#[cfg(test)]
mod tests;
