//! What goes wrong with the peers, drawn at random, at random times.

use std::net::TcpListener;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fastrand::Rng;
use moonring::{Engine, OpenError, Region, Registered};

use crate::crew::{Answers, Incarnation, LIMIT, Process, Roster};
use crate::layout::{PAGE, SMALL, WORKERS};
use crate::tally::{Anomaly, Tally};
use crate::{GIVES_UP, P2P_PEERS, engine_of_peer};

/// Peers that are sick at the same time, at most: the others show that it does not matter to them.
const SICK: usize = 2;

/// How a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Well,
    Stopped {
        until: Instant,
    },
    /// Its process is gone.
    Dead {
        until: Instant,
    },
}

/// Injects faults. For the main thread alone: peers end with the thread that has started them.
#[derive(Debug)]
pub struct Faults<'a> {
    rng: Rng,
    engines: &'a [Engine; 2],
    roster: Arc<Roster>,
    answers: Answers,
    tally: Arc<Tally>,
    health: Vec<Health>,
    generation: u32,
    /// The metadata server, and what names there begin with.
    server: (&'a str, &'a str),
    names: u32,
    next: Instant,
    /// A port where connections are made by the kernel and nobody accepts them.
    silent: TcpListener,
    mine: Registered,
}

impl<'a> Faults<'a> {
    pub fn new(
        seed: u64,
        engines: &'a [Engine; 2],
        roster: Arc<Roster>,
        answers: Answers,
        tally: Arc<Tally>,
        url: &'a str,
        name: &'a str,
    ) -> Faults<'a> {
        let health = vec![Health::Well; roster.len()];
        let generation = roster.len() as u32;
        let silent = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let mine = Region::alloc(4 * PAGE).map(|region| engines[0].register(region));
        let mine = mine.expect("there is memory for a few pages").expect("new memory can be registered");
        let (rng, next) = (Rng::with_seed(seed), Instant::now() + Duration::from_secs(1));
        let (server, names) = ((url, name), 0);
        Faults { rng, engines, roster, answers, tally, health, generation, server, names, next, silent, mine }
    }

    /// Does what is due, or sleeps a little.
    pub fn step(&mut self) -> Result<()> {
        let now = Instant::now();
        for peer in 0..self.health.len() {
            match self.health[peer] {
                Health::Stopped { until } if until <= now => self.proceed(peer),
                Health::Dead { until } if until <= now => self.start(peer, false)?,
                _ => {}
            }
        }
        if now < self.next {
            thread::sleep(Duration::from_millis(10));
            return Ok(());
        }
        self.next = now + Duration::from_millis(self.rng.u64(50..1_200));
        match self.rng.u32(0..20) {
            0 => self.open_the_silent(),
            1 => self.open_nobody(),
            2 => self.register_twice(),
            _ => self.strike()?,
        }
        Ok(())
    }

    /// No more faults: every peer is there again.
    pub fn heal(&mut self) -> Result<()> {
        for peer in 0..self.health.len() {
            match self.health[peer] {
                Health::Well => {}
                Health::Stopped { .. } => self.proceed(peer),
                Health::Dead { .. } => self.start(peer, false)?,
            }
        }
        Ok(())
    }

    /// Something happens to a peer.
    fn strike(&mut self) -> Result<()> {
        let peer = self.rng.usize(0..self.health.len());
        let now = Instant::now();
        let others = self.health.iter().filter(|&&health| health != Health::Well).count();
        let present = self.roster.get(peer);
        match self.health[peer] {
            Health::Dead { .. } => {}
            // While it is stopped.
            Health::Stopped { .. } if self.rng.u32(0..4) == 0 => self.kill(peer, "killed_while_stopped", now),
            Health::Stopped { .. } => {}
            Health::Well if others >= SICK => {}
            Health::Well => match self.rng.u32(0..10) {
                0 | 1 => self.kill(peer, "killed", now),
                2 => self.leave(peer)?,
                // Late writes make cells useless. A new process has new ones.
                _ if present.poisoned.load(Relaxed) > SMALL * WORKERS / 3 => self.leave(peer)?,
                3 | 4 => self.stop(peer, "stopped_for_long", 1_000 * GIVES_UP + 100..5_000),
                _ => self.stop(peer, "stopped", 5..400),
            },
        }
        Ok(())
    }

    fn stop(&mut self, peer: usize, kind: &'static str, millis: Range<u64>) {
        let time = Duration::from_millis(self.rng.u64(millis));
        self.tally.fault(kind);
        let present = self.roster.get(peer);
        present.falls_sick();
        present.process.signal(libc::SIGSTOP);
        self.health[peer] = Health::Stopped { until: Instant::now() + time };
    }

    fn proceed(&mut self, peer: usize) {
        let present = self.roster.get(peer);
        present.process.signal(libc::SIGCONT);
        present.recovers();
        self.health[peer] = Health::Well;
    }

    fn kill(&mut self, peer: usize, kind: &'static str, now: Instant) {
        self.tally.fault(kind);
        let present = self.roster.get(peer);
        present.falls_sick();
        present.process.kill();
        self.health[peer] = Health::Dead { until: now + Duration::from_millis(self.rng.u64(0..1_500)) };
    }

    /// Ends a peer in order and starts it anew: under the same name if it has one that is its own.
    fn leave(&mut self, peer: usize) -> Result<()> {
        let named = peer == P2P_PEERS;
        self.tally.fault(if named { "restarted_by_the_same_name" } else { "restarted" });
        let present = self.roster.get(peer);
        present.falls_sick();
        present.process.leave().context("a peer does not leave")?;
        self.start(peer, named)
    }

    /// A new process in the place of the last one.
    fn start(&mut self, peer: usize, same_name: bool) -> Result<()> {
        let named = peer == P2P_PEERS;
        if named && !same_name {
            // The server keeps the name of an engine that was killed, and refuses another of that name.
            self.names += 1;
        }
        let name = format!("{}-peer-{}", self.server.1, self.names);
        let place = named.then_some((self.server.0, &*name));
        let process = Process::start(self.generation, place, Arc::clone(&self.answers))?;
        self.generation += 1;
        let engine = engine_of_peer(self.engines, peer);
        let segment = &process.info.segment;
        // Reopening also where nobody had it open before is what a caller does who knows no better.
        let segment = engine.reopen_segment(segment, LIMIT).with_context(|| format!("{segment} cannot be opened"))?;
        self.roster.replace(peer, Incarnation::new(process, segment));
        self.health[peer] = Health::Well;
        Ok(())
    }

    /// Opening a segment at a port where nobody accepts ends at its limit.
    fn open_the_silent(&mut self) {
        self.tally.fault("a_listener_that_never_accepts");
        let name = self.silent.local_addr().map(|at| at.to_string()).unwrap_or_default();
        let start = Instant::now();
        let result = self.engines[0].open_segment(&name, Duration::from_millis(20));
        let took = start.elapsed();
        // Mooncake itself gives up after a minute, and then says so to whoever waits at that moment.
        if !matches!(result, Err(OpenError::Limit { .. } | OpenError::Transport(_))) || took > Duration::from_secs(10) {
            self.tally.anomaly(Anomaly::Hang, format_args!("opening {name}: {result:?} after {took:?}"));
        }
    }

    /// Opening a segment at a port where nobody listens is an error.
    fn open_nobody(&mut self) {
        self.tally.fault("a_port_without_a_listener");
        let result = self.engines[0].open_segment("127.0.0.1:1", LIMIT);
        if !matches!(result, Err(OpenError::Transport(_))) {
            self.tally.anomaly(Anomaly::Result, format_args!("opening a closed port: {result:?}"));
        }
    }

    /// Registering what is registered is refused.
    fn register_twice(&mut self) {
        self.tally.fault("registration_conflict");
        let address = self.mine.address() + (self.rng.usize(0..4) * PAGE) as u64;
        // SAFETY: the memory stays mapped as long as its region, and it is refused.
        let result = unsafe { self.engines[0].register_foreign(address, PAGE as u64, "cpu:0") };
        if result.is_ok() {
            self.tally.anomaly(Anomaly::Result, format_args!("memory was registered twice"));
        }
    }
}
