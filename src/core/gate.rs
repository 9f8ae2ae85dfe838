//! The gate: which entries wait for which fences.
//!
//! The core registers once with each fence that entries wait for; the entries are edges on that registration's list. A
//! fence that fires moves the registration to the firing queue, from which a turn releases a bounded number of entries.
//! Nothing here looks at an entry that waits: 100,000 of them cost a turn nothing.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use super::slots::NONE;
use crate::code::errno;
use crate::fence::{Failure, FenceInner, FenceStatus, Inbox, Kind, Node, NodeKey, TimelineCell, recheck_barrier};
use crate::spsc::expect_write;
use crate::sync;
use crate::trace::event;
use crate::transport::Nanos;

/// An entry's place on one registration's list: the edge of a slot with one fence, or one of a side block's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EdgeId(u32);

impl EdgeId {
    const SIDE: u32 = 1 << 31;
    const NONE: EdgeId = EdgeId(u32::MAX);

    pub(crate) fn of_slot(slot: u32) -> EdgeId {
        EdgeId(slot)
    }

    pub(crate) fn of_side(index: usize) -> EdgeId {
        EdgeId(index as u32 | Self::SIDE)
    }
}

#[derive(Clone, Copy, Debug)]
struct Edge {
    /// The registration whose list this is on, or [`NONE`].
    registration: u32,
    slot: u32,
    next: EdgeId,
    prev: EdgeId,
}

const UNLINKED: Edge = Edge { registration: NONE, slot: NONE, next: EdgeId::NONE, prev: EdgeId::NONE };

/// What the core keeps for one fence.
#[derive(Debug)]
struct Registration {
    /// `None` while this place is free.
    fence: Option<Arc<FenceInner>>,
    /// `None` before it was needed first, and while the fence or the inbox has it.
    node: Option<sync::Arc<Node>>,
    head: EdgeId,
    tail: EdgeId,
    /// How its fence ended. [`Pending`](FenceStatus::Pending) unless it is in the firing queue.
    outcome: FenceStatus,
    /// Tells this use of the place from others; 0 while it is free.
    stamp: u64,
}

/// A value of a timeline, and the stamp and place of the registration that waits for it.
type Point = (u64, u64, u32);

/// What the core keeps for one timeline: the points that entries wait for, lowest first.
#[derive(Debug)]
struct TimelineWatch {
    /// Not counted, so that a timeline that everybody dropped goes away.
    timeline: Weak<TimelineCell>,
    /// Which node is its. Never followed.
    node: *const Node,
    /// The node, between a step of the timeline and the look at it.
    fired: Option<sync::Arc<Node>>,
    points: BinaryHeap<Reverse<Point>>,
    /// How many of them nobody waits for any more.
    left: usize,
    /// Values of it may expire.
    may_expire: bool,
    /// How many of its expiries were noticed.
    expiries: u64,
}

/// Fences that the poller asks. Members signal in order; only the first is asked.
#[derive(Debug)]
struct PollGroup {
    /// Its place in `by_stream`, unless it stands alone.
    stream: Option<u64>,
    /// Sequence number and fence.
    members: VecDeque<(u64, Arc<FenceInner>)>,
    /// Since when the present first member is the one that is asked.
    since: Nanos,
}

/// The longest time between two looks: the latency that an old fence may add.
const MAX_QUERY_INTERVAL: Nanos = 5_000_000;

/// So many points that nobody waits for any more are not worth a cleaning.
const LEFT_LEAST: usize = 32;

/// When to look again at something that has been waited for since `since`: after a sixteenth of that time.
pub(crate) fn next_look(now: Nanos, since: Nanos, least: Nanos) -> Nanos {
    now + ((now - since) / 16).clamp(least, MAX_QUERY_INTERVAL)
}

/// One entry let go by one fence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Released {
    pub(crate) slot: u32,
    pub(crate) failure: Option<Failure>,
}

#[derive(Debug)]
pub(crate) struct Gate {
    core: u32,
    inbox: sync::Arc<Inbox>,
    slot_edges: Vec<Edge>,
    side_edges: Vec<Edge>,
    registrations: Vec<Registration>,
    free: Vec<u32>,
    /// Of the last registration.
    stamp: u64,
    /// Registrations whose fence had another core register first.
    others: HashMap<*const FenceInner, u32>,
    timelines: Vec<TimelineWatch>,
    other_timelines: HashMap<*const TimelineCell, u32>,
    /// Registrations whose fence is final, in the order that they fired.
    firing: VecDeque<u32>,
    /// Fences of this turn that nobody waits for any more.
    done: Vec<Arc<FenceInner>>,
    /// Timelines that moved and whose points were not all looked at.
    stepped: Vec<u32>,
    /// Values of a timeline have expired: entries that were to move it are late.
    expired: bool,
    groups: Vec<PollGroup>,
    free_groups: Vec<u32>,
    by_stream: HashMap<u64, u32>,
    /// When to ask which group.
    due: BinaryHeap<Reverse<(Nanos, u32)>>,
}

