//! io_uring's semantics: chains, drains, skips, timeouts, cancel. Named after the programs of the conformance table.

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, Setup, reap_exactly};
use moonring::code::errno::{EALREADY, ECANCELED, EINVAL, EIO, ENOENT, ETIME};
use moonring::opcode::{Cancel, LinkTimeout, Nop, Select, Timeout, TimeoutRemove, TimeoutUpdate, Wait};
use moonring::sim::Sim;
use moonring::{ControlError, CqeFlags, Engine, Entry, EntryFlags, OpenChain, Refusal, Ring, Stage, WaitError, fence};

const L: EntryFlags = EntryFlags::IO_LINK;
const H: EntryFlags = EntryFlags::IO_HARDLINK;
const D: EntryFlags = EntryFlags::IO_DRAIN;
const S: EntryFlags = EntryFlags::CQE_SKIP_SUCCESS;
const HOUR: Duration = Duration::from_secs(3600);

fn nop(user_data: u64) -> Entry {
    Nop::new().build().user_data(user_data)
}

fn nop_with(user_data: u64, res: i32) -> Entry {
    Nop::new().result(res).build().user_data(user_data)
}

fn timeout(user_data: u64, millis: u64) -> Entry {
    Timeout::new(Duration::from_millis(millis)).build().user_data(user_data)
}

fn endless(user_data: u64) -> Entry {
    Timeout::new(HOUR).build().user_data(user_data)
}

fn ring() -> Ring {
    Ring::builder().build(32, &Engine::loopback()).unwrap()
}

/// Submits these entries at once.
fn submit(ring: &mut Ring, entries: Vec<Entry>) {
    ring.submission().push_chain(entries).unwrap();
    ring.submit().unwrap();
}

/// Completions in order until everything has ended: `user_data` and `res`.
fn outcome(ring: &mut Ring) -> Vec<(u64, i32)> {
    let mut all = Vec::new();
    loop {
        match ring.wait_timeout(1, LIMIT) {
            Ok(_) => all.extend(ring.completion().map(|cqe| (cqe.user_data(), cqe.res()))),
            Err(WaitError::NothingOutstanding) => return all,
            Err(error) => panic!("{error}, after {all:?}"),
        }
    }
}

/// So many completions in order, and no more, while other entries wait for what is to come.
fn outcome_so_far(ring: &mut Ring, count: usize) -> Vec<(u64, i32)> {
    let all = outcome_now(ring, count);
    // The second probe is taken after the turn that took the first, and all that was due before it.
    for _ in 0..2 {
        submit(ring, vec![Cancel::user_data(u64::MAX).build().user_data(u64::MAX)]);
        assert_eq!(outcome_now(ring, 1), [(u64::MAX, -ENOENT)], "after {all:?}");
    }
    all
}

fn run(entries: Vec<Entry>) -> Vec<(u64, i32)> {
    let mut ring = ring();
    submit(&mut ring, entries);
    outcome(&mut ring)
}

fn sorted(mut all: Vec<(u64, i32)>) -> Vec<(u64, i32)> {
    all.sort_unstable();
    all
}

#[test]
fn p02_a_failing_member_cancels_the_rest() {
    let got = run(vec![nop(1).flags(L), nop_with(2, -EIO).flags(L), nop(3).flags(L), nop(4), nop(5)]);
    assert_eq!(sorted(got), [(1, 0), (2, -EIO), (3, -ECANCELED), (4, -ECANCELED), (5, 0)]);
}

#[test]
fn p03_a_positive_result_is_no_failure() {
    assert_eq!(run(vec![nop(1).flags(L), nop_with(2, 7).flags(L), nop(3)]), [(1, 0), (2, 7), (3, 0)]);
}

#[test]
fn p04_p05_hard_links_belong_to_the_failing_member() {
    let got = run(vec![nop(1).flags(H), nop_with(2, -EIO).flags(H), nop(3).flags(H), nop(4)]);
    assert_eq!(got, [(1, 0), (2, -EIO), (3, 0), (4, 0)]);
    let got = run(vec![nop_with(1, -EIO).flags(H), nop_with(2, -EIO).flags(L), nop(3).flags(H), nop(4)]);
    assert_eq!(got, [(1, -EIO), (2, -EIO), (3, -ECANCELED), (4, -ECANCELED)]);
}

