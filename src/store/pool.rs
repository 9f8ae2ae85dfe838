//! The workers: a bounded set of threads that make a Store's calls, which block.
//!
//! A driver hands a whole batch to a worker that is *idle*, and to nobody if none is: what it cannot hand over stays with the
//! core, where it can be cancelled, and where more gathers for the next call. A worker that is stuck in a call holds up the
//! keys of that call alone.

use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, Weak};

use super::answer::Answer;
use super::request::{Kind, Request};
use crate::doorbell::Doorbell;
use crate::sync::{ArrayQueue, AtomicBool, Mutex, Ordering};
use crate::transport::{RawMemory, Token, TransportError};

/// Most keys in one call.
pub(crate) const MAX_KEYS: usize = 64;
/// A call that has so many bytes to move gets no further key.
pub(crate) const MAX_BYTES: u64 = 16 << 20;

/// What makes the calls. They may block, and any thread may make them.
pub(crate) trait Backend: Send + Sync + fmt::Debug + 'static {
    /// Asks for all of `jobs`, which are of one kind and have different keys; `answers` has a place for each, in which the
    /// answer for a broken call stands. When it returns, what it answered quiet is.
    fn call(&self, kind: Kind, jobs: &[Job], answers: &mut [Answer]);

    /// Lets calls use the memory.
    ///
    /// # Errors
    /// What the Store says.
    fn register(&self, memory: RawMemory) -> Result<(), TransportError>;

    /// Undoes `register`; no call uses the memory.
    ///
    /// # Errors
    /// What the Store says.
    fn unregister(&self, memory: RawMemory) -> Result<(), TransportError>;

    /// Ends the client. No call runs, and none comes.
    fn close(&self);
}

/// One key's part of a batch.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) token: Token,
    pub(crate) request: Arc<Request>,
}

/// What a worker is given: one call of each kind that is in it.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) jobs: Vec<Job>,
    pub(crate) bytes: u64,
    /// Where the answers go.
    pub(crate) ends: Option<Arc<Ends>>,
}

/// One key's answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) token: Token,
    pub(crate) answer: Answer,
}

/// The way from the workers to one driver: its poller's input.
#[derive(Debug)]
pub(crate) struct Ends {
    queue: ArrayQueue<End>,
    /// The driver has found no idle worker and waits for one.
    starved: AtomicBool,
    doorbell: Arc<Doorbell>,
}

impl Ends {
    /// Leaves answers for the driver; ring its doorbell then.
    pub(crate) fn tell(&self, ended: &mut Vec<End>) {
        for end in ended.drain(..) {
            self.queue.push(end).expect("there is a place for each key that the workers can have");
        }
    }