// SAFETY: the pointers are names, never followed. What a key of a map names is kept alive by the registration or watch
// beside it, and a watch's node can be told from any that is younger, because it is compared with one that lives.
unsafe impl Send for Gate {}

impl Gate {
    pub(crate) fn new(core: u32, inbox: sync::Arc<Inbox>) -> Gate {
        Gate {
            core,
            inbox,
            slot_edges: Vec::new(),
            side_edges: Vec::new(),
            registrations: Vec::new(),
            free: Vec::new(),
            stamp: 0,
            others: HashMap::new(),
            timelines: Vec::new(),
            other_timelines: HashMap::new(),
            firing: VecDeque::new(),
            done: Vec::new(),
            stepped: Vec::new(),
            expired: false,
            groups: Vec::new(),
            free_groups: Vec::new(),
            by_stream: HashMap::new(),
            due: BinaryHeap::new(),
        }
    }

    /// Makes room for a ring's slots and side blocks' fences; returns the first side edge.
    pub(crate) fn grow(&mut self, slots: usize, side_edges: usize) -> usize {
        self.slot_edges.resize(self.slot_edges.len() + slots, UNLINKED);
        let first = self.side_edges.len();
        self.side_edges.resize(first + side_edges, UNLINKED);
        first
    }

    fn edge(&mut self, edge: EdgeId) -> &mut Edge {
        match edge.0 & EdgeId::SIDE {
            0 => &mut self.slot_edges[edge.0 as usize],
            _ => &mut self.side_edges[(edge.0 & !EdgeId::SIDE) as usize],
        }
    }

    /// Lets `slot` wait for `fence` through `edge`, or answers that the fence is final already.
    pub(crate) fn wait(&mut self, slot: u32, edge: EdgeId, fence: &Arc<FenceInner>, now: Nanos) -> FenceStatus {
        let status = fence.status();
        if status != FenceStatus::Pending {
            return status;
        }
        let registration = match self.find(fence) {
            Some(registration) => registration,
            None => match self.register(fence, now) {
                Ok(registration) => registration,
                Err(status) => return status,
            },
        };
        let tail = self.registrations[registration as usize].tail;
        *self.edge(edge) = Edge { registration, slot, next: EdgeId::NONE, prev: tail };
        if tail == EdgeId::NONE {
            self.registrations[registration as usize].head = edge;
        } else {
            self.edge(tail).next = edge;
        }
        self.registrations[registration as usize].tail = edge;
        FenceStatus::Pending
    }

    fn find(&self, fence: &Arc<FenceInner>) -> Option<u32> {
        let first = fence.registrations.first_key(self.core);
        first.or_else(|| self.others.get(&Arc::as_ptr(fence)).copied())
    }

    fn register(&mut self, fence: &Arc<FenceInner>, now: Nanos) -> Result<u32, FenceStatus> {
        let registration = self.free.pop().unwrap_or_else(|| {
            let (head, tail) = (EdgeId::NONE, EdgeId::NONE);
            let outcome = FenceStatus::Pending;
            self.registrations.push(Registration { fence: None, node: None, head, tail, outcome, stamp: 0 });
            self.registrations.len() as u32 - 1
        });
        let place = &mut self.registrations[registration as usize];
        self.stamp += 1;
        place.stamp = self.stamp;
        match &fence.kind {
            // A point is never settled: its timeline moves.
            Kind::Point { timeline, value } => self.watch(timeline, *value, registration),
            Kind::Told | Kind::Place { .. } | Kind::Polled(_) | Kind::Routed(_) => {
                let node = place.node.take();
                let node =
                    node.unwrap_or_else(|| Node::new(sync::Arc::clone(&self.inbox), NodeKey::Fence(registration)));
                if let Err(node) = fence.registrations.add(node) {
                    (place.node, place.stamp) = (Some(node), 0);
                    self.free.push(registration);
                    return Err(fence.status());
                }
                if let Kind::Polled(polled) = &fence.kind {
                    self.ask(polled.group(), fence, now);
                }
            }
        }
        self.registrations[registration as usize].fence = Some(Arc::clone(fence));
        if !fence.registrations.claim_first(self.core, registration) {
            self.others.insert(Arc::as_ptr(fence), registration);
        }
        Ok(registration)
    }

