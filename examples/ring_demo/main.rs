//! A decode side loads pages of its KV cache from a prefill side, while its compute stream still has work queued on the
//! very same pages.
//!
//! A scheduler works ahead of its compute stream. In each step here it first queues, for some pages of the pool, a
//! copy-on-write of a shared page. Then it finds out that the prefill side has what belongs there, and loads it into the
//! same pages. For the scheduler, the copy comes first. For the machine it does not: the stream is busy and copies late,
//! the transfer knows nothing of streams, and a copy that comes after the load overwrites it.
//!
//! ```text
//!             the scheduler queues               what happens
//!
//!   without   stream: kernel, copy to page 7     [------ kernel ------][copy]    the loaded page is lost
//!             ring:   load to page 7              [load]
//!
//!   with      stream: kernel, copy to page 7     [------ kernel ------][copy]    fence signals
//!             ring:   load to page 7, waits                                  [load]
//! ```
//!
//! With moonring the stream gives one fence behind the step's copies, and the step's loads wait for it: in the ring, not
//! in the scheduler, which goes on to the next step at once. This program does that and checks every byte of every page,
//! then does the same work without the fences and counts the pages that this corrupts.
//!
//! Start reading at [`Decode`].

mod args;
#[path = "../common/mod.rs"]
mod common;
mod prefill;
mod report;

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use moonring::{Cqe, Engine, Region, RegionInfo, Registered, Ring, Segment, opcode};

use args::Args;
use common::stream::Stream;
use common::{pages, progress};
use prefill::Prefill;
use report::Outcome;

/// How long the prefill side may take to answer.
const LIMIT: Duration = Duration::from_secs(60);

/// What the shared pages hold: contents that no page of the prefill side has.
const SHARED: u64 = 1 << 32;

/// The decode side.
struct Decode<'a> {
    args: &'a Args,
    /// The pages: first the shared ones, as many as a step has, then those of each step in flight.
    pool: Registered,
    stream: Stream,
    ring: Ring,
    /// The prefill side, and where its pages are.
    peer: Segment,
    remote: RegionInfo,
    remote_pages: usize,
    /// What is outstanding in each group of pages; one group for each step in flight.
    groups: Vec<Group>,
    /// The page that [`check`](Self::check) looks at.
    page: Vec<u8>,
}

/// The step that is using a group of pages.
#[derive(Default)]
struct Group {
    step: usize,
    /// Completions to come.
    left: usize,
    /// When each page's load was pushed.
    pushed: Vec<Instant>,
}

/// With fences, as it should be, or without, as a control.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fences {
    On,
    Off,
}

