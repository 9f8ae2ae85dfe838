//! GPU memory that Mooncake copies to with the CPU: when such a copy has landed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::fence::{Fence, FenceStatus};
use crate::transport::{RawMemory, TransportError};

#[cfg(feature = "cuda")]
pub(super) use crate::cuda::LegacyCopies;

/// There are none.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
pub(super) enum LegacyCopies {}

#[cfg(not(feature = "cuda"))]
impl LegacyCopies {
    pub(super) fn behind(&self) -> Result<Option<Fence>, u32> {
        match *self {}
    }
}

/// The registered memory to which Mooncake's copies may still run when it says COMPLETED.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// The network card writes GPU memory, not the CPU.
    never: AtomicBool,
    any: AtomicBool,
    places: RwLock<Vec<(RawMemory, Arc<LegacyCopies>)>>,
}

impl Copies {
    /// Nothing is copied by the CPU.
    pub(super) fn never(&self) {
        self.never.store(true, Ordering::Relaxed);
    }

    /// Prepares memory for copies, if it is a GPU's.
    ///
    /// # Safety
    /// The memory's context stays until it is forgotten and no operation with it runs, or the engine is gone.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, reason = "there is no GPU memory then"))]
    pub(super) unsafe fn prepare(&self, memory: RawMemory, location: &str) -> Result<(), TransportError> {
        #[cfg(feature = "cuda")]
        if !self.never.load(Ordering::Relaxed) && location.starts_with("cuda") {
            use crate::cuda::Landing;
            // SAFETY: the caller's promise.
            match unsafe { Landing::of(memory) } {
                Ok(Landing::AtOnce) => {}
                Ok(Landing::Behind(copies)) => {
                    let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
                    places.push((memory, Arc::new(copies)));
                    self.any.store(true, Ordering::Release);
                }
                Err(error) => {
                    let what = format!("preparing {memory} at {location:?} for copies");
                    return Err(TransportError { what, code: 0, why: error.to_string() });
                }
            }
        }
        Ok(())
    }

    pub(super) fn forget(&self, memory: RawMemory) {
        let mut places = self.places.write().unwrap_or_else(PoisonError::into_inner);
        places.retain(|(other, _)| *other != memory);
        self.any.store(!places.is_empty(), Ordering::Release);
    }

    /// What copies to this address go through. Costs a load where there is no such memory.
    pub(super) fn to(&self, address: u64) -> Option<Arc<LegacyCopies>> {
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        let places = self.places.read().unwrap_or_else(PoisonError::into_inner);
        places.iter().find(|(memory, _)| memory.contains(address, 1)).map(|(_, copies)| Arc::clone(copies))
    }
}

/// Where a task's copy is.
#[derive(Debug)]
pub(super) enum Copy {
    /// It lands before Mooncake says COMPLETED.
    Direct,
    /// It goes through this.
    Through(Arc<LegacyCopies>),
    /// It is over when this signals, or has failed with a `CUresult`.
    Behind(Result<Fence, u32>),
}

/// What is known of a copy whose task is COMPLETED.
pub(super) enum Landed {
    Yes,
    /// Not yet, or nobody knows: then [`Look::follow`] has to be called.
    NotYet,
    /// The `CUresult`.
    Failed(u32),
}

/// What one look at many tasks has learned, so that the driver is not asked twice.
#[derive(Debug, Default)]
pub(super) struct Look {
    pending: Option<Fence>,
    behind: Option<(Arc<LegacyCopies>, Result<Fence, u32>)>,
}

impl Look {
    /// Looks whether a copy has landed.
    pub(super) fn landed(&mut self, copy: &Copy) -> Landed {
        match copy {
            Copy::Direct => Landed::Yes,
            Copy::Through(_) => Landed::NotYet,
            Copy::Behind(Err(code)) => Landed::Failed(*code),
            Copy::Behind(Ok(fence)) if self.pending.as_ref().is_some_and(|known| Arc::ptr_eq(&known.0, &fence.0)) => {
                Landed::NotYet
            }
            Copy::Behind(Ok(fence)) => match fence.ask() {
                FenceStatus::Signalled => Landed::Yes,
                FenceStatus::Failed(why) => Landed::Failed(why.detail as u32),
                FenceStatus::Pending => {
                    self.pending = Some(fence.clone());
                    Landed::NotYet
                }
            },
        }
    }

    /// Puts an event behind the copy of a task that is COMPLETED. Only after the look's last question to Mooncake: what ends
    /// later has its copy behind the event. If that cannot be done now, the next look tries again. True if it was done now.
    pub(super) fn follow(&mut self, copy: &mut Copy) -> bool {
        let Copy::Through(copies) = copy else { return false };
        let known = self.behind.as_ref().filter(|(of, _)| Arc::ptr_eq(of, copies)).map(|(_, behind)| behind.clone());
        let behind = match known.map_or_else(|| copies.behind().map(|fence| fence.map(Ok)), |known| Ok(Some(known))) {
            Ok(Some(behind)) => behind,
            Ok(None) => return false,
            Err(code) => Err(code),
        };
        self.behind = Some((Arc::clone(copies), behind.clone()));
        *copy = Copy::Behind(behind);
        true
    }
}
