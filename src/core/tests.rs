//! What happens to entries when a driver panics, turn by turn.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::Context;
use std::time::Duration;

use futures_core::Stream;

use super::*;
use crate::fence::{self, Node, NodeKey};
use crate::region::Registered;
use crate::sim::Sim;
use crate::{Engine, Entry, Region, Ring, Segment, UnregisterError, opcode};

/// A core and a ring on a simulated engine, and nobody who gives turns.
struct Setup {
    core: Core,
    ring: Ring,
    region: Registered,
    peer: Segment,
}

impl Setup {
    fn new(entries: u32, sim: Sim) -> Setup {
        Setup::on(entries, Engine::sim(sim))
    }

    fn on(entries: u32, engine: Engine) -> Setup {
        let region = engine.register(Region::alloc(4096).unwrap()).unwrap();
        let peer = engine.open_segment(engine.name(), Duration::from_secs(10)).unwrap();
        let ring = Ring::builder().grace(Duration::ZERO).without_poller(entries, &engine);
        let core = Core::new(ring.controls(), 0);
        Setup { core, ring, region, peer }
    }

    fn push(&mut self, entry: Entry) {
        self.ring.submission().push(entry).unwrap();
        self.ring.submit().unwrap();
    }

    fn read(&self) -> Entry {
        opcode::Read::new(self.region.slice(0..8).unwrap(), self.peer.at(self.region.address() + 64)).build()
    }

    /// A turn in which the driver panics, and what the poller does about it.
    fn die(&mut self, now: Nanos) {
        assert!(catch_unwind(AssertUnwindSafe(|| self.core.turn(now))).is_err());
        self.core.bury();
        self.core.turn(now + 1);
    }

    fn reap(&mut self) -> Vec<Cqe> {
        self.ring.completion().collect()
    }

    /// Closes the ring while somebody gives turns.
    fn close(self) {
        let Setup { mut core, ring, .. } = self;
        let poller = std::thread::spawn(move || {
            for now in 1 << 40.. {
                core.turn(now);
                if core.is_done() {
                    break;
                }
                std::thread::yield_now();
            }
        });
        drop(ring);
        poller.join().unwrap();
    }
}

#[test]
fn what_a_panicking_driver_was_offered_is_unquiet() {
    let mut setup = Setup::new(8, Sim::new(1).panic_at(2));
    for n in 0..3 {
        let entry = setup.read().user_data(n);
        setup.push(entry);
    }
    setup.die(1);
    let cqes = setup.reap();
    assert_eq!(cqes.iter().map(Cqe::user_data).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(cqes.iter().all(|cqe| cqe.flags().contains(CqeFlags::UNQUIET)), "{cqes:?}");
    assert!(matches!(setup.region.unregister(), Err(UnregisterError::Busy(3))));
    setup.close();
}

#[test]
fn a_result_that_waits_for_room_is_the_last_when_the_driver_dies() {
    let delay = Duration::from_nanos(100)..Duration::from_nanos(101);
    let mut setup = Setup::new(2, Sim::new(1).unquiet(1000).delay(delay).panic_at(2));
    for now in 1..=4 {
        setup.push(opcode::Nop::new().build());
        setup.core.turn(now);
    }
    // The CQ is full. This one times out, and its result waits.
    let entry = setup.read().user_data(7);
    setup.push(entry);
    setup.core.turn(5);
    setup.core.turn(150);
    let entry = setup.read().user_data(8);
    setup.push(entry);
    setup.die(160);
    assert_eq!(setup.reap().len(), 4);
    setup.core.turn(162);
    let cqes = setup.reap();
    let seen: Vec<_> = cqes.iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.flags())).collect();
    let unquiet = CqeFlags::UNQUIET;
    assert_eq!(seen, [(7, -errno::ETIMEDOUT, unquiet), (8, -errno::EOWNERDEAD, unquiet)]);
    assert!(matches!(setup.region.unregister(), Err(UnregisterError::Busy(2))));
    setup.close();
}

