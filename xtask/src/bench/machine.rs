//! What the results were measured on.

use std::fs;

use serde_json::{Value, json};

use super::results::{Results, median};

/// The machine, and what was seen of its states.
pub fn describe(results: &Results) -> Value {
    let uname = rustix::system::uname();
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|(_, name)| name);
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    let (near, far): (Vec<_>, Vec<_>) = results.ping_pongs.iter().partition(|nanos| **nanos <= 250.0);
    let disturbed = results.disturbed.iter().filter(|disturbed| **disturbed).count();
    json!({
        "cpu": cpu,
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "memory_gib": kib.and_then(|kib| kib.parse::<f64>().ok()).map(|kib| (kib / 1048576.0).round()),
        "kernel": uname.release().to_string_lossy(),
        "architecture": std::env::consts::ARCH,
        "near_ns": median(&near),
        "far_ns": median(&far),
        "near_share": share(near.len(), far.len()),
        "disturbed_share": share(disturbed, results.disturbed.len() - disturbed),
        "waited_for_near_s": results.waited.round(),
    })
}

fn share(part: usize, rest: usize) -> Option<f64> {
    (part + rest > 0).then(|| (100.0 * part as f64 / (part + rest) as f64).round() / 100.0)
}
