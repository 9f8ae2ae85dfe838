//! The core's side of one ring: its queues, and the completions that wait for room.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::cancel::Quiescing;
use super::chain::Deferred;
use super::index::Index;
use super::met::Peers;
use super::slots::{List, NONE, Slot, Slots, State};
use crate::Engine;
use crate::code::Stage;
use crate::cqe::Cqe;
use crate::doorbell::Doorbell;
use crate::region::Ended;
use crate::ring::shared::{LaneWord, MAX_FENCES, Shared, Sides};
use crate::ring::stats::Counts;
use crate::spsc::{Consumer, Producer};
use crate::sqe::Sqe;
use crate::sync::{AtomicU8, Condvar, Mutex, Ordering};
use crate::thread;
use crate::trace::event;
use crate::transport::Nanos;

/// Completions are published at the end of a turn, and after so many.
pub(super) const PUBLISH_EVERY: usize = 64;

#[derive(Debug)]
pub(super) struct RingState {
    /// The one that its ends name it by.
    pub(super) number: u32,
    sq: Consumer<Sqe>,
    pub(super) cq: Producer<Cqe>,
    /// Submitters' lanes, by number.
    lanes: Vec<Option<Lane>>,
    /// What is left of the word taken last.
    current: Option<LaneWord>,
    lanes_first: bool,
    /// The entry taken last came from a lane.
    pub(super) from_lane: bool,
    /// Parked entries, by their `user_data`.
    pub(super) index: Index,
    /// Entries that drains wait for: started, or to be started by the chain that they are in, and without a result.
    pub(super) running: usize,
    /// Units that a drain holds back, in order.
    pub(super) deferred: VecDeque<Deferred>,
    /// A unit with a drain is running: what comes after waits for its end.
    pub(super) barrier: bool,
    /// The next unit drains too.
    pub(super) drain_next: bool,
    /// Callers that wait for quiet.
    pub(super) quiescing: Vec<Quiescing>,
    /// Slots whose completion found the CQ full, in order.
    waiting: List,
    /// Uses of regions that ended since the last publish.
    pub(super) ended: Ended,
    /// Units of capacity given back, ever.
    freed: u64,
    /// Counts of entries without a peer.
    pub(super) others: Counts,
    /// Which of the core's drivers.
    pub(super) driver: usize,
    /// Its side blocks' edges; there may be more than it needs.
    side_edges: Range<usize>,
    pub(super) peers: Peers,
    closing: Option<(Arc<Closing>, Nanos)>,
    /// Something has happened to it that the next step of closing is for: an entry has ended for good, or a lane has come.
    stirred: bool,
    /// Its engine is being ended, with operations in flight.
    ending: Option<Arc<Ending>>,
    /// Last, so that it is dropped last: entries left in a queue end their uses of regions, which the engine keeps.
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Lane {
    entries: Consumer<Sqe>,
    /// Its submitter is gone: forget it once it is empty.
    retired: bool,
}

/// The end of a ring, for the thread that closes it to wait for.
#[derive(Debug)]
pub(crate) struct Closing {
    /// How long to wait for operations in flight.
    grace: Duration,
    /// The completions of what ends while the ring closes, if somebody asked for them.
    kept: Option<Mutex<Vec<Cqe>>>,
    done: Mutex<bool>,
    changed: Condvar,
}

impl Closing {
    pub(crate) fn new(grace: Duration, keep: bool) -> Arc<Closing> {
        let kept = keep.then(Mutex::default);
        Arc::new(Closing { grace, kept, done: Mutex::new(false), changed: Condvar::new() })
    }

    fn keep(&self, cqe: Cqe) {
        if let Some(kept) = &self.kept {
            kept.lock().unwrap_or_else(PoisonError::into_inner).push(cqe);
        }
    }

    /// What was kept so far.
    pub(crate) fn take_kept(&self) -> Vec<Cqe> {
        let kept = self.kept.as_ref().map(|kept| kept.lock().unwrap_or_else(PoisonError::into_inner));
        kept.map(|mut kept| std::mem::take(&mut *kept)).unwrap_or_default()
    }

