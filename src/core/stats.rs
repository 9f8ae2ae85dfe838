//! The core counts what it takes and what ends. It alone writes the counts, and shows them between two entries.

use std::collections::HashMap;

use super::Core;
use super::met::Met;
use super::ring::RingState;
use super::slots::{NONE, Slot};
use crate::code::Stage;
use crate::cqe::Outcome;
use crate::ring::share::place;
use crate::ring::stats::{Counts, PeerStats, Stats};
use crate::sqe::Opcode;

impl RingState {
    /// The counts of a peer that the ring has met, or of entries without one.
    #[inline]
    fn counts(&mut self, peer: u32) -> &mut Counts {
        if peer == NONE { &mut self.others } else { &mut self.peers[peer].counts }
    }

    /// So many Nops came and ended at once.
    #[inline]
    pub(super) fn count_nops(&mut self, count: u64) {
        self.others.accepted += count;
        self.others.ok += count;
        self.others.stages.done += count;
    }

    /// So many Reads and Writes of a peer ended well, which moved so many bytes.
    #[inline]
    pub(super) fn count_moved(&mut self, peer: u32, count: u64, [read, written]: [u64; 2]) {
        let counts = &mut self.peers[peer].counts;
        counts.ok += count;
        counts.stages.done += count;
        counts.read_bytes += read;
        counts.written_bytes += written;
    }

    /// An entry has its last completion, or has ended without one if it is `silent`.
    pub(super) fn count_end(&mut self, entry: &Slot, silent: bool) {
        let stage = Stage::from_bits(u32::from(entry.flags) << 16);
        let counts = self.counts(entry.peer);
        counts.silent += u64::from(silent);
        match Outcome::of(stage, entry.res, entry.notif) {
            Outcome::Failed => counts.failed += 1,
            Outcome::Cancelled => counts.cancelled += 1,
            Outcome::Ok => {
                // Most are, and it is known which stage ends them.
                counts.ok += 1;
                counts.stages.done += 1;
                match entry.sqe.op {
                    Opcode::Read | Opcode::Readv | Opcode::Get => counts.read_bytes += entry.res as u64,
                    Opcode::Write | Opcode::Writev | Opcode::Put => counts.written_bytes += entry.res as u64,
                    _ => {}
                }
                return;
            }
        }
        *counts.stages.of_mut(stage) += 1;
    }

    /// Every entry has its last word, whatever the transport still has.
    pub(super) fn nothing_is_overdue(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.counts.overdue = 0);
    }

    pub(super) fn stats(&self) -> Stats {
        let mut total = self.others;
        let mut peers: Vec<PeerStats> = Vec::new();
        let mut by_name: HashMap<String, usize> = HashMap::new();
        let mut met: Vec<&Met> = self.peers.iter().collect();
        met.sort_unstable_by_key(|peer| place(peer.target));
        for Met { target, counts, .. } in met {
            total.add(counts);
            let Some(name) = self.engine().peer_name(*target) else { continue };
            // Reopened, a segment has a new number and its old name; so has another client of one Store.
            match by_name.get(&name) {
                Some(&at) => peers[at].counts.add(counts),
                None => {
                    by_name.insert(name.clone(), peers.len());
                    peers.push(PeerStats { name, counts: *counts });
                }
            }
        }
        let mut stats = Stats { capacity: self.capacity(), total, peers };
        for counts in std::iter::once(&mut stats.total).chain(stats.peers.iter_mut().map(|peer| &mut peer.counts)) {
            counts.outstanding = counts.accepted - counts.ok - counts.failed - counts.cancelled;
        }
        stats
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
