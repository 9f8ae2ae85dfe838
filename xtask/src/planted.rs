//! `cargo xtask planted`: bugs planted one at a time in a copy of the tree, and which check catches them.
//!
//! Each file in `tests/planted` is a patch that breaks one rule. Its first line names the check that must fail:
//! `check: loom <part of a model's name>`, `check: sim <seeds>`, `check: memcheck <part> <a test's name>` or `check: test
//! <arguments of cargo test>`; what follows until the diff says what the bug is.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::memcheck::Part;
use crate::{command, loom, project_root, setup};

/// No check takes nearly as long; one that hangs has caught its bug.
const LIMIT: Duration = Duration::from_secs(180);
/// Nor does one without a bug, all models together among them, on a busy machine.
const LIMIT_OF_ALL: Duration = Duration::from_secs(900);

/// Plants the bugs whose name contains one of `names`, or all, and prints how many were caught.
pub fn planted(names: &[String]) -> Result<ExitCode> {
    let patches = patches(&project_root().join("tests/planted"), names)?;
    ensure!(!patches.is_empty(), "no patch in tests/planted has one of {names:?} in its name");
    if patches.iter().any(|patch| patch.check.needs_setup()) {
        setup::setup()?;
    }
    let copy = Copy::new()?;
    // A check that fails by itself catches nothing. The models are quickest all at once.
    for check in patches.iter().map(|patch| patch.check.whole()).collect::<BTreeSet<_>>() {
        eprint!("without a bug: {} ... ", check.shown());
        match copy.run(&check, LIMIT_OF_ALL)? {
            Outcome::Passed => eprintln!("ok"),
            other => bail!("{} fails without a planted bug: {other:?}", check.shown()),
        }
    }
    let mut caught = 0;
    for patch in &patches {
        eprint!("{}: {} ... ", patch.name, patch.check.shown());
        copy.plant(patch)?;
        let outcome = copy.run(&patch.check, LIMIT);
        copy.heal(patch)?;
        match outcome? {
            Outcome::Failed(how) => {
                eprintln!("caught: {how}");
                caught += 1;
            }
            Outcome::Passed => eprintln!("NOT CAUGHT"),
            Outcome::NotBuilt => eprintln!("DOES NOT COMPILE, so nothing was caught"),
        }
    }
    println!("{{\"planted\":{},\"caught\":{caught}}}", patches.len());
    Ok(if caught == patches.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Check {
    Loom(String),
    /// So many seeds of the simulation, from a fixed one on.
    Sim(u64),
    /// A test under a tool that watches memory: what fails is the tool.
    Memcheck {
        part: String,
        test: String,
    },
    Test(Vec<String>),
}

impl Check {
    fn parse(line: &str) -> Option<Check> {
        let mut words = line.strip_prefix("check: ")?.split_whitespace().map(str::to_owned);
        match words.next()?.as_str() {
            "loom" => Some(Check::Loom(words.next()?)),
            "sim" => Some(Check::Sim(words.next()?.parse().ok()?)),
            "memcheck" => {
                let part = words.next().filter(|part| Part::find(part).is_some())?;
                Some(Check::Memcheck { part, test: words.next()? })
            }
            "test" => Some(Check::Test(words.collect())),
            _ => None,
        }
    }

    /// The check, or all models.
    fn whole(&self) -> Check {
        match self {
            Check::Loom(_) => Check::Loom("models::".to_owned()),
            Check::Sim(_) | Check::Memcheck { .. } | Check::Test(_) => self.clone(),
        }
    }

    /// Whether it runs tests on a real Mooncake.
    fn needs_setup(&self) -> bool {
        match self {
            Check::Loom(_) | Check::Sim(_) => false,
            Check::Memcheck { .. } => true,
            Check::Test(args) => args.iter().any(|arg| arg == "--include-ignored"),
        }
    }

    fn shown(&self) -> String {
        match self {
            Check::Loom(model) => format!("loom {model}"),
            Check::Sim(seeds) => format!("sim {seeds}"),
            Check::Memcheck { part, test } => format!("memcheck {part} {test}"),
            Check::Test(args) => format!("test {}", args.join(" ")),
        }
    }

    /// The command without what selects and runs the tests: cargo's part, then the test program's.
    fn cargo(&self) -> Result<(Command, Vec<String>)> {
        Ok(match self {
            Check::Loom(model) => (loom::cargo(), vec![model.clone()]),
            Check::Sim(seeds) => {
                let mut cargo = command::cargo();
                cargo.args(["test", "--package", "moonring", "--no-default-features", "--lib"]);
                cargo.env("MOONRING_SEEDS", seeds.to_string()).env("MOONRING_SEED", "1");
                (cargo, vec!["simulation::every_promise_is_kept".to_owned(), "--exact".to_owned()])
            }
            Check::Test(args) => {
                let split = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
                let mut cargo = command::cargo();
                cargo.arg("test").args(&args[..split]);
                (cargo, args.get(split + 1..).unwrap_or_default().to_vec())
            }
            Check::Memcheck { part, test } => {
                let (cargo, mut program) = Part::find(part).context("looked for when it was read")?.cargo(None)?;
                program.push(test.clone());
                (cargo, program)
            }
        })
    }
}

#[derive(Debug)]
struct Patch {
    name: String,
    file: PathBuf,
    check: Check,
}

fn patches(folder: &Path, names: &[String]) -> Result<Vec<Patch>> {
    let mut patches = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))? {
        let file = entry?.path();
        let Some(stem) = file.file_name().and_then(|file| file.to_str()?.strip_suffix(".patch")) else { continue };
        if !names.is_empty() && !names.iter().any(|name| stem.contains(name.as_str())) {
            continue;
        }
        let text = fs::read_to_string(&file)?;
        let first = text.lines().next().unwrap_or_default();
        let check = Check::parse(first).with_context(|| {
            format!("{}: the first line is {first:?}; it names a check, such as `check: loom publish`", file.display())
        })?;
        patches.push(Patch { name: stem.to_owned(), check, file: file.clone() });
    }
    patches.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(patches)
}