#[test]
fn p06_an_open_chain_is_refused_at_submit() {
    let mut ring = ring();
    ring.submission().push(nop(1).flags(L)).unwrap();
    assert_eq!(ring.submit(), Err(OpenChain));
    assert_eq!(ring.submit_and_wait(1), Err(WaitError::OpenChain(OpenChain)));
    ring.submission().push(nop(2)).unwrap();
    assert_eq!(ring.submit(), Ok(2));
    assert_eq!(outcome(&mut ring), [(1, 0), (2, 0)]);
}

#[test]
fn p07_p09_a_bad_member_fails_its_whole_chain() {
    for link in [L, H] {
        let bad = Nop::new().bad().build().user_data(2).flags(link);
        let got = run(vec![nop(1).flags(link), bad, nop(3), nop(4)]);
        assert_eq!(sorted(got), [(1, -ECANCELED), (2, -EINVAL), (3, -ECANCELED), (4, 0)]);
    }
}

#[test]
fn p12_p13_a_drain_waits_for_all_before_and_holds_all_after() {
    let got = run(vec![timeout(1, 3), nop(2).flags(D), nop(3), nop(4)]);
    assert_eq!(got, [(1, -ETIME), (2, 0), (3, 0), (4, 0)]);
    let got = run(vec![timeout(1, 3), nop(2).flags(L), nop(3).flags(D | L), nop(4), nop(5), nop(6)]);
    assert_eq!(got, [(1, -ETIME), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0)]);
}

#[test]
fn p17_p18_p19_p20_skips() {
    assert_eq!(run(vec![nop(1).flags(L | S), nop(2).flags(L | S), nop(3)]), [(3, 0)]);
    let got = run(vec![nop(1).flags(L | S), nop_with(2, -EIO).flags(L | S), nop(3).flags(L), nop(4)]);
    assert_eq!(got, [(2, -EIO)]);
    let failing = nop_with(2, -EIO).flags(L);
    let got = run(vec![nop(1).flags(L | S), failing, nop(3).flags(L | S), nop(4).flags(S)]);
    assert_eq!(got, [(2, -EIO), (3, -ECANCELED), (4, -ECANCELED)]);
    let got = run(vec![nop_with(1, -EIO).flags(H | S), nop(2).flags(H | S), nop(3)]);
    assert_eq!(got, [(1, -EIO), (3, 0)]);
}

/// Deviation: the errno of the bad member is posted, which the kernel loses below a skipped head.
#[test]
fn p21_the_real_errno_is_posted_below_a_skipped_head() {
    let bad = Nop::new().bad().build().user_data(2).flags(L);
    let got = run(vec![nop(1).flags(L | S), bad, nop(3), nop(4)]);
    assert_eq!(sorted(got), [(1, -ECANCELED), (2, -EINVAL), (4, 0)]);
}

/// Deviation: drains and skips go together.
#[test]
fn p22_a_drain_may_follow_a_skip() {
    assert_eq!(run(vec![nop(1).flags(S), nop(2).flags(D), nop(3)]), [(2, 0), (3, 0)]);
}

#[test]
fn waiting_ends_when_all_was_skipped() {
    let mut ring = ring();
    submit(&mut ring, vec![nop(1).flags(S), nop(2).flags(S)]);
    assert_eq!(ring.wait_timeout(2, LIMIT), Err(WaitError::NothingOutstanding));
    submit(&mut ring, vec![timeout(1, 20), nop(2).flags(S)]);
    assert_eq!(ring.wait_timeout(2, LIMIT), Ok(1));
}

#[test]
fn p24_p25_p26_timeouts_in_chains() {
    assert_eq!(run(vec![timeout(1, 2).flags(L), nop(2)]), [(1, -ETIME), (2, -ECANCELED)]);
    let fine = Timeout::new(Duration::from_millis(2)).etime_success().build().user_data(1);
    assert_eq!(run(vec![fine.flags(L), nop(2)]), [(1, -ETIME), (2, 0)]);
    assert_eq!(run(vec![timeout(1, 2).flags(H), nop(2)]), [(1, -ETIME), (2, 0)]);
}

/// To `etime_success` only the Timeout's own span counts, not how long its fences may take.
#[test]
fn a_timeout_that_ends_by_its_gate_limit_has_failed() {
    let (_signaller, never) = fence::host();
    let timeout = Timeout::new(HOUR).etime_success().build().user_data(1);
    let limited = timeout.wait(&never).gate_limit(Duration::from_millis(1));
    assert_eq!(run(vec![limited.flags(L), nop(2)]), [(1, -ETIME), (2, -ECANCELED)]);
}

