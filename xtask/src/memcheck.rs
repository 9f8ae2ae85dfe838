//! `cargo xtask memcheck`: the tests that reach unsafe code, under tools that see what it does to memory.
//!
//! valgrind's memcheck runs the test programs as they are, and watches all memory that they and what they load touch.
//! gcc's AddressSanitizer and UndefinedBehaviorSanitizer watch from inside the C++ of the shim and of the fixtures, where
//! memcheck cannot tell an object on a stack, or in a structure, from its neighbour; they need a build of their own.
//! Tools that look for data races are of no use here: they do not know barriers, and take code that is built on them for
//! a race.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::test;
use crate::{command, project_root, setup};

/// Seconds. No part takes nearly as long; one that does hangs.
const LIMIT: u64 = 1800;

/// Some test programs, and the tool that watches them.
#[derive(Debug)]
pub struct Part {
    name: &'static str,
    tool: Tool,
    /// Words of cargo test: what is built.
    programs: &'static str,
    /// Words for the test programs: which tests run.
    tests: &'static str,
}

/// Each with its search for leaks, or without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tool {
    Memcheck { leaks: bool },
    Sanitizers { leaks: bool },
}

const MEMCHECK: Tool = Tool::Memcheck { leaks: true };
const SANITIZERS: Tool = Tool::Sanitizers { leaks: true };
/// For tests that fork: in a child all that other threads' stacks point to looks lost.
const ACCESSES: Tool = Tool::Memcheck { leaks: false };

const fn part(name: &'static str, tool: Tool, programs: &'static str, tests: &'static str) -> Part {
    Part { name, tool, programs, tests }
}

/// Of mooncake-sys all but the tests of `python`: they run in a Python, which has no sanitizer's runtime.
const SYS: &str =
    "--package mooncake-sys --lib --test c_interface --test load --test store --test store_c_interface --test wheel";
const RINGS: &str = "--package moonring --all-features --test ring --test overflow --test semantics --test promises --test cancel \
                     --test edges --test ends --test futures --test messages --test merging";
const UNIT: &str = "--package moonring --all-features --lib";
const CUDA: &str = "--package moonring --all-features --test cuda_fences --test cuda_settings --test cuda_timelines";
const FAKE_CUDA: &str = "--package fake-cuda --tests";

/// memcheck makes a program 20 to 50 times slower and runs one of its threads at a time. So there are 100 seeds of the
/// simulation, and tests that need more speed to end within their limits are left out.
static PARTS: [Part; 16] = [
    // The simulation's million entries, and seeds once more, do nothing to memory that its seeds do not do.
    part("unit", MEMCHECK, UNIT, "--skip simulation::scale --skip a_seed_is_replayed"),
    part("ring", MEMCHECK, RINGS, ""),
    part("vectored", MEMCHECK, "--package moonring --all-features --test vectored", ""),
    part("threads", MEMCHECK, "--package moonring --all-features --test attach --test threads", ""),
    part("scenarios", MEMCHECK, "--package moonring --all-features --test scenarios", "--skip f2_a_full_transport"),
    part("fuzz", MEMCHECK, "--package moonring --all-features --test fuzz", ""),
    part("process", ACCESSES, "--package moonring --all-features --test process", ""),
    part("store", MEMCHECK, "--package moonring --all-features --test store", "--skip a_forked_child"),
    part("store-fork", ACCESSES, "--package moonring --all-features --test store", "a_forked_child"),
    part("cuda", MEMCHECK, CUDA, ""),
    part("fake-cuda", MEMCHECK, FAKE_CUDA, ""),
    part("sys", MEMCHECK, SYS, "--include-ignored"),
    part("shim-sys", SANITIZERS, SYS, "--include-ignored"),
    part("shim-unit", SANITIZERS, UNIT, "--include-ignored --skip simulation::"),
    part("shim-cuda", SANITIZERS, CUDA, ""),
    // gcc 12's LeakSanitizer crashes at the end of these, while streams' threads go on; memcheck has looked for leaks in them.
    part("shim-fake-cuda", Tool::Sanitizers { leaks: false }, FAKE_CUDA, ""),
];

