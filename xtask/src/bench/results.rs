//! What the parts said, put together.

use serde_json::{Value, json};

use super::targets::{IDS, Id};

/// The state of the machine that a result belongs to: how far the two cores are from each other, where that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Near,
    Far,
    Any,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Near => "near",
            State::Far => "far",
            State::Any => "any",
        }
    }

    fn parse(name: &str) -> Option<State> {
        [State::Near, State::Far, State::Any].into_iter().find(|state| state.name() == name)
    }
}

/// One result.
#[derive(Clone, Debug)]
pub struct Line {
    pub id: String,
    pub state: State,
    pub value: Option<f64>,
    pub unit: String,
    pub peer: Option<String>,
    pub peer_value: Option<f64>,
    /// More is better, as for rates.
    pub higher: bool,
}

impl Line {
    /// How many times better than the peer: value over peer's for rates, the inverse for times and sizes.
    pub fn ratio(&self) -> Option<f64> {
        let (value, peer) = (self.value?, self.peer_value?);
        let (over, under) = if self.higher { (value, peer) } else { (peer, value) };
        Some(over / under).filter(|ratio| ratio.is_finite())
    }

    /// A value by itself, in any state of the machine.
    pub fn alone(id: String, value: f64, unit: &str) -> Line {
        let (state, unit) = (State::Any, unit.to_owned());
        Line { id, state, value: Some(value), unit, peer: None, peer_value: None, higher: false }
    }

    fn parse(line: &Value) -> Option<Line> {
        Some(Line {
            id: line["id"].as_str()?.to_owned(),
            state: State::parse(line["state"].as_str()?)?,
            value: line["value"].as_f64(),
            unit: line["unit"].as_str()?.to_owned(),
            peer: line["peer"].as_str().map(str::to_owned),
            peer_value: line["peer_value"].as_f64(),
            // Results that are read back from a file do not say; their ratio does.
            higher: line["higher"].as_bool().or_else(|| higher_by_ratio(line)).unwrap_or(false),
        })
    }

    pub fn json(&self) -> Value {
        json!({
            "id": self.id, "state": self.state.name(), "value": self.value, "unit": self.unit, "peer": self.peer,
            "peer_value": self.peer_value, "ratio": self.ratio(),
        })
    }
}

fn higher_by_ratio(line: &Value) -> Option<bool> {
    let (ratio, value, peer) = (line["ratio"].as_f64()?, line["value"].as_f64()?, line["peer_value"].as_f64()?);
    Some((ratio - value / peer).abs() <= (ratio - peer / value).abs())
}

/// A point of a plot's curve.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    pub plot: String,
    pub curve: String,
    pub state: State,
    pub x: f64,
    pub y: f64,
}

/// A latency histogram: each bin's upper edge in microseconds, and its percentage of all.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    pub curve: String,
    pub state: State,
    pub bins: Vec<(f64, f64)>,
}

/// Everything of one run.
#[derive(Debug, Default)]
pub struct Results {
    pub machine: Value,
    pub lines: Vec<Line>,
    pub points: Vec<Point>,
    pub histograms: Vec<Histogram>,
    pub notes: Vec<String>,
    /// Times of the fixed probe loop, in nanoseconds.
    pub probes: Vec<f64>,
    /// Round trips of a word between the two cores, in nanoseconds.
    pub ping_pongs: Vec<f64>,
    /// For each measurement whose threads have a core each: whether somebody took one away.
    pub disturbed: Vec<bool>,
    /// Seconds spent in waiting for NEAR.
    pub waited: f64,
    noise: Option<f64>,
}

impl Results {
    /// Takes what one part has written to its standard output; other programs' lines may be between.
    pub fn take(&mut self, output: &str) {
        for line in output.lines() {
            let Some((mark, text)) = line.split_once(": ") else { continue };
            let Ok(Value::Object(said)) = serde_json::from_str(text) else { continue };
            for (key, value) in said {
                match mark {
                    "bench" => self.take_one(&key, &value),
                    "simulation" => self.take_simulated(key, &value),
                    _ => {}
                }
            }
        }
    }

    fn take_simulated(&mut self, key: String, value: &Value) {
        if let Some(id) = Id::find(&key)
            && let Some(value) = value.as_f64()
        {
            self.lines.push(Line::alone(key, value, id.unit));
        }
    }

