//! What happens to a process with real engines: signals, fork, and its end with work outstanding.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;
use std::{env, fs, thread};

use moonring::opcode::{Read, Write};
use moonring::{Refusal, Region, Ring, WaitError};

use crate::children::{wait_for, wait_for_program};
use crate::peer::{LIMIT, Peer, alone, engine, rerun, this_test};

/// Neither ours, nor Mooncake's own, nor those of libraries that are loaded with it.
#[test]
#[ignore = "needs cargo xtask setup"]
fn an_engines_threads_take_no_signals() {
    // In a process of its own: other tests start threads too.
    if !rerun("process::an_engines_threads_take_no_signals", &[]) {
        return;
    }
    let peer = Peer::start(4096);
    let tasks = || fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let before: Vec<_> = tasks().collect();
    let engine = engine();
    let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    // With everything that the first transfer starts.
    ring.submission().push(Write::new(region.slice(..).unwrap(), segment.at(peer.info.address)).build()).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), Ok(4096));
    let mut checked = 0;
    for task in tasks().filter(|task| !before.contains(task)) {
        let Ok(status) = fs::read_to_string(task.join("status")) else { continue };
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        let blocked = u64::from_str_radix(&line("SigBlk:"), 16).unwrap();
        println!("{} {blocked:016x}", line("Name:"));
        let blocks = |signal: i32| blocked >> (signal - 1) & 1 != 0;
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD] {
            // A Go runtime, as etcd's client brings it along, opens some signals for itself, whatever the mask was when it
            // started: SIGURG, which tells its threads from others, and SIGCHLD.
            let go = signal == libc::SIGCHLD && !blocks(libc::SIGURG);
            assert!(blocks(signal) || go, "{}: {signal}: {blocked:x}", line("Name:"));
        }
        checked += 1;
    }
    assert!(checked >= 3, "{checked}");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_forked_child_can_drop_a_ring_with_transfers_in_flight() {
    let _alone = alone();
    let peer = Peer::start(4096);
    let engine = engine();
    let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().grace(Duration::from_secs(3600)).build(8, &engine).unwrap();
    let entry = || Read::new(region.slice(..).unwrap(), segment.at(peer.info.address)).build();
    peer.signal(libc::SIGSTOP);
    ring.submission().push(entry()).unwrap();
    ring.submit().unwrap();
    for ends_by_exit in [false, true] {
        // SAFETY: the child allocates, which glibc allows after a fork, and ends without running any of the test harness.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let pushed = ring.submission().push(entry()).err().map(|error| error.reason);
            let good = pushed == Some(Refusal::Forked) && ring.wait(1) == Err(WaitError::Forked);
            drop((ring, region, segment, engine));
            let code = if good { 0 } else { 1 };
            if ends_by_exit {
                std::process::exit(code);
            }
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(code) }
        }
        let status = wait_for(child);
        println!("exit {ends_by_exit}: {status}");
        assert!(status.success(), "by exit: {ends_by_exit}: {status}");
    }
    peer.signal(libc::SIGCONT);
    assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1));
    assert_eq!(ring.completion().next().unwrap().result(), Ok(4096));
}

const HOW: &str = "MOONRING_TEST_END";
const PEERS: &str = "MOONRING_TEST_PEERS";

/// A ring with transfers to a stopped peer, and one that is busy with another; then the end.
fn end_with_work_outstanding(how: &str) {
    let peers = env::var(PEERS).unwrap();
    let [stopped, at, running, also_at, id] = peers.split(' ').collect::<Vec<_>>()[..] else { panic!("{peers}") };
    let also_at: u64 = also_at.parse().unwrap();
    let engine = engine();
    let region = engine.register(Region::alloc(1 << 20).unwrap()).unwrap();
    let mut ring = Ring::builder().build(64, &engine).unwrap();
    let segment = engine.open_segment(stopped, LIMIT).unwrap();
    let other = engine.open_segment(running, LIMIT).unwrap();
    // SAFETY: a peer of the parent's, which starts it again.
    assert_eq!(unsafe { libc::kill(id.parse().unwrap(), libc::SIGSTOP) }, 0);
    for n in 0..8 {
        let local = region.slice(n * 4096..(n + 1) * 4096).unwrap();
        let write = Write::new(local, segment.at(at.parse::<u64>().unwrap() + n as u64 * 4096));
        ring.submission().push(write.build()).unwrap();
    }
    ring.submit().unwrap();
    thread::spawn(move || {
        let mut ring = Ring::builder().build(64, &engine).unwrap();
        loop {
            for n in 0..32 {
                let local = region.slice(n * 4096..(n + 1) * 4096).unwrap();
                let read = Read::new(local, other.at(also_at + n as u64 * 4096));
                ring.submission().push(read.build()).unwrap();
            }
            ring.submit_and_wait(32).unwrap();
            ring.completion().for_each(drop);
        }
    });
    thread::spawn(move || {
        let _ = ring.wait(8);
    });
    thread::sleep(Duration::from_millis(50));
    match how {
        "return" => {}
        "exit" => std::process::exit(7),
        "panic" => {
            extern "C" fn cannot_unwind() {
                panic!("as with panic=abort");
            }
            cannot_unwind()
        }
        _ => std::process::abort(),
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_process_ends_at_once_with_transfers_in_flight() {
    if let Ok(how) = env::var(HOW) {
        return end_with_work_outstanding(&how);
    }
    let _alone = alone();
    let (stopped, running) = (Peer::start(1 << 20), Peer::start(1 << 20));
    let [a, b] = [&stopped, &running].map(|peer| format!("{} {}", peer.info.segment, peer.info.address));
    for how in ["return", "exit", "panic", "abort"] {
        let mut command = this_test("process::a_process_ends_at_once_with_transfers_in_flight");
        // The look-up needs the peer, so the child stops it afterwards.
        command.env(HOW, how).env(PEERS, format!("{a} {b} {}", stopped.id()));
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let status = wait_for_program(&mut child);
        stopped.signal(libc::SIGCONT);
        match how {
            "return" => assert!(status.success(), "{how}: {status}"),
            "exit" => assert_eq!(status.code(), Some(7), "{how}: {status}"),
            _ => assert_eq!(status.signal(), Some(libc::SIGABRT), "{how}: {status}"),
        }
    }
}
