//! Neighbours that go to the transport as one operation, and still end one by one.

mod common;

use std::sync::atomic::AtomicU8;
use std::time::Duration;

use common::{LIMIT, Setup, reap_exactly};
use moonring::code::errno;
use moonring::opcode::{Cancel, Nop, Read, Select, Write};
use moonring::sim::{Probe, Sim};
use moonring::{Cqe, CqeFlags, Entry, EntryFlags, Fence, Region, RegionInfo, Remote, Segment, Slice, Stage, fence};

const PAGE: usize = 4096;
/// Pages that fit into one turn.
const PAGES: usize = 64;

/// A ring on a simulated engine that merges up to 1 MiB, and a fence that everything waits for, so that it is ready at once.
struct Merging {
    setup: Setup,
    probe: Probe,
    start: Option<fence::Signaller>,
    fence: Fence,
    info: RegionInfo,
}

impl Merging {
    fn new(sim: Sim) -> Merging {
        Merging::up_to(1 << 20, sim)
    }

    fn up_to(bytes: usize, sim: Sim) -> Merging {
        let sim = sim.merged(bytes as u32);
        let probe = sim.probe();
        let setup = Setup::simulated(256, sim);
        let (start, fence) = fence::host();
        let info = setup.theirs.info();
        let bytes: Vec<u8> = (0..setup.theirs.len()).map(byte).collect();
        setup.theirs.write_at(0, &bytes).unwrap();
        Merging { setup, probe, start: Some(start), fence, info }
    }

    fn slice(&self, page: usize) -> Slice {
        self.setup.ours.slice(page * PAGE..(page + 1) * PAGE).unwrap()
    }

    fn read(&self, page: usize) -> Entry {
        let remote = self.setup.peer.slice(&self.info, (page * PAGE) as u64, PAGE as u64).unwrap();
        Read::new(self.slice(page), remote).build().user_data(page as u64)
    }

    fn write(&self, page: usize) -> Entry {
        let remote = self.setup.peer.slice(&self.info, (page * PAGE) as u64, PAGE as u64).unwrap();
        Write::new(self.slice(page), remote).build().user_data(page as u64)
    }

    fn push(&mut self, entry: Entry) {
        let entry = entry.wait(&self.fence);
        self.setup.push(entry);
    }

    /// Lets everything go.
    fn go(&mut self) {
        self.setup.ring.submit().unwrap();
        // Everything is at the gate before the first of it is let go: a quiesce takes what is published first.
        let nothing = self.setup.ring.controller().cancel(Cancel::new(Select::user_data(u64::MAX))).unwrap();
        assert_eq!(nothing, 0);
        self.start.take().unwrap().signal();
    }

    fn reap(&mut self, count: usize) -> Vec<Cqe> {
        let mut cqes = reap_exactly(&mut self.setup.ring, count);
        cqes.sort_by_key(Cqe::user_data);
        cqes
    }

    /// All of these pages end well, each by itself.
    fn all_read(&mut self, pages: impl IntoIterator<Item = usize>) {
        let pages: Vec<usize> = pages.into_iter().collect();
        let cqes = self.reap(pages.len());
        for (cqe, page) in cqes.iter().zip(pages) {
            let ok = (page as u64, PAGE as i32, Stage::Done, CqeFlags::empty());
            assert_eq!((cqe.user_data(), cqe.res(), cqe.stage(), cqe.flags()), ok);
            assert!(self.holds(page), "page {page}");
        }
    }

    /// The page was read.
    fn holds(&self, page: usize) -> bool {
        let mut bytes = vec![0; PAGE];
        self.setup.ours.read_at(page * PAGE, &mut bytes).unwrap();
        bytes.iter().enumerate().all(|(at, &is)| is == byte(page * PAGE + at))
    }
}

fn byte(at: usize) -> u8 {
    (at * 31 + at / 251 + 7) as u8 | 1
}

