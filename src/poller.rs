//! The poller: a thread that gives the core its turns and waits as the core says.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{JoinHandle, yield_now};
use std::time::Duration;

use crate::clock;
use crate::core::{Controls, Core};
use crate::thread;
use crate::transport::{Hint, Nanos};

/// A running poller, held by its rings.
#[derive(Debug)]
pub(crate) struct Poller {
    pub(crate) controls: Arc<Controls>,
    /// `None` where a test gives the turns.
    thread: Option<JoinHandle<()>>,
}

impl Poller {
    /// Starts the thread, for a first ring of `entries`. It ends when the last of its rings is closed.
    pub(crate) fn spawn(entries: u32, idle: Duration) -> io::Result<Poller> {
        let idle = idle.as_nanos().try_into().unwrap_or(Nanos::MAX);
        let controls = Arc::new(Controls::new(entries));
        let core = Core::new(Arc::clone(&controls), idle);
        let thread = thread::spawn("moonring-poller", move || run(core))?;
        Ok(Poller { controls, thread: Some(thread) })
    }

    /// Waits for the end of the thread; all of its rings are closed.
    pub(crate) fn join(self) {
        if let Some(thread) = self.thread {
            let _ = thread.join();
        }
    }

    #[cfg(test)]
    pub(crate) fn without_thread(entries: u32) -> Poller {
        Poller { controls: Arc::new(Controls::new(entries)), thread: None }
    }
}

fn run(mut core: Core) {
    let doorbell = core.doorbell();
    let mut now = clock::now();
    loop {
        let hint = catch_unwind(AssertUnwindSafe(|| core.turn(now))).unwrap_or_else(|_| {
            // The panic's message was printed by the hook. What the core holds is whole enough to end every entry.
            core.bury();
            Hint::Now
        });
        if core.is_done() {
            return;
        }
        match hint {
            Hint::Now => {}
            Hint::Spin => {
                std::hint::spin_loop();
                // For fences once more with the same time: to read the clock takes as long as to pause. Not for entries: a look
                // takes the queue's cache line from who is about to write it.
                if core.has_fired() {
                    continue;
                }
            }
            Hint::Yield => yield_now(),
            Hint::Sleep { until } => {
                let deadline = until.and_then(clock::instant);
                // Any ring is for us: there is one position.
                doorbell.park(0, deadline, || core.has_input());
            }
        }
        now = clock::now();
    }
}
