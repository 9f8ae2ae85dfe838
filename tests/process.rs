//! What happens to a process with rings: signals, fork, and its end with work outstanding.

#[path = "common/children.rs"]
mod children;
mod common;

use std::io::ErrorKind;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::os::unix::thread::JoinHandleExt;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use children::{wait_for, wait_for_program};
use common::{LIMIT, Setup, reap_exactly};
use moonring::fence::FenceStatus;
use moonring::opcode::{Cancel, MsgRing, Nop, Read, Select, Wait};
use moonring::sim::Sim;
use moonring::{ControlError, Engine, OpenError, Refusal, Region, Ring, WaitError, fence};

/// The two sides of a fork.
enum Fork {
    Child(OwnedFd),
    Parent(i32, OwnedFd),
}

fn fork() -> Fork {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors, which are owned from then on.
    let (read, write) = unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    };
    // SAFETY: the child allocates, which glibc allows after a fork, and ends without running any of the test harness.
    match unsafe { libc::fork() } {
        0 => Fork::Child(write),
        child => {
            assert!(child > 0);
            Fork::Parent(child, read)
        }
    }
}

/// Ends a forked child with what went wrong in it.
fn end(to: OwnedFd, result: Result<(), String>) -> ! {
    let said = result.err().unwrap_or_default();
    // SAFETY: the descriptor and the text are there; `_exit` ends the process at once.
    unsafe {
        libc::write(to.as_raw_fd(), said.as_ptr().cast(), said.len());
        libc::_exit(i32::from(!said.is_empty()))
    }
}