#[test]
fn l1_neighbours_up_and_down_are_one_operation_with_a_result_each() {
    let mut merging = Merging::new(Sim::new(1));
    (1..=PAGES).for_each(|page| merging.push(merging.read(page)));
    (PAGES + 2..2 * PAGES).rev().for_each(|page| merging.push(merging.read(page)));
    merging.go();
    merging.all_read((1..=PAGES).chain(PAGES + 2..2 * PAGES));
    assert_eq!(merging.probe.issued(), 2);
    assert!(!merging.holds(0) && !merging.holds(PAGES + 1) && !merging.holds(2 * PAGES), "beside and between");
}

#[test]
fn writes_are_merged_too() {
    let mut merging = Merging::new(Sim::new(2));
    merging.setup.ours.write_at(0, &vec![9; 4 * PAGE]).unwrap();
    (0..4).for_each(|page| merging.push(merging.write(page)));
    merging.go();
    assert!(merging.reap(4).iter().all(|cqe| cqe.res() == PAGE as i32));
    assert_eq!(merging.probe.issued(), 1);
    let mut bytes = vec![0; 5 * PAGE];
    merging.setup.theirs.read_at(0, &mut bytes).unwrap();
    assert!(bytes[..4 * PAGE].iter().all(|&is| is == 9));
    assert_eq!(bytes[4 * PAGE], byte(4 * PAGE));
}

/// Each pair of entries here has one thing in the way; so each entry is an operation.
#[test]
fn nothing_is_merged_across_a_border() {
    let mut merging = Merging::new(Sim::new(3));
    let engine = merging.setup.engine.clone();
    let other = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let elsewhere = engine.open_segment("sim/1", LIMIT).unwrap();
    let entries = {
        let at =
            |segment: &Segment, page: usize| segment.slice(&merging.info, (page * PAGE) as u64, PAGE as u64).unwrap();
        let peer = &merging.setup.peer;
        let undeclared = |page: usize| peer.at(merging.info.address + (page * PAGE) as u64);
        let border = |first: usize| {
            let info = RegionInfo {
                address: merging.info.address + (first * PAGE) as u64,
                len: PAGE as u64,
                ..merging.info.clone()
            };
            peer.slice(&info, 0, PAGE as u64).unwrap()
        };
        let read = |page: usize, remote| Read::new(merging.slice(page), remote).build();
        vec![
            // A gap, in one of the ranges or in both.
            read(0, at(peer, 0)),
            read(1, at(peer, 2)),
            read(3, at(peer, 3)),
            read(5, at(peer, 5)),
            // Another opcode.
            Write::new(merging.slice(6), at(peer, 6)).build(),
            // Another local region.
            Read::new(other.slice(..).unwrap(), at(peer, 7)).build(),
            // Registrations that nobody declared, and two that end where the other begins.
            read(10, undeclared(10)),
            read(11, undeclared(11)),
            read(20, border(20)),
            read(21, border(21)),
            // Down after up would need to know the far end.
            read(30, at(peer, 30)),
            read(32, at(peer, 32)),
            // Another peer: it has a list of its own.
            read(33, at(&elsewhere, 33)),
        ]
    };
    let count = entries.len();
    entries.into_iter().for_each(|entry| merging.push(entry));
    merging.go();
    let cqes = merging.reap(count);
    assert!(cqes.iter().all(|cqe| cqe.res() == PAGE as i32), "{cqes:?}");
    assert_eq!(merging.probe.issued(), count as u64);
}

