//! The prefill side: it owns pages and does nothing but let the decode side read them.

use std::env;
use std::error::Error;
use std::io::{self, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use moonring::{Region, RegionInfo, Registered};

use crate::args::{Args, Transport};
use crate::common::pages;

/// The prefill side, for as long as this lives.
pub struct Prefill {
    /// Where its pages are.
    pub info: RegionInfo,
    _home: Home,
}

#[expect(dead_code, reason = "what is in it is there to be dropped")]
enum Home {
    /// Here. The region keeps its engine.
    Here(Registered),
    /// In a process of its own.
    Process(Process),
}

impl Prefill {
    /// Starts one: with a real Mooncake as a process of its own, on loopback here.
    pub fn start(args: &Args) -> Result<Prefill, Box<dyn Error>> {
        match args.transport {
            Transport::Loopback => {
                let memory = make_pages(args)?;
                Ok(Prefill { info: memory.info(), _home: Home::Here(memory) })
            }
            Transport::MooncakeTcp => {
                let (process, info) = Process::start()?;
                eprintln!("the prefill side is process {} at {}", process.child.id(), info.segment);
                Ok(Prefill { info, _home: Home::Process(process) })
            }
        }
    }
}

/// How many pages the prefill side has: twice as many as the decode side can load at a time, so that the next load into
/// a page brings other bytes.
pub fn page_count(args: &Args) -> usize {
    2 * args.depth * args.pages_per_step
}

/// An engine with pages that peers can read. Page `n` has the content called `n`.
fn make_pages(args: &Args) -> Result<Registered, Box<dyn Error>> {
    let (count, size) = (page_count(args), args.page_size);
    let region = Region::alloc(count * size)
        .map_err(|error| format!("no memory for the prefill side's {count} pages of {size} bytes: {error}"))?;
    let region = args.transport.engine()?.register(region)?;
    let mut page = vec![0; size];
    for n in 0..count {
        pages::fill(n as u64, &mut page);
        region.write_at(n * size, &page)?;
    }
    Ok(region)
}

/// This program once more, as the prefill side. It ends when its standard input does, so it never outlives us.
struct Process {
    child: Child,
    stdout: ChildStdout,
}

impl Process {
    /// Starts it and waits until its pages are ready.
    fn start() -> Result<(Process, RegionInfo), Box<dyn Error>> {
        let mut child = Command::new(env::current_exe()?)
            .args(env::args_os().skip(1))
            .arg("--prefill")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("the prefill side could not be started: {error}"))?;
        let stdout = child.stdout.take().expect("it was asked for");
        let mut process = Process { child, stdout };
        match process.read_info() {
            Ok(bytes) => Ok((process, RegionInfo::from_bytes(&bytes)?)),
            Err(_) => {
                // It closes its output only by ending.
                let status = process.child.wait()?;
                let text = "what it said is above; a real Mooncake is set up with `cargo xtask setup`";
                Err(format!("the prefill side ended ({status}) before it was ready; {text}").into())
            }
        }
    }

    /// What [`serve`] writes.
    fn read_info(&mut self) -> io::Result<Vec<u8>> {
        let mut len = [0];
        self.stdout.read_exact(&mut len)?;
        let mut bytes = vec![0; len[0].into()];
        self.stdout.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the process does: makes pages, says where they are, and keeps them until its standard input ends.
pub fn serve(args: &Args) -> Result<(), Box<dyn Error>> {
    let pages = make_pages(args)?;
    let info = pages.info().to_bytes();
    let mut stdout = io::stdout().lock();
    // One byte for the length, then the bytes. A name is short.
    stdout.write_all(&[u8::try_from(info.len())?])?;
    stdout.write_all(&info)?;
    stdout.flush()?;
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}
