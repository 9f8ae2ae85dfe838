//! The documents against the code: the manual's result codes, the deviations, and the tests of the conformance table.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const MANUAL: &str = include_str!("../docs/semantics.md");
const CODES: &str = include_str!("../src/code.rs");
const MOONCAKE: &str = include_str!("../src/mooncake/mod.rs");
const CONFORMANCE: &str = include_str!("../docs/conformance.md");
const SECURITY: &str = include_str!("../docs/security.md");
const SCENARIOS: &str = include_str!("../docs/scenarios.md");
const ORDERINGS: &str = include_str!("../docs/orderings.md");
const MODEL: &str = include_str!("conformance/model.rs");
const NAMED: &str = include_str!("conformance/named.rs");

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

/// A pair has one meaning for transfers, on each transport, and one for entries without a transfer.
#[test]
fn every_pair_is_named_once_for_each_transport_and_exists() {
    let errnos = errnos();
    let sections = sections();
    assert_eq!(
        sections.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["Any transport", "Entries without a transfer", "Mooncake", "Store", "Loopback", "Simulated"]
    );
    let (any, others) = sections.split_first().unwrap();
    for (name, rows) in others {
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

/// The cells of a table's rows, without its head, behind a heading.
fn table(text: &'static str, heading: &str) -> Vec<Vec<&'static str>> {
    let (_, section) = text.split_once(&format!("\n## {heading}\n")).expect("the document has this section");
    let lines = section.lines().take_while(|line| !line.starts_with("## "));
    let cells = lines.filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")).map(|line| line.split(" | "));
    cells.skip(2).map(Iterator::collect).collect()
}

#[test]
fn the_deviations_are_those_of_the_model() {
    let (_, rest) = MODEL.split_once("pub enum Deviation {\n").unwrap();
    let (body, _) = rest.split_once("\n}").unwrap();
    let names: Vec<_> =
        body.lines().filter_map(|line| line.trim().strip_suffix(',')).filter(|line| !line.contains(' ')).collect();
    let written: Vec<_> = table(CONFORMANCE, "Deviations").iter().map(|row| row[0].trim_matches('`')).collect();
    assert_eq!(written, names);
    assert!(names.len() >= 8);
}

/// Every file with Rust source below `folder`.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// All tests, as the program or the module that they are in and their name.
fn tests() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeSet::new();
    for (folder, own_modules) in [("tests", false), ("src", true)] {
        let mut files = Vec::new();
        sources(&root.join(folder), &mut files);
        for file in files {
            let module = file.strip_prefix(root.join(folder)).unwrap().with_extension("");
            let mut parts: Vec<_> = module.iter().map(|part| part.to_str().unwrap()).collect();
            if own_modules {
                parts.retain(|part| !["mod", "tests"].contains(part));
            } else {
                parts.truncate(1);
            }
            let text = fs::read_to_string(&file).unwrap();
            for after in text.split("#[test]\n").skip(1) {
                let named = after.lines().map(str::trim).find_map(|line| line.strip_prefix("fn ")?.split_once('('));
                parts.push(named.expect("a test is a function").0);
                all.insert(parts.join("::"));
                parts.pop();
            }
        }
    }
    all
}

/// The tests that the page on security names are there.
#[test]
fn the_security_pages_tests_exist() {
    let tests = tests();
    let code = SECURITY.split('`').skip(1).step_by(2);
    let is_test = |name: &&str| {
        name.len() > 2
            && name.contains("::")
            && !name.contains(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c)))
    };
    let named: Vec<_> = code.filter(is_test).collect();
    assert!(named.len() >= 10, "{named:?}");
    for name in named {
        assert!(tests.contains(name), "there is no test {name}");
    }
}

/// Each scenario has a test that is named after it, and says what shows that the test can fail.
#[test]
fn the_scenarios_table_is_whole_and_its_tests_and_planted_bugs_exist() {
    let tests = tests();
    let planted = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/planted");
    let rows = table(SCENARIOS, "The list");
    let ids: Vec<_> = rows.iter().map(|row| row[0]).collect();
    let expected = "A1 A2 A3 A4 A7 B1 B2 B3 B4 B5 B6 C1 C2 C3 D1 D2 D4 D6 E1 E2 E3 E4 E5 F1 F2 F4 G1 G2 G3 G4 G5 H1 H2 I1 I3 J1 J2 J4 K1 L1";
    assert_eq!(ids, expected.split(' ').collect::<Vec<_>>());
    for row in rows {
        let [id, _, _, without, by] = row[..] else { panic!("five cells: {row:?}") };
        let mark = format!("{}_", id.to_lowercase());
        let names: Vec<_> = by.split('`').skip(1).step_by(2).collect();
        for name in &names {
            assert!(tests.contains(*name), "{id}: there is no test {name}");
        }
        let functions = names.iter().filter_map(|name| name.rsplit("::").next());
        assert!(functions.clone().any(|name| name.contains(&mark)), "{id}: no test is named after it: {names:?}");
        let bugs: Vec<_> = without.split('`').skip(1).step_by(2).filter(|name| !name.contains("check:")).collect();
        for bug in &bugs {
            assert!(planted.join(format!("{bug}.patch")).exists(), "{id}: there is no planted bug {bug}");
        }
        let said = ["control in the test", "planted", "cannot arise"];
        assert!(said.iter().any(|start| without.starts_with(start)), "{id}: and without it? {without:?}");
        assert!(!without.starts_with("planted") || !bugs.is_empty(), "{id}: which planted bug?");
    }
}

