//! The tables in the documents, made from results: what stands between the two marks is replaced.

use std::fmt::Write;
use std::fs;

use anyhow::{Context, Result};

use super::results::Results;
use super::table;

const BEGIN: &str = "<!-- bench: begin -->\n";
const END: &str = "<!-- bench: end -->\n";

/// What the README shows.
const README: [&str; 12] = [
    "nop_batch32_vs_io_uring",
    "nop_batch32_vs_array_queue",
    "nop_depth1_vs_io_uring",
    "turn_100k_on_100k",
    "signal_to_issue_us",
    "overtake_vs_blocking_thread",
    "te_4k",
    "te_1m",
    "te_merge_4096",
    "te_4k_vs_python_thread",
    "idle_cpu_percent",
    "ring_1024_bytes",
];

/// Puts the results into both documents.
pub fn update(results: &Results) -> Result<()> {
    for (path, ids) in [("docs/performance.md", None), ("README.md", Some(&README[..]))] {
        let path = crate::project_root().join(path);
        let old = fs::read_to_string(&path).with_context(|| format!("could not read {}", path.display()))?;
        let new = replace(&old, &section(results, ids)).with_context(|| format!("in {}", path.display()))?;
        fs::write(&path, new).with_context(|| format!("could not write {}", path.display()))?;
    }
    Ok(())
}

fn replace(document: &str, section: &str) -> Result<String> {
    let (before, rest) = document.split_once(BEGIN).with_context(|| format!("no line {BEGIN:?}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("no line {END:?} behind the first"))?;
    Ok(format!("{before}{BEGIN}{section}{END}{after}"))
}

/// The machine and a table of the named results, or of all.
fn section(results: &Results, ids: Option<&[&str]>) -> String {
    let of = |key: &str| match &results.machine[key] {
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Null => "?".to_owned(),
        other => other.to_string(),
    };
    let mut text = format!(
        "\n{}, {} cores, {} GiB, Linux {}, {}.\n{}.\n\n",
        of("cpu"),
        of("cores"),
        of("memory_gib"),
        of("kernel"),
        of("architecture"),
        table::noise(results)
    );
    text.push_str("| id | state | value | beside | ratio | target | |\n| --- | --- | --- | --- | --- | --- | --- |\n");
    for line in &results.lines {
        if ids.is_some_and(|ids| !ids.contains(&line.id.as_str())) {
            continue;
        }
        let [id, state, value, unit, peer, ratio, wish, verdict] = table::cells(line);
        let value = if line.value.is_some() { format!("{value} {unit}") } else { "not measured".into() };
        let _ = writeln!(text, "| `{id}` | {state} | {value} | {peer} | {ratio} | {wish} | {verdict} |");
    }
    let _ = write!(text, "\n{}.\n", table::verdicts(results));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::targets::IDS;

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let document = format!("a\n{BEGIN}old\n{END}b\n");
        assert_eq!(replace(&document, "new\n").unwrap(), format!("a\n{BEGIN}new\n{END}b\n"));
        assert!(replace("a\n", "new\n").is_err());
    }

    #[test]
    fn a_section_has_a_row_for_each_result() {
        let mut results = Results::default();
        results.complete();
        assert_eq!(section(&results, None).matches("\n| `").count(), IDS.len());
        assert_eq!(section(&results, Some(&README)).matches("\n| `").count(), README.len());
    }

    #[test]
    fn the_documents_have_the_marks_and_every_id() {
        let read = |path: &str| fs::read_to_string(crate::project_root().join(path)).unwrap();
        let performance = read("docs/performance.md");
        for document in [&performance, &read("README.md")] {
            replace(document, "").unwrap();
        }
        for id in IDS {
            let row = format!("\n| `{}` | ", id.name);
            let (prose, _) = performance.split_once(BEGIN).unwrap();
            assert!(prose.contains(&row), "docs/performance.md does not say what {} is", id.name);
        }
    }
}
