//! A transport that does what its entries' fates say, and fences that pollers ask.

use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::book::{Book, Desk, lock};
use super::program::{Break, End, PolledEnd, Waiting};
use super::record::Flight;
use crate::code::{Stage, errno};
use crate::fence::{FenceStatus, Polled};
use crate::transport::{Busy, Caps, Driver, Event, Hint, Nanos, Op, PollerWaker, RawMemory, Transport, TransportError};

/// Drivers that yield do it for so long.
const SOON: Nanos = 100_000;

/// What an injected panic carries.
#[derive(Debug)]
pub(super) struct Injected;

/// Panics without the hook that prints: it was asked for.
pub(super) fn injected() -> ! {
    resume_unwind(Box::new(Injected))
}

/// When the end of an engine may go on: closing runs on a thread of its own, which must not outrun the simulation.
#[derive(Debug, Default)]
pub(super) struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub(super) fn open(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        while !*open {
            open = self.opened.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[derive(Debug)]
pub(super) struct Net {
    pub(super) engine: usize,
    pub(super) book: Desk,
    pub(super) gate: Arc<Gate>,
    /// Whether closing succeeds.
    pub(super) closes: bool,
}

// SAFETY: no operation touches any memory: the addresses are names.
unsafe impl Transport for Net {
    fn name(&self) -> String {
        format!("net{}", self.engine)
    }

    fn caps(&self) -> Caps {
        let plan = lock(&self.book).plans[self.engine];
        Caps {
            threads_here: plan.threads_here,
            max_batch: plan.max_batch,
            max_in_flight_per_peer: plan.max_in_flight,
            max_merged: plan.max_merged,
        }
    }

    fn driver(&self, wake: PollerWaker) -> Box<dyn Driver> {
        let mut book = lock(&self.book);
        if book.breaks_at(self.engine, |at| at == Break::Making) {
            drop(book);
            injected();
        }
        let number = book.new_driver(self.engine, wake);
        Box::new(NetDriver { number, engine: self.engine, book: Arc::clone(&self.book) })
    }

    unsafe fn register(&self, _memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        Ok(())
    }

    fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn open(&self, _name: &str, _fresh: bool) -> Result<u32, TransportError> {
        Ok(lock(&self.book).new_target(self.engine))
    }

    fn close(&self) -> Result<(), Busy> {
        // On a thread of the ring's own; on the simulation's, when nobody is left, nothing is waited for.
        if std::thread::current().name() == Some("moonring-close") {
            self.gate.pass();
        }
        if !self.closes {
            return Err(Busy);
        }
        lock(&self.book).end_engine(self.engine);
        Ok(())
    }
}

#[derive(Debug)]
struct NetDriver {
    number: usize,
    engine: usize,
    book: Desk,
}

impl Driver for NetDriver {
    fn submit(&mut self, target: u32, ops: &[Op], now: Nanos, out: &mut Vec<Event>) -> usize {
        let mut book = lock(&self.book);
        let mut take = book.offered(self.number, target, ops, now);
        let mut breaks = None;
        book.breaks_at(self.engine, |at| match at {
            Break::Submit(after) => {
                breaks = Some(after as usize);
                true
            }
            _ => false,
        });
        if let Some(after) = breaks {
            take = ops.len().min(after);
        }
        for op in &ops[..take] {
            book.issue(self.number, target, op, now, out);
        }
        if breaks.is_some() {
            book.was_offered(self.engine, ops);
            drop(book);
            injected();
        }
        take
    }

    fn poll(&mut self, now: Nanos, budget: u32, out: &mut Vec<Event>) -> Hint {
        let mut book = lock(&self.book);
        if book.breaks_at(self.engine, |at| at == Break::Poll) {
            drop(book);
            injected();
        }
        let more = look(&mut book, self.number, now, false, budget, out);
        if more {
            return Hint::Now;
        }
        match book.plans[self.engine].wait {
            Waiting::Until => Hint::Sleep { until: book.next_look(self.number) },
            // Not for what is lost: the poller would never come to rest.
            Waiting::Yield => match book.next_look(self.number) {
                Some(due) if due < now + SOON => Hint::Yield,
                until => Hint::Sleep { until },
            },
            Waiting::Wakes => Hint::Sleep { until: None },
        }
    }

    fn settle(&mut self, now: Nanos, out: &mut Vec<Event>) {
        let mut book = lock(&self.book);
        if book.breaks_at(self.engine, |at| at == Break::Settle) {
            drop(book);
            injected();
        }
        look(&mut book, self.number, now, true, u32::MAX, out);
    }

    fn in_flight(&self) -> usize {
        lock(&self.book).looked_after(self.number)
    }
}

impl Drop for NetDriver {
    fn drop(&mut self) {
        lock(&self.book).drop_driver(self.number);
    }
}

/// Tells what there is to tell; true if there is more than `budget` of it.
fn look(book: &mut Book, driver: usize, now: Nanos, thorough: bool, budget: u32, out: &mut Vec<Event>) -> bool {
    let mut due: Vec<usize> = (0..book.flights.len())
        .filter(|&at| {
            let flight = &book.flights[at];
            flight.driver == driver && flight.due(thorough).is_some_and(|due| due <= now)
        })
        .collect();
    // In no order that anybody could rely on.
    due.sort_by_key(|&at| (at as u64 ^ now).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let more = due.len() > budget as usize;
    due.truncate(budget as usize);
    for at in due {
        tell(book, at, out);
    }
    book.flights.retain(|flight| !flight.over());
    more
}

/// A flight's next word.
pub(super) fn tell(book: &mut Book, at: usize, out: &mut Vec<Event>) {
    let Flight { token: op, len, end, told, .. } = book.flights[at];
    let result = |res, stage, quiet| Event::Result { op, res, stage, detail: 0, quiet };
    let ok = result(len as i32, Stage::Transfer, true);
    let event = match (end, told) {
        (End::Lands | End::AtOnce(true), _) => ok,
        (End::Twice(_), 0) => ok,
        // Said again: nobody is to hear it.
        (End::Twice(_), _) => {
            let name = book.flights[at].name();
            book.say(|| format!("    the transport says again that {name} has ended"));
            book.flights[at].told += 1;
            out.push(ok);
            return;
        }
        (End::AtOnce(false), _) => result(-errno::EIO, Stage::Transfer, true),
        (End::Refused(errno), _) => result(-errno, Stage::Issue, true),
        (End::Fails(errno), _) => result(-errno, Stage::Transfer, true),
        (End::Late(_) | End::Never, 0) => result(-errno::ETIMEDOUT, Stage::Transfer, false),
        (End::Late(_), _) => Event::Quiet { op, detail: 4 },
        (End::Never | End::Lost, _) => return,
    };
    book.flights[at].told += 1;
    book.told(at, event);
    out.push(event);
}

/// A fence that answers what the book says.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) number: usize,
    pub(super) group: Option<(u64, u64)>,
    pub(super) book: Desk,
}

impl Polled for Asked {
    fn poll(&self) -> FenceStatus {
        let mut book = lock(&self.book);
        book.asked(self.number, self.group);
        let answer = book.polled[self.number].answer;
        drop(book);
        match answer {
            None => FenceStatus::Pending,
            Some(PolledEnd::Signal) => FenceStatus::Signalled,
            Some(PolledEnd::Fail(detail)) => FenceStatus::Failed(crate::fence::Failure { errno: errno::EIO, detail }),
            Some(PolledEnd::Panic) => injected(),
        }
    }

    fn group(&self) -> Option<(u64, u64)> {
        self.group
    }

    fn least_interval(&self) -> u64 {
        5_000
    }
}
