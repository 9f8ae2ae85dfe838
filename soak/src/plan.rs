//! What a worker does next, drawn at random.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use moonring::opcode::{self, Cancel, LinkTimeout, Nop, Select};
use moonring::{Entry, EntryFlags, Remote};

use crate::layout::{self, CELLS, CHUNK_PAGES, Cell, PAGE, SMALL};
use crate::op::{Content, Kind, Lease, Op, Part, Table};
use crate::pattern;
use crate::worker::{Way, Worker};

impl Worker {
    /// Pushes something, or cancels something.
    pub fn draw(&mut self) {
        let peer = self.rng.usize(self.peers.clone());
        let table = self.table(peer);
        match self.rng.u32(0..1_000) {
            0..360 => self.single(&table, Way::Queue),
            360..560 => self.neighbours(&table),
            560..680 => self.vectored(&table),
            680..790 => self.chain(&table),
            790..815 => self.big(&table),
            815..915 => self.single(&table, Way::Future),
            915..920 => self.bad_target(&table),
            920..970 => self.cancel_one(),
            970..990 => self.drop_a_future(),
            990..993 => self.cancel_all(&table),
            _ => {
                let id = self.id();
                self.push(vec![(Nop::new().build().flags(EntryFlags::IO_DRAIN), id, Op::control())], Way::Queue);
            }
        }
    }

    fn kind(&mut self) -> Kind {
        if self.rng.bool() { Kind::Read } else { Kind::Write }
    }

    /// One page, or some of its bytes.
    fn single(&mut self, table: &Rc<Table>, way: Way) {
        let (kind, cell) = (self.kind(), self.rng.usize(0..SMALL));
        let Some(lease) = self.lease(false) else { return };
        if !reserve(table, kind, cell) {
            return;
        }
        let part = match kind {
            Kind::Read => self.some_of(cell, &lease, 0),
            _ => whole(cell, &lease, 0),
        };
        let (entry, op) = self.transfer(table, kind, part, &lease);
        let entry = self.dress(entry, op, None);
        self.push(vec![entry], way);
    }

    /// Pages that lie side by side at both ends, each an entry of its own.
    fn neighbours(&mut self, table: &Rc<Table>) {
        let (kind, count) = (self.kind(), self.rng.usize(2..=CHUNK_PAGES));
        let first = self.rng.usize(0..SMALL - count);
        let Some(lease) = self.lease(false) else { return };
        let gate = (self.rng.u32(0..3) == 0).then(|| self.gate());
        let mut order: Vec<usize> = (0..count).collect();
        if self.rng.bool() {
            order.reverse();
        }
        for at in order {
            if !reserve(table, kind, first + at) {
                continue;
            }
            let (entry, op) = self.transfer(table, kind, whole(first + at, &lease, at), &lease);
            let entry = self.dress(entry, op, gate);
            self.push(vec![entry], Way::Queue);
        }
    }

    /// Many pages in one entry.
    fn vectored(&mut self, table: &Rc<Table>) {
        let (kind, count) = (self.kind(), self.rng.usize(2..=CHUNK_PAGES));
        let Some(lease) = self.lease(false) else { return };
        let mut cells = self.rng.choose_multiple(0..SMALL, count);
        cells.retain(|&cell| reserve(table, kind, cell));
        if cells.is_empty() {
            return;
        }
        let parts: Vec<Part> = cells.iter().enumerate().map(|(at, &cell)| whole(cell, &lease, at)).collect();
        let start = layout::chunk_offset(lease.chunk);
        let local = |range| self.region.slice(range).expect("a chunk is inside the region");
        let entry = if self.rng.bool() {
            let chunk = local(start..start + CHUNK_PAGES * PAGE);
            let remote = self.remote(table, Cell { worker: self.number, number: 0 }, 0, SMALL * PAGE, false);
            let pages = cells.iter().enumerate().map(|(at, &cell)| (at as u32, cell as u32));
            match kind {
                Kind::Read => opcode::ReadPages::new(chunk, remote, PAGE, pages).build(),
                _ => opcode::WritePages::new(chunk, remote, PAGE, pages).build(),
            }
        } else {
            let list = parts.iter().map(|part| {
                let cell = Cell { worker: self.number, number: part.cell };
                (local(part.local..part.local + part.len), self.remote(table, cell, part.at, part.len, false))
            });
            match kind {
                Kind::Read => opcode::Readv::new(list).build(),
                _ => opcode::Writev::new(list).build(),
            }
        };
        let stamp = self.stamps(parts.len());
        let (table, lease) = (Some(Rc::clone(table)), Some(lease));
        let op = Op { kind, parts, vectored: true, table, lease, stamp, ..Op::control() };
        let entry = self.dress(entry, op, None);
        self.push(vec![entry], Way::Queue);
    }