    pub(crate) fn pop(&self) -> Option<End> {
        self.queue.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

#[derive(Debug)]
struct Worker {
    doorbell: Doorbell,
    /// A batch was handed over, and is not taken up.
    full: AtomicBool,
    /// Filled by the driver that took the worker out of `idle`, then the worker's until it is there again: nobody ever waits
    /// for the lock.
    batch: Mutex<Batch>,
}

/// What a worker has on its hands. Empty between batches.
#[derive(Debug, Default)]
struct Bench {
    /// Jobs that no call was made for.
    left: Vec<Job>,
    /// Those of the call that is made.
    now: Vec<Job>,
    later: Vec<Job>,
    answers: Vec<Answer>,
    ended: Vec<End>,
}

impl Bench {
    /// Chooses the jobs of the next call: of one kind, and of different keys, because a Store's batch takes each key once.
    fn choose(&mut self, kind: Kind) {
        for job in self.left.drain(..) {
            let again = || self.now.iter().any(|other| other.request.key() == job.request.key());
            if job.request.kind != kind || again() { self.later.push(job) } else { self.now.push(job) }
        }
        mem::swap(&mut self.left, &mut self.later);
    }
}

#[derive(Debug)]
pub(crate) struct Pool {
    backend: Box<dyn Backend>,
    workers: Box<[Worker]>,
    idle: ArrayQueue<u32>,
    closed: AtomicBool,
    /// Every driver's.
    drivers: Mutex<Vec<Weak<Ends>>>,
}

impl Pool {
    /// For so many workers; each is to [`serve`](Self::serve) on a thread of its own.
    pub(crate) fn new(workers: u32, backend: Box<dyn Backend>) -> Pool {
        let idle = ArrayQueue::new(workers as usize);
        (0..workers).for_each(|worker| idle.push(worker).expect("each worker has its place"));
        let worker = |_| Worker {
            doorbell: Doorbell::new(),
            full: AtomicBool::new(false),
            batch: Mutex::new(Batch { jobs: Vec::with_capacity(MAX_KEYS), ..Batch::default() }),
        };
        Pool {
            backend,
            workers: (0..workers).map(worker).collect(),
            idle,
            closed: AtomicBool::new(false),
            drivers: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn workers(&self) -> u32 {
        self.workers.len() as u32
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// The way to a new driver.
    pub(crate) fn ends(&self, doorbell: Arc<Doorbell>) -> Arc<Ends> {
        let queue = ArrayQueue::new(self.workers.len() * MAX_KEYS);
        let ends = Arc::new(Ends { queue, starved: AtomicBool::new(false), doorbell });
        let mut drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
        drivers.retain(|driver| driver.strong_count() > 0);
        drivers.push(Arc::downgrade(&ends));
        ends
    }

    /// An idle worker, for the driver of `ends` to fill and [`start`](Self::start). If there is none, the driver's poller is
    /// woken when there is.
    pub(crate) fn take_idle(&self, ends: &Ends) -> Option<u32> {
        self.idle.pop().or_else(|| self.await_idle(ends).then(|| self.idle.pop()).flatten())
    }

    /// True if a worker is idle. If not, the driver's poller is woken when one is.
    pub(crate) fn has_idle(&self, ends: &Ends) -> bool {
        !self.idle.is_empty() || self.await_idle(ends)
    }

    fn await_idle(&self, ends: &Ends) -> bool {
        // Both sides exchange, so one comes second: if that is us, Acquire shows us the idle worker; if it is the worker, it sees
        // that we wait.
        ends.starved.swap(true, Ordering::Acquire);
        !self.idle.is_empty()
    }

    /// Adds to the batch of a worker that the caller has taken and not started. Returns how many bytes the batch has then, and
    /// how many keys.
    pub(crate) fn add(&self, worker: u32, job: Job) -> (u64, usize) {
        let mut batch = self.workers[worker as usize].batch.lock().unwrap_or_else(PoisonError::into_inner);
        batch.bytes = batch.bytes.saturating_add(job.request.len());
        batch.jobs.push(job);
        (batch.bytes, batch.jobs.len())
    }

    /// Lets a worker that the caller has taken, and filled, make its call.
    pub(crate) fn start(&self, worker: u32, ends: &Arc<Ends>) {
        let worker = &self.workers[worker as usize];
        worker.batch.lock().unwrap_or_else(PoisonError::into_inner).ends = Some(Arc::clone(ends));
        // By exchange, as the worker does: loom shows orders of stores and exchanges that cannot be. Relaxed: the lock orders what
        // is in the batch.
        worker.full.swap(true, Ordering::Relaxed);
        worker.doorbell.ring_always();
    }

    /// A worker's life: until the pool is closed, whatever batch it is given.
    pub(crate) fn serve(&self, index: u32) {
        let worker = &self.workers[index as usize];
        let mut bench = Bench::default();
        loop {
            if worker.full.swap(false, Ordering::Relaxed) {
                self.work(index, &mut bench);
            } else if self.closed.load(Ordering::Relaxed) {
                return;
            } else {
                let ready = || worker.full.load(Ordering::Relaxed) || self.closed.load(Ordering::Relaxed);
                worker.doorbell.park(0, None, ready);
            }
        }
    }

    /// What a worker was given that it has not begun. For a simulation, which has one thread.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn started(&self, index: u32) -> Option<Vec<Arc<Request>>> {
        let worker = &self.workers[index as usize];
        let batch = worker.batch.lock().unwrap_or_else(PoisonError::into_inner);
        let given = worker.full.load(Ordering::Relaxed);
        given.then(|| batch.jobs.iter().map(|job| Arc::clone(&job.request)).collect())
    }

    /// A worker does what it was given. For the same.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn serve_once(&self, index: u32) {
        if self.workers[index as usize].full.swap(false, Ordering::Relaxed) {
            self.work(index, &mut Bench::default());
        }
    }

    /// Makes the calls of a worker's batch, and tells each one's answers when it has returned.
    fn work(&self, index: u32, bench: &mut Bench) {
        let mut batch = self.workers[index as usize].batch.lock().unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut batch.jobs, &mut bench.left);
        batch.bytes = 0;
        let ends = batch.ends.take().expect("a batch is started with its ends");
        drop(batch);
        while let Some(first) = bench.left.first() {
            let kind = first.request.kind;
            bench.choose(kind);
            self.call(kind, bench);
            // Before the answers are told: who has a completion finds no handle on the client left with us.
            bench.now.clear();
            ends.tell(&mut bench.ended);
            if !bench.left.is_empty() {
                ends.doorbell.ring_always();
            }
        }
        self.become_idle(index, &ends);
    }

    /// A worker whose batch is done, and told to its driver, takes another one.
    pub(crate) fn become_idle(&self, index: u32, ends: &Ends) {
        self.idle.push(index).expect("each worker has its place");
        {
            let drivers = self.drivers.lock().unwrap_or_else(PoisonError::into_inner);
            for driver in drivers.iter().filter_map(Weak::upgrade) {
                // Release: see `await_idle`.
                if driver.starved.swap(false, Ordering::Release) {
                    driver.doorbell.ring_always();
                }
            }
        }
        // For the answers.
        ends.doorbell.ring_always();
    }

    fn call(&self, kind: Kind, bench: &mut Bench) {
        let Bench { now, answers, ended, .. } = bench;
        answers.clear();
        answers.resize(now.len(), Answer::BROKEN);
        // The panic's message was printed by the hook; whoever has no answer has the one for a broken call.
        let _ = catch_unwind(AssertUnwindSafe(|| self.backend.call(kind, now, answers)));
        ended.extend(now.iter().zip(answers).map(|(job, answer)| End { token: job.token, answer: *answer }));
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// The workers end, each after the call that it is in.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.workers.iter().for_each(|worker| worker.doorbell.ring_always());
    }
}
