//! Rings' counts as Prometheus takes them (feature `prometheus`).
//!
//! [`Rings`] is a collector of the `prometheus-client` crate: at each scrape it asks the rings that it was given for their
//! [`Stats`], so nothing is counted twice and pushing pays nothing for it. Register it with an application's registry, or let
//! it write the whole text itself:
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use moonring::prometheus::Rings;
//! use moonring::{Engine, Ring, opcode};
//!
//! let mut ring = Ring::builder().build(64, &Engine::loopback())?;
//! let rings = Rings::new();
//! rings.add("loads", ring.controller());
//! ring.submission().push(opcode::Nop::new().build())?;
//! ring.submit_and_wait(1)?;
//! // Serve it as `prometheus::CONTENT_TYPE`.
//! assert!(rings.text().contains("moonring_entries_ended_total{ring=\"loads\",outcome=\"ok\"} 1\n"));
//! # Ok(())
//! # }
//! ```
//!
//! | metric | type | labels | what it is |
//! | --- | --- | --- | --- |
//! | `moonring_ring_up` | gauge | ring | 1 if the ring's poller answered, or the ring is closed; without an answer the ring has no other sample |
//! | `moonring_ring_capacity` | gauge | ring | [`Stats::capacity`] |
//! | `moonring_entries_accepted_total` | counter | ring | [`Counts::accepted`] |
//! | `moonring_entries_ended_total` | counter | ring, outcome | [`Counts::ok`], [`failed`](Counts::failed), [`cancelled`](Counts::cancelled) |
//! | `moonring_entries_ended_by_stage_total` | counter | ring, stage | [`Counts::stages`] |
//! | `moonring_entries_silent_total` | counter | ring | [`Counts::silent`] |
//! | `moonring_entries_outstanding` | gauge | ring | [`Counts::outstanding`] |
//! | `moonring_entries_overdue` | gauge | ring | [`Counts::overdue`] |
//! | `moonring_transferred_bytes_total` | counter | ring, direction | [`Counts::read_bytes`], [`written_bytes`](Counts::written_bytes) |
//!
//! The same from `moonring_entries_` and `moonring_transferred_` on exist as `moonring_peer_entries_` and
//! `moonring_peer_transferred_` with a further label `peer`, the segment's name. All of one ring's samples are of one moment.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, prometheus_text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::ring::stats::StageCounts;
use crate::{Controller, Counts, Stats};

/// The `Content-Type` of [`Rings::text`]: Prometheus's own text format, version 0.0.4.
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// The rings to tell about. Clones are the same. See the [module](self).
#[derive(Clone, Debug, Default)]
pub struct Rings {
    rings: Arc<Mutex<Vec<(String, Controller)>>>,
}

impl Rings {
    /// None yet.
    pub fn new() -> Rings {
        Rings::default()
    }

    /// Tells about a ring from now on, under a name of the caller's, in the place of one that has the name already. A ring that
    /// is closed goes on with its last counts until it is [removed](Self::remove): counters do not go back.
    pub fn add(&self, name: &str, ring: Controller) {
        let mut rings = self.lock();
        match rings.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => *known = ring,
            None => rings.push((name.to_owned(), ring)),
        }
    }

    /// Tells about the ring no longer. True if there was one of the name.
    pub fn remove(&self, name: &str) -> bool {
        let mut rings = self.lock();
        let before = rings.len();
        rings.retain(|(known, _)| known != name);
        rings.len() < before
    }

    /// All rings' counts in Prometheus's text format. Blocks for a turn or two of each ring's poller, at most 1 s for each.
    pub fn text(&self) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self.clone()));
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry).expect("writing to a string does not fail");
        text
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(String, Controller)>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A label's name and its value.
type Label<'a> = (&'static str, &'a str);