/// A fence that fires after the core's death is taken, or the poller would find input for ever.
#[test]
fn a_dead_core_comes_to_rest() {
    let mut setup = Setup::new(2, Sim::new(1));
    let (signaller, fence) = fence::host();
    let node = Node::new(sync::Arc::clone(&setup.core.inbox), NodeKey::Fence(0));
    fence.0.registrations.add(node).unwrap();
    setup.core.turn(1);
    setup.core.bury();
    signaller.signal();
    assert!(setup.core.has_input());
    setup.core.turn(2);
    assert!(!setup.core.has_input());
    setup.close();
}

/// A timeline goes while its node is on the core's stack, and another one has its place before the node is taken.
#[test]
fn the_node_of_a_timeline_that_is_gone_is_let_go_of() {
    let mut setup = Setup::new(8, Sim::new(1));
    let holders = |setup: &Setup| sync::Arc::strong_count(&setup.core.inbox);
    let without_nodes = holders(&setup);
    let (mut signaller, timeline) = fence::timeline(0);
    let entry = setup.read().wait(&timeline.at(1));
    setup.push(entry);
    setup.core.turn(1);
    signaller.signal(1).unwrap();
    setup.core.turn(2);
    signaller.signal(2).unwrap();
    drop((signaller, timeline));
    assert_eq!(holders(&setup), without_nodes + 1, "the node is on the stack");
    let (mut signaller, timeline) = fence::timeline(0);
    let entry = setup.read().wait(&timeline.at(1));
    setup.push(entry);
    assert!(setup.core.take_all(0));
    setup.core.turn(3);
    assert_eq!(holders(&setup), without_nodes + 1, "that of the second timeline alone");
    signaller.signal(1).unwrap();
    setup.core.turn(4);
    setup.core.turn(1 << 30);
    assert_eq!(setup.reap().len(), 2);
    setup.close();
}

/// What was ready for another peer when the driver panicked is not input, or the poller would never sleep again.
#[test]
fn a_dead_core_with_ready_entries_comes_to_rest() {
    let mut setup = Setup::new(4, Sim::new(1).panic_at(1));
    let other = setup.ring.engine().open_segment("sim/1", Duration::from_secs(10)).unwrap();
    let entries = [setup.read(), opcode::Read::new(setup.region.slice(0..8).unwrap(), other.at(0)).build()];
    for entry in entries {
        setup.push(entry);
    }
    setup.die(1);
    assert_eq!(setup.reap().len(), 2);
    assert!(!setup.core.has_input());
    setup.close();
}

/// A multishot Timeout whose span is shorter than a turn delays nobody: it ticks once in a turn, and loses no tick.
#[test]
fn a_timeout_that_is_always_due_delays_no_other() {
    const SHORT: u64 = 7;
    let mut setup = Setup::new(2 * BUDGET, Sim::new(1));
    let short = |repeats| opcode::Timeout::new(Duration::from_nanos(1)).multishot(repeats).build().user_data(SHORT);
    // More of them than a turn has time for.
    for _ in 0..BUDGET + 1 {
        setup.push(short(0));
    }
    setup.core.turn(1);
    setup.core.turn(2);
    setup.push(opcode::Timeout::new(Duration::from_micros(10)).build().user_data(8));
    setup.core.turn(3);
    setup.reap();
    let ended = |setup: &mut Setup| setup.reap().iter().any(|cqe| cqe.user_data() == 8);
    let turns = (1..10).find(|turn| {
        setup.core.turn(10_003 * turn);
        ended(&mut setup)
    });
    assert!(turns.is_some_and(|turns| turns <= 3), "{turns:?}");
    setup.close();

    let mut setup = Setup::new(8, Sim::new(1));
    setup.push(opcode::Timeout::new(Duration::from_nanos(100)).multishot(4).build().user_data(SHORT));
    setup.core.turn(1);
    // Due at 101, 201, 301 and 401. What was missed is made up for, and the last one is not late for it.
    let ticks = [350, 351, 352, 400, 401].map(|now| {
        setup.core.turn(now);
        setup.reap().len()
    });
    assert_eq!(ticks, [1, 1, 1, 0, 1]);
    setup.close();
}

