//! A Store in this process's memory, which tests can script.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::answer::{Answer, code};
use super::pool::{Backend, Job};
use super::request::{Kind, Request};
use crate::bytes;
use crate::transport::{RawMemory, TransportError};

/// A Store in this process's memory, for [`Client::memory`](super::Client::memory). Clones are the same Store. It keeps what is
/// put until it is removed, and does what a test asks of it.
#[derive(Clone, Debug)]
pub struct Memory {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    capacity: u64,
    state: Mutex<State>,
    /// A key is held no longer.
    released: Condvar,
}

#[derive(Debug, Default)]
struct State {
    objects: HashMap<Box<str>, Vec<u8>>,
    used: u64,
    held: HashSet<String>,
    failing: HashMap<String, Answer>,
    panicking: HashSet<String>,
    calls: Vec<Vec<String>>,
}

impl Memory {
    /// An empty Store with room for so many bytes.
    pub fn new(capacity: u64) -> Memory {
        let (state, released) = (Mutex::default(), Condvar::new());
        Memory { shared: Arc::new(Shared { capacity, state, released }) }
    }

    /// From now on calls that ask for `key` block before they do anything.
    pub fn hold(&self, key: &str) {
        self.state().held.insert(key.to_owned());
    }

    /// Lets calls go on that ask for `key`.
    pub fn release(&self, key: &str) {
        self.state().held.remove(key);
        self.shared.released.notify_all();
    }

    /// From now on whatever is asked for `key` fails with this number of Mooncake's, such as -707 for an expired lease.
    pub fn fail(&self, key: &str, code: i32) {
        self.state().failing.insert(key.to_owned(), Answer::failed(code));
    }

    /// From now on whatever is asked for `key` fails, and may touch the local range for ever, as far as anybody knows.
    pub fn give_up(&self, key: &str) {
        self.state().failing.insert(key.to_owned(), Answer::GIVEN_UP);
    }

    /// From now on calls that ask for `key` panic when they come to it.
    pub fn panic(&self, key: &str) {
        self.state().panicking.insert(key.to_owned());
    }

    /// The keys of each call that was made so far, in order.
    pub fn calls(&self) -> Vec<Vec<String>> {
        self.state().calls.clone()
    }

    /// An object's bytes.
    pub fn object(&self, key: &str) -> Option<Vec<u8>> {
        self.state().objects.get(key).cloned()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn backend(&self) -> impl Backend {
        InMemory(self.clone())
    }
}

#[derive(Debug)]
struct InMemory(Memory);

impl Backend for InMemory {
    fn call(&self, kind: Kind, jobs: &[Job], answers: &mut [Answer]) {
        let InMemory(memory) = self;
        let mut state = memory.state();
        state.calls.push(jobs.iter().map(|job| job.request.key().to_owned()).collect());
        while jobs.iter().any(|job| state.held.contains(job.request.key())) {
            state = memory.shared.released.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        for (Job { request, .. }, answer) in jobs.iter().zip(answers) {
            assert!(!state.panicking.contains(request.key()), "the call panics for {:?}, as asked", request.key());
            let failing = state.failing.get(request.key()).copied();
            *answer = failing.unwrap_or_else(|| state.serve(kind, request, memory.shared.capacity));
        }
    }

    fn register(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
        Ok(())
    }

    fn close(&self) {}
}

impl State {
    fn serve(&mut self, kind: Kind, request: &Request, capacity: u64) -> Answer {
        let found = self.objects.get(request.key());
        match (kind, found) {
            (Kind::Exist, found) => Answer::done(u64::from(found.is_some())),
            (Kind::Get | Kind::Remove, None) => Answer::failed(code::NOT_FOUND),
            (Kind::Put, Some(_)) => Answer::failed(code::EXISTS),
            (Kind::Get, Some(object)) if object.len() as u64 > request.len() => Answer::too_small(object.len() as u64),
            (Kind::Get, Some(object)) => {
                let mut left = &object[..];
                for slice in request.slices() {
                    let (now, rest) = left.split_at(left.len().min(slice.len()));
                    // SAFETY: the range lies in a registered region, of which the entry has a use until it is answered.
                    unsafe { bytes::copy(now.as_ptr(), slice.address as *mut u8, now.len()) };
                    left = rest;
                }
                Answer::done(object.len() as u64)
            }
            (Kind::Put, None) if self.used + request.len() > capacity => Answer::failed(code::NO_SPACE),
            (Kind::Put, None) => {
                let mut object = vec![0; request.len() as usize];
                let mut left = &mut object[..];
                for slice in request.slices() {
                    let (now, rest) = left.split_at_mut(slice.len());
                    // SAFETY: as above.
                    unsafe { bytes::copy(slice.address as *const u8, now.as_mut_ptr(), now.len()) };
                    left = rest;
                }
                self.used += request.len();
                self.objects.insert(request.key().into(), object);
                Answer::done(request.len())
            }
            (Kind::Remove, Some(_)) => {
                let object = self.objects.remove(request.key());
                self.used -= object.map_or(0, |object| object.len() as u64);
                Answer::done(0)
            }
        }
    }
}