    pub(super) fn finish(&self) {
        *self.done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Blocks until the ring is closed, for at most `limit`. True if it is.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let end = Instant::now().checked_add(limit);
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        while !*done {
            let left = end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                break;
            }
            done = self.changed.wait_timeout(done, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *done
    }
}

/// The end of an engine, made by a thread of its own.
#[derive(Debug)]
pub(crate) struct Ending(AtomicU8);

impl Ending {
    const RUNNING: u8 = 0;
    const QUIET: u8 = 1;
    const BUSY: u8 = 2;

    pub(crate) fn running() -> Ending {
        Ending(AtomicU8::new(Ending::RUNNING))
    }

    /// It is over, and its thread has let go of the engine: Release.
    pub(crate) fn set(&self, quiet: bool) {
        self.0.store(if quiet { Ending::QUIET } else { Ending::BUSY }, Ordering::Release);
    }

    /// Once it is over: whether nothing touches any local memory any more.
    pub(crate) fn outcome(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            Ending::RUNNING => None,
            outcome => Some(outcome == Ending::QUIET),
        }
    }
}

impl RingState {
    pub(super) fn new(
        number: u32,
        shared: Arc<Shared>,
        sq: Consumer<Sqe>,
        cq: Producer<Cqe>,
        driver: usize,
        side_edges: Range<usize>,
    ) -> RingState {
        let capacity = shared.capacity as usize;
        RingState {
            number,
            shared,
            sq,
            cq,
            lanes: Vec::new(),
            current: None,
            lanes_first: false,
            from_lane: false,
            index: Index::with_capacity(capacity),
            running: 0,
            deferred: VecDeque::new(),
            barrier: false,
            drain_next: false,
            quiescing: Vec::new(),
            waiting: List::new(),
            ended: Ended::NONE,
            freed: 0,
            others: Counts::default(),
            driver,
            side_edges,
            peers: Peers::default(),
            closing: None,
            stirred: false,
            ending: None,
        }
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.shared.engine
    }

    /// The ring's side blocks and the edge of the first fence of block `side`.
    pub(super) fn side_edges(&self, side: u32) -> (Arc<Shared>, usize) {
        (Arc::clone(&self.shared), self.side_edges.start + Sides::index(side) * MAX_FENCES)
    }

    pub(super) fn all_side_edges(&self) -> Range<usize> {
        self.side_edges.clone()
    }

    pub(super) fn capacity(&self) -> u32 {
        self.shared.capacity as u32
    }

    /// Ends the uses of regions that an entry has begun.
    pub(super) fn end_use(&self, sqe: &mut Sqe) {
        sqe.end_use(Some(&self.shared.lists));
    }

    /// Nobody is told of an entry's end before the use of its region has ended.
    #[inline]
    pub(super) fn tell_ended(&mut self) {
        self.ended.tell();
    }

    pub(super) fn add_lane(&mut self, lane: u32, entries: Consumer<Sqe>) {
        let at = lane as usize;
        if self.lanes.len() <= at {
            self.lanes.resize_with(at + 1, || None);
        }
        self.lanes[at] = Some(Lane { entries, retired: false });
        // The word of what is in it may be taken already.
        self.stirred = true;
    }

    pub(super) fn retire_lane(&mut self, lane: u32) {
        if let Some(Some(gone)) = self.lanes.get_mut(lane as usize) {
            gone.retired = true;
            self.forget_if_empty(lane);
        }
    }

    fn forget_if_empty(&mut self, lane: u32) {
        let place = &mut self.lanes[lane as usize];
        if place.as_ref().is_some_and(|lane| lane.retired && lane.entries.ready() == 0) {
            *place = None;
            self.shared.free_lanes.lock().unwrap_or_else(PoisonError::into_inner).push(lane);
        }
    }

    /// Whose entries come first changes with every turn, so that neither the owner nor the submitters starve.
    pub(super) fn take_turns(&mut self) {
        self.lanes_first = !self.lanes_first && !self.lanes.is_empty();
    }

