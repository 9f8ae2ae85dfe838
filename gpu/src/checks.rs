//! The checks, each of which runs in a process of its own.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use moonring::cuda::{CudaError, Progress, Stream};
use moonring::fence::{FenceStatus, host};
use moonring::{Cqe, Engine, Fence, Ring, Stage, opcode};

use crate::device::{Device, LIMIT, Word};
use crate::transfers::{Transfers, nothing_completes, push, reap, succeeded};

/// How a check that did not fail ended.
pub enum Outcome {
    Passed,
    /// This machine cannot do it, for this reason.
    Skipped(String),
}

type Check = fn() -> Result<Outcome>;

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

fn passed(condition: bool, otherwise: impl Fn() -> String) -> Result<Outcome> {
    if !condition {
        bail!(otherwise());
    }
    Ok(Outcome::Passed)
}

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
    // The first launch may load the module, and the first transfer makes a connection: neither belongs to the race.
    others(&device, &stream, &result, transfers.at(0), 1, 0)?;
    transfers.push(transfers.load(0, LEN)?)?;
    succeeded(&transfers.reap(1)?[0])?;

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

fn race_without_fence() -> Result<Outcome> {
    let old = race(|_| Ok(None))?;
    passed(old > 0, || "without a fence the load must lose against the slow kernel, or the race proves nothing".into())
}

fn race_with_event_fence() -> Result<Outcome> {
    let old = race(|stream| Ok(Some(stream.fence()?)))?;
    passed(old == 0, || format!("{old} words are the kernel's, which ran before the load"))
}

fn race_with_timeline_fence() -> Result<Outcome> {
    let old = race(|stream| {
        let timeline = stream.timeline()?;
        Ok(Some(timeline.at(timeline.signal()?)?))
    })?;
    passed(old == 0, || format!("{old} words are the kernel's, which ran before the load"))
}

/// Ten thousand loads into few pages, each page looked at by a kernel that is launched when its load has completed; the next
/// load into it waits for that kernel.
fn load_then_kernel() -> Result<Outcome> {
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
    passed(wrong == 0, || format!("kernels saw {wrong} words that were not what their load had brought"))
}

/// A timeline that loads move and streams wait for; or why streams cannot wait for loads here.
fn loads(device: &Device) -> Result<std::result::Result<Progress, Outcome>> {
    let loads = device.context.progress(256)?;
    Ok(match loads.release() {
        Ok(_) => Ok(loads),
        Err(why) => Err(Outcome::Skipped(why.to_string())),
    })
}

/// Each kernel is launched before the load that it looks at has ended, and held behind it.
fn kernels_held_behind_loads() -> Result<Outcome> {
    const PAGES: u64 = 64;
    const ROUNDS: u64 = 20;
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, PAGES as usize * PAGE)?;
    let (stream, result) = (device.stream()?, device.word()?);
    let loads = match loads(&device)? {
        Ok(loads) => loads,
        Err(skipped) => return Ok(skipped),
    };
    let count = device.kernel(c"count_other")?;
    others(&device, &stream, &result, transfers.at(0), 1, 0)?;
    result.host.store(0, Release);
    for round in 1..=ROUNDS {
        let mut held = Vec::new();
        for page in 0..PAGES {
            let (offset, value) = (page as usize * PAGE, (round * PAGES + page) as u32);
            transfers.fill(offset, PAGE, value)?;
            let entry = transfers.load(offset, PAGE)?;
            let reserved = transfers.ring.submission().push_signalling(entry, loads.entries());
            let reserved = reserved.map_err(|error| anyhow::anyhow!("{:?}", error.reason))?;
            held.push(loads.hold(&stream, reserved, LIMIT)?);
            count.launch(&stream, 256, &[transfers.at(offset), WORDS, value.into(), result.device])?;
        }
        transfers.ring.submit().map_err(|error| anyhow::anyhow!("{error}"))?;
        device.runs(&stream)?;
        ensure!(held.iter().all(|fence| fence.status() == FenceStatus::Signalled), "round {round}: a load failed");
        transfers.reap(PAGES as usize)?.iter().try_for_each(succeeded)?;
    }
    let wrong = result.host.load(Acquire);
    passed(wrong == 0, || format!("held kernels saw {wrong} words that were not what their load had brought"))
}

/// The stream goes on behind a load that fails, and its fence tells.
fn failed_load_lets_kernels_go() -> Result<Outcome> {
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, PAGE)?;
    let stream = device.stream()?;
    let loads = match loads(&device)? {
        Ok(loads) => loads,
        Err(skipped) => return Ok(skipped),
    };
    let entry = transfers.bad_load(PAGE)?;
    let reserved = transfers.ring.submission().push_signalling(entry, loads.entries());
    let reserved = reserved.map_err(|error| anyhow::anyhow!("{:?}", error.reason))?;
    let held = loads.hold(&stream, reserved, LIMIT)?;
    transfers.ring.submit().map_err(|error| anyhow::anyhow!("{error}"))?;
    device.runs(&stream)?;
    ensure!(matches!(held.status(), FenceStatus::Failed(_)), "{:?}", held.status());
    let cqe = transfers.reap(1)?[0];
    passed(cqe.result().is_err(), || format!("{cqe:?}"))
}

