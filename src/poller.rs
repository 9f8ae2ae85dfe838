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

/// Starts the thread. It ends when the last of its rings has.
pub(crate) fn spawn(controls: Arc<Controls>, idle: Duration) -> io::Result<JoinHandle<()>> {
    let idle = idle.as_nanos().try_into().unwrap_or(Nanos::MAX);
    thread::spawn("moonring-poller", move || run(Core::new(controls, idle)))
}

fn run(mut core: Core) {
    let doorbell = core.doorbell();
    loop {
        let now = clock::now();
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
            Hint::Spin => std::hint::spin_loop(),
            Hint::Yield => yield_now(),
            Hint::Sleep { until } => {
                let deadline = until.and_then(clock::instant);
                // Any ring is for us: there is one position.
                doorbell.park(0, deadline, || core.has_input());
            }
        }
    }
}