    /// The next entry. What a submitter published at once stays together; the lanes' come in the order of the publishes.
    #[inline]
    pub(super) fn next_entry(&mut self) -> Option<Sqe> {
        if self.current.is_some() || self.lanes_first {
            self.next_of_lanes().or_else(|| self.next_of_owner())
        } else {
            self.next_of_owner().or_else(|| self.next_of_lanes())
        }
    }

    /// Takes Nops that end at once off the queues, in the order of [`next_entry`](Self::next_entry), at most `most`, and posts
    /// them: with room in the CQ they need no slot. Returns how many.
    #[inline]
    pub(super) fn pass_nops(&mut self, most: u32) -> u32 {
        if self.is_draining() || self.closing.is_some() || !self.waiting.is_empty() {
            return 0;
        }
        let most = self.cq.room().min(most as usize);
        let mut passed = 0;
        while passed < most {
            let chunk = (most - passed).min(PUBLISH_EVERY - self.cq.unpublished());
            let count = self.pass_some(chunk);
            passed += count;
            // Before they are published: whoever reaps a completion finds its unit given back.
            self.give_back_units(count as u64);
            if self.cq.unpublished() >= PUBLISH_EVERY {
                self.publish();
            }
            if count == 0 || self.is_drained() {
                break;
            }
        }
        self.count_nops(passed as u64);
        passed as u32
    }

    /// Of one queue; 0 if the next entry is no such Nop.
    #[inline]
    fn pass_some(&mut self, most: usize) -> usize {
        let RingState { sq, cq, .. } = self;
        if self.current.is_none() && !self.lanes_first {
            let count = pass(sq, cq, most);
            if count > 0 || !sq.is_drained() {
                return count;
            }
        }
        match self.pass_of_lane(most) {
            Some(count) => count,
            None => pass(&mut self.sq, &mut self.cq, most),
        }
    }

    /// Of the present word, or of the next; `None` if there is none, or its lane has not come.
    fn pass_of_lane(&mut self, most: usize) -> Option<usize> {
        let word = self.word()?;
        let RingState { lanes, cq, .. } = self;
        let lane = lanes.get_mut(word.lane as usize)?.as_mut()?;
        let count = pass(&mut lane.entries, cq, most.min(word.count as usize));
        self.leave_word(word, count as u32);
        Some(count)
    }

    /// The word whose entries are taken now: the present one, or the next.
    fn word(&mut self) -> Option<LaneWord> {
        // One whose lane was not brought yet is found by the next turn.
        if self.current.is_none() && self.may_have_words() {
            self.current = self.shared.published.pop();
        }
        self.current
    }

    /// True if there is a word to take. Asked first, because the queue has a barrier for who finds it empty; without a lane there
    /// is none to look for.
    #[inline]
    fn may_have_words(&self) -> bool {
        !self.lanes.is_empty() && !self.shared.published.is_empty()
    }

    /// So many entries of a word are taken.
    fn leave_word(&mut self, word: LaneWord, taken: u32) {
        let left = word.count - taken;
        self.current = (left > 0).then_some(LaneWord { count: left, ..word });
        if left == 0
            && let Some(Some(lane)) = self.lanes.get_mut(word.lane as usize)
        {
            lane.entries.release();
            self.forget_if_empty(word.lane);
        }
    }

    /// The next entry of the chain that the last one was in: from the same producer.
    pub(super) fn next_of_unit(&mut self) -> Option<Sqe> {
        if self.from_lane { self.next_of_lanes() } else { self.next_of_owner() }
    }

    /// The entries behind the last one, from the same producer, that [start at once](Sqe::starts_at_once) and are for one peer, at
    /// most `most`, before the peer's place here and which of the core's peers it is. `None` if the next one is no such entry, or
    /// its peer is not known. Who takes them [leaves](Self::leave_run) them behind.
    #[inline]
    pub(super) fn peek_run(&mut self, most: u32) -> Option<(u32, u32, impl Iterator<Item = &Sqe>)> {
        let (entries, most) = if self.from_lane {
            let word = self.current?;
            (&mut self.lanes.get_mut(word.lane as usize)?.as_mut()?.entries, most.min(word.count))
        } else {
            (&mut self.sq, most)
        };
        let run = entries.peek_many(most as usize);
        let target = run.clone().next().filter(|sqe| sqe.starts_at_once())?.target;
        let (met, peer) = self.peers.known(target)?;
        Some((met, peer, run.take_while(move |sqe| sqe.starts_at_once() && sqe.target == target)))
    }