/// A submitter's entries that are there before its lane, which so many controls hold up: they end as soon as it has come.
#[test]
fn what_comes_to_a_closing_ring_before_its_lane_ends_with_it() {
    let delay = Duration::from_secs(2)..Duration::from_secs(3);
    let mut setup = Setup::new(8, Sim::new(1).delay(delay));
    let entry = setup.read();
    setup.push(entry);
    setup.core.turn(1);
    let closing = Closing::new(Duration::from_secs(1), false);
    setup.ring.controls().send(Control::Close { ring: 0, closing: Arc::clone(&closing) });
    let mut submitters: Vec<_> = (0..BUDGET).map(|_| setup.ring.submitter()).collect();
    let last = submitters.last_mut().unwrap();
    let end = last.push_fenced(opcode::Nop::new().build()).unwrap();
    last.submit().unwrap();
    setup.core.turn(2);
    assert_eq!(end.status(), FenceStatus::Pending);
    setup.core.turn(3);
    setup.core.turn(4);
    assert!(matches!(end.status(), FenceStatus::Failed(_)), "{:?}", end.status());
    assert!(!closing.wait(Duration::ZERO), "the transport has the Read still");
    // Dropped it closes once more, and somebody has to say that it is closed.
    let Setup { mut core, ring, .. } = setup;
    let closer = std::thread::spawn(move || drop((submitters, ring)));
    while !closer.is_finished() {
        core.turn(1 << 40);
        std::thread::yield_now();
    }
    assert!(closing.wait(Duration::ZERO));
}

#[test]
fn a_drain_comes_after_what_a_lane_has_that_was_announced_within_the_turn() {
    let mut setup = Setup::new(8, Sim::new(1));
    setup.core.turn(1);
    // As if it happened between a turn's look at the controls and its look at the queues.
    let mut submitter = setup.ring.submitter();
    submitter.push(opcode::Timeout::new(Duration::from_millis(1)).build().user_data(1)).unwrap();
    submitter.submit().unwrap();
    setup.push(opcode::Nop::new().build().flags(EntryFlags::IO_DRAIN).user_data(2));
    setup.core.take_entries(0);
    setup.core.turn(2);
    assert!(setup.reap().is_empty(), "the drain does not wait");
    (0..3).for_each(|turn| _ = setup.core.turn(10_000_000 + turn));
    assert_eq!(setup.reap().iter().map(Cqe::user_data).collect::<Vec<_>>(), [1, 2]);
    drop(submitter);
    setup.close();
}

/// A fence that signals when it is asked for the second time.
#[derive(Debug, Default)]
struct Asked(std::sync::atomic::AtomicBool);

impl fence::Polled for Asked {
    fn poll(&self) -> FenceStatus {
        if self.0.swap(true, Relaxed) { FenceStatus::Signalled } else { FenceStatus::Pending }
    }

    fn group(&self) -> Option<(u64, u64)> {
        None
    }

    fn least_interval(&self) -> u64 {
        100
    }
}

/// One that has signalled, and looks, when it is let go of, whether an entry's end can be seen.
#[derive(Debug)]
struct Reusable(Arc<Shared>, Arc<AtomicU32>);

impl fence::Polled for Reusable {
    fn poll(&self) -> FenceStatus {
        FenceStatus::Signalled
    }

    fn group(&self) -> Option<(u64, u64)> {
        None
    }

    fn least_interval(&self) -> u64 {
        100
    }
}

impl Drop for Reusable {
    fn drop(&mut self) {
        self.1.store(1 + self.0.settled.load(sync::Ordering::Relaxed) as u32, Relaxed);
    }
}

