//! The results as a table for people.

use std::fmt::Write;

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::results::{Line, Results};
use super::targets::{Id, Verdict, short};

const HEAD: [&str; 8] = ["id", "state", "value", "unit", "peer", "ratio", "target", ""];

/// What a line has in each column of [`HEAD`].
pub fn cells(line: &Line) -> [String; 8] {
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), short);
    let peer = match (&line.peer, line.peer_value) {
        (Some(peer), Some(value)) => format!("{peer}: {}", short(value)),
        _ => String::new(),
    };
    let (wish, verdict) = match Id::find(&line.id) {
        Some(id) => (id.wish(), id.judge(line)),
        None => (String::new(), Verdict::NoTarget),
    };
    let ratio = line.ratio().map_or_else(String::new, short);
    let state = line.state.name().to_owned();
    [line.id.clone(), state, number(line.value), line.unit.clone(), peer, ratio, wish, verdict.word().to_owned()]
}

/// The table, the verdicts counted, and what else there is to know.
pub fn show(results: &Results) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(HEAD);
    for line in &results.lines {
        let cells = cells(line).into_iter().enumerate().map(|(at, cell)| {
            let right = matches!(at, 2 | 5);
            Cell::new(cell).set_alignment(if right { CellAlignment::Right } else { CellAlignment::Left })
        });
        table.add_row(cells);
    }
    let mut text = format!("{table}\n\n{}\n{}\n", verdicts(results), noise(results));
    for note in &results.notes {
        let _ = writeln!(text, "- {note}");
    }
    text
}

/// How many targets are met.
pub fn verdicts(results: &Results) -> String {
    let count = |wanted: Verdict| {
        let verdict = |line: &Line| Id::find(&line.id).map(|id| id.judge(line));
        results.lines.iter().filter(|line| verdict(line) == Some(wanted)).count()
    };
    let [met, missed, unjudged] = [Verdict::Met, Verdict::Missed, Verdict::Unjudged].map(count);
    format!(
        "targets: {met} met, {missed} missed, {unjudged} unjudged (a line for each state of the machine that was met)"
    )
}

/// How noisy the machine was, in words.
pub fn noise(results: &Results) -> String {
    let Some(noise) = results.noise() else { return "noise: not measured".into() };
    let share = |key: &str| results.machine[key].as_f64();
    let number = |key: &str| share(key).map_or_else(|| "-".to_owned(), short);
    let percent = |key: &str| share(key).map_or_else(|| "-".to_owned(), |share| short(100.0 * share));
    let disturbed = share("disturbed_share").unwrap_or(0.0);
    let word = if noise < 0.02 && disturbed < 0.05 {
        "quiet"
    } else if noise < 0.1 && disturbed < 0.3 {
        "some noise"
    } else {
        "noisy: trust no number"
    };
    format!(
        "noise: {} % ({word}), the interquartile range of a fixed loop's times over their median; somebody took a core in {} % of \
         the pinned measurements; core to core and back: near {} ns, far {} ns, near in {} % of the looks",
        short(100.0 * noise),
        percent("disturbed_share"),
        number("near_ns"),
        number("far_ns"),
        percent("near_share")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shows_ratios_verdicts_and_what_was_not_measured() {
        let mut results = Results::default();
        results.take(
            r#"bench: {"result":{"id":"nop_batch32_vs_rtrb","state":"far","value":20.0,"unit":"M/s","peer":"rtrb","peer_value":40.0,"higher":true}}"#,
        );
        results.complete();
        let table = show(&results);
        let row = |id: &str| table.lines().find(|line| line.trim_start().starts_with(id)).unwrap().to_owned();
        let words = row("nop_batch32_vs_rtrb").split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words, "nop_batch32_vs_rtrb far 20 M/s rtrb: 40 0.5 ratio ≥ 0.6 MISSED");
        assert!(row("te_4k").ends_with("unjudged") || row("te_4k").trim_end().ends_with("unjudged"));
        assert!(table.contains("0 met, 1 missed"));
    }
}
