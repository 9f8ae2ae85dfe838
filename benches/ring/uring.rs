//! The kernel's io_uring, with Nops: one system call for a batch, or with SQPOLL a kernel thread on the poller's core.

use std::io;

use io_uring::{IoUring, opcode};

use crate::machine::{self, POLLER};
use crate::nop::{IN_FLIGHT, Pair};

pub struct Uring(IoUring);

impl Uring {
    pub fn new(sqpoll: bool) -> io::Result<Uring> {
        let mut builder = IoUring::builder();
        if sqpoll {
            builder.setup_sqpoll(1_000).setup_sqpoll_cpu(machine::core(POLLER) as u32);
        }
        Ok(Uring(builder.build(IN_FLIGHT as u32)?))
    }
}

impl Pair for Uring {
    fn push(&mut self, first: u64, count: u64) {
        let mut queue = self.0.submission();
        for user_data in first..first + count {
            let entry = opcode::Nop::new().build().user_data(user_data);
            // SAFETY: a Nop refers to nothing.
            while unsafe { queue.push(&entry) }.is_err() {
                // The kernel's thread has not taken all that it was shown.
                queue.sync();
            }
        }
        drop(queue);
        self.0.submit().unwrap();
    }

    fn reap(&mut self, next: u64) -> u64 {
        let mut reaped = 0;
        for cqe in self.0.completion() {
            assert_eq!((cqe.user_data(), cqe.result()), (next + reaped, 0));
            reaped += 1;
        }
        reaped
    }

    fn wait(&mut self, _count: u64) {
        // In either mode the results of Nops come by themselves: a call that waits would only add to them.
        std::hint::spin_loop();
    }
}
