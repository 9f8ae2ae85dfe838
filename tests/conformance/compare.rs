//! What of two outcomes must agree, and how a program that shows a difference is made small.

use std::collections::HashMap;

use crate::model::Prediction;
use crate::program::{Done, Entry, Flags, Op, Outcome, Program};

/// What differs between what is right and what was seen, if anything does: for each submit the completions, in any order,
/// and over all of them the order that links and drains promise.
pub fn difference(program: &Program, prediction: &Prediction, seen: &Outcome, compare_taken: bool) -> Option<String> {
    let right = &prediction.outcome;
    if right.steps.len() != seen.steps.len() {
        return Some(format!("{} submits instead of {}", seen.steps.len(), right.steps.len()));
    }
    for (at, (right, seen)) in right.steps.iter().zip(&seen.steps).enumerate() {
        if compare_taken && right.taken != seen.taken {
            return Some(format!("submit {} took {} entries instead of {}", at + 1, seen.taken, right.taken));
        }
        if unordered(program, &right.done) != unordered(program, &seen.done) {
            return Some(format!("the completions of submit {} differ", at + 1));
        }
    }
    let (right, seen) = (spans(program, right), spans(program, seen));
    chain_disorder(prediction, &seen).or_else(|| drain_disorder(prediction, &right, &seen))
}

/// The completions, sorted, with the ticks of an endless Timeout as one.
fn unordered(program: &Program, done: &[Done]) -> Vec<Done> {
    let mut done = done.to_vec();
    done.sort_unstable();
    done.dedup_by(|a, b| {
        a == b && a.more && program.entries().any(|entry| entry.user_data == a.user_data && entry.ticks_for_ever())
    });
    done
}

/// Where the first and the last completion are in the queue.
type Span = (usize, usize);

/// Where the completions of each `user_data` are that only one entry has.
fn spans(program: &Program, outcome: &Outcome) -> HashMap<u64, Span> {
    let mut spans = HashMap::new();
    for (place, done) in outcome.steps.iter().flat_map(|step| &step.done).enumerate() {
        let (_, last) = spans.entry(done.user_data).or_insert((place, place));
        *last = place;
    }
    spans.retain(|user_data, _| program.entries().filter(|entry| entry.user_data == *user_data).count() == 1);
    spans
}

/// A violation of the order inside a chain, which only LinkTimeouts are exempt from.
fn chain_disorder(prediction: &Prediction, seen: &HashMap<u64, Span>) -> Option<String> {
    for chain in &prediction.chains {
        let members = chain.iter().filter(|entry| !matches!(entry.op, Op::LinkTimeout(_)));
        let placed: Vec<_> = members.filter_map(|entry| Some((seen.get(&entry.user_data)?, entry.user_data))).collect();
        if let Some([(_, before), (_, after)]) = placed.array_windows().find(|[before, after]| before.0.1 > after.0.0) {
            return Some(format!("{after} completed before {before}, which is earlier in its chain"));
        }
    }
    None
}

/// A violation of the order across a chain with a drain, where what is right has that order.
fn drain_disorder(prediction: &Prediction, right: &HashMap<u64, Span>, seen: &HashMap<u64, Span>) -> Option<String> {
    let never_drained = |entry: &Entry| prediction.never_drained.contains(&entry.user_data);
    let chains: Vec<_> = prediction.chains.iter().filter(|chain| !chain.iter().any(never_drained)).collect();
    let span = |spans: &HashMap<u64, Span>, chain: &[Entry]| {
        let spans: Vec<_> = chain.iter().filter_map(|entry| spans.get(&entry.user_data)).collect();
        Some((spans.iter().map(|span| span.0).min()?, spans.iter().map(|span| span.1).max()?))
    };
    let in_order = |spans, before, after| Some(span(spans, before)?.1 < span(spans, after)?.0);
    for (at, drain) in chains.iter().enumerate() {
        if !drain.iter().any(|entry| entry.flags.contains(Flags::DRAIN)) {
            continue;
        }
        let pairs = chains[..at].iter().map(|chain| (*chain, *drain));
        for (before, after) in pairs.chain(chains[at + 1..].iter().map(|chain| (*drain, *chain))) {
            if in_order(right, before, after) == Some(true) && in_order(seen, before, after) == Some(false) {
                let (before, after) = (before[0].user_data, after[0].user_data);
                return Some(format!("the chain of {after} overtook that of {before} across a drain"));
            }
        }
    }
    None
}

/// The smallest program that can be reached from `program` by leaving things out and for which `fails` still holds.
pub fn shrink(program: Program, fails: impl Fn(&Program) -> bool) -> Program {
    let mut program = program;
    while let Some(smaller) = smaller(&program).find(|smaller| fails(smaller)) {
        program = smaller;
    }
    program
}

/// Each program with one thing less: a submit, an entry, a flag, or a result.
fn smaller(program: &Program) -> impl Iterator<Item = Program> + use<> {
    let with = |change: &dyn Fn(&mut Program)| {
        let mut program = program.clone();
        change(&mut program);
        program
    };
    let mut all = Vec::new();
    for (at, step) in program.steps.iter().enumerate() {
        all.push(with(&|program| {
            program.steps.remove(at);
        }));
        for (place, entry) in step.iter().enumerate() {
            if step.len() > 1 {
                all.push(with(&|program| {
                    program.steps[at].remove(place);
                }));
            }
            for flag in entry.flags.iter() {
                all.push(with(&|program| program.steps[at][place].flags.remove(flag)));
            }
            if entry.op != Op::Nop(0) {
                all.push(with(&|program| program.steps[at][place].op = Op::Nop(0)));
            }
        }
    }
    // A submit must not end within a chain only because it was shortened.
    let open = |program: &Program| {
        let ends = program.steps.iter().filter_map(|step| step.last());
        ends.filter(|last| last.flags.intersects(Flags::CHAINED)).count()
    };
    let were_open = open(program);
    all.into_iter().filter(move |smaller| !smaller.steps.is_empty() && open(smaller) <= were_open)
}
