//! What the simulation knows of one entry, and of one operation that the transport has.

use super::book::Book;
use super::program::{End, Feeds, Plan, PlanOp};
use crate::code::{Stage, errno};
use crate::cqe::{Cqe, CqeFlags};
use crate::entry::EntryFlags;
use crate::fence::Fence;
use crate::store::request::Kind;
use crate::transport::{Nanos, Token};

/// A fence that an entry waits for.
#[derive(Clone, Debug)]
pub(super) enum Watch {
    Host(usize),
    Point(usize, u64),
    Polled(usize),
    /// The end of an entry.
    End(usize),
    Prefix,
}

/// What is known of a fence, by who settles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Truth {
    Pending,
    Signalled,
    /// With what its dependents have as errno and detail.
    Failed(i32, i32),
}

impl Truth {
    pub(super) fn dependency(root: i32) -> Truth {
        Truth::Failed(errno::ECANCELED, -root)
    }
}

/// A completion that became visible.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) res: i32,
    pub(super) stage: Stage,
    pub(super) flags: CqeFlags,
    pub(super) detail: i32,
    /// Its place among all completions.
    pub(super) order: u64,
}

impl Seen {
    pub(super) fn of(cqe: &Cqe, order: u64) -> Seen {
        Seen { res: cqe.res(), stage: cqe.stage(), flags: cqe.flags(), detail: cqe.detail(), order }
    }

    /// The same, whenever it was seen.
    pub(super) fn is(&self, other: &Seen) -> bool {
        let of = |seen: &Seen| (seen.res, seen.stage, seen.flags, seen.detail);
        of(self) == of(other)
    }

    /// What the failure began with.
    pub(super) fn root(&self) -> i32 {
        let at_gate = self.stage == Stage::Gate && self.res == -errno::ECANCELED && self.detail < 0;
        if at_gate { -self.detail } else { -self.res }
    }
}

/// Where an entry's ranges lie that is on a strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) local: u64,
    pub(super) remote: u64,
    /// Which of the engine's regions.
    pub(super) region: usize,
    /// Which of the remote registrations, if it is declared.
    pub(super) registration: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Record {
    pub(super) ring: usize,
    pub(super) producer: u64,
    pub(super) plan: Plan,
    pub(super) flags: EntryFlags,
    pub(super) engine: usize,
    /// The transport's number of its peer.
    pub(super) target: Option<u32>,
    /// On a strip.
    pub(super) place: Option<Place>,
    /// What a Store is asked.
    pub(super) request: Option<usize>,
    /// How many turns its core had had when it was submitted, and when the first one behind that was.
    pub(super) submitted: Option<u64>,
    pub(super) began: Option<Nanos>,
    pub(super) before: Option<usize>,
    pub(super) after: Option<usize>,
    pub(super) watches: Vec<(Watch, Fence)>,
    pub(super) end_fence: Option<Fence>,
    /// Whom it cancels, and the order of completions at which it was accepted.
    pub(super) accepted_order: u64,
    pub(super) issued: u128,
    /// It was part of an operation that failed, and is to be tried alone.
    pub(super) again: bool,
    /// The driver panicked while it was offered.
    pub(super) offered: bool,
    pub(super) issued_at: Option<Nanos>,
    /// Operations without a result, and those that may touch the local range.
    pub(super) unresolved: usize,
    pub(super) touching: usize,
    pub(super) results: Vec<(i32, Stage)>,
    /// When an operation was first told to have failed.
    pub(super) failed_at: Option<Nanos>,
    pub(super) result: Option<Seen>,
    pub(super) ended: Option<Seen>,
    pub(super) ticks: u32,
    pub(super) future: Option<FutureBook>,
    /// It has a completion that is visible, and that comes up next.
    pub(super) news: bool,
}

/// What becomes of an entry's future.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FutureBook {
    pub(super) page: Page,
    /// Cancelled, by its future or because that was dropped.
    pub(super) disowned: bool,
    /// The core had heard of that before the entry was issued.
    pub(super) unwanted: bool,
    /// Ready, dropped or detached.
    pub(super) gone: bool,
}

/// What a future keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Page {
    #[default]
    Kept,
    GivenBack,
    Dropped,
}

impl Record {
    pub(super) fn blank() -> Record {
        let plan = Plan {
            op: PlanOp::Wait,
            flags: EntryFlags::empty(),
            waits: Vec::new(),
            gate_limit: 0,
            transfer_limit: 0,
            key: None,
            feeds: Feeds::Nothing,
        };
        Record {
            ring: 0,
            producer: 0,
            plan,
            flags: EntryFlags::empty(),
            engine: 0,
            target: None,
            place: None,
            request: None,
            submitted: None,
            began: None,
            before: None,
            after: None,
            watches: Vec::new(),
            end_fence: None,
            accepted_order: 0,
            issued: 0,
            again: false,
            offered: false,
            issued_at: None,
            unresolved: 0,
            touching: 0,
            results: Vec::new(),
            failed_at: None,
            result: None,
            ended: None,
            ticks: 0,
            future: None,
            news: false,
        }
    }