#[test]
fn p27_a_multishot_timeout_ticks() {
    let mut ring = ring();
    let ticks = Timeout::new(Duration::from_millis(2)).multishot(3).build().user_data(1);
    submit(&mut ring, vec![ticks]);
    let cqes = reap_exactly(&mut ring, 3);
    let more: Vec<_> = cqes.iter().map(|cqe| (cqe.res(), cqe.flags() == CqeFlags::MORE)).collect();
    assert_eq!(more, [(-ETIME, true), (-ETIME, true), (-ETIME, false)]);
    assert!(outcome(&mut ring).is_empty());
}

#[test]
fn timeouts_expire_by_time_and_at_moments() {
    let start = Instant::now();
    let past = Timeout::at(start).build().user_data(3);
    let soon = Timeout::at(start + Duration::from_millis(15)).build().user_data(2);
    assert_eq!(run(vec![timeout(1, 25), soon, past]), [(3, -ETIME), (2, -ETIME), (1, -ETIME)]);
}

fn limit(user_data: u64, span: Duration) -> Entry {
    LinkTimeout::new(span).build().user_data(user_data)
}

#[test]
fn p30_p33_a_link_timeout_whose_entry_wins() {
    assert_eq!(run(vec![nop(1).flags(L), limit(2, HOUR).flags(L), nop(3)]), [(1, 0), (2, -ECANCELED), (3, 0)]);
    assert_eq!(run(vec![nop(1).flags(L), limit(2, HOUR).flags(S)]), [(1, 0)]);
}

#[test]
fn p31_p32_a_link_timeout_that_fires() {
    let short = Duration::from_millis(2);
    let got = run(vec![endless(1).flags(L), limit(2, short).flags(L), nop(3)]);
    assert_eq!(got, [(2, -ETIME), (1, -ECANCELED), (3, -ECANCELED)]);
    let got = run(vec![endless(1).flags(H), limit(2, short).flags(H), nop(3)]);
    assert_eq!(got, [(2, -ETIME), (1, -ECANCELED), (3, 0)]);
}

#[test]
fn p34_p35_misplaced_link_timeouts() {
    assert_eq!(sorted(run(vec![limit(1, HOUR), nop(2)])), [(1, -EINVAL), (2, 0)]);
    let got = run(vec![nop(1).flags(L), limit(2, HOUR).flags(L), limit(3, HOUR)]);
    assert_eq!(got, [(1, -ECANCELED), (2, -ECANCELED), (3, -EINVAL)]);
}

/// A LinkTimeout over an entry that waits at the gate: the transport is never called for it.
#[test]
fn a_link_timeout_limits_the_gate() {
    let sim = Sim::new(1);
    let probe = sim.probe();
    let mut setup = Setup::simulated(8, sim);
    let (signaller, fence) = fence::host();
    let chain = vec![setup.read(0, 8).wait(&fence).user_data(1).flags(L), limit(2, Duration::from_millis(2))];
    submit(&mut setup.ring, chain);
    assert_eq!(outcome(&mut setup.ring), [(2, -ETIME), (1, -ECANCELED)]);
    signaller.signal();
    assert!(outcome(&mut setup.ring).is_empty());
    assert_eq!(probe.issued(), 0);
}

/// A LinkTimeout over a transfer detaches it: MORE, then NOTIF when the transport is done; a hard-linked follower starts
/// at NOTIF.
#[test]
fn a_link_timeout_detaches_a_transfer() {
    let sim = Sim::new(1).delay(Duration::from_millis(500)..Duration::from_millis(501));
    let mut setup = Setup::simulated(8, sim);
    let read = setup.read(0, 8).user_data(1).flags(H);
    submit(&mut setup.ring, vec![read, limit(2, Duration::from_millis(5)).flags(H), nop(3)]);
    let first = reap_exactly(&mut setup.ring, 2);
    assert_eq!(
        first.iter().map(|cqe| (cqe.user_data(), cqe.res())).collect::<Vec<_>>(),
        [(2, -ETIME), (1, -ECANCELED)]
    );
    assert_eq!((first[1].flags(), first[1].stage()), (CqeFlags::MORE, Stage::Cancel));
    assert!(setup.ours.unregister().is_err());
    let then = reap_exactly(&mut setup.ring, 2);
    assert_eq!((then[0].user_data(), then[0].res(), then[0].flags()), (1, 0, CqeFlags::NOTIF));
    assert_eq!(then[1].user_data(), 3);
    setup.ours.unregister().unwrap();
}