/// Waits for a forked child; panics with what went wrong in it.
fn check(child: i32, from: OwnedFd) {
    let status = wait_for(child);
    let mut said = String::new();
    let _ = std::io::Read::read_to_string(&mut fs::File::from(from), &mut said);
    assert!(status.success(), "the child: {status}: {said}");
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Result<(), String> {
    if got == want { Ok(()) } else { Err(format!("{what}: {got:?}, not {want:?}")) }
}

/// Long enough that a child that waits for it has hung.
const FOR_EVER: Duration = Duration::from_secs(3600);

#[test]
fn a_forked_childs_calls_are_errors_and_its_drops_do_nothing() {
    let engine = Engine::loopback();
    let ours = engine.register(Region::alloc(4096).unwrap()).unwrap();
    ours.write_at(0, b"parent").unwrap();
    let peer = engine.open_segment(engine.name(), LIMIT).unwrap();
    let mut ring = Ring::builder().grace(FOR_EVER).build(16, &engine).unwrap();
    let mut submitter = ring.submitter();
    let controller = ring.controller();
    let eventfd = ring.eventfd().unwrap();
    let messages = ring.messages();
    let (signaller, pending) = fence::host();
    let (mut timeline_signaller, timeline) = fence::timeline(0);
    let later = timeline.at(5);
    ring.submission().push(Wait::new().build().wait(&pending).user_data(1)).unwrap();
    ring.submit().unwrap();
    ring.submission().push(Nop::new().build().user_data(2)).unwrap();
    submitter.push(Nop::new().build().user_data(3)).unwrap();
    let (local, remote) = (ours.slice(0..6).unwrap(), peer.at(ours.address()));
    let entry = move || Read::new(local.clone(), remote.clone()).build();

    match fork() {
        Fork::Child(to) => end(
            to,
            (move || {
                let refused = |result: Result<(), moonring::PushError>| result.err().map(|error| error.reason);
                expect("push", refused(ring.submission().push(entry())), Some(Refusal::Forked))?;
                expect("push of a submitter", refused(submitter.push(entry())), Some(Refusal::Forked))?;
                expect("push of a new submitter", refused(ring.submitter().push(entry())), Some(Refusal::Forked))?;
                let chain = ring.submission().push_chain(vec![entry()]);
                expect("push_chain", chain.err().map(|error| error.reason), Some(Refusal::Forked))?;
                let fenced = ring.submission().push_fenced(entry());
                expect("push_fenced", fenced.err().map(|error| error.reason), Some(Refusal::Forked))?;
                expect("submit", ring.submit(), Ok(0))?;
                expect("submit of a submitter", submitter.submit(), Ok(0))?;
                expect("wait", ring.wait(1), Err(WaitError::Forked))?;
                expect("wait_timeout", ring.wait_timeout(1, FOR_EVER), Err(WaitError::Forked))?;
                expect("wait_min", ring.wait_min(1, FOR_EVER, FOR_EVER), Err(WaitError::Forked))?;
                expect("submit_and_wait", ring.submit_and_wait(1), Err(WaitError::Forked))?;
                let mut context = Context::from_waker(Waker::noop());
                let next = pin!(ring.next()).as_mut().poll(&mut context).map(|next| next.map(drop));
                expect("next", next, Poll::Ready(Err(WaitError::Forked)))?;
                expect("completions", ring.completion().count(), 0)?;
                expect("cancel", controller.cancel(Cancel::new(Select::any())), Err(ControlError::Forked))?;
                expect("quiesce", controller.quiesce(Select::any(), FOR_EVER), Err(ControlError::Forked))?;
                expect("stats", controller.stats().err(), Some(ControlError::Forked))?;
                expect("eventfd", eventfd.clear(), false)?;
                eventfd.unmute();

                let register = engine.register(Region::alloc(4096).unwrap()).map(drop).map_err(text);
                expect("register", register.is_err_and(|error| error.contains("forked")), true)?;
                let open = engine.open_segment(engine.name(), FOR_EVER);
                expect("open", matches!(open, Err(OpenError::Transport(_))), true)?;
                let reopen = engine.reopen_segment(engine.name(), FOR_EVER);
                expect("reopen", matches!(reopen, Err(OpenError::Transport(_))), true)?;
                expect("unregister", ours.unregister().is_err(), true)?;
                let build = Ring::builder().build(4, &engine).map(drop).map_err(|error| error.kind());
                expect("build", build, Err(ErrorKind::NotConnected))?;

                // Memory is the child's own copy.
                let mut bytes = [0; 6];
                ours.read_at(0, &mut bytes).map_err(text)?;
                expect("memory", &bytes, b"parent")?;
                ours.write_at(0, b"child!").map_err(text)?;

                // What is built here works, with fences of before the fork too, and cannot reach back.
                let own = Engine::loopback();
                let attached = Ring::builder().attach(&ring).build(4, &own).map(drop).map_err(|error| error.kind());
                expect("attach", attached, Err(ErrorKind::NotConnected))?;
                let mut here = Ring::builder().build(4, &own).map_err(text)?;
                let message = here.submission().push(MsgRing::new(&messages, 1, 1).build());
                expect("message", refused(message), Some(Refusal::TargetClosed))?;
                here.submission().push(Wait::new().build().wait(&pending)).map_err(text)?;
                here.submit().map_err(text)?;
                expect("fence", pending.wait_timeout(FOR_EVER), FenceStatus::Pending)?;
                expect("timeline", later.wait_timeout(FOR_EVER), FenceStatus::Pending)?;
                signaller.signal();
                timeline_signaller.signal(5).map_err(text)?;
                let both = (pending.status(), later.status());
                expect("signalled", both, (FenceStatus::Signalled, FenceStatus::Signalled))?;
                expect("own ring", here.wait_timeout(1, LIMIT), Ok(1))?;
                drop(here);

                // The grace time is for ever: whoever waits hangs.
                drop((submitter, controller, messages, eventfd));
                let report = ring.close(FOR_EVER);
                expect("close", (report.finished, report.stats), (false, None))?;
                drop((ours, peer, engine, own));
                Ok(())
            })(),
        ),
        Fork::Parent(child, from) => check(child, from),
    }

    // The parent has lost nothing and got nothing of the child's.
    let mut bytes = [0; 6];
    ours.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"parent");
    assert_eq!((pending.status(), later.status()), (FenceStatus::Pending, FenceStatus::Pending));
    assert!(!eventfd.clear());
    assert_eq!(ring.completion().count(), 0);
    submitter.submit().unwrap();
    ring.submission().push(entry().user_data(4)).unwrap();
    ring.submit().unwrap();
    let mut seen: Vec<_> = reap_exactly(&mut ring, 3).iter().map(|cqe| cqe.user_data()).collect();
    seen.sort_unstable();
    assert_eq!(seen, [2, 3, 4]);
    signaller.signal();
    assert_eq!(reap_exactly(&mut ring, 1)[0].user_data(), 1);
    assert_eq!(controller.stats().unwrap().total.ok, 4);
    timeline_signaller.signal(5).unwrap();
    assert!(ring.close(LIMIT).finished);
}

/// A ring's only producer knows of places ahead of its pushes, in the child as in the parent.
#[test]
fn a_forked_childs_push_is_refused_where_places_are_known() {
    let mut ring = Ring::builder().build(4, &Engine::loopback()).unwrap();
    ring.submission().push(Nop::new().build().user_data(1)).unwrap();
    match fork() {
        Fork::Child(to) => {
            let pushed = ring.submission().push(Nop::new().build().user_data(2));
            end(to, expect("push", pushed.err().map(|error| error.reason), Some(Refusal::Forked)));
        }
        Fork::Parent(child, from) => check(child, from),
    }
    ring.submission().push(Nop::new().build().user_data(3)).unwrap();
    ring.submit().unwrap();
    let seen: Vec<_> = reap_exactly(&mut ring, 2).iter().map(|cqe| cqe.user_data()).collect();
    assert_eq!(seen, [1, 3]);
}

