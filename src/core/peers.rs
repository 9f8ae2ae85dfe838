//! Issuing: ready entries wait per peer, and go to the transport in batches.

use std::ptr;
use std::sync::Arc;

use super::ring::RingState;
use super::slots::{List, NONE, Slots, State};
use super::{BUDGET, Core, merge};
use crate::Segment;
use crate::code::{Stage, errno};
use crate::ring::parts::Part;
use crate::sqe::{Opcode, Sqe};
use crate::store::StoreDriver;
use crate::store::pool::Pool;
use crate::transport::{Caps, Direction, Driver, Event, Hint, Nanos, Op, Token};

/// The driver of an engine, or of a Store client, on this core, shared by the core's rings that use it.
#[derive(Debug)]
pub(super) struct DriverState {
    /// Which engine or client. No handle on it: rings keep the one, entries the other, and the last of them ends it.
    pub(super) engine: u64,
    pub(super) caps: Caps,
    pub(super) driver: Box<dyn Driver>,
    /// The transport is being closed: leave it alone.
    pub(super) ending: bool,
}

impl DriverState {
    /// The engine of a place whose last ring is gone.
    pub(super) const NO_ENGINE: u64 = 0;
    /// The driver of a ring that has none yet.
    pub(super) const NONE: usize = usize::MAX;
}

/// In the place of a driver whose last ring is gone.
#[derive(Debug)]
struct Retired;

impl Driver for Retired {
    fn submit(&mut self, _target: u32, _ops: &[Op], _now: Nanos, _out: &mut Vec<Event>) -> usize {
        unreachable!("a driver is retired when no ring has it")
    }

    fn poll(&mut self, _now: Nanos, _budget: u32, _out: &mut Vec<Event>) -> Hint {
        Hint::Sleep { until: None }
    }

    fn settle(&mut self, _now: Nanos, _out: &mut Vec<Event>) {}

    fn in_flight(&self) -> usize {
        0
    }
}

/// The driver of a peer whose driver is retired.
const NO_DRIVER: usize = DriverState::NONE;

/// An entry in a batch that a driver is offered, and the operation that it is, or is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offered {
    pub(super) slot: u32,
    op: u32,
}

/// One segment of one engine, or one Store client.
#[derive(Debug)]
pub(super) struct Peer {
    driver: usize,
    target: u32,
    /// Tells when the segment has been reopened since.
    segment: Option<Segment>,
    /// Entries whose fences have signalled, in that order.
    ready: List,
    /// Operations with the transport.
    in_flight: u32,
    /// In `ready_peers`.
    queued: bool,
}

impl Peer {
    /// Puts an entry behind the ready ones.
    #[inline]
    pub(super) fn line_up(&mut self, slots: &mut Slots, slot: u32) {
        slots[slot].state = State::Ready;
        self.ready.push_back(slots, slot);
    }

    /// Puts entries that are [`Ready`](State::Ready) behind those that it has.
    #[inline]
    pub(super) fn line_up_all(&mut self, slots: &mut Slots, entries: List) {
        self.ready.append(slots, entries);
    }

    /// True if it is to be queued for its turn: it has ready entries and room in flight, and is not.
    #[inline]
    pub(super) fn takes_turn(&mut self, drivers: &[DriverState]) -> bool {
        let new =
            !self.queued && !self.ready.is_empty() && self.in_flight < drivers[self.driver].caps.max_in_flight_per_peer;
        self.queued |= new;
        new
    }
}

fn op_of(token: Token, sqe: &Sqe, remote: u64) -> Op {
    Op { token, direction: direction_of(sqe), local: sqe.local, len: sqe.len, remote }
}

fn direction_of(sqe: &Sqe) -> Direction {
    let reads = matches!(sqe.op, Opcode::Read | Opcode::Readv | Opcode::Get);
    if reads { Direction::Read } else { Direction::Write }
}

impl Core {
    /// Lines an entry up behind its peer's ready ones.
    pub(super) fn make_ready(&mut self, slot: u32) {
        let peer = self.peer_of(slot);
        self.peers[peer as usize].line_up(&mut self.slots, slot);
        self.queue_peer(peer);
    }

    pub(super) fn leave_ready(&mut self, slot: u32) {
        let peer = self.peer_of(slot);
        self.peers[peer as usize].ready.remove(&mut self.slots, slot);
    }

