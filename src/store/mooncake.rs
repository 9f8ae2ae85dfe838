//! Mooncake's Store client under a [`Client`].

use std::ffi::{CStr, CString, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use mooncake_sys::{BufferEntry, EXCEPTION, LogLevel, STORE_INVALID_PARAMS, STORE_TRANSFER_FAILED};
use mooncake_sys::{NO_CODE, STORE_EXISTS, STORE_NOT_SUPPORTED, Store, StoreApi, StoreError, StoreItem, StoreSetup};

use super::answer::Answer;
use super::client::{Client, ConnectError, WORKERS};
use super::pool::{Backend, Job};
use super::request::{Kind, Request};
use crate::engine::Engine;
use crate::mooncake::{BuildError, Metadata, Protocol, check_name, env};
use crate::region::Slice;
use crate::thread::{self, Deaf};
use crate::transport::{RawMemory, TransportError};

/// Bytes of the client's own buffer unless set.
const BUFFER: u64 = 16 << 20;
/// How long the client may take to reach the master unless set.
const LIMIT: Duration = Duration::from_secs(30);
/// How long Mooncake waits for an object's bytes before it gives up on them. A call that fails earlier has seen every transfer
/// of its end.
const GIVES_UP: Duration = Duration::from_secs(60);
/// Most workers: each is a thread.
const MAX_WORKERS: u32 = 256;

/// Settings for a client of a Mooncake Store. `host` is this machine's name or address, as other clients reach it, with or
/// without a port; `master` is where `mooncake_master` answers, as `10.0.0.1:50051`.
pub fn builder(host: impl Into<String>, master: impl Into<String>) -> Builder {
    Builder {
        host: host.into(),
        master: master.into(),
        metadata: Metadata::default(),
        protocol: Protocol::default(),
        devices: String::new(),
        segment: 0,
        buffer: BUFFER,
        replicas: 1,
        workers: WORKERS,
        limit: LIMIT,
        log_level: None,
    }
}

/// Settings of a client of a Mooncake Store, from [`builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    host: String,
    master: String,
    metadata: Metadata,
    protocol: Protocol,
    devices: String,
    segment: u64,
    buffer: u64,
    replicas: usize,
    workers: u32,
    limit: Duration,
    log_level: Option<LogLevel>,
}

impl Builder {
    /// How clients find each other; they ask each other unless set.
    #[must_use]
    pub fn metadata(mut self, metadata: Metadata) -> Builder {
        self.metadata = metadata;
        self
    }

    /// How bytes travel; TCP unless set.
    #[must_use]
    pub fn protocol(mut self, protocol: Protocol) -> Builder {
        self.protocol = protocol;
        self
    }

    /// The network cards, comma-separated; those that Mooncake finds unless set.
    #[must_use]
    pub fn devices(mut self, devices: impl Into<String>) -> Builder {
        self.devices = devices.into();
        self
    }

    /// Bytes of memory that this client adds to the Store, for objects of all clients; none unless set. Mooncake allocates
    /// them, and what is kept there goes when the client ends.
    #[must_use]
    pub fn segment_bytes(mut self, bytes: u64) -> Builder {
        self.segment = bytes;
        self
    }

    /// Bytes of a buffer of Mooncake's own, which only objects on disk pass through; 16 MiB unless set.
    #[must_use]
    pub fn buffer_bytes(mut self, bytes: u64) -> Builder {
        self.buffer = bytes;
        self
    }

    /// How many copies Puts ask for; 1 unless set. Each is in another client's segment.
    #[must_use]
    pub fn replicas(mut self, replicas: usize) -> Builder {
        self.replicas = replicas;
        self
    }

    /// How many threads make calls, 1 to 256; 4 unless set. So many calls can be stuck before entries for this Store wait.
    #[must_use]
    pub fn workers(mut self, workers: u32) -> Builder {
        self.workers = workers;
        self
    }

