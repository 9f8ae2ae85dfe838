//! Transfers on a real Mooncake over TCP, through the ring and by hand-written loops of direct calls on the same engine, its
//! connections and buffers. Nothing is pinned: the engine has threads of its own.

use std::ffi::CString;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use mooncake_sys::{
    Api, Grouping, OPCODE_READ, OPCODE_WRITE, STATUS_COMPLETED, STATUS_PENDING, SegmentId, TransferEngine,
    TransferRequest,
};
use moonring::{Engine, Region, RegionInfo, Registered, Ring, Segment, mooncake, opcode};

use crate::Settings;
use crate::machine::{self, median};
use crate::out::{self, Line};
use crate::python::Python;

const KIB: usize = 1 << 10;
const PAGE: usize = 4 * KIB;
/// Transfers in a batch.
const BATCH: usize = 128;
/// Between two ranges, so that neighbours are not merged.
const GAP: usize = PAGE;
/// Room for the largest transfers and for the longest run of neighbours.
const ROOM: usize = BATCH * (1024 * KIB + GAP);
const NEIGHBOURS: usize = 4096;

/// One transfer: a range of both memories, at the same place.
#[derive(Clone, Copy)]
struct Range {
    at: usize,
    len: usize,
}

fn ranges(count: usize, len: usize, gap: usize) -> Vec<Range> {
    (0..count).map(|n| Range { at: n * (len + gap), len }).collect()
}

/// Direct calls on the engine that the ring adopts.
struct Direct {
    api: &'static Api,
    engine: NonNull<TransferEngine>,
    segment: SegmentId,
    memory: *mut u8,
    remote: u64,
}

impl Direct {
    fn new(peer: &RegionInfo) -> Direct {
        let api = Api::load().expect("it was loaded for the peer's engine");
        let engine = api.create_engine(c"P2PHANDSHAKE", c"127.0.0.1", c"", 0, false).unwrap();
        // Page-aligned, as the ring's own regions are; kept until the process ends.
        let memory = vec![1u8; ROOM + PAGE].leak();
        let aligned = memory.as_ptr().align_offset(PAGE);
        let memory = memory[aligned..].as_mut_ptr();
        let name = CString::new(peer.segment.as_str()).unwrap();
        // SAFETY: the engine was just made; the memory lives as long as it, both until the process ends.
        let segment = unsafe {
            api.install_transport(engine, c"tcp", null_mut()).unwrap();
            api.register_local_memory(engine, memory.cast(), ROOM, c"cpu:0", true).unwrap();
            api.open_segment(engine, &name).unwrap()
        };
        Direct { api, engine, segment, memory, remote: peer.address }
    }

    /// The ring's engine is the same one.
    fn adopt(&self) -> (Engine, Registered) {
        // SAFETY: `new` made the engine and registered the memory; both stay until the process ends.
        unsafe {
            let engine = mooncake::adopt(self.engine.as_ptr().cast(), None, Arc::new(())).unwrap();
            let ours = engine.adopt_registration(self.memory as u64, ROOM as u64, "cpu:0").unwrap();
            (engine, ours)
        }
    }

    /// All of `ranges` as one batch, waiting for the ends in turn by `relax`.
    fn batch(&self, write: bool, ranges: &[Range], relax: fn()) {
        let opcode = if write { OPCODE_WRITE } else { OPCODE_READ };
        let request = |range: &Range| TransferRequest {
            opcode,
            // SAFETY: ranges lie inside the memory.
            source: unsafe { self.memory.add(range.at) }.cast(),
            target_id: self.segment,
            file_id: 0,
            target_offset: self.remote + range.at as u64,
            length: range.len as u64,
        };
        let requests: Vec<_> = ranges.iter().map(request).collect();
        let (api, engine) = (self.api, self.engine);
        // SAFETY: engine, batch and memory are live until all ends were seen; the batch is freed once, after that.
        unsafe {
            let batch = api.allocate_batch_id(engine, requests.len()).unwrap();
            api.submit_transfer(engine, batch, &requests, Grouping::None).unwrap();
            for task in 0..requests.len() {
                loop {
                    let status = api.get_transfer_status(engine, batch, task as _).unwrap().status;
                    if status == STATUS_COMPLETED {
                        break;
                    }
                    assert!(status <= STATUS_PENDING, "status {status}");
                    relax();
                }
            }
            api.free_batch_id(engine, batch).unwrap();
        }
    }
}

/// The same transfers through a ring.
struct Through {
    ring: Ring,
    ours: Registered,
    peer: Segment,
    remote: RegionInfo,
}

