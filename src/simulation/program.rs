//! Random programs: what producers, reapers, signallers, pollers and the transport do, step by step.
//!
//! A program is a list of steps that name what they are about by small numbers, taken modulo what there is, so that any
//! part of one is a program too: that is how a failing one is made smaller.

use fastrand::Rng;

use crate::code::errno;
use crate::entry::EntryFlags;
use crate::store::request::Kind;
use crate::transport::Nanos;

/// What a program runs on, and what it does.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub(super) engines: Vec<EnginePlan>,
    pub(super) rings: Vec<RingPlan>,
    pub(super) steps: Vec<Step>,
    pub(super) ending: EndingPlan,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct EnginePlan {
    pub(super) max_batch: u32,
    pub(super) max_in_flight: u32,
    /// Bytes; 0 for no merging.
    pub(super) max_merged: u32,
    /// Threads that make calls of a Store.
    pub(super) workers: u32,
    pub(super) peers: u8,
    pub(super) wait: Waiting,
    pub(super) threads_here: bool,
}

/// How a driver says that its poller should wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiting {
    /// Until its next operation is due.
    Until,
    Yield,
    /// For ever: it wakes the poller itself.
    Wakes,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RingPlan {
    pub(super) core: u8,
    pub(super) engine: u8,
    pub(super) entries: u32,
    pub(super) idle: Nanos,
}

/// How a program ends: everything is submitted and every fence settled first.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndingPlan {
    /// What the transport has lost turns up.
    pub(super) found: bool,
    /// Everything is cancelled before the rings close.
    pub(super) cancel: bool,
    pub(super) grace: Nanos,
    /// Nobody but the rings uses the engines, so the last ring ends them.
    pub(super) alone: bool,
    /// How long the transports take to close, and whether they succeed.
    pub(super) close: (Nanos, bool),
    /// How the fences end that are not final: signalled, failed, dropped.
    pub(super) fences: FenceEnd,
}

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Pushes entries one by one, or all of them or none.
    Push {
        ring: u8,
        producer: u8,
        whole: bool,
        entries: Vec<Plan>,
    },
    Submit {
        ring: u8,
        producer: u8,
    },
    Reap {
        ring: u8,
        most: u8,
    },
    /// A task asks for the next completion and, if there is none, waits.
    Listen {
        ring: u8,
    },
    /// A turn of a poller that is awake, or that is to wake up.
    Turn {
        core: u8,
    },
    Pass(Nanos),
    Host {
        fence: u8,
        end: FenceEnd,
    },
    Timeline {
        timeline: u8,
        by: u64,
    },
    EndTimeline {
        timeline: u8,
        end: FenceEnd,
    },
    Polled {
        fence: u8,
        end: PolledEnd,
    },
    Control {
        ring: u8,
        what: Whom,
        all: bool,
        detach: bool,
    },
    Quiesce {
        ring: u8,
        what: Whom,
    },
    Submitter {
        ring: u8,
    },
    DropSubmitter {
        ring: u8,
        producer: u8,
    },
    /// The owner of a future, counted from the youngest, does something with it.
    Future {
        which: u8,
        ask: Ask,
    },
    /// A peer takes nothing for a while.
    Stall {
        engine: u8,
        peer: u8,
        span: Nanos,
    },
    /// The next submit to a peer takes so many only.
    Partial {
        engine: u8,
        peer: u8,
        take: u8,
    },
    /// The driver has something to look after when all operations have ended.
    Linger {
        engine: u8,
        span: Nanos,
    },
    /// The driver panics.
    Break {
        engine: u8,
        at: Break,
    },
    Reopen {
        engine: u8,
        peer: u8,
    },
    Close {
        ring: u8,
        grace: Nanos,
    },
    Ring(RingPlan),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FenceEnd {
    Signal,
    Fail(i32),
    Drop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolledEnd {
    Signal,
    Fail(i32),
    Panic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Break {
    Making,
    /// After so many operations were started.
    Submit(u8),
    Poll,
    Settle,
}

/// Whom a cancel means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whom {
    /// The entry accepted so many before.
    Back(u8),
    Key(u8),
    Peer(u8),
    Region,
    Any,
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) op: PlanOp,
    pub(super) flags: EntryFlags,
    pub(super) waits: Vec<Wait>,
    pub(super) gate_limit: Nanos,
    pub(super) transfer_limit: Nanos,
    /// Shares its `user_data` with others of the key.
    pub(super) key: Option<u8>,
    pub(super) feeds: Feeds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Feeds {
    Nothing,
    Fence,
    Progress,
    Future,
}

/// What the owner of a future does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Poll,
    Result,
    Cancel,
    Drop,
    Detach,
}

