//! moonring on a real Mooncake while faults are injected at random, for as long as wanted.
//!
//! ```text
//!   this process                                        peers, each a process
//!     workers (worker.rs): a thread, a ring, chunks  ─── READ, WRITE ──▶  memory in cells (layout.rs)
//!     faults.rs: the main thread                     ─── SIGKILL, SIGSTOP, restart, ...
//!     crew.rs: the peers, seen from here             ─── "check": what do you hold? ──▶  peer.rs
//! ```
//!
//! Every cell of a peer and every buffer here holds a pattern (pattern.rs) that says whose bytes they are, so that each result
//! can be held against the bytes. What must not happen is an [`Anomaly`].

mod crew;
mod faults;
mod latency;
mod layout;
mod op;
mod pattern;
mod peer;
mod plan;
mod tally;
mod worker;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use moonring::{Engine, Ring, mooncake};

use crew::{Checked, Incarnation, Master, Process, Roster};
use faults::Faults;
use layout::WORKERS;
use tally::{Anomaly, Tally};
use worker::{Place, Worker};

/// After so many seconds Mooncake gives up on a silent peer here: less than the 30 that it has by itself.
pub const GIVES_UP: u64 = 3;
/// What must have ended is waited for this long.
pub const HANGS: Duration = Duration::from_secs(40);
/// Peers that are asked for their segments; the last one beyond them has a name at a metadata server.
const P2P_PEERS: usize = 3;
/// The worker whose engine knows the metadata server.
const NAMED_WORKER: usize = 2;

/// moonring on a real Mooncake, with faults injected at random
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run, and print what came of it as JSON; fails on any anomaly
    Run(Options),
    /// Measure what a sick peer costs the entries of another
    Latency(latency::Options),
    /// Be a peer of one of the others
    #[command(hide = true)]
    Peer(peer::Options),
}

#[derive(Debug, clap::Args)]
struct Options {
    /// For how long, in minutes; fractions will do
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// What the faults and the entries are drawn from; one is made up without
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Task::Run(options) => run(&options),
        Task::Latency(options) => latency::measure(&options).map(|()| true),
        Task::Peer(options) => peer::serve(&options).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Mooncake reads its settings once, when the first engine is made.
pub fn settle_environment() {
    // SAFETY: the process has one thread yet.
    unsafe {
        std::env::set_var("MC_TCP_STATUS_TIMEOUT_SEC", GIVES_UP.to_string());
        std::env::set_var("MC_TCP_BIND_ADDRESS", "127.0.0.1");
    }
}

fn run(options: &Options) -> Result<bool> {
    let length = Duration::try_from_secs_f64(options.minutes * 60.0).context("--minutes is no length of time")?;
    ensure!(length <= Duration::from_secs(7 * 24 * 3600), "--minutes is more than a week");
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    eprintln!("seed {seed}");
    settle_environment();
    let tally = Arc::new(Tally::default());

    let (answers, receivers): (Vec<_>, Vec<Receiver<Checked>>) = (0..WORKERS).map(|_| channel()).unzip();
    let answers = Arc::new(answers);
    let master = Master::start()?;
    let quiet = || mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal);
    let name = format!("moonring-soak-{}", std::process::id());
    let named = quiet().metadata(mooncake::Metadata::Http(master.url.clone())).name(&name).build()?;
    let engines = [quiet().build()?, named];

    let mut peers = Vec::new();
    for peer in 0..=P2P_PEERS {
        let at_server = format!("{name}-peer-0");
        let place = (peer == P2P_PEERS).then_some((&*master.url, &*at_server));
        let process = Process::start(peer as u32, place, Arc::clone(&answers))?;
        let segment = engine_of_peer(&engines, peer).open_segment(&process.info.segment, crew::LIMIT)?;
        peers.push(Incarnation::new(process, segment));
    }
    let roster = Arc::new(Roster::new(peers));

    // From now on: starting all that may take seconds.
    let end = Instant::now() + length;
    let mut places = Vec::new();
    let mut first: Option<Ring> = None;
    for (number, answers) in receivers.into_iter().enumerate() {
        let (engine, peers) =
            if number == NAMED_WORKER { (&engines[1], P2P_PEERS..P2P_PEERS + 1) } else { (&engines[0], 0..P2P_PEERS) };
        // The last one has a poller of its own.
        let builder = match &first {
            Some(first) if number + 1 < WORKERS => Ring::builder().attach(first),
            _ => Ring::builder(),
        };
        let ring = builder.build(worker::CAPACITY, engine)?;
        let seed = seed.wrapping_add(1 + number as u64);
        let (roster, tally) = (Arc::clone(&roster), Arc::clone(&tally));
        if first.is_none() {
            first = Some(Ring::builder().attach(&ring).build(1, engine)?);
        }
        places.push(Place { number, seed, ring, peers, roster, answers, tally, end });
    }
    drop(first);
    let start = |place| thread::Builder::new().name("worker".into()).spawn(move || Worker::new(place).map(Worker::run));
    let threads: Vec<_> = places.into_iter().map(start).collect::<Result<_, _>>()?;

    watch_over(&tally, seed, end);
    let mut faults = Faults::new(seed, &engines, Arc::clone(&roster), answers, Arc::clone(&tally), &master.url, &name);
    let started = Instant::now();
    let mut rss_start = None;
    let mut said = started;
    while Instant::now() < end {
        faults.step()?;
        if rss_start.is_none() && started.elapsed() >= Duration::from_secs(60) {
            rss_start = tally::resident();
        }
        if said.elapsed() >= Duration::from_secs(5) {
            said = Instant::now();
            eprintln!(
                "{:5.0} s: {} operations, {} faults, {} anomalies, {:.1} MiB",
                started.elapsed().as_secs_f64(),
                tally.operations(),
                tally.faults(),
                tally.anomalies(),
                tally::resident().unwrap_or(0) as f64 / f64::from(1 << 20),
            );
        }
    }
    // Under load, as at the start.
    let rss_end = tally::resident();
    faults.heal()?;
    for thread in threads {
        match thread.join() {
            Ok(result) => result?,
            Err(_) => tally.anomaly(Anomaly::Result, format_args!("a worker panicked")),
        }
    }
    drop(faults);
    drop((roster, engines, master));
    println!("{}", tally.report(seed, rss_start, rss_end));
    Ok(tally.anomalies() == 0)
}

/// Ends a run that does not end by itself, long after it should have.
fn watch_over(tally: &Arc<Tally>, seed: u64, end: Instant) {
    let tally = Arc::clone(tally);
    thread::spawn(move || {
        thread::sleep(end.saturating_duration_since(Instant::now()) + 3 * HANGS);
        tally.anomaly(Anomaly::Hang, format_args!("the run does not end"));
        println!("{}", tally.report(seed, None, None));
        std::process::exit(1);
    });
}

/// The engine that reaches a peer.
pub fn engine_of_peer(engines: &[Engine; 2], peer: usize) -> &Engine {
    &engines[usize::from(peer == P2P_PEERS)]
}
