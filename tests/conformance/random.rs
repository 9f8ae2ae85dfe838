//! Random programs.
//!
//! They stay within what is deterministic. Cancels meet no timer that fires, since either may win. On the kernel they meet
//! no drain and no open chain either, since worker threads run what these hold back. A LinkTimeout of the kernel's cancels
//! by `user_data`, and so may meet a timer that fires or another LinkTimeout's entry: where the model says that their order
//! matters, the program is thrown away.

use std::time::Duration;

use fastrand::Rng;

use crate::compare;
use crate::kernel::Mode;
use crate::model::{Rules, predict};
use crate::program::{Entry, Flags, INFINITE, Op, Program, Repeat, Target};

/// What runs the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Kernel(Mode),
    Moonring,
}

impl Subject {
    pub fn rules(self) -> Rules {
        match self {
            Subject::Kernel(mode) => Rules::kernel(mode.submits_all()),
            Subject::Moonring => Rules::moonring(),
        }
    }
}

/// What a program may contain.
#[derive(Clone, Copy, Debug)]
struct Menu {
    drains: bool,
    skips: Percent,
    cancels: bool,
    /// Timers that fire, a few milliseconds after they are armed.
    timers_fire: bool,
    /// Timers that do not.
    timers_endless: bool,
    /// A submit may end within a chain.
    open_chains: bool,
}

type Percent = u32;

struct Dice(Rng);

impl Dice {
    fn chance(&mut self, percent: Percent) -> bool {
        self.0.u32(0..100) < percent
    }

    fn up_to(&mut self, most: u64) -> u64 {
        self.0.u64(1..=most)
    }
}

impl Menu {
    fn choose(dice: &mut Dice, subject: Subject) -> Menu {
        let open_chains = subject != Subject::Kernel(Mode::Sqpoll) && dice.chance(10);
        let drains = dice.chance(30);
        let ours = subject == Subject::Moonring;
        if drains && ours && dice.chance(40) {
            // What a drain holds can be cancelled, and a drain behind what never ends got rid of.
            let cancels = true;
            return Menu { drains, skips: 20, cancels, timers_fire: false, timers_endless: true, open_chains };
        }
        if drains {
            // A skip makes the kernel refuse every drain that follows.
            let skips = if ours { 20 } else { 2 };
            return Menu { drains, skips, cancels: false, timers_fire: true, timers_endless: false, open_chains };
        }
        let timers_fire = dice.chance(20);
        let cancels = !timers_fire && (ours || !open_chains);
        Menu { drains, skips: 20, cancels, timers_fire, timers_endless: true, open_chains }
    }
}

/// The program of a seed: one to three submits of one to eight entries.
pub fn program(seed: u64, subject: Subject) -> Program {
    let mut dice = Dice(Rng::with_seed(seed));
    loop {
        let program = any_program(&mut dice, subject);
        if !is_up_to_the_clock(&program, subject) {
            return program;
        }
    }
}

/// Whether its outcome depends on the order in which timers fire.
pub fn is_up_to_the_clock(program: &Program, subject: Subject) -> bool {
    let rules = subject.rules();
    let backwards = predict(program, rules.with_clock_backwards()).outcome;
    compare::difference(program, &predict(program, rules), &backwards, true).is_some()
}

fn any_program(dice: &mut Dice, subject: Subject) -> Program {
    let menu = Menu::choose(dice, subject);
    let mut program = Program::default();
    let mut next = 1;
    for _ in 0..dice.up_to(3) {
        let mut step: Vec<Entry> = Vec::new();
        for _ in 0..dice.up_to(8) {
            let entry = entry(dice, menu, subject, step.last(), next);
            if matches!(entry.op, Op::LinkTimeout(after) if after != INFINITE) && dice.chance(70) {
                make_twin(&program, &mut step);
            }
            step.push(entry);
            next += 1;
        }
        if !menu.open_chains
            && let Some(last) = step.last_mut()
        {
            last.flags.remove(Flags::CHAINED);
        }
        program.steps.push(step);
    }
    if menu.cancels {
        // Everything ends: a hard link starts what follows a cancelled entry, so once is not enough.
        for user_data in 900..903 {
            let op = Op::Cancel(Target::Any);
            program.steps.push(vec![Entry { op, flags: Flags::empty(), user_data }]);
        }
    }
    program
}

/// Gives the last entry, which a LinkTimeout is to end, the `user_data` of an older Timeout that runs.
fn make_twin(program: &Program, step: &mut [Entry]) {
    let Some((last, before)) = step.split_last_mut() else { return };
    let endless = |entry: &&Entry| matches!(entry.op, Op::Timeout { after: INFINITE, .. });
    if let Some(twin) = program.entries().chain(&*before).find(endless) {
        last.user_data = twin.user_data;
    }
}

fn entry(dice: &mut Dice, menu: Menu, subject: Subject, before: Option<&Entry>, next: u64) -> Entry {
    let mut flags = Flags::empty();
    if dice.chance(40) {
        flags |= Flags::LINK;
    } else if dice.chance(20) {
        flags |= Flags::HARDLINK;
    }
    flags.set(Flags::SKIP, dice.chance(menu.skips));
    flags.set(Flags::DRAIN, menu.drains && dice.chance(20));
    let op = op(dice, menu, flags, before, next);
    let is_cancel = matches!(op, Op::Cancel(_) | Op::TimeoutRemove(_));
    if is_cancel && subject == Subject::Moonring {
        flags.remove(Flags::DRAIN);
    }
    let user_data = if dice.chance(3) { dice.up_to(next) } else { next };
    Entry { op, flags, user_data }
}

fn op(dice: &mut Dice, menu: Menu, flags: Flags, before: Option<&Entry>, next: u64) -> Op {
    let linked = before.filter(|before| before.is_chained());
    if menu.timers_fire
        && dice.chance(40)
        && matches!(linked, Some(Entry { op: Op::Timeout { after: INFINITE, .. }, .. }))
    {
        return Op::LinkTimeout(Duration::from_millis(2));
    }
    match dice.0.u32(0..100) {
        0..5 => Op::Bad,
        5..20 => Op::Nop(-libc::EIO),
        20..26 => Op::Nop(7),
        26..42 => timeout(dice, menu, flags),
        42..56 if menu.cancels => {
            let target = dice.up_to(next + 1);
            match dice.0.u32(0..8) {
                0 => Op::Cancel(Target::Any),
                1 => Op::Cancel(Target::All(target)),
                2 => Op::TimeoutRemove(target),
                _ => Op::Cancel(Target::One(target)),
            }
        }
        56..70 if let Some(before) = linked => match before.op {
            // Which of two timers that fire comes first is the clock's choice.
            Op::Timeout { after, .. } if after != INFINITE => Op::Nop(0),
            _ => Op::LinkTimeout(INFINITE),
        },
        // With nothing before it, it fails its preparation.
        70..72 if linked.is_none() => Op::LinkTimeout(INFINITE),
        _ => Op::Nop(0),
    }
}

fn timeout(dice: &mut Dice, menu: Menu, flags: Flags) -> Op {
    if !menu.timers_fire || menu.timers_endless && dice.chance(60) {
        return Op::Timeout { after: INFINITE, repeat: Repeat::Once, etime_success: false };
    }
    let after = Duration::from_millis(dice.up_to(3));
    let ticks = dice.up_to(3) as u32;
    if !flags.intersects(Flags::CHAINED) && dice.chance(20) {
        return Op::Timeout { after, repeat: Repeat::Multishot(ticks), etime_success: false };
    }
    Op::Timeout { after, repeat: Repeat::Once, etime_success: dice.chance(30) }
}