#[derive(Clone, Debug)]
pub(super) enum PlanOp {
    Nop(i32),
    Bad,
    Wait,
    Transfer { write: bool, peer: u8, parts: Vec<u8>, vectored: bool, strip: Option<Strip>, fate: Fate },
    Timeout { span: Nanos, repeats: Option<u32>, success: bool },
    LinkTimeout(Nanos),
    Cancel { what: Whom, all: bool, detach: bool },
    Remove(Whom),
    Update(Whom, Nanos),
    Message { ring: u8, res: u32 },
    Store { ask: Kind, key: u8, len: u8, fate: StoreFate },
}

/// What a Store's worker does with an entry's key, and so with all that it was given with it.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreFate {
    pub(super) after: Nanos,
    pub(super) end: StoreEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreEnd {
    Answers,
    /// With Mooncake's number.
    Fails(i32),
    /// The local memory may be touched for ever.
    GivesUp,
    /// The call panics when it comes to this key.
    Panics,
    Never,
}

/// A transfer's ranges lie behind those of the last one on the same strip, so that the two can be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strip {
    pub(super) number: u8,
    pub(super) gap: Gap,
    /// The caller says which remote registration it lies in.
    pub(super) declared: bool,
}

/// What lies between a piece of a strip and the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gap {
    No,
    Local,
    Remote,
    Both,
}

/// What the transport does with an entry's operations. An operation of several entries has the first of their fates that is
/// not to land, as if that one's part were to blame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fate {
    pub(super) after: Nanos,
    /// How much later a look sees it that is not thorough.
    pub(super) lag: Nanos,
    pub(super) end: End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Lands,
    /// Within the submit.
    AtOnce(bool),
    /// Nothing was started.
    Refused(i32),
    Fails(i32),
    /// TIMEOUT, and COMPLETED so much later.
    Late(Nanos),
    /// TIMEOUT, and no word more.
    Never,
    /// No word at all.
    Lost,
    /// COMPLETED, and again so much later.
    Twice(Nanos),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    Host(u8),
    Point(u8, u64),
    Polled(u8),
    /// The end of an entry that feeds a fence, so many before.
    End(u8),
    /// A value of the timeline that entries move, so many before the last.
    Prefix(u8),
}

pub(super) const HOSTS: usize = 6;
pub(super) const TIMELINES: usize = 2;
pub(super) const POLLED: usize = 6;
/// Strips of an engine. The second grows down; the third has borders of remote registrations, the fourth one of local regions.
pub(super) const STRIPS: usize = 4;
const MICRO: Nanos = 1_000;

/// What a program may contain; every seed has another choice, so that rare things meet each other.
struct Menu {
    transfers: bool,
    vectored: bool,
    neighbours: bool,
    futures: bool,
    stores: bool,
    waits: bool,
    chains: bool,
    drains: bool,
    skips: bool,
    timeouts: bool,
    limits: bool,
    cancels: bool,
    messages: bool,
    feeds: bool,
    submitters: bool,
    faults: bool,
    lost: bool,
    keys: bool,
    lazy_reaper: bool,
}

struct Dice {
    rng: Rng,
    menu: Menu,
    peers: u8,
}

