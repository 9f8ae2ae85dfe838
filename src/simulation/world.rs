//! The world: rings, cores and a transport without threads, a clock that goes when it is told to, and the program's steps.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::book::{Book, CancelBook, Desk, KeyBook, Mark, RingBook, Timeline, lock, mark_of};
use super::futures::Live;
use super::net::{Asked, Gate, Injected, Net};
use super::program::{FenceEnd, HOSTS, POLLED, PlanOp, PolledEnd, Program, RingPlan, Step, TIMELINES, Whom};
use super::record::Truth;
use super::store::Shop;
use super::strips::{self, Strips};
use crate::core::{Closing, Core};
use crate::fence::{self, Fence, Progress, Signaller, TimelineSignaller};
use crate::opcode::{Cancel, Select};
use crate::region::Registered;
use crate::ring::control::Reply;
use crate::store::Client;
use crate::store::pool::Pool;
use crate::transport::{Hint, Nanos};
use crate::{Completion, Controller, Engine, Messages, Ring, Segment, Submitter};

/// What came of a program.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) steps: u64,
    pub(super) faults: u64,
    /// Operations of several entries.
    pub(super) merged: u64,
    /// Entries with futures.
    pub(super) futures: u64,
    /// Keys that Stores were asked for.
    pub(super) asked: u64,
    pub(super) violations: Vec<String>,
    pub(super) trace: Vec<String>,
}

/// A sleeper's ear.
#[derive(Debug, Default)]
pub(super) struct Bell(AtomicBool);

