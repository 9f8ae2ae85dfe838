//! The manual's table of result codes against the code: the same names, the same numbers, and one table in two places.

const MANUAL: &str = include_str!("../docs/semantics.md");
const CODES: &str = include_str!("../src/code.rs");
const MOONCAKE: &str = include_str!("../src/mooncake/mod.rs");

/// The errnos of `moonring::code`, as its source has them.
fn errnos() -> Vec<(&'static str, &'static str)> {
    let constants = CODES.lines().filter_map(|line| line.trim().strip_prefix("pub const ")?.split_once(": i32 = "));
    constants.filter_map(|(name, number)| Some((name, number.strip_suffix(';')?))).collect()
}

/// The cells of a table's rows that begin with a stage.
fn rows(text: &str) -> Vec<Vec<&str>> {
    const STAGES: [&str; 6] = ["done", "gate", "issue", "transfer", "cancel", "shutdown"];
    let lines = text.lines().map(|line| line.trim_start_matches("//!").trim());
    let tables = lines.filter_map(|line| line.strip_prefix('|')?.strip_suffix('|'));
    let cells = tables.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
    cells.filter(|cells| STAGES.contains(&cells[0])).collect()
}

/// The manual's sections with result codes, each with its name.
fn sections() -> Vec<(&'static str, Vec<Vec<&'static str>>)> {
    let all = MANUAL.split("\n### ").skip(1).map(|section| (section.lines().next().unwrap(), rows(section)));
    all.filter(|(_, rows)| !rows.is_empty()).collect()
}

#[test]
fn every_errno_is_in_the_manual_with_its_number() {
    let errnos = errnos();
    assert!(errnos.len() >= 16, "{errnos:?}");
    for (name, number) in errnos {
        let row = format!("\n| `{name}` | {number} |\n");
        assert!(MANUAL.contains(&row), "docs/semantics.md has no row {row}");
    }
}

#[test]
fn every_pair_is_named_once_for_each_transport_and_exists() {
    let errnos = errnos();
    let sections = sections();
    assert_eq!(
        sections.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["Any transport", "Mooncake", "Loopback", "Simulated"]
    );
    let (any, transports) = sections.split_first().unwrap();
    for (name, rows) in transports {
        let mut pairs: Vec<_> = any.1.iter().chain(rows).map(|row| (row[0], row[1].trim_matches('`'))).collect();
        for (stage, errno) in &pairs {
            assert!(
                errnos.iter().any(|(known, _)| known == errno),
                "{name}: {stage} {errno} is no errno of the code's"
            );
        }
        let all = pairs.len();
        pairs.sort_unstable();
        pairs.dedup();
        assert_eq!(pairs.len(), all, "{name}: two causes with one pair: {pairs:?}");
    }
}

/// Stage, errno, cause and whether the local range is quiet, as the Mooncake module's own table has them.
#[test]
fn the_manual_and_the_mooncake_module_have_one_table() {
    let sections = sections();
    let (_, manual) = sections.iter().find(|(name, _)| *name == "Mooncake").unwrap();
    let module = rows(MOONCAKE);
    let pick = |row: &Vec<&'static str>| (row[0], row[1], row[2], row[4]);
    assert_eq!(manual.iter().map(pick).collect::<Vec<_>>(), module.iter().map(pick).collect::<Vec<_>>());
    assert!(module.len() >= 16);
}