    /// An operation is not with the transport any more, or only for a while that the entry does not wait for. Its peer hears of it
    /// in [`tell_left`](Self::tell_left).
    pub(super) fn left_flight(&mut self, slot: u32) {
        if !std::mem::take(&mut self.slots.member(slot).rides) {
            let entry = &self.slots[slot];
            self.count_left((entry.ring, entry.peer), 1);
        }
    }

    /// So many operations to a ring's peer have left the transport.
    fn count_left(&mut self, peer: (u32, u32), count: u32) {
        if self.left.0 != peer {
            self.tell_left();
            self.left.0 = peer;
        }
        self.left.1 += count;
    }

    /// Gives the peer of operations that have left, one after the other, the room that they had.
    pub(super) fn tell_left(&mut self) {
        let ((ring, met), count) = std::mem::take(&mut self.left);
        if count > 0 {
            let peer = self.ring(ring).peers[met].peer;
            self.peers[peer as usize].in_flight -= count;
            self.queue_peer(peer);
        }
    }

    #[inline]
    fn peer_of(&mut self, slot: u32) -> u32 {
        let (ring, peer) = (self.slots[slot].ring, self.slots[slot].peer);
        match self.ring(ring).peers[peer].peer {
            NONE => self.meet(slot),
            known => known,
        }
    }

    /// The peer of an entry, met for the first time by its ring.
    #[cold]
    fn meet(&mut self, slot: u32) -> u32 {
        let entry = &self.slots[slot];
        let (ring, met, target) = (entry.ring, entry.peer, entry.sqe.target);
        let (driver, segment) = match entry.sqe.request() {
            Some(request) => {
                let (id, pool) = (request.client.id, Arc::clone(&request.client.pool));
                (self.store_driver(id, pool), None)
            }
            None => {
                let state = self.ring(ring);
                (state.driver, state.engine().segment(target))
            }
        };
        let known = self.peers.iter().position(|peer| peer.driver == driver && peer.target == target);
        let peer = known.unwrap_or_else(|| {
            let peer = Peer { driver, target, segment, ready: List::new(), in_flight: 0, queued: false };
            match self.peers.iter().position(|peer| peer.driver == NO_DRIVER) {
                Some(spare) => {
                    self.peers[spare] = peer;
                    spare
                }
                None => {
                    self.peers.push(peer);
                    self.peers.len() - 1
                }
            }
        }) as u32;
        self.ring(ring).peers[met].peer = peer;
        peer
    }

    fn store_driver(&mut self, client: u64, pool: Arc<Pool>) -> usize {
        if let Some(known) = self.driver_of(client) {
            return known;
        }
        // Those of clients that have ended have no entries any more.
        let ended: Vec<usize> =
            (0..self.drivers.len()).filter(|&driver| self.drivers[driver].driver.is_over()).collect();
        ended.into_iter().for_each(|driver| self.retire_driver(driver));
        let caps = StoreDriver::caps(&pool);
        let driver = StoreDriver::new(pool, self.doorbell());
        self.add_driver(client, caps, Box::new(driver))
    }

    /// A ring is gone, and with it the drivers that no other one uses.
    pub(super) fn retire_drivers(&mut self, ring: &RingState) {
        let known =
            |ring: &RingState| ring.peers.iter().map(|met| met.peer).filter(|&peer| peer != NONE).collect::<Vec<_>>();
        let stores = known(ring).into_iter().map(|peer| self.peers[peer as usize].driver);
        let mut drivers: Vec<usize> = stores.chain([ring.driver]).collect();
        drivers.sort_unstable();
        drivers.dedup();
        for driver in drivers {
            let of_driver = |&peer: &u32| self.peers[peer as usize].driver == driver;
            let uses = |other: &RingState| other.driver == driver || known(other).iter().any(of_driver);
            if !self.rings.iter().flatten().any(uses) {
                self.retire_driver(driver);
            }
        }
    }

    /// The last user of a driver is gone: its engine may end from now on, and others use its place and its peers'.
    fn retire_driver(&mut self, driver: usize) {
        let Some(state) = self.drivers.get_mut(driver) else { return };
        (state.engine, state.ending, state.driver) = (DriverState::NO_ENGINE, false, Box::new(Retired));
        state.caps.threads_here = false;
        self.ready_peers.retain(|&peer| self.peers[peer as usize].driver != driver);
        for (index, peer) in (0u32..).zip(&mut self.peers).filter(|(_, peer)| peer.driver == driver) {
            (peer.driver, peer.segment) = (NO_DRIVER, None);
            for ring in self.rings.iter_mut().flatten() {
                ring.peers.iter_mut().filter(|met| met.peer == index).for_each(|met| met.peer = NONE);
            }
        }
    }

