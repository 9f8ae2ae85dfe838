//! A connector offloads an engine's KV-cache pages to a Store, while the engine's compute stream still has work queued on
//! the very same pages.
//!
//! An engine cuts prompts into blocks. A block's keys and values take one page of a pool, and go by the hash of the tokens up
//! to the block's end. For each request the connector asks the Store which of its blocks it has. What is there is loaded
//! into pages of the request; what is not is computed (prefill) and stored, for the next request that begins so. The
//! scheduler works ahead of its compute stream, so two things have to be in order that are not by themselves:
//!
//! ```text
//!             the scheduler queues                what happens
//!
//!   without   stream: kernel, copy to page 7      [------ kernel ------][copy]    the loaded page is lost
//!             ring:   get into page 7             [get]
//!
//!             stream: prefill into page 8         [----- prefill -----]
//!             ring:   put page 8                  [put]                           what was there before is stored
//!
//!   with      stream: kernel, copy to page 7      [------ kernel ------][copy]    fence signals
//!             ring:   get into page 7, waits                                  [get]
//! ```
//!
//! Connectors do that with a thread, a queue and an event that the thread waits for, so that one request's event holds up
//! the others' loads. With moonring the stream gives one fence behind a request's copies and one behind its prefill, and the
//! entries wait for them in the ring. This program does that, gives the pages to the next requests as soon as they are quiet, and
//! checks every byte that it loads; then it does the same work without the fences and counts the loads that this corrupts.
//!
//! Start reading at [`Connector`].

mod args;
#[path = "../common/mod.rs"]
mod common;
mod pool;
mod prompts;
mod report;
mod store;

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use common::stream::Stream;
use common::{pages, progress};
use moonring::code::errno;
use moonring::{Cqe, Engine, Entry, Fence, Ring, opcode};

use args::Args;
use pool::{Page, Pool};
use report::Outcome;
use store::Store;

/// How long nothing may happen.
const LIMIT: Duration = Duration::from_secs(60);

/// The connector, and as much of an engine as it needs.
struct Connector<'a> {
    args: &'a Args,
    pool: Pool,
    stream: Stream,
    store: &'a Store,
    ring: Ring,
    /// One for each request that may be in flight.
    slots: Vec<Option<Request>>,
    /// The page that [`check`](Self::check) looks at.
    page: Vec<u8>,
}

/// A request in flight.
struct Request {
    blocks: Vec<Block>,
    /// Entries that have not ended.
    left: usize,
}

/// A block of a prompt.
struct Block {
    /// The hash of all tokens up to its end: its key in the Store, and what its page must hold.
    hash: u64,
    page: Page,
    /// The Store had it when it was asked.
    there: bool,
    /// Its page was loaded.
    loaded: bool,
    /// When its load was pushed.
    pushed: Instant,
}

/// With fences, as it should be, or without, as a control.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fences {
    On,
    Off,
}

/// What an entry does for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    LookUp,
    Load,
    Store,
    /// Nothing but wait for the stream.
    Compute,
}