/// Completions that were there at the fork are copies: a wait does not count them.
#[test]
fn a_forked_childs_waits_are_errors_whatever_was_ready() {
    let mut ring = Ring::builder().build(4, &Engine::loopback()).unwrap();
    ring.submission().push(Nop::new().build().user_data(7)).unwrap();
    ring.submit().unwrap();
    assert_eq!(ring.wait(1), Ok(1));
    match fork() {
        Fork::Child(to) => end(
            to,
            (move || {
                expect("wait", ring.wait(1), Err(WaitError::Forked))?;
                expect("wait for none", ring.wait(0), Err(WaitError::Forked))?;
                expect("wait_timeout", ring.wait_timeout(1, FOR_EVER), Err(WaitError::Forked))?;
                expect("submit_and_wait", ring.submit_and_wait(1), Err(WaitError::Forked))?;
                let mut context = Context::from_waker(Waker::noop());
                let next = pin!(ring.next()).as_mut().poll(&mut context).map(|next| next.map(drop));
                expect("next", next, Poll::Ready(Err(WaitError::Forked)))?;
                let copies: Vec<u64> = ring.completion().map(|cqe| cqe.user_data()).collect();
                expect("completions", copies, vec![7])
            })(),
        ),
        Fork::Parent(child, from) => check(child, from),
    }
    assert_eq!(reap_exactly(&mut ring, 1)[0].user_data(), 7);
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Forked while other threads push, reap, signal, open and register, each child drops everything; none hangs, though a lock
/// may have been held at that moment.
#[test]
fn a_child_forked_in_the_middle_of_work_can_drop_everything() {
    let mut s = Setup::loopback(32);
    let (stop, engine, name) = (AtomicBool::new(false), s.engine.clone(), s.peer.name().to_owned());
    // The peer is there for as long as anybody looks for it.
    let _theirs = s.theirs.clone();
    let submitters = [s.ring.submitter(), s.ring.submitter()];
    let controller = s.ring.controller();
    let mut own = s.ring.submitter();
    thread::scope(|scope| {
        let stop = &stop;
        for mut submitter in submitters {
            scope.spawn(move || {
                while !stop.load(SeqCst) {
                    let (signaller, fence) = fence::host();
                    let _ = submitter.push(Wait::new().build().wait(&fence));
                    submitter.submit().unwrap();
                    signaller.signal();
                }
            });
        }
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                let _ = controller.stats();
                engine.reopen_segment(&name, LIMIT).unwrap();
                let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
                region.unregister().unwrap();
            }
        });
        for _ in 0..100 {
            let _ = s.ring.wait_timeout(1, Duration::from_millis(1));
            s.ring.completion().for_each(drop);
            match fork() {
                Fork::Child(to) => {
                    let pushed = own.push(Nop::new().build()).map_err(|error| error.reason);
                    let asked = controller.stats();
                    drop((own, s));
                    end(to, expect("calls", (pushed, asked.is_err()), (Err(Refusal::Forked), true)))
                }
                Fork::Parent(child, from) => check(child, from),
            }
        }
        stop.store(true, SeqCst);
        // Whoever waits for room in the ring has it.
        while s.ring.wait_timeout(1, Duration::from_millis(20)).is_ok() {
            s.ring.completion().for_each(drop);
        }
    });
}

