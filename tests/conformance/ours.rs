//! Runs a program on moonring.

use std::time::Duration;

use moonring::opcode::{self, Cancel};
use moonring::{Cqe, CqeFlags, Engine, EntryFlags, Ring, WaitError};

use crate::program::{Done, Entry, Flags, Op, Outcome, Program, Repeat, Step, Target};

/// What is awaited that does not come is missing after this: long, as a busy machine's threads may all be late.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `program` on a ring of its own. Each submit is given time to produce as many completions as `expected` has; more
/// are seen too.
pub fn run(program: &Program, engine: &Engine, expected: &Outcome) -> Outcome {
    let mut ring = Ring::builder().build(64, engine).expect("a ring of 64 entries");
    let mut outcome = Outcome::default();
    for (entries, expected) in program.steps.iter().zip(&expected.steps) {
        for entry in entries {
            let lowered = lower(entry);
            ring.submission().push(lowered).unwrap_or_else(|refused| panic!("{entry} of {program}: {refused}"));
        }
        let Ok(taken) = ring.submit() else {
            // The chain is still open, and a probe would become part of it.
            outcome.steps.push(Step { taken: 0, done: ring.completion().map(seen).collect() });
            continue;
        };
        let mut done = reap(&mut ring, expected.done.len());
        // The second is taken after the turn that took the first, and all that was due before it.
        for _ in 0..2 {
            ring.submission().push(Cancel::user_data(PROBE).build().user_data(PROBE)).expect("room for a probe");
            ring.submit().expect("it is no chain");
            done.extend(reap_until_probe(&mut ring));
        }
        outcome.steps.push(Step { taken, done });
    }
    outcome
}

/// The `user_data` of a Cancel that finds nothing, waits for no drain, and tells that what was submitted before has been
/// taken.
const PROBE: u64 = u64::MAX;

/// Completions until there are as many as expected.
fn reap(ring: &mut Ring, expected: usize) -> Vec<Done> {
    let mut done = Vec::new();
    while done.len() < expected {
        match ring.wait_timeout(1, PATIENCE) {
            Ok(_) => done.extend(ring.completion().map(seen)),
            Err(WaitError::TimedOut | WaitError::NothingOutstanding) => break,
            Err(error) => panic!("{error}"),
        }
    }
    done
}

fn reap_until_probe(ring: &mut Ring) -> Vec<Done> {
    let mut done = Vec::new();
    loop {
        ring.wait_timeout(1, PATIENCE).expect("the probe waits for nothing");
        for cqe in ring.completion() {
            if cqe.user_data() == PROBE {
                return done;
            }
            done.push(seen(cqe));
        }
    }
}

fn seen(cqe: Cqe) -> Done {
    Done { user_data: cqe.user_data(), res: cqe.res(), more: cqe.flags().contains(CqeFlags::MORE) }
}

fn lower(entry: &Entry) -> moonring::Entry {
    assert!(!entry.flags.contains(Flags::ASYNC), "{entry}: moonring has no such flag");
    let lowered = match entry.op {
        Op::Nop(0) => opcode::Nop::new().build(),
        Op::Nop(res) => opcode::Nop::new().result(res).build(),
        Op::Bad => opcode::Nop::new().bad().build(),
        Op::Timeout { after, repeat, etime_success } => {
            let mut timeout = opcode::Timeout::new(after);
            if etime_success {
                timeout = timeout.etime_success();
            }
            match repeat {
                Repeat::Once => timeout,
                Repeat::Multishot(ticks) => timeout.multishot(ticks),
                Repeat::Count(_) => panic!("{entry}: moonring counts no completions"),
            }
            .build()
        }
        Op::LinkTimeout(after) => opcode::LinkTimeout::new(after).build(),
        Op::Cancel(target) => match target {
            Target::One(user_data) => Cancel::user_data(user_data),
            Target::All(user_data) => Cancel::user_data(user_data).all(),
            Target::Any => Cancel::any(),
        }
        .build(),
        Op::TimeoutRemove(target) => opcode::TimeoutRemove::new(target).build(),
    };
    lowered.flags(EntryFlags::from_bits_retain(entry.flags.bits())).user_data(entry.user_data)
}