impl Through {
    fn batch(&mut self, write: bool, ranges: &[Range]) {
        // As the loops: so many at a time.
        for ranges in ranges.chunks(BATCH) {
            for &Range { at, len } in ranges {
                let local = self.ours.slice(at..at + len).unwrap();
                let remote = self.peer.slice(&self.remote, at as u64, len as u64).unwrap();
                let entry = match write {
                    true => opcode::Write::new(local, remote).build(),
                    false => opcode::Read::new(local, remote).build(),
                };
                self.ring.submission().push(entry).unwrap();
            }
            self.ring.submit().unwrap();
        }
        let mut left = ranges.len();
        while left > 0 {
            self.ring.wait(left).unwrap();
            for cqe in self.ring.completion() {
                assert_eq!(cqe.result(), Ok(ranges[0].len as u32));
                left -= 1;
            }
        }
    }
}

const SPINNING: &str = "direct, spinning";
const YIELDING: &str = "direct, yielding";
const LOOPS: [(&str, fn()); 2] = [(SPINNING, std::hint::spin_loop), (YIELDING, yield_now)];

/// How transfers of one size are measured: in each round the ring and each loop have a block of pairs of batches, a READ and a WRITE.
struct Size {
    id: &'static str,
    len: usize,
    /// All of them, and when it has to be quick.
    rounds: (usize, usize),
    /// Pairs at the beginning of a block that are not timed.
    untimed: usize,
    timed: usize,
}

/// Blocks are short where batches are, so that a round's three meet the engines' threads in one of the two ways in which they lie
/// for a hundred batches and more (see docs/performance.md). Such a block begins with a pair that is not timed: the ring's poller
/// has slept while the loops ran, and the loops' thread never sleeps.
const SIZES: [Size; 3] = [
    Size { id: "te_4k", len: PAGE, rounds: (240, 48), untimed: 1, timed: 2 },
    Size { id: "te_64k", len: 64 * KIB, rounds: (120, 24), untimed: 1, timed: 2 },
    Size { id: "te_1m", len: 1024 * KIB, rounds: (60, 12), untimed: 0, timed: 1 },
];

pub fn measure(settings: &mut Settings) {
    let other = match mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal).build() {
        Ok(other) => other,
        Err(error) => return out::note(&format!("Mooncake was not measured: {error}")),
    };
    let theirs = other.register(Region::alloc(ROOM).unwrap()).unwrap();
    let remote = theirs.info();
    let direct = Direct::new(&remote);
    let (engine, ours) = direct.adopt();
    let peer = engine.open_segment(other.name(), Duration::from_secs(10)).unwrap();
    let ring = Ring::builder().build(NEIGHBOURS as u32, &engine).unwrap();
    let mut through = Through { ring, ours, peer, remote };

    for size in &SIZES {
        throughput(settings, size, &direct, &mut through);
    }
    neighbours(settings, &direct, &mut through);
    latency(settings, &direct, &mut through);
}

/// The ring, `None`, and the loops, in an order left to chance: none of them follows one of the others more often, which leaves the
/// engines' threads where they lie.
fn turns(chance: &mut fastrand::Rng) -> [Option<usize>; 3] {
    let mut turns = [None, Some(0), Some(1)];
    chance.shuffle(&mut turns);
    turns
}

/// The same in each run.
fn chance() -> fastrand::Rng {
    fastrand::Rng::with_seed(1)
}

/// Seconds that `run` takes.
fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// Says a time against the better of the two loops'.
fn against_loops(id: &str, ours: &mut [f64], loops: &mut [Vec<f64>; 2]) {
    let medians = [0, 1].map(|at| (LOOPS[at].0, median(&mut loops[at])));
    let peer = medians.into_iter().min_by(|(_, a), (_, b)| a.total_cmp(b));
    Line { id, state: "any", value: Some(median(ours)), unit: "us", peer, higher: false }.say();
}

/// Batches of reads and writes in turn, in GB/s.
fn throughput(settings: &mut Settings, size: &Size, direct: &Direct, through: &mut Through) {
    let &Size { id, len, rounds: (full, quick), untimed, timed } = size;
    let ranges = ranges(BATCH, len, GAP);
    let mut pairs = |subject: Option<usize>, count: usize| {
        for write in [false, true].into_iter().cycle().take(2 * count) {
            match subject {
                None => through.batch(write, &ranges),
                Some(at) => direct.batch(write, &ranges, LOOPS[at].1),
            }
        }
    };
    let bytes = (2 * timed * BATCH * len) as f64;
    let (mut ours, mut loops) = (Vec::new(), [const { Vec::new() }; 2]);
    let mut chance = chance();
    for round in 0..=settings.rounds(full, quick) {
        out::say("probe", serde_json::json!(machine::probe()));
        for subject in turns(&mut chance) {
            pairs(subject, untimed);
            let time = seconds(|| pairs(subject, timed));
            // The first round warmed everything up.
            if round > 0 {
                subject.map_or(&mut ours, |at| &mut loops[at]).push(bytes / time / 1e9);
            }
        }
    }
    let better = LOOPS.iter().zip(&loops).map(|((name, _), theirs)| (*name, times_ours(&ours, theirs)));
    let (name, times) = better.max_by(|(_, a), (_, b)| a.total_cmp(b)).expect("there are two loops");
    let value = median(&mut ours);
    Line { id, state: "any", value: Some(value), unit: "GB/s", peer: Some((name, value * times)), higher: true }.say();
}

