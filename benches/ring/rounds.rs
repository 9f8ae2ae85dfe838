//! Rounds: everything that is compared is measured in turn, over and over, and the rounds of each state of the machine are
//! kept apart.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::Settings;
use crate::machine::{self, State};
use crate::out::{self, Line};

/// Fewer rounds than this in a state say nothing.
const LEAST: usize = 3;

/// One thing that is measured.
pub struct Subject<'a> {
    name: &'static str,
    measure: Box<dyn FnMut() -> f64 + 'a>,
}

impl<'a> Subject<'a> {
    pub fn new(name: &'static str, measure: impl FnMut() -> f64 + 'a) -> Subject<'a> {
        Subject { name, measure: Box::new(measure) }
    }

    pub fn name(&self) -> &'static str {
        self.name
    }
}

/// What was measured of one subject: for each round its state, if it was one from before to after, and value.
#[derive(Debug)]
struct Column {
    name: &'static str,
    values: Vec<Option<(State, f64)>>,
}

#[derive(Debug)]
pub struct Table {
    columns: Vec<Column>,
}

/// On a machine so busy that rounds take for ever, no more are begun after this.
const LIMIT: Duration = Duration::from_secs(60);
const LIMIT_QUICK: Duration = Duration::from_secs(2);

/// Measures `rounds` rounds, looking at the machine's state before and after each measurement; then waits for NEAR, as long
/// as the settings have it, if there was too little of it.
pub fn interleave(settings: &mut Settings, rounds: usize, subjects: &mut [Subject<'_>]) -> Table {
    let columns = subjects.iter().map(|subject| Column { name: subject.name, values: Vec::new() }).collect();
    let mut table = Table { columns };
    let start = Instant::now();
    let limit = if settings.quick { LIMIT_QUICK } else { LIMIT };
    for round in 0..rounds {
        if round < LEAST || start.elapsed() < limit {
            table.round(subjects);
        }
    }
    // On a machine that changes all the time few rounds are whole: three times as many are tried.
    for _ in 0..2 * rounds {
        if State::ALL.iter().any(|&state| table.whole(state) >= LEAST) || start.elapsed() > limit {
            break;
        }
        table.round(subjects);
    }
    let start = Instant::now();
    while table.whole(State::Near) < LEAST && start.elapsed() < settings.near_wait {
        if machine::state().0 == State::Near {
            table.round(subjects);
        } else {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let waited = start.elapsed();
    settings.near_wait = settings.near_wait.saturating_sub(waited);
    out::say("waited", json!(waited.as_secs_f64()));
    table
}

impl Table {
    fn round(&mut self, subjects: &mut [Subject<'_>]) {
        out::say("probe", json!(machine::probe()));
        let mut before = machine::state();
        for (subject, column) in subjects.iter_mut().zip(&mut self.columns) {
            let value = (subject.measure)();
            let after = machine::state();
            out::say("ping_pong", json!(after.1));
            let known = before.0 == after.0 && value.is_finite();
            column.values.push(known.then_some((after.0, value)));
            before = after;
        }
    }

    /// Rounds that were in one state from beginning to end; what could not be measured at all does not count.
    fn whole(&self, state: State) -> usize {
        let measured = || self.columns.iter().filter(|column| column.values.iter().any(Option::is_some));
        let rounds = self.columns.first().map_or(0, |column| column.values.len());
        let is_whole =
            |round: &usize| measured().all(|column| column.values[*round].is_some_and(|(of, _)| of == state));
        (0..rounds).filter(is_whole).count()
    }

    fn column(&self, name: &str) -> &Column {
        self.columns.iter().find(|column| column.name == name).unwrap_or_else(|| panic!("no subject {name}"))
    }

    /// The medians of the rounds in which both were measured in this state.
    fn pair(&self, ours: &str, peer: &str, state: State) -> Option<(f64, f64)> {
        let of = |value: &Option<(State, f64)>| value.filter(|&(of, _)| of == state).map(|(_, value)| value);
        let pairs = self.column(ours).values.iter().zip(&self.column(peer).values);
        let (mut ours, mut theirs): (Vec<_>, Vec<_>) =
            pairs.filter_map(|(ours, theirs)| Some((of(ours)?, of(theirs)?))).unzip();
        (ours.len() >= LEAST).then(|| (machine::median(&mut ours), machine::median(&mut theirs)))
    }

    /// The median of one subject in this state.
    pub fn value(&self, name: &str, state: State) -> Option<f64> {
        self.pair(name, name, state).map(|(value, _)| value)
    }

    /// Says the result of a comparison with the best of the peers, for each state that was met.
    pub fn compare(&self, id: &str, ours: &str, peers: &[&'static str], unit: &str, higher: bool) {
        for state in State::ALL {
            let pairs = peers.iter().filter_map(|&peer| Some((peer, self.pair(ours, peer, state)?)));
            let better = |a: f64, b: f64| if higher { a.total_cmp(&b) } else { b.total_cmp(&a) };
            let best = pairs.max_by(|(_, (_, a)), (_, (_, b))| better(*a, *b));
            let (value, peer) = match best {
                Some((peer, (value, peer_value))) => (Some(value), Some((peer, peer_value))),
                None => (self.value(ours, state), None),
            };
            if value.is_some() {
                Line { id, state: state.name(), value, unit, peer, higher }.say();
            }
        }
    }
}