    /// Parts that the transport is to have.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let parts = match &self.plan.op {
            PlanOp::Transfer { parts, .. } => &parts[..],
            _ => &[],
        };
        parts.iter().enumerate().map(|(at, &len)| (at, u64::from(len))).filter(|&(_, len)| len > 0)
    }

    pub(super) fn len_of(&self, part: usize) -> Option<u64> {
        self.parts().find(|&(at, _)| at == part).map(|(_, len)| len)
    }

    /// Where a part of it begins; it is entry `uid`.
    pub(super) fn local(&self, uid: usize, part: usize) -> u64 {
        self.place.map_or(Book::local(uid, part), |place| place.local)
    }

    pub(super) fn remote(&self, uid: usize, part: usize) -> u64 {
        self.place.map_or(Book::remote(uid, part), |place| place.remote)
    }

    /// True if it may be tried again after an operation that failed so: a Write that got as far as the peer may still land.
    pub(super) fn is_harmless(&self, stage: Stage, quiet: bool) -> bool {
        let reads = matches!(self.plan.op, PlanOp::Transfer { write: false, .. });
        quiet && (reads || stage == Stage::Issue)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.parts().map(|(_, len)| len).sum()
    }

    pub(super) fn all_issued(&self) -> bool {
        let operations = if self.request.is_some() { 1 } else { self.parts().count() };
        self.issued.count_ones() as usize == operations
    }

    pub(super) fn was_issued(&self) -> bool {
        self.issued != 0 || self.again
    }

    /// True if it has a local range that something may touch.
    pub(super) fn uses_region(&self) -> bool {
        matches!(self.plan.op, PlanOp::Transfer { .. } | PlanOp::Store { ask: Kind::Get | Kind::Put, .. })
    }

    pub(super) fn region(&self) -> usize {
        self.place.map_or(0, |place| place.region)
    }

    pub(super) fn wholly_issued(&self) -> bool {
        self.all_issued()
    }

    pub(super) fn skips(&self) -> bool {
        self.flags.contains(EntryFlags::CQE_SKIP_SUCCESS)
    }

    pub(super) fn is_chained(&self) -> bool {
        self.before.is_some() || self.flags.intersects(EntryFlags::CHAINED)
    }

    pub(super) fn is_cancel(&self) -> bool {
        matches!(self.plan.op, PlanOp::Cancel { .. } | PlanOp::Remove(_) | PlanOp::Update(..))
    }

    pub(super) fn has_side(&self) -> bool {
        self.watches.len() > 1 || self.plan.gate_limit > 0 || self.plan.transfer_limit > 0
    }
}

/// An operation that the transport has.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) driver: usize,
    pub(super) target: u32,
    pub(super) token: Token,
    /// The first entry by its address, and which part of it.
    pub(super) uid: usize,
    pub(super) part: usize,
    /// The other entries.
    pub(super) riders: Vec<usize>,
    pub(super) len: u64,
    pub(super) end: End,
    pub(super) result_due: Nanos,
    pub(super) lag: Nanos,
    /// Words said.
    pub(super) told: u8,
}

impl Flight {
    pub(super) fn entries(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::once(self.uid).chain(self.riders.iter().copied())
    }

    pub(super) fn is_of(&self, uid: usize) -> bool {
        self.entries().any(|entry| entry == uid)
    }

    pub(super) fn name(&self) -> String {
        match &self.riders[..] {
            [] => format!("{}.{}", self.uid, self.part),
            riders => format!("{} and {riders:?}", self.uid),
        }
    }

    /// When its next word is due, if there is one.
    pub(super) fn due(&self, thorough: bool) -> Option<Nanos> {
        let due = match (self.end, self.told) {
            (End::Lost, _) => return None,
            (_, 0) => self.result_due,
            (End::Late(later) | End::Twice(later), 1) => self.result_due + later,
            _ => return None,
        };
        Some(if thorough { due } else { due + self.lag })
    }

    pub(super) fn over(&self) -> bool {
        match self.end {
            End::Late(_) | End::Twice(_) => self.told > 1,
            End::Never | End::Lost => false,
            _ => self.told > 0,
        }
    }

    pub(super) fn resolved(&self) -> bool {
        self.told > 0
    }
}