impl Bell {
    pub(super) fn has_rung(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

#[derive(Debug)]
pub(super) struct CoreWorld {
    /// Until its last ring is closed.
    pub(super) core: Option<Core>,
    /// Asleep until a moment, if any, or the bell.
    pub(super) asleep: Option<Option<Nanos>>,
    pub(super) bell: Arc<Bell>,
    pub(super) turns: u64,
}

#[derive(Debug)]
pub(super) struct Producer {
    /// `None` for the ring's owner.
    pub(super) submitter: Option<Submitter>,
    pub(super) number: u64,
    pub(super) unsubmitted: Vec<usize>,
    /// The last entry is linked to the next.
    pub(super) open: Option<usize>,
}

#[derive(Debug)]
pub(super) struct Ending {
    pub(super) closing: Arc<Closing>,
    pub(super) rest: Completion,
    pub(super) deadline: Nanos,
}

#[derive(Debug)]
pub(super) struct RingWorld {
    pub(super) ring: Option<Ring>,
    pub(super) ending: Option<Ending>,
    pub(super) controller: Controller,
    pub(super) core: usize,
    pub(super) engine: usize,
    pub(super) producers: Vec<Producer>,
    /// The next completion's position.
    pub(super) position: u64,
    pub(super) messages: Option<Messages>,
    pub(super) shared_units: bool,
    /// A task waits for a completion.
    pub(super) listens: Option<Arc<Bell>>,
}

#[derive(Debug)]
pub(super) struct EngineWorld {
    pub(super) id: u64,
    pub(super) engine: Option<Engine>,
    pub(super) regions: Vec<Registered>,
    pub(super) strips: Strips,
    /// A client of a Store, and its workers.
    pub(super) store: Option<Client>,
    pub(super) pool: Arc<Pool>,
    pub(super) peers: Vec<Segment>,
    pub(super) gate: Arc<Gate>,
    pub(super) closes_at: Option<Nanos>,
}

#[derive(Debug)]
pub(super) struct Call<T> {
    pub(super) ring: usize,
    pub(super) mark: Mark,
    pub(super) reply: Arc<Reply<T>>,
    /// Its place among the cancels.
    pub(super) at: usize,
    /// The entries that a call that waits for quiet is about.
    pub(super) means: Vec<usize>,
}

#[derive(Debug)]
pub(super) struct World {
    pub(super) program: Program,
    pub(super) now: Nanos,
    pub(super) book: Desk,
    pub(super) cores: Vec<CoreWorld>,
    pub(super) rings: Vec<RingWorld>,
    pub(super) engines: Vec<EngineWorld>,
    pub(super) hosts: Vec<(Option<Signaller>, Fence)>,
    pub(super) timelines: Vec<(Option<TimelineSignaller>, fence::Timeline)>,
    pub(super) polled: Vec<Fence>,
    pub(super) progress: Progress,
    /// Entries that feed a fence.
    pub(super) ends: Vec<(usize, Fence)>,
    pub(super) futures: Vec<Live>,
    pub(super) cancels: Vec<Call<usize>>,
    pub(super) quiesces: Vec<Call<()>>,
    next_producer: u64,
    pub(super) steps: u64,
    /// The program is over: from here on every poller has the turns that it asks for.
    pub(super) closes_all: bool,
}

/// Runs a program.
pub(super) fn run(program: &Program, traced: bool) -> Report {
    let mut world = World::new(program.clone(), traced);
    let steps = program.steps.clone();
    for step in &steps {
        world.step(step);
        if world.is_wrong() {
            break;
        }
    }
    if !world.is_wrong() {
        world.end();
    }
    world.report()
}

impl World {
    fn new(program: Program, traced: bool) -> World {
        let mut book = Book { plans: program.engines.clone(), ..Book::default() };
        book.trace = traced.then(Vec::new);
        book.hosts = vec![Truth::Pending; HOSTS];
        book.timelines = (0..TIMELINES).map(|_| Timeline::default()).collect();
        book.polled = (0..POLLED).map(|_| Default::default()).collect();
        book.ended_engines = vec![false; program.engines.len()];
        let book: Desk = Arc::new(Mutex::new(book));
        let polled = (0..POLLED).map(|number| {
            // Two streams and two that stand alone.
            let group = (number < 4).then_some((number as u64 / 2, number as u64 % 2));
            Fence::polled(Box::new(Asked { number, group, book: Arc::clone(&book) }))
        });
        let mut world = World {
            now: 1_000,
            cores: Vec::new(),
            rings: Vec::new(),
            engines: Vec::new(),
            hosts: (0..HOSTS).map(|_| fence::host()).map(|(signaller, fence)| (Some(signaller), fence)).collect(),
            timelines: (0..TIMELINES).map(|_| fence::timeline(0)).map(|(end, line)| (Some(end), line)).collect(),
            polled: polled.collect(),
            progress: fence::progress(8),
            ends: Vec::new(),
            futures: Vec::new(),
            cancels: Vec::new(),
            quiesces: Vec::new(),
            next_producer: 0,
            steps: 0,
            closes_all: false,
            book,
            program,
        };
        for engine in 0..world.program.engines.len() {
            world.add_engine(engine);
        }
        world.set_now(1_000);
        for plan in world.program.rings.clone() {
            world.add_ring(plan);
        }
        world
    }

    pub(super) fn is_wrong(&self) -> bool {
        !lock(&self.book).violations.is_empty()
    }

    pub(super) fn violate(&self, what: String) {
        lock(&self.book).violate(what);
    }

    fn report(self) -> Report {
        let mut book = lock(&self.book);
        let report = Report {
            steps: self.steps + self.cores.iter().map(|core| core.turns).sum::<u64>(),
            faults: book.faults,
            merged: book.merged,
            asked: book.asked,
            futures: self.futures.len() as u64,
            violations: std::mem::take(&mut book.violations),
            trace: book.trace.take().unwrap_or_default(),
        };
        drop(book);
        if !report.violations.is_empty() {
            // Rings that are dropped wait for a core that nobody gives turns to.
            self.engines.iter().for_each(|engine| engine.gate.open());
            std::mem::forget(self);
        } else {
            let book = Arc::clone(&self.book);
            drop(self);
            // They name fences that ask the book, which would keep itself for ever.
            let records = std::mem::take(&mut lock(&book).records);
            drop(records);
        }
        report
    }

    fn add_engine(&mut self, engine: usize) {
        let gate = Arc::new(Gate::default());
        let (_, closes) = self.program.ending.close;
        let net = Net { engine, book: Arc::clone(&self.book), gate: Arc::clone(&gate), closes };
        let handle = Engine::over(Arc::new(net));
        let region = |range: std::ops::Range<u64>| {
            // SAFETY: nothing reads or writes it: the transport moves nothing.
            let region = unsafe { handle.register_foreign(range.start, range.end - range.start, "cpu:0") };
            region.expect("no other region is there")
        };
        let regions: Vec<Registered> = strips::regions().map(region).into();
        let shop = Shop { engine, book: Arc::clone(&self.book) };
        let store = Client::without_threads(&handle, self.program.engines[engine].workers, Box::new(shop));
        store.register(&regions[0]).expect("the Store takes it");
        let pool = Arc::clone(&store.inner.pool);
        let count = self.program.engines[engine].peers;
        let peers = (0..count).map(|peer| handle.open_here(&format!("peer{peer}"), false)).collect();
        let id = handle.id();
        self.engines.push(EngineWorld {
            id,
            engine: Some(handle),
            regions,
            strips: Strips::default(),
            store: Some(store),
            pool,
            peers,
            gate,
            closes_at: None,
        });
    }

    fn add_ring(&mut self, plan: RingPlan) {
        let engine = plan.engine as usize % self.engines.len();
        let Some(handle) = self.engines[engine].engine.clone() else { return };
        let index = self.rings.len();
        let builder = Ring::builder();
        // A core's first ring brings it; further ones are attached to one that lives.
        let mut core = plan.core as usize;
        let ring = if index < self.program.rings.len() && core >= self.cores.len() {
            core = self.cores.len();
            let ring = builder.without_poller(plan.entries, &handle);
            let new = Core::new(ring.controls(), plan.idle);
            self.cores.push(CoreWorld { core: Some(new), asleep: None, bell: Arc::default(), turns: 0 });
            lock(&self.book).dead.push(false);
            ring
        } else {
            core %= self.cores.len();
            let host = self.rings.iter().filter(|ring| ring.core == core).find_map(|ring| ring.ring.as_ref());
            let Some(host) = host else { return };
            builder.attach(host).without_poller(plan.entries, &handle)
        };
        lock(&self.book).rings.push(RingBook {
            core,
            capacity: u64::from(plan.entries),
            closing: false,
            coming_back: 0,
            deadline: None,
            grace: None,
            gives_up: None,
            finished: false,
            overflowing: false,
            drains: false,
            met: Default::default(),
            keys: [KeyBook::default(); 2],
        });
        let producers = vec![self.new_producer(None)];
        let controller = ring.controller();
        let (messages, ending, listens) = (None, None, None);
        let ring = Some(ring);
        self.rings.push(RingWorld {
            ring,
            ending,
            controller,
            core,
            engine,
            producers,
            position: 0,
            messages,
            shared_units: false,
            listens,
        });
    }

    fn new_producer(&mut self, submitter: Option<Submitter>) -> Producer {
        self.next_producer += 1;
        Producer { submitter, number: self.next_producer, unsubmitted: Vec::new(), open: None }
    }

    pub(super) fn set_now(&mut self, now: Nanos) {
        let before = std::mem::replace(&mut self.now, now);
        let mut book = lock(&self.book);
        // Drivers that wake their pollers do so when something becomes due.
        let due: Vec<_> = (0..book.drivers.len())
            .filter(|&driver| book.wakes_between(driver, before, now))
            .map(|driver| book.drivers[driver].waker.clone())
            .collect();
        book.now = now;
        drop(book);
        due.iter().for_each(|waker| waker.wake());
        self.end_shifts();
    }

    fn step(&mut self, step: &Step) {
        self.steps += 1;
        if lock(&self.book).trace.is_some() && !matches!(step, Step::Turn { .. }) {
            lock(&self.book).say(|| format!("{step:?}"));
        }
        let rings = self.rings.len();
        let of = |ring: u8| ring as usize % rings;
        match *step {
            Step::Push { ring, producer, whole, ref entries } => self.push(of(ring), producer, whole, entries),
            Step::Submit { ring, producer } => self.submit(of(ring), producer),
            Step::Reap { ring, most } => self.reap(of(ring), usize::from(most)),
            Step::Listen { ring } => self.listen(of(ring)),
            Step::Turn { core } => {
                let core = core as usize % self.cores.len();
                if self.is_runnable(core) {
                    self.turn(core);
                }
            }
            Step::Pass(span) => self.set_now(self.now + span),
            Step::Host { fence, end } => self.end_host(fence as usize % HOSTS, end),
            Step::Timeline { timeline, by } => self.move_timeline(timeline as usize % TIMELINES, by),
            Step::EndTimeline { timeline, end } => self.end_timeline(timeline as usize % TIMELINES, end),
            Step::Polled { fence, end } => self.answer(fence as usize % POLLED, end),
            Step::Control { ring, what, all, detach } => self.control(of(ring), what, all, detach),
            Step::Quiesce { ring, what } => self.quiesce(of(ring), what),
            Step::Submitter { ring } => self.add_submitter(of(ring)),
            Step::DropSubmitter { ring, producer } => self.drop_submitter(of(ring), producer),
            Step::Future { which, ask } => self.ask(which, ask),
            Step::Stall { engine, peer, span } => {
                if let Some((engine, target)) = self.target(engine, peer) {
                    lock(&self.book).stall(engine, target, self.now + span);
                }
            }
            Step::Partial { engine, peer, take } => {
                if let Some((engine, target)) = self.target(engine, peer) {
                    lock(&self.book).partial(engine, target, take);
                }
            }
            Step::Linger { engine, span } => {
                lock(&self.book).linger(engine as usize % self.engines.len(), self.now + span);
            }
            Step::Break { engine, at } => lock(&self.book).break_at(engine as usize % self.engines.len(), at),
            Step::Reopen { engine, peer } => self.reopen(engine as usize % self.engines.len(), peer),
            Step::Close { ring, grace } => self.close(of(ring), grace),
            Step::Ring(plan) => self.add_ring(plan),
        }
    }

    fn target(&self, engine: u8, peer: u8) -> Option<(usize, u32)> {
        let engine = engine as usize % self.engines.len();
        let peers = &self.engines[engine].peers;
        Some((engine, peers.get(peer as usize % peers.len())?.inner.target))
    }

    pub(super) fn is_runnable(&self, core: usize) -> bool {
        let core = &self.cores[core];
        core.core.is_some()
            && match core.asleep {
                None => true,
                Some(until) => core.bell.has_rung() || until.is_some_and(|until| until <= self.now),
            }
    }

    /// A poller's turn, and how it waits then.
    pub(super) fn turn(&mut self, at: usize) {
        let ready = self.before_turn(at);
        let now = self.now;
        let place = &mut self.cores[at];
        place.turns += 1;
        place.asleep = None;
        let core = place.core.as_mut().expect("a runnable core is there");
        let turned = catch_unwind(AssertUnwindSafe(|| core.turn(now)));
        let hint = match turned {
            Ok(hint) => hint,
            Err(payload) if payload.is::<Injected>() => {
                core.bury();
                lock(&self.book).dead[at] = true;
                Hint::Now
            }
            Err(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("?").to_owned();
                self.violate(format!("the core panicked: {text}"));
                return;
            }
        };
        let done = core.is_done();
        lock(&self.book).say(|| format!("turn of core {at}: {hint:?}"));
        self.after_turn(at, ready);
        if done {
            self.cores[at].core = None;
            return;
        }
        self.watch_engines(at);
        if let Hint::Sleep { until } = hint
            && until.is_none_or(|until| until > now)
        {
            self.fall_asleep(at, until);
        }
    }

    fn fall_asleep(&mut self, at: usize, until: Option<Nanos>) {
        let place = &mut self.cores[at];
        // A new bell: the last one may ring late.
        place.bell = Arc::default();
        let core = place.core.as_ref().expect("it just had its turn");
        let waker = Waker::from(Arc::clone(&place.bell));
        if !core.doorbell().poll(0, &waker, || core.has_input()) {
            place.asleep = Some(until);
            self.check_sleep(at, until);
        }
    }

    /// An engine that a thread of its own ends is ended when its time has come, and no sooner.
    fn watch_engines(&mut self, at: usize) {
        let Some(core) = &self.cores[at].core else { return };
        let span = self.program.ending.close.0;
        for id in core.ending_engines() {
            let engine = self.engines.iter_mut().find(|engine| engine.id == id);
            engine.expect("it is one of ours").closes_at.get_or_insert(self.now + span);
        }
    }

    pub(super) fn open_gates(&mut self) {
        for at in 0..self.engines.len() {
            let engine = &mut self.engines[at];
            if engine.closes_at.take_if(|at| *at <= self.now).is_none() {
                continue;
            }
            let id = engine.id;
            let ends_it = |core: &Core| core.ending_engines().any(|other| other == id);
            let here = |&at: &usize| self.cores[at].core.as_ref().is_some_and(ends_it);
            let cores: Vec<_> = (0..self.cores.len()).filter(here).collect();
            self.engines[at].gate.open();
            cores.into_iter().for_each(|core| self.await_end(core, id));
        }
    }

    /// Waits for the thread that ends an engine, which is not part of the simulation.
    fn await_end(&mut self, core: usize, engine: u64) {
        let start = std::time::Instant::now();
        let place = &self.cores[core];
        let Some(alive) = &place.core else { return };
        let asleep = place.asleep.is_some();
        while alive.ending_engines().any(|id| id == engine) || (asleep && !place.bell.has_rung()) {
            if start.elapsed() > Duration::from_secs(5) {
                self.violate("the end of an engine was not told to the poller".into());
                return;
            }
            std::thread::yield_now();
        }
    }

    fn submit(&mut self, ring: usize, producer: u8) {
        let count = self.rings[ring].producers.len();
        self.submit_of(ring, producer as usize % count);
    }

    pub(super) fn submit_of(&mut self, at: usize, producer: usize) {
        let place = &mut self.rings[at];
        let from = &mut place.producers[producer];
        let submitted = match (&mut from.submitter, &mut place.ring) {
            (Some(submitter), _) => submitter.submit(),
            (None, Some(ring)) => ring.submit(),
            (None, None) => return,
        };
        match (submitted, from.open) {
            (Ok(count), None) if count == from.unsubmitted.len() => {}
            (Err(_), Some(_)) => return,
            (got, open) => {
                let text = format!("a submit gave {got:?} with {} entries, open at {open:?}", from.unsubmitted.len());
                self.violate(text);
                return;
            }
        }
        self.mark_submitted(at, producer);
    }

    pub(super) fn mark_submitted(&mut self, ring: usize, producer: usize) {
        let turns = self.cores[self.rings[ring].core].turns;
        let mut book = lock(&self.book);
        for uid in self.rings[ring].producers[producer].unsubmitted.drain(..) {
            book.records[uid].submitted = Some(turns);
        }
    }

    /// Takes the link off the last entry.
    pub(super) fn end_chain(&mut self, at: usize, producer: usize) {
        let place = &mut self.rings[at];
        let from = &mut place.producers[producer];
        let Some(open) = from.open.take() else { return };
        match (&mut from.submitter, &mut place.ring) {
            (Some(submitter), _) => submitter.end_chain(),
            (None, Some(ring)) => ring.submission().end_chain(),
            (None, None) => {}
        }
        lock(&self.book).records[open].flags.remove(crate::EntryFlags::CHAINED);
    }

    pub(super) fn reap(&mut self, at: usize, most: usize) {
        let place = &mut self.rings[at];
        place.listens = None;
        if let Some(ring) = &mut place.ring {
            ring.completion().take(most.max(1)).for_each(drop);
        }
    }

    fn listen(&mut self, at: usize) {
        let place = &mut self.rings[at];
        let Some(ring) = &mut place.ring else { return };
        let bell = Arc::<Bell>::default();
        let waker = Waker::from(Arc::clone(&bell));
        let next = pin!(ring.next()).poll(&mut Context::from_waker(&waker));
        place.listens = matches!(next, Poll::Pending).then_some(bell);
    }

    pub(super) fn end_host(&mut self, at: usize, end: FenceEnd) {
        let Some(signaller) = self.hosts[at].0.take() else { return };
        let truth = match end {
            FenceEnd::Signal => Truth::Signalled,
            FenceEnd::Fail(root) => Truth::dependency(root),
            FenceEnd::Drop => Truth::dependency(crate::code::errno::EOWNERDEAD),
        };
        let mut book = lock(&self.book);
        book.hosts[at] = truth;
        book.faults += u64::from(end != FenceEnd::Signal);
        drop(book);
        match end {
            FenceEnd::Signal => signaller.signal(),
            FenceEnd::Fail(root) => signaller.fail(root),
            FenceEnd::Drop => drop(signaller),
        }
    }

    fn move_timeline(&mut self, at: usize, by: u64) {
        let mut book = lock(&self.book);
        let Some(signaller) = &mut self.timelines[at].0 else { return };
        book.timelines[at].value += by;
        let value = book.timelines[at].value;
        drop(book);
        signaller.signal(value).expect("it only grows");
    }

    pub(super) fn end_timeline(&mut self, at: usize, end: FenceEnd) {
        let Some(mut signaller) = self.timelines[at].0.take() else { return };
        let mut book = lock(&self.book);
        let timeline = &mut book.timelines[at];
        let root = match end {
            FenceEnd::Signal => None,
            FenceEnd::Fail(root) => Some(root),
            FenceEnd::Drop => Some(crate::code::errno::EOWNERDEAD),
        };
        match root {
            None => timeline.value += 1_000,
            Some(root) => timeline.failed = Some(root),
        }
        let value = timeline.value;
        book.faults += u64::from(root.is_some());
        drop(book);
        match end {
            FenceEnd::Signal => {
                signaller.signal(value).expect("it only grows");
                self.timelines[at].0 = Some(signaller);
            }
            FenceEnd::Fail(root) => signaller.fail(root),
            FenceEnd::Drop => drop(signaller),
        }
    }

    /// A polled fence answers from now on; those before it on its stream too.
    pub(super) fn answer(&mut self, at: usize, end: PolledEnd) {
        let mut book = lock(&self.book);
        if at < 4 && at % 2 == 1 {
            book.polled[at - 1].answer.get_or_insert(PolledEnd::Signal);
        }
        let place = &mut book.polled[at].answer;
        let news = place.is_none();
        place.get_or_insert(end);
        book.faults += u64::from(news && end != PolledEnd::Signal);
    }

    fn control(&mut self, ring: usize, what: Whom, all: bool, detach: bool) {
        let (select, mark) = self.select(ring, what);
        let mut cancel = Cancel::new(select);
        if all {
            cancel = cancel.all();
        }
        if detach {
            cancel = cancel.detach();
        }
        self.cancel_by_call(ring, cancel, mark);
    }

    pub(super) fn cancel_by_call(&mut self, ring: usize, cancel: Cancel, mark: Mark) {
        if self.rings[ring].ring.is_none() {
            return;
        }
        let reply = self.rings[ring].controller.begin_cancel(cancel);
        let mut book = lock(&self.book);
        book.cancels.push(CancelBook { ring, whom: mark, by: None, timeouts_only: false, future: false, over: None });
        let at = book.cancels.len() - 1;
        self.cancels.push(Call { ring, mark, reply, at, means: Vec::new() });
    }

    fn quiesce(&mut self, ring: usize, what: Whom) {
        if self.rings[ring].ring.is_none() {
            return;
        }
        let (select, mark) = self.select(ring, what);
        let reply = self.rings[ring].controller.begin_quiesce(select);
        let book = lock(&self.book);
        let means = |&uid: &usize| {
            let record = &book.records[uid];
            record.ring == ring && record.submitted.is_some() && book.is_marked(mark, uid)
        };
        let means = (0..book.records.len()).filter(means).collect();
        self.quiesces.push(Call { ring, mark, reply, at: 0, means });
    }

    pub(super) fn select(&self, ring: usize, whom: Whom) -> (Select, Mark) {
        let engine = &self.engines[self.rings[ring].engine];
        let book = lock(&self.book);
        let mut back = None;
        if let Whom::Back(count) = whom {
            let mut own = (0..book.records.len()).rev().filter(|&uid| book.records[uid].ring == ring);
            back = own.clone().nth(count as usize).or_else(|| own.next_back());
        }
        let key = back.and_then(|uid| book.records[uid].plan.key);
        let peer = match whom {
            Whom::Peer(peer) => Some(engine.peers[peer as usize % engine.peers.len()].clone()),
            _ => None,
        };
        let mark = mark_of(whom, back, peer.as_ref().map(|peer| peer.inner.target));
        let mark = key.map_or(mark, Mark::Key);
        let select = match (mark, peer) {
            (Mark::Entry(uid), _) => Select::user_data(Book::user_data(uid, None)),
            (Mark::Key(key), _) => Select::user_data(u64::from(key)),
            (_, Some(peer)) => Select::segment(&peer),
            (Mark::Nobody, _) => Select::user_data(u64::MAX),
            (Mark::Region, _) => Select::region(&engine.regions[0]),
            _ => Select::any(),
        };
        (select, mark)
    }

    fn add_submitter(&mut self, at: usize) {
        let Some(ring) = &mut self.rings[at].ring else { return };
        let submitter = ring.submitter();
        let producer = self.new_producer(Some(submitter));
        self.rings[at].shared_units = true;
        self.rings[at].producers.push(producer);
    }

    fn drop_submitter(&mut self, at: usize, producer: u8) {
        let count = self.rings[at].producers.len();
        let producer = producer as usize % count;
        if producer > 0 {
            self.remove_submitter(at, producer);
        }
    }

    pub(super) fn remove_submitter(&mut self, at: usize, producer: usize) {
        self.end_chain(at, producer);
        self.mark_submitted(at, producer);
        self.rings[at].producers.remove(producer);
    }

    fn reopen(&mut self, engine: usize, peer: u8) {
        let place = &mut self.engines[engine];
        let Some(handle) = &place.engine else { return };
        let at = peer as usize % place.peers.len();
        let mut book = lock(&self.book);
        book.stale.insert((engine, place.peers[at].inner.target));
        book.faults += 1;
        drop(book);
        place.peers[at] = handle.open_here(&format!("peer{at}"), true);
    }

    pub(super) fn close(&mut self, at: usize, grace: Nanos) {
        if self.rings[at].ring.is_none() {
            return;
        }
        self.end_chain(at, 0);
        self.mark_submitted(at, 0);
        let place = &mut self.rings[at];
        let Some(ring) = place.ring.take() else { return };
        let (closing, rest) = ring.begin_close(Duration::from_nanos(grace));
        place.listens = None;
        place.ending = Some(Ending { closing, rest, deadline: self.now + grace });
        let mut book = lock(&self.book);
        let ring = &mut book.rings[at];
        (ring.closing, ring.deadline, ring.grace) = (true, Some(self.now + grace), Some(grace));
    }

    /// The timeouts that never end by themselves.
    pub(super) fn endless(&self) -> Vec<(usize, usize)> {
        let book = lock(&self.book);
        let endless = |(uid, record): (usize, &super::record::Record)| {
            let ticks = matches!(record.plan.op, PlanOp::Timeout { repeats: Some(0), .. });
            (ticks && record.ended.is_none()).then_some((record.ring, uid))
        };
        book.records.iter().enumerate().filter_map(endless).collect()
    }
}
