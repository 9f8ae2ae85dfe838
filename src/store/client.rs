//! A client of a Store: its handle, its registrations, its end.

use std::fmt;
use std::mem;
use std::process;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use super::memory::Memory;
use super::pool::{Backend, Pool};
use crate::engine::{Engine, next_id};
use crate::keep;
use crate::region::{RegionInner, Registered, UnregisterError};
use crate::thread;
use crate::transport::TransportError;

/// Workers of a client unless set.
pub(super) const WORKERS: u32 = 4;

/// A client of a Store, for entries of any ring on its engine. Cheap to clone. The last handle, or entry with it, ends the
/// client, on a thread of its own: see [`close`](Self::close).
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<ClientInner>,
}

pub(crate) struct ClientInner {
    /// Tells clients apart, and from engines.
    pub(crate) id: u64,
    pub(crate) engine: Engine,
    /// What entries name it by, among the segments and clients of its engine.
    pub(crate) target: u32,
    name: String,
    pub(crate) pool: Arc<Pool>,
    threads: Vec<JoinHandle<()>>,
    ended: bool,
    registered: RwLock<Vec<Arc<RegionInner>>>,
    /// One registration or unregistration at a time.
    registering: Mutex<()>,
    /// The process that made this.
    process: u32,
}

impl Client {
    /// A client of a Store in this process's memory, with four workers. It needs nothing and really keeps bytes: for tests,
    /// docs and a first look.
    ///
    /// # Errors
    /// [`ConnectError::Thread`].
    pub fn memory(engine: &Engine, memory: &Memory) -> Result<Client, ConnectError> {
        Client::over(engine, "memory".to_owned(), WORKERS, Box::new(memory.backend()))
    }

    pub(super) fn over(
        engine: &Engine,
        name: String,
        workers: u32,
        backend: Box<dyn Backend>,
    ) -> Result<Client, ConnectError> {
        let mut inner = ClientInner::new(engine, name, workers, backend);
        for worker in 0..workers {
            let pool = Arc::clone(&inner.pool);
            let thread = thread::spawn("moonring-store", move || pool.serve(worker));
            // Those that were started end with `inner`.
            inner.threads.push(thread.map_err(ConnectError::Thread)?);
        }
        Ok(Client { inner: Arc::new(inner) })
    }

    /// Somebody else serves its pool, and ends it.
    #[cfg(test)]
    pub(crate) fn without_threads(engine: &Engine, workers: u32, backend: Box<dyn Backend>) -> Client {
        let mut inner = ClientInner::new(engine, "tests".to_owned(), workers, backend);
        inner.ended = true;
        Client { inner: Arc::new(inner) }
    }

    /// What it is a client of: the master's address.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Lets Gets and Puts use a region of the same engine. What the region is for entries towards segments does not change.
    /// Blocks while the Store registers it. A region that is registered already stays as it is.
    ///
    /// # Errors
    /// [`TransportError`] with the region: it is another engine's, is unregistered, or the Store refuses it.
    pub fn register(&self, region: &Registered) -> Result<(), TransportError> {
        let memory = region.region.memory;
        let refuse =
            |why: &str| TransportError { what: format!("registering {memory} with a Store"), code: 0, why: why.into() };
        if region.region.engine != self.inner.engine.id() {
            return Err(refuse("it is registered with another engine than the Store client's"));
        }
        let _alone = self.inner.registering.lock().unwrap_or_else(PoisonError::into_inner);
        if self.inner.registered().iter().any(|known| Arc::ptr_eq(known, &region.region)) {
            return Ok(());
        }
        // Over the call: nobody unregisters it from the engine meanwhile.
        if !region.region.begin_use() {
            return Err(refuse("it is not registered with the engine any more"));
        }
        let answer = self.inner.pool.backend().register(memory);
        if answer.is_ok() {
            self.inner.registered_mut(|all| all.push(Arc::clone(&region.region)));
        }
        region.region.end_use();
        answer
    }

    /// Takes a region back out. Entries for the Store with it are refused from then on; it stays registered with the engine.
    /// Do this before [`Registered::unregister`], or the Store keeps what it knows of the memory until the client ends. May
    /// block while the Store does it.
    ///
    /// # Errors
    /// [`UnregisterError`]: busy while entries of any kind, or copies, use the region; not registered with this client; or
    /// what the Store says. Nothing has changed then.
    pub fn unregister(&self, region: &Registered) -> Result<(), UnregisterError> {
        let inner = &self.inner;
        let _alone = inner.registering.lock().unwrap_or_else(PoisonError::into_inner);
        inner.registered_mut(|all| {
            let at = all.iter().position(|known| Arc::ptr_eq(known, &region.region));
            let at = at.ok_or(UnregisterError::NotRegistered)?;
            // No entry for the Store begins a use while we hold the lock, or once the region is not in the list.
            match region.region.uses() {
                0 => Ok(all.swap_remove(at)),
                uses => Err(UnregisterError::Busy(uses)),
            }
        })?;
        inner.pool.backend().unregister(region.region.memory).map_err(|error| {
            inner.registered_mut(|all| all.push(Arc::clone(&region.region)));
            error.into()
        })
    }

