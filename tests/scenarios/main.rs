//! What has gone wrong elsewhere, one test for each scenario of `docs/scenarios.md`. Each plays the failure, and shows what
//! it looks like without what prevents it: by a control in the test itself, or by a planted bug, as the page says.

mod completions;
mod held;
mod limits;
mod order;
mod queues;

#[path = "../common/mod.rs"]
mod common;

use std::time::Duration;

use common::{LIMIT, reap_exactly};
use held::Held;
use moonring::opcode::{Cancel, Read, Write};
use moonring::{Cqe, Engine, Entry, Fence, Region, Registered, Remote, Ring, Segment, Slice};

const MS: Duration = Duration::from_millis(1);
const PAGE: usize = 4096;
const PAGES: usize = 64;

/// A ring on a held transport, with two peers in this process.
struct Scene {
    held: Held,
    engine: Engine,
    ring: Ring,
    ours: Registered,
    theirs: Registered,
    /// `peers[0]` and `peers[1]` have the same memory, and are two to the ring.
    peers: [Segment; 2],
}

impl Scene {
    fn new(entries: u32) -> Scene {
        Scene::on(entries, Held::new())
    }

    fn on(entries: u32, held: Held) -> Scene {
        let engine = held.engine();
        let [ours, theirs] = [0; 2].map(|_| engine.register(Region::alloc(PAGES * PAGE).unwrap()).unwrap());
        let peers = ["held/0", "held/1"].map(|name| engine.open_segment(name, LIMIT).unwrap());
        let ring = Ring::builder().grace(20 * MS).build(entries, &engine).unwrap();
        Scene { held, engine, ring, ours, theirs, peers }
    }

    fn local(&self, page: usize) -> Slice {
        self.ours.slice(page * PAGE..(page + 1) * PAGE).unwrap()
    }

    fn remote(&self, peer: usize, page: usize) -> Remote {
        self.peers[peer].at(self.theirs.address() + (page * PAGE) as u64)
    }

    /// A page from the same page of a peer.
    fn read(&self, peer: usize, page: usize) -> Entry {
        Read::new(self.local(page), self.remote(peer, page)).build()
    }

    fn write(&self, peer: usize, page: usize) -> Entry {
        Write::new(self.local(page), self.remote(peer, page)).build()
    }

    fn push(&mut self, entry: Entry) {
        self.ring.submission().push(entry).unwrap();
    }

    fn submit(&mut self, entry: Entry) {
        self.push(entry);
        self.ring.submit().unwrap();
    }

    fn fenced(&mut self, entry: Entry) -> Fence {
        self.ring.submission().push_fenced(entry).unwrap()
    }

    /// Submits and waits for exactly `count` completions.
    fn reap(&mut self, count: usize) -> Vec<Cqe> {
        self.ring.submit().unwrap();
        reap_exactly(&mut self.ring, count)
    }

    /// The poller has taken everything that was submitted and made a turn with it.
    fn taken(&mut self) {
        for _ in 0..2 {
            assert_eq!(self.ring.controller().cancel(Cancel::user_data(u64::MAX)), Ok(0));
        }
    }

    fn fill(region: &Registered, page: usize, byte: u8) {
        region.write_at(page * PAGE, &[byte; PAGE]).unwrap();
    }

    /// The page holds this byte, everywhere.
    fn holds(region: &Registered, page: usize, byte: u8) -> bool {
        let mut bytes = [0; PAGE];
        region.read_at(page * PAGE, &mut bytes).unwrap();
        bytes == [byte; PAGE]
    }
}
