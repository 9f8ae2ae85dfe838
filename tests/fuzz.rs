//! Random sequences of every public call, with arguments that nobody should give, on tiny rings with real pollers: nothing
//! panics, and every accepted entry ends once. The core under injected faults and a virtual clock is `src/simulation`'s; what
//! is tried here is the surface.
//!
//! Seeds are printed when they fail. `MOONRING_FUZZ_SEEDS=N` runs N of them instead of a few, `MOONRING_FUZZ_FROM=S` begins at
//! another than 0. Threads run as they like, so a seed gives the same calls and not the same order of ends.

mod common;

use std::collections::HashMap;
use std::future::Future;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::LIMIT;
use fastrand::Rng;
use moonring::fence::{self, Progress, Signaller, Timeline, TimelineSignaller};
use moonring::opcode::{
    Cancel, Exist, Get, LinkTimeout, MsgRing, Nop, Put, Read, ReadPages, Readv, Remove, Select, Timeout, TimeoutRemove,
    TimeoutUpdate, Wait, Write, WritePages, Writev,
};
use moonring::sim::Sim;
use moonring::{
    Completion, Controller, Cqe, CqeFlags, Engine, Entry, EntryFlags, EntryFuture, Fence, Messages, Refusal, Region,
    RegionInfo, Registered, Remote, Ring, Segment, Slice, Submission, SubmissionQueue, Submitter, store,
};

const MS: Duration = Duration::from_millis(1);
const BYTES: usize = 1 << 16;

/// What is known of an accepted entry.
#[derive(Clone, Copy, Debug, Default)]
struct Fate {
    ring: usize,
    /// It may end without a completion: it, or a member of its chain before it, asks for none on success.
    silent: bool,
    /// A message's: on another ring than the sender's, if it is sent at all.
    message: bool,
    more: u32,
    last: u32,
    notifs: u32,
}

/// A ring, whole or in halves.
enum Either {
    Whole(Ring),
    Halves(Submission, Completion),
}

impl Either {
    fn submission(&mut self) -> SubmissionQueue<'_> {
        match self {
            Either::Whole(ring) => ring.submission(),
            Either::Halves(submission, _) => submission.submission(),
        }
    }

    fn submit(&mut self) -> bool {
        match self {
            Either::Whole(ring) => ring.submit().is_ok(),
            Either::Halves(submission, _) => submission.submit().is_ok(),
        }
    }

    fn reap(&mut self, most: usize) -> Vec<Cqe> {
        match self {
            Either::Whole(ring) => ring.completion().take(most).collect(),
            Either::Halves(_, completion) => completion.completion().take(most).collect(),
        }
    }

    /// Any answer will do; it comes in time.
    fn wait(&mut self, rng: &mut Rng) {
        let (count, limit) = (rng.choice([0, 1, 2, usize::MAX]).unwrap(), MS / rng.u32(1..100));
        let _ = match self {
            Either::Whole(ring) if rng.bool() => ring.wait_timeout(count, limit),
            Either::Whole(ring) => ring.wait_min(count, limit / 2, limit),
            Either::Halves(_, completion) if rng.bool() => completion.wait_timeout(count, limit),
            Either::Halves(_, completion) => completion.wait_min(count, limit * 2, limit),
        };
    }

    fn controller(&self) -> Controller {
        match self {
            Either::Whole(ring) => ring.controller(),
            Either::Halves(submission, _) => submission.controller(),
        }
    }

    fn submitter(&mut self) -> Submitter {
        match self {
            Either::Whole(ring) => ring.submitter(),
            Either::Halves(submission, _) => submission.submitter(),
        }
    }

    fn messages(&mut self) -> Messages {
        match self {
            Either::Whole(ring) => ring.messages(),
            Either::Halves(submission, _) => submission.messages(),
        }
    }

    /// What an event loop does with its descriptor.
    fn eventfd(&mut self, rng: &mut Rng) {
        let eventfd = match self {
            Either::Whole(ring) => ring.eventfd(),
            Either::Halves(_, completion) => completion.eventfd(),
        };
        let eventfd = eventfd.unwrap();
        assert!(eventfd.as_raw_fd() >= 0);
        match rng.u8(0..3) {
            0 => drop(eventfd.clear()),
            1 => eventfd.mute(),
            _ => eventfd.unmute(),
        }
    }

    fn split(self) -> Either {
        match self {
            Either::Whole(ring) => {
                let (submission, completion) = ring.split();
                Either::Halves(submission, completion)
            }
            halves => halves,
        }
    }
}

