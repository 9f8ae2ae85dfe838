//! The core: takes entries, gates them, issues them, lands and posts their results.
//!
//! It does no I/O, reads no clock and has no thread: [`Core::turn`] does a bounded amount of what there is to do at a
//! moment and says how to wait for the next. The poller thread is a loop around it, and so is the simulator.
//!
//! An entry is [taken](Core::take_entries) alone or with its [`chain`], [enters](Core::enter) when its turn has come, waits at
//! the [`gate`], is issued by [`peers`], ends in [`conclude`](Core::conclude) and is posted by its [`ring`].

mod cancel;
mod chain;
mod gate;
mod index;
mod merge;
mod message;
mod met;
mod parts;
mod peers;
mod post;
mod ring;
mod slots;
mod stats;
#[cfg(all(test, not(loom)))]
mod tests;
mod timers;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

use crate::code::{Stage, errno};
use crate::cqe::{Cqe, CqeFlags};
use crate::doorbell::Doorbell;
use crate::entry::EntryFlags;
use crate::fence::{FenceInner, FenceStatus, Inbox};
use crate::fork::Home;
use crate::opcode::Select;
use crate::ring::control::Reply;
use crate::ring::parts::PartList;
use crate::ring::shared::{MAX_FENCES, Shared, slots_of};
use crate::ring::stats::Stats;
use crate::spsc::{Consumer, Producer};
use crate::sqe::{Opcode, Sqe, op_flags};
use crate::sync::{self, SegQueue};
use crate::trace::event;
use crate::transport::{Caps, Driver, Event, Hint, Nanos, Op, PollerWaker};
use cancel::Quiescing;
use chain::{Gather, Step};
use gate::{EdgeId, Gate, Released};
use peers::{DriverState, Offered, Peer};
pub(crate) use ring::Closing;
#[cfg(all(test, loom))]
pub(crate) use ring::Ending;
use ring::RingState;
use slots::{NONE, Slots, State};
use timers::Timers;

/// Most entries taken or posted for one ring in one turn.
pub(crate) const BUDGET: u32 = 128;
/// Most entries released, and most that expire, in one turn: each costs more.
const RELEASE_BUDGET: u32 = BUDGET / 2;
/// How long after the last work the poller spins before it yields.
const SPIN: Nanos = 5_000;
/// A moment nearer than this is yielded for: a sleep would overshoot it.
const SLEEP_LEAST: Nanos = 50_000;

/// Most slots of a core.
pub(crate) const MAX_SLOTS: u32 = (1 << 24) - 1;

/// What other threads ask of a core. Rings have numbers that are never used again; their places in the core are.
#[derive(Debug)]
pub(crate) enum Control {
    /// A new ring, under the number that its ends use.
    Ring { ring: u32, shared: Arc<Shared>, sq: Consumer<Sqe>, cq: Producer<Cqe> },
    /// A submitter's lane.
    Lane { ring: u32, lane: u32, entries: Consumer<Sqe> },
    /// The lane's submitter is gone.
    LaneGone { ring: u32, lane: u32 },
    /// Cancels what was published before; the answer is how many.
    Cancel { ring: u32, op_flags: u16, key: u64, reply: Arc<Reply<usize>> },
    /// Answers once what was published before, and is selected, is quiet.
    Quiesce { ring: u32, select: Select, reply: Arc<Reply<()>> },
    /// Shows what the ring has counted.
    Stats { ring: u32, reply: Arc<Reply<Stats>> },
    /// The future of an entry is gone, or asks for its cancelling.
    Disown { ring: u32, entry: Arc<FenceInner> },
    /// An entry of any ring posts a completion on this one.
    Message { ring: u32, user_data: u64, res: i32 },
    /// It was not sent; the unit that was taken for it is free.
    NoMessage { ring: u32 },
    /// The ring's ends are gone.
    Close { ring: u32, closing: Arc<Closing> },
}

/// The way to a core from other threads.
#[derive(Debug)]
pub(crate) struct Controls {
    queue: SegQueue<Control>,
    pub(crate) doorbell: Arc<Doorbell>,
    rings: AtomicU32,
    /// Entries that all rings together can have. The core, which takes off a ring's share when it lets go of it, ends when
    /// this is 0.
    entries: AtomicU32,
    home: Home,
}

/// Why a core takes no further ring.
#[derive(Debug)]
pub(crate) enum Refused {
    /// It runs in the process that forked this one.
    Elsewhere,
    /// Its last ring is closed.
    Gone,
    /// Its rings together can have so many entries, so that this one would be too many.
    Full(u32),
}

impl Controls {
    /// For a core whose first ring has `entries`.
    pub(crate) fn new(entries: u32) -> Controls {
        Controls {
            queue: SegQueue::new(),
            doorbell: Arc::new(Doorbell::new()),
            rings: AtomicU32::new(0),
            entries: AtomicU32::new(entries),
            home: Home::here(),
        }
    }