#[test]
fn p36_p37_p38_p39_cancelling_timeouts() {
    let cancel = |by, what| Cancel::user_data(what).build().user_data(by);
    assert_eq!(sorted(run(vec![endless(1), cancel(2, 1)])), [(1, -ECANCELED), (2, 0)]);
    let all = Cancel::user_data(99).all().build().user_data(2);
    let got = run(vec![cancel(1, 99), all, Cancel::any().build().user_data(3)]);
    assert_eq!(got, [(1, -ENOENT), (2, 0), (3, 0)]);
    for (link, follower) in [(L, -ECANCELED), (H, 0)] {
        let mut ring = ring();
        submit(&mut ring, vec![endless(1).flags(link), nop(2)]);
        submit(&mut ring, vec![cancel(9, 1)]);
        assert_eq!(sorted(outcome(&mut ring)), [(1, -ECANCELED), (2, follower), (9, 0)]);
    }
}

/// Deviation: members that have not started can be cancelled, and complete when their turn comes.
#[test]
fn p40_a_linked_member_can_be_cancelled() {
    let mut ring = ring();
    submit(&mut ring, vec![endless(1).flags(H), nop(2).flags(H), nop(3)]);
    submit(&mut ring, vec![Cancel::user_data(2).build().user_data(9)]);
    assert_eq!(outcome_so_far(&mut ring, 1), [(9, 0)]);
    submit(&mut ring, vec![TimeoutUpdate::new(1, Duration::from_millis(2)).build().user_data(10)]);
    assert_eq!(outcome(&mut ring), [(10, 0), (1, -ETIME), (2, -ECANCELED), (3, 0)]);
}

#[test]
fn p42_one_or_all_of_the_same_user_data() {
    let mut ring = ring();
    submit(&mut ring, vec![endless(1), endless(1), endless(2)]);
    submit(&mut ring, vec![Cancel::user_data(1).build().user_data(9)]);
    assert_eq!(sorted(outcome_so_far(&mut ring, 2)), [(1, -ECANCELED), (9, 0)]);
    submit(&mut ring, vec![Cancel::user_data(1).all().build().user_data(10)]);
    assert_eq!(sorted(outcome_so_far(&mut ring, 2)), [(1, -ECANCELED), (10, 1)]);
    submit(&mut ring, vec![Cancel::any().build().user_data(11)]);
    assert_eq!(sorted(outcome(&mut ring)), [(2, -ECANCELED), (11, 1)]);
}

/// Deviation: a cancel bypasses a drain, and reaches what waits behind one.
#[test]
fn p46_a_cancel_bypasses_a_drain() {
    let mut ring = ring();
    submit(&mut ring, vec![endless(1), nop(2).flags(D), nop(3)]);
    submit(&mut ring, vec![Cancel::user_data(2).build().user_data(8)]);
    assert_eq!(sorted(outcome_so_far(&mut ring, 3)), [(2, -ECANCELED), (3, 0), (8, 0)]);
    submit(&mut ring, vec![nop(4).flags(D)]);
    submit(&mut ring, vec![Cancel::user_data(1).build().user_data(9)]);
    assert_eq!(sorted(outcome(&mut ring)), [(1, -ECANCELED), (4, 0), (9, 0)]);
}

#[test]
fn p47_timeouts_are_removed_and_updated() {
    let remove = |by| TimeoutRemove::new(1).build().user_data(by);
    assert_eq!(sorted(run(vec![endless(1), remove(2), remove(3)])), [(1, -ECANCELED), (2, 0), (3, -ENOENT)]);
    let update = |by, what| TimeoutUpdate::new(what, Duration::from_millis(2)).build().user_data(by);
    assert_eq!(sorted(run(vec![endless(1), update(2, 1), update(3, 7)])), [(1, -ETIME), (2, 0), (3, -ENOENT)]);
}

/// The rest of a cancelled drain's chain ends before anything starts that the drain held, and counts where it is meant too.
#[test]
fn a_cancelled_drain_ends_with_its_chain() {
    let all = || Cancel::user_data(1).all().build().user_data(5);
    let got = run(vec![endless(1), nop(1).flags(D | L), nop(2).flags(L), nop(3), all(), nop(4)]);
    let rest = [(1, -ECANCELED), (1, -ECANCELED), (2, -ECANCELED), (3, -ECANCELED)];
    assert_eq!(got, [&rest[..], &[(5, 2), (4, 0)]].concat());
    let got = run(vec![endless(1), nop(1).flags(D | L), nop(1).flags(L), nop(3), all(), nop(4)]);
    let rest = [(1, -ECANCELED), (1, -ECANCELED), (1, -ECANCELED), (3, -ECANCELED)];
    assert_eq!(got, [&rest[..], &[(5, 3), (4, 0)]].concat());
}

