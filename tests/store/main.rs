//! A Store beside Reads and Writes, on one that keeps its objects in this process and does what a test asks of it.

mod ends;
mod results;
mod workers;

#[path = "../common/mod.rs"]
mod common;

use std::time::Instant;

use common::{LIMIT, Setup};
use moonring::{Cqe, Entry, Stage, opcode, store};

/// A ring on a loopback engine with a peer, and a Store with room for a mebibyte.
struct Shop {
    setup: Setup,
    memory: store::Memory,
    store: store::Client,
}

const PAGE: usize = 4096;

impl Shop {
    fn new(entries: u32) -> Shop {
        Shop::on(Setup::loopback(entries))
    }

    fn on(setup: Setup) -> Shop {
        let memory = store::Memory::new(1 << 20);
        let store = store::Client::memory(&setup.engine, &memory).unwrap();
        store.register(&setup.ours).unwrap();
        Shop { setup, memory, store }
    }

    fn page(&self, page: usize) -> moonring::Slice {
        self.setup.ours.slice(page * PAGE..(page + 1) * PAGE).unwrap()
    }

    fn get(&self, key: &str, page: usize) -> Entry {
        opcode::Get::new(&self.store, key, self.page(page)).build()
    }

    fn put(&self, key: &str, page: usize) -> Entry {
        opcode::Put::new(&self.store, key, self.page(page)).build()
    }

    fn exist(&self, key: &str) -> Entry {
        opcode::Exist::new(&self.store, key).build()
    }

    fn remove(&self, key: &str) -> Entry {
        opcode::Remove::new(&self.store, key).build()
    }

    fn fill(&self, page: usize, byte: u8) {
        self.setup.ours.write_at(page * PAGE, &[byte; PAGE]).unwrap();
    }

    fn bytes(&self, page: usize) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        self.setup.ours.read_at(page * PAGE, &mut bytes).unwrap();
        bytes
    }

    /// Pushes and submits by itself.
    fn submit(&mut self, entry: Entry) {
        self.setup.push(entry);
        self.setup.ring.submit().unwrap();
    }

    /// Does one entry.
    fn run(&mut self, entry: Entry) -> Cqe {
        self.setup.push(entry);
        self.setup.reap(1)[0]
    }

    /// Waits until the Store was called so often.
    fn await_calls(&self, count: usize) {
        await_that(|| self.memory.calls().len() >= count);
        assert_eq!(self.memory.calls().len(), count);
    }

    /// Lets all four workers make calls that do not return before these keys are released.
    fn occupy(&mut self) {
        self.occupy_some(4);
    }

    fn occupy_three(&mut self) {
        self.occupy_some(3);
    }

    fn occupy_some(&mut self, workers: u64) {
        for worker in 0..workers {
            let key = format!("held{worker}");
            let calls = |memory: &moonring::store::Memory| {
                memory.calls().iter().flatten().filter(|called| **called == key).count()
            };
            let before = calls(&self.memory);
            self.memory.hold(&key);
            let entry = self.exist(&key).user_data(u64::MAX - worker);
            self.submit(entry);
            await_that(|| calls(&self.memory) > before);
        }
    }

    fn let_go(&self) {
        (0..4).for_each(|worker| self.memory.release(&format!("held{worker}")));
    }
}

fn await_that(that: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !that() {
        assert!(Instant::now() < end);
        std::thread::yield_now();
    }
}

/// Errno, stage and detail of a failure.
fn failure(cqe: &Cqe) -> (i32, Stage, i32) {
    let error = cqe.result().unwrap_err();
    (error.errno, error.stage, cqe.detail())
}
