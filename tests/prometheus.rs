//! The Prometheus text: read back by a parser of its rules, it has the counts.
#![cfg(feature = "prometheus")]

mod common;

use std::collections::{BTreeMap, HashMap};

use common::{LIMIT, Setup};
use moonring::opcode::{Nop, Wait, Write};
use moonring::prometheus::{CONTENT_TYPE, Rings};
use moonring::sim::Sim;
use moonring::{Counts, Engine, Ring, fence};

/// A metric family: its type, and its samples by their labels.
#[derive(Debug, Default)]
struct Family {
    kind: String,
    samples: HashMap<BTreeMap<String, String>, f64>,
}

/// Reads Prometheus's text format, version 0.0.4, and holds it to its rules.
fn parse(text: &str) -> HashMap<String, Family> {
    let mut families: HashMap<String, Family> = HashMap::new();
    let mut current = String::new();
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c == '_') && !name.is_empty();
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            current = help.split(' ').next().unwrap().to_owned();
            assert!(is_name(&current), "{line}");
            let known = families.insert(current.clone(), Family::default());
            assert!(known.is_none(), "{current} comes twice");
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert_eq!(name, current);
            assert!(["counter", "gauge"].contains(&kind), "{line}");
            // A counter's name ends so, and no other's does.
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
            families.get_mut(name).unwrap().kind = kind.to_owned();
        } else {
            assert!(!line.starts_with('#'), "{line}");
            let (series, value) = line.rsplit_once(' ').unwrap();
            let (name, labels) = series.split_once('{').unwrap();
            assert_eq!(name, current, "a family's samples come together");
            let labels = parse_labels(labels.strip_suffix('}').unwrap());
            let known = families.get_mut(name).unwrap().samples.insert(labels, value.parse().unwrap());
            assert!(known.is_none(), "{line} comes twice");
        }
    }
    families
}

/// `a="x",b="y\"z"`.
fn parse_labels(mut text: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    while !text.is_empty() {
        let (name, rest) = text.split_once("=\"").unwrap();
        let mut value = String::new();
        let mut chars = rest.char_indices();
        let end = loop {
            match chars.next().unwrap() {
                (at, '"') => break at,
                (_, '\\') => match chars.next().unwrap().1 {
                    'n' => value.push('\n'),
                    c @ ('"' | '\\') => value.push(c),
                    other => panic!("\\{other} is no escape"),
                },
                (_, c) => value.push(c),
            }
        };
        assert!(labels.insert(name.to_owned(), value).is_none(), "{name} comes twice");
        text = rest[end + 1..].trim_start_matches(',');
    }
    labels
}

/// A sample's value.
fn value(families: &HashMap<String, Family>, name: &str, labels: &[(&str, &str)]) -> f64 {
    let labels = labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let family = families.get(name).unwrap_or_else(|| panic!("no {name}"));
    *family.samples.get(&labels).unwrap_or_else(|| panic!("{name}: no {labels:?} in {family:?}"))
}

/// Everything of one ring or peer.
fn check(families: &HashMap<String, Family>, prefix: &str, labels: &[(&str, &str)], counts: &Counts) {
    let get = |name: &str, more: Option<(&str, &str)>| {
        let labels: Vec<_> = labels.iter().copied().chain(more).collect();
        value(families, &format!("{prefix}{name}"), &labels) as u64
    };
    assert_eq!(get("entries_accepted_total", None), counts.accepted);
    assert_eq!(get("entries_silent_total", None), counts.silent);
    assert_eq!(get("entries_outstanding", None), counts.outstanding);
    assert_eq!(get("entries_overdue", None), counts.overdue);
    let outcomes = [("ok", counts.ok), ("failed", counts.failed), ("cancelled", counts.cancelled)];
    for (outcome, count) in outcomes {
        assert_eq!(get("entries_ended_total", Some(("outcome", outcome))), count, "{outcome}");
    }
    let stages = counts.stages;
    let stages =
        [("done", stages.done), ("gate", stages.gate), ("transfer", stages.transfer), ("cancel", stages.cancel)];
    for (stage, count) in stages {
        assert_eq!(get("entries_ended_by_stage_total", Some(("stage", stage))), count, "{stage}");
    }
    assert_eq!(get("transferred_bytes_total", Some(("direction", "read"))), counts.read_bytes);
    assert_eq!(get("transferred_bytes_total", Some(("direction", "write"))), counts.written_bytes);
}

#[test]
fn the_text_has_the_counts_of_every_ring_and_peer() {
    let mut s = Setup::loopback(16);
    let (_never, pending) = fence::host();
    let read = s.read(0, 100);
    s.push(read);
    let bad = Write::new(s.ours.slice(0..10).unwrap(), s.peer.at(8)).build();
    s.push(bad);
    s.push(Wait::new().build().wait(&pending));
    s.reap(2);
    let span = std::time::Duration::from_secs(3600);
    let mut other = Setup::simulated(8, Sim::new(1).delay(span..span));
    let read = other.read(0, 5).transfer_limit(std::time::Duration::from_millis(1));
    other.push(read);
    other.reap(1);

    // A name with everything that has to be escaped.
    let odd = "a \"b\" \\c\nd";
    let rings = Rings::new();
    rings.add(odd, s.ring.controller());
    rings.add("other", other.ring.controller());
    let text = rings.text();
    println!("{text}");
    let families = parse(&text);
    for (name, ring, peer) in [(odd, &s.ring, s.peer.name()), ("other", &other.ring, other.peer.name())] {
        let stats = ring.stats().unwrap();
        assert_eq!(value(&families, "moonring_ring_up", &[("ring", name)]), 1.0);
        assert_eq!(value(&families, "moonring_ring_capacity", &[("ring", name)]), f64::from(stats.capacity));
        check(&families, "moonring_", &[("ring", name)], &stats.total);
        check(&families, "moonring_peer_", &[("ring", name), ("peer", peer)], &stats.peers[0].counts);
    }
    assert_eq!(value(&families, "moonring_entries_overdue", &[("ring", "other")]), 1.0);
    assert_eq!(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8");
}

#[test]
fn closed_rings_stay_until_they_are_removed_and_names_can_be_taken_over() {
    let mut ring = Ring::builder().build(4, &Engine::loopback()).unwrap();
    let rings = Rings::new();
    rings.add("loads", ring.controller());
    ring.submission().push(Nop::new().build()).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert!(ring.close(LIMIT).finished);
    let accepted =
        |rings: &Rings| value(&parse(&rings.text()), "moonring_entries_accepted_total", &[("ring", "loads")]);
    assert_eq!(accepted(&rings), 1.0);
    let next = Ring::builder().build(4, &Engine::loopback()).unwrap();
    rings.clone().add("loads", next.controller());
    assert_eq!(accepted(&rings), 0.0);
    assert!(rings.remove("loads") && !rings.remove("loads"));
    assert!(parse(&rings.text())["moonring_ring_up"].samples.is_empty());
}
