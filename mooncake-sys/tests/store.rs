//! A Store client of a real wheel against a real master, over TCP on loopback.

use std::ffi::{CStr, CString};
use std::net::TcpListener;
use std::ptr::{self, NonNull};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mooncake_sys::*;
use store_master::Master;

/// Registered memory of a client.
const BYTES: usize = 4 << 20;
/// What a client adds to the store.
const SEGMENT: u64 = 16 << 20;
/// How long a value is protected from eviction and removal after it was asked for.
const LEASE: Duration = Duration::from_secs(1);

/// A client with registered memory of its own, and the master that it talks to.
struct Client {
    api: &'static StoreApi,
    at: NonNull<Store>,
    memory: *mut u8,
    master: Master,
}

// SAFETY: any thread may call a store, and whoever uses the memory has the lock.
unsafe impl Send for Client {}

/// The client of most tests, each with keys of its own: ending a client takes a second. It ends with the process, by what
/// Mooncake has registered for that.
fn client() -> MutexGuard<'static, Client> {
    static SHARED: LazyLock<Mutex<Client>> = LazyLock::new(|| Mutex::new(Client::new()));
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    fn new() -> Self {
        let api = load();
        let wheel = api.path().ancestors().nth(2).unwrap();
        let lease = format!("-default_kv_lease_ttl={}", LEASE.as_millis());
        let master = Master::start(wheel, &[&lease]).unwrap();
        let at = set_up(api, &master, c"127.0.0.1").unwrap();
        // SAFETY: an anonymous mapping of its own, unmapped after the client's end.
        let memory = unsafe {
            let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let memory = libc::mmap(ptr::null_mut(), BYTES, read_write, private, -1, 0);
            assert_ne!(memory, libc::MAP_FAILED);
            api.register_buffer(at, BufferEntry { addr: memory, length: BYTES }).unwrap();
            memory.cast()
        };
        Self { api, at, memory, master }
    }

    fn range(&self, offset: usize, length: usize) -> BufferEntry {
        assert!(offset + length <= BYTES);
        BufferEntry { addr: self.memory.wrapping_add(offset).cast(), length }
    }

    fn fill(&self, offset: usize, length: usize, seed: u8) {
        for i in 0..length {
            // SAFETY: within the mapping, and no call runs.
            unsafe { self.memory.add(offset + i).write_volatile(byte(seed, i)) };
        }
    }

    /// Whether the memory is what `fill` with that seed leaves.
    fn is(&self, offset: usize, length: usize, seed: u8) -> bool {
        // SAFETY: within the mapping, and no call runs.
        (0..length).all(|i| unsafe { self.memory.add(offset + i).read_volatile() } == byte(seed, i))
    }

    fn put(&self, key: &CStr, offset: usize, length: usize) -> Result<(), StoreError> {
        // SAFETY: the store lives, and the range lies in its registered memory.
        unsafe { self.api.put_from(self.at, key, self.range(offset, length), 1) }
    }

    fn get(&self, key: &CStr, offset: usize, length: usize) -> Result<u64, StoreError> {
        // SAFETY: as above.
        unsafe { self.api.get_into(self.at, key, self.range(offset, length)) }
    }

    fn exists(&self, key: &CStr) -> bool {
        // SAFETY: the store lives.
        unsafe { self.api.is_exist(self.at, key) }.unwrap()
    }

    fn size(&self, key: &CStr) -> Result<u64, StoreError> {
        // SAFETY: the store lives.
        unsafe { self.api.get_size(self.at, key) }
    }

    fn remove(&self, key: &CStr, force: bool) -> Result<(), StoreError> {
        // SAFETY: the store lives.
        unsafe { self.api.remove(self.at, key, force) }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: no call runs, nobody else uses the store, and the memory goes after it.
        unsafe {
            self.api.unregister_buffer(self.at, self.memory.cast()).unwrap();
            self.api.destroy(self.at).unwrap();
            libc::munmap(self.memory.cast(), BYTES);
        }
    }
}

fn load() -> &'static StoreApi {
    let api = StoreApi::load().unwrap_or_else(|error| panic!("{error}"));
    assert!(api.wheel_version().is_some(), "{}", api.path().display());
    api.set_log_level(LogLevel::Fatal).unwrap();
    api
}

