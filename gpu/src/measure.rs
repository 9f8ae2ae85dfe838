//! The measurements. On the fake driver they run, shortly, but their numbers say nothing.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use moonring::cuda::Stream;
use moonring::{Engine, Fence, Ring, opcode};

use crate::checks::timeline;
use crate::device::{Device, LIMIT, is_real};
use crate::transfers::{Transfers, push, reap, succeeded};

type Measurement = fn(&Device) -> Result<f64>;

/// The measured numbers, by the names that the report has.
pub const MEASUREMENTS: &[(&str, Measurement)] = &[
    ("overlap_ratio", |device| overlap(device, 400 / scale())),
    ("event_signal_to_issue_us", |device| {
        signal_to_issue(device, 400 / scale(), |stream| {
            let stream = stream.clone();
            Ok(Box::new(move || Ok(stream.fence()?)))
        })
    }),
    ("timeline_signal_to_issue_us", |device| {
        signal_to_issue(device, 400 / scale(), |stream| {
            let timeline = timeline(stream)?;
            Ok(Box::new(move || Ok(timeline.at(timeline.signal()?)?)))
        })
    }),
    ("launch_slowdown", |device| launch_slowdown(device, 10_000 / scale())),
];

fn scale() -> usize {
    if is_real() { 1 } else { 20 }
}

/// Steps of a producer kernel, a load over what it wrote, and a kernel that checks the load: the time they take when the
/// host waits at each turn, over the time with fences.
fn overlap(device: &Device, steps: usize) -> Result<f64> {
    const LEN: usize = 1 << 20;
    const SLOTS: usize = 8;
    let mut transfers = Transfers::new(device, SLOTS * LEN)?;
    let stream = device.stream()?;
    let wrong = device.word()?;
    let (fill, count) = (device.kernel(c"fill")?, device.kernel(c"count_other")?);
    for slot in 0..SLOTS {
        transfers.fill(slot * LEN, LEN, slot as u32)?;
        transfers.push(transfers.load(slot * LEN, LEN)?)?;
    }
    transfers.reap(SLOTS)?.iter().try_for_each(succeeded)?;
    // As long as a load takes, measured here, so that there is something to overlap.
    let started = Instant::now();
    for _ in 0..SLOTS {
        transfers.push(transfers.load(0, LEN)?)?;
        succeeded(&transfers.reap(1)?[0])?;
    }
    let kernel = (started.elapsed() / SLOTS as u32).as_nanos() as u64;

    let words = LEN as u64 / 4;
    let produce = |transfers: &Transfers, slot: usize| {
        fill.launch(&stream, 4096, &[transfers.at(slot * LEN), words, u32::MAX.into(), kernel])
    };
    let consume = |transfers: &Transfers, slot: usize| {
        count.launch(&stream, 4096, &[transfers.at(slot * LEN), words, slot as u64, wrong.device])
    };

    let started = Instant::now();
    for step in 0..steps {
        let slot = step % SLOTS;
        produce(&transfers, slot)?;
        device.synchronize(&stream)?;
        transfers.push(transfers.load(slot * LEN, LEN)?)?;
        succeeded(&transfers.reap(1)?[0])?;
        consume(&transfers, slot)?;
    }
    device.synchronize(&stream)?;
    let with_host = started.elapsed();

    let started = Instant::now();
    let (mut pushed, mut ended) = (0, 0);
    let mut done = vec![false; steps];
    while ended < steps {
        while pushed < steps && (pushed < SLOTS || done[pushed - SLOTS]) {
            let slot = pushed % SLOTS;
            produce(&transfers, slot)?;
            let entry = transfers.load(slot * LEN, LEN)?.wait(&stream.fence()?).user_data(pushed as u64);
            transfers.push(entry)?;
            pushed += 1;
        }
        transfers.ring.wait_timeout(1, LIMIT).map_err(|error| anyhow::anyhow!("{error}"))?;
        let cqes: Vec<_> = transfers.ring.completion().collect();
        ensure!(!cqes.is_empty(), "no load ended for {LIMIT:?}");
        for cqe in cqes {
            succeeded(&cqe)?;
            let step = cqe.user_data() as usize;
            consume(&transfers, step % SLOTS)?;
            done[step] = true;
            ended += 1;
        }
    }
    device.synchronize(&stream)?;
    let with_fences = started.elapsed();
    let wrong = wrong.host.load(Acquire);
    ensure!(wrong == 0, "kernels saw {wrong} words that were not what their load had brought");
    eprintln!(
        "overlap: {steps} steps of a {kernel} ns kernel and a load of {LEN} bytes: {with_host:?} with host \
         synchronisation, {with_fences:?} with fences"
    );
    Ok(with_host.as_secs_f64() / with_fences.as_secs_f64())
}

