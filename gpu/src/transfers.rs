//! A ring on a real Mooncake engine, memory of the device to load into, and a peer in this process to load from.

use std::env;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use mooncake_sys::{LIBRARY_VAR, WHEEL_VAR};
use moonring::{Cqe, Engine, Entry, Region, RegionInfo, Registered, Ring, Segment, mooncake, opcode};

use crate::checks::Skip;
use crate::device::{Device, LIMIT, is_real};

pub struct Transfers {
    pub ring: Ring,
    ours: Registered,
    peer: Segment,
    theirs: Registered,
    info: RegionInfo,
    /// The address on the device.
    memory: u64,
}

/// An engine of this run's Mooncake.
pub fn engine() -> Result<Engine> {
    if is_real() && [WHEEL_VAR, LIBRARY_VAR].iter().all(|name| env::var_os(name).is_none()) {
        bail!(Skip("no engine that can reach GPU memory is named".into()));
    }
    let built = mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal).build();
    built.context("no Mooncake engine")
}

impl Transfers {
    /// `len` bytes on both sides.
    pub fn new(device: &Device, len: usize) -> Result<Transfers> {
        let memory = device.memory(len)?;
        let (engine, other) = (engine()?, engine()?);
        // SAFETY: the memory is never freed, and nothing makes references to it.
        let ours = unsafe { engine.register_foreign(memory, len as u64, "cuda:0") }?;
        let theirs = other.register(Region::alloc(len)?)?;
        let peer = engine.open_segment(other.name(), LIMIT)?;
        let ring = Ring::builder().build(256, &engine)?;
        let info = theirs.info();
        let mut transfers = Transfers { ring, ours, peer, theirs, info, memory };
        // The first one makes a connection, and lets the engine's own CUDA runtime set itself up, which may wait for
        // streams: no stream is held for that.
        transfers.push(transfers.load(0, len.min(4096))?)?;
        succeeded(&transfers.reap(1)?[0])?;
        Ok(transfers)
    }

    /// Makes every 32-bit word of the peer's range this value.
    pub fn fill(&self, offset: usize, len: usize, value: u32) -> Result<()> {
        let bytes = value.to_ne_bytes().repeat(len / 4);
        Ok(self.theirs.write_at(offset, &bytes)?)
    }

    /// A load of this range from the same place of the peer's.
    pub fn load(&self, offset: usize, len: usize) -> Result<Entry> {
        let remote = self.peer.slice(&self.info, offset as u64, len as u64)?;
        Ok(opcode::Read::new(self.ours.slice(offset..offset + len)?, remote).build())
    }

    /// A load that fails: the peer has nothing at that address.
    pub fn bad_load(&self, len: usize) -> Result<Entry> {
        Ok(opcode::Read::new(self.ours.slice(0..len)?, self.peer.at(4096)).build())
    }

    pub fn push(&mut self, entry: Entry) -> Result<()> {
        push(&mut self.ring, entry)
    }

    /// Waits for the completions of everything pushed, which is this much.
    pub fn reap(&mut self, count: usize) -> Result<Vec<Cqe>> {
        reap(&mut self.ring, count)
    }

    /// Where an offset is on the device.
    pub fn at(&self, offset: usize) -> u64 {
        self.memory + offset as u64
    }
}

/// Pushes and submits one entry.
pub fn push(ring: &mut Ring, entry: Entry) -> Result<()> {
    ring.submission().push(entry).map_err(|error| anyhow::anyhow!("the push was refused: {:?}", error.reason))?;
    ring.submit().map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(())
}

pub fn reap(ring: &mut Ring, count: usize) -> Result<Vec<Cqe>> {
    let there = ring.wait_timeout(count, LIMIT).map_err(|error| anyhow::anyhow!("{error}"))?;
    ensure!(there >= count, "{there} of {count} entries ended within {LIMIT:?}");
    Ok(ring.completion().collect())
}

/// Nothing completes for a while.
pub fn nothing_completes(ring: &mut Ring) -> Result<()> {
    std::thread::sleep(Duration::from_millis(20));
    let early: Vec<Cqe> = ring.completion().collect();
    ensure!(early.is_empty(), "ended early: {early:?}");
    Ok(())
}

/// The entry has succeeded.
pub fn succeeded(cqe: &Cqe) -> Result<()> {
    cqe.result().map(drop).with_context(|| format!("{cqe:?}"))
}
