//! Two engines of a real wheel in one process, over TCP on loopback.

use std::ffi::{CString, c_void};
use std::ptr::{self, NonNull};
use std::time::{Duration, Instant};

use mooncake_sys::*;

const BYTES: usize = 1 << 20;

struct Engine {
    api: &'static Api,
    at: NonNull<TransferEngine>,
    memory: *mut u8,
}

impl Engine {
    fn new(api: &'static Api) -> Self {
        let at = api.create_engine(c"P2PHANDSHAKE", c"127.0.0.1", c"", 0, false).unwrap();
        // SAFETY: an anonymous mapping of its own; the engine is new.
        let memory = unsafe {
            api.install_transport(at, c"tcp", ptr::null_mut()).unwrap();
            let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let memory = libc::mmap(ptr::null_mut(), BYTES, read_write, private, -1, 0);
            assert_ne!(memory, libc::MAP_FAILED);
            api.register_local_memory(at, memory, BYTES, c"cpu:0", true).unwrap();
            memory.cast()
        };
        Self { api, at, memory }
    }

    fn name(&self) -> CString {
        // SAFETY: the engine lives.
        CString::new(unsafe { self.api.local_ip_and_port(self.at) }.unwrap()).unwrap()
    }

    fn fill(&self, seed: u8) {
        for i in 0..BYTES {
            // SAFETY: within the mapping, and no transfer runs.
            unsafe { self.memory.add(i).write_volatile(byte(seed, i)) };
        }
    }

    /// How many bytes in `range` are what `fill` with that seed put there.
    fn matching(&self, seed: u8, range: std::ops::Range<usize>) -> usize {
        range
            // SAFETY: within the mapping, and no transfer runs.
            .filter(|&i| unsafe { self.memory.add(i).read_volatile() } == byte(seed, i))
            .count()
    }

    /// Submits, and polls each task to its end.
    fn run(&self, requests: &[TransferRequest], grouping: Grouping) -> Result<Vec<TransferStatus>, CallError> {
        // SAFETY: the engine lives, the memory too, and the batch is freed once, at the end.
        unsafe {
            let batch = self.api.allocate_batch_id(self.at, requests.len())?;
            let submitted = self.api.submit_transfer(self.at, batch, requests, grouping);
            let mut results = Vec::new();
            if submitted.is_ok() {
                let limit = Instant::now() + Duration::from_secs(20);
                for task in 0..requests.len() {
                    let mut status = self.api.get_transfer_status(self.at, batch, task)?;
                    while matches!(status.status, STATUS_WAITING | STATUS_PENDING) {
                        assert!(Instant::now() < limit, "task {task} does not end");
                        std::thread::yield_now();
                        status = self.api.get_transfer_status(self.at, batch, task)?;
                    }
                    // The count may be stale in the answer that first says COMPLETED.
                    results.push(self.api.get_transfer_status(self.at, batch, task)?);
                }
            }
            if submitted.is_ok() || self.api.can_ask_after_refusal() {
                self.api.free_batch_id(self.at, batch)?;
            }
            submitted.map(|()| results)
        }
    }

