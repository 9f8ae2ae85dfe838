//! What a sick peer costs the entries of another, on one ring: rounds with the fault beside rounds without, in turn.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use moonring::{Region, Registered, Ring, Segment, mooncake, opcode};
use serde_json::{Map, Value, json};

use crate::crew::{LIMIT, Process};
use crate::layout::PAGE;
use crate::settle_environment;

/// What is measured
#[derive(Debug, Args)]
pub struct Options {
    /// Rounds of each kind
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Entries in a round, one behind the other
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(100..))]
    entries: u32,
}

/// What is wrong with the other peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Stopped,
    /// Its process is gone, and entries for it are pushed all the same.
    Dead,
    /// Entries for it have ranges that it has not registered.
    BadTargets,
}

const FAULTS: [(Fault, &str); 3] =
    [(Fault::Stopped, "stopped"), (Fault::Dead, "dead"), (Fault::BadTargets, "bad_targets")];
/// Entries for the sick peer that are outstanding, at most.
const SICK: usize = 32;
/// User data of those.
const OTHERS: u64 = 1 << 32;

/// Prints one object with a ratio for each fault.
pub fn measure(options: &Options) -> Result<()> {
    settle_environment();
    let engine = mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal).build()?;
    let region = engine.register(Region::alloc(2 * PAGE)?)?;
    let well = Process::start(0, None, Arc::default())?;
    let segment = engine.open_segment(&well.info.segment, LIMIT)?;
    let mut out = Map::new();
    for (fault, name) in FAULTS {
        let (mut undisturbed, mut disturbed) = (Vec::new(), Vec::new());
        for round in 0..options.rounds {
            let sick = Process::start(1 + round, None, Arc::default())?;
            let others = engine.reopen_segment(&sick.info.segment, LIMIT)?;
            let ring = Ring::builder().build(256, &engine)?;
            let mut pair = Pair { ring, region: &region, well: (&segment, well.info.address), others: &others, out: 0 };
            // Connections are there, and the page faults are over.
            pair.others(sick.info.address)?;
            pair.round(100, || None)?;
            undisturbed.push(pair.round(options.entries, || None)?);
            let address = match fault {
                Fault::Stopped => {
                    sick.signal(libc::SIGSTOP);
                    sick.info.address
                }
                Fault::Dead => {
                    sick.kill();
                    sick.info.address
                }
                Fault::BadTargets => 8,
            };
            disturbed.push(pair.round(options.entries, || Some(address))?);
            sick.signal(libc::SIGCONT);
            eprintln!(
                "{name}, round {}: 99 % within {:.1} us, undisturbed {:.1} us",
                round + 1,
                disturbed[disturbed.len() - 1],
                undisturbed[undisturbed.len() - 1]
            );
            let end = pair.ring.close(LIMIT);
            ensure!(end.unquiet == 0, "{} entries of a {name} peer did not end", end.unquiet);
        }
        let (undisturbed, disturbed) = (median(&mut undisturbed), median(&mut disturbed));
        let result =
            json!({ "undisturbed_p99_us": undisturbed, "p99_us": disturbed, "ratio": disturbed / undisturbed });
        out.insert(name.to_owned(), result);
    }
    println!("{}", Value::Object(out));
    Ok(())
}

/// Two peers on one ring.
struct Pair<'a> {
    ring: Ring,
    region: &'a Registered,
    well: (&'a Segment, u64),
    others: &'a Segment,
    /// Entries for the other that are outstanding.
    out: usize,
}

impl Pair<'_> {
    /// Writes pages to the first peer, one behind the other; the 99th percentile of their times, in microseconds. Meanwhile
    /// as many entries as there may be are outstanding for the other one, if there is an address for them.
    fn round(&mut self, entries: u32, address: impl Fn() -> Option<u64>) -> Result<f64> {
        let mut times = Vec::new();
        for entry in 0..entries {
            if let Some(address) = address().filter(|_| self.out < SICK) {
                self.others(address)?;
            }
            let start = Instant::now();
            let local = self.region.slice(0..PAGE)?;
            let write = opcode::Write::new(local, self.well.0.at(self.well.1 + u64::from(entry) % 8 * PAGE as u64));
            self.ring.submission().push(write.build())?;
            self.ring.submit()?;
            let mut ended = false;
            while !ended {
                self.ring.wait_timeout(1, LIMIT).context("an entry for the peer that is well does not end")?;
                for cqe in self.ring.completion() {
                    if cqe.user_data() == OTHERS {
                        self.out -= 1;
                    } else {
                        cqe.result()?;
                        ended = true;
                    }
                }
            }
            times.push(start.elapsed());
        }
        times.sort_unstable();
        let p99: Duration = times[times.len() * 99 / 100];
        Ok(p99.as_nanos() as f64 / 1e3)
    }

    fn others(&mut self, address: u64) -> Result<()> {
        let write = opcode::Write::new(self.region.slice(PAGE..2 * PAGE)?, self.others.at(address));
        self.ring.submission().push(write.build().user_data(OTHERS))?;
        self.ring.submit()?;
        self.out += 1;
        Ok(())
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
