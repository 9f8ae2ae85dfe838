//! The results: one line of JSON, or some lines to read.

use std::time::Duration;

use serde_json::json;

use crate::args::Args;
use crate::common::times::Times;

/// What one run has shown.
pub struct Outcome {
    /// Pages loaded.
    pub pages: u64,
    /// Those that did not hold the loaded bytes afterwards.
    pub corrupted: u64,
    pub wall: Duration,
    /// From taken to issued: the wait for the fence.
    pub gate: Times,
    /// From issued to landed.
    pub wire: Times,
    /// From before the push to reaped.
    pub total: Times,
}

impl Outcome {
    /// Nothing loaded yet.
    pub fn new() -> Outcome {
        Outcome {
            pages: 0,
            corrupted: 0,
            wall: Duration::ZERO,
            gate: Times::new(),
            wire: Times::new(),
            total: Times::new(),
        }
    }

    fn gigabytes_per_second(&self, page_size: usize) -> f64 {
        (self.pages * page_size as u64) as f64 / 1e9 / self.wall.as_secs_f64()
    }
}

/// All results as one line of JSON.
pub fn json(args: &Args, fenced: &Outcome, control: &Outcome) -> String {
    let results = json!({
        "transport": args.transport.name(),
        "steps": args.steps,
        "pages": fenced.pages,
        "bytes": fenced.pages * args.page_size as u64,
        "verified": fenced.pages - fenced.corrupted,
        "corrupted_with_fences": fenced.corrupted,
        "corrupted_without_fences": control.corrupted,
        "gate_us": fenced.gate.json(),
        "wire_us": fenced.wire.json(),
        "total_us": fenced.total.json(),
        "gigabytes_per_second": fenced.gigabytes_per_second(args.page_size),
    });
    results.to_string()
}

/// All results as text.
pub fn text(args: &Args, fenced: &Outcome, control: &Outcome) -> String {
    let Args { steps, pages_per_step, page_size, depth, .. } = args;
    format!(
        "{transport}: {steps} steps of {pages_per_step} pages of {page_size} bytes, {depth} steps in flight\n\
         with fences: {bad} of {pages} pages corrupted; {speed:.2} GB/s ({wall:.2} s)\n\
         \x20 taken to issued   {gate}\n\
         \x20 issued to landed  {wire}\n\
         \x20 push to reaped    {total}\n\
         without fences: {control_bad} of {pages} pages corrupted",
        transport = args.transport.name(),
        bad = fenced.corrupted,
        pages = fenced.pages,
        speed = fenced.gigabytes_per_second(*page_size),
        wall = fenced.wall.as_secs_f64(),
        gate = fenced.gate.text(),
        wire = fenced.wire.text(),
        total = fenced.total.text(),
        control_bad = control.corrupted,
    )
}
