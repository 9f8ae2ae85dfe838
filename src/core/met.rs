//! The peers that a ring has met: what it keeps of each. An entry's is found when it is taken, and its place kept in the slot.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use super::slots::NONE;
use crate::ring::share::{Share, place};
use crate::ring::stats::Counts;

/// A segment, or a Store, as one ring knows it.
#[derive(Debug)]
pub(super) struct Met {
    /// The number that entries name it by.
    pub(super) target: u32,
    /// Which of the core's peers; [`NONE`] until an entry is ready for it, and after its driver was retired.
    pub(super) peer: u32,
    pub(super) share: Arc<Share>,
    pub(super) counts: Counts,
}

#[derive(Debug, Default)]
pub(super) struct Peers {
    met: Vec<Met>,
    /// Where in `met` a peer is, by its [`place`]; [`NONE`] if it was not met. An engine that opens one peer after the other
    /// makes this long, so it has little for each.
    places: Vec<u32>,
}

impl Peers {
    /// A peer's place here; `share` gives its share, the first time.
    #[inline]
    pub(super) fn meet(&mut self, target: u32, share: impl FnOnce() -> Arc<Share>) -> u32 {
        match self.places.get(place(target)) {
            Some(&known) if known != NONE => known,
            _ => self.add(target, share()),
        }
    }

    /// A peer's place here, and which of the core's peers it is, if both are known.
    #[inline]
    pub(super) fn known(&self, target: u32) -> Option<(u32, u32)> {
        let at = *self.places.get(place(target))?;
        let met = self.met.get(at as usize)?;
        (met.peer != NONE).then_some((at, met.peer))
    }

    #[cold]
    fn add(&mut self, target: u32, share: Arc<Share>) -> u32 {
        let (at, new) = (place(target), self.met.len() as u32);
        if self.places.len() <= at {
            self.places.resize(at + 1, NONE);
        }
        self.places[at] = new;
        self.met.push(Met { target, peer: NONE, share, counts: Counts::default() });
        new
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Met> {
        self.met.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Met> {
        self.met.iter_mut()
    }
}

impl Index<u32> for Peers {
    type Output = Met;

    #[inline]
    fn index(&self, at: u32) -> &Met {
        &self.met[at as usize]
    }
}

impl IndexMut<u32> for Peers {
    #[inline]
    fn index_mut(&mut self, at: u32) -> &mut Met {
        &mut self.met[at as usize]
    }
}