/// The same bytes go to a second place in between: the third entry borders both, locally, and only the first remotely.
#[test]
fn an_entry_between_two_neighbours_keeps_its_range() {
    let mut merging = Merging::new(Sim::new(13));
    let source: Vec<u8> = (0..2 * PAGE).map(|at| (at % 249) as u8).collect();
    merging.setup.ours.write_at(0, &source).unwrap();
    let peer = merging.setup.peer.clone();
    let declared = |page: usize| peer.slice(&merging.info, (page * PAGE) as u64, PAGE as u64).unwrap();
    let undeclared = |page: usize| peer.at(merging.info.address + (page * PAGE) as u64);
    let copies = [(0, declared(40)), (0, undeclared(50)), (1, declared(41))];
    let entries = copies.map(|(page, to)| Write::new(merging.slice(page), to).build());
    entries.into_iter().for_each(|entry| merging.push(entry));
    merging.go();
    assert!(merging.reap(3).iter().all(|cqe| cqe.res() == PAGE as i32));
    let mut bytes = vec![0; 2 * PAGE];
    merging.setup.theirs.read_at(40 * PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, source);
    merging.setup.theirs.read_at(50 * PAGE, &mut bytes).unwrap();
    assert!(bytes[..PAGE] == source[..PAGE] && (0..PAGE).all(|at| bytes[PAGE + at] == byte(51 * PAGE + at)));
}

#[test]
fn members_of_chains_and_entries_with_unmet_fences_stay_alone() {
    let mut merging = Merging::new(Sim::new(4));
    let (late, unmet) = fence::host();
    merging.push(merging.read(0));
    let waits = merging.read(1).wait(&unmet);
    merging.push(waits);
    merging.push(merging.read(2));
    // The end of this chain becomes ready behind its Nop, and the read after it right then.
    merging.push(Nop::new().build().user_data(1000).flags(EntryFlags::IO_LINK));
    merging.push(merging.read(10));
    merging.push(merging.read(11));
    merging.go();
    let cqes = merging.reap(5);
    assert_eq!(cqes.iter().map(Cqe::user_data).collect::<Vec<_>>(), [0, 2, 10, 11, 1000]);
    assert_eq!(merging.probe.issued(), 4);
    late.signal();
    merging.all_read([1]);
    assert_eq!(merging.probe.issued(), 5);
}

/// The declared registration is two pages longer than the real one, so what is merged across its end fails as a whole. The
/// outcome of each page.
fn across_the_end(merging: &mut Merging, new: impl Fn(Slice, Remote) -> Entry) -> Vec<(u64, i32, Stage)> {
    static MEMORY: [AtomicU8; 6 * PAGE] = [const { AtomicU8::new(7) }; 6 * PAGE];
    let address = MEMORY.as_ptr().addr() as u64;
    // SAFETY: it is there for ever, and nobody else looks at it.
    let four = unsafe { merging.setup.engine.register_foreign(address, 4 * PAGE as u64, "cpu:0") }.unwrap();
    let info = RegionInfo { len: 6 * PAGE as u64, ..four.info() };
    for page in 0..6 {
        let remote = merging.setup.peer.slice(&info, (page * PAGE) as u64, PAGE as u64).unwrap();
        let entry = new(merging.slice(page), remote).user_data(page as u64);
        merging.push(entry);
    }
    merging.go();
    merging.reap(6).iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.stage())).collect()
}

#[test]
fn a_merged_read_that_fails_is_tried_once_more_alone() {
    let mut merging = Merging::new(Sim::new(5));
    let seen = across_the_end(&mut merging, |local, remote| Read::new(local, remote).build());
    let (ok, bad) = ((PAGE as i32, Stage::Done), (-errno::EFAULT, Stage::Transfer));
    assert_eq!(
        seen,
        [ok, ok, ok, ok, bad, bad].iter().zip(0..).map(|(&(res, at), n)| (n, res, at)).collect::<Vec<_>>()
    );
    assert_eq!(merging.probe.issued(), 1 + 6);
}

#[test]
fn a_merged_write_that_fails_on_its_way_fails_each_part() {
    let mut merging = Merging::new(Sim::new(6));
    let seen = across_the_end(&mut merging, |local, remote| Write::new(local, remote).build());
    assert_eq!(seen, (0..6).map(|n| (n, -errno::EFAULT, Stage::Transfer)).collect::<Vec<_>>());
    assert_eq!(merging.probe.issued(), 1);
}