/// One that was cancelled before its turn in a chain behind a drain ends when it becomes the first there.
#[test]
fn a_cancelled_member_ends_once_it_is_first_behind_a_drain() {
    let cancel = |by, what| Cancel::user_data(what).build().user_data(by);
    let mut ring = ring();
    submit(&mut ring, vec![endless(1), nop(2).flags(D | H), nop(3).flags(L), nop(4), nop(5)]);
    submit(&mut ring, vec![cancel(8, 3)]);
    assert_eq!(outcome_so_far(&mut ring, 1), [(8, 0)]);
    submit(&mut ring, vec![cancel(9, 2)]);
    let got = sorted(outcome_so_far(&mut ring, 5));
    assert_eq!(got, [(2, -ECANCELED), (3, -ECANCELED), (4, -ECANCELED), (5, 0), (9, 0)]);
}

/// What waits at the gate is cancelled and never issued; what is issued is not, unless it is detached.
#[test]
fn cancelling_transfers() {
    let sim = Sim::new(2).delay(Duration::from_millis(500)..Duration::from_millis(501));
    let probe = sim.probe();
    let mut setup = Setup::simulated(8, sim);
    let (signaller, fence) = fence::host();
    let chain =
        vec![setup.read(0, 8).wait(&fence).user_data(1), setup.read(8, 8).user_data(2), setup.read(16, 8).user_data(3)];
    submit(&mut setup.ring, chain);
    while probe.issued() < 2 {
        std::thread::yield_now();
    }
    let cancel = |by, what| Cancel::user_data(what).build().user_data(by);
    submit(&mut setup.ring, vec![cancel(10, 1), cancel(11, 2), Cancel::user_data(3).detach().build().user_data(12)]);
    let first: Vec<_> = reap_exactly(&mut setup.ring, 5).iter().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    assert_eq!(sorted(first), [(1, -ECANCELED), (3, -ECANCELED), (10, 0), (11, -EALREADY), (12, 0)]);
    let rest: Vec<_> =
        reap_exactly(&mut setup.ring, 2).iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.flags())).collect();
    assert!(rest.contains(&(2, 8, CqeFlags::empty())), "{rest:?}");
    assert!(rest.contains(&(3, 0, CqeFlags::NOTIF)), "{rest:?}");
    signaller.signal();
    assert_eq!(probe.issued(), 2);
}

#[test]
fn cancelling_by_segment_and_by_region() {
    let mut setup = Setup::loopback(16);
    let (signaller, fence) = fence::host();
    for n in 0..3 {
        setup.push(setup.read(0, 8).wait(&fence).user_data(n));
    }
    setup.push(Wait::new().build().wait(&fence).user_data(3));
    setup.push(Cancel::new(Select::region(&setup.theirs)).all().build().user_data(10));
    setup.push(Cancel::new(Select::region(&setup.ours)).build().user_data(11));
    setup.push(Cancel::new(Select::segment(&setup.peer)).all().build().user_data(12));
    setup.ring.submit().unwrap();
    let got = outcome_so_far(&mut setup.ring, 6);
    assert_eq!(sorted(got), [(0, -ECANCELED), (1, -ECANCELED), (2, -ECANCELED), (10, 0), (11, 0), (12, 2)]);
    signaller.signal();
    assert_eq!(outcome(&mut setup.ring), [(3, 0)]);
}

/// From another thread, on a full ring, with nothing but the count back.
#[test]
fn cancelling_by_a_call_works_on_a_full_ring() {
    let mut setup = Setup::loopback(4);
    let (signaller, fence) = fence::host();
    for n in 0..4 {
        setup.push(setup.read(0, 8).wait(&fence).user_data(n / 2));
    }
    setup.ring.submit().unwrap();
    assert!(matches!(setup.refused(nop(9)), Refusal::Full { .. }));
    let controller = setup.ring.controller();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(controller.cancel(Cancel::user_data(0)), Ok(1));
            assert_eq!(controller.cancel(Cancel::user_data(7)), Ok(0));
            assert_eq!(controller.cancel(Cancel::user_data(1).all()), Ok(2));
        });
    });
    assert_eq!(outcome_so_far(&mut setup.ring, 3), [(0, -ECANCELED), (1, -ECANCELED), (1, -ECANCELED)]);
    signaller.signal();
    assert_eq!(outcome(&mut setup.ring), [(0, 8)]);
    drop(setup.ring);
    assert_eq!(controller.cancel(Cancel::any()), Err(ControlError::Gone));
}