    /// Makes sure of the core for a further ring.
    pub(crate) fn join(&self, entries: u32) -> Result<(), Refused> {
        if !self.is_here() {
            return Err(Refused::Elsewhere);
        }
        let more = |all| (0 < all && all <= MAX_SLOTS - entries).then_some(all + entries);
        match self.entries.fetch_update(Relaxed, Relaxed, more) {
            Ok(_) => Ok(()),
            Err(0) => Err(Refused::Gone),
            Err(all) => Err(Refused::Full(all)),
        }
    }

    fn leave(&self, entries: u32) {
        self.entries.fetch_sub(entries, Relaxed);
    }

    fn all_left(&self) -> bool {
        self.entries.load(Relaxed) == 0
    }

    /// Nothing happens in a forked child: nobody is there to obey.
    pub(crate) fn send(&self, control: Control) {
        if self.is_here() {
            self.queue.push(control);
            self.doorbell.ring_always();
        }
    }

    /// False in a forked child of the core's process.
    pub(crate) fn is_here(&self) -> bool {
        self.home.is_here()
    }

    pub(crate) fn next_ring(&self) -> u32 {
        self.rings.fetch_add(1, Relaxed)
    }
}

static NEXT_CORE: AtomicU32 = AtomicU32::new(1);

#[derive(Debug)]
pub(crate) struct Core {
    controls: Arc<Controls>,
    /// Controls that were passed over to meet a lane, before those in the queue.
    put_off: VecDeque<Control>,
    inbox: sync::Arc<Inbox>,
    rings: Vec<Option<RingState>>,
    slots: Slots,
    /// Side blocks' edges of rings that are gone.
    spare_edges: Vec<Range<usize>>,
    gate: Gate,
    timers: Timers,
    /// Members of chains whose time has come.
    steps: VecDeque<Step>,
    drivers: Vec<DriverState>,
    peers: Vec<Peer>,
    /// Peers with ready entries and room in flight, in turn.
    ready_peers: VecDeque<u32>,
    /// Scratch, empty between uses.
    events: Vec<Event>,
    ops: Vec<Op>,
    offered: Vec<Offered>,
    /// A ring's peer, and how many of its operations have left the transport that it has not heard of.
    left: ((u32, u32), u32),
    /// The present turn's time.
    now: Nanos,
    last_work: Nanos,
    /// Before that a turn without input from other threads has nothing to do, and the poller spins.
    calm_until: Nanos,
    /// How long after the last work to stay awake.
    idle: Nanos,
    /// Buried by a panic: only posts what is left.
    dead: bool,
}

impl Core {
    pub(crate) fn new(controls: Arc<Controls>, idle: Nanos) -> Core {
        let inbox = Inbox::new(Arc::clone(&controls.doorbell));
        Core {
            gate: Gate::new(NEXT_CORE.fetch_add(1, Relaxed), sync::Arc::clone(&inbox)),
            controls,
            put_off: VecDeque::new(),
            inbox,
            rings: Vec::new(),
            slots: Slots::default(),
            spare_edges: Vec::new(),
            timers: Timers::default(),
            steps: VecDeque::new(),
            drivers: Vec::new(),
            peers: Vec::new(),
            ready_peers: VecDeque::new(),
            events: Vec::new(),
            ops: Vec::new(),
            offered: Vec::new(),
            left: Default::default(),
            now: 0,
            last_work: 0,
            calm_until: 0,
            idle,
            dead: false,
        }
    }

    /// Does a bounded amount of what there is to do at `now`, and says how to wait for the next turn.
    ///
    /// Most steps are a look whether there is anything, which is inlined here, and a function beside it that does it: in most
    /// turns most have nothing, and what they take is what an entry waits for.
    pub(crate) fn turn(&mut self, now: Nanos) -> Hint {
        if now < self.calm_until && !self.sees_input() {
            return Hint::Spin;
        }
        (self.now, self.calm_until) = (now, 0);
        let mut worked = self.obey();
        if self.dead {
            return self.turn_dead();
        }
        if self.rings.iter().flatten().any(RingState::is_closing) {
            for ring in 0..self.rings.len() as u32 {
                worked |= self.close_step(ring);
            }
        }
        self.gate.poll(now, BUDGET);
        worked |= self.gate.take_fired();
        self.gate.step_timelines(BUDGET);
        worked |= self.end_expired();
        worked |= self.release();
        for ring in 0..self.rings.len() as u32 {
            worked |= self.take_entries(ring);
        }
        worked |= self.expire();
        worked |= self.advance();
        worked |= self.issue();
        let (ended, hint) = self.poll_drivers();
        worked |= ended;
        for ring in 0..self.rings.len() as u32 {
            self.post_waiting(ring);
            if worked {
                self.answer_quiet(ring);
            }
        }
        self.gate.drop_done();
        if worked {
            self.last_work = now;
            return Hint::Now;
        }
        self.wait_politely(hint)
    }

