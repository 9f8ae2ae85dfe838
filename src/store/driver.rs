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

/// While calls run, and the last of them was started less than this ago, no further one is started: what gets ready meanwhile
/// goes out together. A call costs much more than a key in it; one that takes longer than this holds up nobody.
const GATHER: Nanos = 1_000_000;

pub(crate) struct StoreDriver {
    pool: Arc<Pool>,
    ends: Arc<Ends>,
    /// Operations with the workers.
    running: usize,
    /// Until when what gets ready gathers, as long as something runs.
    gather: Option<Nanos>,
}

impl StoreDriver {
    pub(crate) fn new(pool: Arc<Pool>, doorbell: Arc<Doorbell>) -> StoreDriver {
        let ends = pool.ends(doorbell);
        StoreDriver { pool, ends, running: 0, gather: None }
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
    fn submit(&mut self, _target: u32, ops: &[Op], now: Nanos, _out: &mut Vec<Event>) -> usize {
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
        if taken > 0 {
            self.gather = Some(now + GATHER);
        }
        taken
    }

    fn poll(&mut self, now: Nanos, budget: u32, out: &mut Vec<Event>) -> Hint {
        self.gather = self.gather.filter(|until| now < *until);
        for _ in 0..budget {
            let Some(end) = self.ends.pop() else { return Hint::Sleep { until: self.gather } };
            self.running -= 1;
            if self.running == 0 {
                self.gather = None;
            }
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
        self.gather.is_none() && self.pool.has_idle(&self.ends)
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Engine;
    use crate::store::answer::Answer;
    use crate::store::pool::End;
    use crate::store::request::Kind;
    use crate::store::{Client, Memory};
    use crate::transport::{Direction, Token};

    /// A driver whose workers are ours to play, and operations that ask for different keys.
    struct Stage {
        driver: StoreDriver,
        requests: Vec<Arc<Request>>,
    }

    impl Stage {
        fn new() -> Stage {
            let memory = Memory::new(0);
            let client = Client::memory(&Engine::loopback(), &memory).unwrap();
            let pool = Arc::new(Pool::new(2, Box::new(memory.backend())));
            let request =
                |n: u32| Request::new(Arc::clone(&client.inner), Kind::Exist, n.to_string().into(), Vec::new().into());
            let requests = (0..8).map(request).collect();
            Stage { driver: StoreDriver::new(pool, Arc::new(Doorbell::new())), requests }
        }

        /// Offers operations `from..to`, as the core does, if the driver says that it has room.
        fn offer(&mut self, from: u32, to: u32, now: Nanos) -> usize {
            let op = |n: u32| {
                let remote = ptr::from_ref(&*self.requests[n as usize]).expose_provenance() as u64;
                Op { token: Token::new(n, 0), direction: Direction::Read, local: 0, len: 0, remote }
            };
            let ops: Vec<Op> = (from..to).map(op).collect();
            if self.driver.has_room() { self.driver.submit(0, &ops, now, &mut Vec::new()) } else { 0 }
        }

        /// A worker's call for this operation has returned.
        fn end(&mut self, n: u32) {
            let answer = Answer::done(1);
            self.driver.ends.tell(&mut vec![End { token: Token::new(n, 0), answer }]);
        }

        fn poll(&mut self, now: Nanos) -> Hint {
            self.driver.poll(now, 64, &mut Vec::new())
        }
    }

    #[test]
    fn what_gets_ready_gathers_while_a_young_call_runs() {
        let mut stage = Stage::new();
        assert_eq!(stage.offer(0, 1, 1000), 1);
        assert_eq!(stage.offer(1, 3, 1000), 0, "a worker is idle, and the call is young");
        assert_eq!(stage.poll(2000), Hint::Sleep { until: Some(1000 + GATHER) });
        assert_eq!(stage.offer(1, 3, 2000), 0);
        // The call has returned: what has gathered goes out together.
        stage.end(0);
        assert_eq!(stage.poll(3000), Hint::Sleep { until: None });
        assert_eq!(stage.offer(1, 4, 3000), 3);
    }

    #[test]
    fn an_old_call_holds_up_nobody() {
        let mut stage = Stage::new();
        assert_eq!(stage.offer(0, 1, 1000), 1);
        assert_eq!(stage.poll(1000 + GATHER), Hint::Sleep { until: None });
        assert_eq!(stage.offer(1, 3, 1000 + GATHER), 2, "the other worker's");
        // Both are taken, whatever the time.
        assert_eq!(stage.poll(5 * GATHER), Hint::Sleep { until: None });
        assert_eq!(stage.offer(3, 4, 5 * GATHER), 0);
    }

    #[test]
    fn the_end_of_all_calls_ends_the_wait_also_in_the_last_of_a_budget() {
        let mut stage = Stage::new();
        assert_eq!(stage.offer(0, 2, 0), 2);
        stage.end(0);
        stage.end(1);
        assert_eq!(stage.driver.poll(1, 2, &mut Vec::new()), Hint::Now);
        assert_eq!(stage.driver.in_flight(), 0);
        assert!(stage.driver.has_room());
    }
}
