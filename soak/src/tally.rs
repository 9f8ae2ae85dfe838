//! What was counted, by all threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

/// What must not happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anomaly {
    /// Bytes that nobody wrote there, or that are missing.
    Bytes,
    /// Bytes changed in a buffer after its entry's end.
    Touched,
    /// An entry has no completion.
    Lost,
    /// A completion that belongs to no outstanding entry.
    Doubled,
    /// Issued before its fences had signalled.
    Early,
    /// Something did not end.
    Hang,
    /// A result that has no cause.
    Result,
}

impl Anomaly {
    fn name(self) -> &'static str {
        match self {
            Anomaly::Bytes => "wrong_bytes",
            Anomaly::Touched => "touched_after_the_end",
            Anomaly::Lost => "lost",
            Anomaly::Doubled => "doubled",
            Anomaly::Early => "early",
            Anomaly::Hang => "hang",
            Anomaly::Result => "result_without_cause",
        }
    }
}

/// The counts. Shared by all threads.
#[derive(Debug, Default)]
pub struct Tally {
    operations: AtomicU64,
    verified: AtomicU64,
    kinds: Mutex<[BTreeMap<&'static str, u64>; 2]>,
}

/// Places in [`Tally::kinds`].
const FAULTS: usize = 0;
const ANOMALIES: usize = 1;
/// Anomalies that are told one by one; those behind are counted.
const TOLD: u64 = 20;

impl Tally {
    /// An entry has ended.
    pub fn operation(&self) {
        self.operations.fetch_add(1, Relaxed);
    }

    pub fn operations(&self) -> u64 {
        self.operations.load(Relaxed)
    }

    /// Bytes were compared with what they should be.
    pub fn verified(&self) {
        self.verified.fetch_add(1, Relaxed);
    }

    /// A fault is injected.
    pub fn fault(&self, kind: &'static str) {
        self.count(FAULTS, kind);
    }

    pub fn faults(&self) -> u64 {
        self.sum(FAULTS)
    }

    /// Something that must not happen has happened: says so and counts it.
    pub fn anomaly(&self, kind: Anomaly, what: std::fmt::Arguments<'_>) {
        self.count(ANOMALIES, kind.name());
        if self.anomalies() <= TOLD {
            eprintln!("ANOMALY {}: {what}", kind.name());
        }
    }

    pub fn anomalies(&self) -> u64 {
        self.sum(ANOMALIES)
    }

    fn count(&self, place: usize, kind: &'static str) {
        *self.kinds.lock().unwrap_or_else(PoisonError::into_inner)[place].entry(kind).or_default() += 1;
    }

    fn sum(&self, place: usize) -> u64 {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)[place].values().sum()
    }

    /// Everything as one object. What was not measured is null.
    pub fn report(&self, seed: u64, rss_start: Option<u64>, rss_end: Option<u64>) -> Value {
        let kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner).clone();
        json!({
            "operations": self.operations(),
            "faults": self.faults(),
            "anomalies": self.anomalies(),
            "rss_start_bytes": rss_start,
            "rss_end_bytes": rss_end,
            "seed": seed,
            "verified": self.verified.load(Relaxed),
            "faults_by_kind": kinds[FAULTS],
            "anomalies_by_kind": kinds[ANOMALIES],
        })
    }
}

/// What this process has in memory, in bytes.
pub fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