#[derive(Debug)]
enum Outcome {
    Passed,
    Failed(String),
    NotBuilt,
}

/// A copy of the tree as it is now. Kept between runs, with its own target folder, so that a run builds only what a patch
/// touches.
struct Copy {
    tree: PathBuf,
    target: PathBuf,
}

impl Copy {
    fn new() -> Result<Copy> {
        let folder = command::target_folder()?.join("planted");
        let copy = Copy { tree: folder.join("tree"), target: folder.join("target") };
        copy.refresh()?;
        Ok(copy)
    }

    /// Makes the copy equal to the tree; files that are equal already keep their times.
    fn refresh(&self) -> Result<()> {
        let list = command::output(Command::new("git").current_dir(project_root()).args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]))?;
        let wanted: BTreeSet<PathBuf> = list
            .split('\0')
            .filter(|name| !name.is_empty() && project_root().join(name).is_file())
            .map(PathBuf::from)
            .collect();
        for name in &wanted {
            copy_if_new(&project_root().join(name), &self.tree.join(name))?;
        }
        remove_others(&self.tree, Path::new(""), &wanted)?;
        // The set-up folder is found at or above the tests.
        symlink(setup::home(), self.tree.join(".mooncake")).context("could not link the set-up folder")
    }

    fn plant(&self, patch: &Patch) -> Result<()> {
        self.apply(patch, &[])
    }

    fn heal(&self, patch: &Patch) -> Result<()> {
        self.apply(patch, &["--reverse"])
    }

    fn apply(&self, patch: &Patch, args: &[&str]) -> Result<()> {
        // Outside of any repository's work tree as far as git is concerned: the copy may lie inside one and be ignored there.
        let mut git = Command::new("git");
        git.current_dir(&self.tree).env("GIT_CEILING_DIRECTORIES", &self.tree).env("GIT_DIR", "/dev/null");
        command::run(git.arg("apply").args(args).arg(&patch.file))
            .with_context(|| format!("{} does not fit the tree: adapt it", patch.name))
    }

    fn run(&self, check: &Check, limit: Duration) -> Result<Outcome> {
        let command = || {
            let (mut cargo, program) = check.cargo()?;
            cargo.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target).env("RUST_BACKTRACE", "0");
            anyhow::Ok((cargo, program))
        };
        let (mut build, _) = command()?;
        build.arg("--no-run").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let built = build.output().with_context(|| format!("could not start `{}`", command::shown(&build)))?;
        if !built.status.success() {
            std::io::stderr().write_all(&built.stderr)?;
            return Ok(Outcome::NotBuilt);
        }
        let (cargo, program) = command()?;
        let mut run = command::within(limit.as_secs(), &cargo, &self.tree);
        run.arg("--").args(program);
        let output = run.stdin(Stdio::null()).output().context("could not start `timeout`, which coreutils brings")?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            ensure!(
                !said.lines().any(|line| line == "running 0 tests") || said.contains(" ... ok"),
                "{} selects no test",
                check.shown()
            );
            return Ok(Outcome::Passed);
        }
        let how = said.lines().find(|line| {
            line.contains("deadlock")
                || line.contains("Sanitizer: ")
                || line.contains("runtime error: ")
                || line.contains("== Invalid ")
                || line.contains("uninitialised")
                || line.contains("definitely lost in")
                || line.contains("assertion")
                || line.contains("iolation")
                || line.contains("VIOLATION")
        });
        let how = how.or_else(|| said.lines().find(|line| line.contains("panicked at")));
        let how = how.map_or_else(|| output.status.to_string(), |line| line.trim().chars().take(100).collect());
        Ok(Outcome::Failed(if output.status.code() == Some(124) { "it hung".to_owned() } else { how }))
    }
}

fn copy_if_new(from: &Path, to: &Path) -> Result<()> {
    let wanted = fs::read(from).with_context(|| format!("could not read {}", from.display()))?;
    if fs::read(to).is_ok_and(|have| have == wanted) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    let _ = fs::remove_file(to);
    fs::copy(from, to).with_context(|| format!("could not write {}", to.display()))?;
    Ok(())
}

/// Removes from `tree` what is not `wanted`.
fn remove_others(tree: &Path, under: &Path, wanted: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(tree.join(under))? {
        let entry = entry?;
        let name = under.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            remove_others(tree, &name, wanted)?;
        } else if !wanted.contains(&name) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_is_read_from_the_first_line() {
        assert_eq!(Check::parse("check: loom publish_and_park"), Some(Check::Loom("publish_and_park".into())));
        let args = ["--test", "promises"].map(str::to_owned).to_vec();
        assert_eq!(Check::parse("check: test --test promises"), Some(Check::Test(args)));
        assert_eq!(Check::parse("check: sim 5000"), Some(Check::Sim(5000)));
        let (part, test) = ("shim-sys".to_owned(), "every_call".to_owned());
        assert_eq!(Check::parse("check: memcheck shim-sys every_call"), Some(Check::Memcheck { part, test }));
        let not_checks = ["", "check: loom", "check: sim", "check: sim many", "check: luck x", "loom x"];
        for line in not_checks.into_iter().chain(["check: memcheck nothing x", "check: memcheck ring"]) {
            assert_eq!(Check::parse(line), None, "{line}");
        }
    }

    #[test]
    fn every_patch_in_the_tree_names_its_check() {
        assert!(!patches(&project_root().join("tests/planted"), &[]).unwrap().is_empty());
    }
}
