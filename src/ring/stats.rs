//! What a ring counts of its entries.

use crate::code::Stage;

/// A ring's counts at one moment between two entries of its poller, from [`Ring::stats`](crate::Ring::stats) or
/// [`Controller::stats`](crate::Controller::stats). They only grow, but for [`Counts::outstanding`] and
/// [`Counts::overdue`].
///
/// They fit each other, and what the caller has seen:
///
/// * [`Counts::accepted`] has every entry that was submitted before the call, and `accepted == ok + failed + cancelled +
///   outstanding`, in the total and for each peer;
/// * every entry is counted as ended once, with its last completion, the one without `MORE`, by what that completion says
///   ([`Cqe::outcome`](crate::Cqe::outcome), [`Cqe::stage`](crate::Cqe::stage), [`Cqe::res`](crate::Cqe::res)), or, if it
///   has none, by what it would say;
/// * every completion that is in the queue, or was reaped or told to a [future](crate::EntryFuture), when the answer was made
///   is counted, and no other. So whoever has them all and counts the entries gets `ok + failed + cancelled - silent`.
///
/// Entries that are pushed and not submitted are in no count. Neither are entries that a submitter submits when its ring is
/// closed already.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Most entries that can be outstanding, but for [`CANCEL_RESERVE`](crate::Ring::CANCEL_RESERVE) Cancels.
    pub capacity: u32,
    /// All entries of the ring. Messages that came for it ([`MsgRing`](crate::opcode::MsgRing)) count as entries, too.
    pub total: Counts,
    /// The Reads and Writes of each peer, in all their forms, those of 0 bytes too, and the entries for each Store: in the
    /// order in which the engine opened the segments and the clients. Peers without any are left out.
    pub peers: Vec<PeerStats>,
}

/// One peer's part of a ring's counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerStats {
    /// The name that its segment was opened by. Reopened, it goes on under the same name. For a Store its client's
    /// [`name`](crate::store::Client::name).
    pub name: String,
    /// Its entries.
    pub counts: Counts,
}

/// Numbers of entries and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Entries accepted and submitted, ever.
    pub accepted: u64,
    /// Entries that did their work: they ended at [`Stage::Done`]. A Timeout that ran out, and a LinkTimeout that fired, did
    /// theirs.
    pub ok: u64,
    /// Entries that ended otherwise. Those whose first completion carried `MORE` are among them, unless they were cancelled.
    pub failed: u64,
    /// Entries that somebody cancelled: `-ECANCELED` at [`Stage::Cancel`]. A LinkTimeout whose entry ended first is one.
    /// Dependents of something that failed are not: they failed.
    pub cancelled: u64,
    /// Entries that hold a unit of the ring's capacity: accepted and without their last completion. Those whose
    /// completion waits for room there, and those whose `NOTIF` is to come, are among them.
    pub outstanding: u64,
    /// Of the outstanding ones, those that have their result, while the transport may still touch their local range: `MORE` was
    /// posted, or waits for room, and `NOTIF` is to come.
    pub overdue: u64,
    /// Of the ended ones, those without a completion: `CQE_SKIP_SUCCESS` hid it.
    pub silent: u64,
    /// Bytes that Reads and Gets moved which ended well. What failed ones may have moved is not known.
    pub read_bytes: u64,
    /// The same of Writes and Puts.
    pub written_bytes: u64,
    /// The ended ones by the stage that ended them.
    pub stages: StageCounts,
}

impl Counts {
    /// Takes the counts of others of the same ring in; `outstanding` is made afterwards.
    pub(crate) fn add(&mut self, other: &Counts) {
        self.accepted += other.accepted;
        self.ok += other.ok;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
        self.overdue += other.overdue;
        self.silent += other.silent;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        for stage in StageCounts::STAGES {
            *self.stages.of_mut(stage) += other.stages.of(stage);
        }
    }
}

/// Numbers of entries by the stage that ended them.
#[allow(missing_docs, reason = "the names are those of `Stage`")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StageCounts {
    pub done: u64,
    pub gate: u64,
    pub issue: u64,
    pub transfer: u64,
    pub cancel: u64,
    pub shutdown: u64,
}

impl StageCounts {
    pub(crate) const STAGES: [Stage; 6] =
        [Stage::Done, Stage::Gate, Stage::Issue, Stage::Transfer, Stage::Cancel, Stage::Shutdown];

    /// The number for a stage.
    pub fn of(&self, stage: Stage) -> u64 {
        match stage {
            Stage::Done => self.done,
            Stage::Gate => self.gate,
            Stage::Issue => self.issue,
            Stage::Transfer => self.transfer,
            Stage::Cancel => self.cancel,
            Stage::Shutdown => self.shutdown,
        }
    }

    #[inline]
    pub(crate) fn of_mut(&mut self, stage: Stage) -> &mut u64 {
        match stage {
            Stage::Done => &mut self.done,
            Stage::Gate => &mut self.gate,
            Stage::Issue => &mut self.issue,
            Stage::Transfer => &mut self.transfer,
            Stage::Cancel => &mut self.cancel,
            Stage::Shutdown => &mut self.shutdown,
        }
    }
}
