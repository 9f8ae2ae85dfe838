//! A simulated Store: the driver and the pool that there are, workers that work when the simulation says, and calls that answer
//! as their entries' fates say.

use std::collections::HashSet;
use std::sync::Arc;

use super::book::{Book, Desk, lock};
use super::net::injected;
use super::program::{PlanOp, StoreEnd, StoreFate};
use super::record::Record;
use super::world::World;
use crate::code::Stage;
use crate::store::answer::{Answer, code};
use crate::store::pool::{Backend, Job};
use crate::store::request::{Kind, Request};
use crate::transport::{Nanos, RawMemory, TransportError};

/// What a client talks to.
#[derive(Debug)]
pub(super) struct Shop {
    pub(super) engine: usize,
    pub(super) book: Desk,
}

impl Backend for Shop {
    fn call(&self, kind: Kind, jobs: &[Job], answers: &mut [Answer]) {
        let panics = lock(&self.book).call(self.engine, kind, jobs, answers);
        if panics {
            injected();
        }
    }

    fn register(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn close(&self) {}
}

/// What a worker was given, and when it has returned from all calls for that.
#[derive(Debug)]
pub(super) struct Shift {
    pub(super) engine: usize,
    worker: u32,
    /// `None`: never.
    pub(super) due: Option<Nanos>,
}

/// A key's name.
pub(super) fn key(number: u8) -> String {
    format!("key{number}")
}

/// What tells a request from all others that there are.
pub(super) fn name_of(request: &Arc<Request>) -> usize {
    Arc::as_ptr(request).addr()
}

impl World {
    /// Workers that were given something in the turn that has just ended.
    pub(super) fn note_shifts(&mut self, core: usize) {
        for (engine, place) in self.engines.iter().enumerate() {
            for worker in 0..place.pool.workers() {
                let mut book = lock(&self.book);
                if book.shifts.iter().any(|shift| (shift.engine, shift.worker) == (engine, worker)) {
                    continue;
                }
                let Some(requests) = place.pool.started(worker) else { continue };
                let mut due = Some(book.now);
                for request in requests {
                    let Some(&uid) = book.requests.get(&name_of(&request)) else {
                        book.violate(format!("a worker is given what nobody asked for: {request:?}"));
                        continue;
                    };
                    book.take(core, engine, uid);
                    if let PlanOp::Store { fate: StoreFate { after, end }, .. } = book.records[uid].plan.op {
                        let ends = (end != StoreEnd::Never).then_some(book.now + after);
                        due = due.zip(ends).map(|(due, ends)| due.max(ends));
                    }
                }
                book.say(|| format!("    worker {worker} of engine {engine} returns at {due:?}"));
                book.shifts.push(Shift { engine, worker, due });
            }
        }
    }

    /// Workers whose time has come make their calls and return.
    pub(super) fn end_shifts(&mut self) {
        loop {
            let mut book = lock(&self.book);
            let now = book.now;
            let Some(at) = book.shifts.iter().position(|shift| shift.due.is_some_and(|due| due <= now)) else { return };
            let Shift { engine, worker, .. } = book.shifts.remove(at);
            drop(book);
            self.engines[engine].pool.serve_once(worker);
        }
    }
}

impl Book {
    /// The driver of a Store has taken an entry.
    fn take(&mut self, core: usize, engine: usize, uid: usize) {
        let record = &self.records[uid];
        let here = (record.engine, self.rings[record.ring].core) == (engine, core);
        let wrong = match record.plan.op {
            _ if !here => Some("it is another core's, or another engine's".to_owned()),
            PlanOp::Store { .. } if record.issued != 0 => Some("it was taken before".to_owned()),
            PlanOp::Store { .. } => self.wrong_to_start(uid),
            _ => Some("it asks nothing of a Store".to_owned()),
        };
        if let Some(wrong) = wrong {
            self.violate(format!("a Store's driver takes entry {uid}: {wrong}"));
        }
        let now = self.now;
        let record = &mut self.records[uid];
        (record.issued, record.issued_at, record.unresolved, record.touching) = (1, Some(now), 1, 1);
        self.issued_now.push(uid);
        self.say(|| format!("    the Store has entry {uid}"));
    }

    /// A worker calls the Store; true if that panics.
    fn call(&mut self, engine: usize, kind: Kind, jobs: &[Job], answers: &mut [Answer]) -> bool {
        let mut keys = HashSet::new();
        let mut broken = false;
        for (job, place) in jobs.iter().zip(answers) {
            let found = self.requests.get(&name_of(&job.request)).map(|&uid| (uid, &self.records[uid]));
            let Some((uid, &Record { unresolved, ref plan, .. })) = found else {
                self.violate(format!("the Store is asked for what nobody asked for: {:?}", job.request));
                continue;
            };
            let PlanOp::Store { ask, key: number, len, fate } = plan.op else { continue };
            let right = (ask, &*key(number)) == (kind, job.request.key()) && keys.insert(number) && unresolved == 1;
            if !right {
                self.violate(format!(
                    "a call of {kind:?} for entry {uid}, {:?}: {unresolved} words to come",
                    job.request
                ));
                continue;
            }
            broken |= fate.end == StoreEnd::Panics;
            let answer = if broken { Answer::BROKEN } else { self.answer(engine, kind, number, len, fate.end) };
            if !broken {
                *place = answer;
            }
            let now = self.now;
            self.faults += u64::from(fate.end != StoreEnd::Answers);
            self.asked += 1;
            let record = &mut self.records[uid];
            record.unresolved -= 1;
            record.touching -= usize::from(answer.quiet);
            record.results.push((answer.res, Stage::Transfer));
            if answer.res < 0 {
                record.failed_at.get_or_insert(now);
            }
            self.say(|| format!("    the Store says of entry {uid}: {answer:?}"));
        }
        broken
    }

    fn answer(&mut self, engine: usize, kind: Kind, key: u8, len: u8, end: StoreEnd) -> Answer {
        match end {
            StoreEnd::Fails(code) => return Answer::failed(code),
            StoreEnd::GivesUp => return Answer::GIVEN_UP,
            StoreEnd::Answers | StoreEnd::Never | StoreEnd::Panics => {}
        }
        let missing = Answer::failed(code::NOT_FOUND);
        let object = self.objects.get(&(engine, key)).copied();
        match (kind, object) {
            (Kind::Exist, object) => Answer::done(u64::from(object.is_some())),
            (Kind::Get | Kind::Remove, None) => missing,
            (Kind::Get, Some(size)) if size > len => Answer::too_small(u64::from(size)),
            (Kind::Get, Some(size)) => Answer::done(u64::from(size)),
            (Kind::Remove, Some(_)) => {
                self.objects.remove(&(engine, key));
                Answer::done(0)
            }
            (Kind::Put, Some(_)) => Answer::failed(code::EXISTS),
            (Kind::Put, None) => {
                self.objects.insert((engine, key), len);
                Answer::done(u64::from(len))
            }
        }
    }
}
