//! What a ring costs while nothing happens: CPU time of its poller, and waking up afterwards.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::{JoinHandle, park_timeout};
use std::time::{Duration, Instant};

use moonring::{Engine, Region, RegionInfo, Ring, fence, mooncake, opcode, sim};

use crate::Settings;
use crate::machine::median;
use crate::out;

/// Rings of which each gives one sample of waking up.
const WAKES: usize = 9;

/// How long nothing happens; not shorter in a quick run, because the results are about that.
const SPAN: Duration = Duration::from_secs(10);

pub fn measure(_settings: &mut Settings) {
    let engine = Engine::loopback();
    let quiet = Watch::new(|| Ring::builder().build(1024, &engine).unwrap());
    let mut gated = Watch::new(|| Ring::builder().build(1024, &engine).unwrap());
    let stuck = Stuck::new();
    let mut sleepers: Vec<_> = (0..WAKES).map(|_| Ring::builder().build(64, &engine).unwrap()).collect();

    let (signaller, far) = fence::host();
    for _ in 0..1000 {
        gated.ring.submission().push(opcode::Wait::new().build().wait(&far)).unwrap();
    }
    gated.ring.submit().unwrap();
    let mut warm: Vec<_> =
        sleepers.iter_mut().flat_map(|ring| (0..200).map(|_| nop(ring)).skip(100).collect::<Vec<_>>()).collect();
    // They fall asleep first; the transfers to the stopped peer are on their way.
    std::thread::sleep(Duration::from_millis(300));

    let bare = Bare::start();
    let ids = ["idle_cpu_percent", "idle_gated_cpu_percent", "idle_stopped_peer_cpu_percent"];
    let threads = [&quiet.thread, &gated.thread, &stuck.watch.thread, &bare.thread].map(|thread| Thread(thread));
    let before = threads.map(Thread::used);
    let start = Instant::now();
    std::thread::sleep(SPAN);
    let after = threads.map(Thread::used);
    let time = start.elapsed();
    let used: Vec<Used> = before.iter().zip(after).map(|(before, after)| after.since(before)).collect();
    let share = |used: &Used| 100.0 * used.cpu.as_secs_f64() / time.as_secs_f64();
    for (id, used) in ids.iter().zip(&used) {
        out::alone(id, share(used), "% of a core");
    }
    let [.., stopped, floor] = &used[..] else { unreachable!("there are four") };
    let each = |used: &Used| used.cpu.as_secs_f64() * 1e6 / used.sleeps.max(1) as f64;
    out::note(&format!(
        "a thread that only sleeps for {PAUSE:?} at a time takes {:.2} % of a core, {:.1} us each of {} times; the poller with the \
         stopped peer takes {:.1} us each of {} times",
        share(floor),
        each(floor),
        floor.sleeps,
        each(stopped),
        stopped.sleeps
    ));
    // Everybody has slept for the whole span.
    let mut woken: Vec<_> = sleepers.iter_mut().map(nop).collect();
    out::alone("wake_after_idle_extra_us", (median(&mut woken) - median(&mut warm)).max(0.0), "us");
    signaller.signal();
}

/// One operation on a ring, in microseconds.
fn nop(ring: &mut Ring) -> f64 {
    let start = Instant::now();
    ring.submission().push(opcode::Nop::new().build()).unwrap();
    ring.submit_and_wait(1).unwrap();
    let time = start.elapsed();
    assert_eq!(ring.completion().count(), 1);
    time.as_nanos() as f64 / 1e3
}

/// A ring and its poller's thread, which is told apart by what comes into being with the ring.
struct Watch {
    ring: Ring,
    thread: String,
}

impl Watch {
    fn new(build: impl FnOnce() -> Ring) -> Watch {
        let before = pollers();
        let mut ring = build();
        // The thread has its name once it answers.
        nop(&mut ring);
        let thread = pollers().difference(&before).next().expect("a ring has a poller").clone();
        Watch { ring, thread }
    }
}

/// A thread of this process that does nothing but wake as often as a poller looks at a batch that is silent: whoever looks so
/// often takes as much.
struct Bare {
    thread: String,
    stop: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

/// The longest time between two looks at a batch.
const PAUSE: Duration = Duration::from_millis(5);

impl Bare {
    fn start() -> Bare {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, (tell, told)) = (Arc::clone(&stop), mpsc::channel());
        let handle = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().to_string()).unwrap();
            while !stopped.load(Relaxed) {
                park_timeout(PAUSE);
            }
        });
        Bare { thread: told.recv().unwrap(), stop, handle: Some(handle) }
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(handle) = self.handle.take() {
            handle.join().unwrap();
        }
    }
}