    /// Gives a peer its turn, if it has ready entries and room in flight.
    #[inline]
    fn queue_peer(&mut self, index: u32) {
        if self.peers[index as usize].takes_turn(&self.drivers) {
            self.ready_peers.push_back(index);
        }
    }

    /// Offers each waiting peer's next batch to its driver.
    #[inline]
    pub(super) fn issue(&mut self) -> bool {
        !self.ready_peers.is_empty() && self.issue_some()
    }

    fn issue_some(&mut self) -> bool {
        let mut any = false;
        // A transport may take its time.
        self.rings.iter_mut().flatten().for_each(RingState::publish_posted);
        for _ in 0..self.ready_peers.len() {
            let Some(index) = self.ready_peers.pop_front() else { break };
            if !self.driver_has_room(index) {
                self.ready_peers.push_back(index);
                continue;
            }
            self.peers[index as usize].queued = false;
            any |= self.issue_batch(index);
            self.queue_peer(index);
        }
        any
    }

    fn driver_has_room(&self, peer: u32) -> bool {
        self.drivers[self.peers[peer as usize].driver].driver.has_room()
    }

    /// True if a turn would offer something to a driver that may take it.
    #[inline]
    pub(super) fn has_issuable(&self) -> bool {
        !self.ready_peers.is_empty() && self.ready_peers.iter().any(|&peer| self.driver_has_room(peer))
    }

    /// True if that got anything out of the way.
    fn issue_batch(&mut self, index: u32) -> bool {
        let peer = &self.peers[index as usize];
        if peer.segment.as_ref().is_some_and(Segment::is_stale) {
            return self.refuse_stale(index);
        }
        self.gather(index);
        if self.ops.is_empty() {
            // What was ready is cancelled.
            return false;
        }
        let peer = &self.peers[index as usize];
        let driver = &mut self.drivers[peer.driver].driver;
        let taken = driver.submit(peer.target, &self.ops, self.now, &mut self.events);
        assert!(taken <= self.ops.len(), "a driver takes no more than it was offered");
        let mut last = self.ops[..taken].last().map(|op| op.token.slot());
        for left in &self.ops[taken..] {
            let entry = &mut self.slots[left.token.slot()];
            if entry.is_plain() {
                entry.state = State::Ready;
            }
        }
        self.ops.clear();
        let mut before: Option<Offered> = None;
        for offered in self.offered.drain(..) {
            let Offered { slot, op } = offered;
            if op as usize >= taken {
                break;
            }
            if let Some(before) = before.replace(offered)
                && before.op == op
            {
                self.slots.member(before.slot).merged = slot;
                self.slots.member(slot).rides = true;
            }
            if op as usize == taken - 1 {
                last = Some(slot);
            }
            let entry = &mut self.slots[slot];
            if entry.is_plain() {
                (entry.state, entry.issued) = (State::Issued, self.now);
                continue;
            }
            let began = entry.state == State::Issuing;
            let whole = entry.sqe.parts_mut().is_none_or(|parts| {
                parts.issue(1);
                parts.unissued().is_empty()
            });
            entry.state = if whole { State::Issued } else { State::Issuing };
            if began || self.slots.member(slot).again {
                continue;
            }
            self.slots[slot].issued = self.now;
            match self.slots.member(slot).transfer_limit {
                0 => self.timers.remove(slot),
                limit => self.timers.set(slot, self.now.saturating_add(limit)),
            }
        }
        let peer = &mut self.peers[index as usize];
        peer.in_flight += taken as u32;
        if let Some(slot) = last
            && self.slots[slot].state == State::Issuing
        {
            // It stays for its other parts.
            last = peer.ready.before(&self.slots, slot);
        }
        if let Some(last) = last {
            // They came off the list's front in order.
            peer.ready.remove_through(&mut self.slots, last);
        }
        self.land_all();
        taken > 0
    }

