//! Making a failing program smaller: leaving things out as long as it still fails.

use super::program::{End, Feeds, PlanOp, Program, Step, StoreEnd};

/// A program that fails as `fails` says, and of which nothing can be left out alone.
pub(super) fn shrink(mut program: Program, fails: impl Fn(&Program) -> bool) -> Program {
    loop {
        let before = size(&program);
        let mut length = program.steps.len();
        while length > 0 {
            let mut at = 0;
            while at < program.steps.len() {
                let mut smaller = program.clone();
                smaller.steps.drain(at..(at + length).min(program.steps.len()));
                if fails(&smaller) {
                    program = smaller;
                } else {
                    at += length;
                }
            }
            length /= 2;
        }
        for at in 0..program.steps.len() {
            simplify(&mut program, at, &fails);
        }
        if program.rings.len() > 1 {
            let mut smaller = program.clone();
            smaller.rings.pop();
            if fails(&smaller) {
                program = smaller;
            }
        }
        if size(&program) >= before {
            return program;
        }
    }
}

/// How much there is in a program.
fn size(program: &Program) -> usize {
    let of = |step: &Step| match step {
        Step::Push { entries, .. } => {
            let entry = |entry: &super::program::Plan| {
                let limits = usize::from(entry.gate_limit > 0) + usize::from(entry.transfer_limit > 0);
                let lands = match &entry.op {
                    PlanOp::Transfer { fate, strip, .. } => {
                        usize::from(fate.end != End::Lands) + usize::from(fate.lag > 0) + usize::from(strip.is_some())
                    }
                    PlanOp::Store { fate, .. } => usize::from(fate.end != StoreEnd::Answers),
                    _ => 0,
                };
                2 + entry.waits.len()
                    + usize::from(entry.feeds != Feeds::Nothing)
                    + entry.flags.iter().count()
                    + limits
                    + lands
            };
            1 + entries.iter().map(entry).sum::<usize>()
        }
        _ => 1,
    };
    program.rings.len() + program.steps.iter().map(of).sum::<usize>()
}

/// Leaves out entries of a push, and what they have that they need not.
fn simplify(program: &mut Program, at: usize, fails: &impl Fn(&Program) -> bool) {
    let count = |program: &Program| match &program.steps[at] {
        Step::Push { entries, .. } => entries.len(),
        _ => 0,
    };
    let mut which = 0;
    while which < count(program) {
        let mut smaller = program.clone();
        if let Step::Push { entries, .. } = &mut smaller.steps[at]
            && entries.len() > 1
        {
            entries.remove(which);
            if fails(&smaller) {
                *program = smaller;
                continue;
            }
        }
        for change in 0..8 {
            let mut smaller = program.clone();
            let Step::Push { entries, .. } = &mut smaller.steps[at] else { return };
            let entry = &mut entries[which];
            match (change, &mut entry.op) {
                (0, _) => entry.waits.clear(),
                (4, PlanOp::Store { fate, .. }) => fate.end = StoreEnd::Answers,
                (7, _) => entry.feeds = Feeds::Nothing,
                (1, _) => entry.flags = crate::EntryFlags::empty(),
                (2, _) => entry.gate_limit = 0,
                (3, _) => entry.transfer_limit = 0,
                (4, PlanOp::Transfer { fate, .. }) => fate.end = End::Lands,
                (5, PlanOp::Transfer { fate, .. }) => fate.lag = 0,
                (6, PlanOp::Transfer { strip, .. }) => *strip = None,
                _ => continue,
            }
            if size(&smaller) < size(program) && fails(&smaller) {
                *program = smaller;
            }
        }
        which += 1;
    }
}