/// A value, with a label if the metric has several.
type Sample = (Option<Label<'static>>, u64);

/// Counts with the labels of those whose they are.
type Labelled<'a> = (Vec<Label<'a>>, &'a Counts);

/// One metric of [`Counts`]: its name behind the prefix, what it is, and its samples.
struct Metric {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    samples: fn(&Counts) -> Vec<Sample>,
}

const METRICS: [Metric; 7] = [
    Metric {
        name: "entries_accepted",
        help: "Entries accepted and submitted",
        kind: MetricType::Counter,
        samples: |counts| vec![(None, counts.accepted)],
    },
    Metric {
        name: "entries_ended",
        help: "Entries that have ended, by how",
        kind: MetricType::Counter,
        samples: |counts| {
            let outcomes = [("ok", counts.ok), ("failed", counts.failed), ("cancelled", counts.cancelled)];
            outcomes.map(|(outcome, count)| (Some(("outcome", outcome)), count)).into()
        },
    },
    Metric {
        name: "entries_ended_by_stage",
        help: "Entries that have ended, by the stage that ended them",
        kind: MetricType::Counter,
        samples: |counts| {
            let names = ["done", "gate", "issue", "transfer", "cancel", "shutdown"];
            let stages = StageCounts::STAGES.map(|stage| counts.stages.of(stage));
            names.into_iter().zip(stages).map(|(name, count)| (Some(("stage", name)), count)).collect()
        },
    },
    Metric {
        name: "entries_silent",
        help: "Entries that have ended without a completion",
        kind: MetricType::Counter,
        samples: |counts| vec![(None, counts.silent)],
    },
    Metric {
        name: "entries_outstanding",
        help: "Entries without their last completion",
        kind: MetricType::Gauge,
        samples: |counts| vec![(None, counts.outstanding)],
    },
    Metric {
        name: "entries_overdue",
        help: "Outstanding entries whose result is known while the transport may still touch their local range",
        kind: MetricType::Gauge,
        samples: |counts| vec![(None, counts.overdue)],
    },
    Metric {
        name: "transferred_bytes",
        help: "Bytes moved by transfers that ended well",
        kind: MetricType::Counter,
        samples: |counts| {
            let directions = [("read", counts.read_bytes), ("write", counts.written_bytes)];
            directions.map(|(direction, bytes)| (Some(("direction", direction)), bytes)).into()
        },
    },
];

impl Collector for Rings {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        // Asked without the lock: one that does not answer holds up nobody who adds or removes.
        let rings = self.lock().clone();
        let asked: Vec<_> = rings.iter().map(|(name, ring)| (name.as_str(), ring.stats().ok())).collect();
        let answered = || asked.iter().filter_map(|(name, stats)| Some((*name, stats.as_ref()?)));

        let help = "Whether the ring's poller answers";
        let mut up = encoder.encode_descriptor("moonring_ring_up", help, None, MetricType::Gauge)?;
        for (name, stats) in &asked {
            sample(&mut up, &[("ring", name)], &MetricType::Gauge, u64::from(stats.is_some()))?;
        }
        let help = "Most entries that can be outstanding";
        let mut capacity = encoder.encode_descriptor("moonring_ring_capacity", help, None, MetricType::Gauge)?;
        for (name, stats) in answered() {
            sample(&mut capacity, &[("ring", name)], &MetricType::Gauge, u64::from(stats.capacity))?;
        }
        let rings: Vec<Labelled<'_>> = answered().map(|(name, stats)| (vec![("ring", name)], &stats.total)).collect();
        let peers: Vec<Labelled<'_>> = answered().flat_map(|(name, stats)| peers_of(name, stats)).collect();
        encode_all(&mut encoder, "moonring_", &rings)?;
        encode_all(&mut encoder, "moonring_peer_", &peers)
    }
}

fn peers_of<'a>(ring: &'a str, stats: &'a Stats) -> impl Iterator<Item = Labelled<'a>> {
    stats.peers.iter().map(move |peer| (vec![("ring", ring), ("peer", &*peer.name)], &peer.counts))
}

fn encode_all(encoder: &mut DescriptorEncoder<'_>, prefix: &str, all: &[Labelled<'_>]) -> fmt::Result {
    for Metric { name, help, kind, samples } in &METRICS {
        let name = format!("{prefix}{name}");
        let mut metric = encoder.encode_descriptor(&name, help, None, *kind)?;
        for (labels, counts) in all {
            for (label, value) in samples(counts) {
                let labels: Vec<Label<'_>> = labels.iter().copied().chain(label).collect();
                sample(&mut metric, &labels, kind, value)?;
            }
        }
    }
    Ok(())
}

fn sample(metric: &mut MetricEncoder<'_>, labels: &[Label<'_>], kind: &MetricType, value: u64) -> fmt::Result {
    let mut encoder = metric.encode_family(&labels)?;
    match kind {
        // The encoder adds `_total`.
        MetricType::Counter => encoder.encode_counter::<[(&str, &str); 0], _, u64>(&value, None),
        _ => encoder.encode_gauge(&value),
    }
}