    /// Makes a batch for a peer's driver of the entries at the front of the ready list, where they stay until it is known which
    /// of them the driver takes.
    ///
    /// A plain one that stays an operation of its own counts as issued from here on, and is taken back if the driver leaves it.
    /// Of each of the others there is a note in `offered`.
    fn gather(&mut self, index: u32) {
        let peer = &self.peers[index as usize];
        let caps = &self.drivers[peer.driver].caps;
        let most = caps.max_batch.min(caps.max_in_flight_per_peer - peer.in_flight).min(BUDGET) as usize;
        let merges = caps.max_merged > 0;
        let Core { slots, ops, offered, now, .. } = self;
        let mut next = peer.ready.front();
        for _ in 0..BUDGET {
            let Some(slot) = next else { break };
            next = peer.ready.after(slots, slot);
            let token = slots.token(slot);
            let entry = &mut slots[slot];
            if entry.is_plain() && !(merges && entry.sqe.may_merge()) {
                if ops.len() == most {
                    break;
                }
                ops.push(op_of(token, &entry.sqe, entry.sqe.remote));
                (entry.state, entry.issued) = (State::Issued, *now);
                continue;
            }
            let sqe = &slots[slot].sqe;
            if let Some(parts) = sqe.parts() {
                let direction = direction_of(sqe);
                let room = most - ops.len();
                for &Part { local, len, remote, .. } in parts.unissued().iter().take(room) {
                    offered.push(Offered { slot, op: ops.len() as u32 });
                    ops.push(Op { token, direction, local, len, remote });
                }
                if parts.unissued().len() > room {
                    break;
                }
            } else if merges
                && let Some(&before) = offered.last()
                && before.op as usize == ops.len() - 1
                && let Some(op) = ops.last_mut()
                && merge::extend(op, &slots[before.slot], &slots[slot], caps.max_merged)
            {
                offered.push(Offered { slot, ..before });
            } else if ops.len() < most {
                offered.push(Offered { slot, op: ops.len() as u32 });
                let request = sqe.request().map(|request| ptr::from_ref(request).expose_provenance() as u64);
                ops.push(op_of(token, sqe, request.unwrap_or(sqe.remote)));
            } else {
                break;
            }
        }
    }

    fn refuse_stale(&mut self, index: u32) -> bool {
        for _ in 0..BUDGET {
            let Some(slot) = self.peers[index as usize].ready.front() else { break };
            if self.slots[slot].state == State::Issuing {
                self.stop_issuing(slot, errno::ESTALE, Stage::Issue);
            } else {
                self.leave_ready(slot);
                self.conclude(slot, -errno::ESTALE, Stage::Issue, 0);
            }
        }
        true
    }

    /// Looks for ends in every driver with operations in flight.
    pub(super) fn poll_drivers(&mut self) -> (bool, Option<Hint>) {
        let mut hint = None;
        let mut any = false;
        for DriverState { driver, ending, .. } in &mut self.drivers {
            if *ending || driver.in_flight() == 0 {
                continue;
            }
            let wait = driver.poll(self.now, BUDGET, &mut self.events);
            hint = Some(hint.map_or(wait, |other: Hint| other.sooner(wait)));
        }
        if !self.events.is_empty() {
            any = true;
            self.land_all();
        }
        (any, hint)
    }

    /// Asks every driver for every end that there is, because an entry is about to be called late, or given up. True if there
    /// was one.
    pub(super) fn settle_drivers(&mut self) -> bool {
        for DriverState { driver, .. } in self.drivers.iter_mut().filter(|driver| !driver.ending) {
            driver.settle(self.now, &mut self.events);
        }
        let any = !self.events.is_empty();
        self.land_all();
        any
    }

    /// Between the transport's word and any notice of it: the place for a device's flush, once per turn.
    fn land_all(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        let mut rest = &events[..];
        while let [event, others @ ..] = rest {
            rest = match self.land_run(rest) {
                0 => {
                    self.land(*event);
                    others
                }
                run => &rest[run..],
            };
        }
        self.tell_left();
        events.clear();
        self.events = events;
    }

    /// Lands the events at the front that are ends of plain entries, well and quiet, of one ring and one peer: most are, and for
    /// these [`land`](Self::land) would do the same again and again. How many.
    fn land_run(&mut self, events: &[Event]) -> usize {
        let Some(&Event::Result { op, .. }) = events.first() else { return 0 };
        let Some(first) = self.slots.find(op).filter(|&slot| self.slots[slot].is_plain()) else { return 0 };
        let of = (self.slots[first].ring, self.slots[first].peer);
        let ring = self.rings[of.0 as usize].as_mut().expect("a ring outlives its entries");
        let count = ring.post_run(&mut self.slots, of, events, self.now);
        if count > 0 {
            self.count_left(of, count as u32);
        }
        count
    }
}
