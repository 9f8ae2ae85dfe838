//! A poller's side of a Store: ready entries become batches for idle workers, answers become events.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use super::pool::{Ends, Job, MAX_BYTES, MAX_KEYS, Pool};
use super::request::Request;
use crate::code::Stage;
use crate::doorbell::Doorbell;
use crate::transport::{Caps, Driver, Event, Hint, Nanos, Op};

/// Most operations offered at once.
const MAX_BATCH: u32 = 128;

pub(crate) struct StoreDriver {
    pool: Arc<Pool>,
    ends: Arc<Ends>,
    /// Operations with the workers.
    running: usize,
}

impl StoreDriver {
    pub(crate) fn new(pool: Arc<Pool>, doorbell: Arc<Doorbell>) -> StoreDriver {
        let ends = pool.ends(doorbell);
        StoreDriver { pool, ends, running: 0 }
    }

    pub(crate) fn caps(pool: &Pool) -> Caps {
        let in_flight = pool.workers() * MAX_KEYS as u32;
        Caps { threads_here: true, max_batch: MAX_BATCH, max_in_flight_per_peer: in_flight, max_merged: 0 }
    }

    /// The request of an operation of ours, in the place of a remote address.
    fn request(op: &Op) -> Arc<Request> {
        let request: *const Request = ptr::with_exposed_provenance(op.remote as usize);
        // SAFETY: the core offers this driver only operations of entries for a Store, with the address of their request, of
        // which the entry owns a count until its end; a new one is made here.
        unsafe {
            Arc::increment_strong_count(request);
            Arc::from_raw(request)
        }
    }
}

impl Driver for StoreDriver {
    fn submit(&mut self, _target: u32, ops: &[Op], _now: Nanos, _out: &mut Vec<Event>) -> usize {
        // Workers that are being filled, one for each kind of call while there are idle ones.
        let mut filling: [Option<u32>; 4] = [None; 4];
        let mut taken = 0;
        for op in ops {
            let request = StoreDriver::request(op);
            let own = request.kind as usize;
            let worker = filling[own].or_else(|| self.pool.take_idle(&self.ends));
            let Some(worker) = worker.or_else(|| filling.iter().flatten().next().copied()) else { break };
            let (bytes, keys) = self.pool.add(worker, Job { token: op.token, request });
            filling[own] = Some(worker);
            taken += 1;
            if keys == MAX_KEYS || bytes >= MAX_BYTES {
                self.pool.start(worker, &self.ends);
                filling.iter_mut().filter(|other| **other == Some(worker)).for_each(|other| *other = None);
            }
        }
        for kind in 0..filling.len() {
            if let Some(worker) = filling[kind].filter(|worker| !filling[..kind].contains(&Some(*worker))) {
                self.pool.start(worker, &self.ends);
            }
        }
        self.running += taken;
        taken
    }

    fn poll(&mut self, _now: Nanos, budget: u32, out: &mut Vec<Event>) -> Hint {
        for _ in 0..budget {
            let Some(end) = self.ends.pop() else { return Hint::Sleep { until: None } };
            self.running -= 1;
            let (op, answer) = (end.token, end.answer);
            let (res, detail, quiet) = (answer.res, answer.detail, answer.quiet);
            out.push(Event::Result { op, res, stage: Stage::Transfer, detail, quiet });
        }
        Hint::Now
    }

    fn settle(&mut self, now: Nanos, out: &mut Vec<Event>) {
        while self.poll(now, u32::MAX, out) == Hint::Now {}
    }

    fn in_flight(&self) -> usize {
        self.running
    }

    fn has_input(&self) -> bool {
        !self.ends.is_empty()
    }

    fn has_room(&self) -> bool {
        self.pool.has_idle(&self.ends)
    }

    fn is_over(&self) -> bool {
        self.pool.is_closed()
    }
}

impl fmt::Debug for StoreDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreDriver").field("running", &self.running).finish_non_exhaustive()
    }
}
