//! What the tests of the ring share.
#![allow(dead_code, reason = "each test program uses its part")]

use std::time::Duration;

use moonring::opcode::Cancel;
use moonring::sim::Sim;
use moonring::{Cqe, Engine, Entry, Refusal, Region, RegionInfo, Registered, Ring, Segment, opcode};

/// Nothing here takes nearly as long; a test that would hang fails instead.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A ring, and a peer to read from.
pub struct Setup {
    pub engine: Engine,
    pub ring: Ring,
    pub ours: Registered,
    pub theirs: Registered,
    pub peer: Segment,
    /// Of `theirs`.
    info: RegionInfo,
}

impl Setup {
    /// A ring on a loopback engine, and a second engine as its peer.
    pub fn loopback(entries: u32) -> Setup {
        Setup::new(entries, Engine::loopback(), Engine::loopback())
    }

    /// A ring on a simulated engine that is its own peer.
    pub fn simulated(entries: u32, sim: Sim) -> Setup {
        let engine = Engine::sim(sim);
        Setup::new(entries, engine.clone(), engine)
    }

    fn new(entries: u32, engine: Engine, other: Engine) -> Setup {
        let ours = engine.register(Region::alloc(1 << 20).unwrap()).unwrap();
        let theirs = other.register(Region::alloc(1 << 20).unwrap()).unwrap();
        let peer = engine.open_segment(other.name(), LIMIT).unwrap();
        let ring = Ring::builder().grace(Duration::from_millis(100)).build(entries, &engine).unwrap();
        let info = theirs.info();
        Setup { engine, ring, ours, theirs, peer, info }
    }

    /// A read of `len` bytes at the same offset of both sides.
    pub fn read(&self, offset: usize, len: usize) -> Entry {
        let remote = self.peer.slice(&self.info, offset as u64, len as u64).unwrap();
        opcode::Read::new(self.ours.slice(offset..offset + len).unwrap(), remote).build()
    }

    pub fn push(&mut self, entry: Entry) {
        self.ring.submission().push(entry).unwrap();
    }

    pub fn refused(&mut self, entry: Entry) -> Refusal {
        self.ring.submission().push(entry).unwrap_err().reason
    }

    /// Submits and waits for exactly `count` completions.
    pub fn reap(&mut self, count: usize) -> Vec<Cqe> {
        self.ring.submit().unwrap();
        reap_exactly(&mut self.ring, count)
    }
}

/// The poller has taken everything that was submitted to the ring: its answer to a call comes after that.
pub fn taken(ring: &Ring) {
    for _ in 0..2 {
        assert_eq!(ring.controller().cancel(Cancel::user_data(u64::MAX)), Ok(0));
    }
}

/// Waits for exactly `count` completions.
pub fn reap_exactly(ring: &mut Ring, count: usize) -> Vec<Cqe> {
    let mut cqes = Vec::new();
    while cqes.len() < count {
        ring.wait_timeout(1, LIMIT).unwrap();
        cqes.extend(ring.completion());
    }
    assert_eq!(cqes.len(), count, "{cqes:?}");
    cqes
}
