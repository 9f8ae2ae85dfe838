//! Every result there has to be, what it means and what it should be. `docs/performance.md` has the same in words; a test
//! holds them together.

use super::results::{Line, State};

/// What a result should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// At least so many times the peer, in these states.
    Ratio(f64, States),
    /// At most so much.
    Most(f64),
    /// At most so much when the cores are near each other, and when they are far.
    MostByState { near: f64, far: f64 },
    /// Within 1.5 times of the peer's value, or 100 more.
    LikePeer,
    /// To be seen beside the peer, no more.
    Shown,
}

/// In which states of the machine a ratio is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum States {
    Near,
    All,
}

/// How a result stands to its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Met,
    Missed,
    /// There is a target, and it does not apply here, or nothing was measured.
    Unjudged,
    NoTarget,
}

impl Verdict {
    pub fn word(self) -> &'static str {
        match self {
            Verdict::Met => "met",
            Verdict::Missed => "MISSED",
            Verdict::Unjudged => "unjudged",
            Verdict::NoTarget => "",
        }
    }
}

/// A result that every run has, measured or not.
#[derive(Clone, Copy, Debug)]
pub struct Id {
    pub name: &'static str,
    /// The part that measures it.
    pub part: &'static str,
    pub unit: &'static str,
    pub target: Target,
}

const fn id(part: &'static str, name: &'static str, unit: &'static str, target: Target) -> Id {
    Id { name, part, unit, target }
}

use Target::{LikePeer, Most, MostByState, Ratio, Shown};

pub const IDS: [Id; 34] = [
    id("nop", "nop_batch32_vs_io_uring", "M/s", Ratio(12.0, States::Near)),
    id("nop", "nop_batch32_vs_array_queue", "M/s", Ratio(4.0, States::All)),
    id("nop", "nop_batch32_vs_rtrb", "M/s", Ratio(0.6, States::All)),
    id("nop", "nop_lockstep32_vs_io_uring", "M/s", Ratio(6.0, States::Near)),
    id("nop", "nop_depth1_vs_io_uring", "ns", Ratio(1.0 / 0.45, States::Near)),
    id("nop", "nop_4_producers_vs_array_queue", "M/s", Ratio(2.0, States::All)),
    id("nop", "loopback_read_vs_io_uring", "M/s", Ratio(3.0, States::Near)),
    id("gate", "turn_100k_on_1", "ns", LikePeer),
    id("gate", "turn_100k_on_1k", "ns", LikePeer),
    id("gate", "turn_100k_on_100k", "ns", LikePeer),
    id("gate", "turn_100k_on_8_timelines", "ns", LikePeer),
    id("gate", "signal_to_issue_us", "us", MostByState { near: 0.3, far: 1.0 }),
    id("gate", "longest_turn_us", "us", Most(100.0)),
    id("gate", "overtake_vs_blocking_thread", "us", Shown),
    id("mooncake", "te_4k", "GB/s", Ratio(0.97, States::All)),
    id("mooncake", "te_64k", "GB/s", Ratio(0.97, States::All)),
    id("mooncake", "te_1m", "GB/s", Ratio(0.97, States::All)),
    id("mooncake", "te_4k_depth1", "us", Ratio(1.0 / 1.05, States::All)),
    id("mooncake", "te_merge_4096", "us", Ratio(10.0, States::All)),
    id("mooncake", "te_4k_vs_python_sync", "us", Shown),
    id("mooncake", "te_4k_vs_python_thread", "us", Shown),
    id("idle", "idle_cpu_percent", "% of a core", Most(1.0)),
    id("idle", "idle_gated_cpu_percent", "% of a core", Most(1.0)),
    id("idle", "idle_stopped_peer_cpu_percent", "% of a core", Most(1.0)),
    id("idle", "wake_after_idle_extra_us", "us", Most(100.0)),
    id("memory", "ring_1024_bytes", "bytes", Most((1 << 20) as f64)),
    id("memory", "allocations_per_op", "allocations", Most(0.0)),
    id("memory", "waiting_entry_bytes", "bytes", Shown),
    id("sim", "sim_1000_peers_mops", "M/s", Shown),
    id("sim", "sim_1000_peers_worst_share", "times the mean", Most(2.0)),
    id("store", "store_get_ops", "1/s", Ratio(1.0, States::All)),
    id("store", "store_get_p50", "us", Ratio(1.0, States::All)),
    id("store", "store_mixed_ops", "1/s", Ratio(1.0, States::All)),
    id("store", "store_mixed_p50", "us", Ratio(1.0, States::All)),
];