/// The program of a seed.
pub(super) fn program(seed: u64) -> Program {
    let mut rng = Rng::with_seed(seed);
    let mut yes = |percent| rng.u32(0..100) < percent;
    let menu = Menu {
        transfers: yes(85),
        vectored: yes(30),
        waits: yes(80),
        chains: yes(40),
        drains: yes(25),
        skips: yes(25),
        timeouts: yes(35),
        limits: yes(40),
        cancels: yes(40),
        messages: yes(20),
        feeds: yes(30),
        submitters: yes(35),
        faults: yes(70),
        lost: yes(20),
        keys: yes(15),
        lazy_reaper: yes(30),
        neighbours: yes(50),
        futures: yes(35),
        stores: yes(30),
    };
    let breaks = yes(8);
    let closes = yes(15);
    let mut dice = Dice { rng, menu, peers: 3 };
    let cores = if dice.yes(20) { 2 } else { 1 };
    let engines = (0..if dice.yes(30) { 2 } else { 1 }).map(|_| dice.engine()).collect();
    let count = cores + if dice.yes(40) { dice.up_to(2) as u8 } else { 0 };
    let rings = (0..count).map(|n| RingPlan { core: n % cores, ..dice.ring() }).collect();
    let length = 8 + dice.rng.usize(..40);
    let mut steps: Vec<_> = (0..length).flat_map(|_| dice.steps()).collect();
    let mut sprinkle = |dice: &mut Dice, some: Vec<Step>| {
        let at = dice.rng.usize(..=steps.len());
        steps.splice(at..at, some);
    };
    if breaks {
        let at = match dice.rng.u8(..8) {
            0 => Break::Making,
            1 | 2 => Break::Poll,
            3 => Break::Settle,
            _ => Break::Submit(dice.rng.u8(..4)),
        };
        let engine = dice.rng.u8(..);
        sprinkle(&mut dice, vec![Step::Break { engine, at }]);
    }
    if closes {
        let (ring, grace) = (dice.rng.u8(..), dice.span(100 * MICRO));
        let mut close = vec![Step::Close { ring, grace }];
        if dice.menu.futures && dice.yes(50) {
            // Entries that nobody submits before the ring is gone.
            let late = |_| Plan { feeds: Feeds::Future, key: None, ..dice.plan(false) };
            let entries = (0..3).map(late).collect();
            close.insert(0, Step::Push { ring, producer: u8::MAX, whole: false, entries });
            close.insert(0, Step::Submitter { ring });
        }
        sprinkle(&mut dice, close);
        if dice.yes(50) {
            let plan = RingPlan { core: dice.rng.u8(..), ..dice.ring() };
            sprinkle(&mut dice, vec![Step::Ring(plan)]);
        }
    }
    let ending = EndingPlan {
        found: dice.yes(50),
        cancel: dice.yes(30),
        grace: dice.span(1_000 * MICRO),
        alone: dice.yes(50),
        close: (dice.span(3_000 * MICRO), dice.yes(70)),
        fences: dice.fence_end(),
    };
    Program { engines, rings, steps, ending }
}

impl Dice {
    fn yes(&mut self, percent: u32) -> bool {
        self.rng.u32(0..100) < percent
    }

    fn up_to(&mut self, most: u64) -> u64 {
        self.rng.u64(1..=most)
    }

    /// Any length of time up to `most`, short ones as likely as long ones.
    fn span(&mut self, most: Nanos) -> Nanos {
        let bits = self.rng.u32(0..=most.ilog2());
        (self.rng.u64(..2 << bits)).min(most)
    }

    fn engine(&mut self) -> EnginePlan {
        EnginePlan {
            max_batch: *self.pick(&[1, 2, 4, 64]),
            max_in_flight: *self.pick(&[1, 2, 5, 64]),
            max_merged: if self.menu.neighbours { *self.pick(&[300, 1_000, 1 << 20]) } else { 0 },
            workers: *self.pick(&[1, 2]),
            peers: 1 + self.rng.u8(..3),
            wait: *self.pick(&[Waiting::Until, Waiting::Until, Waiting::Yield, Waiting::Wakes]),
            threads_here: self.yes(50),
        }
    }