    /// A page is written, then read back, linked; at times with a limit on the first.
    fn chain(&mut self, table: &Rc<Table>) {
        let cell = self.rng.usize(0..SMALL);
        let Some(lease) = self.lease(false) else { return };
        if !reserve(table, Kind::Write, cell) {
            return;
        }
        // The chain's own reader: others have to wait for it, too.
        table.cells.borrow_mut()[cell].readers += 1;
        let link = if self.rng.bool() { EntryFlags::IO_LINK } else { EntryFlags::IO_HARDLINK };
        let mut entries = Vec::new();
        let (write, op) = self.transfer(table, Kind::Write, whole(cell, &lease, 0), &lease);
        let (write, id, mut op) = self.dress(write.flags(link), op, None);
        let limited = self.rng.u32(0..3) == 0;
        op.causes.cancel = limited;
        entries.push((write, id, op));
        if limited {
            let limit = Duration::from_micros(self.rng.u64(50..40_000));
            let mut op = Op::control();
            op.causes.chain = true;
            let id = self.id();
            entries.push((LinkTimeout::new(limit).build().flags(link), id, op));
        }
        let part = self.some_of(cell, &lease, 1);
        let (read, mut op) = self.transfer(table, Kind::Read, part, &lease);
        op.causes.chain = true;
        entries.push(self.dress(read, op, None));
        self.push(entries, Way::Queue);
    }

    /// What takes a while, so that faults come in the middle of it.
    fn big(&mut self, table: &Rc<Table>) {
        let (kind, cell) = (self.kind(), self.rng.usize(SMALL..CELLS));
        let Some(lease) = self.lease(true) else { return };
        if reserve(table, kind, cell) {
            let (entry, op) = self.transfer(table, kind, whole(cell, &lease, 0), &lease);
            let entry = self.dress(entry, op, None);
            self.push(vec![entry], Way::Queue);
        }
    }

    /// A Write that a peer rejects, with nothing else that could end it: each run sees whether that is told, whatever it draws
    /// later.
    pub fn begin(&mut self) {
        let peer = self.peers.start + self.number % self.peers.len();
        let table = self.table(peer);
        self.rejected(&table, Kind::Write, |worker, entry, op| (entry, worker.id(), op));
    }

    fn bad_target(&mut self, table: &Rc<Table>) {
        let kind = self.kind();
        self.rejected(table, kind, |worker, entry, op| worker.dress(entry, op, None));
    }

    /// Where the peer has registered nothing.
    fn rejected(
        &mut self,
        table: &Rc<Table>,
        kind: Kind,
        dress: impl FnOnce(&mut Worker, Entry, Op) -> (Entry, u64, Op),
    ) {
        let cell = self.rng.usize(0..SMALL);
        let Some(lease) = self.lease(false) else { return };
        if !reserve(table, kind, cell) {
            return;
        }
        let info = &table.peer.process.info;
        let end = info.address + info.len;
        let address = *self.rng.choice(&[8, end + (1 << 20), end - PAGE as u64 + 1]).expect("there are some");
        let part = whole(cell, &lease, 0);
        let local = self.region.slice(part.local..part.local + part.len).expect("a chunk is inside the region");
        let remote = table.peer.segment.at(address);
        let entry = match kind {
            Kind::Read => opcode::Read::new(local, remote).build(),
            _ => opcode::Write::new(local, remote).build(),
        };
        let (_, mut op) = self.transfer(table, kind, part, &lease);
        op.causes.bad_target = true;
        let entry = dress(self, entry, op);
        if self.push(vec![entry], Way::Queue) {
            self.tally.fault("bad_target");
        }
    }

    /// Cancels one of the last entries, from the queue or beside it.
    fn cancel_one(&mut self) {
        let Some(&id) = self.rng.choice(&self.recent) else { return };
        let Some(op) = self.ops.get_mut(&id).filter(|op| op.kind != Kind::Control) else { return };
        op.causes.cancel = true;
        let cancel = Cancel::user_data(id);
        let cancel = if self.rng.bool() { cancel.detach() } else { cancel };
        self.tally.fault("cancel");
        if self.rng.bool() {
            let id = self.id();
            self.push(vec![(cancel.build(), id, Op::control())], Way::Queue);
        } else if let Err(error) = self.controller().cancel(cancel) {
            self.tally.anomaly(crate::Anomaly::Result, format_args!("a cancel: {error}"));
        }
    }

