//! Entries that wait: what turns cost meanwhile, how soon they are issued, and what the usual pattern does instead.

use std::hint::spin_loop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use moonring::fence::{self, FenceStatus, Signaller, Timeline, TimelineSignaller};
use moonring::{Engine, Fence, Region, Registered, Ring, Segment, opcode};

use crate::Settings;
use crate::machine::{self, CALLER, State, median, on_poller_core, pin};
use crate::out::{self, Line};
use crate::watched::Watched;

const WAITING: u32 = 100_000;

pub fn measure(settings: &mut Settings) {
    pin(CALLER);
    turns(settings);
    longest_turn();
    signal_to_issue(settings);
    overtake(settings);
}

/// A ring on a watched engine.
struct Bed {
    ring: Ring,
    watched: Arc<Watched>,
    region: Registered,
    peer: Segment,
}

impl Bed {
    fn new(entries: u32) -> Bed {
        let (engine, watched) = Watched::engine();
        let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
        let peer = engine.open_segment("watched", Duration::from_secs(10)).unwrap();
        let ring = on_poller_core(|| Ring::builder().build(entries, &engine).unwrap());
        Bed { ring, watched, region, peer }
    }

    fn read(&self) -> moonring::Entry {
        opcode::Read::new(self.region.slice(..64).unwrap(), self.peer.at(1 << 20)).build()
    }

    /// Pushes reads that wait, and returns when the poller has them all.
    fn load<'a>(&mut self, fences: impl Iterator<Item = &'a Fence>) {
        for fence in fences {
            let read = self.read();
            self.ring.submission().push(read.wait(fence)).unwrap();
        }
        assert_eq!(self.settle(), 0, "ended while its fence was pending");
    }

    /// Returns when the poller has taken everything pushed so far, with the number of completions that came meanwhile.
    fn settle(&mut self) -> usize {
        let last = u64::MAX;
        self.ring.submission().push(opcode::Nop::new().build().user_data(last)).unwrap();
        self.ring.submit().unwrap();
        let mut others = 0;
        loop {
            self.ring.wait(1).unwrap();
            for cqe in self.ring.completion() {
                if cqe.user_data() == last {
                    return others;
                }
                others += 1;
            }
        }
    }

    /// The time of a turn of an awake poller when nothing happens.
    fn turn(&mut self, settings: &Settings) -> f64 {
        let watched = Arc::clone(&self.watched);
        watched.turn(|| {
            self.settle();
            std::thread::sleep(Duration::from_millis(settings.rounds(50, 10) as u64));
        })
    }
}

/// Who signals what entries wait for; dropped, it fails them.
#[derive(Debug)]
#[expect(dead_code, reason = "held, not read")]
enum Held {
    Hosts(Vec<Signaller>),
    Timelines(Vec<TimelineSignaller>),
}

type Fences = (Held, Vec<Fence>);
type MakeFences = fn() -> Fences;

/// So many host fences.
fn host_fences(distinct: usize) -> Fences {
    let (signallers, fences) = (0..distinct).map(|_| fence::host()).unzip();
    (Held::Hosts(signallers), fences)
}

/// Values of 8 timelines, one for each entry.
fn timelines() -> Fences {
    let (signallers, timelines): (Vec<_>, Vec<Timeline>) = (0..8).map(|_| fence::timeline(0)).unzip();
    let fences = (0..WAITING as usize).map(|at| timelines[at % 8].at(1 + at as u64 / 8)).collect();
    (Held::Timelines(signallers), fences)
}

fn turns(settings: &mut Settings) {
    let kinds: [(&str, MakeFences); 4] = [
        ("turn_100k_on_1", || host_fences(1)),
        ("turn_100k_on_1k", || host_fences(1_000)),
        ("turn_100k_on_100k", || host_fences(WAITING as usize)),
        ("turn_100k_on_8_timelines", timelines),
    ];
    for (id, fences) in kinds {
        let (mut empty, mut loaded) = (Vec::new(), Vec::new());
        for _ in 0..settings.rounds(9, 3) {
            out::say("probe", serde_json::json!(machine::probe()));
            let mut bed = Bed::new(WAITING + 1);
            empty.push(bed.turn(settings));
            let (held, fences) = fences();
            bed.load(fences.iter().cycle().take(WAITING as usize));
            loaded.push(bed.turn(settings));
            drop(bed);
            drop(held);
        }
        let (value, peer) = (median(&mut loaded), median(&mut empty));
        Line { id, state: "any", value: Some(value), unit: "ns", peer: Some(("empty ring", peer)), higher: false }
            .say();
    }
    for waiting in [0, 10, 100, 1_000, 10_000, 100_000] {
        let mut bed = Bed::new(WAITING + 1);
        let (held, fences) = host_fences(1_000);
        bed.load(fences.iter().cycle().take(waiting as usize));
        out::point("waiting", "turn, 1,000 fences", "any", f64::from(waiting), bed.turn(settings));
        drop(bed);
        drop(held);
    }
}

