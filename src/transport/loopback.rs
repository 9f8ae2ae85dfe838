//! The transport that copies inside this process. Engines find each other by name.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use super::{Busy, Caps, Driver, Event, Hint, Nanos, Op, PollerWaker, RawMemory, Transport, TransportError};
use crate::code::{Stage, errno};

/// The memory that one engine has registered, for its peers to reach.
type Memory = RwLock<Vec<RawMemory>>;

/// Every loopback engine of the process, by name.
static NETWORK: Mutex<Option<HashMap<String, Weak<Memory>>>> = Mutex::new(None);
static NEXT_NAME: AtomicU32 = AtomicU32::new(1);

#[derive(Debug)]
pub(crate) struct Loopback {
    name: String,
    memory: Arc<Memory>,
    /// Opened peers, by the number that drivers know them by.
    peers: Arc<RwLock<Vec<Weak<Memory>>>>,
}

fn network() -> MutexGuard<'static, Option<HashMap<String, Weak<Memory>>>> {
    NETWORK.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Loopback {
    pub(crate) fn new() -> Loopback {
        let name = format!("loopback-{}", NEXT_NAME.fetch_add(1, Relaxed));
        let memory = Arc::default();
        network().get_or_insert_default().insert(name.clone(), Arc::downgrade(&memory));
        Loopback { name, memory, peers: Arc::default() }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        if let Some(engines) = &mut *network() {
            engines.remove(&self.name);
        }
    }
}

// SAFETY: an operation copies between its own two ranges inside `submit`, and is quiet when that returns.
unsafe impl Transport for Loopback {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn caps(&self) -> Caps {
        Caps { threads_here: false, max_batch: 128, max_in_flight_per_peer: 128, max_merged: 0 }
    }

    fn driver(&self, _wake: PollerWaker) -> Box<dyn Driver> {
        Box::new(LoopbackDriver { peers: Arc::clone(&self.peers) })
    }

    unsafe fn register(&self, memory: RawMemory, _location: &str) -> Result<(), TransportError> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner).push(memory);
        Ok(())
    }

    fn unregister(&self, memory: RawMemory) -> Result<(), TransportError> {
        // Waits for the copies that run: they hold the lock.
        self.memory.write().unwrap_or_else(PoisonError::into_inner).retain(|&other| other != memory);
        Ok(())
    }

    fn open(&self, name: &str, _fresh: bool) -> Result<u32, TransportError> {
        let peer = network().get_or_insert_default().get(name).cloned().ok_or_else(|| TransportError {
            what: format!("opening segment {name:?}"),
            code: 0,
            why: "no loopback engine of this process has that name; ask the peer's Engine::name".into(),
        })?;
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        peers.push(peer);
        Ok(peers.len() as u32 - 1)
    }

    fn close(&self) -> Result<(), Busy> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(())
    }
}

#[derive(Debug)]
struct LoopbackDriver {
    peers: Arc<RwLock<Vec<Weak<Memory>>>>,
}

impl Driver for LoopbackDriver {
    fn submit(&mut self, target: u32, ops: &[Op], _now: Nanos, out: &mut Vec<Event>) -> usize {
        let peers = self.peers.read().unwrap_or_else(PoisonError::into_inner);
        let peer = peers.get(target as usize).and_then(Weak::upgrade);
        // Held over the copies, so that a peer's unregister waits for them.
        let memory = peer.as_ref().map(|peer| peer.read().unwrap_or_else(PoisonError::into_inner));
        let mut near = 0;
        out.extend(ops.iter().map(|op| {
            let res = match &memory {
                None => -errno::ECONNRESET,
                // SAFETY: the core vouches for the local range until we report; what is registered stays mapped while we
                // hold its engine's lock.
                Some(memory) => unsafe { op.copy_here(memory, &mut near) }.unwrap_or(-errno::EFAULT),
            };
            Event::Result { op: op.token, res, stage: Stage::Transfer, detail: 0, quiet: true }
        }));
        ops.len()
    }

    fn poll(&mut self, _now: Nanos, _budget: u32, _out: &mut Vec<Event>) -> Hint {
        Hint::Sleep { until: None }
    }

    fn settle(&mut self, _now: Nanos, _out: &mut Vec<Event>) {}

    fn in_flight(&self) -> usize {
        0
    }
}