fn set_up(api: &'static StoreApi, master: &Master, name: &CStr) -> Result<NonNull<Store>, StoreError> {
    let at = create(api);
    let address = CString::new(master.address()).unwrap();
    let setup = StoreSetup {
        local_hostname: name,
        metadata_server: c"P2PHANDSHAKE",
        segment_bytes: SEGMENT,
        buffer_bytes: 0,
        protocol: c"tcp",
        device: c"",
        master: &address,
    };
    // SAFETY: the store is new, and destroyed if it cannot be used.
    unsafe {
        let result = api.setup(at, &setup);
        if result.is_err() {
            api.destroy(at).unwrap();
        }
        result.map(|()| at)
    }
}

/// Makes a store. Mooncake's signal thread, which comes with the first, is its own affair: the caller's mask stays.
fn create(api: &'static StoreApi) -> NonNull<Store> {
    let blocked = || {
        // SAFETY: the set is written before it is read.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_SETMASK, ptr::null(), &mut set);
            [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1].map(|signal| libc::sigismember(&set, signal))
        }
    };
    assert_eq!(blocked(), [0; 4]);
    let at = api.create().unwrap();
    assert_eq!(blocked(), [0; 4]);
    at
}

fn byte(seed: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed
}

fn code<T>(result: Result<T, StoreError>) -> i32 {
    result.map_or_else(|error| error.code, |_| 0)
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_value_goes_in_and_comes_out() {
    let client = client();
    client.fill(0, 65536, 1);
    assert!(!client.exists(c"in"));
    client.put(c"in", 0, 65536).unwrap();
    assert!(client.exists(c"in"));
    assert_eq!(client.size(c"in").unwrap(), 65536);
    assert_eq!(client.get(c"in", 1 << 20, 65536).unwrap(), 65536);
    assert!(client.is(1 << 20, 65536, 1));
    // A buffer that is longer than the value.
    client.fill(1 << 20, 70000, 2);
    assert_eq!(client.get(c"in", 1 << 20, 70000).unwrap(), 65536);
    assert!(client.is(1 << 20, 65536, 1));
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn refusals_have_codes_and_names() {
    let client = client();
    client.fill(0, 8192, 1);
    client.put(c"short", 0, 8192).unwrap();

    let error = client.get(c"absent", 0, 4096).unwrap_err();
    assert_eq!(error.code, STORE_NOT_FOUND);
    assert_eq!(error.to_string(), r#"get_into("absent", 4096 bytes) failed with code -704 (object not found)"#);
    assert_eq!(code(client.size(c"absent")), STORE_NOT_FOUND);
    assert_eq!(code(client.remove(c"absent", false)), STORE_NOT_FOUND);
    // Too small, and left alone.
    client.fill(1 << 20, 8192, 7);
    assert_eq!(code(client.get(c"short", 1 << 20, 8191)), STORE_INVALID_PARAMS);
    assert!(client.is(1 << 20, 8192, 7));
    // SAFETY: the store lives; the range is registered already.
    let twice = unsafe { client.api.register_buffer(client.at, client.range(0, 4096)) };
    assert_eq!(code(twice), STORE_INVALID_PARAMS);
}

/// What a caller that wants "already exists" to be told has to know.
#[test]
#[ignore = "needs cargo xtask setup"]
fn a_key_that_exists_keeps_its_value() {
    let client = client();
    client.fill(0, 4096, 1);
    client.fill(4096, 4096, 2);
    client.put(c"kept", 0, 4096).unwrap();
    client.put(c"kept", 4096, 4096).unwrap();
    client.get(c"kept", 1 << 20, 4096).unwrap();
    assert!(client.is(1 << 20, 4096, 1));
    client.put(c"empty", 0, 0).unwrap();
    assert!(!client.exists(c"empty"));
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_lease_protects_what_was_read() {
    let client = client();
    client.put(c"leased", 0, 4096).unwrap();
    client.get(c"leased", 0, 4096).unwrap();
    assert_eq!(code(client.remove(c"leased", false)), STORE_HAS_LEASE);
    assert!(client.exists(c"leased"));
    client.remove(c"leased", true).unwrap();
    assert!(!client.exists(c"leased"));

    client.put(c"leased again", 0, 4096).unwrap();
    client.get(c"leased again", 0, 4096).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while let Err(error) = client.remove(c"leased again", false) {
        assert_eq!(error.code, STORE_HAS_LEASE);
        assert!(Instant::now() < end);
        thread::sleep(LEASE / 4);
    }
    assert!(!client.exists(c"leased again"));
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn batches_answer_for_each_key() {
    let client = client();
    let keys: Vec<CString> = (0..8).map(|i| CString::new(format!("k{i}")).unwrap()).collect();
    let slices: Vec<[BufferEntry; 1]> = (0..8).map(|i| [client.range(i * 4096, 4096)]).collect();
    let items: Vec<_> = keys.iter().zip(&slices).map(|(key, slice)| StoreItem::new(key, slice)).collect();
    for i in 0..8 {
        client.fill(i * 4096, 4096, i as u8);
    }
    let mut results = [-1; 8];
    // SAFETY: the store lives, and all ranges lie in its registered memory.
    unsafe { client.api.batch_put_from(client.at, &items, 1, &mut results) }.unwrap();
    assert_eq!(results, [0; 8]);

    client.remove(&keys[3], true).unwrap();
    let names: Vec<&CStr> = keys.iter().map(|key| key.as_c_str()).collect();
    // SAFETY: the store lives.
    unsafe { client.api.batch_is_exist(client.at, &names, &mut results) }.unwrap();
    assert_eq!(results, [1, 1, 1, 0, 1, 1, 1, 1]);

    // One into a buffer that is too small, one absent.
    let mut slices: Vec<[BufferEntry; 1]> = (0..8).map(|i| [client.range((1 << 20) + i * 4096, 4096)]).collect();
    slices[5][0].length = 100;
    let items: Vec<_> = keys.iter().zip(&slices).map(|(key, slice)| StoreItem::new(key, slice)).collect();
    client.fill((1 << 20) + 3 * 4096, 4096, 99);
    // SAFETY: as above.
    unsafe { client.api.batch_get_into(client.at, &items, &mut results) }.unwrap();
    let (absent, short) = (STORE_NOT_FOUND.into(), STORE_INVALID_PARAMS.into());
    assert_eq!(results, [4096, 4096, 4096, absent, 4096, short, 4096, 4096]);
    for i in [0, 1, 2, 4, 6, 7] {
        assert!(client.is((1 << 20) + i * 4096, 4096, i as u8), "{i}");
    }
    assert!(client.is((1 << 20) + 3 * 4096, 4096, 99));
}

/// Why the documents say: name each key once.
#[test]
#[ignore = "needs cargo xtask setup"]
fn of_a_key_named_twice_only_the_last_buffer_is_filled() {
    let client = client();
    client.fill(0, 4096, 1);
    client.put(c"twice", 0, 4096).unwrap();
    client.fill(1 << 20, 8192, 7);
    let slices = [[client.range(1 << 20, 4096)], [client.range((1 << 20) + 4096, 4096)]];
    let items = [StoreItem::new(c"twice", &slices[0]), StoreItem::new(c"twice", &slices[1])];
    let mut results = [0; 2];
    // SAFETY: the store lives, and the ranges lie in its registered memory.
    unsafe { client.api.batch_get_into(client.at, &items, &mut results) }.unwrap();
    assert_eq!(results, [4096; 2]);
    assert!(client.is((1 << 20) + 4096, 4096, 1));
    assert!(client.is(1 << 20, 4096, 7), "Mooncake has learned it: change the documents");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_value_is_gathered_and_scattered() {
    let client = client();
    assert!(client.api.has_multi_buffers());
    // Three parts out of order in memory make one value.
    client.fill(0, 12288, 1);
    let parts = [client.range(8192, 4096), client.range(0, 4096), client.range(4096, 100)];
    let whole = [client.range(16384, 4096)];
    let mut results = [-1; 2];
    let items = [StoreItem::new(c"parts", &parts), StoreItem::new(c"whole", &whole)];
    // SAFETY: the store lives, and the ranges lie in its registered memory.
    unsafe { client.api.batch_put_from_multi_buffers(client.at, &items, 1, &mut results) }.unwrap();
    assert_eq!(results, [0, 0]);
    assert_eq!(client.size(c"parts").unwrap(), 8292);

    let (a, b, c) = (1 << 20, 2 << 20, 3 << 20);
    let parts = [client.range(a, 4096), client.range(b, 4096), client.range(c, 100)];
    let items = [StoreItem::new(c"parts", &parts), StoreItem::new(c"absent", &whole)];
    // SAFETY: as above.
    unsafe { client.api.batch_get_into_multi_buffers(client.at, &items, &mut results) }.unwrap();
    assert_eq!(results, [8292, STORE_NOT_FOUND.into()]);
    let source = |at: usize| byte(1, at);
    for (from, to, length) in [(8192, a, 4096), (0, b, 4096), (4096, c, 100)] {
        // SAFETY: within the mapping, and no call runs.
        let moved = (0..length).all(|i| unsafe { client.memory.add(to + i).read_volatile() } == source(from + i));
        assert!(moved, "{to:#x}");
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_batch_that_does_not_fit_its_results_is_refused() {
    let client = client();
    let (two, none) = ([client.range(0, 1), client.range(1, 1)], []);
    let mut results = [0; 1];
    for slices in [&two[..], &none[..]] {
        // SAFETY: it is refused before anything is touched.
        let refused = unsafe { client.api.batch_get_into(client.at, &[StoreItem::new(c"k", slices)], &mut results) };
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(&format!("\"k\" has {} slices", slices.len())), "{text}");
    }
    // SAFETY: as above.
    let refused = unsafe { client.api.batch_is_exist(client.at, &[c"k", c"l"], &mut results) };
    assert!(refused.unwrap_err().to_string().contains("room for 1 results, for 2 keys"));
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_full_store_has_no_space() {
    let client = client();
    // More than the store has, in one value.
    let parts = vec![client.range(0, BYTES); 5];
    let mut results = [0; 1];
    // SAFETY: the store lives, and the ranges lie in its registered memory.
    unsafe {
        let item = StoreItem::new(c"big", &parts);
        client.api.batch_put_from_multi_buffers(client.at, &[item], 1, &mut results).unwrap();
    }
    assert_eq!(results, [STORE_NO_SPACE.into()]);
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn without_a_master_calls_end_with_an_error() {
    let mut client = Client::new();
    client.put(c"a", 0, 4096).unwrap();
    client.master.kill();
    let answer = client.get(c"a", 0, 4096);
    assert!([STORE_RPC_FAILED, STORE_RPC_TIMEOUT].contains(&code(answer)));
    // SAFETY: the store lives.
    let error = unsafe { client.api.is_exist(client.at, c"a") }.unwrap_err();
    assert!(error.code < 0, "{error}");
    // With a port in its name Mooncake tries once.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let name = CString::new(port.to_string()).unwrap();
    let error = set_up(client.api, &client.master, &name).unwrap_err();
    assert!(error.code < 0 && error.to_string().contains(&client.master.address()), "{error}");

    // It is back without its keys, and the client gets along with it.
    client.master.restart().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match client.put(c"b", 0, 4096) {
            Ok(()) => break,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(client.get(c"b", 0, 4096).unwrap(), 4096);
    assert!(!client.exists(c"a"));
}

/// An engine and a store out of one wheel share libraries, and have to get along in one process.
#[test]
#[ignore = "needs cargo xtask setup"]
fn an_engine_lives_beside_a_store() {
    let client = client();
    let api = Api::load().unwrap();
    api.set_log_level(LogLevel::Fatal).unwrap();
    let engine = api.create_engine(c"P2PHANDSHAKE", c"127.0.0.1", c"", 0, false).unwrap();
    // SAFETY: the engine is new, and the memory is registered with it for as long as it lives.
    unsafe {
        api.install_transport(engine, c"tcp", ptr::null_mut()).unwrap();
        api.register_local_memory(engine, client.memory.cast(), BYTES, c"cpu:0", true).unwrap();
    }
    client.fill(0, 4096, 1);
    client.put(c"beside", 0, 4096).unwrap();
    assert_eq!(client.get(c"beside", 8192, 4096).unwrap(), 4096);
    assert!(client.is(8192, 4096, 1));
    // SAFETY: nothing uses the engine any more.
    unsafe { api.destroy_engine(engine) }.unwrap();
    assert_eq!(client.get(c"beside", 0, 4096).unwrap(), 4096);
}
