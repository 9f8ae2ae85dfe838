//! The ring's promises on the loopback and simulated transports.

use std::time::Duration;

use moonring::{Engine, Entry, Refusal, Region, Registered, Ring, Segment, Stage, WaitError, fence, opcode};

const LIMIT: Duration = Duration::from_secs(10);

struct Setup {
    ring: Ring,
    ours: Registered,
    theirs: Registered,
    peer: Segment,
}

/// A ring of `entries` on a loopback engine, and a second engine as its peer.
fn setup(entries: u32) -> Setup {
    let engine = Engine::loopback();
    let other = Engine::loopback();
    let ours = engine.register(Region::alloc(1 << 20).unwrap()).unwrap();
    let theirs = other.register(Region::alloc(1 << 20).unwrap()).unwrap();
    let peer = engine.open_segment(other.name(), LIMIT).unwrap();
    let ring = Ring::builder().build(entries, &engine).unwrap();
    Setup { ring, ours, theirs, peer }
}

#[test]
fn reads_and_writes_move_bytes() {
    let Setup { mut ring, ours, theirs, peer } = setup(8);
    theirs.write_at(100, b"prefill").unwrap();
    let read = opcode::Read::new(ours.slice(0..7).unwrap(), peer.slice(&theirs.info(), 100, 7).unwrap());
    ring.submission().push(read.build().user_data(7)).unwrap();
    ring.submit_and_wait(1).unwrap();
    let cqe = ring.completion().next().unwrap();
    assert_eq!((cqe.user_data(), cqe.result(), cqe.stage()), (7, Ok(7), Stage::Done));
    let mut bytes = [0; 7];
    ours.read_at(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"prefill");

    ours.write_at(0, b"decode!").unwrap();
    let write = opcode::Write::new(ours.slice(0..7).unwrap(), peer.at(theirs.address() + 300));
    ring.submission().push(write.build()).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), Ok(7));
    theirs.read_at(300, &mut bytes).unwrap();
    assert_eq!(&bytes, b"decode!");
}

#[test]
fn many_nops_keep_their_user_data() {
    let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
    let (mut pushed, mut reaped) = (0, 0);
    while reaped < 100_000 {
        while pushed < 100_000 && ring.submission().push(opcode::Nop::new().build().user_data(pushed)).is_ok() {
            pushed += 1;
        }
        ring.submit_and_wait(1).unwrap();
        for cqe in ring.completion() {
            assert_eq!(cqe.user_data(), reaped);
            reaped += 1;
        }
    }
}

#[test]
fn a_full_ring_gives_the_entry_back() {
    let mut ring = Ring::builder().build(2, &Engine::loopback()).unwrap();
    let (signaller, fence) = fence::host();
    for _ in 0..2 {
        ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
    }
    ring.submit().unwrap();
    let refused = ring.submission().push(opcode::Nop::new().build().user_data(9)).unwrap_err();
    assert_eq!(refused.reason, Refusal::Full { capacity: 2 });
    signaller.signal();
    assert_eq!(ring.wait(2), Ok(2));
    assert_eq!(ring.completion().count(), 2);
    ring.submission().push(refused.entry).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().user_data(), 9);
    assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
}

/// A ring that is always full has room for one more entry for each completion that was reaped, at once.
fn room_comes_with_the_completion(ring: &mut Ring, mut entry: impl FnMut() -> Entry) {
    const ENTRIES: usize = 64;
    for _ in 0..ENTRIES {
        ring.submission().push(entry()).unwrap();
    }
    ring.submit().unwrap();
    let mut reaped = 0;
    while reaped < 100_000 {
        ring.wait(1).unwrap();
        let count = ring.completion().count();
        for _ in 0..count {
            ring.submission().push(entry()).unwrap_or_else(|refused| panic!("after {reaped}: {refused}"));
        }
        ring.submit().unwrap();
        reaped += count;
    }
}

#[test]
fn a_reaped_completion_makes_room() {
    let Setup { mut ring, ours, theirs, peer } = setup(64);
    room_comes_with_the_completion(&mut ring, || opcode::Nop::new().build());
    ring.wait(64).unwrap();
    assert_eq!(ring.completion().count(), 64);
    room_comes_with_the_completion(&mut ring, || {
        opcode::Read::new(ours.slice(0..8).unwrap(), peer.at(theirs.address())).build()
    });
}