    /// How long [`build`](Self::build) waits for Mooncake, 30 s unless set.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Builder {
        self.limit = limit;
        self
    }

    /// The least important messages that Mooncake writes to standard error, as
    /// [`mooncake::Builder::log_level`](crate::mooncake::Builder::log_level).
    #[must_use]
    pub fn log_level(mut self, level: LogLevel) -> Builder {
        self.log_level = Some(level);
        self
    }

    /// Makes the client, connects it to the master and adds its segment to the Store; the first one of the process loads
    /// Mooncake, and turns its connection pool on as [`mooncake::Builder::build`](crate::mooncake::Builder::build) does. Blocks
    /// for at most the [`limit`](Self::limit). The first client in a process without Python also makes SIGINT, SIGTERM and SIGHUP
    /// Mooncake's: it takes the clients down and ends the process.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn build(self, engine: &Engine) -> Result<Client, ConnectError> {
        let host = check_name("host", &self.host)?;
        let master = check_name("master", &self.master)?;
        let metadata = self.metadata.to_c()?;
        let devices = c_string("devices", &self.devices)?;
        if !(1..=MAX_WORKERS).contains(&self.workers) {
            return Err(ConnectError::Workers(self.workers));
        }
        // Libraries that come with Mooncake start threads when they are loaded.
        let deaf = Deaf::new();
        let api = StoreApi::load().map_err(BuildError::from)?;
        drop(deaf);
        env::enable_pool();
        if let Some(level) = self.log_level {
            api.set_log_level(level).map_err(BuildError::from)?;
        }
        let (segment, buffer, replicas) = (self.segment, self.buffer, self.replicas);
        let protocol = match self.protocol {
            Protocol::Tcp => c"tcp",
            Protocol::Rdma => c"rdma",
        };
        let (done, connected) = mpsc::sync_channel(0);
        let helper = move || {
            let setup = StoreSetup {
                local_hostname: &host,
                metadata_server: &metadata,
                segment_bytes: segment,
                buffer_bytes: buffer,
                protocol,
                device: &devices,
                master: &master,
            };
            // Whoever waited may be gone: then the client is taken down where it is dropped.
            let _ = done.send(RealStore::connect(api, &setup, replicas));
        };
        thread::spawn("moonring-open", helper).map_err(ConnectError::Thread)?;
        match connected.recv_timeout(self.limit) {
            Ok(store) => Client::over(engine, self.master, self.workers, Box::new(store?)),
            Err(_) => Err(ConnectError::Limit { master: self.master, limit: self.limit }),
        }
    }
}

fn c_string(what: &'static str, text: &str) -> Result<CString, ConnectError> {
    let refuse = |_| BuildError::Name { what, text: text.to_owned(), why: "it has a zero byte in it" };
    Ok(CString::new(text).map_err(refuse)?)
}

/// A client's address. Any thread may call the client.
struct Handle(NonNull<Store>);

// SAFETY: Mooncake's client is made for calls from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

struct RealStore {
    api: &'static StoreApi,
    store: Handle,
    replicas: usize,
    destroyed: Mutex<bool>,
}

impl RealStore {
    fn connect(api: &'static StoreApi, setup: &StoreSetup<'_>, replicas: usize) -> Result<RealStore, StoreError> {
        let store = RealStore { api, store: Handle(api.create()?), replicas, destroyed: Mutex::new(false) };
        // SAFETY: it was just made, and nobody else knows it. After an error it is only destroyed, which its drop does.
        unsafe { api.setup(store.store.0, setup) }?;
        Ok(store)
    }

    /// Gets or puts those of `jobs` that `which` names: in one call those that have one slice, in another those that have
    /// several.
    fn transfer(&self, kind: Kind, jobs: &[Job], which: &[usize], answers: &mut [Answer]) {
        let (api, store) = (self.api, self.store.0);
        for several in [false, true] {
            let is_several = |&&at: &&usize| (jobs[at].request.slices().len() != 1) == several;
            let own: Vec<usize> = which.iter().filter(is_several).copied().collect();
            if own.is_empty() {
                continue;
            }
            let slices: Vec<Vec<BufferEntry>> = own.iter().map(|&at| slices_of(&jobs[at].request)).collect();
            let keys = own.iter().map(|&at| jobs[at].request.c_key());
            let items: Vec<StoreItem<'_>> =
                keys.zip(&slices).map(|(key, slices)| StoreItem::new(key, slices)).collect();
            let mut codes = vec![0; own.len()];
            let began = Instant::now();
            // SAFETY: the client lives until `close`. The slices lie in regions that are registered with it and in use by
            // their entries until these are answered, and no Rust reference leads there. No key comes twice.
            let called = unsafe {
                match (kind, several) {
                    (Kind::Get, false) => api.batch_get_into(store, &items, &mut codes),
                    (Kind::Get, true) => api.batch_get_into_multi_buffers(store, &items, &mut codes),
                    (_, false) => api.batch_put_from(store, &items, self.replicas, &mut codes),
                    (_, true) => api.batch_put_from_multi_buffers(store, &items, self.replicas, &mut codes),
                }
            };
            let gave_up = began.elapsed() >= GIVES_UP;
            for (&at, code) in own.iter().zip(codes) {
                let request = &jobs[at].request;
                answers[at] = match (&called, code) {
                    (Err(error), _) => failed(error),
                    (Ok(()), code) if code == i64::from(STORE_TRANSFER_FAILED) && gave_up => Answer::GIVEN_UP,
                    (Ok(()), code) if code == i64::from(STORE_INVALID_PARAMS) && kind == Kind::Get => {
                        self.explain(request)
                    }
                    (Ok(()), code) if kind == Kind::Put && code >= 0 => Answer::done(request.len()),
                    (Ok(()), code) => answer(code),
                };
            }
        }
    }