    fn take_one(&mut self, kind: &str, value: &Value) {
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
        let state = || State::parse(&text("state")).unwrap_or(State::Any);
        match kind {
            "result" => self.lines.extend(Line::parse(value)),
            "note" => self.notes.extend(value.as_str().map(str::to_owned)),
            "probe" => self.probes.extend(value.as_f64()),
            "ping_pong" => self.ping_pongs.extend(value.as_f64()),
            "disturbed" => self.disturbed.extend(value.as_bool()),
            "waited" => self.waited += value.as_f64().unwrap_or(0.0),
            "point" => {
                if let (Some(x), Some(y)) = (value["x"].as_f64(), value["y"].as_f64()) {
                    self.points.push(Point { plot: text("plot"), curve: text("curve"), state: state(), x, y });
                }
            }
            "histogram" => {
                let pair = |bin: &Value| Some((bin[0].as_f64()?, bin[1].as_f64()?));
                let bins = value["bins"].as_array().into_iter().flatten().filter_map(pair).collect();
                self.histograms.push(Histogram { curve: text("curve"), state: state(), bins });
            }
            _ => {}
        }
    }

    /// Adds a line without a value for every result that is missing, and puts all in the order of the list.
    pub fn complete(&mut self) {
        for Id { name, unit, .. } in IDS {
            if !self.lines.iter().any(|line| line.id == name) {
                let (id, unit) = (name.to_owned(), unit.to_owned());
                let empty =
                    Line { id, state: State::Any, value: None, unit, peer: None, peer_value: None, higher: false };
                self.lines.push(empty);
            }
        }
        let place = |line: &Line| IDS.iter().position(|id| id.name == line.id).unwrap_or(IDS.len());
        self.lines.sort_by(|a, b| (place(a), &a.id, a.state).cmp(&(place(b), &b.id, b.state)));
    }

    /// The interquartile range over the median of the probe loop's times.
    pub fn noise(&self) -> Option<f64> {
        self.noise.or_else(|| spread(&self.probes))
    }

    pub fn json(&self) -> Value {
        let lines: Vec<_> = self.lines.iter().map(Line::json).collect();
        json!({ "machine": self.machine, "noise": self.noise(), "results": lines })
    }

    /// Results that [`json`](Self::json) made.
    pub fn from_json(all: &Value) -> Option<Results> {
        let lines = all["results"].as_array()?.iter().map(Line::parse).collect::<Option<Vec<_>>>()?;
        Some(Results { machine: all["machine"].clone(), noise: all["noise"].as_f64(), lines, ..Results::default() })
    }
}

/// Interquartile range over median.
fn spread(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = |quarter: usize| values.get(quarter * values.len().checked_sub(1)? / 4).copied();
    Some((at(3)? - at(1)?) / at(2)?)
}

/// The middle one, or the upper of the middle two.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = r#"
noise from elsewhere
bench: {"probe":100.0}
bench: {"probe":104.0}
bench: {"probe":102.0}
bench: {"probe":101.0}
bench: {"probe":300.0}
bench: {"result":{"id":"nop_batch32_vs_rtrb","state":"near","value":30.0,"unit":"M/s","peer":"rtrb","peer_value":60.0,"higher":true}}
bench: {"result":{"id":"nop_depth1_vs_io_uring","state":"far","value":100.0,"unit":"ns","peer":"io_uring","peer_value":300.0,"higher":false}}
bench: {"point":{"plot":"batch","curve":"moonring","state":"near","x":32,"y":30.5}}
bench: {"histogram":{"curve":"signal","state":"near","bins":[[0.2,60.0],[0.4,40.0]]}}
bench: {"note":"something"}
bench: not json
simulation: {"entries":1000000,"sim_1000_peers_mops":2.5,"sim_1000_peers_worst_share":null}
"#;

    #[test]
    fn what_parts_say_is_put_together() {
        let mut results = Results::default();
        results.take(SAID);
        results.complete();
        let line = |id: &str| results.lines.iter().find(|line| line.id == id).unwrap();
        assert_eq!(line("nop_batch32_vs_rtrb").ratio(), Some(0.5));
        assert_eq!(line("nop_depth1_vs_io_uring").ratio(), Some(3.0));
        assert_eq!(line("nop_depth1_vs_io_uring").state, State::Far);
        assert!(IDS.iter().all(|id| results.lines.iter().any(|line| line.id == id.name)));
        assert_eq!(line("te_4k").json()["value"], Value::Null);
        assert_eq!((line("sim_1000_peers_mops").value, line("sim_1000_peers_worst_share").value), (Some(2.5), None));
        assert_eq!(results.points.len(), 1);
        assert_eq!(results.histograms[0].bins, [(0.2, 60.0), (0.4, 40.0)]);
        assert_eq!(results.notes, ["something"]);
        // Sorted: 100, 101, 102, 104, 300.
        assert_eq!(results.noise(), Some(3.0 / 102.0));
    }

    #[test]
    fn results_read_back_as_themselves() {
        let mut results = Results::default();
        results.take(SAID);
        results.complete();
        let again = Results::from_json(&results.json()).unwrap();
        assert_eq!(again.json(), results.json());
    }

    #[test]
    fn nothing_has_no_spread() {
        assert_eq!((spread(&[]), spread(&[2.0])), (None, Some(0.0)));
    }
}