    /// So many entries of a run for the peer in this place are taken.
    #[inline]
    pub(super) fn leave_run(&mut self, met: u32, count: u32) {
        self.running += count as usize;
        self.peers[met].counts.accepted += u64::from(count);
        if !self.from_lane {
            self.sq.skip(count as usize);
        } else if let Some(word) = self.current
            && let Some(Some(lane)) = self.lanes.get_mut(word.lane as usize)
        {
            lane.entries.skip(count as usize);
            self.leave_word(word, count);
        }
    }

    /// How much is published on the queues that the last entry did not come from: the owner's entries, or submitters' words.
    pub(super) fn published_elsewhere(&self) -> usize {
        if self.from_lane { self.sq.ready() } else { self.shared.published.len() + usize::from(self.is_within_word()) }
    }

    /// True if entries of the word taken last are left.
    pub(super) fn is_within_word(&self) -> bool {
        self.current.is_some()
    }

    /// True if entries may not start as they come.
    #[inline]
    pub(super) fn is_draining(&self) -> bool {
        self.barrier || self.drain_next || !self.deferred.is_empty()
    }

    #[inline]
    pub(super) fn next_of_owner(&mut self) -> Option<Sqe> {
        self.from_lane = false;
        self.sq.next()
    }

    pub(super) fn next_of_lanes(&mut self) -> Option<Sqe> {
        let word = self.word()?;
        self.from_lane = true;
        // If it is not there, the control that brings it was sent before the word, and will be found by the next turn.
        let lane = self.lanes.get_mut(word.lane as usize)?.as_mut()?;
        let sqe = lane.entries.next().expect("a word is pushed after the entries that it counts");
        self.leave_word(word, 1);
        Some(sqe)
    }

    /// True if a completion can be posted now: none waits before it, and the CQ has a place. A closing ring's go past it.
    #[inline]
    pub(super) fn has_room(&mut self) -> bool {
        self.closing.is_some() || (self.waiting.is_empty() && self.cq.room() > 0)
    }

    /// Posts a completion for which there is room.
    pub(super) fn post(&mut self, cqe: Cqe) {
        let written = self.write(cqe);
        debug_assert!(written, "the caller has seen room");
        self.publish_if_many();
    }

    /// True if completions that come now have to wait behind others.
    #[inline]
    pub(super) fn is_overflowing(&self) -> bool {
        !self.waiting.is_empty() && self.closing.is_none()
    }

    /// Writes a completion, if there is room for it. Who does so gives back what goes with it, and then
    /// [publishes](Self::publish_if_many).
    #[inline]
    pub(super) fn write(&mut self, cqe: Cqe) -> bool {
        match &self.closing {
            None => self.cq.write(cqe).is_ok(),
            Some((closing, _)) => {
                closing.keep(cqe);
                true
            }
        }
    }

    #[inline]
    pub(super) fn publish_if_many(&mut self) {
        if self.cq.unpublished() >= PUBLISH_EVERY {
            self.publish();
        }
    }

    /// An entry has ended for good that moved nothing. Called before its completion is published.
    #[inline]
    pub(super) fn give_back_unit(&mut self) {
        self.give_back_units(1);
    }

    #[inline]
    pub(super) fn give_back_units(&mut self, count: u64) {
        self.freed += count;
        self.stirred |= count > 0;
    }

    /// An entry has ended for good; `silent`: without a completion. Called as [`give_back_unit`](Self::give_back_unit).
    pub(super) fn give_back(&mut self, entry: &Slot, silent: bool) {
        if entry.peer != NONE {
            self.peers[entry.peer].share.give_back(1);
        }
        self.count_end(entry, silent);
        self.give_back_unit();
    }

