//! Runs a program on moonring.

use std::time::{Duration, Instant};

use moonring::opcode::{self, Cancel};
use moonring::{CqeFlags, Engine, EntryFlags, Ring, WaitError};

use crate::program::{Done, Entry, Flags, Op, Outcome, Program, Repeat, Step, Target};

/// What is awaited that does not come is missing after this.
const PATIENCE: Duration = Duration::from_millis(500);

/// Runs `program` on a ring of its own. Each submit is given time to produce as many completions as `expected` has, and
/// then `quiet` for more to show up.
pub fn run(program: &Program, engine: &Engine, expected: &Outcome, quiet: Duration) -> Outcome {
    let mut ring = Ring::builder().build(64, engine).expect("a ring of 64 entries");
    let mut outcome = Outcome::default();
    for (entries, expected) in program.steps.iter().zip(&expected.steps) {
        for entry in entries {
            let lowered = lower(entry);
            ring.submission().push(lowered).unwrap_or_else(|refused| panic!("{entry} of {program}: {refused}"));
        }
        let taken = ring.submit().unwrap_or_else(|error| panic!("{program}: {error}"));
        outcome.steps.push(Step { taken, done: reap(&mut ring, expected.done.len(), quiet) });
    }
    outcome
}

fn reap(ring: &mut Ring, expected: usize, quiet: Duration) -> Vec<Done> {
    let mut done = Vec::new();
    let mut last = Instant::now();
    loop {
        let before = done.len();
        done.extend(ring.completion().map(|cqe| Done {
            user_data: cqe.user_data(),
            res: cqe.res(),
            more: cqe.flags().contains(CqeFlags::MORE),
        }));
        if done.len() > before {
            last = Instant::now();
        }
        let limit = if done.len() < expected { PATIENCE } else { quiet };
        let Some(left) = limit.checked_sub(last.elapsed()) else { return done };
        match ring.wait_timeout(1, left) {
            Ok(_) | Err(WaitError::TimedOut) => {}
            Err(WaitError::NothingOutstanding) => return done,
            Err(error) => panic!("{error}"),
        }
    }
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
