//! The core counts what it takes and what ends. It alone writes the counts, and shows them between two entries.

use super::Core;
use super::slots::Slot;
use crate::Engine;
use crate::code::Stage;
use crate::cqe::Outcome;
use crate::ring::share::{peer_at, place};
use crate::ring::stats::{Counts, PeerStats, Stats};
use crate::sqe::{Opcode, Sqe};

/// One ring's counts.
#[derive(Debug, Default)]
pub(super) struct Tally {
    total: Counts,
    /// By their [`place`].
    peers: Vec<Counts>,
}

impl Tally {
    fn peer(&mut self, target: u32) -> &mut Counts {
        let at = place(target);
        if self.peers.len() <= at {
            self.peers.resize(at + 1, Counts::default());
        }
        &mut self.peers[at]
    }

    /// An entry came off a queue.
    #[inline]
    pub(super) fn take(&mut self, sqe: &Sqe) {
        self.total.accepted += 1;
        if let Some(target) = sqe.peer() {
            self.peer(target).accepted += 1;
        }
    }

    /// A message came, which is counted as an entry.
    pub(super) fn take_message(&mut self) {
        self.total.accepted += 1;
    }

    /// So many Nops came and ended at once.
    #[inline]
    pub(super) fn pass_nops(&mut self, count: u32) {
        let count = u64::from(count);
        self.total.accepted += count;
        self.total.ok += count;
        self.total.stages.done += count;
    }

    /// An entry has its last completion, or has ended without one if it is `silent`.
    #[inline]
    pub(super) fn end(&mut self, entry: &Slot, silent: bool) {
        let stage = Stage::from_bits(u32::from(entry.flags) << 16);
        let outcome = Outcome::of(stage, entry.res, entry.notif);
        end(&mut self.total, entry, stage, outcome, silent);
        if let Some(target) = entry.sqe.peer() {
            end(self.peer(target), entry, stage, outcome, silent);
        }
    }

    /// An entry of a segment has its result, and the transport still has it. How many of the segment's are so.
    pub(super) fn add_overdue(&mut self, target: u32) -> u64 {
        self.total.overdue += 1;
        self.peer(target).overdue += 1;
        self.peer(target).overdue
    }

    /// The transport has let go of it. How many of the segment's it has not.
    pub(super) fn remove_overdue(&mut self, target: u32) -> u64 {
        self.total.overdue -= 1;
        self.peer(target).overdue -= 1;
        self.peer(target).overdue
    }

    /// Every entry has its last word, whatever the transport still has.
    pub(super) fn nothing_is_overdue(&mut self) {
        self.total.overdue = 0;
        self.peers.iter_mut().for_each(|peer| peer.overdue = 0);
    }

    pub(super) fn show(&self, capacity: u32, engine: &Engine) -> Stats {
        let mut peers: Vec<PeerStats> = Vec::new();
        for (at, counts) in self.peers.iter().enumerate().filter(|(_, counts)| counts.accepted > 0) {
            let Some(name) = engine.peer_name(peer_at(at)) else { continue };
            // Reopened, a segment has a new number and its old name; so has another client of one Store.
            match peers.iter_mut().find(|peer| peer.name == name) {
                Some(peer) => peer.counts.add(counts),
                None => peers.push(PeerStats { name, counts: *counts }),
            }
        }
        let mut stats = Stats { capacity, total: self.total, peers };
        for counts in std::iter::once(&mut stats.total).chain(stats.peers.iter_mut().map(|peer| &mut peer.counts)) {
            counts.outstanding = counts.accepted - counts.ok - counts.failed - counts.cancelled;
        }
        stats
    }
}

#[inline]
fn end(counts: &mut Counts, entry: &Slot, stage: Stage, outcome: Outcome, silent: bool) {
    *counts.stages.of_mut(stage) += 1;
    counts.silent += u64::from(silent);
    match outcome {
        Outcome::Ok => counts.ok += 1,
        Outcome::Failed => counts.failed += 1,
        Outcome::Cancelled => counts.cancelled += 1,
    }
    if outcome == Outcome::Ok {
        match entry.sqe.op {
            Opcode::Read | Opcode::Readv | Opcode::Get => counts.read_bytes += entry.res as u64,
            Opcode::Write | Opcode::Writev | Opcode::Put => counts.written_bytes += entry.res as u64,
            _ => {}
        }
    }
}

impl Core {
    /// A ring's counts, which have everything that was submitted before and every completion that is visible, and no other.
    pub(super) fn stats_of(&mut self, ring: u32) -> Stats {
        if self.dead {
            self.end_late(ring);
        } else {
            self.take_all(ring);
        }
        self.post_waiting(ring);
        let in_use = if cfg!(debug_assertions) { self.slots_of(ring).len() as u64 } else { 0 };
        let stats = self.ring(ring).stats();
        debug_assert_eq!(stats.total.outstanding, in_use, "an entry is in a slot until it has its last completion");
        stats
    }
}
