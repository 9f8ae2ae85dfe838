//! The checks, each of which runs in a process of its own.

use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use moonring::cuda::{CudaError, Progress, Stream, Timeline};
use moonring::fence::{FenceStatus, host};
use moonring::{Cqe, Engine, Entry, Fence, Ring, Stage, opcode};

use crate::device::{Device, LIMIT, Word};
use crate::transfers::{Transfers, nothing_completes, push, reap, succeeded};

/// Why a check cannot be made on this machine: an error that is no failure.
#[derive(Debug)]
pub struct Skip(pub String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

type Check = fn() -> Result<()>;

/// All of them, with what they show.
pub const CHECKS: &[(&str, Check)] = &[
    ("race_without_fence", race_without_fence),
    ("race_with_event_fence", race_with_event_fence),
    ("race_with_timeline_fence", race_with_timeline_fence),
    ("load_then_kernel", load_then_kernel),
    ("kernels_held_behind_loads", kernels_held_behind_loads),
    ("failed_load_lets_kernels_go", failed_load_lets_kernels_go),
    ("limit_lets_kernels_go", limit_lets_kernels_go),
    ("event_per_stream", event_per_stream),
    ("one_event_many_entries", one_event_many_entries),
    ("timeline_values", timeline_values),
    ("graph_signals_and_waits", graph_signals_and_waits),
    ("capture_stays_whole", capture_stays_whole),
    ("fault_fails_fences", fault_fails_fences),
];

/// How many loads are each followed by a kernel that looks at what they brought.
const LOADS: u64 = 10_000;
const PAGE: usize = 4096;
const WORDS: u64 = PAGE as u64 / 4;
const OLD: u32 = 1;
const NEW: u32 = 2;

/// Counts, on the device, the words of a range that are not `value`. The stream must be free to run.
fn others(device: &Device, stream: &Stream, result: &Word, address: u64, words: u64, value: u32) -> Result<u64> {
    let before = result.host.load(Acquire);
    device.kernel(c"count_other")?.launch(stream, 1024, &[address, words, value.into(), result.device])?;
    device.runs(stream)?;
    Ok(result.host.load(Acquire) - before)
}

/// A slow kernel writes old values into a page that a load fills meanwhile, or, with a fence behind the kernel, then. How
/// many words of the page are old in the end.
fn race(fence: impl FnOnce(&Stream) -> Result<Option<Fence>>) -> Result<u64> {
    const LEN: usize = 256 << 10;
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, LEN)?;
    let (stream, result) = (device.stream()?, device.word()?);
    // The first launch may load the module, which does not belong to the race.
    others(&device, &stream, &result, transfers.at(0), 1, 0)?;
    transfers.fill(0, LEN, NEW)?;
    let slow = Duration::from_millis(200).as_nanos() as u64;
    let words = LEN as u64 / 4;
    device.kernel(c"fill")?.launch(&stream, 1024, &[transfers.at(0), words, OLD.into(), slow])?;
    let entry = transfers.load(0, LEN)?;
    let entry = match fence(&stream)? {
        Some(fence) => entry.wait(&fence),
        None => entry,
    };
    transfers.push(entry)?;
    succeeded(&transfers.reap(1)?[0])?;
    device.runs(&stream)?;
    others(&device, &stream, &result, transfers.at(0), words, NEW)
}

fn race_without_fence() -> Result<()> {
    let old = race(|_| Ok(None))?;
    ensure!(old > 0, "without a fence the load must lose against the slow kernel, or the race proves nothing");
    Ok(())
}

fn race_with_event_fence() -> Result<()> {
    let old = race(|stream| Ok(Some(stream.fence()?)))?;
    ensure!(old == 0, "{old} words are the kernel's, which ran before the load");
    Ok(())
}

fn race_with_timeline_fence() -> Result<()> {
    let old = race(|stream| {
        let timeline = timeline(stream)?;
        Ok(Some(timeline.at(timeline.signal()?)?))
    })?;
    ensure!(old == 0, "{old} words are the kernel's, which ran before the load");
    Ok(())
}