impl Connector<'_> {
    fn new<'a>(args: &'a Args, engine: &Engine, store: &'a Store) -> Result<Connector<'a>, Box<dyn Error>> {
        let pool = Pool::new(engine, args.in_flight * args.blocks(), args.page_size)?;
        store.client.register(&pool.memory)?;
        let stream = Stream::start(args.stream, pool.memory.clone())?;
        eprintln!("copies and prefill run on {}", stream.name());
        // A block has one entry at a time, and a request one Wait.
        let entries = args.in_flight * (args.blocks() + 1);
        Ok(Connector {
            args,
            stream,
            store,
            ring: Ring::builder().build(entries as u32, engine)?,
            slots: (0..args.in_flight).map(|_| None).collect(),
            pool,
            page: vec![0; args.page_size],
        })
    }

    /// Runs all requests, as many at a time as may be in flight.
    fn run(&mut self, fences: Fences) -> Result<Outcome, Box<dyn Error>> {
        let requests = self.args.requests as usize;
        let run = if fences == Fences::On { "with fences   " } else { "without fences" };
        let progress = progress::bar(requests as u64, "requests", run);
        let mut outcome = Outcome::new();
        let start = Instant::now();
        let (mut started, mut done) = (0, 0);
        while done < requests {
            while started < requests
                && let Some(slot) = self.slots.iter().position(Option::is_none)
            {
                self.look_up(started, slot, fences, &mut outcome)?;
                started += 1;
            }
            self.ring
                .wait_timeout(1, LIMIT)
                .map_err(|error| format!("after {done} requests, in {LIMIT:?}: {error}"))?;
            for slot in self.reap(fences, &mut outcome)? {
                self.finish(slot, &mut outcome)?;
                done += 1;
                progress.inc(1);
            }
        }
        outcome.wall = start.elapsed();
        progress.finish_and_clear();
        Ok(outcome)
    }

    /// Begins a request: pages for its blocks, and a question to the Store for each.
    fn look_up(
        &mut self,
        request: usize,
        slot: usize,
        fences: Fences,
        outcome: &mut Outcome,
    ) -> Result<(), Box<dyn Error>> {
        let hashes = prompts::prefix_hashes(self.args, request);
        outcome.keys.extend(&hashes);
        let pages = self.pool.take(hashes.len()).expect("as many requests as the pool has pages for");
        let (blocks, now) = (hashes.into_iter().zip(pages), Instant::now());
        let blocks: Vec<_> =
            blocks.map(|(hash, page)| Block { hash, page, there: false, loaded: false, pushed: now }).collect();
        for (index, block) in blocks.iter().enumerate() {
            let question = opcode::Exist::new(&self.store.client, key(block.hash, fences)).build();
            self.ring.submission().push(question.user_data(user_data(slot, Task::LookUp, index)))?;
        }
        self.ring.submit()?;
        self.slots[slot] = Some(Request { left: blocks.len(), blocks });
        Ok(())
    }

    /// What is there is loaded, the rest computed and stored. Queues all of it and waits for nothing.
    fn schedule(&mut self, slot: usize, fences: Fences) -> Result<(), Box<dyn Error>> {
        let request = self.slots[slot].as_mut().expect("it is in flight");
        let size = self.args.page_size;
        // A prefix: keys and values of a block are of use with those of all blocks before it.
        let there = request.blocks.iter().take_while(|block| block.there).count();
        let count = request.blocks.len();
        let (load, compute) = request.blocks.split_at_mut(there);
        let ordered = |entry: Entry, fence: &Fence| match fences {
            Fences::On => entry.wait(fence),
            Fences::Off => entry,
        };
        let mut entries = Vec::with_capacity(count + 1);

        // The stream is busy with a step of the requests that run. Behind it come copies of a shared page, made before it was
        // known that the Store has what belongs there.
        self.stream.kernel(kernel_time(count * size))?;
        for block in &*load {
            self.stream.copy(self.pool.offset(Pool::SHARED), self.pool.offset(block.page), size)?;
        }
        let copied = self.stream.fence()?;
        for (index, block) in load.iter_mut().enumerate() {
            block.pushed = Instant::now();
            let page = self.pool.slice(block.page)?;
            let get = opcode::Get::new(&self.store.client, key(block.hash, fences), page).build();
            entries.push(ordered(get, &copied).user_data(user_data(slot, Task::Load, index)));
        }

        for block in &*compute {
            prefill(&self.stream, &self.pool, block, size)?;
        }
        let computed = self.stream.fence()?;
        for (index, block) in (there..).zip(compute) {
            let page = self.pool.slice(block.page)?;
            let put = opcode::Put::new(&self.store.client, key(block.hash, fences), page).build();
            entries.push(ordered(put, &computed).user_data(user_data(slot, Task::Store, index)));
        }
        // In the control the stream may be last.
        entries.push(opcode::Wait::new().build().wait(&computed).user_data(user_data(slot, Task::Compute, 0)));

        request.left = entries.len();
        for entry in entries {
            self.ring.submission().push(entry)?;
        }
        self.ring.submit()?;
        Ok(())
    }

    /// Takes the completions that are there, and goes on with the requests that they let go on. Returns the slots of those that
    /// are done.
    fn reap(&mut self, fences: Fences, outcome: &mut Outcome) -> Result<Vec<usize>, Box<dyn Error>> {
        let (mut known, mut gone, mut finished) = (Vec::new(), Vec::new(), Vec::new());
        for cqe in self.ring.completion() {
            let (slot, task, index) = slot_task_and_index(&cqe);
            let request = self.slots[slot].as_mut().expect("it is in flight");
            let block = &mut request.blocks[index];
            outcome.operations += u64::from(task != Task::Compute);
            match (task, cqe.result().map_err(|error| (error.errno, error))) {
                (Task::LookUp, Ok(there)) => block.there = there == 1,
                (Task::Load, Ok(bytes)) if bytes as usize == self.args.page_size => {
                    block.loaded = true;
                    outcome.gets += 1;
                    outcome.get_times.record(block.pushed.elapsed().saturating_sub(cqe.gate_time()));
                }
                (Task::Load, Ok(bytes)) => {
                    return Err(format!("the load of {:016x} has {bytes} bytes", block.hash).into());
                }
                // Evicted since it was looked up, or while it was loaded: it is computed after all.
                (Task::Load, Err((errno::ENOENT | errno::EKEYEXPIRED, _))) => {
                    outcome.lost += 1;
                    gone.push((slot, index));
                    continue;
                }
                (Task::Store, Ok(_)) => outcome.puts += 1,
                // Another request has stored the same block meanwhile; or the Store is full, and does without.
                (Task::Store, Err((errno::EEXIST | errno::ENOSPC, _))) | (Task::Compute, Ok(_)) => {}
                (task, Err((_, error))) => return Err(format!("{task:?} of {:016x} {error}", block.hash).into()),
            }
            request.left -= 1;
            match task {
                _ if request.left > 0 => {}
                Task::LookUp => known.push(slot),
                _ => finished.push(slot),
            }
        }
        for slot in known {
            self.schedule(slot, fences)?;
        }
        for (slot, index) in gone {
            let request = self.slots[slot].as_ref().expect("it is in flight");
            prefill(&self.stream, &self.pool, &request.blocks[index], self.args.page_size)?;
            let computed = opcode::Wait::new().build().wait(&self.stream.fence()?);
            self.ring.submission().push(computed.user_data(user_data(slot, Task::Compute, index)))?;
            self.ring.submit()?;
        }
        Ok(finished)
    }

    /// What the request would now compute with: every byte of its loaded pages must be its block's. Then the pages are free.
    fn finish(&mut self, slot: usize, outcome: &mut Outcome) -> Result<(), Box<dyn Error>> {
        let request = self.slots[slot].take().expect("it is in flight");
        for block in request.blocks.iter().filter(|block| block.loaded) {
            self.pool.memory.read_at(self.pool.offset(block.page), &mut self.page)?;
            outcome.corrupted += u64::from(!pages::matches(block.hash, &self.page));
        }
        self.pool.give_back(request.blocks.iter().map(|block| block.page).collect());
        Ok(())
    }
}