fn longest_turn() {
    let mut rounds = Vec::new();
    let mut lead = Duration::from_millis(100);
    for _ in 0..5 {
        let mut bed = Bed::new(WAITING + 1);
        let (signaller, fence) = fence::host();
        bed.load(std::iter::repeat_n(&fence, WAITING as usize));
        let watched = Arc::clone(&bed.watched);
        let released = watched.longest(|| {
            bed.settle();
            signaller.signal();
            bed.ring.wait(WAITING as usize).unwrap();
        });
        assert_eq!(bed.ring.completion().filter(|cqe| cqe.result() == Ok(64)).count(), WAITING as usize);
        let expired = longest_expiry(&mut bed, lead);
        if expired.is_infinite() {
            lead *= 2;
        }
        rounds.push([released, expired]);
    }
    let longest = rounds.iter().map(|[released, expired]| released.max(*expired) / 1e3).min_by(f64::total_cmp);
    if let Some(longest) = longest.filter(|longest| longest.is_finite()) {
        out::alone("longest_turn_us", longest, "us");
    }
    let smallest = |at: usize| rounds.iter().map(|round| round[at] / 1e3).min_by(f64::total_cmp).unwrap_or(f64::NAN);
    out::note(&format!(
        "longest turn, smallest of {} rounds: {:.1} us while 100,000 reads are released by one fence, {:.1} us while 100,000 \
         timeouts expire at one moment",
        rounds.len(),
        smallest(0),
        smallest(1)
    ));
}

/// The longest turn while all entries expire at one moment, `lead` from now; infinite if they could not all be there by then.
fn longest_expiry(bed: &mut Bed, lead: Duration) -> f64 {
    let moment = Instant::now() + lead;
    for _ in 0..WAITING {
        bed.ring.submission().push(opcode::Timeout::at(moment).etime_success().build()).unwrap();
    }
    let mut early = bed.settle();
    std::thread::sleep((moment - Duration::from_millis(3)).saturating_duration_since(Instant::now()));
    let watched = Arc::clone(&bed.watched);
    let expired = watched.longest(|| {
        early += bed.settle();
        bed.ring.wait(WAITING as usize - early).unwrap();
    });
    let late = bed.ring.completion().count();
    if early > 0 {
        return f64::INFINITY;
    }
    assert_eq!(late, WAITING as usize);
    expired
}

/// From just before the signal until the transport is called. The poller has had the entry for a while and is awake.
fn signal_to_issue(settings: &mut Settings) {
    let mut histograms = State::ALL.map(|_| [(), ()].map(|()| Histogram::<u64>::new(3).unwrap()));
    let mut bed = Bed::new(1024);
    let start = Instant::now();
    let rounds = settings.rounds(40, 12);
    let mut round = 0;
    let enough = |histograms: &[[Histogram<u64>; 2]; 2]| histograms[0][0].len() >= 1_000;
    while round < rounds || (!enough(&histograms) && start.elapsed() < settings.near_wait) {
        let before = machine::state().0;
        if round >= rounds && before == State::Far {
            std::thread::sleep(Duration::from_millis(20));
            continue;
        }
        round += 1;
        let samples = signal_round(&mut bed);
        if machine::state().0 == before {
            let place = State::ALL.iter().position(|&state| state == before).expect("one of all");
            for (histogram, samples) in histograms[place].iter_mut().zip(samples) {
                for nanos in samples {
                    histogram.record(nanos).unwrap();
                }
            }
        }
    }
    settings.near_wait = settings.near_wait.saturating_sub(start.elapsed());
    for (state, kinds) in State::ALL.iter().zip(&histograms) {
        let medians = kinds.each_ref().map(|histogram| histogram.value_at_quantile(0.5) as f64 / 1e3);
        if kinds[0].is_empty() {
            continue;
        }
        // Of the two kinds of fence, the slower.
        let value = Some(medians[0].max(medians[1]));
        Line { id: "signal_to_issue_us", state: state.name(), value, unit: "us", peer: None, higher: false }.say();
        for (histogram, name) in kinds.iter().zip(["host fence to transport", "timeline to transport"]) {
            out::histogram(name, state.name(), histogram);
        }
    }
}