    /// Adds a point to its timeline's watch.
    fn watch(&mut self, timeline: &Arc<TimelineCell>, value: u64, registration: u32) {
        let index = self.watch_steps(timeline);
        let stamp = self.registrations[registration as usize].stamp;
        self.timelines[index as usize].points.push(Reverse((value, stamp, registration)));
    }

    /// The watch of a timeline that has one.
    fn watch_of(&self, timeline: &Arc<TimelineCell>) -> Option<u32> {
        let first = timeline.registrations.first_key(self.core);
        first.or_else(|| self.other_timelines.get(&Arc::as_ptr(timeline)).copied())
    }

    /// Sees to it that the timeline tells this core of its steps.
    pub(crate) fn watch_steps(&mut self, timeline: &Arc<TimelineCell>) -> u32 {
        self.watch_of(timeline).unwrap_or_else(|| {
            let index = self.watch_new(timeline);
            // It may have moved between our look at it and the node's arrival on its list.
            recheck_barrier();
            self.stepped.push(index);
            index
        })
    }

    fn watch_new(&mut self, timeline: &Arc<TimelineCell>) -> u32 {
        let dead = self.timelines.iter().position(|watch| watch.timeline.strong_count() == 0);
        let index = dead.unwrap_or(self.timelines.len()) as u32;
        let first = timeline.registrations.claim_first(self.core, index);
        let node = Node::new(sync::Arc::clone(&self.inbox), NodeKey::Timeline(index, first));
        let watch = TimelineWatch {
            timeline: Arc::downgrade(timeline),
            node: sync::Arc::as_ptr(&node),
            fired: None,
            points: BinaryHeap::new(),
            left: 0,
            may_expire: timeline.may_expire(),
            expiries: 0,
        };
        match dead {
            Some(dead) => {
                self.other_timelines.retain(|_, &mut other| other != index);
                self.timelines[dead] = watch;
            }
            None => self.timelines.push(watch),
        }
        timeline.registrations.add_for_good(node);
        if !first {
            self.other_timelines.insert(Arc::as_ptr(timeline), index);
        }
        index
    }

    /// Adds a polled fence to the group that it is asked in, due at once if it is the first.
    fn ask(&mut self, group: Option<(u64, u64)>, fence: &Arc<FenceInner>, now: Nanos) {
        let known = group.and_then(|(stream, _)| self.by_stream.get(&stream).copied());
        let sequence = group.map_or(0, |(_, sequence)| sequence);
        let index = known.unwrap_or_else(|| {
            let new = PollGroup { stream: group.map(|(stream, _)| stream), members: VecDeque::new(), since: now };
            let index = match self.free_groups.pop() {
                Some(index) => {
                    self.groups[index as usize] = new;
                    index
                }
                None => {
                    self.groups.push(new);
                    self.groups.len() as u32 - 1
                }
            };
            if let Some((stream, _)) = group {
                self.by_stream.insert(stream, index);
            }
            self.due.push(Reverse((now, index)));
            index
        });
        let members = &mut self.groups[index as usize].members;
        let at = members.partition_point(|&(other, _)| other <= sequence);
        members.insert(at, (sequence, Arc::clone(fence)));
    }

    /// Takes what other threads have signalled.
    #[inline]
    pub(crate) fn take_fired(&mut self) -> bool {
        self.inbox.is_touched() && self.empty_inbox()
    }

    fn empty_inbox(&mut self) -> bool {
        self.expect_value();
        let first = self.firing.len();
        let mut any = false;
        self.inbox.take_fired(|node, signalled| {
            any = true;
            match node.key {
                NodeKey::Fence(registration) => {
                    let place = &mut self.registrations[registration as usize];
                    let fence = place.fence.as_ref().expect("a fence with a node is registered");
                    place.outcome = if signalled { FenceStatus::Signalled } else { fence.status() };
                    place.node = Some(node);
                    self.firing.push_back(registration);
                }
                NodeKey::Timeline(timeline, _) => {
                    let watch = &mut self.timelines[timeline as usize];
                    // Else it is that of a timeline that is gone, whose place another one has.
                    if watch.node == sync::Arc::as_ptr(&node) {
                        watch.fired = Some(node);
                        self.stepped.push(timeline);
                    }
                }
            }
        });
        if self.firing.len() > first + 1 {
            // The stack gave them newest first.
            self.firing.make_contiguous()[first..].reverse();
        }
        any
    }

