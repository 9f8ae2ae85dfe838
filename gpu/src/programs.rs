//! Running other programs with a limit, and reading what the test programs among them say.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// How long a program that is killed may take to be gone, and what it printed to be here.
const GRACE: Duration = Duration::from_secs(1);

/// How a program ended, and what it wrote, line by line.
pub struct Ended {
    /// `None` if it was stopped at its limit.
    pub status: Option<ExitStatus>,
    pub stdout: Vec<String>,
    pub stderr: Vec<String>,
}

/// Runs a program, for as long as the limit at most.
pub fn run(command: &mut Command, limit: Duration) -> Result<Ended> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("could not start {:?}", command.get_program()))?;
    let stdout = lines(child.stdout.take());
    let stderr = lines(child.stderr.take());
    let status = wait(&mut child, limit)?;
    // What it has started may keep the pipes open after it: what is not there soon is not waited for.
    let until = Instant::now() + GRACE;
    let collect = |lines: Receiver<String>| {
        let mut all = Vec::new();
        while let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            all.push(line);
        }
        all
    };
    Ok(Ended { status, stdout: collect(stdout), stderr: collect(stderr) })
}

fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            stop(child)?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Kills a program with what it has started, which may be what hangs.
pub fn stop(child: &mut Child) -> Result<()> {
    // SAFETY: the group is that of our child, which is not reaped yet, so its number is still its own.
    unsafe { libc::kill(-i32::try_from(child.id())?, libc::SIGKILL) };
    // One that hangs inside the kernel's part of a driver does not even die.
    let end = Instant::now() + GRACE;
    while child.try_wait()?.is_none() && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Starts a program that runs until its standard input ends, and so no longer than this one.
pub fn beside(command: &mut Command) -> Result<Child> {
    let quiet = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    quiet.spawn().with_context(|| format!("could not start {:?}", command.get_program()))
}

/// A pipe's lines, until it is closed.
fn lines(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    if let Some(pipe) = pipe {
        thread::spawn(move || {
            let mut reader = BufReader::new(pipe);
            let mut line = Vec::new();
            // A program may print anything.
            while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    return;
                }
                line.clear();
            }
        });
    }
    lines
}

/// What a test program of Rust's own harness reports.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tests {
    pub passed: u64,
    /// With what they said of it.
    pub failed: Vec<(String, String)>,
    /// Tests, or parts of tests, that did not run.
    pub skipped: Vec<String>,
    /// What a test found out about the driver.
    pub facts: Vec<String>,
}

impl Tests {
    /// Reads what a test program printed with `--show-output`.
    pub fn read(lines: &[String]) -> Tests {
        let mut tests = Tests::default();
        for line in lines {
            if let Some((name, result)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) {
                match result {
                    "ok" => tests.passed += 1,
                    "FAILED" => tests.failed.push((name.to_owned(), panic_of(lines, name))),
                    _ if result.starts_with("ignored") => tests.skipped.push(name.to_owned()),
                    _ => {}
                }
            } else if let Some(part) = line.strip_prefix("NOT CHECKED: ") {
                let part = part.split(": ").next().unwrap_or(part).to_owned();
                if !tests.skipped.contains(&part) {
                    tests.skipped.push(part);
                }
            } else if let Some(fact) = line.strip_prefix("FACT ") {
                tests.facts.push(fact.to_owned());
            }
        }
        tests
    }
}

/// What a failed test panicked with, from the part of the output that is about it.
fn panic_of(lines: &[String], test: &str) -> String {
    let head = format!("---- {test} stdout ----");
    let about = lines.iter().skip_while(|line| **line != head).skip(1);
    let panic = about.skip_while(|line| !line.contains(" panicked at ")).skip(1);
    let said = panic.take_while(|line| !line.is_empty() && !line.starts_with("note: ") && *line != "stack backtrace:");
    const MOST: usize = 400;
    said.map(|line| line.trim()).collect::<Vec<_>>().join(", ").chars().take(MOST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_a_test_program_prints() {
        let text = "\nrunning 5 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ignored, needs more\n\
                    test e - should panic ... ok\n\nsuccesses:\n\n---- a::b stdout ----\nNOT CHECKED: the log: no controls\n\
                    FACT row 3: 201\nNOT CHECKED: the log: no controls\n\nsuccesses:\n    a::b\n\nfailures:\n\n---- c stdout ----\n\
                    \nthread 'c' (5) panicked at src/c.rs:1:2:\nassertion failed\n  left: 1\nnote: run it\n\n\
                    failures:\n    c\n\n\
                    test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out\n";
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let read = Tests::read(&lines);
        assert_eq!(read.passed, 2);
        assert_eq!(read.failed, [("c".to_owned(), "assertion failed, left: 1".to_owned())]);
        assert_eq!(read.skipped, ["d", "the log"]);
        assert_eq!(read.facts, ["row 3: 201"]);
    }

    #[test]
    fn a_program_that_takes_too_long_is_stopped() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo one; echo two >&2; sleep 100; echo three"]);
        let started = Instant::now();
        let ended = run(&mut shell, Duration::from_millis(300)).unwrap();
        assert!(ended.status.is_none());
        assert!(started.elapsed() < Duration::from_secs(20));
        assert_eq!((ended.stdout, ended.stderr), (vec!["one".to_owned()], vec!["two".to_owned()]));
        let ended = run(Command::new("sh").args(["-c", "exit 3"]), Duration::from_secs(20)).unwrap();
        assert_eq!(ended.status.unwrap().code(), Some(3));
    }
}
