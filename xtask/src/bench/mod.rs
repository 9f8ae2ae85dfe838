//! `cargo xtask bench`: runs every part of the benchmarks in a process of its own, puts what they say together, judges it and
//! shows it.

mod docs;
mod machine;
mod parts;
mod report;
mod results;
mod table;
mod targets;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;

use results::Results;

/// What `cargo xtask bench` is asked for
#[derive(Debug, Args)]
pub struct Options {
    /// Parts to run; all of them without. What the others measure is null
    parts: Vec<String>,
    /// Fewer rounds: under 90 s once built
    #[arg(long)]
    quick: bool,
    /// Write the results here, as one JSON object
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report with the plots here instead of bench.html in the target folder
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Measure nothing: show results that --json wrote
    #[arg(long, value_name = "FILE", conflicts_with_all = ["parts", "quick", "json", "report"])]
    from: Option<PathBuf>,
    /// Put the results into docs/performance.md and README.md
    #[arg(long)]
    docs: bool,
}

/// Measures, or reads what was measured, and shows it. Fails when a part fails, not when a target is missed.
pub fn bench(options: &Options) -> Result<ExitCode> {
    let mut good = true;
    let results = if let Some(path) = &options.from {
        let text = fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
        let json = serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))?;
        Results::from_json(&json).with_context(|| format!("{} is not what --json writes", path.display()))?
    } else {
        let mut results = Results::default();
        good = parts::run(options, &mut results)?;
        results.machine = machine::describe(&results);
        results.complete();
        let path = options.report.clone().unwrap_or_else(|| parts::target_folder().join("bench.html"));
        let html = report::html(&results)?;
        fs::write(&path, html).with_context(|| format!("could not write {}", path.display()))?;
        eprintln!("report with plots: {}", path.display());
        results
    };
    print!("{}", table::show(&results));
    if let Some(path) = &options.json {
        let text = format!("{}\n", results.json());
        fs::write(path, text).with_context(|| format!("could not write {}", path.display()))?;
    }
    if options.docs {
        docs::update(&results)?;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
