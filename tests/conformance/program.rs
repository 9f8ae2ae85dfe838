//! Small programs of entries, their outcomes, and how both are written as text.
//!
//! A program is a few submits, written with ` | ` between them, of a few entries each. `nop1=-5/L` is a Nop with
//! `user_data` 1 and the injected result -5, linked to the next entry; `BAD` fails before it is queued, `T` is a Timeout,
//! `LT` a LinkTimeout, `C` a Cancel and `TR` a TimeoutRemove. Flags: `D` drain, `L` link, `H` hard link, `A` async, `S`
//! skip. An outcome has the completions of each submit once everything has settled: `1:ETIME+MORE`.

use std::fmt::{self, Display, Formatter};
use std::str::FromStr;
use std::time::Duration;

use bitflags::bitflags;

bitflags! {
    /// An entry's flags, with io_uring's numbers.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Flags: u8 {
        const DRAIN = 1 << 1;
        const LINK = 1 << 2;
        const HARDLINK = 1 << 3;
        const ASYNC = 1 << 4;
        const SKIP = 1 << 6;
        /// Something follows in its chain.
        const CHAINED = Self::LINK.bits() | Self::HARDLINK.bits();
    }
}

/// What the text calls the flags.
const FLAG_LETTERS: [(Flags, char); 5] =
    [(Flags::DRAIN, 'D'), (Flags::LINK, 'L'), (Flags::HARDLINK, 'H'), (Flags::ASYNC, 'A'), (Flags::SKIP, 'S')];

/// A time that never passes in a test.
pub const INFINITE: Duration = Duration::from_secs(3600);

pub const EIO: i32 = -libc::EIO;
pub const ETIME: i32 = -libc::ETIME;
pub const EINVAL: i32 = -libc::EINVAL;
pub const ENOENT: i32 = -libc::ENOENT;
pub const ECANCELED: i32 = -libc::ECANCELED;
pub const EOPNOTSUPP: i32 = -libc::EOPNOTSUPP;
pub const EALREADY: i32 = -libc::EALREADY;

const ERRNO_NAMES: [(i32, &str); 7] = [
    (EIO, "EIO"),
    (ETIME, "ETIME"),
    (EINVAL, "EINVAL"),
    (ENOENT, "ENOENT"),
    (ECANCELED, "ECANCELED"),
    (EOPNOTSUPP, "EOPNOTSUPP"),
    (EALREADY, "EALREADY"),
];

/// When a Timeout ends, besides at its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    Once,
    /// So many ticks; 0 is for ever.
    Multishot(u32),
    /// Or once so many completions have been posted.
    Count(u32),
}

/// Whom a Cancel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The first with this `user_data`.
    One(u64),
    /// Every one with this `user_data`.
    All(u64),
    /// Everything.
    Any,
}

impl Target {
    pub fn matches(self, user_data: u64) -> bool {
        match self {
            Target::One(wanted) | Target::All(wanted) => wanted == user_data,
            Target::Any => true,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Completes with this result.
    Nop(i32),
    /// Fails its preparation with `EINVAL`, before it is ever queued.
    Bad,
    Timeout {
        after: Duration,
        repeat: Repeat,
        /// Links survive its `ETIME`.
        etime_success: bool,
    },
    LinkTimeout(Duration),
    Cancel(Target),
    TimeoutRemove(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub op: Op,
    pub flags: Flags,
    pub user_data: u64,
}

impl Entry {
    pub fn is_chained(&self) -> bool {
        self.flags.intersects(Flags::CHAINED)
    }

    /// A Timeout that ticks for ever: how often it ticks before the submit has settled depends on the clock.
    pub fn ticks_for_ever(&self) -> bool {
        matches!(self.op, Op::Timeout { repeat: Repeat::Multishot(0), .. })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    pub steps: Vec<Vec<Entry>>,
}

impl Program {
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.steps.iter().flatten()
    }
}

/// A completion: what of it is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Done {
    pub user_data: u64,
    pub res: i32,
    pub more: bool,
}

/// What came of a program: how many entries each submit took, and its completions in the order of the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub steps: Vec<Step>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub taken: usize,
    pub done: Vec<Done>,
}

impl Outcome {
    pub fn completions(&self) -> usize {
        self.steps.iter().map(|step| step.done.len()).sum()
    }
}

impl Display for Entry {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let user_data = self.user_data;
        match self.op {
            Op::Nop(0) => write!(f, "nop{user_data}")?,
            Op::Nop(res) => write!(f, "nop{user_data}={res}")?,
            Op::Bad => write!(f, "BAD{user_data}")?,
            Op::Timeout { after, repeat, etime_success } => {
                write!(f, "T{user_data}({}", time(after))?;
                match repeat {
                    Repeat::Once => {}
                    Repeat::Multishot(0) => f.write_str(",multi")?,
                    Repeat::Multishot(ticks) => write!(f, ",multi={ticks}")?,
                    Repeat::Count(count) => write!(f, ",count={count}")?,
                }
                f.write_str(if etime_success { ",ok)" } else { ")" })?;
            }
            Op::LinkTimeout(after) => write!(f, "LT{user_data}({})", time(after))?,
            Op::Cancel(Target::One(target)) => write!(f, "C{user_data}({target})")?,
            Op::Cancel(Target::All(target)) => write!(f, "C{user_data}({target},all)")?,
            Op::Cancel(Target::Any) => write!(f, "C{user_data}(any)")?,
            Op::TimeoutRemove(target) => write!(f, "TR{user_data}({target})")?,
        }
        if !self.flags.is_empty() {
            f.write_str("/")?;
        }
        let mut letters = FLAG_LETTERS.iter().filter(|(flag, _)| self.flags.contains(*flag));
        letters.try_for_each(|(_, letter)| write!(f, "{letter}"))
    }
}

