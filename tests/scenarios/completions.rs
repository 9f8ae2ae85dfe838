//! What completions say (E, I, J).

use std::collections::BTreeSet;
use std::sync::atomic::AtomicU8;

use moonring::code::errno;
use moonring::opcode::{Cancel, Nop, Read, Wait};
use moonring::{CqeFlags, Refusal, Region, Stage, fence};

use crate::{Held, LIMIT, MS, PAGE, PAGES, Scene};

/// A store ends when the peer has its bytes, which it can check at the completion; while the transport is silent there is
/// none. That Mooncake's old framing gives this away is in `mooncake::e1_the_old_framing_completes_what_a_stopped_peer_has_not_seen`.
#[test]
fn e1_a_store_ends_when_its_bytes_are_there() {
    let mut scene = Scene::new(8);
    for round in 0..100u8 {
        Scene::fill(&scene.ours, 0, round + 1);
        scene.submit(scene.write(0, 0));
        scene.held.await_issued(usize::from(round) + 1);
        scene.taken();
        assert!(scene.ring.completion().is_empty());
        assert!(Scene::holds(&scene.theirs, 0, round));
        scene.held.land(0);
        assert_eq!(scene.reap(1)[0].result(), Ok(PAGE as u32));
        assert!(Scene::holds(&scene.theirs, 0, round + 1));
    }
}

/// In one submit: one fails at once, one is slow, one is quick. Each is told when it ends, with its own result; a segment
/// that nobody opened never gets there.
#[test]
fn e2_entries_of_one_submit_have_their_own_ends() {
    let mut scene = Scene::new(8);
    let elsewhere = Scene::new(8);
    let stranger = Read::new(scene.local(0), elsewhere.remote(0, 0)).build();
    assert!(matches!(scene.ring.submission().push(stranger).unwrap_err().reason, Refusal::ForeignSegment(_)));
    let (signaller, fence) = fence::host();
    for n in 0..3 {
        scene.push(scene.read(0, n).wait(&fence).user_data(n as u64));
    }
    scene.ring.submit().unwrap();
    scene.taken();
    signaller.signal();
    scene.held.await_issued(3);
    assert_eq!(scene.held.calls(), 1, "one batch");
    scene.held.fail(0, errno::EIO, Stage::Transfer);
    scene.held.land(1);
    let mut cqes = scene.reap(2);
    cqes.sort_by_key(|cqe| cqe.user_data());
    let got: Vec<_> = cqes.iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.detail())).collect();
    assert_eq!(got, [(0, -errno::EIO, -7), (2, PAGE as i32, 0)]);
    scene.taken();
    assert!(scene.ring.completion().is_empty(), "the slow one is on its way");
    scene.held.land(0);
    let slow = scene.reap(1)[0];
    assert_eq!((slow.user_data(), slow.result()), (1, Ok(PAGE as u32)));
}

/// Nobody reaps: pushes are refused, what was accepted ends all the same, each after the one that it waits for, and every
/// completion is there when somebody looks.
#[test]
fn e4_a_full_completion_queue_loses_nothing() {
    let mut scene = Scene::new(4);
    let mut seen = Vec::new();
    let mut pushed = 0;
    let mut refused = 0;
    let mut before: Option<fence::Fence> = None;
    while pushed < 1000 {
        let entry = Nop::new().build().user_data(pushed);
        let entry = before.iter().fold(entry, moonring::Entry::wait);
        match scene.ring.submission().push_fenced(entry) {
            Ok(fence) => {
                before = Some(fence);
                pushed += 1;
                scene.ring.submit().unwrap();
            }
            Err(error) => {
                assert!(matches!(error.reason, Refusal::Full { capacity: 4 }));
                // Everything that was accepted goes on, though its completion may have no room.
                before.as_ref().inspect(|fence| assert_eq!(fence.wait_timeout(LIMIT), fence::FenceStatus::Signalled));
                refused += 1;
                if refused % 3 == 0 {
                    seen.extend(scene.ring.completion().map(|cqe| cqe.user_data()));
                }
            }
        }
    }
    while seen.len() < 1000 {
        scene.ring.wait_timeout(1, LIMIT).unwrap();
        seen.extend(scene.ring.completion().map(|cqe| cqe.user_data()));
    }
    assert_eq!(seen, (0..1000).collect::<Vec<_>>());
    assert!(refused > 100, "{refused}");
}

