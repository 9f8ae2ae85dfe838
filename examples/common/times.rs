//! Distributions of times.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// A distribution of times.
pub struct Times(Histogram<u64>);

impl Times {
    pub fn new() -> Times {
        // A minute is longer than any transfer may take.
        Times(Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are sound"))
    }

    pub fn record(&mut self, time: Duration) {
        self.0.saturating_record(time.as_nanos() as u64);
    }

    /// The median, the 99th percentile and the maximum, in microseconds.
    fn micros(&self) -> [f64; 3] {
        [self.0.value_at_quantile(0.5), self.0.value_at_quantile(0.99), self.0.max()].map(|nanos| nanos as f64 / 1e3)
    }

    pub fn json(&self) -> Value {
        let [p50, p99, max] = self.micros();
        json!({ "p50": p50, "p99": p99, "max": max })
    }

    pub fn text(&self) -> String {
        let [p50, p99, max] = self.micros();
        format!("median {p50:9.1} µs, 99 % below {p99:9.1} µs, longest {max:9.1} µs")
    }
}