/// Quiescing waits for what was submitted before, until the transport has let go of it, and for nothing else.
#[test]
fn quiescing_waits_for_quiet() {
    let span = Duration::from_millis(300);
    let sim = Sim::new(6).unquiet(1000).delay(span..span);
    let mut setup = Setup::simulated(8, sim);
    let (_signaller, fence) = fence::host();
    setup.push(Wait::new().build().wait(&fence).user_data(5));
    setup.push(setup.read(0, 8).user_data(1));
    let controller = setup.ring.controller();
    let start = Instant::now();
    setup.ring.submit().unwrap();
    assert_eq!(controller.quiesce(Select::user_data(7), LIMIT), Ok(()));
    assert_eq!(
        controller.quiesce(Select::region(&setup.ours), Duration::from_millis(1)),
        Err(ControlError::Limit(Duration::from_millis(1)))
    );
    assert_eq!(controller.quiesce(Select::segment(&setup.peer), LIMIT), Ok(()));
    // Until the NOTIF.
    assert!(start.elapsed() >= 2 * span);
    setup.ours.unregister().unwrap();
    let limit = Duration::from_millis(20);
    assert_eq!(controller.quiesce(Select::any(), limit), Err(ControlError::Limit(limit)));
    let flags: Vec<_> = reap_exactly(&mut setup.ring, 2).iter().map(|cqe| cqe.flags()).collect();
    assert_eq!(flags, [CqeFlags::MORE, CqeFlags::NOTIF]);
}

/// What members of a chain were to show at the gate is let go of when they never get there.
#[test]
fn members_that_never_start_give_their_side_blocks_back() {
    let mut ring = Ring::builder().build(8, &Engine::loopback()).unwrap();
    let (_signaller, fence) = fence::host();
    let limited = |entry: Entry| entry.gate_limit(HOUR).wait(&fence);
    for round in 0..20 {
        submit(&mut ring, vec![nop_with(1, -EIO).flags(L), limited(nop(2))]);
        assert_eq!(outcome_now(&mut ring, 2), [(1, -EIO), (2, -ECANCELED)], "round {round}");
        submit(&mut ring, vec![nop(1).flags(L), limited(limit(2, HOUR))]);
        assert_eq!(outcome_now(&mut ring, 2), [(1, 0), (2, -ECANCELED)], "round {round}");
        submit(&mut ring, vec![timeout(1, 1).flags(H), limited(nop(2))]);
        assert_eq!(ring.controller().cancel(Cancel::user_data(2)), Ok(1));
        assert_eq!(outcome_now(&mut ring, 2), [(1, -ETIME), (2, -ECANCELED)], "round {round}");
    }
}

fn outcome_now(ring: &mut Ring, count: usize) -> Vec<(u64, i32)> {
    reap_exactly(ring, count).iter().map(|cqe| (cqe.user_data(), cqe.res())).collect()
}

/// A drain waits for what other producers submitted before it.
#[test]
fn a_drain_takes_every_queue_up_to_its_tail() {
    for round in 0..200 {
        let mut ring = ring();
        let mut submitter = ring.submitter();
        if round % 2 == 0 {
            submitter.push(timeout(1, 2)).unwrap();
            submitter.submit().unwrap();
            submit(&mut ring, vec![nop(2).flags(D)]);
        } else {
            submit(&mut ring, vec![timeout(1, 2)]);
            submitter.push(nop(2).flags(D)).unwrap();
            submitter.submit().unwrap();
        }
        assert_eq!(outcome_now(&mut ring, 2), [(1, -ETIME), (2, 0)], "round {round}");
    }
}

/// A LinkTimeout does not call late what has ended in time either.
#[test]
fn a_link_timeout_asks_before_it_fires() {
    let sim = Sim::new(7).delay(Duration::from_micros(100)..Duration::from_micros(101));
    let mut setup = Setup::simulated(64, sim);
    for round in 0..300 {
        for n in 0..8 {
            let chain = vec![setup.read(n * 8, 8).user_data(1).flags(L), limit(2, Duration::from_micros(101)).flags(S)];
            setup.ring.submission().push_chain(chain).unwrap();
        }
        for cqe in setup.reap(8) {
            assert_eq!((cqe.user_data(), cqe.result()), (1, Ok(8)), "round {round}");
        }
    }
}