impl Decode<'_> {
    fn new<'a>(args: &'a Args, engine: &Engine, prefill: &Prefill) -> Result<Decode<'a>, Box<dyn Error>> {
        let pages = args.pages_per_step * (1 + args.depth);
        let region = Region::alloc(pages * args.page_size).map_err(|error| {
            format!("no memory for the decode side's {pages} pages of {} bytes: {error}", args.page_size)
        })?;
        let pool = engine.register(region)?;
        let mut page = vec![0; args.page_size];
        for shared in 0..args.pages_per_step {
            pages::fill(SHARED + shared as u64, &mut page);
            pool.write_at(shared * args.page_size, &page)?;
        }
        // Each step has its loads outstanding, and one Wait.
        let entries = args.depth * (args.pages_per_step + 1);
        let stream = Stream::start(args.stream, pool.clone())?;
        eprintln!("the copies run on {}", stream.name());
        Ok(Decode {
            args,
            stream,
            ring: Ring::builder().build(entries as u32, engine)?,
            peer: engine.open_segment(&prefill.info.segment, LIMIT)?,
            remote: prefill.info.clone(),
            remote_pages: prefill::page_count(args),
            groups: (0..args.depth).map(|_| Group::default()).collect(),
            pool,
            page,
        })
    }

    /// Runs all steps, as many at a time as may be in flight.
    fn run(&mut self, fences: Fences) -> Result<Outcome, Box<dyn Error>> {
        let steps = self.args.steps as usize;
        let run = if fences == Fences::On { "with fences   " } else { "without fences" };
        let progress = progress::bar(steps as u64, "steps", run);
        let mut outcome = Outcome::new();
        let start = Instant::now();
        let mut free: Vec<usize> = (0..self.args.depth).collect();
        let (mut started, mut done) = (0, 0);
        while done < steps {
            while started < steps
                && let Some(group) = free.pop()
            {
                self.start(started, group, fences)?;
                started += 1;
            }
            self.ring.wait_timeout(1, LIMIT).map_err(|error| format!("after {done} steps, in {LIMIT:?}: {error}"))?;
            for group in self.reap(&mut outcome)? {
                self.check(group, &mut outcome)?;
                free.push(group);
                done += 1;
                progress.inc(1);
            }
        }
        outcome.wall = start.elapsed();
        progress.finish_and_clear();
        Ok(outcome)
    }

    /// Queues a step's copies on the stream and its loads on the ring, into the same pages. Waits for nothing.
    fn start(&mut self, step: usize, group: usize, fences: Fences) -> Result<(), Box<dyn Error>> {
        let size = self.args.page_size;
        let count = self.args.pages_per_step;
        self.groups[group] = Group { step, left: count + 1, pushed: Vec::with_capacity(count) };

        self.stream.kernel(kernel_time(count * size))?;
        for index in 0..count {
            self.stream.copy(index * size, self.offset(group, index), size)?;
        }
        let fence = self.stream.fence()?;

        for index in 0..count {
            let page = self.offset(group, index);
            let local = self.pool.slice(page..page + size)?;
            let remote = self.peer.slice(&self.remote, self.content(step, index) * size as u64, size as u64)?;
            let mut load = opcode::Read::new(local, remote).build().user_data(user_data(group, index));
            if fences == Fences::On {
                load = load.wait(&fence);
            }
            self.groups[group].pushed.push(Instant::now());
            self.ring.submission().push(load)?;
        }
        // The step is done when its pages are loaded and its copies made. In the control the copies may be last, so the
        // completion queue has to hear of them too.
        let copied = opcode::Wait::new().build().wait(&fence).user_data(user_data(group, count));
        self.ring.submission().push(copied)?;
        self.ring.submit()?;
        Ok(())
    }

    /// Takes the completions that are there and returns the groups whose steps they finish.
    fn reap(&mut self, outcome: &mut Outcome) -> Result<Vec<usize>, Box<dyn Error>> {
        let mut finished = Vec::new();
        for cqe in self.ring.completion() {
            let (group, index) = group_and_index(&cqe);
            let Group { step, left, pushed } = &mut self.groups[group];
            let moved = cqe.result().map_err(|error| match pushed.get(index) {
                Some(_) => format!("step {step}: the load of page {index} {error}"),
                None => format!("step {step}: the wait for its copies {error}"),
            })?;
            if let Some(pushed) = pushed.get(index) {
                if moved as usize != self.args.page_size {
                    return Err(format!("step {step}: the load of page {index} moved {moved} bytes").into());
                }
                outcome.gate.record(cqe.gate_time());
                outcome.wire.record(cqe.wire_time());
                outcome.total.record(pushed.elapsed());
            }
            *left -= 1;
            if *left == 0 {
                finished.push(group);
            }
        }
        Ok(finished)
    }

    /// What the step would now compute with: every byte of its pages must be the prefill side's.
    fn check(&mut self, group: usize, outcome: &mut Outcome) -> Result<(), Box<dyn Error>> {
        for index in 0..self.args.pages_per_step {
            self.pool.read_at(self.offset(group, index), &mut self.page)?;
            outcome.pages += 1;
            if !pages::matches(self.content(self.groups[group].step, index), &self.page) {
                outcome.corrupted += 1;
            }
        }
        Ok(())
    }

    /// Where a page of a group is in the pool: behind the shared pages and the groups before.
    fn offset(&self, group: usize, index: usize) -> usize {
        ((1 + group) * self.args.pages_per_step + index) * self.args.page_size
    }

    /// Which of the prefill side's pages a step loads into its page `index`. They are taken in turn; a page of the pool
    /// gets the same one twice only with a copy in between, so old bytes are never right.
    fn content(&self, step: usize, index: usize) -> u64 {
        ((step * self.args.pages_per_step + index) % self.remote_pages) as u64
    }
}

/// How long the kernel runs that is in front of a step's copies and makes them late: half a nanosecond for each byte of the
/// step's pages, which is about what loading them takes, and never less than half a millisecond.
fn kernel_time(bytes: usize) -> Duration {
    Duration::from_nanos(bytes as u64 / 2).max(Duration::from_micros(500))
}

/// A group and an index in it as one number, which comes back in the completion.
fn user_data(group: usize, index: usize) -> u64 {
    (group as u64) << 32 | index as u64
}

fn group_and_index(cqe: &Cqe) -> (usize, usize) {
    ((cqe.user_data() >> 32) as usize, cqe.user_data() as u32 as usize)
}

fn demo(args: &Args) -> Result<(), Box<dyn Error>> {
    let engine = args.transport.engine()?;
    let prefill = Prefill::start(args)?;
    let mut decode = Decode::new(args, &engine, &prefill)?;
    let fenced = decode.run(Fences::On)?;
    let control = decode.run(Fences::Off)?;
    println!(
        "{}",
        if args.json { report::json(args, &fenced, &control) } else { report::text(args, &fenced, &control) }
    );

    if fenced.corrupted > 0 {
        return Err(
            format!("{} of {} pages were corrupted in spite of the fences", fenced.corrupted, fenced.pages).into()
        );
    }
    if control.corrupted == 0 {
        let pages = control.pages;
        return Err(format!(
            "the control shows nothing: without fences, all {pages} pages happened to be right, because every copy was \
             made before its load; more --steps give more chances"
        )
        .into());
    }
    Ok(())
}

fn main() -> ExitCode {
    let args = Args::parse();
    let (side, result) = if args.prefill { ("prefill side: ", prefill::serve(&args)) } else { ("", demo(&args)) };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{side}error: {error}");
            ExitCode::FAILURE
        }
    }
}
