//! The decode side's compute stream: what is queued runs in order, and later.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use moonring::fence::{self, Fence, Signaller};
use moonring::{AccessError, Registered};

/// A stream like a GPU's, on a thread of its own. Queueing returns at once; whoever needs to know when the work has
/// been done takes a [`fence`](Self::fence) behind it.
pub struct Stream {
    /// `None` once no more work will come.
    queue: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

enum Work {
    Kernel(Duration),
    Copy { from: usize, to: usize, len: usize },
    Signal(Signaller),
}

impl Stream {
    /// A stream that works on `pool`.
    pub fn start(pool: Registered) -> io::Result<Stream> {
        let (queue, work) = channel();
        let thread = thread::Builder::new().name("compute".into()).spawn(move || {
            if let Err(error) = run(&pool, &work) {
                // The signallers that are still queued are dropped now, which fails their fences and with those every
                // entry that waits for one: nobody is left waiting.
                eprintln!("the compute stream failed: {error}");
            }
        })?;
        Ok(Stream { queue: Some(queue), thread: Some(thread) })
    }

    /// Queues a kernel that runs for so long.
    pub fn kernel(&self, time: Duration) {
        self.queue(Work::Kernel(time));
    }

    /// Queues a copy of `len` bytes inside the pool.
    pub fn copy(&self, from: usize, to: usize, len: usize) {
        self.queue(Work::Copy { from, to, len });
    }

    /// A fence that signals when everything queued so far has been done.
    pub fn fence(&self) -> Fence {
        let (signaller, fence) = fence::host();
        self.queue(Work::Signal(signaller));
        fence
    }

    fn queue(&self, work: Work) {
        if let Some(queue) = &self.queue {
            // A stream that has failed takes no more work. That need not be said here: a refused signaller is dropped,
            // and its fence fails.
            let _ = queue.send(work);
        }
    }
}

fn run(pool: &Registered, work: &Receiver<Work>) -> Result<(), AccessError> {
    for work in work {
        match work {
            Work::Kernel(time) => thread::sleep(time),
            Work::Copy { from, to, len } => pool.copy_within(from, to, len)?,
            Work::Signal(signaller) => signaller.signal(),
        }
    }
    Ok(())
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
