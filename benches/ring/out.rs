//! What a part has to say, a line each: `bench: ` and a JSON object. `cargo xtask bench` reads them; its source says what
//! becomes of each kind.

use serde_json::{Value, json};

pub fn say(kind: &str, value: Value) {
    println!("bench: {}", json!({ kind: value }));
}

/// A result. `higher`: more is better, as for rates. `value` and `peer` are the medians that are compared.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    pub id: &'a str,
    pub state: &'a str,
    pub value: Option<f64>,
    pub unit: &'a str,
    pub peer: Option<(&'a str, f64)>,
    pub higher: bool,
}

impl Line<'_> {
    pub fn say(&self) {
        let (peer, peer_value) = self.peer.unzip();
        let Line { id, state, value, unit, higher, .. } = self;
        let line = json!({
            "id": id, "state": state, "value": value, "unit": unit, "peer": peer, "peer_value": peer_value,
            "higher": higher,
        });
        say("result", line);
    }
}

/// A value by itself that does not depend on the machine's state.
pub fn alone(id: &str, value: f64, unit: &str) {
    Line { id, state: "any", value: Some(value), unit, peer: None, higher: false }.say();
}

/// Something that a reader of the results should know.
pub fn note(text: &str) {
    say("note", json!(text));
}

/// A point of a plot's curve.
pub fn point(plot: &str, curve: &str, state: &str, x: f64, y: f64) {
    say("point", json!({ "plot": plot, "curve": curve, "state": state, "x": x, "y": y }));
}

/// A latency histogram: for bins that grow by a quarter of a doubling, their upper edge in microseconds and their percentage of
/// all.
pub fn histogram(curve: &str, state: &str, nanos: &hdrhistogram::Histogram<u64>) {
    let mut bins = Vec::new();
    let (mut low, mut edge) = (0, nanos.min().max(1) as f64);
    while low <= nanos.max() {
        let high = edge as u64;
        if high >= low {
            let share = 100.0 * nanos.count_between(low, high) as f64 / nanos.len() as f64;
            bins.push((high as f64 / 1e3, share));
            low = high + 1;
        }
        edge *= 2f64.powf(0.25);
    }
    say("histogram", json!({ "curve": curve, "state": state, "bins": bins }));
}
