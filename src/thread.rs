//! Threads of our own: named, and deaf to signals, which belong to the application's threads.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::thread::{Builder, JoinHandle};

pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let _deaf = Deaf::new();
    Builder::new().name(name.to_owned()).spawn(body)
}

/// While it lives, the calling thread takes no signals, and threads that it starts never do: a thread inherits the mask.
pub(crate) struct Deaf {
    before: libc::sigset_t,
}

impl Deaf {
    pub(crate) fn new() -> Deaf {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigfillset` initialises `all`; `pthread_sigmask` reads it and initialises `before`. Both calls can only fail
        // for a bad `how`, and this one is right.
        let before = unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        Deaf { before }
    }
}

impl Drop for Deaf {
    fn drop(&mut self) {
        // SAFETY: the mask is the one that the call above gave.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, ptr::null_mut()) };
    }
}