    /// How to wait when there was nothing to do; `hint` is the drivers'.
    fn wait_politely(&mut self, hint: Option<Hint>) -> Hint {
        if self.gate.is_busy() || !self.steps.is_empty() {
            return Hint::Now;
        }
        if self.has_issuable() {
            // Their driver took nothing: it waits for others' ends.
            return Hint::Yield;
        }
        let deadlines = self.rings.iter().flatten().filter_map(RingState::deadline);
        let timer = self.timers.first().map(|(due, _)| due);
        let until = deadlines.chain(self.gate.next_due()).chain(timer).min();
        let mut wait = Hint::Sleep { until };
        if let Some(hint) = hint {
            // Operations are in flight: only their transport says whether its threads need the core.
            wait = wait.sooner(hint);
        } else if self.now - self.last_work < SPIN && !self.drivers.iter().any(|driver| driver.caps.threads_here) {
            self.calm_until = until.unwrap_or(Nanos::MAX).min(self.last_work + SPIN);
            return Hint::Spin;
        }
        match wait {
            Hint::Sleep { .. } if self.now - self.last_work < self.idle => Hint::Yield,
            Hint::Sleep { until: Some(until) } if until < self.now + SLEEP_LEAST => Hint::Yield,
            wait => wait,
        }
    }

    pub(crate) fn doorbell(&self) -> Arc<Doorbell> {
        Arc::clone(&self.controls.doorbell)
    }

    /// True if a turn would find input from another thread: the last look before sleeping.
    pub(crate) fn has_input(&self) -> bool {
        self.has_other_input() || self.inbox.has_fired_before_sleep()
    }

    /// The same while awake: the look of a spinning poller.
    fn sees_input(&self) -> bool {
        self.has_fired() || self.has_other_input()
    }

    /// True if a turn would find a fence that has fired.
    pub(crate) fn has_fired(&self) -> bool {
        self.inbox.is_touched()
    }

    /// Input that is not a fence.
    fn has_other_input(&self) -> bool {
        !self.controls.queue.is_empty()
            || !self.put_off.is_empty()
            || self.rings.iter().flatten().any(RingState::has_input)
            || (!self.dead && self.drivers_have_input())
    }

    /// Not for a dead core, which calls no driver again: it would never sleep.
    fn drivers_have_input(&self) -> bool {
        self.drivers.iter().any(|driver| !driver.ending && driver.driver.has_input()) || self.has_issuable()
    }