/// Ten thousand loads into few pages, each page looked at by a kernel that is launched when its load has completed; the next
/// load into it waits for that kernel.
fn load_then_kernel() -> Result<()> {
    const PAGES: u64 = 64;
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, PAGES as usize * PAGE)?;
    let (stream, result) = (device.stream()?, device.word()?);
    let count = device.kernel(c"count_other")?;
    let mut fences: Vec<Option<Fence>> = (0..PAGES).map(|_| None).collect();
    let (mut pushed, mut ended) = (0, 0);
    let mut done = vec![false; LOADS as usize];
    while ended < LOADS {
        // A page's bytes at the peer are free again when the load that read them has ended.
        while pushed < LOADS && (pushed < PAGES || done[(pushed - PAGES) as usize]) {
            let page = (pushed % PAGES) as usize;
            transfers.fill(page * PAGE, PAGE, pushed as u32)?;
            let entry = transfers.load(page * PAGE, PAGE)?.user_data(pushed);
            let entry = match fences[page].take() {
                Some(fence) => entry.wait(&fence),
                None => entry,
            };
            transfers.push(entry)?;
            pushed += 1;
        }
        transfers.ring.wait_timeout(1, LIMIT).map_err(|error| anyhow::anyhow!("{error}"))?;
        let cqes: Vec<Cqe> = transfers.ring.completion().collect();
        ensure!(!cqes.is_empty(), "{ended} of {LOADS} loads ended, then none for {LIMIT:?}");
        for cqe in cqes {
            succeeded(&cqe)?;
            let load = cqe.user_data();
            let page = (load % PAGES) as usize;
            count.launch(&stream, 256, &[transfers.at(page * PAGE), WORDS, load, result.device])?;
            fences[page] = Some(stream.fence()?);
            done[load as usize] = true;
            ended += 1;
        }
    }
    device.runs(&stream)?;
    let wrong = result.host.load(Acquire);
    ensure!(wrong == 0, "kernels saw {wrong} words that were not what their load had brought");
    Ok(())
}

/// A timeline that loads move and streams wait for.
fn loads(device: &Device) -> Result<Progress> {
    let loads = device.context.progress(256)?;
    match loads.release() {
        Ok(_) => Ok(loads),
        Err(why) => bail!(Skip(why.to_string())),
    }
}

/// A timeline that the stream moves by itself.
pub fn timeline(stream: &Stream) -> Result<Timeline> {
    let timeline = stream.timeline()?;
    match timeline.fallback() {
        None => Ok(timeline),
        Some(why) => bail!(Skip(why.to_string())),
    }
}

/// Pushes an entry that moves the timeline when it has ended.
fn push_signalling(ring: &mut Ring, entry: Entry, loads: &Progress) -> Result<u64> {
    let pushed = ring.submission().push_signalling(entry, loads.entries());
    pushed.map_err(|error| anyhow::anyhow!("the push was refused: {:?}", error.reason))
}

fn submit(ring: &mut Ring) -> Result<()> {
    ring.submit().map(drop).map_err(|error| anyhow::anyhow!("{error}"))
}

/// Each kernel is launched before the load that it looks at has ended, and held behind it.
fn kernels_held_behind_loads() -> Result<()> {
    const PAGES: u64 = 64;
    const ROUNDS: u64 = 20;
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, PAGES as usize * PAGE)?;
    let (stream, result) = (device.stream()?, device.word()?);
    let loads = loads(&device)?;
    let count = device.kernel(c"count_other")?;
    others(&device, &stream, &result, transfers.at(0), 1, 0)?;
    result.host.store(0, Release);
    for round in 1..=ROUNDS {
        let mut held = Vec::new();
        for page in 0..PAGES {
            let (offset, value) = (page as usize * PAGE, (round * PAGES + page) as u32);
            transfers.fill(offset, PAGE, value)?;
            let entry = transfers.load(offset, PAGE)?;
            let reserved = push_signalling(&mut transfers.ring, entry, &loads)?;
            held.push(loads.hold(&stream, reserved, LIMIT)?);
            count.launch(&stream, 256, &[transfers.at(offset), WORDS, value.into(), result.device])?;
        }
        submit(&mut transfers.ring)?;
        device.runs(&stream)?;
        ensure!(held.iter().all(|fence| fence.status() == FenceStatus::Signalled), "round {round}: a load failed");
        transfers.reap(PAGES as usize)?.iter().try_for_each(succeeded)?;
    }
    let wrong = result.host.load(Acquire);
    ensure!(wrong == 0, "held kernels saw {wrong} words that were not what their load had brought");
    Ok(())
}