/// Who pushes: the owner, or a submitter. What it has pushed of a chain that is open.
struct Pusher {
    ring: usize,
    submitter: Option<Submitter>,
    /// The last entry is linked to a next one; a member of the chain asked for no completion.
    chain: Option<bool>,
}

struct World {
    rng: Rng,
    rings: Vec<Option<Either>>,
    pushers: Vec<Pusher>,
    messages: Vec<(usize, Messages)>,
    engine: Engine,
    ours: Registered,
    theirs: Registered,
    segments: Vec<Segment>,
    memory: store::Memory,
    store: store::Client,
    signallers: Vec<Signaller>,
    fences: Vec<Fence>,
    timelines: Vec<(TimelineSignaller, Timeline)>,
    progress: Vec<Progress>,
    futures: Vec<(u64, EntryFuture<Vec<u8>>)>,
    fates: HashMap<u64, Fate>,
    next: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng::with_seed(seed);
        let (engine, other) = if rng.bool() {
            (Engine::loopback(), Engine::loopback())
        } else {
            let sim = Sim::new(seed)
                .delay(Duration::ZERO..MS / rng.u32(1..50))
                .failures(rng.u32(0..300))
                .unquiet(rng.u32(0..300))
                .partial_submits(rng.u32(0..500))
                .merged(rng.choice([0, 64, 1 << 16]).unwrap())
                .longest(rng.choice([1 << 12, u32::MAX]).unwrap());
            let engine = Engine::sim(sim);
            (engine.clone(), engine)
        };
        let ours = engine.register(Region::alloc(BYTES).unwrap()).unwrap();
        let theirs = other.register(Region::alloc(BYTES).unwrap()).unwrap();
        let mut segments = vec![engine.open_segment(other.name(), LIMIT).unwrap()];
        segments.extend(engine.open_segment("sim/1", LIMIT));
        let memory = store::Memory::new(1 << 14);
        let store = store::Client::memory(&engine, &memory).unwrap();
        store.register(&ours).unwrap();
        let builder = || Ring::builder().grace(MS * 50);
        let first = builder().build(rng.u32(1..=3), &engine).unwrap();
        let second = if rng.bool() { builder().attach(&first) } else { builder() };
        let second = second.build(rng.choice([1, 2, 3, 16]).unwrap(), &engine).unwrap();
        let rings = vec![Some(Either::Whole(first)), Some(Either::Whole(second))];
        let pushers = (0..2).map(|ring| Pusher { ring, submitter: None, chain: None }).collect();
        let timelines = (0..2).map(|_| fence::timeline(rng.choice([0, 1, u64::MAX - 1]).unwrap())).collect();
        let progress = (1..3).map(fence::progress).collect();
        World {
            rng,
            rings,
            pushers,
            messages: vec![],
            engine,
            ours,
            theirs,
            segments,
            memory,
            store,
            signallers: vec![],
            fences: vec![],
            timelines,
            progress,
            futures: vec![],
            fates: HashMap::new(),
            next: 0,
        }
    }

    /// A number of any size, the odd ones included.
    fn number(&mut self) -> u64 {
        let number = self.rng.u64(..);
        let small = self.rng.u64(0..BYTES as u64 + 2);
        self.rng.choice([0, 1, small, small, small, number, u64::MAX, 1 << 31, 1 << 32]).unwrap()
    }

    fn span(&mut self) -> Duration {
        let micros = Duration::from_micros(self.rng.u64(0..3000));
        self.rng.choice([Duration::ZERO, Duration::from_nanos(1), micros, micros, Duration::MAX]).unwrap()
    }

    /// A `user_data` of its own, or an old one for who looks for it.
    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next | self.rng.u64(..) << 32
    }

    fn known(&mut self) -> u64 {
        let at = self.rng.usize(0..=self.fates.len());
        self.fates.keys().nth(at).copied().unwrap_or(self.next)
    }

    fn slice(&mut self) -> Slice {
        let [start, end] = [0; 2].map(|_| self.number() as usize);
        let whole = self.ours.slice(0..self.rng.usize(0..512)).unwrap();
        self.ours.slice(start..end).unwrap_or(whole)
    }

    fn segment(&mut self) -> Segment {
        self.segments[self.rng.usize(0..self.segments.len())].clone()
    }

    fn remote(&mut self) -> Remote {
        let segment = self.segment();
        let (offset, len) = (self.number(), self.number());
        let sound = segment.slice(&self.theirs.info(), offset, len);
        let address = self.number().wrapping_add(self.theirs.address());
        match sound {
            Ok(sound) if self.rng.bool() => sound,
            _ if self.rng.u8(0..4) == 0 => segment.at(self.number()),
            _ => segment.at(address),
        }
    }

    fn parts(&mut self) -> Vec<(Slice, Remote)> {
        let count = self.rng.choice([0, 1, 2, 5, Entry::MAX_PARTS, Entry::MAX_PARTS + 1]).unwrap();
        let segment = self.segment();
        let strange = self.rng.u8(0..4) == 0;
        (0..count)
            .map(|part| match strange {
                true => (self.slice(), self.remote()),
                false => (
                    self.ours.slice(part * 8..part * 8 + 8).unwrap(),
                    segment.at(self.theirs.address() + part as u64 * 8),
                ),
            })
            .collect()
    }

    fn pages(&mut self) -> (Slice, Remote, usize, Vec<(u32, u32)>) {
        let size = self.number() as usize;
        let size = self.rng.choice([size, 0, 64, 64, 4096, usize::MAX]).unwrap();
        let count = self.rng.usize(0..5);
        let number = |rng: &mut Rng| {
            let small = rng.u32(0..16);
            rng.choice([small, small, small, u32::MAX]).unwrap()
        };
        let pages = (0..count).map(|_| (number(&mut self.rng), number(&mut self.rng))).collect();
        let whole = self.ours.slice(..).unwrap();
        (whole, self.remote(), size, pages)
    }

    fn key(&mut self) -> String {
        let long = "k".repeat(self.rng.usize(0..2000));
        let choices = ["", "a", "b", "c", "held", "\0", "ü", &long];
        self.rng.choice(choices).unwrap().to_owned()
    }

    fn select(&mut self) -> Select {
        match self.rng.u8(0..5) {
            0 => Select::segment(&self.segment()),
            1 => Select::store(&self.store),
            2 => Select::region(&self.ours),
            3 => Select::any(),
            _ => Select::user_data(self.known()),
        }
    }

    fn cancel(&mut self) -> Cancel {
        let mut cancel = Cancel::new(self.select());
        if self.rng.bool() {
            cancel = cancel.all();
        }
        if self.rng.bool() {
            cancel = cancel.detach();
        }
        cancel
    }

    fn entry(&mut self) -> Entry {
        let span = self.span();
        let entry = match self.rng.u8(0..20) {
            0 => {
                let res = self.number() as i32;
                Nop::new().result(self.rng.choice([res, 0, 1, -5, i32::MIN, i32::MAX, -4096]).unwrap()).build()
            }
            1 => Nop::new().bad().build(),
            2 => Wait::new().build(),
            3 | 4 => Read::new(self.slice(), self.remote()).build(),
            5 | 6 => Write::new(self.slice(), self.remote()).build(),
            7 => Readv::new(self.parts()).build(),
            8 => Writev::new(self.parts()).build(),
            9 => {
                let (local, remote, size, pages) = self.pages();
                ReadPages::new(local, remote, size, pages).build()
            }
            10 => {
                let (local, remote, size, pages) = self.pages();
                WritePages::new(local, remote, size, pages).build()
            }
            11 => {
                let timeout = Timeout::new(span);
                let timeout = if self.rng.bool() { timeout.etime_success() } else { timeout };
                let repeats = self.rng.u32(1..4);
                (if self.rng.bool() { timeout.multishot(repeats) } else { timeout }).build()
            }
            12 => {
                let moment = Instant::now().checked_add(span).unwrap_or_else(Instant::now);
                Timeout::at(moment).multishot(self.rng.u32(..)).build()
            }
            13 => LinkTimeout::new(span).build(),
            14 => TimeoutRemove::new(self.known()).build(),
            15 => TimeoutUpdate::new(self.known(), span).build(),
            16 => self.cancel().build(),
            17 => {
                let (key, slice) = (self.key(), self.slice());
                if self.rng.bool() {
                    Get::new(&self.store, key, slice).build()
                } else {
                    Get::vectored(&self.store, key, vec![slice; self.rng.usize(0..4)]).build()
                }
            }
            18 => {
                let (key, slice) = (self.key(), self.slice());
                Put::new(&self.store, key, slice).build()
            }
            _ => {
                let key = self.key();
                if self.rng.bool() {
                    Exist::new(&self.store, key).build()
                } else {
                    Remove::new(&self.store, key).build()
                }
            }
        };
        self.adorned(entry)
    }

    /// With fences, limits and flags.
    fn adorned(&mut self, mut entry: Entry) -> Entry {
        if self.rng.u8(0..3) == 0 {
            for _ in 0..self.rng.choice([1, 1, 2, 3, Entry::MAX_FENCES + 1]).unwrap() {
                let fence = self.fence();
                entry = entry.wait(&fence);
            }
        }
        if self.rng.u8(0..6) == 0 {
            entry = entry.gate_limit(self.span());
        }
        if self.rng.u8(0..6) == 0 {
            entry = entry.transfer_limit(self.span());
        }
        entry
    }

    fn flags(&mut self) -> EntryFlags {
        let none = EntryFlags::empty();
        let choices = [
            none,
            none,
            none,
            EntryFlags::IO_LINK,
            EntryFlags::IO_HARDLINK,
            EntryFlags::IO_DRAIN,
            EntryFlags::CQE_SKIP_SUCCESS,
            EntryFlags::all(),
            EntryFlags::IO_LINK | EntryFlags::CQE_SKIP_SUCCESS,
        ];
        self.rng.choice(choices).unwrap()
    }

    fn fence(&mut self) -> Fence {
        if self.rng.bool() && !self.fences.is_empty() {
            return self.fences[self.rng.usize(0..self.fences.len())].clone();
        }
        let value = self.number();
        match self.rng.u8(0..3) {
            0 => {
                let at = self.rng.usize(0..2);
                match self.timelines.get(at) {
                    Some((_, timeline)) => timeline.at(value),
                    None => fence::host().1,
                }
            }
            1 => self.progress[self.rng.usize(0..2)].at(value % 4).unwrap_or_else(|_| fence::host().1),
            _ => {
                let (signaller, fence) = fence::host();
                self.signallers.push(signaller);
                self.fences.push(fence.clone());
                fence
            }
        }
    }

    fn accept(&mut self, user_data: u64, ring: usize, flags: EntryFlags, by: usize, to_queue: bool) {
        let skips = flags.contains(EntryFlags::CQE_SKIP_SUCCESS);
        let silent = skips || self.pushers[by].chain == Some(true);
        let linked = flags.intersects(EntryFlags::IO_LINK | EntryFlags::IO_HARDLINK);
        self.pushers[by].chain = linked.then_some(silent);
        if to_queue {
            self.fates.insert(user_data, Fate { ring, silent, ..Fate::default() });
        }
    }

    fn push(&mut self) {
        let by = self.rng.usize(0..self.pushers.len());
        let ring = self.pushers[by].ring;
        if self.rings[ring].is_none() {
            return;
        }
        let user_data = self.fresh();
        let mut flags = self.flags();
        let mut message = None;
        let entry = match self.rng.u8(0..12) {
            0 if !self.messages.is_empty() => {
                let at = self.rng.usize(0..self.messages.len());
                let name = self.fresh();
                message = Some((name, self.messages[at].0));
                let entry = MsgRing::new(&self.messages[at].1, name, self.rng.u32(..)).build();
                self.adorned(entry)
            }
            _ => self.entry(),
        };
        let way = self.rng.u8(0..8);
        if way == 3 {
            // A chain of its own, all or nothing.
            let count = self.rng.usize(0..4);
            let names: Vec<u64> = (0..count).map(|_| self.fresh()).collect();
            let all: Vec<EntryFlags> = (0..count).map(|_| self.flags()).collect();
            let entries =
                names.iter().zip(&all).map(|(&name, &flags)| self.entry().user_data(name).flags(flags)).collect();
            let accepted = match &mut self.pushers[by].submitter {
                Some(submitter) => submitter.push_chain(entries).map_err(|error| error.reason),
                None => {
                    self.rings[ring].as_mut().unwrap().submission().push_chain(entries).map_err(|error| error.reason)
                }
            };
            match accepted {
                Ok(()) => names.iter().zip(all).for_each(|(&name, flags)| self.accept(name, ring, flags, by, true)),
                Err(reason) => sound(&reason),
            }
            return;
        }
        if way == 2 {
            // A future's entry in a chain would be told as any other.
            flags = EntryFlags::empty();
        }
        let entry = entry.user_data(user_data).flags(flags);
        let window = self.rng.usize(0..2);
        let progress = &self.progress[window];
        let mut fenced = None;
        let mut future = None;
        macro_rules! by {
            ($queue:expr) => {{
                let queue = $queue;
                match way {
                    0 => queue.push_fenced(entry).map(|fence| fenced = Some(fence)),
                    1 => queue.push_signalling(entry, progress).map(|_| ()),
                    2 => queue.push_future(entry).map(|made| future = Some(made)),
                    _ => queue.push(entry),
                }
            }};
        }
        let accepted = match &mut self.pushers[by].submitter {
            Some(submitter) => by!(submitter),
            None => by!(&mut self.rings[ring].as_mut().unwrap().submission()),
        };
        match accepted {
            Err(refused) => {
                assert!(!refused.reason.to_string().is_empty());
                sound(&refused.reason);
                if matches!(refused.reason, Refusal::Full { .. }) && self.rng.bool() {
                    self.relieve(ring);
                }
            }
            Ok(()) => {
                self.accept(user_data, ring, flags, by, future.is_none());
                self.fences.extend(fenced);
                if let Some(future) = future {
                    self.futures.push((user_data, future.keep(vec![7; 8])));
                }
                if let Some((name, target)) = message {
                    let fate = Fate { ring: target, message: true, silent: true, ..Fate::default() };
                    self.fates.insert(name, fate);
                }
            }
        }
    }

    /// Makes room in a ring: a tiny one is soon full of what waits for ever.
    fn relieve(&mut self, ring: usize) {
        self.signallers.drain(..).for_each(Signaller::signal);
        self.memory.release("held");
        for by in 0..self.pushers.len() {
            if self.pushers[by].ring == ring {
                self.end_chain(by);
                self.submit(by);
            }
        }
        if let (Some(either), true) = (&self.rings[ring], self.rng.bool()) {
            either.controller().cancel(Cancel::any()).unwrap();
        }
        self.reap(ring, usize::MAX);
    }

    fn submit(&mut self, by: usize) {
        let ring = self.pushers[by].ring;
        let submitted = match (&mut self.pushers[by].submitter, &mut self.rings[ring]) {
            (Some(submitter), _) => submitter.submit().is_ok(),
            (None, Some(ring)) => ring.submit(),
            (None, None) => return,
        };
        assert_eq!(submitted, self.pushers[by].chain.is_none(), "an open chain is refused, and nothing else");
    }

    fn end_chain(&mut self, by: usize) {
        let ring = self.pushers[by].ring;
        match (&mut self.pushers[by].submitter, &mut self.rings[ring]) {
            (Some(submitter), _) => submitter.end_chain(),
            (None, Some(ring)) => ring.submission().end_chain(),
            (None, None) => {}
        }
        self.pushers[by].chain = None;
    }

    fn reap(&mut self, ring: usize, most: usize) {
        let Some(either) = &mut self.rings[ring] else { return };
        for cqe in either.reap(most) {
            self.saw(ring, cqe);
        }
    }

    fn saw(&mut self, ring: usize, cqe: Cqe) {
        let _ = (cqe.result().map_err(|error| error.to_string()), cqe.outcome(), cqe.gate_time(), cqe.wire_time());
        let fate = self.fates.get_mut(&cqe.user_data()).unwrap_or_else(|| panic!("nobody asked for {cqe:?}"));
        assert_eq!(fate.ring, ring, "{cqe:?} on another ring");
        fate.notifs += u32::from(cqe.flags().contains(CqeFlags::NOTIF));
        match cqe.flags().contains(CqeFlags::MORE) {
            true => fate.more += 1,
            false => fate.last += 1,
        }
        assert!(fate.last <= 1, "{cqe:?} after the last: {fate:?}");
        assert!(fate.notifs <= fate.more, "{cqe:?} without a result before: {fate:?}");
    }

    fn step(&mut self) {
        let by = self.rng.usize(0..self.pushers.len());
        let ring = self.rng.usize(0..2);
        match self.rng.u8(0..40) {
            0..=13 => self.push(),
            14..=17 => self.submit(by),
            18 | 19 => self.end_chain(by),
            20..=22 => {
                let most = self.rng.choice([0, 1, usize::MAX]).unwrap();
                self.reap(ring, most);
            }
            23 => {
                if let Some(either) = &mut self.rings[ring] {
                    either.wait(&mut self.rng);
                }
            }
            24 if !self.signallers.is_empty() => {
                let signaller = self.signallers.swap_remove(self.rng.usize(0..self.signallers.len()));
                match self.rng.u8(0..3) {
                    0 => signaller.signal(),
                    1 => signaller.fail(self.number() as i32),
                    _ => drop(signaller),
                }
            }
            25 if !self.timelines.is_empty() => {
                let value = self.number();
                let at = self.rng.usize(0..self.timelines.len());
                if self.rng.u8(0..8) == 0 {
                    self.timelines.swap_remove(at).0.fail(value as i32);
                } else {
                    let ahead = value >= self.timelines[at].1.value();
                    assert_eq!(self.timelines[at].0.signal(value).is_ok(), ahead);
                }
            }
            26 if !self.futures.is_empty() => {
                let at = self.rng.usize(0..self.futures.len());
                match self.rng.u8(0..4) {
                    0 => drop(self.futures.swap_remove(at)),
                    1 => self.futures.swap_remove(at).1.detach(),
                    2 => self.futures[at].1.cancel(),
                    _ => {
                        let fence = self.futures[at].1.fence();
                        self.fences.push(fence);
                    }
                }
            }
            27 => self.poll_futures(),
            28 => {
                let cancel = self.cancel();
                if let Some(either) = &self.rings[ring] {
                    either.controller().cancel(cancel).unwrap();
                }
            }
            29 => {
                let select = self.select();
                if let Some(either) = &self.rings[ring] {
                    let _ = either.controller().quiesce(select, MS / 10);
                }
            }
            30 => {
                if let Some(either) = &self.rings[ring] {
                    let stats = either.controller().stats().unwrap();
                    assert!(stats.total.outstanding <= u64::from(stats.capacity + Ring::CANCEL_RESERVE));
                }
            }
            31 => {
                if let Some(either) = &mut self.rings[ring] {
                    either.eventfd(&mut self.rng);
                }
            }
            32 if self.pushers.len() < 5 => {
                if let Some(either) = &mut self.rings[ring] {
                    let submitter = Some(either.submitter());
                    self.pushers.push(Pusher { ring, submitter, chain: None });
                }
            }
            33 if by >= 2 => drop(self.pushers.swap_remove(by)),
            34 => {
                if let Some(either) = &mut self.rings[ring] {
                    self.messages.push((ring, either.messages()));
                }
            }
            35 => match self.rng.u8(0..4) {
                0 => self.rings[ring] = self.rings[ring].take().map(Either::split),
                1 => self.messages.truncate(1),
                2 => {
                    let at = self.rng.usize(0..self.segments.len());
                    self.segments[at] = self.engine.reopen_segment(self.segments[at].name(), LIMIT).unwrap();
                }
                _ => self.close(ring),
            },
            36 => {
                let (key, code) = (self.key(), self.number() as i32);
                match self.rng.u8(0..4) {
                    0 => self.memory.fail(&key, code),
                    1 if key == "held" => self.memory.hold(&key),
                    _ => self.memory.release(&key),
                }
            }
            37 => self.touch_memory(),
            38 => {
                let at = self.rng.usize(0..=self.fences.len());
                if let Some(fence) = self.fences.get(at) {
                    assert!(!format!("{fence:?}{:?}", fence.status()).is_empty());
                    fence.wait_timeout(Duration::from_micros(10));
                }
            }
            _ => std::thread::sleep(Duration::from_micros(self.rng.u64(0..200))),
        }
    }

    fn touch_memory(&mut self) {
        let [from, to, len] = [0; 3].map(|_| self.number() as usize);
        let _ = self.ours.copy_within(from, to, len);
        let _ = self.ours.read_at(from, &mut vec![0; to % 4096]);
        let _ = self.ours.write_at(from, &vec![1; to % 4096]);
        let bytes: Vec<u8> = (0..from % 64).map(|_| self.rng.u8(..)).collect();
        let _ = RegionInfo::from_bytes(&bytes).map_err(|error| error.to_string());
        let mut bytes = self.theirs.info().to_bytes();
        let at = self.rng.usize(0..bytes.len());
        bytes[at] = self.rng.u8(..);
        let _ = RegionInfo::from_bytes(&bytes);
        let _ = Region::alloc(self.rng.choice([0, 1, usize::MAX]).unwrap());
        let _ = Ring::builder().grace(Duration::ZERO).build(self.rng.choice([0, u32::MAX]).unwrap(), &self.engine);
        let _ = self.engine.open_segment("\0nobody", MS);
        // It may be in use, and is registered with the Store: no, in any case, and nothing changes.
        let other = self.engine.register(Region::alloc(64).unwrap()).unwrap();
        other.unregister().unwrap();
        assert!(other.unregister().is_err());
    }

    fn poll_futures(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        self.futures.retain_mut(|(user_data, future)| match Pin::new(future).poll(&mut context) {
            Poll::Pending => true,
            Poll::Ready(ended) => {
                assert_eq!(ended.completion.user_data(), *user_data);
                let last = ended.notif.unwrap_or(ended.completion);
                // Only what may be touched for ever is kept, by a ring that was closed around it.
                let kept = last.flags().contains(CqeFlags::UNQUIET);
                assert_eq!(ended.buffer.as_deref(), (!kept).then_some(&[7; 8][..]), "{last:?}");
                false
            }
        });
    }

    /// Closes a ring with what it has; the report has what was not reaped.
    fn close(&mut self, ring: usize) {
        for by in 0..self.pushers.len() {
            if self.pushers[by].ring == ring {
                self.end_chain(by);
                self.submit(by);
            }
        }
        let limit = self.rng.choice([Duration::ZERO, MS]).unwrap();
        match self.rings[ring].take() {
            Some(Either::Whole(whole)) => {
                let report = whole.close(limit);
                assert!(report.finished);
                report.completions.into_iter().for_each(|cqe| self.saw(ring, cqe));
                self.check(ring);
                for pusher in self.pushers.iter_mut().filter(|pusher| pusher.ring == ring) {
                    if let Some(submitter) = &mut pusher.submitter {
                        let refused = submitter.push(Nop::new().build()).unwrap_err();
                        assert_eq!(refused.reason, Refusal::Closed);
                    }
                }
            }
            Some(halves) => self.rings[ring] = Some(halves),
            None => {}
        }
    }

    /// Everything that the ring has accepted has ended, once.
    fn check(&self, ring: usize) {
        for (user_data, fate) in self.fates.iter().filter(|(_, fate)| fate.ring == ring) {
            assert!(
                fate.last == 1 || fate.silent && fate.last == 0,
                "{user_data:#x} ended {} times: {fate:?}",
                fate.last
            );
            assert!(!fate.message || fate.more == 0);
        }
    }

    /// Lets everything end, looks whether it has, and says how many entries there were, how many were told twice or more, and
    /// how many ended silently.
    fn finish(mut self) -> [usize; 3] {
        self.memory.release("held");
        self.signallers.drain(..).for_each(Signaller::signal);
        self.timelines.clear();
        for by in 0..self.pushers.len() {
            self.end_chain(by);
            self.submit(by);
        }
        let end = Instant::now() + LIMIT;
        for ring in 0..2 {
            while let Some(controller) = self.rings[ring].as_ref().map(Either::controller) {
                let _ = controller.cancel(Cancel::any());
                (0..2).for_each(|ring| self.reap(ring, usize::MAX));
                let stats = controller.stats().unwrap();
                if stats.total.outstanding == 0 {
                    assert_eq!(stats.total.accepted, stats.total.ok + stats.total.failed + stats.total.cancelled);
                    break;
                }
                assert!(Instant::now() < end, "not ended: {stats:?}");
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        (0..2).for_each(|ring| self.reap(ring, usize::MAX));
        // Told before the counts are made, or with the ring's end.
        self.poll_futures();
        assert!(self.futures.is_empty(), "{} futures of entries that have ended", self.futures.len());
        (0..2).for_each(|ring| self.check(ring));
        self.close(0);
        self.close(1);
        let count = |which: fn(&Fate) -> bool| self.fates.values().filter(|fate| which(fate)).count();
        [self.fates.len(), count(|fate| fate.more > 0), count(|fate| fate.last == 0)]
    }
}

/// No refusal says that the poller died.
fn sound(reason: &Refusal) {
    assert!(!matches!(reason, Refusal::PollerDead | Refusal::Forked), "{reason}");
}

#[test]
fn random_calls_lose_nothing() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (from, count) = (number("MOONRING_FUZZ_FROM").unwrap_or(0), number("MOONRING_FUZZ_SEEDS").unwrap_or(60));
    let mut all = [0; 3];
    for seed in from..from + count {
        let run = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            for _ in 0..500 {
                world.step();
            }
            world.finish()
        });
        let ended = run.unwrap_or_else(|_| panic!("it was with MOONRING_FUZZ_FROM={seed} MOONRING_FUZZ_SEEDS=1"));
        (0..3).for_each(|at| all[at] += ended[at]);
    }
    println!("{count} seeds from {from}: {} entries, {} told twice or more, {} silent", all[0], all[1], all[2]);
    assert!(count < 60 || all[0] > 20 * count as usize && all[1] > 10 && all[2] > 10, "too little was tried: {all:?}");
}
