//! The report: one HTML file with the table and the plots in it.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use super::results::{Results, State};
use super::table;
use super::targets::short;

const STYLE: &str = "body{font:14px sans-serif;max-width:1100px;margin:2em auto}table{border-collapse:collapse}\
    td,th{padding:2px 8px;text-align:left;border-bottom:1px solid #ddd}.MISSED{color:#b00}.met{color:#070}";
const SIZE: (u32, u32) = (1000, 420);
const COLOURS: [RGBColor; 6] =
    [RGBColor(200, 30, 30), BLUE, RGBColor(90, 90, 220), RGBColor(20, 140, 60), RGBColor(220, 140, 0), BLACK];

/// A curve's name and its points.
type Curve = (String, Vec<(f64, f64)>);

/// What a plot shows.
struct Plot {
    title: String,
    x: String,
    y: String,
    curves: Vec<Curve>,
    /// Counts and rates over powers of ten.
    log_y: bool,
}

pub fn html(results: &Results) -> Result<String> {
    let mut html =
        format!("<!doctype html><meta charset=\"utf-8\"><title>moonring bench</title><style>{STYLE}</style>");
    let _ = write!(html, "<h1>moonring bench</h1><p>{}</p>", escape(&results.machine.to_string()));
    let _ = write!(html, "<p>{}<br>{}</p>", escape(&table::verdicts(results)), escape(&table::noise(results)));
    html.push_str("<table><tr><th>id<th>state<th>value<th>unit<th>peer<th>ratio<th>target<th></tr>");
    for line in &results.lines {
        let cells = table::cells(line);
        let _ = write!(html, "<tr class=\"{}\">", cells[7]);
        for cell in &cells {
            let _ = write!(html, "<td>{}", escape(cell));
        }
        html.push_str("</tr>");
    }
    html.push_str("</table><ul>");
    for note in &results.notes {
        let _ = write!(html, "<li>{}", escape(note));
    }
    html.push_str("</ul>");
    for plot in plots(results) {
        html.push_str(&draw(&plot)?);
        html.push_str("<p>");
        for ((name, _), RGBColor(red, green, blue)) in plot.curves.iter().zip(COLOURS.iter().cycle()) {
            let _ = write!(html, "<b style=\"color:rgb({red},{green},{blue})\">— {}</b> &nbsp; ", escape(name));
        }
    }
    Ok(html)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Every plot that there are points for.
fn plots(results: &Results) -> Vec<Plot> {
    let mut plots = Vec::new();
    for state in [State::Near, State::Far, State::Any] {
        let place = if state == State::Any { String::new() } else { format!(", cores {}", state.name()) };
        let mut named: BTreeMap<&str, Vec<Curve>> = BTreeMap::new();
        for point in results.points.iter().filter(|point| point.state == state) {
            let curves = named.entry(&point.plot).or_default();
            match curves.iter_mut().find(|(name, _)| *name == point.curve) {
                Some((_, points)) => points.push((point.x, point.y)),
                None => curves.push((point.curve.clone(), vec![(point.x, point.y)])),
            }
        }
        for (name, mut curves) in named {
            curves.iter_mut().for_each(|(_, points)| points.sort_by(|a, b| a.0.total_cmp(&b.0)));
            let (title, x, y, log_y) = match name {
                "batch" => ("throughput against batch", "entries in a batch", "million operations a second", true),
                "waiting" => ("cost of a turn against waiting entries", "entries waiting", "ns a turn", false),
                "ring memory" => ("memory against capacity", "entries", "bytes", true),
                other => (other, "", "", true),
            };
            let title = format!("{title}{place}");
            plots.push(Plot { title, x: x.into(), y: y.into(), curves, log_y });
        }
        let curves: Vec<_> = results
            .histograms
            .iter()
            .filter(|histogram| histogram.state == state)
            .map(|histogram| (histogram.curve.clone(), histogram.bins.clone()))
            .collect();
        if !curves.is_empty() {
            let (x, y) = ("microseconds".into(), "% of all".into());
            plots.push(Plot { title: format!("latency histogram{place}"), x, y, curves, log_y: false });
        }
    }
    plots
}

/// As SVG. The horizontal axis is logarithmic; what is at 0 is drawn at the left end.
fn draw(plot: &Plot) -> Result<String> {
    let all = || plot.curves.iter().flat_map(|(_, points)| points);
    let positive = |values: &mut dyn Iterator<Item = f64>| values.filter(|value| *value > 0.0).fold(f64::MAX, f64::min);
    let least = positive(&mut all().map(|point| point.0)).min(1e12);
    let most = all().map(|point| point.0).fold(least, f64::max);
    let top = all().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max) * 1.2;
    let bottom = positive(&mut all().map(|point| point.1)).min(top) / 1.5;
    // A point at 0 waiting entries stands a step to the left.
    let left = if all().any(|point| point.0 <= 0.0) { least / 10.0 } else { least };
    let at = |(x, y): (f64, f64)| (x.max(left), y);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(failed)?;
        let mut builder = ChartBuilder::on(&area);
        builder.caption(&plot.title, ("sans-serif", 20)).margin(10).x_label_area_size(45).y_label_area_size(70);
        let x = (left..most.max(left * 1.01)).log_scale();
        // The two kinds of axis are two types.
        macro_rules! chart {
            ($y:expr) => {{
                let mut chart = builder.build_cartesian_2d(x, $y).map_err(failed)?;
                let mut mesh = chart.configure_mesh();
                mesh.x_desc(&plot.x).y_desc(&plot.y).x_labels(8).light_line_style(TRANSPARENT);
                mesh.x_label_formatter(&|x| short(*x)).y_label_formatter(&|y| short(*y)).draw().map_err(failed)?;
                for ((_, points), colour) in plot.curves.iter().zip(COLOURS.iter().cycle()) {
                    let points = points.iter().copied().map(at);
                    chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2))).map_err(failed)?;
                    chart.draw_series(points.map(|point| Circle::new(point, 3, colour.filled()))).map_err(failed)?;
                }
            }};
        }
        if plot.log_y {
            chart!((bottom..top).log_scale());
        } else {
            chart!(0.0..top);
        }
        area.present().map_err(failed)?;
    }
    Ok(svg)
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("could not draw a plot: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_its_plots_and_escapes_what_it_is_told() {
        let mut results = Results::default();
        results.take(
            r#"
bench: {"point":{"plot":"batch","curve":"moonring","state":"near","x":1,"y":10}}
bench: {"point":{"plot":"batch","curve":"moonring","state":"near","x":32,"y":100}}
bench: {"point":{"plot":"waiting","curve":"turn","state":"any","x":0,"y":30}}
bench: {"histogram":{"curve":"signal","state":"near","bins":[[0.1,20.0],[0.2,80.0]]}}
bench: {"note":"1 < 2"}
"#,
        );
        results.complete();
        let html = html(&results).unwrap();
        assert_eq!(html.matches("<svg").count(), 3);
        for text in
            ["throughput against batch, cores near", "latency histogram", "waiting entries", "1 &lt; 2", "te_1m"]
        {
            assert!(html.contains(text), "no {text}");
        }
    }
}