/// The stream goes on behind a load that fails, and its fence tells.
fn failed_load_lets_kernels_go() -> Result<()> {
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, PAGE)?;
    let stream = device.stream()?;
    let loads = loads(&device)?;
    let entry = transfers.bad_load(PAGE)?;
    let reserved = push_signalling(&mut transfers.ring, entry, &loads)?;
    let held = loads.hold(&stream, reserved, LIMIT)?;
    submit(&mut transfers.ring)?;
    device.runs(&stream)?;
    ensure!(matches!(held.status(), FenceStatus::Failed(_)), "{:?}", held.status());
    let cqe = transfers.reap(1)?[0];
    ensure!(cqe.result().is_err(), "{cqe:?}");
    Ok(())
}

/// A load that is never issued: the stream waits for no longer than it was told.
fn limit_lets_kernels_go() -> Result<()> {
    let device = Device::open()?;
    let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    let stream = device.stream()?;
    let loads = loads(&device)?;
    let (never, fence) = host();
    let entry = opcode::Nop::new().build().wait(&fence);
    let reserved = push_signalling(&mut ring, entry, &loads)?;
    submit(&mut ring)?;
    let held = loads.hold(&stream, reserved, Duration::from_millis(200))?;
    let started = Instant::now();
    device.runs(&stream)?;
    let waited = started.elapsed();
    drop(never);
    ensure!(matches!(held.status(), FenceStatus::Failed(_)), "{:?}", held.status());
    ensure!(waited >= Duration::from_millis(150), "the stream went on after {waited:?}");
    Ok(())
}

/// The values of a timeline let go of their entries one by one, in order.
fn timeline_values() -> Result<()> {
    const VALUES: u64 = 100;
    let device = Device::open()?;
    let mut ring = Ring::builder().build(128, &Engine::loopback())?;
    let (gate, stream) = (device.word()?, device.stream()?);
    let timeline = timeline(&stream)?;
    for number in 0..VALUES {
        device.gate(&stream, &gate, number + 1)?;
        let value = timeline.signal()?;
        push(&mut ring, opcode::Nop::new().build().wait(&timeline.at(value)?).user_data(number))?;
    }
    nothing_completes(&mut ring)?;
    for number in 0..VALUES {
        gate.host.store(number + 1, Release);
        let cqes = reap(&mut ring, 1)?;
        ensure!(cqes.len() == 1 && cqes[0].user_data() == number, "value {number} let go of {cqes:?}");
        succeeded(&cqes[0])?;
    }
    Ok(())
}

/// A graph that waits for a load, looks at it, and lets go of the next load; each launch with values of its own.
fn graph_signals_and_waits() -> Result<()> {
    const LAUNCHES: u32 = 100;
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, PAGE)?;
    let (stream, result) = (device.stream()?, device.word()?);
    let (timeline, loads) = (timeline(&stream)?, loads(&device)?);
    let (count, clear) = (device.kernel(c"count_other")?, device.kernel(c"fill")?);
    others(&device, &stream, &result, transfers.at(0), 1, 0)?;
    result.host.store(0, Release);
    // The value that a kernel looks for is fixed in the graph, so the page always gets the same.
    transfers.fill(0, PAGE, NEW)?;
    device.begin_capture(&stream)?;
    // SAFETY: the graph is launched below only, each time behind a `next` of both.
    let (mut wait, mut signal) = unsafe {
        let wait = loads.capture_hold(&stream)?;
        count.launch(&stream, 256, &[transfers.at(0), WORDS, NEW.into(), result.device])?;
        clear.launch(&stream, 256, &[transfers.at(0), WORDS, OLD.into(), 0])?;
        (wait, timeline.capture_signal()?)
    };
    let graph = device.end_capture(&stream)?;
    let mut used: Option<Fence> = None;
    for launch in 1..=LAUNCHES {
        let entry = transfers.load(0, PAGE)?;
        let entry = match used.take() {
            Some(fence) => entry.wait(&fence),
            None => entry,
        };
        let reserved = push_signalling(&mut transfers.ring, entry, &loads)?;
        // SAFETY: `exec` was made of the graph of both, which lives; the launch follows on the timeline's stream.
        let held = unsafe {
            let held = wait.next(graph.exec, reserved, LIMIT)?;
            used = Some(timeline.at(signal.next(graph.exec)?)?);
            held
        };
        graph.launch(&stream)?;
        submit(&mut transfers.ring)?;
        succeeded(&transfers.reap(1)?[0])?;
        // Every other launch is queued while the one before still runs.
        if launch % 2 == 0 {
            device.runs(&stream)?;
            ensure!(held.status() == FenceStatus::Signalled, "launch {launch}: {:?}", held.status());
        }
    }
    device.runs(&stream)?;
    drop((wait, signal));
    let wrong = result.host.load(Acquire);
    ensure!(wrong == 0, "kernels saw {wrong} words that were not what their load had brought");
    Ok(())
}