/// An event is free before a completion says so: who sees that may record it again.
#[test]
fn a_polled_fence_is_let_go_of_before_its_entrys_end_is_seen() {
    let mut setup = Setup::new(2, Sim::new(1));
    let seen = Arc::<AtomicU32>::default();
    let fence = crate::Fence::polled(Box::new(Reusable(Arc::clone(setup.ring.shared()), Arc::clone(&seen))));
    setup.push(opcode::Wait::new().build().wait(&fence));
    drop(fence);
    (1..9).for_each(|now| _ = setup.core.turn(now << 20));
    assert_eq!(setup.reap().len(), 1);
    assert_eq!(seen.load(Relaxed), 1, "1 and the number of ends that were seen before");
    setup.close();
}

/// Looks, when it is woken, how many units are back.
struct Waiting(Arc<Shared>, AtomicU32);

impl std::task::Wake for Waiting {
    fn wake(self: Arc<Self>) {
        self.1.store(1 + self.0.freed.load(sync::Ordering::Relaxed) as u32, Relaxed);
    }
}

/// Who is woken by a future may push at once.
#[test]
fn a_unit_is_back_before_its_future_is_told() {
    let mut setup = Setup::new(2, Sim::new(1));
    let waiting = Arc::new(Waiting(Arc::clone(setup.ring.shared()), AtomicU32::new(0)));
    let waker = Arc::clone(&waiting).into();
    let mut future = setup.ring.submission().push_future(opcode::Nop::new().build()).unwrap();
    setup.ring.submit().unwrap();
    let mut poll = || Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_ready();
    assert!(!poll());
    setup.core.turn(1);
    assert!(poll());
    assert_eq!(waiting.1.load(Relaxed), 2, "1 and the number of units that are back");
    drop(future);
    setup.close();
}

/// The same for who is woken by completions that are shown while the rest of their run is still to end.
#[test]
fn units_of_a_run_are_back_before_its_completions_are_seen() {
    let mut setup = Setup::on(128, Engine::loopback());
    for _ in 0..100 {
        let entry = setup.read();
        setup.push(entry);
    }
    let waiting = Arc::new(Waiting(Arc::clone(setup.ring.shared()), AtomicU32::new(0)));
    let waker = Arc::clone(&waiting).into();
    let mut context = Context::from_waker(&waker);
    assert!(Pin::new(&mut setup.ring.completions()).poll_next(&mut context).is_pending());
    setup.core.turn(1);
    assert_eq!(waiting.1.load(Relaxed), 65, "1 and the number of units that are back");
    assert_eq!(setup.reap().len(), 100);
    assert_eq!(setup.region.region.uses(), 0);
    setup.close();
}

/// A run neither passes what waits for room, though there is some by then, nor takes an end that is not quiet.
#[test]
fn a_run_keeps_the_order_and_takes_last_words_alone() {
    let mut setup = Setup::on(2, Engine::loopback());
    for (now, user_data) in (1..).zip(0..5) {
        let entry = setup.read().user_data(user_data);
        setup.push(entry);
        setup.core.turn(now);
    }
    // The CQ is full, and the fifth waits.
    assert_eq!(setup.reap().len(), 4);
    let entry = setup.read().user_data(5);
    setup.push(entry);
    setup.core.turn(6);
    assert_eq!(setup.reap().iter().map(Cqe::user_data).collect::<Vec<_>>(), [4, 5]);
    setup.close();

    let mut setup = Setup::new(2, Sim::new(1).delay(Duration::from_nanos(100)..Duration::from_nanos(101)));
    let entry = setup.read();
    setup.push(entry);
    setup.core.turn(1);
    let Core { rings, slots, .. } = &mut setup.core;
    let slot = slots.in_use().next().unwrap();
    let of = (slots[slot].ring, slots[slot].peer);
    let event = |quiet| Event::Result { op: slots.token(slot), res: 8, stage: Stage::Transfer, detail: 0, quiet };
    let events = [false, true].map(event);
    let mut run = |events| rings[0].as_mut().unwrap().post_run(slots, of, events, 2);
    assert_eq!((run(&events), run(&events[1..])), (0, 1));
    setup.close();
}

