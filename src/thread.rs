//! Threads of our own: named, and deaf to signals, which belong to the application's threads.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::thread::{Builder, JoinHandle};

pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // A thread inherits its signal mask: block everything while it is born.
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigfillset` initialises `all`; `pthread_sigmask` reads it and initialises `old`. Both calls can only fail for
    // a bad `how`, and this one is right.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let spawned = Builder::new().name(name.to_owned()).spawn(body);
    // SAFETY: `old` was initialised above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), ptr::null_mut()) };
    spawned
}