#[test]
fn a_merged_write_that_is_rejected_outright_is_tried_once_more_alone() {
    let mut merging = Merging::new(Sim::new(7).longest(2 * PAGE as u32));
    (0..4).for_each(|page| merging.push(merging.write(page)));
    merging.go();
    assert!(merging.reap(4).iter().all(|cqe| cqe.res() == PAGE as i32 && cqe.stage() == Stage::Done));
    assert_eq!(merging.probe.issued(), 1 + 4);
}

#[test]
fn after_a_time_out_nothing_is_tried_again_and_each_part_becomes_quiet() {
    let mut merging = Merging::new(Sim::new(8).unquiet(1000));
    (0..4).for_each(|page| merging.push(merging.read(page)));
    merging.go();
    let cqes = merging.reap(8);
    for (page, pair) in cqes.chunks(2).enumerate() {
        let seen = pair.iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.flags())).collect::<Vec<_>>();
        let page = page as u64;
        assert_eq!(seen, [(page, -errno::ETIMEDOUT, CqeFlags::MORE), (page, 0, CqeFlags::NOTIF)]);
    }
    assert_eq!(merging.probe.issued(), 1);
}

#[test]
fn one_part_can_be_late_or_cancelled_while_the_others_go_on() {
    let delay = Duration::from_millis(600);
    let mut merging = Merging::new(Sim::new(9).delay(delay..delay));
    let hasty = merging.read(1).transfer_limit(Duration::from_millis(20));
    merging.push(merging.read(0));
    merging.push(hasty);
    (2..4).for_each(|page| merging.push(merging.read(page)));
    merging.go();
    let late = merging.reap(1)[0];
    assert_eq!((late.user_data(), late.res(), late.stage()), (1, -errno::ETIME, Stage::Transfer));
    assert_eq!(late.flags(), CqeFlags::MORE);
    // The first, which gave the operation its name, and is not kept waiting for either.
    assert_eq!(merging.setup.ring.controller().cancel(Cancel::new(Select::user_data(0)).detach()), Ok(1));
    let cancelled = merging.reap(1)[0];
    assert_eq!((cancelled.user_data(), cancelled.res(), cancelled.flags()), (0, -errno::ECANCELED, CqeFlags::MORE));
    let seen = merging.reap(4).iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.flags())).collect::<Vec<_>>();
    let (notif, ok) = ((0, CqeFlags::NOTIF), (PAGE as i32, CqeFlags::empty()));
    assert_eq!(seen, [notif, notif, ok, ok].iter().zip(0..).map(|(&(res, is), n)| (n, res, is)).collect::<Vec<_>>());
    assert_eq!(merging.probe.issued(), 1);
}

#[test]
fn the_limit_of_a_part_goes_on_when_it_is_tried_alone() {
    let delay = Duration::from_millis(400);
    let mut merging = Merging::new(Sim::new(10).delay(delay..delay));
    let seen = across_the_end(&mut merging, |local, remote| {
        // Enough for one try, not for two.
        Read::new(local, remote).build().transfer_limit(Duration::from_millis(700))
    });
    assert_eq!(seen, (0..6).map(|n| (n, -errno::ETIME, Stage::Transfer)).collect::<Vec<_>>());
    assert_eq!(merging.probe.issued(), 1 + 6);
    assert!(merging.reap(6).iter().all(|cqe| cqe.flags() == CqeFlags::NOTIF));
}

#[test]
fn a_request_has_a_size_cap() {
    let mut merging = Merging::up_to(2 * PAGE, Sim::new(11));
    (0..5).for_each(|page| merging.push(merging.read(page)));
    merging.go();
    merging.all_read(0..5);
    assert_eq!(merging.probe.issued(), 3);
}

#[test]
fn when_the_driver_dies_every_part_is_unquiet() {
    let mut merging = Merging::new(Sim::new(13).panic_at(1));
    (0..4).for_each(|page| merging.push(merging.read(page)));
    merging.go();
    for (page, cqe) in merging.reap(4).iter().enumerate() {
        assert_eq!((cqe.user_data(), cqe.res()), (page as u64, -errno::EOWNERDEAD));
        assert!(cqe.flags().contains(CqeFlags::UNQUIET), "{cqe:?}");
    }
}
