//! The results: one line of JSON, or some lines to read.

use std::collections::HashSet;
use std::time::Duration;

use serde_json::json;

use crate::args::Args;
use crate::common::times::Times;

/// What one run has shown.
pub struct Outcome {
    /// The prefix hashes that were asked for.
    pub keys: HashSet<u64>,
    /// Pages loaded from the Store.
    pub gets: u64,
    /// Those that did not hold the right bytes when their request went on.
    pub corrupted: u64,
    /// Pages stored.
    pub puts: u64,
    /// Blocks that the Store was said to have, and that were gone when they were to be loaded.
    pub lost: u64,
    /// Completions of the Store's entries.
    pub operations: u64,
    /// From issued to reaped, of the loads: without the wait for their fences.
    pub get_times: Times,
    pub wall: Duration,
}

impl Outcome {
    pub fn new() -> Outcome {
        Outcome {
            keys: HashSet::new(),
            gets: 0,
            corrupted: 0,
            puts: 0,
            lost: 0,
            operations: 0,
            get_times: Times::new(),
            wall: Duration::ZERO,
        }
    }

    fn operations_per_second(&self) -> f64 {
        self.operations as f64 / self.wall.as_secs_f64()
    }
}

/// All results as one line of JSON.
pub fn json(args: &Args, fenced: &Outcome, control: &Outcome) -> String {
    let results = json!({
        "keys": fenced.keys.len(),
        "gets": fenced.gets,
        "bytes": fenced.gets * args.page_size as u64,
        "verified": fenced.gets - fenced.corrupted,
        "corrupted_with_fences": fenced.corrupted,
        "corrupted_without_fences": control.corrupted,
        "operations_per_second": fenced.operations_per_second(),
        "get_us": fenced.get_times.json(),
    });
    results.to_string()
}

/// All results as text.
pub fn text(args: &Args, fenced: &Outcome, control: &Outcome) -> String {
    let Args { requests, in_flight, page_size, .. } = args;
    format!(
        "{requests} requests of {blocks} blocks, pages of {page_size} bytes, {in_flight} requests in flight, {keys} keys\n\
         with fences: {bad} of {gets} loads corrupted; {puts} pages stored, {lost} lost before they were loaded\n\
         \x20 {rate:.0} operations/s ({wall:.2} s)\n\
         \x20 loads, issued to reaped  {times}\n\
         without fences: {control_bad} of {control_gets} loads corrupted",
        blocks = args.blocks(),
        keys = fenced.keys.len(),
        bad = fenced.corrupted,
        gets = fenced.gets,
        puts = fenced.puts,
        lost = fenced.lost,
        rate = fenced.operations_per_second(),
        wall = fenced.wall.as_secs_f64(),
        times = fenced.get_times.text(),
        control_bad = control.corrupted,
        control_gets = control.gets,
    )
}