/// How many times ours theirs is, as the median of the rounds. A ratio of medians will not do: each median falls into one of the two
/// ways, by chance, and the better of two loops has two throws for the ring's one.
fn times_ours(ours: &[f64], theirs: &[f64]) -> f64 {
    median(&mut ours.iter().zip(theirs).map(|(ours, theirs)| theirs / ours).collect::<Vec<_>>())
}

/// Neighbours, in the time for all of them.
fn neighbours(settings: &mut Settings, direct: &Direct, through: &mut Through) {
    let ranges = ranges(NEIGHBOURS, PAGE, 0);
    let (mut ours, mut loops) = (Vec::new(), [const { Vec::new() }; 2]);
    let mut chance = chance();
    for round in 0..=settings.rounds(9, 3) {
        for subject in turns(&mut chance) {
            // Spans of about the same length.
            let times = if subject.is_none() { 8 } else { 1 };
            let time = seconds(|| {
                for _ in 0..times {
                    match subject {
                        None => through.batch(true, &ranges),
                        Some(at) => ranges.chunks(BATCH).for_each(|ranges| direct.batch(true, ranges, LOOPS[at].1)),
                    }
                }
            });
            if round > 0 {
                subject.map_or(&mut ours, |at| &mut loops[at]).push(time * 1e6 / f64::from(times));
            }
        }
    }
    against_loops("te_merge_4096", &mut ours, &mut loops);
}

/// One 4 KiB WRITE at a time. Short blocks, many of them: where the kernel puts the engine's threads decides more than
/// anything here, and changes every few milliseconds.
fn latency(settings: &mut Settings, direct: &Direct, through: &mut Through) {
    const EACH: usize = 50;
    let one = ranges(1, PAGE, 0);
    let block = |times: &mut Vec<f64>, run: &mut dyn FnMut()| {
        for _ in 0..EACH {
            times.push(seconds(&mut *run) * 1e6);
        }
    };
    let mut python = Python::start(&through.remote);
    if let Err(why) = &python {
        out::note(&format!("Mooncake from Python was not measured: {why}"));
    }
    let (mut ours, mut loops) = (Vec::new(), [const { Vec::new() }; 2]);
    let mut pythons = [const { Vec::new() }; 2];
    let mut chance = chance();
    for round in 0..=settings.rounds(100, 30) {
        if round == 1 {
            // The first round warmed everything up.
            [&mut ours].into_iter().chain(&mut loops).chain(&mut pythons).for_each(Vec::clear);
        }
        for subject in turns(&mut chance) {
            match subject {
                None => block(&mut ours, &mut || through.batch(true, &one)),
                Some(at) => block(&mut loops[at], &mut || direct.batch(true, &one, LOOPS[at].1)),
            }
        }
        if let Ok(python) = &mut python {
            for (how, times) in ["sync", "thread"].into_iter().zip(&mut pythons) {
                times.extend(python.write(how, EACH));
            }
        }
    }
    for (times, name) in
        [(&ours, "moonring, 4 KiB"), (&loops[0], "direct, spinning, 4 KiB"), (&loops[1], "direct, yielding, 4 KiB")]
    {
        let mut histogram = hdrhistogram::Histogram::<u64>::new(3).unwrap();
        for micros in times {
            histogram.record((micros * 1e3) as u64).unwrap();
        }
        out::histogram(name, "any", &histogram);
    }
    against_loops("te_4k_depth1", &mut ours, &mut loops);
    let names = ["Python, transfer_sync_write", "Python, a thread and a queue"];
    for ((id, times), name) in
        ["te_4k_vs_python_sync", "te_4k_vs_python_thread"].into_iter().zip(&mut pythons).zip(names)
    {
        let peer = (!times.is_empty()).then(|| (name, median(times)));
        Line { id, state: "any", value: Some(median(&mut ours)), unit: "us", peer, higher: false }.say();
    }
}