    /// Asks for the cache line of the timeline that moved last, which is looked at once the stack is taken: who moved it has both.
    fn expect_value(&self) {
        if let Some(NodeKey::Timeline(index, true)) = self.inbox.last_fired()
            && let Some(timeline) = self.timeline_of_lowest(index)
        {
            expect_write(Arc::as_ptr(timeline));
        }
    }

    /// The timeline, from a fence on it, if there is one at its lowest point: that spares us its count, whose cache line others
    /// have.
    fn timeline_of_lowest(&self, index: u32) -> Option<&Arc<TimelineCell>> {
        let &Reverse((_, stamp, place)) = self.timelines[index as usize].points.peek()?;
        let place = &self.registrations[place as usize];
        match &place.fence.as_ref().filter(|_| place.stamp == stamp)?.kind {
            Kind::Point { timeline, .. } => Some(timeline),
            _ => None,
        }
    }

    /// Before a look at a timeline: whatever moves it from here on fires its node again.
    fn rearm(&mut self, index: u32) {
        let Some(node) = self.timelines[index as usize].fired.take() else { return };
        if let Some(timeline) = self.timeline_of_lowest(index) {
            timeline.registrations.rearm(node);
        } else if let Some(timeline) = self.timelines[index as usize].timeline.upgrade() {
            timeline.registrations.rearm(node);
        }
    }

    /// Fires the points of timelines that moved, at most `budget` of them.
    #[inline]
    pub(crate) fn step_timelines(&mut self, budget: u32) {
        if !self.stepped.is_empty() {
            self.fire_points(budget);
        }
    }

    fn fire_points(&mut self, mut budget: u32) {
        while let Some(&index) = self.stepped.last() {
            self.rearm(index);
            let watch = &mut self.timelines[index as usize];
            let expiries = match watch.may_expire {
                true => watch.timeline.upgrade().map_or(0, |cell| cell.expiries()),
                false => 0,
            };
            if watch.expiries < expiries {
                watch.expiries = expiries;
                self.expired = true;
            }
            while let Some(&Reverse((_, stamp, registration))) = watch.points.peek() {
                let place = &mut self.registrations[registration as usize];
                let is_left = place.stamp != stamp;
                if !is_left {
                    place.outcome = place.fence.as_ref().expect("it waits for a point").status();
                    if place.outcome == FenceStatus::Pending {
                        break;
                    }
                }
                if budget == 0 {
                    return;
                }
                budget -= 1;
                watch.points.pop();
                if is_left {
                    watch.left -= 1;
                } else {
                    self.firing.push_back(registration);
                }
            }
            self.stepped.pop();
        }
    }

    /// Whether values have expired since this was asked last.
    pub(crate) fn take_expired(&mut self) -> bool {
        std::mem::take(&mut self.expired)
    }

    /// Asks the polled fences that are due, at most `budget` of them.
    #[inline]
    pub(crate) fn poll(&mut self, now: Nanos, budget: u32) {
        if self.next_due().is_some_and(|due| due <= now) {
            self.poll_due(now, budget);
        }
    }

    fn poll_due(&mut self, now: Nanos, mut budget: u32) {
        while let Some(&Reverse((due, index))) = self.due.peek() {
            if due > now || budget == 0 {
                return;
            }
            budget -= 1;
            self.due.pop();
            if let Some(again) = self.poll_group(index, now) {
                self.due.push(Reverse((again, index)));
            }
        }
    }

    /// Asks the first member; `None` if the group is empty and gone.
    fn poll_group(&mut self, index: u32, now: Nanos) -> Option<Nanos> {
        let group = &mut self.groups[index as usize];
        if let Some((_, fence)) = group.members.front() {
            if let Some(least) = settle_by_asking(fence) {
                return Some(next_look(now, group.since, least));
            }
            group.members.pop_front();
            group.since = now;
            if !group.members.is_empty() {
                return Some(now);
            }
        }
        if let Some(stream) = group.stream {
            self.by_stream.remove(&stream);
        }
        self.free_groups.push(index);
        None
    }

    /// When the next polled fence is to be asked.
    #[inline]
    pub(crate) fn next_due(&self) -> Option<Nanos> {
        self.due.peek().map(|&Reverse((due, _))| due)
    }

