//! The parts of vectored entries: a list for each, from a pool of an eighth of the ring.

use std::ptr;
use std::sync::Arc;

use super::regions::Regions;
use crate::Engine;
use crate::code::Stage;
use crate::entry::Parts;
use crate::region::RegionInner;
use crate::sync::{ArrayQueue, AtomicUsize, Ordering};
use crate::transport::RawMemory;

/// Most parts of one entry.
pub(crate) const MAX_PARTS: usize = 128;

/// One transfer of a vectored entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) local: u64,
    pub(crate) remote: u64,
    pub(crate) len: u32,
    /// The local range's region, with a use begun; null if that is the part's before it.
    region: *const RegionInner,
}

/// A vectored entry's parts, and how far they have come. The pusher fills it and hands it over with the SQE; the core
/// counts in it, and gives it back when nothing touches the local ranges any more.
#[derive(Debug)]
pub(crate) struct PartList {
    parts: Vec<Part>,
    /// How many of them the transport has been given.
    issued: usize,
    /// How many of those have no result.
    running: usize,
    /// How many have a result, and may still touch their local range.
    unquiet: usize,
    /// Bytes moved.
    moved: u32,
    failure: Option<PartFailure>,
}

/// The first failure of a part that was seen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartFailure {
    pub(crate) res: i32,
    pub(crate) stage: Stage,
    pub(crate) detail: i32,
}

// SAFETY: what the pointers lead to is Send and Sync.
unsafe impl Send for PartList {}

impl PartList {
    fn new() -> PartList {
        let parts = Vec::with_capacity(MAX_PARTS);
        PartList { parts, issued: 0, running: 0, unquiet: 0, moved: 0, failure: None }
    }

    /// Takes over the parts that have bytes, and begins a use of each one's region. If one is unregistered, begins none and
    /// says which range it was.
    fn fill(&mut self, parts: &Parts, regions: &mut Regions, engine: &Engine) -> Result<(), RawMemory> {
        let mut last = None;
        for at in 0..parts.len() {
            let (slice, local, len, remote) = parts.get(at);
            let mut region = ptr::null();
            if last != Some(slice.region) {
                let Some(begun) = regions.of(slice.region, engine).filter(|region| region.begin_use()) else {
                    self.end_uses();
                    return Err(slice.memory());
                };
                if len == 0 {
                    // Nothing will touch it.
                    begun.end_use();
                    continue;
                }
                region = Arc::as_ptr(begun);
            }
            if len > 0 {
                self.parts.push(Part { local, remote, len: len as u32, region });
                last = Some(slice.region);
            }
        }
        Ok(())
    }

    /// Whose regions they are.
    fn regions(&self) -> impl Iterator<Item = &RegionInner> {
        // SAFETY: each of these parts has begun a use of its region, which ends when the parts are forgotten. Until then the
        // engine, which the ring keeps, does not let go of its `RegionInner`.
        self.parts.iter().filter_map(|part| unsafe { part.region.as_ref() })
    }

    /// True if a part's local range is in the region at `address`.
    pub(crate) fn uses_region(&self, address: u64) -> bool {
        self.regions().any(|region| region.memory.address == address)
    }

    /// Ends the uses of the regions and forgets the parts.
    pub(crate) fn end_uses(&mut self) {
        self.regions().for_each(RegionInner::end_use);
        self.parts.clear();
        (self.issued, self.running, self.unquiet, self.moved, self.failure) = (0, 0, 0, 0, None);
    }

    /// The parts that the transport has not been given.
    pub(crate) fn unissued(&self) -> &[Part] {
        &self.parts[self.issued..]
    }

    /// The transport has taken the next `count` of them.
    pub(crate) fn issue(&mut self, count: usize) {
        self.issued += count;
        self.running += count;
    }

    /// Parts that the transport has.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// True if the transport has none, or was given none.
    pub(crate) fn is_quiet(&self) -> bool {
        self.running == 0 && self.unquiet == 0
    }

    /// A part has its result. After a failure no further part is issued.
    pub(crate) fn land(&mut self, res: i32, stage: Stage, detail: i32, quiet: bool) {
        self.running -= 1;
        self.unquiet += usize::from(!quiet);
        if res < 0 {
            self.failure.get_or_insert(PartFailure { res, stage, detail });
        } else {
            self.moved += res as u32;
        }
    }

    /// Nothing touches the local range any more of a part whose result was not quiet.
    pub(crate) fn quieten(&mut self) {
        self.unquiet -= 1;
    }

    /// No further part is to be issued.
    pub(crate) fn fail(&mut self, failure: PartFailure) {
        self.failure.get_or_insert(failure);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// What the whole entry comes to, once every part has its result that was issued, and none is left to issue.
    pub(crate) fn result(&self) -> Option<Result<i32, PartFailure>> {
        let done = self.running == 0 && (self.has_failed() || self.unissued().is_empty());
        done.then(|| self.failure.map_or(Ok(self.moved as i32), Err))
    }
}

/// The pool of part lists: an eighth of the ring, each made when it is first needed and kept. A list takes 4 KiB.
#[derive(Debug)]
pub(crate) struct PartLists {
    free: ArrayQueue<Box<PartList>>,
    made: AtomicUsize,
    most: usize,
}

impl PartLists {
    pub(super) fn new(most: usize) -> PartLists {
        PartLists { free: ArrayQueue::new(most), made: AtomicUsize::new(0), most }
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Lists that were made and that an entry has.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn in_use(&self) -> usize {
        self.made.load(Ordering::Relaxed) - self.free.len()
    }

    /// A list with these parts; see [`PartList::fill`].
    pub(super) fn fill(&self, parts: &Parts, regions: &mut Regions, engine: &Engine) -> Result<Box<PartList>, NoList> {
        let mut list = self.free.pop().or_else(|| self.make()).ok_or(NoList::InUse)?;
        match list.fill(parts, regions, engine) {
            Ok(()) => Ok(list),
            Err(memory) => {
                self.give_back(list);
                Err(NoList::Unregistered(memory))
            }
        }
    }

    fn make(&self) -> Option<Box<PartList>> {
        let more = |made| (made < self.most).then_some(made + 1);
        let made = self.made.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        made.is_ok().then(|| Box::new(PartList::new()))
    }

    /// Takes a list back that has no parts any more.
    pub(crate) fn give_back(&self, list: Box<PartList>) {
        debug_assert!(list.parts.is_empty(), "the uses were ended");
        self.free.push(list).expect("a list that was made has its place");
    }
}

/// Why there is no list.
pub(super) enum NoList {
    InUse,
    Unregistered(RawMemory),
}