/// Streams that are let go one by one: each lets go of its own entries.
fn event_per_stream() -> Result<()> {
    const STREAMS: u64 = 16;
    let device = Device::open()?;
    let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    let gate = device.word()?;
    let mut streams = Vec::new();
    for number in 0..STREAMS {
        let stream = device.stream()?;
        device.gate(&stream, &gate, number + 1)?;
        push(&mut ring, opcode::Nop::new().build().wait(&stream.fence()?).user_data(number))?;
        streams.push(stream);
    }
    nothing_completes(&mut ring)?;
    for number in 0..STREAMS {
        gate.host.store(number + 1, Release);
        let cqes = reap(&mut ring, 1)?;
        ensure!(cqes.len() == 1 && cqes[0].user_data() == number, "stream {number} let go of {cqes:?}");
        succeeded(&cqes[0])?;
    }
    nothing_completes(&mut ring)?;
    Ok(())
}

fn one_event_many_entries() -> Result<()> {
    const ENTRIES: usize = 200;
    let device = Device::open()?;
    let mut ring = Ring::builder().build(256, &Engine::loopback())?;
    let (gate, stream) = (device.word()?, device.stream()?);
    device.gate(&stream, &gate, 1)?;
    let fence = stream.fence()?;
    for number in 0..ENTRIES {
        push(&mut ring, opcode::Nop::new().build().wait(&fence).user_data(number as u64))?;
    }
    nothing_completes(&mut ring)?;
    gate.host.store(1, Release);
    let cqes = reap(&mut ring, ENTRIES)?;
    cqes.iter().try_for_each(succeeded)?;
    ensure!(cqes.len() == ENTRIES, "{} completions for {ENTRIES} entries", cqes.len());
    Ok(())
}

/// The poller asks for one stream's event while another stream is captured in the mode that every thread's calls can spoil.
fn capture_stays_whole() -> Result<()> {
    let device = Device::open()?;
    let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    let (gate, held, captured) = (device.word()?, device.stream()?, device.stream()?);
    let spin = device.kernel(c"spin")?;
    spin.launch(&captured, 1, &[0])?;
    device.runs(&captured)?;
    device.gate(&held, &gate, 1)?;
    push(&mut ring, opcode::Nop::new().build().wait(&held.fence()?))?;
    nothing_completes(&mut ring)?;

    device.begin_capture(&captured)?;
    let refused = captured.fence();
    ensure!(matches!(refused, Err(CudaError::Capturing { .. })), "a fence on a captured stream gave {refused:?}");
    spin.launch(&captured, 1, &[0])?;
    nothing_completes(&mut ring)?; // for as long the poller asks
    ensure!(device.captures(&captured)?, "the poller's questions spoiled the capture");
    let graph = device.end_capture(&captured)?;
    gate.host.store(1, Release);
    succeeded(&reap(&mut ring, 1)?[0])?;
    graph.launch(&captured)?;
    device.runs(&captured)?;
    Ok(())
}

/// A kernel writes where nothing is: what waits for it fails with the driver's number, and the ring still closes.
fn fault_fails_fences() -> Result<()> {
    let device = Device::open()?;
    let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    let (gate, stream) = (device.word()?, device.stream()?);
    let fault = device.kernel(c"fault")?;
    device.gate(&stream, &gate, 1)?;
    fault.launch(&stream, 1, &[])?;
    push(&mut ring, opcode::Nop::new().build().wait(&stream.fence()?))?;
    nothing_completes(&mut ring)?;
    gate.host.store(1, Release);
    let cqe = reap(&mut ring, 1)?[0];
    ensure!(cqe.result().is_err() && cqe.stage() == Stage::Gate && cqe.detail() == 700, "{cqe:?}");
    let after = stream.fence();
    ensure!(matches!(after, Err(CudaError::Call { code, .. }) if code.0 == 700), "a fence after the fault: {after:?}");
    let started = Instant::now();
    drop(ring);
    ensure!(started.elapsed() < LIMIT, "the ring did not close");
    Ok(())
}