/// Of two entries with one `user_data` the one that waits is meant, not the older one that the transport has.
#[test]
fn a_cancel_means_what_waits_before_what_is_issued() {
    let mut setup = Setup::new(8, Sim::new(1).delay(Duration::from_millis(1)..Duration::from_millis(2)));
    let (signaller, fence) = fence::host();
    let (_never, pending) = fence::host();
    for fence in [&fence, &pending] {
        let entry = setup.read().wait(fence).user_data(7);
        setup.push(entry);
    }
    setup.core.turn(1);
    signaller.signal();
    setup.core.turn(2);
    setup.push(opcode::Cancel::user_data(7).build().user_data(9));
    setup.core.turn(3);
    let mut seen: Vec<_> = setup.reap().iter().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    seen.sort_unstable();
    assert_eq!(seen, [(7, -errno::ECANCELED), (9, 0)]);
    setup.close();
}

/// Turns in which nothing is due look for input alone: whatever comes is dealt with by the next one, and so is what falls due.
#[test]
fn a_calm_core_sees_all_input() {
    let mut setup = Setup::new(8, Sim::new(1));
    let mut submitter = setup.ring.submitter();
    let mut now = 1;
    // Pushes what waits, gives turns until the core is calm, lets the input come, and gives one turn some time later.
    let mut check = |what, setup: &mut Setup, waits: Option<Entry>, input: &mut dyn FnMut(&mut Setup), later| {
        now += 1 << 20;
        waits.into_iter().chain([opcode::Nop::new().build()]).for_each(|entry| setup.push(entry));
        let calm = (0..9).any(|_| setup.core.turn(now) == Hint::Spin);
        assert!(calm && setup.core.calm_until > now, "{what}: {now}, calm until {}", setup.core.calm_until);
        assert_eq!(setup.reap().len(), 1);
        input(setup);
        assert_eq!(setup.core.turn(now + later - 1) == Hint::Spin, later > 1, "{what}: nothing may happen early");
        setup.core.turn(now + later);
        assert_eq!(setup.reap().len(), 1, "{what}");
    };
    let wait = |fence: &crate::Fence| Some(opcode::Wait::new().build().wait(fence));
    check("an entry", &mut setup, None, &mut |setup| setup.push(opcode::Nop::new().build()), 1);
    let by_submitter = &mut |_: &mut Setup| {
        submitter.push(opcode::Nop::new().build()).unwrap();
        submitter.submit().unwrap();
    };
    check("a submitter's", &mut setup, None, by_submitter, 1);
    let (signaller, fence) = fence::host();
    let mut signaller = Some(signaller);
    let signal = &mut |_: &mut Setup| signaller.take().unwrap().signal();
    check("a fence", &mut setup, wait(&fence), signal, 1);
    let (mut signaller, timeline) = fence::timeline(0);
    let step = &mut |_: &mut Setup| signaller.signal(1).unwrap();
    check("a timeline", &mut setup, wait(&timeline.at(1)), step, 1);
    let far = || opcode::Timeout::new(Duration::from_secs(1)).build().user_data(7);
    let cancel = &mut |setup: &mut Setup| {
        setup.ring.controller().begin_cancel(opcode::Cancel::new(opcode::Select::user_data(7)));
    };
    check("a control", &mut setup, Some(far()), cancel, 1);
    let soon = opcode::Timeout::new(Duration::from_nanos(100)).build();
    check("a timeout", &mut setup, Some(soon), &mut |_| (), 100);
    let polled = crate::Fence::polled(Box::new(Asked::default()));
    check("a polled fence", &mut setup, wait(&polled), &mut |_| (), 100);
    drop(submitter);
    setup.close();
}

/// A transport whose operations have all ended, of which only `settle` is told, and which says that it has input until it is
/// closed.
mod rare {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::transport::{Busy, RawMemory, Transport, TransportError};

    #[derive(Clone, Debug, Default)]
    struct Rare(Arc<State>);