    /// An entry has its result, and the transport still has it.
    pub(super) fn add_overdue(&mut self, peer: u32) {
        let met = &mut self.peers[peer];
        met.share.add_overdue();
        met.counts.overdue += 1;
        if met.counts.overdue == 1 {
            event!(WARN, ring = self.number, peer = self.name_of(peer), "peer has an overdue entry");
        }
    }

    /// The transport has let go of such an entry.
    pub(super) fn remove_overdue(&mut self, peer: u32) {
        let met = &mut self.peers[peer];
        met.share.remove_overdue();
        met.counts.overdue -= 1;
        if met.counts.overdue == 0 {
            event!(INFO, ring = self.number, peer = self.name_of(peer), "peer has no overdue entry any more");
        }
    }

    #[cfg(feature = "tracing")]
    fn name_of(&self, peer: u32) -> String {
        self.engine().segment(self.peers[peer].target).map(|segment| segment.name().to_owned()).unwrap_or_default()
    }

    /// Counts an entry that came off a queue, and finds its peer.
    #[inline]
    pub(super) fn meet(&mut self, sqe: &Sqe) -> u32 {
        let Some(target) = sqe.peer() else {
            self.others.accepted += 1;
            return NONE;
        };
        let RingState { peers, shared, .. } = self;
        let peer = peers.meet(target, || shared.share(target));
        peers[peer].counts.accepted += 1;
        peer
    }

    /// Lets everybody see what was taken, given back and posted.
    #[inline]
    pub(super) fn publish(&mut self) {
        // In this order: whoever sees a unit given back finds a place in the SQ, and whoever reaps a completion finds its
        // unit given back, and the use of its region ended.
        self.ended.tell();
        self.sq.release();
        if let Some(LaneWord { lane, .. }) = self.current
            && let Some(Some(lane)) = self.lanes.get_mut(lane as usize)
        {
            lane.entries.release();
        }
        if self.shared.freed.load(Ordering::Relaxed) != self.freed {
            self.shared.freed.store(self.freed, Ordering::Release);
        }
        let before = self.cq.published();
        let posted = self.cq.publish() > 0;
        let settled = self.shared.settled.load(Ordering::Relaxed) != self.freed;
        if settled {
            self.shared.settled.store(self.freed, Ordering::Release);
        }
        // A reaper that saw completions before they were settled, or counted on ones that were skipped, may sleep for more
        // than will come.
        if (posted || settled) && self.shared.reaper.ring(self.cq.published()) && self.shared.sleeper_is_done() {
            self.shared.reaper.ring_always();
        }
        if posted && let Some(eventfd) = self.shared.eventfd.get() {
            // After the doorbell, which has the barrier that this needs: either we see that the reaper had emptied the queue,
            // or it sees these completions when it gives the room of the last ones back.
            eventfd.signal_if(|| self.cq.released() >= before);
        }
    }

    /// The same, if something was posted that nobody sees yet.
    pub(super) fn publish_posted(&mut self) {
        if self.cq.unpublished() > 0 {
            self.publish();
        }
    }

    /// Lets a completion wait in its slot.
    pub(super) fn wait_for_room(&mut self, slots: &mut Slots, slot: u32) {
        slots[slot].state = State::Waiting;
        self.waiting.push_back(slots, slot);
        // The barrier that pairs with the reaper's is the doorbell's, before the last look: either the reaper sees the flag, or that
        // look at the CQ sees its room.
        self.shared.overflowing.store(true, Ordering::Relaxed);
    }

    /// The first completion that waits, if there is room for it now.
    pub(super) fn first_waiting(&mut self) -> Option<u32> {
        let slot = self.waiting.front()?;
        (self.closing.is_some() || self.cq.room() > 0).then_some(slot)
    }

    pub(super) fn stop_waiting(&mut self, slots: &mut Slots, slot: u32) {
        self.waiting.remove(slots, slot);
        if self.waiting.is_empty() {
            self.shared.overflowing.store(false, Ordering::Relaxed);
        }
    }

    /// True if there are entries to take.
    #[inline]
    pub(super) fn has_entries(&mut self) -> bool {
        !self.sq.is_drained() || self.sq.look_again() || self.is_within_word() || self.may_have_words()
    }

