//! When slots are due: a heap of slots, in which any of them can be moved or taken out.

use super::slots::NONE;
use crate::transport::Nanos;

/// A binary heap with the earliest first. A slot is in it once at most; where, is kept beside, so that taking one out
/// needs no search. Nothing is allocated after [`grow`](Self::grow).
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: Vec<(Nanos, u32)>,
    /// Each slot's place in the heap, or [`NONE`].
    places: Vec<u32>,
}

impl Timers {
    /// Makes room for more slots.
    pub(crate) fn grow(&mut self, slots: usize) {
        self.places.resize(self.places.len() + slots, NONE);
        self.heap.reserve(self.places.len() - self.heap.len());
    }

    /// Sets when a slot is due; a slot has one such moment.
    pub(crate) fn set(&mut self, slot: u32, due: Nanos) {
        self.remove(slot);
        self.heap.push((due, slot));
        self.up(self.heap.len() - 1);
    }

    /// True if a slot is to be due.
    pub(crate) fn has(&self, slot: u32) -> bool {
        self.places[slot as usize] != NONE
    }

    /// Takes a slot out, if it is in.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u32) {
        let place = std::mem::replace(&mut self.places[slot as usize], NONE);
        if place == NONE {
            return;
        }
        let last = self.heap.pop().expect("a slot with a place is in the heap");
        if let Some(hole) = self.heap.get_mut(place as usize) {
            *hole = last;
            self.up(place as usize);
            self.down(place as usize);
        }
    }

    /// The slot that is due first, and when.
    #[inline]
    pub(crate) fn first(&self) -> Option<(Nanos, u32)> {
        self.heap.first().copied()
    }

    /// Moves an entry towards the front as far as it belongs. Notes its place.
    fn up(&mut self, mut at: usize) {
        let entry = self.heap[at];
        while at > 0 && entry < self.heap[(at - 1) / 2] {
            self.put(at, self.heap[(at - 1) / 2]);
            at = (at - 1) / 2;
        }
        self.put(at, entry);
    }

    /// Moves an entry towards the back as far as it belongs. Notes its place.
    fn down(&mut self, mut at: usize) {
        let entry = self.heap[at];
        loop {
            let mut child = 2 * at + 1;
            if child + 1 < self.heap.len() && self.heap[child + 1] < self.heap[child] {
                child += 1;
            }
            match self.heap.get(child) {
                Some(&earlier) if earlier < entry => self.put(at, earlier),
                _ => break,
            }
            at = child;
        }
        self.put(at, entry);
    }

    fn put(&mut self, at: usize, entry: (Nanos, u32)) {
        self.heap[at] = entry;
        self.places[entry.1 as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::sim::Rng;

    #[test]
    fn agrees_with_a_map() {
        const SLOTS: u64 = 50;
        for seed in 0..50 {
            let mut random = Rng(seed);
            let (mut timers, mut map) = (Timers::default(), BTreeMap::new());
            timers.grow(SLOTS as usize);
            for step in 0..500 {
                let slot = random.below(SLOTS) as u32;
                match random.below(3) {
                    0 => {
                        timers.remove(slot);
                        map.remove(&slot);
                    }
                    _ => {
                        let due = random.below(100);
                        timers.set(slot, due);
                        map.insert(slot, due);
                    }
                }
                let first = map.iter().map(|(&slot, &due)| (due, slot)).min();
                assert_eq!(timers.first(), first, "seed {seed}, step {step}");
            }
        }
    }
}