/// The root errno goes all the way along a chain.
#[test]
fn the_root_errno_reaches_every_follower() {
    let mut ring = ring();
    let (signaller, fence) = fence::host();
    submit(&mut ring, vec![nop(1).wait(&fence).flags(L), nop(2).flags(L), nop(3)]);
    signaller.fail(16);
    let details: Vec<_> = reap_exactly(&mut ring, 3).iter().map(|cqe| (cqe.res(), cqe.detail())).collect();
    assert_eq!(details, [(-ECANCELED, -16); 3]);
    submit(&mut ring, vec![nop(1).flags(L), Nop::new().bad().build().user_data(2).flags(L), nop(3)]);
    let details: Vec<_> = reap_exactly(&mut ring, 3).iter().map(|cqe| (cqe.res(), cqe.detail())).collect();
    assert_eq!(details, [(-ECANCELED, -EINVAL), (-EINVAL, 0), (-ECANCELED, -EINVAL)]);
}

/// The way out of a chain that finds the ring full before its end.
#[test]
fn an_open_chain_can_be_ended() {
    let mut ring = Ring::builder().build(1, &Engine::loopback()).unwrap();
    ring.submission().push(nop(1).flags(L)).unwrap();
    assert!(ring.submission().push(nop(2)).is_err());
    assert_eq!(ring.submit(), Err(OpenChain));
    ring.submission().end_chain();
    assert_eq!(ring.submit(), Ok(1));
    assert_eq!(outcome_now(&mut ring, 1), [(1, 0)]);
}

/// The first clock: past it the entry is never issued.
#[test]
fn a_gate_limit_ends_what_waits_too_long() {
    let sim = Sim::new(3);
    let probe = sim.probe();
    let mut setup = Setup::simulated(16, sim);
    let (signaller, fence) = fence::host();
    let limit = Duration::from_millis(5);
    setup.push(setup.read(0, 8).wait(&fence).gate_limit(limit).user_data(1));
    setup.push(Wait::new().build().wait(&fence).gate_limit(HOUR).user_data(2));
    let start = Instant::now();
    setup.ring.submit().unwrap();
    let late = reap_exactly(&mut setup.ring, 1)[0];
    assert!(start.elapsed() >= limit);
    let error = late.result().unwrap_err();
    assert_eq!((late.user_data(), error.errno, error.stage, late.flags()), (1, ETIME, Stage::Gate, CqeFlags::empty()));
    signaller.signal();
    assert_eq!(outcome(&mut setup.ring), [(2, 0)]);
    assert_eq!(probe.issued(), 0);
    // What passes the gate in time has a limit no more.
    setup.push(setup.read(0, 8).gate_limit(limit).user_data(3));
    assert_eq!(setup.reap(1)[0].result(), Ok(8));
    // Side blocks come back.
    for n in 0..100 {
        setup.push(Nop::new().build().gate_limit(limit).user_data(n));
        setup.reap(1);
    }
}

/// The second clock starts at issue: past it MORE, then NOTIF, and the region stays in use until then.
#[test]
fn a_transfer_limit_tells_and_keeps_the_buffer() {
    let sim = Sim::new(4).delay(Duration::from_millis(400)..Duration::from_millis(401));
    let mut setup = Setup::simulated(16, sim);
    let (signaller, fence) = fence::host();
    // Longer at the gate than the transfer may take.
    setup.push(setup.read(0, 8).wait(&fence).transfer_limit(Duration::from_millis(10)).user_data(1));
    setup.push(setup.read(8, 8).transfer_limit(HOUR).user_data(2));
    setup.ring.submit().unwrap();
    assert_eq!(reap_exactly(&mut setup.ring, 1)[0].user_data(), 2);
    signaller.signal();
    let late = reap_exactly(&mut setup.ring, 1)[0];
    let error = late.result().unwrap_err();
    assert_eq!((error.errno, error.stage, late.flags()), (ETIME, Stage::Transfer, CqeFlags::MORE));
    assert!(setup.ours.unregister().is_err());
    let last = reap_exactly(&mut setup.ring, 1)[0];
    assert_eq!((last.user_data(), last.res(), last.flags()), (1, 0, CqeFlags::NOTIF));
    setup.ours.unregister().unwrap();
}

/// An entry that had ended before its limit is never called late, even if the poller looks later than both.
#[test]
fn what_ended_in_time_is_not_called_late() {
    let sim = Sim::new(5).delay(Duration::from_micros(100)..Duration::from_micros(101));
    let mut setup = Setup::simulated(64, sim);
    for round in 0..300 {
        for n in 0..8 {
            setup.push(setup.read(n * 8, 8).transfer_limit(Duration::from_micros(101)));
        }
        for cqe in setup.reap(8) {
            assert_eq!(cqe.result(), Ok(8), "round {round}");
        }
    }
}