    fn ring(&mut self) -> RingPlan {
        let sizes: &[u32] = if self.menu.neighbours { &[4, 16, 33, 64] } else { &[1, 2, 3, 4, 8, 16, 33, 64] };
        RingPlan {
            core: 0,
            engine: self.rng.u8(..),
            entries: *self.pick(sizes),
            idle: *self.pick(&[0, 0, 10 * MICRO, 100 * MICRO]),
        }
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.rng.usize(..of.len())]
    }

    fn fence_end(&mut self) -> FenceEnd {
        match self.rng.u8(..10) {
            0 => FenceEnd::Fail(errno::EIO),
            1 => FenceEnd::Fail(7),
            2 => FenceEnd::Drop,
            _ => FenceEnd::Signal,
        }
    }

    /// One thing that somebody does, and mostly a turn behind it.
    fn steps(&mut self) -> Vec<Step> {
        let mut steps = vec![self.step()];
        if let Step::Push { ring, producer, .. } = steps[0]
            && self.yes(70)
        {
            steps.push(Step::Submit { ring, producer });
        }
        for _ in 0..self.rng.usize(..3) {
            steps.push(Step::Turn { core: self.rng.u8(..) });
        }
        steps
    }

    fn step(&mut self) -> Step {
        let any = self.rng.u8(..);
        if self.menu.futures && self.yes(15) {
            let ask = *self.pick(&[Ask::Poll, Ask::Poll, Ask::Result, Ask::Cancel, Ask::Drop, Ask::Drop, Ask::Detach]);
            return Step::Future { which: any, ask };
        }
        let reap = if self.menu.lazy_reaper { 2 } else { 14 };
        match self.rng.u32(..100) {
            0..40 => self.push(),
            40..46 => Step::Submit { ring: any, producer: self.rng.u8(..) },
            46..54 => Step::Pass(self.span(50 * MICRO)),
            54..56 => Step::Pass(self.span(20_000 * MICRO)),
            n @ 56..70 if n < 56 + reap => match self.yes(20) {
                true => Step::Listen { ring: any },
                false => Step::Reap { ring: any, most: self.rng.u8(..) },
            },
            56..70 => Step::Turn { core: any },
            70..76 => Step::Host { fence: any, end: self.fence_end() },
            76..79 => Step::Timeline { timeline: any, by: self.up_to(3) },
            79 => Step::EndTimeline { timeline: any, end: self.fence_end() },
            80..84 => {
                let end = match self.rng.u8(..8) {
                    0 => PolledEnd::Fail(700),
                    1 => PolledEnd::Panic,
                    _ => PolledEnd::Signal,
                };
                Step::Polled { fence: any, end }
            }
            84..87 if self.menu.cancels => {
                Step::Control { ring: any, what: self.whom(), all: self.yes(50), detach: self.yes(50) }
            }
            87 if self.menu.cancels => Step::Quiesce { ring: any, what: self.whom() },
            88..90 if self.menu.submitters => Step::Submitter { ring: any },
            90 if self.menu.submitters => Step::DropSubmitter { ring: any, producer: self.rng.u8(..) },
            91..93 if self.menu.faults => {
                Step::Stall { engine: any, peer: self.rng.u8(..), span: self.span(100 * MICRO) }
            }
            93..96 if self.menu.faults => Step::Partial { engine: any, peer: self.rng.u8(..), take: self.rng.u8(..3) },
            96 if self.menu.faults => Step::Linger { engine: any, span: self.span(100 * MICRO) },
            97 if self.menu.faults => Step::Reopen { engine: any, peer: self.rng.u8(..) },
            _ => Step::Turn { core: any },
        }
    }

    fn push(&mut self) -> Step {
        if self.menu.neighbours && self.yes(40) {
            return self.run();
        }
        let (ring, producer) = (self.rng.u8(..), if self.menu.submitters { self.rng.u8(..) } else { 0 });
        let chained = self.menu.chains && self.yes(60);
        let count = if chained || self.yes(30) { self.up_to(5) } else { 1 };
        let mut entries: Vec<_> = (0..count).map(|_| self.plan(chained)).collect();
        if chained {
            for entry in &mut entries {
                entry.flags |= *self.pick(&[EntryFlags::IO_LINK, EntryFlags::IO_LINK, EntryFlags::IO_HARDLINK]);
                if self.yes(15) {
                    entry.flags.remove(EntryFlags::CHAINED);
                }
            }
            if self.yes(95)
                && let Some(last) = entries.last_mut()
            {
                last.flags.remove(EntryFlags::CHAINED);
            }
        }
        Step::Push { ring, producer, whole: self.yes(30), entries }
    }

    /// Neighbours, most of them fit to be merged.
    fn run(&mut self) -> Step {
        let (ring, producer) = (self.rng.u8(..), if self.menu.submitters { self.rng.u8(..) } else { 0 });
        let (number, peer, write) = (self.rng.u8(..STRIPS as u8), self.rng.u8(..self.peers), self.yes(50));
        let waits = if self.menu.waits && self.yes(50) { vec![self.wait()] } else { Vec::new() };
        let (calm, count) = (self.yes(50), 1 + self.up_to(8));
        let entries = (0..count).map(|at| {
            let mut plan = self.plan(false);
            if self.yes(80) {
                // With a limit it needs one of the few side blocks.
                let limit = if self.yes(10) { plan.transfer_limit } else { 0 };
                let (flags, waits) = (EntryFlags::empty(), waits.clone());
                plan = Plan { flags, waits, gate_limit: 0, transfer_limit: limit, ..plan };
            }
            if self.menu.chains && self.yes(5) && at < count - 1 {
                plan.flags |= EntryFlags::IO_LINK;
            }
            let gap = if self.yes(90) { Gap::No } else { *self.pick(&[Gap::Local, Gap::Remote, Gap::Both]) };
            let strip = Some(Strip { number, gap, declared: self.yes(95) });
            let peer = if self.yes(95) { peer } else { self.rng.u8(..self.peers) };
            let fate = self.fate();
            let fate = if calm { Fate { end: End::Lands, ..fate } } else { fate };
            let (write, parts) = (write ^ self.yes(5), vec![self.rng.u8(1..)]);
            Plan { op: PlanOp::Transfer { write, peer, parts, vectored: false, strip, fate }, key: None, ..plan }
        });
        Step::Push { ring, producer, entries: entries.collect(), whole: self.yes(20) }
    }

    fn whom(&mut self) -> Whom {
        match self.rng.u8(..12) {
            0 => Whom::Any,
            1 => Whom::Peer(self.rng.u8(..3)),
            2 => Whom::Region,
            3 if self.menu.keys => Whom::Key(self.rng.u8(..2)),
            _ => Whom::Back(self.rng.u8(..8)),
        }
    }

    fn plan(&mut self, chained: bool) -> Plan {
        let mut flags = EntryFlags::empty();
        flags.set(EntryFlags::IO_DRAIN, self.menu.drains && self.yes(15));
        flags.set(EntryFlags::CQE_SKIP_SUCCESS, self.menu.skips && self.yes(30));
        let op = self.op(chained);
        let mut waits = Vec::new();
        if self.menu.waits && self.yes(60) {
            let count = if self.yes(70) { 1 } else { self.up_to(4) };
            waits = (0..count).map(|_| self.wait()).collect();
        }
        let mut limit = |percent| if self.menu.limits && self.yes(percent) { MICRO * (1 + self.span(500)) } else { 0 };
        let (gate_limit, transfer_limit) = (limit(20), limit(25));
        let key = (self.menu.keys && matches!(op, PlanOp::Wait) && !chained).then(|| self.rng.u8(..2));
        let feeds = match self.rng.u8(..10) {
            0..3 if self.menu.feeds => Feeds::Fence,
            3 if self.menu.feeds => Feeds::Progress,
            4..8 if self.menu.futures => Feeds::Future,
            _ => Feeds::Nothing,
        };
        let feeds = if key.is_some() { Feeds::Nothing } else { feeds };
        Plan { op, flags, waits, gate_limit, transfer_limit, key, feeds }
    }

    fn op(&mut self, chained: bool) -> PlanOp {
        if self.menu.stores && self.yes(40) {
            return self.store();
        }
        match self.rng.u32(..100) {
            0..50 if self.menu.transfers => self.transfer(),
            50..60 if self.menu.timeouts => PlanOp::Timeout {
                span: self.span(200 * MICRO),
                repeats: self.yes(20).then(|| self.rng.u32(..4)),
                success: self.yes(30),
            },
            60..70 if self.menu.timeouts && (chained || self.yes(10)) => PlanOp::LinkTimeout(self.span(100 * MICRO)),
            70..78 if self.menu.cancels => {
                PlanOp::Cancel { what: self.whom(), all: self.yes(40), detach: self.yes(50) }
            }
            78..80 if self.menu.cancels => PlanOp::Remove(self.whom()),
            80..82 if self.menu.cancels => PlanOp::Update(self.whom(), self.span(200 * MICRO)),
            82..86 if self.menu.messages => PlanOp::Message { ring: self.rng.u8(..), res: self.rng.u32(..100) },
            86 => PlanOp::Bad,
            87 => PlanOp::Nop(-5),
            88 => PlanOp::Nop(9),
            89..95 => PlanOp::Nop(0),
            _ => PlanOp::Wait,
        }
    }

    fn store(&mut self) -> PlanOp {
        let end = match self.rng.u8(..20) {
            0 | 1 if self.menu.faults => StoreEnd::Fails(-707),
            2 if self.menu.faults => StoreEnd::GivesUp,
            3 if self.menu.faults => StoreEnd::Panics,
            4 if self.menu.faults && self.menu.lost => StoreEnd::Never,
            _ => StoreEnd::Answers,
        };
        let (ask, key) = (*self.pick(&[Kind::Get, Kind::Put, Kind::Put, Kind::Exist, Kind::Remove]), self.rng.u8(..4));
        let after = if self.yes(20) { self.span(3_000 * MICRO) } else { self.span(100 * MICRO) };
        PlanOp::Store { ask, key, len: self.rng.u8(1..), fate: StoreFate { after, end } }
    }

    fn transfer(&mut self) -> PlanOp {
        let vectored = self.menu.vectored && self.yes(50);
        let count = if vectored { self.rng.u64(..7) } else { 1 };
        let parts = (0..count).map(|_| if self.yes(8) { 0 } else { self.rng.u8(1..) }).collect();
        let (write, peer, fate) = (self.yes(50), self.rng.u8(..self.peers), self.fate());
        PlanOp::Transfer { write, peer, parts, vectored, strip: None, fate }
    }

    fn fate(&mut self) -> Fate {
        let end = match self.rng.u32(..100) {
            0..5 => End::AtOnce(true),
            5..8 if self.menu.faults => End::AtOnce(false),
            8..12 if self.menu.faults => End::Refused(*self.pick(&[errno::EBUSY, errno::ENOBUFS])),
            12..22 if self.menu.faults => End::Fails(*self.pick(&[errno::EIO, errno::EBADMSG])),
            22..32 if self.menu.faults => End::Late(self.span(200 * MICRO)),
            32..36 if self.menu.faults && self.menu.lost => End::Never,
            36..42 if self.menu.faults && self.menu.lost => End::Lost,
            42..48 if self.menu.faults => End::Twice(self.span(50 * MICRO)),
            _ => End::Lands,
        };
        let lag = if self.yes(30) { self.span(50 * MICRO) } else { 0 };
        Fate { after: self.span(100 * MICRO), lag, end }
    }

    fn wait(&mut self) -> Wait {
        match self.rng.u8(..12) {
            0..6 => Wait::Host(self.rng.u8(..HOSTS as u8)),
            6..8 => Wait::Point(self.rng.u8(..), self.rng.u64(..8)),
            8..10 => Wait::Polled(self.rng.u8(..POLLED as u8)),
            10 if self.menu.feeds => Wait::Prefix(self.rng.u8(..4)),
            _ if self.menu.feeds => Wait::End(self.rng.u8(..6)),
            _ => Wait::Host(self.rng.u8(..HOSTS as u8)),
        }
    }
}