/// The same range again is one registration more, and only the last unregister is one; ranges that overlap are refused,
/// neighbours are not.
#[test]
fn i1_a_range_is_registered_once() {
    let scene = Scene::new(8);
    static MEMORY: [AtomicU8; 4 * PAGE] = [const { AtomicU8::new(0) }; 4 * PAGE];
    let start = MEMORY.as_ptr().addr() as u64;
    let register = |from: u64, len: u64| {
        // SAFETY: the memory is there for ever, and nobody else uses it.
        unsafe { scene.engine.register_foreign(start + from, len, "cpu:0") }
    };
    let page = PAGE as u64;
    let first = register(0, 2 * page).unwrap();
    let again = register(0, 2 * page).unwrap();
    for (from, len) in [(0, page), (page, page), (page, 2 * page), (0, 4 * page), (2 * page - 1, 1)] {
        let error = register(from, len).unwrap_err().to_string();
        assert!(error.contains("overlaps"), "{error}");
    }
    let beside = register(2 * page, 2 * page).unwrap();
    // SAFETY: nobody touches the memory through the ring.
    let unregister = |region: &moonring::Registered| unsafe { region.unregister_foreign() };
    unregister(&first).unwrap();
    assert!(register(page, page).is_err(), "the other registration of the same range counts");
    unregister(&again).unwrap();
    unregister(&register(page, page).unwrap()).unwrap();
    unregister(&beside).unwrap();
    unregister(&register(0, 4 * page).unwrap()).unwrap();
}

/// A region that the transport takes only in shorter pieces is refused whole, with its size, and nothing is left over.
#[test]
fn i3_a_region_beyond_the_transports_limit_is_an_error() {
    let scene = Scene::on(8, Held::new().longest_region(1 << 20));
    let error = scene.engine.register(Region::alloc(7 << 19).unwrap()).unwrap_err();
    assert!(error.to_string().contains("1048576"), "{error}");
    let whole = scene.engine.register(Region::alloc(1 << 20).unwrap()).unwrap();
    assert_eq!(whole.len(), 1 << 20);
    assert!(whole.slice(PAGES * PAGE..(1 << 20) + 1).is_err());
}

/// Every stage at which an entry can be lost has a completion of its own.
#[test]
fn j4_no_two_causes_look_alike() {
    let mut scene = Scene::new(64);
    let mut seen = BTreeSet::new();
    let mut told = |what: &str, cqe: moonring::Cqe| {
        let error = cqe.result().unwrap_err();
        assert!(seen.insert((error.stage.to_string(), error.errno)), "{what}: {error} is another's");
        (error.stage, error.errno, error.detail)
    };

    let wait = |fence| Wait::new().build().wait(fence);
    let (signaller, fence) = fence::host();
    let failed = scene.fenced(wait(&fence));
    scene.push(wait(&failed).user_data(1));
    signaller.fail(errno::EINVAL);
    let cqe = scene.reap(2)[1];
    assert_eq!(told("dependency", cqe), (Stage::Gate, errno::ECANCELED, -errno::EINVAL));

    let (_signaller, never) = fence::host();
    scene.push(scene.read(0, 0).wait(&never).gate_limit(MS));
    let cqe = scene.reap(1)[0];
    assert_eq!(told("gate limit", cqe).0, Stage::Gate);

    scene.submit(scene.read(0, 0).wait(&never).user_data(9));
    assert_eq!(scene.ring.controller().cancel(Cancel::user_data(9)), Ok(1));
    let cqe = scene.reap(1)[0];
    assert_eq!(told("cancel", cqe).0, Stage::Cancel);

    scene.push(Nop::new().bad().build());
    let cqe = scene.reap(1)[0];
    assert_eq!(told("preparation", cqe).0, Stage::Issue);

    let mut issued = 0;
    let mut failing = |scene: &mut Scene, stage, errno| {
        scene.submit(scene.read(0, 0));
        issued += 1;
        scene.held.await_issued(issued);
        scene.held.fail(0, errno, stage);
        scene.reap(1)[0]
    };
    let cqe = failing(&mut scene, Stage::Issue, errno::ENOBUFS);
    assert_eq!(told("submit", cqe), (Stage::Issue, errno::ENOBUFS, -7));
    let cqe = failing(&mut scene, Stage::Transfer, errno::ECONNRESET);
    assert_eq!(told("peer gone", cqe), (Stage::Transfer, errno::ECONNRESET, -7));
    let cqe = failing(&mut scene, Stage::Transfer, errno::EFAULT);
    assert_eq!(told("range", cqe).1, errno::EFAULT);

    scene.submit(scene.read(0, 0).transfer_limit(MS));
    let cqe = scene.reap(1)[0];
    assert_eq!((told("limit", cqe).0, cqe.flags()), (Stage::Transfer, CqeFlags::MORE));
    scene.held.land(0);
    scene.reap(1);

    scene.submit(wait(&never));
    let report = scene.ring.close(LIMIT);
    assert_eq!(told("shutdown", report.completions[0]).0, Stage::Shutdown);
}