/// Queues the computation of a block's keys and values.
fn prefill(stream: &Stream, pool: &Pool, block: &Block, size: usize) -> Result<(), Box<dyn Error>> {
    let (content, offset) = (block.hash, pool.offset(block.page));
    stream.queue(Box::new(move |memory| {
        let mut page = vec![0; size];
        pages::fill(content, &mut page);
        memory.write_at(offset, &page)
    }))
}

/// A block's key. The runs have different ones, so that none loads what the other has stored.
fn key(hash: u64, fences: Fences) -> String {
    match fences {
        Fences::On => format!("fenced/{hash:016x}"),
        Fences::Off => format!("unfenced/{hash:016x}"),
    }
}

/// How long the kernel runs that is in front of a request's copies and prefill and makes them late: half a nanosecond for each
/// byte of its pages, which is about what loading them takes, and never less than half a millisecond.
fn kernel_time(bytes: usize) -> Duration {
    Duration::from_nanos(bytes as u64 / 2).max(Duration::from_micros(500))
}

/// A slot, a task and the index of a block as one number, which comes back in the completion.
fn user_data(slot: usize, task: Task, index: usize) -> u64 {
    (slot as u64) << 32 | (task as u64) << 16 | index as u64
}

fn slot_task_and_index(cqe: &Cqe) -> (usize, Task, usize) {
    let number = cqe.user_data();
    let task = [Task::LookUp, Task::Load, Task::Store, Task::Compute][(number >> 16) as u16 as usize];
    ((number >> 32) as usize, task, number as u16 as usize)
}

fn demo(args: &Args) -> Result<(), Box<dyn Error>> {
    let engine = Engine::loopback();
    let store = Store::start(args, &engine)?;
    let mut connector = Connector::new(args, &engine, &store)?;
    let fenced = connector.run(Fences::On)?;
    let control = connector.run(Fences::Off)?;
    drop(connector);
    store.stop()?;
    println!(
        "{}",
        if args.json { report::json(args, &fenced, &control) } else { report::text(args, &fenced, &control) }
    );

    if fenced.corrupted > 0 {
        return Err(
            format!("{} of {} loads were corrupted in spite of the fences", fenced.corrupted, fenced.gets).into()
        );
    }
    if fenced.gets == 0 {
        return Err("nothing was loaded: the Store had no block when it was asked".into());
    }
    if control.corrupted == 0 {
        return Err(format!(
            "the control shows nothing: without fences, all {} loads happened to be right; more --requests give more chances",
            control.gets
        )
        .into());
    }
    Ok(())
}

fn main() -> ExitCode {
    match demo(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