    /// Engines that threads of their own are ending for closing rings.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn ending_engines(&self) -> impl Iterator<Item = u64> {
        let rings = self.rings.iter().flatten();
        let ending = rings.filter(|ring| ring.ending().is_some_and(|ending| ending.outcome().is_none()));
        ending.map(|ring| ring.engine().id())
    }

    /// True once no ring is left, and none can come: the poller may end.
    pub(crate) fn is_done(&self) -> bool {
        self.controls.all_left()
    }

    #[inline]
    fn obey(&mut self) -> bool {
        // Looked at before it is asked, which takes a barrier.
        !(self.controls.queue.is_empty() && self.put_off.is_empty()) && self.obey_some()
    }

    fn obey_some(&mut self) -> bool {
        let mut any = false;
        // So many in a turn: submitters that come and go all the time do not hold up entries.
        for _ in 0..BUDGET {
            let Some(control) = self.put_off.pop_front().or_else(|| self.controls.queue.pop()) else { break };
            any = true;
            match control {
                Control::Ring { ring, shared, sq, cq } => self.add_ring(ring, shared, sq, cq),
                Control::Lane { ring, lane, entries } => self.add_lane(ring, lane, entries),
                Control::LaneGone { ring, lane } => {
                    if let Some(ring) = self.numbered(ring) {
                        ring.retire_lane(lane);
                    }
                }
                // A ring that is closed or dead tells its callers so itself.
                Control::Cancel { ring, op_flags, key, reply } => {
                    if let Some(place) = self.place_of(ring)
                        && self.take_all(place)
                    {
                        reply.give(self.cancel_matching(place, None, op_flags, key).0);
                    }
                }
                Control::Quiesce { ring, select, reply } => {
                    if let Some(place) = self.place_of(ring)
                        && self.take_all(place)
                    {
                        let since = self.now;
                        self.ring(place).quiescing.push(Quiescing { select, since, reply });
                        self.answer_quiet(place);
                    }
                }
                // Of one that is closed its shared part has the last counts.
                Control::Stats { ring, reply } => {
                    if let Some(place) = self.place_of(ring) {
                        reply.give(self.stats_of(place));
                    }
                }
                Control::Disown { ring, entry } => {
                    if self.place_of(ring).is_some() {
                        self.disown(&entry);
                    }
                }
                Control::Message { ring, user_data, res } => {
                    if let Some(place) = self.place_of(ring) {
                        self.post_message(place, user_data, res);
                    }
                }
                Control::NoMessage { ring } => {
                    if let Some(ring) = self.numbered(ring) {
                        ring.give_back_unit();
                    }
                }
                Control::Close { ring, closing } => {
                    let now = self.now;
                    if let Some(ring) = self.numbered(ring) {
                        ring.close(closing, now);
                    } else {
                        closing.finish();
                    }
                }
            }
        }
        any
    }

    /// Adds the lanes that have been announced since the turn began, so that a drain finds what came before it there. Other
    /// controls keep their turn and their order.
    fn meet_lanes(&mut self) {
        for _ in 0..self.controls.queue.len() {
            let Some(control) = self.controls.queue.pop() else { break };
            match control {
                Control::Lane { ring, lane, entries } if self.place_of(ring).is_some() => {
                    self.add_lane(ring, lane, entries);
                }
                other => self.put_off.push_back(other),
            }
        }
    }

    /// One of a ring that is gone is dropped.
    fn add_lane(&mut self, ring: u32, lane: u32, entries: Consumer<Sqe>) {
        if let Some(ring) = self.numbered(ring) {
            ring.add_lane(lane, entries);
        }
    }

    fn place_of(&self, number: u32) -> Option<u32> {
        let place = self.rings.iter().position(|ring| ring.as_ref().is_some_and(|ring| ring.number == number))?;
        Some(place as u32)
    }

    /// The ring that other threads name so.
    fn numbered(&mut self, number: u32) -> Option<&mut RingState> {
        let place = self.place_of(number)?;
        self.ring_mut(place)
    }

    fn ring_mut(&mut self, ring: u32) -> Option<&mut RingState> {
        self.rings.get_mut(ring as usize)?.as_mut()
    }

    fn ring(&mut self, ring: u32) -> &mut RingState {
        self.ring_mut(ring).expect("a ring outlives its entries")
    }

    fn add_ring(&mut self, number: u32, shared: Arc<Shared>, sq: Consumer<Sqe>, cq: Producer<Cqe>) {
        // Rings that are gone have left their slots and edges.
        let rights = self.rings.iter().flatten().map(|ring| slots_of(ring.capacity()) as usize);
        let slots = rights.sum::<usize>() + slots_of(shared.capacity as u32) as usize;
        let more = slots.saturating_sub(self.slots.len());
        self.slots.grow(more);
        self.timers.grow(more);
        let edges = shared.sides.count() * MAX_FENCES;
        let spare = self.spare_edges.iter().position(|spare| spare.len() >= edges);
        let first = self.gate.grow(more, if spare.is_some() { 0 } else { edges });
        let side_edges = spare.map_or(first..first + edges, |spare| self.spare_edges.swap_remove(spare));
        let engine = shared.engine.clone();
        let mut ring = RingState::new(number, shared, sq, cq, DriverState::NONE, side_edges);
        if self.dead {
            ring.die();
        }
        let place = self.rings.iter().position(Option::is_none).unwrap_or_else(|| {
            self.rings.push(None);
            self.rings.len() - 1
        });
        // First the ring, then its driver: if that panics, the ring's entries are ended like everybody's.
        self.rings[place] = Some(ring);
        if !self.dead {
            let driver = self.driver_for(&engine);
            self.ring(place as u32).driver = driver;
        }
    }

    fn driver_for(&mut self, engine: &crate::Engine) -> usize {
        if let Some(known) = self.driver_of(engine.id()) {
            return known;
        }
        let waker = PollerWaker(Arc::clone(&self.controls.doorbell));
        let transport = Arc::clone(engine.transport());
        self.add_driver(engine.id(), transport.caps(), transport.driver(waker))
    }

    /// The driver of an engine or a Store client.
    fn driver_of(&self, id: u64) -> Option<usize> {
        self.drivers.iter().position(|driver| driver.engine == id)
    }

    fn add_driver(&mut self, id: u64, caps: Caps, driver: Box<dyn Driver>) -> usize {
        let state = DriverState { engine: id, caps, driver, ending: false };
        match self.drivers.iter().position(|driver| driver.engine == DriverState::NO_ENGINE) {
            Some(spare) => {
                self.drivers[spare] = state;
                spare
            }
            None => {
                self.drivers.push(state);
                self.drivers.len() - 1
            }
        }
    }

    /// Takes everything that is published; false if there is no such ring, or only its remains.
    fn take_all(&mut self, ring: u32) -> bool {
        let there = !self.dead && self.ring_mut(ring).is_some();
        while there && self.take_entries(ring) {}
        there
    }

    /// Takes a bounded number of entries off a ring's queues.
    fn take_entries(&mut self, index: u32) -> bool {
        let mut left = BUDGET;
        // What comes to a closing ring is ended by the next step of closing.
        let Some(ring) = self.ring_mut(index).filter(|ring| !ring.is_closing()) else { return false };
        if !ring.has_entries() {
            return false;
        }
        ring.take_turns();
        // Where one Nop is there are others, and among transfers none.
        let mut nops = true;
        while left > 0 {
            let Some(ring) = self.ring_mut(index) else { break };
            if nops {
                left -= ring.pass_nops(left);
                if left == 0 || ring.is_drained() {
                    break;
                }
            }
            let Some(sqe) = ring.next_entry() else { break };
            nops = sqe.op == Opcode::Nop;
            left -= 1;
            if sqe.starts_at_once() && !ring.is_draining() {
                self.take_transfer(index, &sqe);
                left -= self.take_transfers(index, left);
            } else if sqe.is_plain_nop() && !ring.is_draining() && !ring.has_room() {
                self.take_ended_nop(index, &sqe);
            } else {
                self.take_unit(index, sqe, Gather::Yes);
            }
        }
        left < BUDGET
    }

    /// Takes a plain Nop for which the CQ has no room, with what a unit of one, its start and its end come to.
    #[inline]
    fn take_ended_nop(&mut self, ring: u32, sqe: &Sqe) {
        let slot = self.take_slot(ring, sqe);
        let entry = &mut self.slots[slot];
        entry.issued = self.now;
        entry.set_result(0, Stage::Done, 0, self.now);
        self.rings[ring as usize].as_mut().expect("its entry was taken").wait_for_room(&mut self.slots, slot);
    }

    /// Counts an entry that came off a queue, and gives it a slot, where it is held.
    #[inline]
    fn take_slot(&mut self, ring: u32, sqe: &Sqe) -> u32 {
        let peer = self.ring(ring).meet(sqe);
        self.slots.take(ring, sqe, peer, self.now)
    }

    /// An entry whose turn has come waits for its fences, or goes on.
    fn enter(&mut self, slot: u32) {
        self.arm_guard(slot);
        if self.slots.member(slot).cancelled {
            self.conclude(slot, -errno::ECANCELED, Stage::Cancel, 0);
            return;
        }
        if let Some((timeline, _)) = self.slots[slot].sqe.expiring() {
            self.gate.watch_steps(&timeline);
            // Looked at anew: what expires from here on is told.
            if self.slots[slot].sqe.expiring().is_some_and(|(_, expired)| expired) {
                self.conclude(slot, -errno::ETIME, Stage::Gate, 0);
                return;
            }
        }
        let side = self.slots[slot].sqe.side;
        self.slots[slot].state = State::Gated;
        if self.slots[slot].sqe.fence.is_null() && side == Sqe::NO_SIDE {
            // Nothing holds it.
            self.start(slot);
            return;
        }
        let single = self.slots[slot].sqe.take_fence();
        let mut failure = None;
        let mut look = |status| match status {
            FenceStatus::Pending => 1,
            FenceStatus::Signalled => 0,
            FenceStatus::Failed(why) => {
                failure = Some(why);
                0
            }
        };
        let mut pending = 0;
        if let Some(fence) = &single {
            pending += look(self.gate.wait(slot, EdgeId::of_slot(slot), fence, self.now));
        }
        if side != Sqe::NO_SIDE {
            let ring = self.slots[slot].ring;
            let (shared, first) = self.ring(ring).side_edges(side);
            // SAFETY: the block came with the entry, and is emptied only when the entry leaves the gate.
            let [gate_limit, transfer_limit] = unsafe { shared.sides.limits(side) };
            self.slots.member(slot).transfer_limit = transfer_limit;
            if gate_limit > 0 {
                self.timers.set(slot, self.now.saturating_add(gate_limit));
            }
            // SAFETY: as above.
            for (at, fence) in unsafe { shared.sides.fences(side) }.enumerate() {
                pending += look(self.gate.wait(slot, EdgeId::of_side(first + at), &fence, self.now));
            }
        }
        self.slots[slot].pending = pending;
        if let Some(why) = failure {
            self.leave_gate(slot);
            self.conclude(slot, -why.errno, Stage::Gate, why.detail);
        } else if pending == 0 {
            self.leave_gate(slot);
            self.start(slot);
        } else {
            self.park(slot);
        }
    }

    /// Lets a bounded number of entries go whose fences have fired.
    #[inline]
    fn release(&mut self) -> bool {
        self.gate.is_busy() && self.release_some()
    }

    fn release_some(&mut self) -> bool {
        let mut any = false;
        for _ in 0..RELEASE_BUDGET {
            let Some(Released { slot, failure }) = self.gate.release_one() else { break };
            any = true;
            if let Some(why) = failure {
                self.leave_gate(slot);
                self.conclude(slot, -why.errno, Stage::Gate, why.detail);
                continue;
            }
            self.slots[slot].pending -= 1;
            if self.slots[slot].pending == 0 {
                // The one edge of an entry without a side block is off its list.
                if self.slots[slot].sqe.side != Sqe::NO_SIDE {
                    self.leave_gate(slot);
                }
                self.start(slot);
            }
        }
        any
    }

    /// Takes an entry off every list at the gate and lets go of its fences, looked at or not.
    fn leave_gate(&mut self, slot: u32) {
        drop(self.slots[slot].sqe.take_fence());
        self.gate.unlink(EdgeId::of_slot(slot));
        let side = std::mem::replace(&mut self.slots[slot].sqe.side, Sqe::NO_SIDE);
        if side != Sqe::NO_SIDE {
            let ring = self.slots[slot].ring;
            let (shared, first) = self.ring(ring).side_edges(side);
            for at in 0..MAX_FENCES {
                self.gate.unlink(EdgeId::of_side(first + at));
            }
            // SAFETY: the block came with the entry, which forgot it just above.
            unsafe { shared.sides.empty(side) };
        }
    }

    /// An entry whose fences have all signalled goes on.
    fn start(&mut self, slot: u32) {
        let Sqe { op, len, .. } = self.slots[slot].sqe;
        self.slots[slot].issued = self.now;
        match op {
            Opcode::Read | Opcode::Write | Opcode::Readv | Opcode::Writev if len > 0 => self.go_to_peer(slot),
            Opcode::Get | Opcode::Put | Opcode::Exist | Opcode::Remove => self.go_to_peer(slot),
            Opcode::Wait | Opcode::Read | Opcode::Write | Opcode::Readv | Opcode::Writev => {
                self.conclude(slot, 0, Stage::Done, 0);
            }
            Opcode::Nop => {
                let res = len as i32;
                self.conclude(slot, res, if res < 0 { Stage::Issue } else { Stage::Done }, 0);
            }
            Opcode::Timeout => self.start_timeout(slot),
            Opcode::Cancel => self.cancel(slot),
            Opcode::TimeoutUpdate => self.update_timeout(slot),
            Opcode::MsgRing => self.send_message(slot),
            Opcode::LinkTimeout => unreachable!("a LinkTimeout is armed by the entry before it"),
        }
    }

    /// An entry waits for nothing but its peer. A Cancel by `user_data` means it after those that wait for more.
    fn go_to_peer(&mut self, slot: u32) {
        self.unpark(slot);
        if matches!(self.slots[slot].sqe.op, Opcode::Read | Opcode::Write) && !self.timers.has(slot) {
            self.slots.note_plain(slot);
        }
        self.make_ready(slot);
    }

    /// An entry has its result. If the transport is not quiet, `slots[slot].quiet` says so already.
    fn conclude(&mut self, slot: u32, res: i32, stage: Stage, detail: i32) {
        if let Some(step) = self.end(slot, res, stage, detail) {
            self.steps.push_back(step);
        }
    }

    /// The same, and what follows is the caller's. The entry lets go of all that it was tied to, and is posted.
    fn end(&mut self, slot: u32, res: i32, stage: Stage, detail: i32) -> Option<Step> {
        let entry = &mut self.slots[slot];
        entry.set_result(res, stage, detail, self.now);
        // Of a Timeout only its own span is done: a limit that passed is a failure as anybody's.
        let ran_out = entry.res == -errno::ETIME && stage == Stage::Done;
        let expected = ran_out && entry.sqe.op_flags & op_flags::ETIME_SUCCESS != 0;
        let failed = (entry.res < 0 && !expected) || !entry.quiet;
        let Sqe { op, side, fence, .. } = entry.sqe;
        let (ring, peer, quiet) = (entry.ring, entry.peer, entry.quiet);
        if side != Sqe::NO_SIDE || !fence.is_null() {
            // It never came to the gate, and has what it was to show there.
            self.leave_gate(slot);
        }
        if !quiet {
            self.ring(ring).add_overdue(peer);
        }
        self.timers.remove(slot);
        self.unpark(slot);
        let entry = &mut self.slots[slot];
        let root = failed.then(|| root_of(entry));
        entry.sqe.signal(root);
        let member = self.slots.member(slot);
        if failed && member.skip && (op != Opcode::LinkTimeout || member.bad) {
            (member.skip, member.skip_rest) = (false, true);
        }
        let (counted, alone) = (std::mem::take(&mut member.counted), member.next == NONE);
        self.ring(ring).running -= usize::from(counted);
        if alone {
            self.post_slot(slot);
            return None;
        }
        let guard = self.take_guard(slot);
        let step = self.follow(slot, failed);
        self.post_slot(slot);
        if let Some(guard) = guard {
            // Its entry has ended, so it is cancelled; marked to be skipped it never posts.
            self.end(guard, -errno::ECANCELED, Stage::Cancel, 0);
        }
        step
    }

    fn post_slot(&mut self, slot: u32) {
        let ring = self.rings[self.slots[slot].ring as usize].as_mut().expect("a ring outlives its entries");
        ring.post_slot(&mut self.slots, slot);
    }

    /// Posts what a slot has to say; its ring has room.
    fn post_now(&mut self, slot: u32) {
        let ring = self.rings[self.slots[slot].ring as usize].as_mut().expect("a ring outlives its entries");
        let posted = ring.post_now(&mut self.slots, slot);
        debug_assert!(posted, "the caller has seen room");
    }

    /// Posts completions that waited for room, and publishes everything.
    #[inline]
    fn post_waiting(&mut self, index: u32) {
        while let Some(ring) = self.ring_mut(index)
            && let Some(slot) = ring.first_waiting()
        {
            let ring = self.rings[index as usize].as_mut().expect("looked at above");
            ring.stop_waiting(&mut self.slots, slot);
            self.post_now(slot);
        }
        if let Some(ring) = self.ring_mut(index) {
            ring.publish();
        }
    }

    fn land(&mut self, event: Event) {
        let (Event::Result { op, .. } | Event::Quiet { op, .. }) = event;
        let Some(slot) = self.slots.find(op) else { return };
        if self.slots[slot].sqe.op.is_vectored() {
            self.land_part(slot, event);
        } else if self.slots.member(slot).merged != NONE {
            self.land_merged(slot, event);
        } else {
            self.land_alone(slot, event);
        }
    }

    fn land_alone(&mut self, slot: u32, event: Event) {
        match event {
            Event::Result { res, stage, detail, quiet, .. } => {
                if std::mem::take(&mut self.slots.member(slot).detached) {
                    // Its result is known, and this is its end.
                    self.left_flight(slot);
                    if quiet {
                        self.quieten(slot, detail);
                    }
                    return;
                }
                if self.slots[slot].state != State::Issued {
                    return;
                }
                self.slots[slot].quiet = quiet;
                self.left_flight(slot);
                let (stage, detail) = if res < 0 { (stage, detail) } else { (Stage::Done, 0) };
                self.conclude(slot, res, stage, detail);
            }
            Event::Quiet { detail, .. } => self.quieten(slot, detail),
        }
    }

    fn end_use(&mut self, slot: u32) {
        let ring = self.rings[self.slots[slot].ring as usize].as_mut().expect("a ring outlives its entries");
        ring.end_use(&mut self.slots[slot].sqe);
    }

    /// Nothing touches the local range of an entry any more whose result was not quiet.
    fn quieten(&mut self, slot: u32, detail: i32) {
        let entry = &mut self.slots[slot];
        if entry.quiet {
            return;
        }
        entry.quiet = true;
        let (state, ring, peer) = (entry.state, entry.ring, entry.peer);
        if state == State::Overdue {
            (entry.notif, entry.res, entry.detail) = (true, 0, detail);
        }
        self.ring(ring).remove_overdue(peer);
        let held = std::mem::replace(&mut self.slots.member(slot).next, NONE);
        if held != NONE {
            self.steps.push_back(Step::Start(held));
        }
        match state {
            State::Overdue => self.post_slot(slot),
            // Its result still waits for room, and will be the only completion.
            _ => self.end_use(slot),
        }
    }

    /// Ends a ring's entries that were never issued.
    fn end_unissued(&mut self, index: u32, errno: i32) {
        while let Some(ring) = self.ring_mut(index)
            && let Some(sqe) = ring.next_entry()
        {
            self.take_slot(index, &sqe);
        }
        if let Some(ring) = self.ring_mut(index) {
            ring.deferred.clear();
        }
        let own = self.slots_of(index);
        for &slot in &own {
            self.slots.member(slot).next = NONE;
            // What was issued may still succeed.
            self.slots.member(slot).skip &= self.slots[slot].state == State::Issued;
        }
        self.steps.retain(|step| !own.contains(&step.slot()));
        for slot in own {
            match self.slots[slot].state {
                State::Free | State::Issued | State::Overdue | State::Waiting => {}
                State::Issuing => self.stop_issuing(slot, errno, Stage::Shutdown),
                _ => self.cut_short(slot, errno, Stage::Shutdown),
            }
        }
    }

    fn slots_of(&self, ring: u32) -> Vec<u32> {
        self.slots.in_use().filter(|&slot| self.slots[slot].ring == ring).collect()
    }

    fn has_slots(&self, ring: u32) -> bool {
        self.slots.in_use().any(|slot| self.slots[slot].ring == ring)
    }

    /// One step of closing a ring: end what was not issued, wait for the rest until the deadline, let go. True if entries of any
    /// ring have ended meanwhile.
    fn close_step(&mut self, index: u32) -> bool {
        let now = self.now;
        let Some(ring) = self.ring_mut(index) else { return false };
        if !ring.takes_step(now) {
            return false;
        }
        // What has ended is not given up, though nobody may have looked at it lately.
        let settles = ring.is_given_up(now) && !self.dead && self.has_slots(index);
        let settled = settles && self.settle_drivers();
        self.end_unissued(index, errno::ESHUTDOWN);
        self.post_waiting(index);
        if self.has_slots(index) && !self.dead && !self.give_up(index) {
            return settled;
        }
        if let Some(ring) = self.rings[index as usize].take() {
            self.spare_edges.push(ring.all_side_edges());
            self.retire_drivers(&ring);
            self.controls.leave(slots_of(ring.capacity()));
            ring.finish();
        }
        settled
    }

    /// Once the deadline has passed with operations in flight: ends the engine if nobody else uses it, else keeps everything.
    /// True if that is done.
    fn give_up(&mut self, index: u32) -> bool {
        let now = self.now;
        let doorbell = self.doorbell();
        let ring = self.ring(index);
        let quiet = match ring.ending() {
            Some(ending) => match ending.outcome() {
                Some(quiet) => quiet,
                None => return false,
            },
            None if !ring.is_given_up(now) => return false,
            // Only the ring has a handle on it.
            None if ring.engine().users() == 1 => {
                ring.end_engine(doorbell);
                let driver = ring.driver;
                self.drivers[driver].ending = true;
                return false;
            }
            None => false,
        };
        if !quiet {
            self.ring(index).engine().leak();
        }
        for slot in self.slots_of(index) {
            self.timers.remove(slot);
            let alone = self.slots[slot].state == State::Issued || self.slots.member(slot).detached;
            let flying = self.slots[slot].sqe.parts().map_or(usize::from(alone), PartList::running);
            for _ in 0..flying {
                self.left_flight(slot);
            }
            self.tell_left();
            let entry = &mut self.slots[slot];
            entry.sqe.signal(Some(errno::ESHUTDOWN));
            entry.quiet = true;
            entry.detail = 0;
            if entry.state == State::Overdue {
                (entry.notif, entry.res) = (true, 0);
            } else {
                entry.set_result(-errno::ESHUTDOWN, Stage::Transfer, 0, self.now);
            }
            if quiet {
                self.end_use(slot);
            } else {
                // The region stays in use for ever.
                entry.sqe.forget_use();
                entry.flags |= CqeFlags::UNQUIET.bits() as u16;
            }
            self.post_now(slot);
        }
        self.ring(index).nothing_is_overdue();
        true
    }

    /// After a panic: ends every entry from the slot table. From then on turns only post what waits for room.
    pub(crate) fn bury(&mut self) {
        self.dead = true;
        event!(
            ERROR,
            rings = self.rings.iter().flatten().count(),
            "poller died of a panic: every entry of its rings is ended"
        );
        self.steps.clear();
        for index in 0..self.rings.len() as u32 {
            let Some(ring) = self.ring_mut(index) else { continue };
            ring.die();
            ring.nothing_is_overdue();
            let own = self.slots_of(index);
            let mut unquiet = false;
            for slot in own {
                let offered = self.offered.iter().any(|offered| offered.slot == slot);
                let entry = &mut self.slots[slot];
                let waits = entry.state == State::Waiting;
                let stopped = match entry.state {
                    State::Free => continue,
                    State::Held | State::Gated | State::Timing | State::Guarding => true,
                    // What the driver was being offered when it panicked may have been started.
                    State::Ready => !offered,
                    State::Issuing | State::Issued | State::Overdue => false,
                    State::Waiting if entry.quiet => continue,
                    State::Waiting => false,
                };
                // One that never came to the gate has its fence still.
                drop(entry.sqe.take_fence());
                if stopped {
                    let ring = self.rings[index as usize].as_ref().expect("looked at above");
                    ring.end_use(&mut entry.sqe);
                } else {
                    // The region stays in use for ever.
                    entry.sqe.forget_use();
                    unquiet = true;
                }
                entry.quiet = true;
                entry.sqe.signal(Some(errno::EOWNERDEAD));
                if waits {
                    // Its result is known and was about to be posted with MORE: now it is the last word.
                    entry.flags |= CqeFlags::UNQUIET.bits() as u16;
                    continue;
                }
                entry.notif = entry.state == State::Overdue;
                let res = if entry.notif { 0 } else { -errno::EOWNERDEAD };
                entry.set_result(res, Stage::Shutdown, 0, self.now);
                if !stopped {
                    entry.flags |= CqeFlags::UNQUIET.bits() as u16;
                }
                if entry.sqe.is_routed() {
                    self.post_now(slot);
                    continue;
                }
                let ring = self.rings[index as usize].as_mut().expect("looked at above");
                ring.wait_for_room(&mut self.slots, slot);
            }
            if unquiet {
                self.ring(index).engine().leak();
            }
        }
    }

    /// Ends what a dead core's ring is still given.
    fn end_late(&mut self, index: u32) {
        while let Some(ring) = self.ring_mut(index)
            && let Some(sqe) = ring.next_entry()
        {
            let slot = self.take_slot(index, &Sqe { flags: EntryFlags::empty(), ..sqe });
            self.cut_short(slot, errno::EOWNERDEAD, Stage::Shutdown);
        }
    }

    fn turn_dead(&mut self) -> Hint {
        // Nobody waits at the gate any more; left there, they would keep the poller awake.
        self.inbox.take_fired(|_, _| ());
        for index in 0..self.rings.len() as u32 {
            self.end_late(index);
            self.post_waiting(index);
            if let Some(ring) = self.ring_mut(index) {
                ring.wake_reaper();
            }
            self.close_step(index);
        }
        Hint::Sleep { until: None }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.inbox.close();
        // A lane that came too late may have entries that hold on to the controls that it lies in.
        while self.controls.queue.pop().is_some() {}
    }
}

/// The errno that an entry's failure began with: its own, or that of what it waited for.
fn root_of(entry: &slots::Slot) -> i32 {
    let at_gate = u32::from(entry.flags & 7) << 16 == Stage::Gate.bits();
    if at_gate && entry.res == -errno::ECANCELED && entry.detail < 0 {
        -entry.detail
    } else {
        entry.res.saturating_neg()
    }
}
