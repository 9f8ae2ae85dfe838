//! The counts of a ring on a real engine are what was reaped.

use std::thread;

use moonring::opcode::{Read, Write};
use moonring::{Entry, Outcome, Region, Ring};

use crate::peer::{LIMIT, Peer, alone, engine};

const READ: u64 = 1 << 32;

#[test]
#[ignore = "needs cargo xtask setup"]
fn counts_by_peer_are_the_completions() {
    let _alone = alone();
    const LEN: usize = 1 << 20;
    const EACH: usize = 1_000;
    let peers = [Peer::start(LEN), Peer::start(LEN)];
    let engine = engine();
    let region = engine.register(Region::alloc(LEN).unwrap()).unwrap();
    let segments = [0, 1].map(|at: usize| engine.open_segment(&peers[at].info.segment, LIMIT).unwrap());
    let mut ring = Ring::builder().build(64, &engine).unwrap();
    let first = ring.submitter();
    // For each peer: ended well, failed, bytes read, bytes written.
    let mut seen = [[0; 4]; 2];
    let addresses = [0, 1].map(|at: usize| peers[at].info.address);
    let segments = &segments;
    thread::scope(|scope| {
        for producer in 0..2 {
            let mut submitter = first.clone();
            let region = region.clone();
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(producer);
                for n in 0..EACH {
                    let len = if random.u8(0..20) == 0 { random.usize(1..200_000) } else { random.usize(1..5_000) };
                    let start = random.usize(0..LEN - len);
                    let to = random.usize(0..2);
                    // A few are rejected by the peer; each costs its connection a second.
                    let remote = if n == EACH / 2 { 8 } else { addresses[to] + start as u64 };
                    let (local, remote) = (region.slice(start..start + len).unwrap(), segments[to].at(remote));
                    let mut entry: Entry = match random.bool() {
                        true => Read::new(local, remote).build().user_data(READ | to as u64),
                        false => Write::new(local, remote).build().user_data(to as u64),
                    };
                    while let Err(refused) = submitter.push(entry) {
                        submitter.submit().unwrap();
                        thread::yield_now();
                        entry = refused.entry;
                    }
                    if random.u8(0..8) == 0 {
                        submitter.submit().unwrap();
                    }
                }
            });
        }
        drop(first);
        while ring.wait_timeout(1, LIMIT).is_ok() {
            for cqe in ring.completion() {
                let [ok, failed, read, written] = &mut seen[(cqe.user_data() & 1) as usize];
                match cqe.outcome() {
                    Some(Outcome::Ok) if cqe.user_data() & READ != 0 => {
                        (*ok, *read) = (*ok + 1, *read + cqe.res() as u64)
                    }
                    Some(Outcome::Ok) => (*ok, *written) = (*ok + 1, *written + cqe.res() as u64),
                    outcome => {
                        assert_eq!(outcome, Some(Outcome::Failed), "{cqe:?}");
                        *failed += 1;
                    }
                }
            }
            let total = ring.stats().unwrap().total;
            assert_eq!(total.accepted, total.ok + total.failed + total.cancelled + total.outstanding);
        }
    });
    let stats = ring.stats().unwrap();
    let counts = |name: &str| stats.peers.iter().find(|peer| peer.name == name).unwrap().counts;
    for (segment, seen) in segments.iter().zip(seen) {
        let peer = counts(segment.name());
        assert_eq!([peer.ok, peer.failed, peer.read_bytes, peer.written_bytes], seen, "{}", segment.name());
        assert_eq!((peer.accepted, peer.outstanding), (seen[0] + seen[1], 0));
        assert_eq!((peer.stages.done, peer.stages.transfer), (seen[0], seen[1]));
    }
    assert_eq!((stats.total.accepted, stats.total.failed), (2 * EACH as u64, 2));
    assert_eq!(ring.close(LIMIT).stats, Some(stats));
}
