//! Waiting for child processes, none of which outlives the limit.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

/// Nothing here takes nearly as long.
const LIMIT: Duration = Duration::from_secs(20);

/// Waits for the end of a program, which is killed at the limit.
pub fn wait_for_program(child: &mut Child) -> ExitStatus {
    let end = Instant::now() + LIMIT;
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return status,
            None if Instant::now() > end => child.kill().unwrap(),
            None => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Waits for the end of a forked child, which is killed at the limit.
pub fn wait_for(child: i32) -> ExitStatus {
    let end = Instant::now() + LIMIT;
    let mut status = 0;
    // SAFETY: the child is ours and not reaped yet.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > end {
            // SAFETY: as above.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        thread::sleep(Duration::from_millis(2));
    }
    ExitStatus::from_raw(status)
}