/// A chain is accepted whole or not at all.
#[test]
fn a_chain_that_does_not_fit_is_given_back_whole() {
    let mut ring = Ring::builder().build(4, &Engine::loopback()).unwrap();
    let (_signaller, fence) = fence::host();
    ring.submission().push(Wait::new().build().wait(&fence)).unwrap();
    let entries = (0..4).map(|n| nop(n).flags(if n < 3 { L } else { EntryFlags::empty() })).collect();
    let refused = ring.submission().push_chain(entries).unwrap_err();
    assert_eq!((refused.at, refused.reason), (3, Refusal::Full { capacity: 4 }));
    assert_eq!(ring.submission().len(), 1);
    let mut entries = refused.entries;
    drop(entries.remove(0));
    ring.submission().push_chain(entries).unwrap();
    assert_eq!(ring.submit(), Ok(4));
    assert_eq!(outcome_so_far(&mut ring, 3), [(1, 0), (2, 0), (3, 0)]);
}

/// Chains of several submitters never get mixed up: each has its own members' outcomes, in order.
#[test]
fn chains_of_many_producers_do_not_interleave() {
    let mut ring = Ring::builder().build(64, &Engine::loopback()).unwrap();
    let producers: Vec<_> = (0..3u64)
        .map(|producer| {
            let mut submitter = ring.submitter();
            std::thread::spawn(move || {
                for round in 0..500 {
                    let fails = round % 3;
                    let member = |n: u64| {
                        let entry = nop_with(producer << 32 | round << 8 | n, if n == fails { -EIO } else { 0 });
                        entry.flags(if n < 3 { L } else { EntryFlags::empty() })
                    };
                    let mut chain: Vec<_> = (0..4).map(member).collect();
                    while let Err(refused) = submitter.push_chain(chain) {
                        std::thread::yield_now();
                        chain = refused.entries;
                    }
                    submitter.submit().unwrap();
                }
            })
        })
        .collect();
    let mut next = vec![0; 3 * 500];
    for _ in 0..3 * 500 * 4 {
        ring.wait_timeout(1, LIMIT).unwrap();
        let cqe = ring.completion().next().unwrap();
        let (producer, at) = ((cqe.user_data() >> 32) as usize, cqe.user_data() & 0xffff_ffff);
        let (round, n) = (at >> 8, at & 0xff);
        // Within a chain in order; chains of one producer may overlap.
        let next = &mut next[producer * 500 + round as usize];
        assert_eq!(n, *next);
        *next += 1;
        let expected = match n.cmp(&(round % 3)) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => -EIO,
            std::cmp::Ordering::Greater => -ECANCELED,
        };
        assert_eq!(cqe.res(), expected, "{producer} {round} {n}");
    }
    for producer in producers {
        producer.join().unwrap();
    }
}

/// Fences on any member: a member's fences are looked at when its turn comes.
#[test]
fn fences_on_members_of_a_chain() {
    let mut setup = Setup::loopback(8);
    let (first, one) = fence::host();
    let (second, two) = fence::host();
    let chain = vec![nop(1).wait(&one).flags(L), setup.read(0, 8).wait(&two).user_data(2).flags(L), nop(3)];
    submit(&mut setup.ring, chain);
    second.signal();
    assert!(outcome_so_far(&mut setup.ring, 0).is_empty());
    first.signal();
    assert_eq!(outcome(&mut setup.ring), [(1, 0), (2, 8), (3, 0)]);
    let (third, three) = fence::host();
    let chain = vec![nop(1).flags(L), nop(2).wait(&three).flags(L), nop(3)];
    submit(&mut setup.ring, chain);
    drop(third);
    assert_eq!(outcome(&mut setup.ring), [(1, 0), (2, -ECANCELED), (3, -ECANCELED)]);
}

/// A ring with chains, drains and timers in every state closes in its bound.
#[test]
fn closing_with_chains_and_drains() {
    let (signaller, fence) = fence::host();
    let mut ring = ring();
    submit(&mut ring, vec![endless(1).flags(L), limit(2, HOUR).flags(L), nop(3)]);
    submit(&mut ring, vec![nop(4).wait(&fence).flags(H), nop(5)]);
    submit(&mut ring, vec![nop(6).flags(D), nop(7)]);
    ring.submission().push(nop(8).flags(L)).unwrap();
    let start = Instant::now();
    drop(ring);
    assert!(start.elapsed() < Duration::from_secs(5));
    drop(signaller);
}
