//! The core counts what it takes and what ends. It alone writes the counts, and shows them between two entries.

use std::collections::HashMap;

use super::Core;
use super::slots::{NONE, Slot};
use crate::Engine;
use crate::code::Stage;
use crate::cqe::Outcome;
use crate::ring::share::place;
use crate::ring::stats::{Counts, PeerStats, Stats};
use crate::sqe::{Opcode, Sqe};

/// One ring's counts.
#[derive(Debug, Default)]
pub(super) struct Tally {
    total: Counts,
    /// Of the peers that it has met, by number.
    peers: Vec<(u32, Counts)>,
    /// Where in `peers` a peer is, by its [`place`]; [`NONE`] if it was not met. An engine that opens one peer after the other
    /// makes this long, so it has little for each.
    met: Vec<u32>,
}

impl Tally {
    fn peer(&mut self, target: u32) -> &mut Counts {
        let at = place(target);
        if self.met.len() <= at {
            self.met.resize(at + 1, NONE);
        }
        if self.met[at] == NONE {
            self.met[at] = self.peers.len() as u32;
            self.peers.push((target, Counts::default()));
        }
        &mut self.peers[self.met[at] as usize].1
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
        self.peers.iter_mut().for_each(|(_, peer)| peer.overdue = 0);
    }

    pub(super) fn show(&self, capacity: u32, engine: &Engine) -> Stats {
        let mut peers: Vec<PeerStats> = Vec::new();
        let mut by_name: HashMap<String, usize> = HashMap::new();
        let mut met: Vec<&(u32, Counts)> = self.peers.iter().filter(|(_, counts)| counts.accepted > 0).collect();
        met.sort_unstable_by_key(|&&(target, _)| place(target));
        for (target, counts) in met {
            let Some(name) = engine.peer_name(*target) else { continue };
            // Reopened, a segment has a new number and its old name; so has another client of one Store.
            match by_name.get(&name) {
                Some(&at) => peers[at].counts.add(counts),
                None => {
                    by_name.insert(name.clone(), peers.len());
                    peers.push(PeerStats { name, counts: *counts });
                }
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
