//! Runs a program on the kernel's io_uring.

use std::io;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, SubmitArgs, TimeoutFlags, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};

use crate::program::{Done, Entry, Op, Outcome, Program, Repeat, Step, Target};

/// How the ring is set up. The rules are the same in each, but for what follows a bad entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Plain,
    SubmitAll,
    DeferTaskrun,
    Sqpoll,
}

impl Mode {
    pub const ALL: [Mode; 4] = [Mode::Plain, Mode::SubmitAll, Mode::DeferTaskrun, Mode::Sqpoll];

    /// Whether entries behind a bad one are taken too.
    pub fn submits_all(self) -> bool {
        matches!(self, Mode::SubmitAll | Mode::Sqpoll)
    }

    fn build(self) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        match self {
            Mode::Plain => {}
            Mode::SubmitAll => {
                builder.setup_submit_all();
            }
            Mode::DeferTaskrun => {
                builder.setup_single_issuer().setup_defer_taskrun();
            }
            Mode::Sqpoll => {
                builder.setup_sqpoll(20).setup_submit_all();
            }
        }
        builder.build(64)
    }
}

/// Why the kernel's io_uring cannot be used here, if it cannot.
pub fn refusal() -> Option<io::Error> {
    Mode::ALL.into_iter().find_map(|mode| mode.build().err())
}

/// What is awaited that does not come is missing after this: long, as a busy machine's threads may all be late.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs `program` on a ring of its own. Each submit is given time to produce as many completions as `expected` has, and
/// then `quiet` for more to show up.
pub fn run(program: &Program, mode: Mode, expected: &Outcome, quiet: Duration) -> io::Result<Outcome> {
    let mut ring = mode.build()?;
    // The kernel reads them when it takes the entry.
    let mut times = Vec::with_capacity(program.entries().count());
    let mut outcome = Outcome::default();
    for (entries, expected) in program.steps.iter().zip(&expected.steps) {
        let lowered: Vec<_> = entries.iter().map(|entry| lower(entry, &mut times)).collect();
        // SAFETY: `times` is never moved, as it has room for all, and outlives the ring's use of it.
        unsafe { ring.submission().push_multiple(&lowered) }.map_err(io::Error::other)?;
        let mut taken = ring.submit()?;
        if mode == Mode::Sqpoll {
            taken = taken_by_poller(&mut ring, entries.len())?;
        }
        let done = reap(&mut ring, expected.done.len(), quiet)?;
        outcome.steps.push(Step { taken, done });
    }
    Ok(outcome)
}

/// Waits until the kernel's thread has taken everything.
fn taken_by_poller(ring: &mut IoUring, pushed: usize) -> io::Result<usize> {
    let start = Instant::now();
    loop {
        let left = ring.submission().len();
        if left == 0 || start.elapsed() > PATIENCE {
            return Ok(pushed - left);
        }
        // It may have fallen asleep.
        ring.submit()?;
        std::thread::yield_now();
    }
}

fn reap(ring: &mut IoUring, expected: usize, quiet: Duration) -> io::Result<Vec<Done>> {
    let mut done = Vec::new();
    let mut last = Instant::now();
    loop {
        let before = done.len();
        done.extend(ring.completion().map(|cqe| Done {
            user_data: cqe.user_data(),
            res: cqe.result(),
            more: cqueue::more(cqe.flags()),
        }));
        if done.len() > before {
            last = Instant::now();
        }
        let limit = if done.len() < expected { PATIENCE } else { quiet };
        let Some(left) = limit.checked_sub(last.elapsed()) else { return Ok(done) };
        let left = Timespec::from(left);
        let args = SubmitArgs::new().timespec(&left);
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        // SAFETY: the argument is what EXT_ARG asks for, and lives until the call returns. Nothing is submitted.
        match unsafe { ring.submitter().enter(0, 1, flags.bits(), Some(&args)) } {
            Err(error) if ![libc::ETIME, libc::EINTR].map(Some).contains(&error.raw_os_error()) => return Err(error),
            _ => {}
        }
    }
}

fn lower(entry: &Entry, times: &mut Vec<Timespec>) -> squeue::Entry {
    let mut keep = |after: Duration| {
        times.push(after.into());
        &raw const times[times.len() - 1]
    };
    let lowered = match entry.op {
        Op::Nop(0) => opcode::Nop::new().build(),
        Op::Nop(res) => nop(NOP_INJECT_RESULT, res),
        Op::Bad => nop(NOP_UNKNOWN, 0),
        Op::Timeout { after, repeat, etime_success } => {
            let mut flags = TimeoutFlags::empty();
            flags.set(TimeoutFlags::ETIME_SUCCESS, etime_success);
            flags.set(TimeoutFlags::MULTISHOT, matches!(repeat, Repeat::Multishot(_)));
            let count = match repeat {
                Repeat::Once => 0,
                Repeat::Multishot(count) | Repeat::Count(count) => count,
            };
            opcode::Timeout::new(keep(after)).count(count).flags(flags).build()
        }
        Op::LinkTimeout(after) => opcode::LinkTimeout::new(keep(after)).build(),
        Op::Cancel(target) => opcode::AsyncCancel2::new(match target {
            Target::One(user_data) => CancelBuilder::user_data(user_data),
            Target::All(user_data) => CancelBuilder::user_data(user_data).all(),
            Target::Any => CancelBuilder::any(),
        })
        .build(),
        Op::TimeoutRemove(target) => opcode::TimeoutRemove::new(target).build(),
    };
    lowered.flags(squeue::Flags::from_bits_retain(entry.flags.bits())).user_data(entry.user_data)
}

const NOP_INJECT_RESULT: u32 = 1;
/// A flag that no kernel knows.
const NOP_UNKNOWN: u32 = 1 << 30;

/// A Nop with flags, which the crate has no builder for.
fn nop(flags: u32, res: i32) -> squeue::Entry {
    let entry = opcode::Nop::new().build();
    // SAFETY: an entry is the kernel's 64 bytes, of which any are valid. `len` is at byte 24 and the Nop's flags at 28.
    let mut bytes: [u8; 64] = unsafe { std::mem::transmute(entry) };
    bytes[24..28].copy_from_slice(&res.to_ne_bytes());
    bytes[28..32].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: as above.
    unsafe { std::mem::transmute::<[u8; 64], squeue::Entry>(bytes) }
}