impl Id {
    pub fn find(name: &str) -> Option<&'static Id> {
        IDS.iter().find(|id| id.name == name)
    }

    /// Whether a line of this result meets the target.
    pub fn judge(&self, line: &Line) -> Verdict {
        if self.target == Shown {
            return Verdict::NoTarget;
        }
        let good = match self.target {
            Ratio(_, States::Near) if line.state == State::Far => None,
            Ratio(least, _) => line.ratio().map(|ratio| ratio >= least),
            Most(most) => line.value.map(|value| value <= most),
            MostByState { near, far } => {
                line.value.map(|value| value <= if line.state == State::Far { far } else { near })
            }
            LikePeer => {
                line.value.zip(line.peer_value).map(|(value, peer)| value <= f64::max(1.5 * peer, peer + 100.0))
            }
            Shown => None,
        };
        match good {
            Some(true) => Verdict::Met,
            Some(false) => Verdict::Missed,
            None => Verdict::Unjudged,
        }
    }

    /// The target in words.
    pub fn wish(&self) -> String {
        match self.target {
            Ratio(least, States::Near) => format!("ratio ≥ {}, near", short(least)),
            Ratio(least, States::All) => format!("ratio ≥ {}", short(least)),
            Most(most) => format!("≤ {}", short(most)),
            MostByState { near, far } => format!("< {near} near, < {far} far"),
            LikePeer => "≤ 1.5 × peer, or + 100".into(),
            Shown => String::new(),
        }
    }
}

/// A number with three digits that matter.
pub fn short(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str, state: State, value: f64, peer_value: Option<f64>, higher: bool) -> Line {
        let peer = peer_value.map(|_| "peer".to_owned());
        Line { id: id.into(), state, value: Some(value), unit: String::new(), peer, peer_value, higher }
    }

    #[test]
    fn targets_are_judged_where_they_hold() {
        let judge = |line: &Line| Id::find(&line.id).unwrap().judge(line);
        let rate = |state, value| line("nop_batch32_vs_io_uring", state, value, Some(10.0), true);
        assert_eq!(judge(&rate(State::Near, 120.0)), Verdict::Met);
        assert_eq!(judge(&rate(State::Near, 119.0)), Verdict::Missed);
        assert_eq!(judge(&rate(State::Far, 1.0)), Verdict::Unjudged);
        let queue = |value| line("nop_batch32_vs_array_queue", State::Far, value, Some(10.0), true);
        assert_eq!((judge(&queue(40.0)), judge(&queue(39.0))), (Verdict::Met, Verdict::Missed));
        let depth1 = |value| line("nop_depth1_vs_io_uring", State::Near, value, Some(300.0), false);
        assert_eq!((judge(&depth1(134.0)), judge(&depth1(136.0))), (Verdict::Met, Verdict::Missed));
        let signal = |state, value| line("signal_to_issue_us", state, value, None, false);
        assert_eq!(judge(&signal(State::Near, 0.5)), Verdict::Missed);
        assert_eq!(judge(&signal(State::Far, 0.5)), Verdict::Met);
        let turn = |value| line("turn_100k_on_1", State::Any, value, Some(30.0), false);
        assert_eq!((judge(&turn(130.0)), judge(&turn(131.0))), (Verdict::Met, Verdict::Missed));
        let slow_turn = |value| line("turn_100k_on_1", State::Any, value, Some(400.0), false);
        assert_eq!((judge(&slow_turn(600.0)), judge(&slow_turn(601.0))), (Verdict::Met, Verdict::Missed));
        assert_eq!(judge(&line("waiting_entry_bytes", State::Any, 1e9, None, false)), Verdict::NoTarget);
        let unmeasured = Line { value: None, ..turn(0.0) };
        assert_eq!(judge(&unmeasured), Verdict::Unjudged);
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (641_919.0, "641919"),
            (12.34, "12.3"),
            (2.222_22, "2.22"),
            (0.6, "0.6"),
            (1.0, "1"),
            (100.0, "100"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn ids_are_there_once() {
        let names: std::collections::BTreeSet<_> = IDS.iter().map(|id| id.name).collect();
        assert_eq!(names.len(), IDS.len());
    }
}