    #[derive(Debug, Default)]
    struct State {
        /// Operations run on.
        runs: AtomicBool,
        closing: AtomicBool,
        /// Its end takes as long as this says.
        stays: AtomicBool,
    }

    // SAFETY: it touches no memory.
    unsafe impl Transport for Rare {
        fn name(&self) -> String {
            "rare".into()
        }

        fn caps(&self) -> Caps {
            Caps { threads_here: true, max_batch: 16, max_in_flight_per_peer: 16, max_merged: 0 }
        }

        fn driver(&self, _wake: PollerWaker) -> Box<dyn Driver> {
            Box::new(RareDriver { state: Arc::clone(&self.0), taken: Vec::new() })
        }

        unsafe fn register(&self, _memory: RawMemory, _location: &str) -> Result<(), TransportError> {
            Ok(())
        }

        fn unregister(&self, _memory: RawMemory) -> Result<(), TransportError> {
            Ok(())
        }

        fn open(&self, _name: &str, _fresh: bool) -> Result<u32, TransportError> {
            Ok(0)
        }

        fn close(&self) -> Result<(), Busy> {
            self.0.closing.store(true, Relaxed);
            while self.0.stays.load(Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        }
    }

    #[derive(Debug)]
    struct RareDriver {
        state: Arc<State>,
        taken: Vec<Op>,
    }

    impl RareDriver {
        fn assert_open(&self) {
            assert!(!self.state.closing.load(Relaxed), "called while the transport is closed");
        }
    }

    impl Driver for RareDriver {
        fn submit(&mut self, _target: u32, ops: &[Op], _now: Nanos, _out: &mut Vec<Event>) -> usize {
            self.assert_open();
            self.taken.extend(ops);
            ops.len()
        }

        fn poll(&mut self, now: Nanos, _budget: u32, _out: &mut Vec<Event>) -> Hint {
            self.assert_open();
            Hint::Sleep { until: Some(now + 1_000_000) }
        }

        fn settle(&mut self, _now: Nanos, out: &mut Vec<Event>) {
            self.assert_open();
            if !self.state.runs.load(Relaxed) {
                let ended = |Op { token: op, len, .. }| {
                    let (res, stage) = (len as i32, Stage::Transfer);
                    Event::Result { op, res, stage, detail: 0, quiet: true }
                };
                out.extend(self.taken.drain(..).map(ended));
            }
        }

        fn in_flight(&self) -> usize {
            self.taken.len()
        }

        fn has_input(&self) -> bool {
            true
        }
    }