/// Accesses stronger than Relaxed, and barriers, in a source file: outside of comments, and of tests in a module at its end.
fn strong_orderings(text: &str) -> usize {
    let code = text.split("\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let sites = |line: &str| {
        assert!(!line.contains("Ordering::{"), "name an ordering where it is used: {line}");
        let named = line.split("Ordering::").skip(1);
        named
            .filter(|rest| ["Acquire", "Release", "AcqRel", "SeqCst"].iter().any(|name| rest.starts_with(name)))
            .count()
    };
    // An exchange counts once, by what it is when it succeeds; its failure's is another site only if it is stronger than
    // Relaxed, too.
    lines.map(sites).sum()
}

/// Each ordering has a line which says what it is for and which planted bug takes it away, and each bug that a model catches is
/// on the page.
#[test]
fn the_orderings_page_has_every_site_and_every_bug_of_the_models() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let planted = root.join("tests/planted");
    let mut written = BTreeMap::<&str, usize>::new();
    let mut named = BTreeSet::new();
    let mut lines = Vec::new();
    for row in table(ORDERINGS, "Sites") {
        let [file, sites, _, bugs] = row[..] else { panic!("four cells: {row:?}") };
        *written.entry(file.trim_matches('`')).or_default() += sites.parse::<usize>().expect("a count of sites");
        lines.push((file, bugs));
    }
    for row in table(ORDERINGS, "Order of lines") {
        let [file, _, bugs] = row[..] else { panic!("three cells: {row:?}") };
        lines.push((file, bugs));
    }
    for (file, bugs) in lines {
        let file = file.trim_matches('`');
        assert!(root.join(file).exists(), "there is no {file}");
        if bugs.starts_with("argument: ") {
            continue;
        }
        let names: Vec<_> = bugs.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "{file}: which planted bug? {bugs}");
        for name in names {
            assert!(planted.join(format!("{name}.patch")).exists(), "{file}: there is no planted bug {name}");
            named.insert(name.to_owned());
        }
    }
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    let mut counted = BTreeMap::new();
    for file in files {
        let name = file.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        let for_tests = ["src/models.rs", "src/sync/doubles.rs"].contains(&&*name)
            || name.starts_with("src/simulation/")
            || name.ends_with("tests.rs");
        let sites = if for_tests { 0 } else { strong_orderings(&fs::read_to_string(&file).unwrap()) };
        if sites > 0 {
            counted.insert(name, sites);
        }
    }
    let counted: BTreeMap<_, _> = counted.iter().map(|(name, sites)| (name.as_str(), *sites)).collect();
    assert_eq!(written, counted, "docs/orderings.md, then the source");
    for patch in fs::read_dir(&planted).unwrap() {
        let patch = patch.unwrap().path();
        let by_a_model = fs::read_to_string(&patch).unwrap().starts_with("check: loom ");
        let name = patch.file_stem().unwrap().to_str().unwrap();
        assert!(!by_a_model || named.contains(name), "docs/orderings.md does not name {name}");
    }
}

/// Each line of the list has a verdict; what is kept has tests that exist, or says that it has none.
#[test]
fn the_conformance_table_is_whole_and_its_tests_exist() {
    let tests = tests();
    let rows = table(CONFORMANCE, "The list");
    let numbers: Vec<_> = rows.iter().map(|row| row[0].parse::<usize>().unwrap()).collect();
    assert_eq!(numbers, (1..=77).collect::<Vec<_>>());
    for row in rows {
        let [number, _, verdict, how, by] = row[..] else { panic!("five cells: {row:?}") };
        assert!(["kept", "adapted", "left out", "not yet"].contains(&verdict), "{number}: {verdict}");
        assert!(verdict == "kept" || !how.is_empty(), "{number}: in which way {verdict}?");
        let names: Vec<_> = by.split('`').skip(1).step_by(2).collect();
        for name in &names {
            assert!(tests.contains(*name), "{number}: there is no test {name}");
        }
        let covered = !names.is_empty() || by == "no test" || ["left out", "not yet"].contains(&verdict);
        assert!(covered, "{number}: {verdict}, and no word of a test");
        assert!(verdict != "not yet" || names.is_empty(), "{number}: not there, and tested?");
        for program in by.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| is_program(word)) {
            let (_, rest) = NAMED.split_once(&format!("named({program:?}, ")).unwrap_or_else(|| panic!("no {program}"));
            let recorded = rest.split("named(").next().unwrap();
            assert!(!recorded.contains("Absent"), "{number}: moonring does not run {program}");
        }
    }
}

/// As `P07`: a recorded program's name.
fn is_program(word: &str) -> bool {
    word.strip_prefix('P').is_some_and(|number| number.len() == 2 && number.bytes().all(|digit| digit.is_ascii_digit()))
}
