//! Peers in processes of their own: this test binary again, told by an environment variable to serve. They take commands
//! on standard input and answer each with one line on standard output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moonring::{Engine, Region, RegionInfo, Registered, Ring, mooncake, opcode};

/// For every wait that is expected to be short: long enough for a busy machine, and no test hangs.
pub const LIMIT: Duration = Duration::from_secs(20);

const ROLE: &str = "MOONRING_TEST_PEER";
/// What marks an answer among what the test harness prints.
const MARK: &str = "@peer ";

/// Real engines share two cores: one test at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Environment variables for [`engine`]: a metadata server's URL, and the engine's name there.
pub const METADATA: &str = "MOONRING_TEST_METADATA";
pub const NAME: &str = "MOONRING_TEST_NAME";

/// An engine in this process that writes nothing to standard error.
pub fn engine() -> Engine {
    let mut builder = mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal);
    if let Ok(url) = std::env::var(METADATA) {
        builder = builder.metadata(mooncake::Metadata::Http(url)).name(std::env::var(NAME).unwrap());
    }
    builder.build().unwrap_or_else(|error| panic!("{error}"))
}

/// Byte `at` of the pattern called `seed`.
pub fn pattern(seed: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add((at >> 16) as u8) ^ seed
}

pub fn fill(region: &Registered, seed: u8, offset: usize, len: usize) {
    let bytes: Vec<u8> = (offset..offset + len).map(|at| pattern(seed, at)).collect();
    region.write_at(offset, &bytes).unwrap();
}

/// How many bytes are the pattern's.
pub fn matching(region: &Registered, seed: u8, offset: usize, len: usize) -> usize {
    let mut bytes = vec![0; len];
    region.read_at(offset, &mut bytes).unwrap();
    bytes.iter().zip(offset..).filter(|&(&byte, at)| byte == pattern(seed, at)).count()
}

/// Everything that was submitted to the ring and waits for nothing is with the transport, which keeps it: the second Nop is taken
/// after the turn that took the first, and all that was submitted before it.
pub fn issued(ring: &mut Ring) {
    for _ in 0..2 {
        ring.submission().push(opcode::Nop::new().build().user_data(u64::MAX)).unwrap();
        ring.submit().unwrap();
        assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1));
        assert_eq!(ring.completion().next().unwrap().user_data(), u64::MAX);
    }
}

/// The command that runs one test of this binary.
pub fn this_test(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--include-ignored", "--test-threads=1"]);
    command
}

/// Runs the calling test again in a process of its own with `variables` set, since Mooncake reads them once. True in that
/// process; false in this one, after it has passed there.
pub fn rerun(name: &str, variables: &[(&str, &str)]) -> bool {
    const INSIDE: &str = "MOONRING_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let _alone = alone();
    // Its output is no result of this run: whoever counts results reads standard output.
    let mut child =
        this_test(name).env(INSIDE, "1").envs(variables.iter().copied()).stdout(std::io::stderr()).spawn().unwrap();
    let end = Instant::now() + 3 * LIMIT;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if Instant::now() > end => {
                let _ = child.kill();
                break child.wait().unwrap();
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{name} with {variables:?}: {status}");
    false
}

/// A peer; killed when dropped, or when this process dies.
pub struct Peer {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
    /// Its one region.
    pub info: RegionInfo,
}

impl Peer {
    /// Starts one with a region of `len` bytes.
    pub fn start(len: usize) -> Peer {
        Peer::start_with(len, &[])
    }

    pub fn start_with(len: usize, variables: &[(&str, &str)]) -> Peer {
        let mut child = this_test("a_peer_answers_and_ends_with_its_parent")
            .env(ROLE, len.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (lines, answers) = channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once(MARK) {
                    let _ = lines.send(answer.to_owned());
                }
            }
        });
        let info = RegionInfo { segment: String::new(), address: 0, len: 0 };
        let mut peer = Peer { child, commands, answers, info };
        let hello = peer.answer(LIMIT);
        let [segment, address, len] = hello.split(' ').collect::<Vec<_>>()[..] else { panic!("{hello}") };
        peer.info =
            RegionInfo { segment: segment.to_owned(), address: address.parse().unwrap(), len: len.parse().unwrap() };
        peer
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.commands.as_mut().unwrap(), "{command}").unwrap();
    }

    pub fn answer(&mut self, limit: Duration) -> String {
        self.answers.recv_timeout(limit).expect("the peer answers in time")
    }

    pub fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer(LIMIT)
    }

    pub fn fill(&mut self, seed: u8, offset: usize, len: usize) {
        assert_eq!(self.ask(&format!("fill {seed} {offset} {len}")), "filled");
    }

    pub fn matching(&mut self, seed: u8, offset: usize, len: usize) -> usize {
        self.ask(&format!("matching {seed} {offset} {len}")).parse().unwrap()
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal; SIGSTOP is waited for, because its threads stop a little later than `kill` returns.
    pub fn signal(&self, signal: i32) {
        // SAFETY: the child is ours and not reaped yet, so its number is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
        let end = Instant::now() + LIMIT;
        while signal == libc::SIGSTOP && !self.all_threads_are_stopped() {
            assert!(Instant::now() < end, "the peer does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn all_threads_are_stopped(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        // One that has ended meanwhile may have started another: not yet.
        threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat"))).all(|stat| {
            // The state follows the name, which ends with the last parenthesis.
            stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T')))
        })
    }

    /// True once it has ended, within the limit.
    pub fn ends_when_told(mut self, limit: Duration) -> bool {
        drop(self.commands.take());
        let end = Instant::now() + limit;
        loop {
            if self.child.try_wait().unwrap().is_some() {
                return true;
            }
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a peer's process: serves until the parent closes the pipe or dies. In any other: returns false at once.
pub fn serve() -> bool {
    let Ok(len) = std::env::var(ROLE) else { return false };
    // SAFETY: plain system calls. A stopped peer cannot see its pipe close, so the kernel kills it.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let engine = engine();
    let region = engine.register(Region::alloc(len.parse().unwrap()).unwrap()).unwrap();
    let mut ring = Ring::builder().build(64, &engine).unwrap();
    let answer = |text: String| {
        println!("\n{MARK}{text}");
        std::io::stdout().flush().unwrap();
    };
    answer(format!("{} {} {}", engine.name(), region.address(), region.len()));
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "fill" => {
                fill(&region, number(1) as u8, number(2) as usize, number(3) as usize);
                answer("filled".into());
            }
            "matching" => {
                answer(matching(&region, number(1) as u8, number(2) as usize, number(3) as usize).to_string());
            }
            // write <segment> <address> <len>: of the region's first bytes. Answers when it has begun and when it has ended.
            "write" => {
                let segment = engine.open_segment(words[1], LIMIT).unwrap();
                let local = region.slice(0..number(3) as usize).unwrap();
                ring.submission().push(opcode::Write::new(local, segment.at(number(2))).build()).unwrap();
                ring.submit().unwrap();
                answer("begun".into());
                ring.wait_timeout(1, LIMIT).unwrap();
                answer(ring.completion().next().unwrap().res().to_string());
            }
            "unregister" => {
                answer(format!("{:?}", region.unregister()));
            }
            // Ends the engine as it should end, which takes its entries out of the metadata.
            "leave" => {
                drop((ring, region, engine));
                answer("left".into());
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(0) }
            }
            other => panic!("no such command: {other}"),
        }
    }
    // SAFETY: ends the process at once, without the engine's second of tidying up.
    unsafe { libc::_exit(0) }
}