    /// Cancels everything that goes to a peer.
    fn cancel_all(&mut self, table: &Rc<Table>) {
        for op in self.ops.values_mut() {
            op.causes.cancel = true;
        }
        self.tally.fault("cancel_all");
        let cancel = Cancel::new(Select::segment(&table.peer.segment)).all().detach();
        if let Err(error) = self.controller().cancel(cancel) {
            self.tally.anomaly(crate::Anomaly::Result, format_args!("a cancel of all: {error}"));
        }
    }

    /// Any range of a page.
    fn some_of(&mut self, cell: usize, lease: &Lease, page: usize) -> Part {
        let part = whole(cell, lease, page);
        if self.rng.bool() {
            return part;
        }
        let at = self.rng.usize(0..part.len);
        let len = self.rng.usize(1..=part.len - at);
        Part { at, len, local: part.local + at, ..part }
    }

    fn remote(&self, table: &Table, cell: Cell, at: usize, len: usize, declared: bool) -> Remote {
        let (segment, info) = (&table.peer.segment, &table.peer.process.info);
        let offset = (cell.offset() + at) as u64;
        if declared {
            segment.slice(info, offset, len as u64).expect("a cell is inside the region")
        } else {
            segment.at(info.address + offset)
        }
    }

    /// A Read or Write of one part, and what is known of it.
    fn transfer(&mut self, table: &Rc<Table>, kind: Kind, part: Part, lease: &Arc<Lease>) -> (Entry, Op) {
        let local = self.region.slice(part.local..part.local + part.len).expect("a chunk is inside the region");
        let cell = Cell { worker: self.number, number: part.cell };
        // Declared, so that neighbours can be merged.
        let remote = self.remote(table, cell, part.at, part.len, true);
        let entry = match kind {
            Kind::Read => opcode::Read::new(local, remote).build(),
            _ => opcode::Write::new(local, remote).build(),
        };
        let (table, lease) = (Some(Rc::clone(table)), Some(Arc::clone(lease)));
        let stamp = self.stamps(1);
        (entry, Op { kind, parts: vec![part], table, lease, stamp, ..Op::control() })
    }

    /// Adds fences and limits, and fills the buffer. A Write that waits has its bytes only when its last fence signals.
    fn dress(&mut self, mut entry: Entry, mut op: Op, gate: Option<usize>) -> (Entry, u64, Op) {
        let id = self.id();
        let mut gates: Vec<usize> = gate.into_iter().collect();
        if self.rng.u32(0..4) == 0 {
            gates.extend((0..self.rng.usize(1..3)).map(|_| self.gate()));
        }
        gates.sort_unstable();
        gates.dedup();
        for at in gates {
            let gate = &mut self.gates[at];
            entry = entry.wait(&gate.fence);
            gate.waiters.push(id);
            op.fences += 1;
            op.causes.fence |= gate.fails;
        }
        if self.rng.u32(0..16) == 0 {
            op.causes.gate_limit = true;
            entry = entry.gate_limit(Duration::from_millis(self.rng.u64(1..40)));
        }
        if self.rng.u32(0..8) == 0 {
            op.causes.transfer_limit = true;
            entry = entry.transfer_limit(Duration::from_millis(self.rng.u64(5..300)));
        }
        for (at, part) in op.parts.iter().enumerate() {
            let stamp = match op.kind {
                Kind::Write if op.fences == 0 => op.stamp + at as u64,
                Kind::Write => !op.stamp,
                _ => op.stamp,
            };
            pattern::fill(&self.region, part.local, part.len, stamp, part.at);
        }
        (entry, id, op)
    }
}

/// A whole cell, in the chunk's page of this number.
fn whole(cell: usize, lease: &Lease, page: usize) -> Part {
    let len = Cell { worker: 0, number: cell }.len();
    Part { cell, at: 0, len, local: layout::chunk_offset(lease.chunk) + page * PAGE }
}

/// Whether an entry may have the cell: one that writes alone, those that read together.
fn reserve(table: &Table, kind: Kind, cell: usize) -> bool {
    let state = &mut table.cells.borrow_mut()[cell];
    let is_free = match kind {
        Kind::Read => !state.writer,
        _ => state.readers == 0 && !state.writer && !state.checking,
    };
    let is_known = matches!(state.content, Content::Known(_));
    if is_free && is_known {
        match kind {
            Kind::Read => state.readers += 1,
            _ => state.writer = true,
        }
    }
    is_free && is_known
}