    fn request(&self, opcode: i32, peer: SegmentId, to: &Engine, range: std::ops::Range<usize>) -> TransferRequest {
        TransferRequest {
            opcode,
            source: self.memory.wrapping_add(range.start).cast::<c_void>(),
            target_id: peer,
            file_id: 0,
            target_offset: to.memory as u64 + range.start as u64,
            length: range.len() as u64,
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: all batches were freed, nobody else uses the engine, and the memory goes after it.
        unsafe {
            let memory = self.memory.cast();
            self.api.unregister_local_memory(self.at, memory).unwrap();
            self.api.destroy_engine(self.at).unwrap();
            libc::munmap(memory, BYTES);
        }
    }
}

fn byte(seed: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed
}

fn load() -> &'static Api {
    let api = Api::load().unwrap_or_else(|error| panic!("{error}"));
    assert!(api.wheel_version().is_some(), "{}", api.path().display());
    api.set_log_level(LogLevel::Fatal).unwrap();
    api
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn bytes_move_both_ways() {
    let api = load();
    let (near, far) = (Engine::new(api), Engine::new(api));
    // SAFETY: the engine lives.
    let peer = unsafe { api.open_segment(near.at, &far.name()) }.unwrap();
    assert!(peer >= 0);

    for grouping in [Grouping::None, Grouping::Each] {
        // Several requests in one call: with a wrong request size the second would be garbage.
        let ranges = [0..4096, 4096..5000, 5000..5001, 65536..BYTES];
        near.fill(1);
        far.fill(2);
        let writes = ranges.clone().map(|range| near.request(OPCODE_WRITE, peer, &far, range));
        for (status, range) in near.run(&writes, grouping).unwrap().iter().zip(&ranges) {
            assert_eq!(status.status, STATUS_COMPLETED);
            assert_eq!(status.transferred_bytes, range.len() as u64);
        }
        for range in ranges.clone() {
            assert_eq!(far.matching(1, range.clone()), range.len());
        }
        assert_eq!(far.matching(2, 5001..65536), 65536 - 5001, "bytes between the ranges");

        far.fill(3);
        let reads = ranges.clone().map(|range| near.request(OPCODE_READ, peer, &far, range));
        for (status, range) in near.run(&reads, grouping).unwrap().iter().zip(&ranges) {
            assert_eq!(status.status, STATUS_COMPLETED);
            assert_eq!(status.transferred_bytes, range.len() as u64);
        }
        for range in ranges {
            assert_eq!(near.matching(3, range.clone()), range.len());
        }
        assert_eq!(near.matching(1, 5001..65536), 65536 - 5001, "bytes between the ranges");
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_bad_remote_range_fails_alone() {
    let api = load();
    let (near, far) = (Engine::new(api), Engine::new(api));
    // SAFETY: the engine lives.
    let peer = unsafe { api.open_segment(near.at, &far.name()) }.unwrap();
    near.fill(1);
    far.fill(2);
    let good = |range| near.request(OPCODE_WRITE, peer, &far, range);
    let mut bad = good(4096..8192);
    bad.target_offset = 4096;
    let results = near.run(&[good(0..4096), bad, good(8192..12288)], Grouping::None).unwrap();
    let statuses: Vec<_> = results.iter().map(|result| result.status).collect();
    assert_eq!(statuses, [STATUS_COMPLETED, STATUS_FAILED, STATUS_COMPLETED]);
    assert_eq!(far.matching(2, 4096..8192), 4096);
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn refusals_come_with_code_and_text() {
    let api = load();
    let (near, far) = (Engine::new(api), Engine::new(api));

    let unknown = near.request(OPCODE_WRITE, 4711, &far, 0..4096);
    let error = near.run(&[unknown], Grouping::None).unwrap_err();
    assert_eq!(error.code, 1, "{error}");
    assert!(!error.message.is_empty(), "{error}");

    // SAFETY: the engine lives, and the batch is freed once.
    unsafe {
        let error = api.open_segment(near.at, c"127.0.0.1:1").unwrap_err();
        assert!(error.code < 0 && error.to_string().contains("127.0.0.1:1"), "{error}");

        let twice = api.register_local_memory(near.at, near.memory.cast(), BYTES, c"cpu:0", true);
        assert_eq!(twice.unwrap_err().code, -7);

        let batch = api.allocate_batch_id(near.at, 1).unwrap();
        let error = api.get_transfer_status(near.at, batch, 0).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (1, "Task ID out of range"));
        api.free_batch_id(near.at, batch).unwrap();

        api.install_transport(near.at, c"carrier pigeon", ptr::null_mut()).unwrap_err();
        api.sync_segment_cache(near.at).unwrap();
        api.open_segment_no_cache(near.at, &far.name()).unwrap();
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_batch_of_ranges_is_registered_and_unregistered() {
    let api = load();
    let (near, far) = (Engine::new(api), Engine::new(api));
    let (middle, end) = (far.memory.wrapping_add(BYTES / 2), far.memory.wrapping_add(BYTES));
    // SAFETY: the engine lives, and so does the mapping, whose registration as a whole is taken back first.
    unsafe {
        api.unregister_local_memory(far.at, far.memory.cast()).unwrap();
        let length = BYTES / 2;
        let halves = [far.memory, middle].map(|at| BufferEntry { addr: at.cast(), length });
        api.register_local_memory_batch(far.at, &halves, c"cpu:0").unwrap();
    }
    // SAFETY: the engine lives.
    let peer = unsafe { api.open_segment(near.at, &far.name()) }.unwrap();
    near.fill(1);
    far.fill(2);
    let write = near.request(OPCODE_WRITE, peer, &far, BYTES - 4096..BYTES);
    assert_eq!(write.target_offset + write.length, end as u64);
    assert_eq!(near.run(&[write], Grouping::None).unwrap()[0].status, STATUS_COMPLETED);
    assert_eq!(far.matching(1, BYTES - 4096..BYTES), 4096);
    // SAFETY: as above; the registration that the engine's end takes back is made again.
    unsafe {
        let addrs = [far.memory.cast(), middle.cast()];
        api.unregister_local_memory_batch(far.at, &addrs).unwrap();
        api.register_local_memory(far.at, far.memory.cast(), BYTES, c"cpu:0", true).unwrap();
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn the_engine_loaded_can_be_adopted() {
    let (loaded, adopted) = (load(), Api::adopt().unwrap());
    assert_eq!(adopted.wheel_version(), loaded.wheel_version());
    let engine = Engine::new(loaded);
    // SAFETY: the engine lives, and both tables are of one image.
    let names = unsafe { [loaded, adopted].map(|api| api.local_ip_and_port(engine.at).unwrap()) };
    assert_eq!(names[0], names[1]);
}