    /// True if a turn would find something to release.
    #[inline]
    pub(crate) fn is_busy(&self) -> bool {
        !self.firing.is_empty() || !self.stepped.is_empty()
    }

    /// Lets go of one entry whose fence fired. Each call is a bounded step.
    pub(crate) fn release_one(&mut self) -> Option<Released> {
        while let Some(&registration) = self.firing.front() {
            let place = &self.registrations[registration as usize];
            let edge = place.head;
            if edge == EdgeId::NONE {
                self.firing.pop_front();
                self.unregister(registration);
                continue;
            }
            let failure = match place.outcome {
                FenceStatus::Failed(failure) => Some(failure),
                FenceStatus::Signalled => None,
                FenceStatus::Pending => unreachable!("only final fences fire"),
            };
            let Edge { slot, next, .. } = std::mem::replace(self.edge(edge), UNLINKED);
            self.link(registration, EdgeId::NONE, next);
            return Some(Released { slot, failure });
        }
        None
    }

    /// Makes two edges neighbours on a registration's list, of which one or both may be missing.
    #[inline]
    fn link(&mut self, registration: u32, prev: EdgeId, next: EdgeId) {
        match prev {
            EdgeId::NONE => self.registrations[registration as usize].head = next,
            prev => self.edge(prev).next = next,
        }
        match next {
            EdgeId::NONE => self.registrations[registration as usize].tail = prev,
            next => self.edge(next).prev = prev,
        }
    }

    /// Takes an edge off its list, if it is on one.
    pub(crate) fn unlink(&mut self, edge: EdgeId) {
        let Edge { registration, next, prev, .. } = std::mem::replace(self.edge(edge), UNLINKED);
        if registration == NONE {
            return;
        }
        self.link(registration, prev, next);
        if prev == EdgeId::NONE && next == EdgeId::NONE {
            self.leave_point(registration);
        }
    }

    /// Nobody waits for a fence any more. The value of a timeline, which may be far off, is let go of; fences of other kinds
    /// have our node until they are final.
    fn leave_point(&mut self, registration: u32) {
        let place = &self.registrations[registration as usize];
        let Some(fence) = place.fence.as_ref().filter(|_| place.outcome == FenceStatus::Pending) else { return };
        let Kind::Point { timeline, .. } = &fence.kind else { return };
        let watch = self.watch_of(timeline).expect("a point's timeline is watched") as usize;
        fence.registrations.leave_first(self.core, registration);
        self.unregister(registration);
        // Its place in the heap stays, until it comes up, or too many are like it.
        let TimelineWatch { points, left, .. } = &mut self.timelines[watch];
        *left += 1;
        if *left > LEFT_LEAST && *left > points.len() / 2 {
            points.retain(|&Reverse((_, stamp, place))| self.registrations[place as usize].stamp == stamp);
            *left = 0;
        }
    }

    fn unregister(&mut self, registration: u32) {
        let place = &mut self.registrations[registration as usize];
        (place.outcome, place.stamp) = (FenceStatus::Pending, 0);
        if let Some(fence) = place.fence.take() {
            if !self.others.is_empty() {
                self.others.remove(&Arc::as_ptr(&fence));
            }
            match fence.kind {
                // Before its entries' completions: an event that is free then can be recorded again by who sees them.
                Kind::Polled(_) => drop(fence),
                _ => self.done.push(fence),
            }
        }
        self.free.push(registration);
    }

    /// Lets go of fences that are done with and that others have signalled: at the end of a turn, because who did has the count's
    /// cache line.
    #[inline]
    pub(crate) fn drop_done(&mut self) {
        self.done.clear();
    }
}

/// Asks a polled fence and settles it if it has an answer; else gives the shortest time until the next look.
fn settle_by_asking(fence: &FenceInner) -> Option<Nanos> {
    if fence.status() != FenceStatus::Pending {
        return None;
    }
    let Kind::Polled(polled) = &fence.kind else { return None };
    let answer = catch_unwind(AssertUnwindSafe(|| polled.poll()));
    if answer.is_err() {
        event!(ERROR, "the code that asks a fence panicked: the fence fails");
    }
    match answer.unwrap_or(FenceStatus::Failed(Failure { errno: errno::EPROTO, detail: 0 })) {
        FenceStatus::Pending => Some(polled.least_interval()),
        status => {
            fence.settle(status);
            None
        }
    }
}