/// A thread of this process, by its number.
#[derive(Clone, Copy)]
struct Thread<'a>(&'a str);

/// What a thread has used so far.
struct Used {
    cpu: Duration,
    /// How often it gave up its core of its own will.
    sleeps: u64,
}

impl Thread<'_> {
    fn used(self) -> Used {
        let read = |file| fs::read_to_string(format!("/proc/self/task/{}/{file}", self.0)).expect("the thread runs");
        let (times, status) = (read("schedstat"), read("status"));
        let nanos = times.split(' ').next().and_then(|nanos| nanos.parse().ok());
        let sleeps = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok());
        let (nanos, sleeps) = nanos.zip(sleeps).expect("the kernel says both");
        Used { cpu: Duration::from_nanos(nanos), sleeps }
    }
}

impl Used {
    fn since(&self, before: &Used) -> Used {
        Used { cpu: self.cpu - before.cpu, sleeps: self.sleeps - before.sleeps }
    }
}

/// The threads of this process that are pollers.
fn pollers() -> BTreeSet<String> {
    let threads = fs::read_dir("/proc/self/task").expect("a process sees its threads");
    let names = threads.map(|thread| thread.unwrap().file_name().into_string().unwrap());
    let is_poller = |thread: &String| {
        fs::read_to_string(format!("/proc/self/task/{thread}/comm")).is_ok_and(|name| name.trim() == "moonring-poller")
    };
    names.filter(is_poller).collect()
}

/// A ring with transfers to a peer that is stopped.
struct Stuck {
    watch: Watch,
    _peer: Option<Peer>,
}

const STUCK: usize = 64;
const BYTES: usize = 64 << 10;

impl Stuck {
    fn new() -> Stuck {
        let (engine, peer) = match mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal).build() {
            Ok(engine) => (engine, Some(Peer::start())),
            Err(error) => {
                out::note(&format!("the stopped peer is a simulated one that never answers, not Mooncake's: {error}"));
                let never = Duration::from_secs(3_600);
                (Engine::sim(sim::Sim::new(1).delay(never..never)), None)
            }
        };
        let region = engine.register(Region::alloc(STUCK * BYTES).unwrap()).unwrap();
        let remote = peer.as_ref().map_or_else(|| region.info(), |peer| peer.info.clone());
        let name = if peer.is_some() { remote.segment.clone() } else { engine.name().to_owned() };
        let segment = engine.open_segment(&name, Duration::from_secs(10)).unwrap();
        // In the simulation nothing ends, so there the ring is dropped without waiting.
        let mut watch = Watch::new(|| Ring::builder().grace(Duration::ZERO).build(1024, &engine).unwrap());
        if let Some(peer) = &peer {
            peer.stop();
        }
        for at in (0..STUCK).map(|n| n * BYTES) {
            let to = segment.at(remote.address + at as u64);
            let write = opcode::Write::new(region.slice(at..at + BYTES).unwrap(), to);
            watch.ring.submission().push(write.build()).unwrap();
        }
        watch.ring.submit().unwrap();
        Stuck { watch, _peer: peer }
    }
}

/// A Mooncake peer in a process of its own; killed when dropped, or when this process dies.
struct Peer {
    child: Child,
    info: RegionInfo,
}

impl Peer {
    fn start() -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("--serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let hello =
            lines.find_map(|line| Some(line.ok()?.strip_prefix("peer: ")?.to_owned())).expect("the peer starts");
        let [segment, address, len] = hello.split(' ').collect::<Vec<_>>()[..] else { panic!("{hello}") };
        let info =
            RegionInfo { segment: segment.to_owned(), address: address.parse().unwrap(), len: len.parse().unwrap() };
        Peer { child, info }
    }

    /// Stops it, and waits until its threads are: that takes a little longer than the call.
    fn stop(&self) {
        // SAFETY: the child is ours and not reaped yet, so its number is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, libc::SIGSTOP) }, 0);
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The peer's process: serves until its parent closes the pipe or dies.
pub fn serve() {
    // SAFETY: a plain system call. A stopped peer cannot see its pipe close, so the kernel kills it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let engine = mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal).build().unwrap();
    let region = engine.register(Region::alloc(STUCK * BYTES).unwrap()).unwrap();
    let RegionInfo { segment, address, len } = region.info();
    println!("peer: {segment} {address} {len}");
    let _ = std::io::stdin().read(&mut [0]);
}