/// A load that is never issued: the stream waits for no longer than it was told.
fn limit_lets_kernels_go() -> Result<Outcome> {
    let device = Device::open()?;
    let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    let stream = device.stream()?;
    let loads = match loads(&device)? {
        Ok(loads) => loads,
        Err(skipped) => return Ok(skipped),
    };
    let (never, fence) = host();
    let entry = opcode::Nop::new().build().wait(&fence);
    let reserved = ring.submission().push_signalling(entry, loads.entries());
    let reserved = reserved.map_err(|error| anyhow::anyhow!("{:?}", error.reason))?;
    ring.submit().map_err(|error| anyhow::anyhow!("{error}"))?;
    let held = loads.hold(&stream, reserved, Duration::from_millis(200))?;
    let started = Instant::now();
    device.runs(&stream)?;
    let waited = started.elapsed();
    drop(never);
    ensure!(matches!(held.status(), FenceStatus::Failed(_)), "{:?}", held.status());
    passed(waited >= Duration::from_millis(150), || format!("the stream went on after {waited:?}"))
}

/// The values of a timeline let go of their entries one by one, in order.
fn timeline_values() -> Result<Outcome> {
    const VALUES: u64 = 100;
    let device = Device::open()?;
    let mut ring = Ring::builder().build(128, &Engine::loopback())?;
    let (gate, stream) = (device.word()?, device.stream()?);
    let timeline = stream.timeline()?;
    if let Some(why) = timeline.fallback() {
        return Ok(Outcome::Skipped(why.to_string()));
    }
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
    Ok(Outcome::Passed)
}

/// A graph that waits for a load, looks at it, and lets go of the next load; each launch with values of its own.
fn graph_signals_and_waits() -> Result<Outcome> {
    const LAUNCHES: u32 = 100;
    let device = Device::open()?;
    let mut transfers = Transfers::new(&device, PAGE)?;
    let (stream, result) = (device.stream()?, device.word()?);
    let timeline = stream.timeline()?;
    let loads = match loads(&device)? {
        Ok(loads) => loads,
        Err(skipped) => return Ok(skipped),
    };
    if let Some(why) = timeline.fallback() {
        return Ok(Outcome::Skipped(why.to_string()));
    }
    let count = device.kernel(c"count_other")?;
    others(&device, &stream, &result, transfers.at(0), 1, 0)?;
    result.host.store(0, Release);
    // The value that a kernel looks for is fixed in the graph, so the page always gets the same.
    transfers.fill(0, PAGE, NEW)?;
    device.begin_capture(&stream)?;
    // SAFETY: the graph is launched below only, each time behind a `next` of both.
    let (mut wait, mut signal) = unsafe {
        let wait = loads.capture_hold(&stream)?;
        count.launch(&stream, 256, &[transfers.at(0), WORDS, NEW.into(), result.device])?;
        let clear = device.kernel(c"fill")?;
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
        let reserved = transfers.ring.submission().push_signalling(entry, loads.entries());
        let reserved = reserved.map_err(|error| anyhow::anyhow!("{:?}", error.reason))?;
        // SAFETY: `exec` was made of the graph of both, which lives; the launch follows on the timeline's stream.
        let held = unsafe {
            let held = wait.next(graph.exec, reserved, LIMIT)?;
            used = Some(timeline.at(signal.next(graph.exec)?)?);
            held
        };
        graph.launch(&stream)?;
        transfers.ring.submit().map_err(|error| anyhow::anyhow!("{error}"))?;
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
    passed(wrong == 0, || format!("kernels saw {wrong} words that were not what their load had brought"))
}

/// Streams that are let go one by one: each lets go of its own entries.
fn event_per_stream() -> Result<Outcome> {
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
    Ok(Outcome::Passed)
}

fn one_event_many_entries() -> Result<Outcome> {
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
    passed(cqes.len() == ENTRIES, || format!("{} completions for {ENTRIES} entries", cqes.len()))
}

/// The poller asks for one stream's event while another stream is captured in the mode that every thread's calls can spoil.
fn capture_stays_whole() -> Result<Outcome> {
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
    Ok(Outcome::Passed)
}

/// A kernel writes where nothing is: what waits for it fails with the driver's number, and the ring still closes.
fn fault_fails_fences() -> Result<Outcome> {
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
    passed(started.elapsed() < LIMIT, || "the ring did not close".into())
}