fn time(after: Duration) -> String {
    if after == INFINITE { "inf".into() } else { format!("{}ms", after.as_millis()) }
}

impl Display for Program {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&joined(&self.steps, " | ", |step| joined(step, " ", Entry::to_string)))
    }
}

impl Display for Done {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.user_data)?;
        match ERRNO_NAMES.iter().find(|(errno, _)| *errno == self.res) {
            Some((_, name)) => f.write_str(name)?,
            None => write!(f, "{}", self.res)?,
        }
        f.write_str(if self.more { "+MORE" } else { "" })
    }
}

impl Display for Outcome {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&joined(&self.steps, " | ", |step| joined(&step.done, " ", Done::to_string)))
    }
}

fn joined<T>(items: &[T], between: &str, text: impl Fn(&T) -> String) -> String {
    items.iter().map(text).collect::<Vec<_>>().join(between)
}

/// Text that is no program or outcome: the word that was not understood.
#[derive(Debug)]
pub struct Unreadable(String);

impl Display for Unreadable {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "not understood: {:?}", self.0)
    }
}

impl std::error::Error for Unreadable {}

/// The words of each step.
fn steps<T>(text: &str, word: impl Fn(&str) -> Option<T>) -> Result<Vec<Vec<T>>, Unreadable> {
    let read = |text: &str| word(text).ok_or_else(|| Unreadable(text.into()));
    text.split('|').map(|step| step.split_whitespace().map(read).collect()).collect()
}

impl FromStr for Program {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Program, Unreadable> {
        Ok(Program { steps: steps(text, read_entry)? })
    }
}

impl FromStr for Outcome {
    type Err = Unreadable;

    /// Taken counts are not in the text: they are 0.
    fn from_str(text: &str) -> Result<Outcome, Unreadable> {
        let steps = steps(text, read_done)?;
        Ok(Outcome { steps: steps.into_iter().map(|done| Step { taken: 0, done }).collect() })
    }
}

fn read_entry(word: &str) -> Option<Entry> {
    let (word, letters) = word.split_once('/').unwrap_or((word, ""));
    let mut flags = Flags::empty();
    for letter in letters.chars() {
        flags |= FLAG_LETTERS.iter().find(|(_, known)| *known == letter)?.0;
    }
    let name = word.trim_start_matches(|letter: char| letter.is_ascii_alphabetic());
    let (name, rest) = (&word[..word.len() - name.len()], name);
    let (user_data, argument) = match rest.find(['(', '=']) {
        Some(at) => (&rest[..at], rest[at + 1..].trim_end_matches(')')),
        None => (rest, ""),
    };
    let mut arguments = argument.split(',');
    let argument = arguments.next()?;
    let op = match name {
        "nop" if argument.is_empty() => Op::Nop(0),
        "nop" => Op::Nop(argument.parse().ok()?),
        "BAD" => Op::Bad,
        "T" => {
            let (mut repeat, mut etime_success) = (Repeat::Once, false);
            for option in arguments.by_ref() {
                match option.split_once('=') {
                    None if option == "ok" => etime_success = true,
                    None if option == "multi" => repeat = Repeat::Multishot(0),
                    Some(("multi", ticks)) => repeat = Repeat::Multishot(ticks.parse().ok()?),
                    Some(("count", count)) => repeat = Repeat::Count(count.parse().ok()?),
                    _ => return None,
                }
            }
            Op::Timeout { after: read_time(argument)?, repeat, etime_success }
        }
        "LT" => Op::LinkTimeout(read_time(argument)?),
        "C" if argument == "any" => Op::Cancel(Target::Any),
        "C" if arguments.next() == Some("all") => Op::Cancel(Target::All(argument.parse().ok()?)),
        "C" => Op::Cancel(Target::One(argument.parse().ok()?)),
        "TR" => Op::TimeoutRemove(argument.parse().ok()?),
        _ => return None,
    };
    Some(Entry { op, flags, user_data: user_data.parse().ok()? })
}

fn read_time(text: &str) -> Option<Duration> {
    match text {
        "inf" => Some(INFINITE),
        text => Some(Duration::from_millis(text.strip_suffix("ms")?.parse().ok()?)),
    }
}

fn read_done(word: &str) -> Option<Done> {
    let (user_data, res) = word.split_once(':')?;
    let (res, more) = res.strip_suffix("+MORE").map_or((res, false), |res| (res, true));
    let res = match ERRNO_NAMES.iter().find(|(_, name)| *name == res) {
        Some((errno, _)) => *errno,
        None => res.parse().ok()?,
    };
    Some(Done { user_data: user_data.parse().ok()?, res, more })
}