    /// Gives turns, from a moment on, until the thread has ended.
    fn turn_until_finished(core: &mut Core, from: Nanos, thread: &std::thread::JoinHandle<crate::CloseReport>) {
        for now in from.. {
            core.turn(now);
            if thread.is_finished() {
                break;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_has_ended_is_not_given_up_when_the_ring_closes() {
        let mut setup = Setup::on(8, Engine::over(Arc::new(Rare::default())));
        let entry = setup.read();
        setup.push(entry);
        setup.core.turn(1);
        assert!(setup.reap().is_empty(), "nobody has asked for it");
        // The region is a user of the engine, so that the engine cannot be ended.
        let Setup { mut core, ring, region, .. } = setup;
        let closer = std::thread::spawn(move || ring.close(Duration::ZERO));
        turn_until_finished(&mut core, 2, &closer);
        let report = closer.join().unwrap();
        assert_eq!((report.completed, report.unquiet), (1, 0));
        assert_eq!(report.completions[0].res(), 8);
        assert!(region.unregister().is_ok());
    }

    #[test]
    fn who_waits_for_quiet_hears_of_ends_that_another_rings_close_has_found() {
        let engine = Engine::over(Arc::new(Rare::default()));
        let mut setup = Setup::on(8, engine.clone());
        let mut other = Ring::builder().attach(&setup.ring).grace(Duration::ZERO).without_poller(8, &engine);
        let (entry, its) = (setup.read(), setup.read());
        setup.push(entry);
        other.submission().push(its).unwrap();
        other.submit().unwrap();
        setup.core.turn(1);
        let controller = other.controller();
        let quiesced = std::thread::spawn(move || controller.quiesce(opcode::Select::any(), Duration::from_secs(20)));
        while !setup.core.has_input() || setup.core.controls.queue.is_empty() {
            std::thread::yield_now();
        }
        setup.core.turn(2);
        let Setup { mut core, ring, region, peer } = setup;
        // Not in the turn that hears of it, which has work anyhow.
        let closer = std::thread::spawn(move || ring.close(Duration::from_nanos(100)));
        turn_until_finished(&mut core, 3, &closer);
        assert_eq!(closer.join().unwrap().completed, 1);
        assert_eq!(quiesced.join().unwrap(), Ok(()), "no turn after this one did anything");
        assert_eq!(other.completion().map(|cqe| cqe.res()).collect::<Vec<_>>(), [8]);
        Setup { core, ring: other, region, peer }.close();
    }

    /// Only streams that wait have limits.
    #[cfg(feature = "cuda")]
    #[test]
    fn what_has_ended_is_not_late_when_its_value_expires() {
        #[derive(Debug)]
        struct Silent;
        impl fence::Mirror for Silent {
            fn moved(&self, _: u64) {}
        }
        let mut setup = Setup::on(8, Engine::over(Arc::new(Rare::default())));
        let progress = fence::mirrored(2, Some(Arc::new(Silent)));
        let entry = setup.read();
        assert_eq!(setup.ring.submission().push_signalling(entry, &progress).unwrap(), 1);
        setup.ring.submit().unwrap();
        setup.core.turn(1);
        progress.cell.expire(1, errno::ETIME);
        setup.core.turn(2);
        setup.core.turn(3);
        assert_eq!(setup.reap().iter().map(Cqe::res).collect::<Vec<_>>(), [8]);
        setup.close();
    }

    #[test]
    fn a_transport_that_is_being_closed_is_left_alone() {
        let rare = Rare::default();
        rare.0.runs.store(true, Relaxed);
        rare.0.stays.store(true, Relaxed);
        let mut setup = Setup::on(8, Engine::over(Arc::new(rare.clone())));
        let sim = Engine::sim(Sim::new(1).delay(Duration::from_secs(1)..Duration::from_secs(2)));
        let memory = sim.register(Region::alloc(4096).unwrap()).unwrap();
        let peer = sim.open_segment(sim.name(), Duration::from_secs(10)).unwrap();
        let mut other = Ring::builder().attach(&setup.ring).grace(Duration::ZERO).without_poller(8, &sim);
        let entry = setup.read();
        setup.push(entry);
        let limited = opcode::Read::new(memory.slice(0..8).unwrap(), peer.at(memory.address() + 64)).build();
        other.submission().push(limited.transfer_limit(Duration::from_millis(1))).unwrap();
        other.submit().unwrap();
        setup.core.turn(1);
        let Setup { mut core, ring, region: ours, peer: its } = setup;
        // Now the ring is the engine's only user.
        drop((ours, its));
        let closer = std::thread::spawn(move || ring.close(Duration::ZERO));
        while !rare.0.closing.load(Relaxed) {
            core.turn(2);
            std::thread::yield_now();
        }
        // What it has cannot be taken, and the poller is to sleep.
        let has_input = core.has_input();
        let turn = catch_unwind(AssertUnwindSafe(|| core.turn(10_000_000)));
        rare.0.stays.store(false, Relaxed);
        assert!(!has_input && turn.is_ok(), "{has_input} {turn:?}");
        assert_eq!(other.completion().map(|cqe| cqe.res()).collect::<Vec<_>>(), [-errno::ETIME]);
        turn_until_finished(&mut core, 10_000_001, &closer);
        assert_eq!(closer.join().unwrap().completed, 1);
        Setup { core, ring: other, region: memory, peer }.close();
    }
}

/// What a core keeps when rings come and go.
mod places {
    use std::time::Duration;

    use super::super::*;
    use crate::{Engine, spsc};

    fn add(core: &mut Core, controls: &Controls, entries: u32, engine: &Engine) -> u32 {
        let number = controls.next_ring();
        let shared = Arc::new(Shared::new(engine.clone(), entries, Arc::clone(&controls.doorbell)));
        let ((_, sq), (cq, _)) = (spsc::ring(entries as usize), spsc::ring(2 * entries as usize));
        controls.send(Control::Ring { ring: number, shared, sq, cq });
        core.turn(1);
        number
    }

    fn close(core: &mut Core, controls: &Controls, ring: u32) {
        let closing = Closing::new(Duration::ZERO, false);
        controls.send(Control::Close { ring, closing: Arc::clone(&closing) });
        core.turn(2);
        assert!(closing.wait(Duration::ZERO));
    }

    #[test]
    fn rings_that_come_and_go_use_the_same_places() {
        let controls = Arc::new(Controls::new(slots_of(8)));
        let mut core = Core::new(Arc::clone(&controls), 0);
        let first = add(&mut core, &controls, 8, &Engine::loopback());
        let sizes = |core: &Core| {
            let edges = core.spare_edges.iter().map(Range::len).sum::<usize>();
            (core.rings.len(), core.slots.len(), core.drivers.len(), edges)
        };
        let mut after_one = None;
        for round in 0..100 {
            controls.join(slots_of(64)).unwrap();
            let ring = add(&mut core, &controls, if round % 2 == 0 { 64 } else { 40 }, &Engine::loopback());
            let numbers: Vec<u32> = core.rings.iter().flatten().map(|ring| ring.number).collect();
            assert_eq!(numbers, [first, ring]);
            close(&mut core, &controls, ring);
            // A number that is gone names nothing.
            controls.send(Control::LaneGone { ring, lane: 0 });
            controls.send(Control::Close { ring, closing: Closing::new(Duration::ZERO, false) });
            core.turn(3);
            if round % 2 == 1 {
                controls.leave(24);
            }
            assert_eq!(*after_one.get_or_insert(sizes(&core)), sizes(&core), "round {round}");
            assert!(!core.is_done());
        }
        assert_eq!(sizes(&core).1, (slots_of(8) + slots_of(64)) as usize);
        close(&mut core, &controls, first);
        assert!(core.is_done());
        assert!(matches!(controls.join(1), Err(Refused::Gone)));
    }

    #[test]
    fn rings_of_one_core_are_bounded_together() {
        let controls = Controls::new(MAX_SLOTS - 10);
        controls.join(10).unwrap();
        assert!(matches!(controls.join(1), Err(Refused::Full(MAX_SLOTS))));
        controls.leave(5);
        assert!(matches!(controls.join(6), Err(Refused::Full(all)) if all == MAX_SLOTS - 5));
        controls.join(5).unwrap();
    }
}

/// A Nop for which the CQ has no room comes after the drain before it nevertheless.
#[test]
fn a_nop_without_room_does_not_pass_a_drain() {
    let mut setup = Setup::new(4, Sim::new(1));
    let nop = |user_data| opcode::Nop::new().build().user_data(user_data);
    let (signaller, fence) = fence::host();
    setup.push(opcode::Wait::new().build().wait(&fence).user_data(10));
    for user_data in 0..8 {
        setup.push(nop(user_data));
        setup.core.turn(1 + user_data);
    }
    setup.push(nop(11).flags(EntryFlags::IO_DRAIN));
    setup.push(nop(12));
    setup.core.turn(10);
    let reaped = |setup: &mut Setup| setup.reap().iter().map(Cqe::user_data).collect::<Vec<_>>();
    assert_eq!(reaped(&mut setup), [0, 1, 2, 3, 4, 5, 6, 7]);
    setup.core.turn(11);
    assert!(reaped(&mut setup).is_empty());
    signaller.signal();
    for now in 12..20 {
        setup.core.turn(now);
    }
    assert_eq!(reaped(&mut setup), [10, 11, 12]);
    setup.close();
}