/// Makes fences behind what is on a stream.
type Fences = Box<dyn FnMut() -> Result<Fence>>;

/// From the store that lets a stream go on to the issue of the entry that waits for it, in microseconds: the median.
fn signal_to_issue(device: &Device, times: usize, of: impl FnOnce(&Stream) -> Result<Fences>) -> Result<f64> {
    let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    let (gate, stream) = (device.word()?, device.stream()?);
    let mut fence = of(&stream)?;
    let mut micros = Vec::new();
    for value in 1..=times as u64 {
        device.gate(&stream, &gate, value)?;
        let entry = opcode::Nop::new().build().wait(&fence()?);
        let submitted = Instant::now();
        push(&mut ring, entry)?;
        thread::sleep(Duration::from_micros(200));
        let signalled = Instant::now();
        gate.host.store(value, Release);
        let cqe = reap(&mut ring, 1)?[0];
        succeeded(&cqe)?;
        // The entry was at the gate from its submit to its issue.
        let issued = cqe.gate_time().as_secs_f64();
        micros.push((issued - (signalled - submitted).as_secs_f64()) * 1e6);
    }
    Ok(median(&mut micros))
}

/// What a kernel launch costs a thread while the poller asks for events of other streams, over what it costs else.
fn launch_slowdown(device: &Device, launches: usize) -> Result<f64> {
    // With the other streams of this process fewer than the device has queues (see `Bundle::command`): a kernel must not
    // stand behind a held stream.
    const STREAMS: usize = 16;
    const ROUNDS: u64 = 5;
    let mut ring = Ring::builder().build(64, &Engine::loopback())?;
    let (gate, stream, spin) = (device.word()?, device.stream()?, device.kernel(c"spin")?);
    let streams = (0..STREAMS).map(|_| device.stream()).collect::<Result<Vec<_>>>()?;
    let launch = || -> Result<f64> {
        let mut nanos = Vec::new();
        for number in 0..launches {
            let started = Instant::now();
            spin.launch(&stream, 1, &[0])?;
            nanos.push(started.elapsed().as_secs_f64() * 1e9);
            // The queue never gets full.
            if number % 256 == 255 {
                device.synchronize(&stream)?;
            }
        }
        device.synchronize(&stream)?;
        Ok(nanos.iter().sum::<f64>() / nanos.len() as f64)
    };
    launch()?;
    let mut ratios = Vec::new();
    for round in 1..=ROUNDS {
        let alone = launch()?;
        for held in &streams {
            device.gate(held, &gate, round)?;
            push(&mut ring, opcode::Nop::new().build().wait(&held.fence()?))?;
        }
        let polled = launch()?;
        gate.host.store(round, Release);
        reap(&mut ring, STREAMS)?.iter().try_for_each(succeeded)?;
        eprintln!("launches: {alone:.0} ns alone, {polled:.0} ns while {STREAMS} events are asked for");
        ratios.push(polled / alone);
    }
    Ok(median(&mut ratios))
}

fn median(numbers: &mut [f64]) -> f64 {
    numbers.sort_unstable_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