/// Runs the parts whose name contains `name`, or all, and prints what was found.
pub fn memcheck(name: Option<&str>) -> Result<ExitCode> {
    let parts: Vec<_> = PARTS.iter().filter(|part| name.is_none_or(|name| part.name.contains(name))).collect();
    let names = || PARTS.iter().map(|part| part.name).collect::<Vec<_>>().join(", ");
    ensure!(!parts.is_empty(), "no part has {:?} in its name; there are {}", name.unwrap_or_default(), names());
    let has = |sanitizers| parts.iter().any(|part| matches!(part.tool, Tool::Sanitizers { .. }) == sanitizers);
    let mut tools = Vec::new();
    if has(false) {
        tools.push(valgrind()?);
    }
    if has(true) {
        tools.push(sanitizers()?);
    }
    setup::setup()?;
    let logs = command::target_folder()?.join("memcheck");
    if logs.exists() {
        fs::remove_dir_all(&logs)?;
    }
    let (mut tests, mut failed, mut found) = (0, 0, Found::default());
    for part in parts {
        let folder = logs.join(part.name);
        fs::create_dir_all(&folder)?;
        let run = part.run(&folder)?;
        eprintln!("{}: {} tests, {} failed, {:?}", part.name, run.tests, run.failed, run.found);
        tests += run.tests;
        failed += run.failed;
        found = found.and(&run.found);
    }
    let Found { errors, leaks, suppressed } = found;
    let report = json!({ "tools": tools, "tests": tests, "failed": failed, "errors": errors, "leaks": leaks, "suppressed": suppressed });
    println!("{report}");
    Ok(if failed + errors + leaks == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// valgrind's version.
fn valgrind() -> Result<String> {
    let version = || {
        let mut valgrind = Command::new("valgrind");
        valgrind.arg("--version");
        valgrind
    };
    ensure!(
        command::works(&mut version()),
        "valgrind does not start: install it (the package valgrind of Debian, Ubuntu and Fedora)"
    );
    Ok(command::output(&mut version())?.trim().to_owned())
}

/// The version of the compiler that has the sanitizers.
fn sanitizers() -> Result<String> {
    for library in ["libasan.so", "libubsan.so"] {
        // It prints the name that it was asked for if it has no such file.
        let found = command::output(Command::new("gcc").arg(format!("-print-file-name={library}")))
            .context("the sanitizers need gcc: install g++ (Debian, Ubuntu) or gcc-c++ (Fedora)")?;
        ensure!(
            Path::new(found.trim()).is_absolute(),
            "gcc has no {library}: install libasan and libubsan (Fedora), or the libgcc-dev of gcc's version (Debian, Ubuntu)"
        );
    }
    Ok(format!("gcc-{}", command::output(Command::new("gcc").arg("-dumpfullversion"))?.trim()))
}

impl Part {
    pub fn find(name: &str) -> Option<&'static Part> {
        PARTS.iter().find(|part| part.name == name)
    }

    /// Runs the tests, with the tool's logs in `folder`. Tests that fail are run once more, alone: on a
    /// busy machine a program that is so slow comes too late to see what it waits for. What fails again has failed.
    fn run(&self, folder: &Path) -> Result<Run> {
        let (cargo, program) = self.cargo(Some(folder))?;
        let run = |tests: Vec<String>, progress: &mut Progress| {
            let mut run = command::within(LIMIT, &cargo, project_root());
            run.args(["--no-fail-fast", "--"]).args(tests);
            eprintln!("{}: `{}`", self.name, command::shown(&run));
            test::count(&mut run, progress)
        };
        let mut progress = Progress::default();
        let (totals, mut status) = run(program, &mut progress)?;
        let tests = totals.passed + totals.failed;
        let mut failed = totals.failed;
        if progress.failed.len() as u64 == failed && failed > 0 && read(folder)?.is_nothing() {
            let again = ["--include-ignored", "--exact", "--test-threads=1"].map(str::to_owned);
            let again = again.into_iter().chain(std::mem::take(&mut progress.failed)).collect();
            let totals;
            (totals, status) = run(again, &mut progress)?;
            failed = totals.failed.max(failed.saturating_sub(totals.passed));
        }
        let found = read(folder)?;
        // What does not compile, hangs or dies says nothing else.
        let silent = tests == 0 || !status.success() && found.is_nothing();
        Ok(Run { tests, failed: failed.max(u64::from(silent)), found })
    }

    /// `cargo test` under this part's tool, and the arguments of the test programs. What the tool has to say goes into files
    /// in `logs`, or to standard error; either way, a program in which it has found something fails.
    pub fn cargo(&self, logs: Option<&Path>) -> Result<(Command, Vec<String>)> {
        let ours = project_root().join("xtask/memcheck");
        let version = command::output(Command::new("rustc").arg("-vV"))?;
        let host = version.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc -vV names no host")?;
        let mut cargo = command::cargo();
        cargo.arg("test").args(self.programs.split_whitespace()).env("MOONRING_SEEDS", "100");
        match self.tool {
            Tool::Memcheck { leaks } => {
                let leaks = if leaks { "full" } else { "no" };
                let mut valgrind: Vec<String> = [
                    "valgrind",
                    // Threads that spin for one another would starve it.
                    "--fair-sched=try",
                    "--error-exitcode=97",
                    "--num-callers=40",
                    "--show-leak-kinds=definite",
                    "--errors-for-leak-kinds=definite",
                ]
                .map(str::to_owned)
                .into();
                valgrind.push(format!("--leak-check={leaks}"));
                valgrind.push(format!("--suppressions={}", ours.join("valgrind.supp").display()));
                valgrind.extend(logs.map(|logs| format!("--log-file={}/%p", logs.display())));
                // An array of strings is the same in JSON and in TOML.
                cargo.arg("--config").arg(format!("target.{host}.runner={}", json!(valgrind)));
            }
            Tool::Sanitizers { leaks } => {
                // With a target that is named, what runs while the others are built is built without.
                cargo.args(["--target", host]);
                let linker = ours.join("cc");
                cargo.env("CARGO_ENCODED_RUSTFLAGS", format!("-Clinker={}", linker.display()));
                cargo.env(
                    "CXXFLAGS",
                    "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
                );
                let log = logs.map(|logs| format!(":log_path='{}/log'", logs.display())).unwrap_or_default();
                cargo.env(
                    "ASAN_OPTIONS",
                    format!("detect_stack_use_after_return=1:detect_leaks={}{log}", u8::from(leaks)),
                );
                cargo.env("UBSAN_OPTIONS", format!("print_stacktrace=1{log}"));
                cargo.env("LSAN_OPTIONS", format!("suppressions='{}'", ours.join("lsan.supp").display()));
            }
        }
        Ok((cargo, self.tests.split_whitespace().map(str::to_owned).collect()))
    }
}

/// What came of a part.
#[derive(Debug)]
struct Run {
    tests: u64,
    failed: u64,
    found: Found,
}

/// Shows what test programs print, and keeps the names of the tests that failed. It is written to line by line.
#[derive(Debug, Default)]
struct Progress {
    failed: Vec<String>,
}

impl Write for Progress {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.failed.extend(failed_test(&String::from_utf8_lossy(line)).map(str::to_owned));
        io::stderr().write_all(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// The name of the test that a line says has failed.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.trim_end().strip_suffix(" ... FAILED")
}

/// What the tools have said.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Found {
    errors: u64,
    leaks: u64,
    /// Errors and leaks of foreign code that a file of suppressions names.
    suppressed: u64,
}

impl Found {
    fn is_nothing(&self) -> bool {
        self.errors + self.leaks == 0
    }

    fn and(self, other: &Found) -> Found {
        Found {
            errors: self.errors + other.errors,
            leaks: self.leaks + other.leaks,
            suppressed: self.suppressed + other.suppressed,
        }
    }

    /// What one process's log says; every error counts once, however often it came.
    fn parse(log: &str) -> Found {
        let mut found = Found::default();
        let mut in_suppressions = false;
        for line in log.lines() {
            if line.contains(" are definitely lost in loss record ") || line.starts_with("Direct leak of ") {
                found.leaks += 1;
            } else if line.contains("ERROR: AddressSanitizer") || line.contains(": runtime error: ") {
                found.errors += 1;
            } else if let Some((_, summary)) = line.split_once("ERROR SUMMARY: ") {
                // "36 errors from 5 contexts (suppressed: 4 from 2)", where a leak is an error as well.
                let mut numbers =
                    summary.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse::<u64>().ok());
                found.errors += numbers.nth(1).unwrap_or_default().saturating_sub(found.leaks);
                found.suppressed += numbers.nth(1).unwrap_or_default();
            } else if line == "Suppressions used:" {
                in_suppressions = true;
            } else if in_suppressions {
                // "  131072        8388608 a template": a count, bytes and a name.
                found.suppressed += u64::from(line.trim_start().starts_with(|c: char| c.is_ascii_digit()));
            }
        }
        found
    }
}

