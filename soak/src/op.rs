//! What is known of an entry that was pushed, and what its result may be.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use moonring::code::errno;
use moonring::{Cqe, CqeFlags, Stage};

use crate::crew::Incarnation;
use crate::layout::CELLS;
use crate::tally::Anomaly;

/// What a cell of a peer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Known(u64),
    /// A write failed: its bytes may still come, for as long as the peer lives.
    Poisoned,
}

/// A cell of a peer, as its worker knows it.
#[derive(Clone, Copy, Debug)]
pub struct CellState {
    pub content: Content,
    /// Entries that read it, or will behind the writer in its chain.
    pub readers: u32,
    pub writer: bool,
    /// The peer is asked what is in it.
    pub checking: bool,
}

/// A worker's cells in one incarnation of a peer.
#[derive(Debug)]
pub struct Table {
    pub peer: Arc<Incarnation>,
    pub cells: RefCell<[CellState; CELLS]>,
}

/// The right to use a chunk of the worker's region, given back when the last entry with it lets go.
#[derive(Debug)]
pub struct Lease {
    pub chunk: usize,
    pub free: Arc<Mutex<Vec<usize>>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.chunk);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    /// Moves nothing: a Nop, a Cancel, a LinkTimeout.
    Control,
}

/// A range of a cell that an entry moves, and where it is here.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub cell: usize,
    /// Where in the cell.
    pub at: usize,
    pub len: usize,
    /// Where in the worker's region.
    pub local: usize,
}

/// What may make an entry fail.
#[derive(Clone, Copy, Debug, Default)]
pub struct Causes {
    /// The peer has no such range.
    pub bad_target: bool,
    pub gate_limit: bool,
    pub transfer_limit: bool,
    /// Somebody may have cancelled it.
    pub cancel: bool,
    /// It is behind another in its chain.
    pub chain: bool,
    /// One of its fences fails.
    pub fence: bool,
    /// Its ring was closed.
    pub closed: bool,
}

/// The errno with which fences fail here.
pub const FENCE_ERRNO: i32 = libc::EXDEV;

/// An entry that was pushed and has not ended.
#[derive(Debug)]
pub struct Op {
    pub kind: Kind,
    pub parts: Vec<Part>,
    pub vectored: bool,
    pub table: Option<Rc<Table>>,
    pub lease: Option<Arc<Lease>>,
    /// Of a Write what its first part writes, the next ones are beside it; of a Read what its buffer holds before.
    pub stamp: u64,
    pub born: Instant,
    /// Fences that have not signalled.
    pub fences: u32,
    pub causes: Causes,
    /// The first completion, if it had MORE.
    pub result: Option<Cqe>,
    /// It was said that it hangs.
    pub told: bool,
}

/// What an entry has done to its ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// All of it.
    Moved,
    /// Nothing: it was never issued.
    Nothing,
    /// Something between, now or later.
    Unknown,
}

impl Op {
    /// One that moves nothing.
    pub fn control() -> Op {
        Op {
            kind: Kind::Control,
            parts: Vec::new(),
            vectored: false,
            table: None,
            lease: None,
            stamp: 0,
            born: Instant::now(),
            fences: 0,
            causes: Causes::default(),
            result: None,
            told: false,
        }
    }

    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.len).sum()
    }

    /// What is wrong with a result, if anything is.
    pub fn judge(&self, cqe: &Cqe) -> Option<Anomaly> {
        let (res, stage, detail, more) = (cqe.res(), cqe.stage(), cqe.detail(), cqe.flags().contains(CqeFlags::MORE));
        let causes = &self.causes;
        if cqe.flags().contains(CqeFlags::UNQUIET) {
            // Everything ends here within the time that a ring is given to close.
            return Some(Anomaly::Hang);
        }
        if self.fences > 0 && (more || matches!(stage, Stage::Done | Stage::Transfer)) {
            return Some(Anomaly::Early);
        }
        let blamed = || self.table.as_ref().is_some_and(|table| table.peer.can_be_blamed(self.born));
        let is_sound = match (stage, res) {
            (Stage::Done, _) if more => false,
            (Stage::Done, res) if self.kind == Kind::Control => res >= 0 || res == -errno::ETIME,
            (Stage::Done, res) => res as usize == self.len() && !causes.bad_target,
            (Stage::Gate, res) if res == -errno::ECANCELED => {
                !more && (causes.chain || causes.fence && detail == -FENCE_ERRNO)
            }
            (Stage::Gate, res) => !more && res == -errno::ETIME && causes.gate_limit,
            (Stage::Cancel, res) if self.kind == Kind::Control => {
                !more && [errno::ENOENT, errno::EALREADY, errno::ECANCELED].contains(&-res)
            }
            (Stage::Cancel, res) => res == -errno::ECANCELED && causes.cancel,
            (Stage::Transfer, res) if res == -errno::ETIME => causes.transfer_limit,
            (Stage::Transfer, res) => !more && res == -errno::EIO && (causes.bad_target || blamed()),
            (Stage::Issue, res) => !more && res == -errno::ESTALE && blamed(),
            (Stage::Shutdown, res) => !more && res == -errno::ESHUTDOWN && causes.closed,
            _ => false,
        };
        (!is_sound).then_some(Anomaly::Result)
    }

    /// What it has done, by its completions.
    pub fn effect(&self, first: &Cqe, notif: Option<&Cqe>) -> Effect {
        /// Mooncake's number for a task that has done its work.
        const COMPLETED: i32 = 4;
        match (first.stage(), notif) {
            (Stage::Done, _) => Effect::Moved,
            // The transport's last word about an entry without parts is about all of it.
            (_, Some(notif)) if !self.vectored && notif.detail() == COMPLETED => Effect::Moved,
            (_, Some(_)) => Effect::Unknown,
            (Stage::Gate | Stage::Issue | Stage::Shutdown | Stage::Cancel, None) => Effect::Nothing,
            _ => Effect::Unknown,
        }
    }
}