    /// Asks which keys are there: 1, 0, or a negative code for each.
    fn exist(&self, jobs: &[Job]) -> Result<Vec<i64>, StoreError> {
        let keys: Vec<&CStr> = jobs.iter().map(|job| job.request.c_key()).collect();
        let mut codes = vec![0; jobs.len()];
        // SAFETY: the client lives until `close`.
        unsafe { self.api.batch_is_exist(self.store.0, &keys, &mut codes) }?;
        Ok(codes)
    }

    /// A Get that was refused for bad arguments: whether that is because the object is longer.
    fn explain(&self, request: &Request) -> Answer {
        // SAFETY: the client lives until `close`.
        match unsafe { self.api.get_size(self.store.0, request.c_key()) } {
            Ok(size) if size > request.len() => Answer::too_small(size),
            Ok(_) => Answer::failed(STORE_INVALID_PARAMS),
            Err(error) => failed(&error),
        }
    }
}

/// A request's slices, as Mooncake takes them.
fn slices_of(request: &Request) -> Vec<BufferEntry> {
    let entry = |slice: &Slice| BufferEntry {
        addr: ptr::with_exposed_provenance_mut::<c_void>(slice.address as usize),
        length: slice.len as usize,
    };
    request.slices().iter().map(entry).collect()
}

/// A key's answer by Mooncake's number for it: what is not negative is what was asked for.
fn answer(code: i64) -> Answer {
    match u64::try_from(code) {
        Ok(done) => Answer::done(done),
        Err(_) => Answer::failed(i32::try_from(code).unwrap_or(i32::MIN)),
    }
}

/// What a call says that failed as a whole.
fn failed(error: &StoreError) -> Answer {
    match error.code {
        EXCEPTION => Answer { detail: EXCEPTION, ..Answer::BROKEN },
        NO_CODE => Answer::failed(STORE_NOT_SUPPORTED),
        code => Answer::failed(code),
    }
}

impl Backend for RealStore {
    fn call(&self, kind: Kind, jobs: &[Job], answers: &mut [Answer]) {
        match kind {
            Kind::Get => self.transfer(kind, jobs, &(0..jobs.len()).collect::<Vec<_>>(), answers),
            Kind::Put => {
                // To Mooncake a Put of a key that is there is done: it has to be asked before.
                match self.exist(jobs) {
                    Ok(codes) => {
                        for (place, code) in answers.iter_mut().zip(&codes) {
                            *place = if *code > 0 { Answer::failed(STORE_EXISTS) } else { answer(*code) };
                        }
                        let absent: Vec<usize> = (0..jobs.len()).filter(|&at| codes[at] == 0).collect();
                        self.transfer(kind, jobs, &absent, answers);
                    }
                    Err(error) => answers.fill(failed(&error)),
                }
            }
            Kind::Exist => match self.exist(jobs) {
                Ok(codes) => answers.iter_mut().zip(codes).for_each(|(place, code)| *place = answer(code)),
                Err(error) => answers.fill(failed(&error)),
            },
            Kind::Remove => {
                for (place, job) in answers.iter_mut().zip(jobs) {
                    // SAFETY: the client lives until `close`.
                    let removed = unsafe { self.api.remove(self.store.0, job.request.c_key(), false) };
                    *place = removed.map_or_else(|error| failed(&error), |()| Answer::done(0));
                }
            }
        }
    }

    fn register(&self, memory: RawMemory) -> Result<(), TransportError> {
        let addr = ptr::with_exposed_provenance_mut(memory.address as usize);
        let buffer = BufferEntry { addr, length: memory.len as usize };
        // SAFETY: the client lives until `close`; the memory stays mapped until then, because the client keeps the engine.
        unsafe { self.api.register_buffer(self.store.0, buffer) }
            .map_err(|error| refused(format!("registering {memory} with the Store"), &error))
    }

    fn unregister(&self, memory: RawMemory) -> Result<(), TransportError> {
        let addr = ptr::with_exposed_provenance_mut(memory.address as usize);
        // SAFETY: the client lives until `close`, and no call uses the memory.
        unsafe { self.api.unregister_buffer(self.store.0, addr) }
            .map_err(|error| refused(format!("unregistering {memory} from the Store"), &error))
    }

    fn close(&self) {
        let mut destroyed = self.destroyed.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *destroyed, true) {
            // SAFETY: we made the client, no call runs and none follows, and it is destroyed once.
            let _ = unsafe { self.api.destroy(self.store.0) };
        }
    }
}

impl Drop for RealStore {
    fn drop(&mut self) {
        // Only one that was never served: a client ends it before.
        self.close();
    }
}

impl fmt::Debug for RealStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mooncake").field("library", &self.api.path()).finish_non_exhaustive()
    }
}

fn refused(what: String, error: &StoreError) -> TransportError {
    TransportError { what, code: i64::from(error.code), why: error.to_string() }
}