/// Reads the logs of one part, and shows those in which something was found.
fn read(folder: &Path) -> Result<Found> {
    let mut all = Found::default();
    for file in fs::read_dir(folder)? {
        let path = file?.path();
        let log = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
        let found = Found::parse(&log);
        if !found.is_nothing() {
            eprintln!("{}:\n{log}", path.display());
        }
        all = all.and(&found);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memchecks_log_is_read() {
        let log = "==7== Invalid read of size 4\n==7==    at 0x1: f (f.rs:1)\n==7== \n\
                   ==7== 16 bytes in 1 blocks are definitely lost in loss record 9 of 157\n\
                   ==7== 328 bytes in 2 blocks are possibly lost in loss record 10 of 157\n\
                   ==7== ERROR SUMMARY: 36 errors from 4 contexts (suppressed: 5 from 2)\n";
        assert_eq!(Found::parse(log), Found { errors: 3, leaks: 1, suppressed: 2 });
        let clean = "==7== ERROR SUMMARY: 0 errors from 0 contexts (suppressed: 0 from 0)\n";
        assert_eq!(Found::parse(clean), Found::default());
        assert_eq!(Found::parse("==7== Command: of a child that became another program\n"), Found::default());
    }

    #[test]
    fn the_sanitizers_logs_are_read() {
        let overrun = "=====\n==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x6\nREAD of size 4\n\
                       SUMMARY: AddressSanitizer: heap-buffer-overflow shim.cpp:2 in over\n";
        assert_eq!(Found::parse(overrun), Found { errors: 1, ..Found::default() });
        let undefined = "shim.cpp:7:3: runtime error: load of misaligned address 0x1 for type 'int'\n";
        assert_eq!(Found::parse(undefined), Found { errors: 1, ..Found::default() });
        let leaks = "==7==ERROR: LeakSanitizer: detected memory leaks\n\nDirect leak of 64 byte(s) in 1 object(s) allocated \
                     from:\n    #0 0x7 in malloc\n\nIndirect leak of 8 byte(s) in 1 object(s) allocated from:\n\
                     SUMMARY: AddressSanitizer: 72 byte(s) leaked in 2 allocation(s).\n";
        assert_eq!(Found::parse(leaks), Found { leaks: 1, ..Found::default() });
        let suppressed =
            "-----\nSuppressions used:\n  count          bytes template\n 131072        8388608 Client\n-----\n";
        assert_eq!(Found::parse(suppressed), Found { suppressed: 1, ..Found::default() });
    }

    #[test]
    fn failed_tests_are_known_by_their_line() {
        assert_eq!(failed_test("test a::two ... FAILED\n"), Some("a::two"));
        for line in ["test one ... ok\n", "test result: FAILED. 1 passed; 1 failed\n", "one ... FAILED\n"] {
            assert_eq!(failed_test(line), None);
        }
    }

    #[test]
    fn parts_have_names_of_their_own() {
        let names: std::collections::BTreeSet<_> = PARTS.iter().map(|part| part.name).collect();
        assert_eq!(names.len(), PARTS.len());
        assert!(PARTS.iter().all(|part| std::ptr::eq(Part::find(part.name).unwrap(), part)));
    }
}