/// Latencies by host fences, and by a timeline.
fn signal_round(bed: &mut Bed) -> [Vec<u64>; 2] {
    const EACH: u64 = 200;
    let (mut timeline_signaller, timeline) = fence::timeline(0);
    let mut samples = [const { Vec::new() }; 2];
    for n in 1..=EACH {
        let (signaller, fence) = fence::host();
        samples[0].push(signal_once(bed, &fence, || signaller.signal()));
        samples[1].push(signal_once(bed, &timeline.at(n), || timeline_signaller.signal(n).unwrap()));
    }
    samples
}

fn signal_once(bed: &mut Bed, fence: &Fence, signal: impl FnOnce()) -> u64 {
    let read = bed.read();
    bed.ring.submission().push(read.wait(fence)).unwrap();
    bed.ring.submit().unwrap();
    // Time to take the entry, and less than the poller spins for.
    let taken = Instant::now() + Duration::from_micros(3);
    while Instant::now() < taken {
        spin_loop();
    }
    assert_eq!(bed.watched.take_called(), None, "issued before its fence");
    let signalled = bed.watched.nanos(Instant::now());
    signal();
    let called = loop {
        if let Some(called) = bed.watched.take_called() {
            break called;
        }
        spin_loop();
    };
    bed.ring.wait(1).unwrap();
    assert_eq!(bed.ring.completion().count(), 1);
    called.checked_sub(signalled).expect("issued before its fence")
}

const BYTES: usize = 4096;
const READY: usize = 1_000;

/// A thousand loads whose fences have signalled, behind one whose fence takes 10 ms.
fn overtake(settings: &mut Settings) {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..settings.rounds(9, 5) {
        ours.push(overtake_by_ring().as_nanos() as f64 / 1e3);
        theirs.push(overtake_by_thread().as_nanos() as f64 / 1e3);
    }
    let peer = Some(("a thread that blocks on each event", median(&mut theirs)));
    let value = Some(median(&mut ours));
    Line { id: "overtake_vs_blocking_thread", state: "any", value, unit: "us", peer, higher: false }.say();
}

/// One slow fence, which signals 10 ms from now, and the thread that will do it; then a thousand that have signalled.
fn fences() -> (std::thread::JoinHandle<()>, Vec<Fence>) {
    let (slow, first) = fence::host();
    let mut fences = vec![first];
    for _ in 0..READY {
        let (signaller, fence) = fence::host();
        signaller.signal();
        fences.push(fence);
    }
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(10));
        slow.signal();
    });
    (thread, fences)
}

fn overtake_by_ring() -> Duration {
    let engine = Engine::loopback();
    let region = engine.register(Region::alloc(2 * READY * BYTES).unwrap()).unwrap();
    let peer = engine.open_segment(engine.name(), Duration::from_secs(10)).unwrap();
    let mut ring = on_poller_core(|| Ring::builder().build(READY as u32 + 1, &engine).unwrap());
    let (slow, fences) = fences();
    let start = Instant::now();
    for (at, fence) in fences.iter().enumerate() {
        let at = at.saturating_sub(1) * BYTES;
        let remote = peer.at(region.address() + (READY * BYTES + at) as u64);
        let read = opcode::Read::new(region.slice(at..at + BYTES).unwrap(), remote);
        ring.submission().push(read.build().wait(fence)).unwrap();
    }
    ring.submit_and_wait(READY).unwrap();
    let time = start.elapsed();
    ring.wait(READY + 1).unwrap();
    assert_eq!(ring.completion().filter(|cqe| cqe.result() == Ok(BYTES as u32)).count(), READY + 1);
    slow.join().unwrap();
    time
}

fn overtake_by_thread() -> Duration {
    let (sender, queue) = std::sync::mpsc::channel::<(usize, Fence)>();
    let (done, dones) = std::sync::mpsc::channel();
    let remote = vec![1u8; READY * BYTES];
    let mut local = vec![0u8; READY * BYTES];
    let thread = std::thread::spawn(move || {
        for (at, fence) in queue {
            assert_eq!(fence.wait_timeout(Duration::from_secs(60)), FenceStatus::Signalled);
            let range = at.saturating_sub(1) * BYTES..at.max(1) * BYTES;
            local[range.clone()].copy_from_slice(&remote[range]);
            done.send(at).unwrap();
        }
        std::hint::black_box(local);
    });
    let (slow, fences) = fences();
    let start = Instant::now();
    for item in fences.into_iter().enumerate() {
        sender.send(item).unwrap();
    }
    drop(sender);
    assert_eq!(dones.iter().filter(|&at| at > 0).count(), READY);
    let time = start.elapsed();
    thread.join().unwrap();
    slow.join().unwrap();
    time
}
