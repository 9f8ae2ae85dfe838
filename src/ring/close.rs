//! Closing a ring with a report of what was left.

use std::sync::Arc;
use std::time::Duration;

use super::Ring;
use super::halves::Completion;
use super::stats::Stats;
use crate::code::Stage;
use crate::core::Closing;
use crate::cqe::{Cqe, CqeFlags};

/// What [`Ring::close`] found and did. Entries that were to succeed without a completion, and did, are in none of the counts.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CloseReport {
    /// Every completion that was not reaped, in order: those that were ready, then those of the entries that ended while
    /// closing, on which the counts are made.
    pub completions: Vec<Cqe>,
    /// Entries that ended without having been issued.
    pub unissued: usize,
    /// Entries that had been issued and are quiet, whether they succeeded, failed, or were ended with the transport.
    pub completed: usize,
    /// Entries whose transfer could not be stopped: their local ranges may be touched for ever, and are kept for ever.
    pub unquiet: usize,
    /// False if the poller did not come to an end in time: entries are missing then.
    pub finished: bool,
    /// The ring's last counts, of its whole life, what ended while closing included; `None` if it did not finish. What a
    /// [`Controller`](crate::Controller) of the ring answers from now on.
    pub stats: Option<Stats>,
}

impl Ring {
    /// Closes the ring as dropping it does, with `limit` in place of [`Builder::grace`](crate::Builder::grace), and hands over
    /// what was not reaped. Blocks for at most `limit` and 10 s.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use moonring::{Engine, Ring, fence, opcode};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    /// let (_signaller, never) = fence::host();
    /// ring.submission().push(opcode::Wait::new().build().wait(&never).user_data(7))?;
    /// let report = ring.close(Duration::from_secs(1));
    /// assert_eq!((report.unissued, report.completed, report.unquiet), (1, 0, 0));
    /// assert_eq!(report.completions[0].user_data(), 7);
    /// # Ok(())
    /// # }
    /// ```
    pub fn close(self, limit: Duration) -> CloseReport {
        let Ring { submission, completion } = self;
        drop(submission);
        let Completion { mut hold, mut reaper } = completion;
        let closing = Closing::new(limit, true);
        let finished = Arc::get_mut(&mut hold).is_some_and(|hold| hold.close(&closing, limit));
        let mut completions: Vec<Cqe> = reaper.queue().collect();
        let late = closing.take_kept();
        let stats = reaper.last_stats();
        let mut report =
            CloseReport { completions: Vec::new(), unissued: 0, completed: 0, unquiet: 0, finished, stats };
        for cqe in &late {
            let flags = cqe.flags();
            match cqe.stage() {
                _ if flags.contains(CqeFlags::MORE) => {}
                _ if flags.contains(CqeFlags::UNQUIET) => report.unquiet += 1,
                Stage::Shutdown => report.unissued += 1,
                _ => report.completed += 1,
            }
        }
        completions.extend(late);
        CloseReport { completions, ..report }
    }
}
