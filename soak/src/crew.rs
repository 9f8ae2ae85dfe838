//! The peers, seen from here: processes that are started, stopped, killed and replaced.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use moonring::{RegionInfo, Segment};

use crate::peer::MARK;

/// For what takes a moment on a quiet machine.
pub const LIMIT: Duration = Duration::from_secs(20);

/// A peer's answer about a cell.
#[derive(Debug)]
pub struct Checked {
    pub generation: u32,
    pub cell: usize,
    /// Where the cell differs from what was asked, if it does.
    pub wrong: Option<usize>,
}

/// Where answers go: one place for each worker.
pub type Answers = Arc<Vec<Sender<Checked>>>;

/// A peer's process; killed when dropped, and when the thread that started it ends.
#[derive(Debug)]
pub struct Process {
    child: Mutex<Child>,
    commands: Mutex<Option<ChildStdin>>,
    words: Mutex<Receiver<String>>,
    pub generation: u32,
    pub info: RegionInfo,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// Starts one; `place` is a metadata server's URL and the name that it is to have there.
    pub fn start(generation: u32, place: Option<(&str, &str)>, answers: Answers) -> Result<Process> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["peer", "--generation", &generation.to_string(), "--parent", &std::process::id().to_string()]);
        if let Some((url, name)) = place {
            command.args(["--metadata", url, "--name", name]);
        }
        ends_with_us(&mut command);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("could not start a peer")?;
        let commands = child.stdin.take();
        let output = child.stdout.take().context("the peer has no output")?;
        let (tell, words) = channel();
        thread::Builder::new().name("answers".into()).spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let Some((_, answer)) = line.split_once(MARK) else { continue };
                match answer.split(' ').collect::<Vec<_>>()[..] {
                    ["checked", worker, cell, wrong] => {
                        let numbers = worker.parse::<usize>().ok().zip(cell.parse().ok());
                        let (worker, cell) = numbers.expect("a peer answers with the numbers that it was asked with");
                        // Whoever asked may have ended.
                        let _ = answers[worker].send(Checked { generation, cell, wrong: wrong.parse().ok() });
                    }
                    _ => drop(tell.send(answer.to_owned())),
                }
            }
        })?;
        let info = RegionInfo { segment: String::new(), address: 0, len: 0 };
        let (child, commands, words) = (Mutex::new(child), Mutex::new(commands), Mutex::new(words));
        let mut process = Process { child, commands, words, generation, info };
        let hello = process.word()?;
        let ["hello", segment, address, len] = hello.split(' ').collect::<Vec<_>>()[..] else {
            bail!("a peer began with {hello:?}");
        };
        process.info = RegionInfo { segment: segment.to_owned(), address: address.parse()?, len: len.parse()? };
        Ok(process)
    }

    fn word(&self) -> Result<String> {
        locked(&self.words).recv_timeout(LIMIT).context("the peer did not answer in time")
    }

    /// Asks whether a cell holds a pattern. False if the peer is gone.
    pub fn ask(&self, worker: usize, cell: usize, stamp: u64) -> bool {
        let mut commands = locked(&self.commands);
        commands.as_mut().is_some_and(|commands| writeln!(commands, "check {worker} {cell} {stamp}").is_ok())
    }

    /// Has it end its engine and itself, in order.
    pub fn leave(&self) -> Result<()> {
        writeln!(locked(&self.commands).as_mut().context("it was told to end before")?, "leave")?;
        let word = self.word()?;
        if word != "left" {
            bail!("a peer that was told to leave said {word:?}");
        }
        self.kill();
        Ok(())
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        let mut child = locked(&self.child);
        // Not reaped yet, or just now: then its number may be somebody else's.
        if matches!(child.try_wait(), Ok(None)) {
            // SAFETY: the child is ours and not reaped, so its number is still its own.
            unsafe { libc::kill(child.id() as i32, signal) };
        }
    }

    /// Ends it, whatever it does, and waits for that.
    pub fn kill(&self) {
        let mut child = locked(&self.child);
        // Both fail only if it has ended already.
        let _ = child.kill();
        let _ = child.wait();
        locked(&self.commands).take();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One life of a peer, with the segment by which it is reached.
#[derive(Debug)]
pub struct Incarnation {
    pub process: Process,
    pub segment: Segment,
    /// Cells of which nobody knows what they will hold: a late write may still land there.
    pub poisoned: AtomicUsize,
    clock: Instant,
    /// When a fault last had an effect on it, in milliseconds of `clock`; [`SICK`] while one has.
    disturbed: AtomicU64,
}

const SICK: u64 = u64::MAX;
/// How long after a fault its effects may come: Mooncake gives up on a silent peer after [`GIVES_UP`](crate::GIVES_UP).
const GRACE: Duration = Duration::from_secs(crate::GIVES_UP + 2);

impl Incarnation {
    pub fn new(process: Process, segment: Segment) -> Incarnation {
        let (poisoned, clock) = (AtomicUsize::new(0), Instant::now());
        // Connections to a new peer are made under the eyes of whatever happened before.
        Incarnation { process, segment, poisoned, clock, disturbed: AtomicU64::new(0) }
    }

    fn now(&self) -> u64 {
        self.clock.elapsed().as_millis() as u64
    }

    /// A fault begins.
    pub fn falls_sick(&self) {
        self.disturbed.store(SICK, SeqCst);
    }

    /// The fault is over.
    pub fn recovers(&self) {
        self.disturbed.store(self.now(), SeqCst);
    }

    /// Whether a fault can be the cause that an entry of this age fails.
    pub fn can_be_blamed(&self, born: Instant) -> bool {
        let disturbed = self.disturbed.load(SeqCst);
        let born = born.saturating_duration_since(self.clock).as_millis() as u64;
        disturbed == SICK || disturbed + GRACE.as_millis() as u64 >= born
    }
}

/// The present incarnation of each peer.
#[derive(Debug)]
pub struct Roster(Vec<RwLock<Arc<Incarnation>>>);

impl Roster {
    pub fn new(peers: Vec<Incarnation>) -> Roster {
        Roster(peers.into_iter().map(|peer| RwLock::new(Arc::new(peer))).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn get(&self, peer: usize) -> Arc<Incarnation> {
        Arc::clone(&self.0[peer].read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn replace(&self, peer: usize, new: Incarnation) {
        *self.0[peer].write().unwrap_or_else(PoisonError::into_inner) = Arc::new(new);
    }
}

/// Mooncake's master, for its metadata server; killed when dropped, and when the thread that started it ends.
#[derive(Debug)]
pub struct Master {
    child: Child,
    pub url: String,
}

/// The kernel kills it when the thread that starts it ends, from its first moment on: one that is stopped too.
fn ends_with_us(command: &mut Command) {
    // SAFETY: a system call that may be made between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        })
    };
}

impl Master {
    pub fn start() -> Result<Master> {
        let api = mooncake_sys::Api::load()?;
        let program = api.path().parent().unwrap_or(Path::new("")).join("mooncake_master");
        let free = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0")).into_iter().collect::<Result<Vec<_>, _>>()?;
        let ports = free.iter().map(|port| Ok(port.local_addr()?.port())).collect::<Result<Vec<_>>>()?;
        drop(free);
        let mut command = Command::new(&program);
        command
            .args([format!("-rpc_port={}", ports[0]), format!("-metrics_port={}", ports[1])])
            .args(["-metrics_host=127.0.0.1", "-enable_http_metadata_server=true"])
            .args(["-http_metadata_server_host=127.0.0.1", &format!("-http_metadata_server_port={}", ports[2])])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        ends_with_us(&mut command);
        let child = command.spawn().with_context(|| format!("could not start {}", program.display()))?;
        let master = Master { child, url: format!("http://127.0.0.1:{}/metadata", ports[2]) };
        let end = Instant::now() + LIMIT;
        while TcpStream::connect(("127.0.0.1", ports[2])).is_err() {
            if Instant::now() > end {
                bail!("the metadata server does not come up");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(master)
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