/// Every thread of ours takes no signal at all.
#[test]
fn signals_go_to_the_applications_threads_and_waits_go_on() {
    static TAKEN_BY: AtomicI32 = AtomicI32::new(0);
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    extern "C" fn note(_signal: i32) {
        TAKEN_BY.store(
            // SAFETY: a plain system call.
            unsafe { libc::gettid() },
            SeqCst,
        );
        TAKEN.fetch_add(1, SeqCst);
    }
    // SAFETY: the handler only makes a system call and stores to atomics; without SA_RESTART, system calls end with EINTR.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = note as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    let mut s = Setup::simulated(8, Sim::new(1).delay(Duration::from_millis(400)..Duration::from_millis(400)));
    let (signaller, pending) = fence::host();
    // A thread names itself when it starts.
    s.push(Nop::new().build());
    s.reap(1);
    let mut names = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let path = task.unwrap().path();
        let Ok(name) = fs::read_to_string(path.join("comm")) else { continue };
        if !name.starts_with("moonring") {
            continue;
        }
        // Threads of other tests come to their end at any time.
        let Ok(status) = fs::read_to_string(path.join("status")) else { continue };
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        let blocked = u64::from_str_radix(blocked, 16).unwrap();
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF] {
            assert_ne!(blocked >> (signal - 1) & 1, 0, "{name}: {signal}: {blocked:x}");
        }
        names.push(name);
    }
    assert!(names.iter().any(|name| name.starts_with("moonring-poller")), "{names:?}");

    // A thread that waits in each way is interrupted again and again, and goes on waiting.
    let read = s.read(0, 8);
    s.push(read);
    s.push(Wait::new().build().wait(&pending));
    s.ring.submit().unwrap();
    let controller = s.ring.controller();
    let quiet = thread::spawn({
        let controller = controller.clone();
        move || controller.quiesce(Select::any(), LIMIT)
    });
    let fenced = thread::spawn({
        let pending = pending.clone();
        move || pending.wait_timeout(LIMIT)
    });
    let waiter = thread::spawn(move || {
        let waited = s.ring.wait(2);
        (waited, s.ring.completion().filter(|cqe| cqe.result().is_ok()).count())
    });
    for round in 1..=20 {
        for thread in [quiet.as_pthread_t(), fenced.as_pthread_t(), waiter.as_pthread_t()] {
            // SAFETY: the thread is not joined yet.
            assert_eq!(unsafe { libc::pthread_kill(thread, libc::SIGUSR1) }, 0);
        }
        thread::sleep(Duration::from_millis(5));
        assert!(!quiet.is_finished() && !fenced.is_finished() && !waiter.is_finished(), "round {round}");
    }
    signaller.signal();
    assert_eq!(fenced.join().unwrap(), FenceStatus::Signalled);
    assert_eq!(waiter.join().unwrap(), (Ok(2), 2));
    assert_eq!(quiet.join().unwrap(), Ok(()));

    // One to the process is taken by a thread that is not ours.
    let before = TAKEN.load(SeqCst);
    let _ring = Ring::builder().build(8, &Engine::loopback()).unwrap();
    for _ in 0..20 {
        // SAFETY: to ourselves; there is a handler.
        assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) }, 0);
    }
    let end = Instant::now() + LIMIT;
    while TAKEN.load(SeqCst) == before {
        assert!(Instant::now() < end, "nobody took the signal");
        thread::yield_now();
    }
    let comm = fs::read_to_string(format!("/proc/self/task/{}/comm", TAKEN_BY.load(SeqCst)));
    assert!(!comm.is_ok_and(|name| name.starts_with("moonring")));
}

/// How a process ends.
const ENDS: [&str; 5] = ["return", "exit", "exit elsewhere", "panic", "abort"];
const HOW: &str = "MOONRING_TEST_END";

/// Builds rings with work in every state, and ends the process that way while others wait.
fn end_with_work_outstanding(how: &str) {
    let slow = Sim::new(1).delay(FOR_EVER..FOR_EVER);
    let mut s = Setup::simulated(16, slow);
    let mut busy = Setup::loopback(16);
    let (signaller, pending) = fence::host();
    for n in 0..4 {
        let read = s.read(n * 64, 64);
        s.push(read);
    }
    s.push(Wait::new().build().wait(&pending));
    s.ring.submit().unwrap();
    // Pushed and not submitted.
    s.push(Nop::new().build());
    let waiting = Arc::new(Barrier::new(3));
    let other = Arc::clone(&waiting);
    thread::spawn(move || {
        other.wait();
        let _ = s.ring.wait(5);
        drop(signaller);
    });
    let other = Arc::clone(&waiting);
    thread::spawn(move || {
        other.wait();
        loop {
            for n in 0..16 {
                let read = busy.read(n * 64, 64);
                busy.push(read);
            }
            busy.reap(16);
        }
    });
    waiting.wait();
    thread::sleep(Duration::from_millis(20));
    match how {
        // The test ends well, and then the program's main function does.
        "return" => {}
        "exit" => std::process::exit(7),
        "exit elsewhere" => {
            thread::spawn(|| std::process::exit(7));
            thread::sleep(FOR_EVER);
        }
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
fn a_process_ends_at_once_with_work_outstanding() {
    const NAME: &str = "a_process_ends_at_once_with_work_outstanding";
    if let Ok(how) = env::var(HOW) {
        return end_with_work_outstanding(&how);
    }
    for how in ENDS {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", NAME, "--test-threads=1"]).env(HOW, how);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let status = wait_for_program(&mut child);
        match how {
            "return" => assert!(status.success(), "{how}: {status}"),
            "exit" | "exit elsewhere" => assert_eq!(status.code(), Some(7), "{how}: {status}"),
            _ => assert_eq!(status.signal(), Some(libc::SIGABRT), "{how}: {status}"),
        }
    }
}
