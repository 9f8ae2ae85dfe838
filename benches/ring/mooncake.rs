//! What the ring adds to one Mooncake operation, against hand-written loops of direct calls.

use std::ffi::CString;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use mooncake_sys::{
    Api, Grouping, OPCODE_WRITE, STATUS_COMPLETED, STATUS_PENDING, SegmentId, TransferEngine, TransferRequest,
};
use moonring::{Region, Registered, Ring, Segment, mooncake, opcode};

const BYTES: usize = 4096;
/// Short blocks, many of them: where the kernel puts the engine's threads decides more than anything here, and changes
/// every few milliseconds.
const EACH: usize = 50;
const ROUNDS: usize = 150;

/// Direct calls on the engine that the ring adopts: the same connections, thread and memory.
struct Direct {
    api: &'static Api,
    engine: NonNull<TransferEngine>,
    segment: SegmentId,
    memory: Vec<u8>,
    remote: u64,
}

impl Direct {
    fn new(peer: &Registered) -> Direct {
        let api = Api::load().expect("it was loaded for the peer's engine");
        let engine = api.create_engine(c"P2PHANDSHAKE", c"127.0.0.1", c"", 0, false).unwrap();
        let mut memory = vec![1; BYTES];
        let name = CString::new(peer.info().segment).unwrap();
        // SAFETY: the engine was just made; the memory lives as long as it, both until the process ends.
        let segment = unsafe {
            api.install_transport(engine, c"tcp", null_mut()).unwrap();
            api.register_local_memory(engine, memory.as_mut_ptr().cast(), BYTES, c"cpu:0", true).unwrap();
            api.open_segment(engine, &name).unwrap()
        };
        Direct { api, engine, segment, memory, remote: peer.address() }
    }

    /// One operation, waiting for its end by `relax`.
    fn write(&mut self, relax: fn()) {
        let request = TransferRequest {
            opcode: OPCODE_WRITE,
            source: self.memory.as_mut_ptr().cast(),
            target_id: self.segment,
            file_id: 0,
            target_offset: self.remote,
            length: BYTES as u64,
        };
        let (api, engine) = (self.api, self.engine);
        // SAFETY: engine, batch and memory are live until the task's end was seen; the batch is freed once, after that.
        unsafe {
            let batch = api.allocate_batch_id(engine, 1).unwrap();
            api.submit_transfer(engine, batch, &[request], Grouping::None).unwrap();
            loop {
                let status = api.get_transfer_status(engine, batch, 0).unwrap().status;
                if status == STATUS_COMPLETED {
                    break;
                }
                assert!(status <= STATUS_PENDING, "status {status}");
                relax();
            }
            api.free_batch_id(engine, batch).unwrap();
        }
    }
}

fn ring_write(ring: &mut Ring, ours: &Registered, peer: &Segment, remote: u64) {
    let entry = opcode::Write::new(ours.slice(..BYTES).unwrap(), peer.at(remote)).build();
    ring.submission().push(entry).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), Ok(BYTES as u32));
}

/// The times of a block of operations, in microseconds.
fn time(times: &mut Vec<f64>, mut operation: impl FnMut()) {
    for _ in 0..EACH {
        let start = Instant::now();
        operation();
        times.push(start.elapsed().as_nanos() as f64 / 1e3);
    }
}

pub fn added_latency() {
    let other = match mooncake::builder("127.0.0.1").log_level(mooncake::LogLevel::Fatal).build() {
        Ok(other) => other,
        Err(error) => {
            println!("one 4 KiB WRITE on Mooncake over TCP: not measured, {error}");
            return;
        }
    };
    let theirs = other.register(Region::alloc(BYTES).unwrap()).unwrap();
    let mut direct = Direct::new(&theirs);
    let (address, len) = (direct.memory.as_ptr().addr() as u64, BYTES as u64);
    // SAFETY: `Direct::new` made the engine and registered the memory; both stay until the process ends.
    let (engine, ours) = unsafe {
        let engine = mooncake::adopt(direct.engine.as_ptr().cast(), None, Arc::new(())).unwrap();
        let ours = engine.adopt_registration(address, len, "cpu:0").unwrap();
        (engine, ours)
    };
    let peer = engine.open_segment(other.name(), Duration::from_secs(5)).unwrap();
    let mut ring = Ring::builder().build(256, &engine).unwrap();
    let (mut yielding, mut spinning, mut through) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        if round == 1 {
            // The first round warmed everything up.
            for times in [&mut yielding, &mut spinning, &mut through] {
                times.clear();
            }
        }
        time(&mut yielding, || direct.write(yield_now));
        time(&mut spinning, || direct.write(std::hint::spin_loop));
        time(&mut through, || ring_write(&mut ring, &ours, &peer, theirs.address()));
    }
    let [yielding, spinning, through] = [yielding, spinning, through].map(|mut times| {
        times.sort_by(f64::total_cmp);
        [times[times.len() / 10], times[times.len() / 2]]
    });
    let added = |at: usize| through[at] - yielding[at].min(spinning[at]);
    println!(
        "one 4 KiB WRITE on Mooncake over TCP, medians: direct {:.1} us yielding, {:.1} us spinning, through the ring {:.1} us, \
         added to the better {:.2} us; 10th percentiles: {:.1}, {:.1}, {:.1}, added {:.2} us",
        yielding[1],
        spinning[1],
        through[1],
        added(1),
        yielding[0],
        spinning[0],
        through[0],
        added(0)
    );
}
