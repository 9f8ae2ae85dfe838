//! Mooncake from Python, as engines use it today, in a child process: this process has taken Python's place for the wheel and
//! can never load it.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use moonring::RegionInfo;

const SCRIPT: &str = include_str!("client.py");

/// A running Python; it ends with the pipe, and is killed when dropped.
pub struct Python {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Python {
    /// Starts one that writes to this peer's memory, or says why not.
    pub fn start(peer: &RegionInfo) -> Result<Python, String> {
        let wheel = Path::new(env!("CARGO_MANIFEST_DIR")).join(".mooncake/wheel");
        // The wheel that set-up fetches is for this Python.
        let mut child = Command::new("python3.11")
            .args(["-c", SCRIPT, &peer.segment, &peer.address.to_string()])
            .env("PYTHONPATH", wheel)
            .env("MC_LOG_LEVEL", "FATAL")
            // As in our own process: connections are kept.
            .env("MC_TCP_ENABLE_CONNECTION_POOL", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("python3.11 does not start: {error}"))?;
        let (commands, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut python = Python { child, commands, answers };
        if python.answer() == ["ready"] {
            Ok(python)
        } else {
            Err(format!("Python has no Mooncake: it ended with {:?}", python.child.wait()))
        }
    }

    /// The times of `count` writes of 4 KiB one after the other, in microseconds: `sync` by the plain call, or `thread` through
    /// a thread and a queue.
    pub fn write(&mut self, how: &str, count: usize) -> Vec<f64> {
        writeln!(self.commands, "{how} {count}").expect("Python reads");
        let times = self.answer();
        assert_eq!(times.len(), count, "{times:?}");
        times.iter().map(|micros| micros.parse().expect("a number")).collect()
    }

    /// The words after `client:` on the next line that has it: Mooncake prints too. Nothing if Python has ended.
    fn answer(&mut self) -> Vec<String> {
        let mut lines = self.answers.by_ref().lines().map_while(Result::ok);
        let answer = lines.find_map(|line| Some(line.strip_prefix("client:")?.to_owned())).unwrap_or_default();
        answer.split_whitespace().map(str::to_owned).collect()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