    /// Ends the client, and waits for that for at most `limit`: the workers' calls return, then the client leaves the Store;
    /// with Mooncake its segment goes, and the objects in it. Dropping the last handle does the same without waiting, so a
    /// program that is about to exit closes its clients; what Mooncake does at exit with one that is there is its own affair.
    ///
    /// # Errors
    /// [`CloseError::InUse`]: another handle or an outstanding entry uses it, and the last of them ends it.
    /// [`CloseError::Limit`]: it goes on ending by itself; a call that never returns keeps it, its engine and the regions for
    /// ever. [`CloseError::Left`]: it cannot be ended here.
    pub fn close(self, limit: Duration) -> Result<(), CloseError> {
        let mut inner = Arc::into_inner(self.inner).ok_or(CloseError::InUse)?;
        let ended = inner.end().ok_or(CloseError::Left)?;
        // The helper has the last handle on the engine that is ours.
        drop(inner);
        ended.recv_timeout(limit).map_err(|_| CloseError::Limit(limit))
    }
}

impl ClientInner {
    /// Without the workers' threads.
    fn new(engine: &Engine, name: String, workers: u32, backend: Box<dyn Backend>) -> ClientInner {
        ClientInner {
            id: next_id(),
            engine: engine.clone(),
            target: engine.next_store(&name),
            name,
            pool: Arc::new(Pool::new(workers, backend)),
            threads: Vec::new(),
            ended: false,
            registered: RwLock::default(),
            registering: Mutex::default(),
            process: process::id(),
        }
    }

    /// The regions that entries can use.
    pub(crate) fn registered(&self) -> RwLockReadGuard<'_, Vec<Arc<RegionInner>>> {
        self.registered.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a moment: pushes wait for it.
    fn registered_mut<T>(&self, change: impl FnOnce(&mut Vec<Arc<RegionInner>>) -> T) -> T {
        change(&mut self.registered.write().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Lets a helper end the client, which sends a word when it is done. `None` if it was ended already, or cannot be.
    fn end(&mut self) -> Option<mpsc::Receiver<()>> {
        if mem::replace(&mut self.ended, true) {
            return None;
        }
        let threads = mem::take(&mut self.threads);
        if process::id() != self.process {
            // A forked child has none of the threads, and the connections are its parent's.
            keep::for_ever((threads, Arc::clone(&self.pool), self.engine.clone()));
            return None;
        }
        self.pool.close();
        let (pool, engine) = (Arc::clone(&self.pool), self.engine.clone());
        let (done, ended) = mpsc::sync_channel(1);
        let helper = move || {
            for thread in threads {
                let _ = thread.join();
            }
            pool.backend().close();
            // The memory goes last, and before whoever waits goes on.
            drop((pool, engine));
            let _ = done.send(());
        };
        match thread::spawn("moonring-close", helper) {
            Ok(_) => Some(ended),
            Err(_) => {
                // Left as it is: its memory stays.
                self.engine.leak();
                None
            }
        }
    }
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        // Never waits: the last entry's end is the poller's doing.
        let _ = self.end();
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("name", &self.inner.name).field("store", &self.inner.pool.backend()).finish()
    }
}

/// A client could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A thread could not be started.
    #[error("a thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
    /// A setting cannot be used, or Mooncake could not be loaded.
    #[cfg(feature = "mooncake")]
    #[error(transparent)]
    Build(#[from] crate::mooncake::BuildError),
    /// Mooncake refused; its messages on standard error may say more.
    #[cfg(feature = "mooncake")]
    #[error(transparent)]
    Call(#[from] mooncake_sys::StoreError),
    /// Too few or too many workers.
    #[error("a client with {0} workers: it can have 1 to 256")]
    Workers(u32),
    /// The limit passed. What was begun is taken down when Mooncake comes back with it.
    #[error("the Store's master at {master:?} was not reached within {limit:?}; is it stopped or unreachable?")]
    Limit {
        /// Where it was looked for.
        master: String,
        /// The limit that passed.
        limit: Duration,
    },
}

/// A client has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// Somebody else uses it.
    #[error("another handle, or an entry that has not ended, uses the client; the last of them ends it")]
    InUse,
    /// The limit passed.
    #[error("the client did not end within {0:?}: a call to the Store has not returned; it goes on ending by itself")]
    Limit(Duration),
    /// This process was forked from the client's, or no thread could be started to end it: it is left as it is.
    #[error(
        "the client is left as it is: it belongs to the process that forked this one, or no thread could be started"
    )]
    Left,
}