    /// True if everything was taken that the last look at the queues showed.
    #[inline]
    pub(super) fn is_drained(&self) -> bool {
        self.sq.is_drained() && self.lanes.is_empty() && self.current.is_none()
    }

    /// The last look before sleeping.
    pub(super) fn has_input(&self) -> bool {
        self.sq.ready() > 0
            || !self.shared.published.is_empty()
            || (!self.waiting.is_empty() && self.cq.has_room_now())
            || (self.is_closing() && self.stirred)
            || self.ending.as_ref().is_some_and(|ending| ending.outcome().is_some())
    }

    pub(super) fn close(&mut self, closing: Arc<Closing>, now: Nanos) {
        self.shared.end(false);
        let deadline = now.saturating_add(closing.grace.as_nanos().try_into().unwrap_or(Nanos::MAX));
        self.closing = Some((closing, deadline));
        self.stirred = true;
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// True if it is closing and there is something to do for that. A step looks at all slots, which would make other rings'
    /// turns slow.
    pub(super) fn takes_step(&mut self, now: Nanos) -> bool {
        let Some((_, deadline)) = &self.closing else { return false };
        let due = self.ending.as_ref().map_or(*deadline <= now, |ending| ending.outcome().is_some());
        let come = self.sq.ready() > 0 || !self.shared.published.is_empty();
        std::mem::take(&mut self.stirred) || due || come
    }

    /// When to stop waiting for operations in flight; whoever ends the engine says when it is done.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.closing.as_ref().filter(|_| self.ending.is_none()).map(|&(_, deadline)| deadline)
    }

    /// True if operations in flight are not waited for any longer, and nobody ends the engine yet.
    pub(super) fn is_given_up(&self, now: Nanos) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }

    pub(super) fn ending(&self) -> Option<&Ending> {
        self.ending.as_deref()
    }

    /// Closes the engine's transport, on a thread of its own: it may take seconds, in which other rings have their turns.
    pub(super) fn end_engine(&mut self, doorbell: Arc<Doorbell>) {
        let ending = Arc::new(Ending::running());
        self.ending = Some(Arc::clone(&ending));
        event!(WARN, ring = self.number, engine = self.engine().name(), "ending the engine with transfers in flight");
        let transport = Arc::clone(self.engine().transport());
        let report = Arc::clone(&ending);
        let helper = move || {
            let closed = catch_unwind(AssertUnwindSafe(|| transport.close()));
            // Before the report: after it, the ring is the engine's last user.
            drop(transport);
            report.set(matches!(closed, Ok(Ok(()))));
            doorbell.ring_always();
        };
        if thread::spawn("moonring-close", helper).is_err() {
            ending.set(false);
        }
    }

    /// The core forgets the ring.
    pub(super) fn finish(mut self) {
        self.publish();
        let stats = self.stats();
        event!(
            DEBUG,
            ring = self.number,
            engine = self.engine().name(),
            accepted = stats.total.accepted,
            ok = stats.total.ok,
            failed = stats.total.failed,
            cancelled = stats.total.cancelled,
            "ring closed"
        );
        let first = self.shared.last_stats.set(stats);
        debug_assert!(first.is_ok(), "a ring is finished once");
        if let Some((closing, _)) = self.closing.take() {
            drop(self);
            closing.finish();
        }
    }

    /// The poller died: nothing is accepted any more, and waiters look up.
    pub(super) fn die(&mut self) {
        self.shared.end(true);
        self.wake_reaper();
        if let Some(eventfd) = self.shared.eventfd.get() {
            eventfd.signal_if(|| true);
        }
    }

    pub(super) fn wake_reaper(&self) {
        self.shared.reaper.ring_always();
    }
}

/// Posts the plain Nops at the head of a queue, at most `most`, as far as there is room. How many.
#[inline]
fn pass(entries: &mut Consumer<Sqe>, cq: &mut Producer<Cqe>, most: usize) -> usize {
    let nops = entries.peek_many(most).take_while(|sqe| sqe.is_plain_nop());
    let count = cq.write_many(nops.map(|sqe| Cqe::new(sqe.user_data, 0, Stage::Done.bits(), 0, 0, 0)));
    entries.skip(count);
    count
}
