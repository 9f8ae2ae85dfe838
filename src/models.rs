//! Models of our own protocols, for loom to go through all their interleavings and every value that a weak memory may
//! show: `RUSTFLAGS="--cfg loom" cargo test --release --lib models`.
//!
//! They drive the real code, each with two or three threads and as few steps as show the protocol. That each of them
//! can fail is what the patches in `tests/planted` are for; `docs/orderings.md` lists what they hold in place.
//!
//! Who only looks is a thread of its own, and who changes things is the main one, which runs first: of all who have loaded an
//! atomic, loom remembers the last one only, and tries no other order with those before. So a reader that runs first, and whose
//! atomic the writer then loads itself before it stores, is never tried in another place.

use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicU64 as Count, Ordering::SeqCst};
use std::task::{Wake, Waker};
use std::time::Duration;

use loom::sync::Notify;
use loom::thread;

use crate::core::{Controls, Core, Ending};
use crate::doorbell::Doorbell;
use crate::fence::{self, FenceStatus, Inbox, Node, NodeKey, recheck_barrier};
use crate::region::{Region, RegionInner, Registered};
use crate::ring::future::{self, Route};
use crate::ring::shared::Shared;
use crate::spsc::{self, Leftover};
use crate::store::{Client, Memory};
use crate::sync::Arc;
use crate::{Cqe, CqeFlags, Engine, Ring, Segment, WaitError, opcode};

/// Checks `model`, with at most so many preemptions in one execution unless the environment says otherwise.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = 20_000;
    let executions = StdArc::new(Count::new(0));
    let counted = StdArc::clone(&executions);
    builder.check(move || {
        counted.fetch_add(1, SeqCst);
        model();
    });
    println!("{} executions", executions.load(SeqCst));
}

/// An entry whose leftovers are counted.
#[derive(Clone, Copy)]
struct Item(u64);

static DISCARDED: Count = Count::new(0);

impl Leftover for Item {
    fn discard(self) {
        DISCARDED.fetch_add(1, SeqCst);
    }
}

/// The producer publishes to the queue, then rings; the poller arms, looks again, then parks.
#[test]
fn publish_and_park() {
    check(3, || {
        let (mut producer, mut consumer) = spsc::ring::<Item>(2);
        let doorbell = StdArc::new(Doorbell::new());
        let poller = {
            let doorbell = StdArc::clone(&doorbell);
            thread::spawn(move || {
                loop {
                    if let Some(Item(value)) = consumer.next() {
                        return value;
                    }
                    doorbell.park(0, None, || consumer.ready() > 0);
                }
            })
        };
        producer.write(Item(7)).ok().unwrap();
        producer.publish();
        doorbell.ring_always();
        assert_eq!(poller.join().unwrap(), 7);
    });
}

/// A reaper that waits for two is woken by the second completion, whoever sees whom first.
#[test]
fn completions_and_reaper_park() {
    check(3, || {
        let (mut producer, mut consumer) = spsc::ring::<Item>(2);
        let doorbell = StdArc::new(Doorbell::new());
        let reaper = {
            let doorbell = StdArc::clone(&doorbell);
            thread::spawn(move || {
                while consumer.ready() < 2 {
                    doorbell.park(consumer.position() + 2, None, || consumer.ready() >= 2);
                }
                [consumer.next().unwrap().0, consumer.next().unwrap().0]
            })
        };
        for value in [7, 8] {
            producer.write(Item(value)).ok().unwrap();
            producer.publish();
            doorbell.ring(producer.published());
        }
        assert_eq!(reaper.join().unwrap(), [7, 8]);
    });
}

struct Notified(Notify);

impl Wake for Notified {
    fn wake(self: StdArc<Self>) {
        self.0.notify();
    }
}

/// The same for a task: it registers its waker and arms, looks again, and only then is pending.
#[test]
fn completion_and_task() {
    check(3, || {
        let (mut producer, mut consumer) = spsc::ring::<Item>(2);
        let doorbell = StdArc::new(Doorbell::new());
        let reaper = {
            let doorbell = StdArc::clone(&doorbell);
            thread::spawn(move || {
                let notified = StdArc::new(Notified(Notify::new()));
                let waker = Waker::from(StdArc::clone(&notified));
                loop {
                    if let Some(Item(value)) = consumer.next() {
                        return value;
                    }
                    if !doorbell.poll(consumer.position() + 1, &waker, || consumer.ready() > 0) {
                        notified.0.wait();
                    }
                }
            })
        };
        producer.write(Item(7)).ok().unwrap();
        producer.publish();
        doorbell.ring(producer.published());
        assert_eq!(reaper.join().unwrap(), 7);
    });
}

/// Entries pass whole and in order, a full queue gets its room back, and what nobody read is let go of once.
#[test]
fn queue_passes_entries_and_places() {
    check(3, || {
        DISCARDED.store(0, SeqCst);
        let (mut producer, mut consumer) = spsc::ring::<Item>(1);
        let other = thread::spawn(move || {
            let mut seen = Vec::new();
            for _ in 0..2 {
                if let Some(Item(value)) = consumer.next() {
                    seen.push(value);
                    consumer.release();
                }
            }
            seen
        });
        let mut written = 0;
        for value in 0..2 {
            if producer.write(Item(value)).is_ok() {
                written += 1;
            }
            if value == 0 {
                producer.publish();
            }
        }
        // Publishes the second.
        drop(producer);
        let seen = other.join().unwrap();
        assert_eq!(seen, [0, 1][..seen.len()]);
        assert_eq!(written, seen.len() as u64 + DISCARDED.load(SeqCst));
    });
}

/// A core with one fence, signalled from another thread: the core hears of it, sleeping or not.
#[test]
fn signal_and_park() {
    check(3, || {
        let (signaller, fence) = fence::host();
        let doorbell = StdArc::new(Doorbell::new());
        let inbox = Inbox::new(StdArc::clone(&doorbell));
        let core = {
            let (fence, doorbell) = (fence.clone(), StdArc::clone(&doorbell));
            thread::spawn(move || {
                let node = Node::new(Arc::clone(&inbox), NodeKey::Fence(3));
                let mut fired = fence.0.registrations.add(node).is_err();
                while !fired {
                    inbox.take_fired(|node, _| fired = node.key == NodeKey::Fence(3));
                    if !fired {
                        doorbell.park(0, None, || inbox.has_fired_before_sleep());
                    }
                }
                assert_eq!(fence.status(), FenceStatus::Signalled);
                inbox.close();
            })
        };
        signaller.signal();
        core.join().unwrap();
    });
}

/// Memory that is written before something is told, and read by who has seen it.
struct Work(loom::cell::UnsafeCell<u64>);

impl Work {
    fn new() -> Arc<Work> {
        Arc::new(Work(loom::cell::UnsafeCell::new(0)))
    }

    fn make(&self) {
        // SAFETY: loom checks that nobody reads it meanwhile.
        self.0.with_mut(|value| unsafe { *value += 1 });
    }

    fn see(&self, times: u64) {
        // SAFETY: loom checks that nobody writes it meanwhile.
        assert_eq!(self.0.with(|value| unsafe { *value }), times);
    }
}

/// Whoever sees that a fence has signalled sees what was done before.
#[test]
fn a_signal_shows_what_was_done() {
    check(3, || {
        let (signaller, fence) = fence::host();
        let work = Work::new();
        let reader = {
            let (work, fence) = (Arc::clone(&work), fence.clone());
            thread::spawn(move || {
                if fence.status() == FenceStatus::Signalled {
                    work.see(1);
                }
            })
        };
        work.make();
        signaller.signal();
        reader.join().unwrap();
        drop(fence);
    });
}

/// The same for a timeline that a thread moves, by its value and by a fence on it.
#[test]
fn a_step_shows_what_was_done() {
    check(3, || {
        let (mut signaller, timeline) = fence::timeline(0);
        let work = Work::new();
        let readers = [true, false].map(|by_value| {
            let (work, timeline, at) = (Arc::clone(&work), timeline.clone(), timeline.at(1));
            thread::spawn(move || {
                let reached = if by_value { timeline.value() == 1 } else { at.status() == FenceStatus::Signalled };
                if reached {
                    work.see(1);
                }
            })
        });
        work.make();
        signaller.signal(1).unwrap();
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

/// A timeline that is told how far it has come, and what failed on the way: the failure is there before the value.
#[test]
fn a_step_and_a_failure_at_once() {
    check(3, || {
        let cell = fence::landed();
        let work = Work::new();
        let reader = {
            let (work, cell) = (Arc::clone(&work), StdArc::clone(&cell));
            thread::spawn(move || match [1, 2].map(|value| cell.status_at(value)) {
                [FenceStatus::Pending, second] => assert_ne!(second, FenceStatus::Signalled),
                [FenceStatus::Signalled, second] => {
                    work.see(1);
                    assert!(matches!(second, FenceStatus::Failed(_)));
                }
                [FenceStatus::Failed(_), _] => panic!("the first has not failed"),
            })
        };
        let asker = {
            let cell = StdArc::clone(&cell);
            thread::spawn(move || cell.failure())
        };
        work.make();
        cell.move_to(2, Some((2, fence::Failure::dependency(5))));
        reader.join().unwrap();
        assert!(asker.join().unwrap().is_none_or(|(value, _)| value == 2));
        assert_eq!(cell.failure(), Some((2, fence::Failure::dependency(5))));
    });
}

/// Two cores wait for one fence: both hear of it, whether they registered in time or not.
#[test]
fn fence_of_two_cores() {
    check(2, || {
        let (signaller, fence) = fence::host();
        let cores: Vec<_> = (0..2)
            .map(|key| {
                let fence = fence.clone();
                let doorbell = StdArc::new(Doorbell::new());
                let kept = StdArc::clone(&doorbell);
                let core = thread::spawn(move || {
                    let inbox = Inbox::new(StdArc::clone(&doorbell));
                    let node = Node::new(Arc::clone(&inbox), NodeKey::Fence(key));
                    let mut fired = fence.0.registrations.add(node).is_err();
                    while !fired {
                        inbox.take_fired(|_, _| fired = true);
                        if !fired {
                            doorbell.park(0, None, || inbox.has_fired_before_sleep());
                        }
                    }
                    assert_eq!(fence.status(), FenceStatus::Signalled);
                    inbox.close();
                });
                (core, kept)
            })
            .collect();
        signaller.signal();
        for (core, _) in cores {
            core.join().unwrap();
        }
    });
}

/// Two fences of one core fire, one on top of the other: the core takes both.
#[test]
fn two_fences_on_one_stack() {
    check(3, || {
        let doorbell = StdArc::new(Doorbell::new());
        let inbox = Inbox::new(StdArc::clone(&doorbell));
        let fences = [0, 1].map(|key| {
            let (signaller, fence) = fence::host();
            fence.0.registrations.add(Node::new(Arc::clone(&inbox), NodeKey::Fence(key))).unwrap();
            (signaller, fence)
        });
        let core = {
            let doorbell = StdArc::clone(&doorbell);
            thread::spawn(move || {
                let mut fired = 0;
                while fired < 2 {
                    inbox.take_fired(|_, _| fired += 1);
                    if fired < 2 {
                        doorbell.park(0, None, || inbox.has_fired_before_sleep());
                    }
                }
                inbox.close();
            })
        };
        let kept = fences.map(|(signaller, fence)| {
            signaller.signal();
            fence
        });
        core.join().unwrap();
        drop(kept);
    });
}

/// A timeline moves while a core registers with it and while it takes an earlier step: the core sees the last value.
#[test]
fn timeline_step_and_registration() {
    check(3, || {
        let (mut signaller, timeline) = fence::timeline(0);
        let last = timeline.at(2);
        let doorbell = StdArc::new(Doorbell::new());
        let inbox = Inbox::new(StdArc::clone(&doorbell));
        let core = {
            let (last, doorbell) = (last.clone(), StdArc::clone(&doorbell));
            thread::spawn(move || {
                let registrations = &last.0.timeline().unwrap().registrations;
                registrations.add_for_good(Node::new(Arc::clone(&inbox), NodeKey::Timeline(0, true)));
                recheck_barrier();
                let mut look = true;
                loop {
                    if look && last.status() == FenceStatus::Signalled {
                        break;
                    }
                    look = false;
                    inbox.take_fired(|node, _| {
                        registrations.rearm(node);
                        look = true;
                    });
                    if !look {
                        doorbell.park(0, None, || inbox.has_fired_before_sleep());
                    }
                }
                inbox.close();
            })
        };
        signaller.signal(1).unwrap();
        signaller.signal(2).unwrap();
        core.join().unwrap();
        drop(signaller);
        assert_eq!(last.status(), FenceStatus::Signalled);
    });
}

/// A timeline fires again, on top of another, while the core takes its node off the stack: the node that lay under it is not
/// lost.
#[test]
fn timeline_fires_again_while_it_is_taken() {
    check(3, || {
        let doorbell = StdArc::new(Doorbell::new());
        let inbox = Inbox::new(StdArc::clone(&doorbell));
        let [(mut under, below), (mut upper, above), (mut other, beside)] = [(); 3].map(|()| fence::timeline(0));
        let points = [below.at(1), above.at(2), beside.at(1)];
        for (key, point) in (0..).zip(&points) {
            let node = Node::new(Arc::clone(&inbox), NodeKey::Timeline(key, key != 1));
            point.0.timeline().unwrap().registrations.add_for_good(node);
        }
        let core = {
            let (points, doorbell) = (points.clone(), StdArc::clone(&doorbell));
            thread::spawn(move || {
                let mut reached = [false; 3];
                while reached != [true; 3] {
                    inbox.take_fired(|node, _| {
                        let NodeKey::Timeline(key, _) = node.key else { unreachable!() };
                        let point = &points[key as usize];
                        point.0.timeline().unwrap().registrations.rearm(node);
                        reached[key as usize] |= point.status() == FenceStatus::Signalled;
                    });
                    if reached != [true; 3] {
                        doorbell.park(0, None, || inbox.has_fired_before_sleep());
                    }
                }
                inbox.close();
            })
        };
        under.signal(1).unwrap();
        upper.signal(1).unwrap();
        other.signal(1).unwrap();
        upper.signal(2).unwrap();
        core.join().unwrap();
        drop((under, upper, other, points));
    });
}

/// A timeline moves and is dropped while a core takes its node, or goes away: both counts of the node are given back once.
#[test]
fn timeline_gone_while_it_fires() {
    // Loom does not know the counts of the timeline itself, so one time it stays until the core has ended.
    for kept in [true, false] {
        check(3, move || {
            let (mut signaller, timeline) = fence::timeline(0);
            let cell = StdArc::clone(timeline.at(1).0.timeline().unwrap());
            let inbox = Inbox::new(StdArc::new(Doorbell::new()));
            cell.registrations.add_for_good(Node::new(Arc::clone(&inbox), NodeKey::Timeline(0, kept)));
            let weak = StdArc::downgrade(&cell);
            let cell = kept.then_some(cell);
            drop(timeline);
            let core = thread::spawn(move || {
                // As `Gate::rearm`.
                inbox.take_fired(|node, _| {
                    if let Some(cell) = weak.upgrade() {
                        cell.registrations.rearm(node);
                    }
                });
                inbox.close();
            });
            signaller.signal(1).unwrap();
            drop(signaller);
            core.join().unwrap();
            drop(cell);
        });
    }
}

/// A timeline reaches a value and then fails: nobody who looks sees that value fail.
#[test]
fn timeline_reached_then_failed() {
    check(3, || {
        let (mut signaller, timeline) = fence::timeline(0);
        let [reached, beyond] = [timeline.at(1), timeline.at(2)];
        let reader = thread::spawn(move || {
            let failed = beyond.status() != FenceStatus::Pending;
            assert!(!matches!(reached.status(), FenceStatus::Failed(_)));
            assert!(!failed || reached.status() == FenceStatus::Signalled);
        });
        signaller.signal(1).unwrap();
        drop(signaller);
        reader.join().unwrap();
    });
}

/// A fence fires while its core goes away: the node is freed once, by whoever is last.
#[test]
fn core_gone_while_a_fence_fires() {
    check(3, || {
        let (signaller, fence) = fence::host();
        let doorbell = StdArc::new(Doorbell::new());
        let inbox = Inbox::new(StdArc::clone(&doorbell));
        let node = Node::new(Arc::clone(&inbox), NodeKey::Fence(0));
        fence.0.registrations.add(node).unwrap();
        let core = thread::spawn(move || inbox.close());
        signaller.signal();
        core.join().unwrap();
    });
}

/// A use begins while the region is closed: one of them is refused, and the pages are sealed after the last use only.
#[test]
fn region_close_and_use() {
    check(3, || {
        let region = RegionInner::own(1, Region::alloc(1).unwrap(), "cpu:0");
        let used = Arc::new(loom::cell::UnsafeCell::new(0));
        let user = {
            let (region, used) = (StdArc::clone(&region), Arc::clone(&used));
            thread::spawn(move || {
                for _ in 0..2 {
                    if region.begin_use() {
                        used.with(|_| ());
                        region.end_use();
                    }
                }
            })
        };
        match region.close() {
            // As the pages are replaced: nobody may be using them.
            Ok(()) => used.with_mut(|_| ()),
            // One is running. That the one before has ended, we need not see yet.
            Err(uses) => assert!((1..=2).contains(&uses)),
        }
        user.join().unwrap();
    });
}

/// A region is closed and reopened, as for memory that is registered twice, while uses come and go: none is miscounted.
#[test]
fn region_reopened() {
    check(3, || {
        let region = RegionInner::own(1, Region::alloc(1).unwrap(), "cpu:0");
        let registration = Work::new();
        let user = {
            let (region, registration) = (StdArc::clone(&region), Arc::clone(&registration));
            thread::spawn(move || {
                let begun = |_: &u64| {
                    let begun = region.begin_use();
                    if begun {
                        registration.0.with(|_| ());
                    }
                    begun
                };
                (0..2).filter(begun).count() as u64
            })
        };
        if region.close().is_ok() {
            // As the transport is asked, and refuses.
            registration.make();
            region.reopen();
        }
        let uses = user.join().unwrap();
        assert_eq!(region.close().err().unwrap_or(0), uses);
    });
}

/// Whoever finds a region unused sees what its uses did.
#[test]
fn region_unused() {
    check(3, || {
        let region = RegionInner::own(1, Region::alloc(1).unwrap(), "cpu:0");
        let used = Work::new();
        assert!(region.begin_use());
        let looker = {
            let (region, used) = (StdArc::clone(&region), Arc::clone(&used));
            thread::spawn(move || {
                let uses = region.uses();
                assert!(uses <= 2);
                if uses == 0 {
                    used.0.with(|_| ());
                }
            })
        };
        // As a copy that is made while an entry ends.
        assert!(region.begin_use());
        region.end_use();
        used.make();
        region.end_use();
        looker.join().unwrap();
    });
}

/// A ring of so many entries that its core has met, a region of one byte and its peer.
fn one_region(entries: u32) -> (Ring, Core, Registered, Segment) {
    let engine = Engine::loopback();
    let region = engine.register(Region::alloc(1).unwrap()).unwrap();
    let peer = engine.open_here(engine.name(), false);
    let ring = Ring::builder().idle(Duration::ZERO).without_poller(entries, &engine);
    let mut core = Core::new(ring.controls(), 0);
    core.turn(1);
    (ring, core, region, peer)
}

/// A core counts uses that have ended by itself until it publishes their completions: whoever reaps one finds its use ended.
#[test]
fn region_unused_with_the_completion() {
    check(2, || {
        let (mut ring, mut core, region, peer) = one_region(1);
        let entry = opcode::Read::new(region.slice(..1).unwrap(), peer.at(region.address() + 1)).build();
        ring.submission().push(entry).unwrap();
        ring.submit().unwrap();
        let poller = thread::spawn(move || {
            core.turn(2);
            poll_on(core);
        });
        if ring.completion().next().is_some() {
            assert_eq!(region.region.uses(), 0);
        }
        close(ring, poller);
    });
}

/// A producer counts a run of uses by itself until it publishes them: whenever the core ends them, and whoever looks then, none
/// is missed.
#[test]
fn region_uses_of_a_run() {
    check(3, || {
        let (mut ring, mut core, region, peer) = one_region(2);
        let pusher = {
            let region = region.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    // Refused while the region is closed.
                    let none = region.slice(..0).unwrap();
                    let _ = ring.submission().push(opcode::Read::new(none, peer.at(0)).build());
                }
                ring.submit().unwrap();
                ring
            })
        };
        core.turn(2);
        match region.region.close() {
            Ok(()) => region.region.reopen(),
            Err(uses) => assert!((1..=2).contains(&uses)),
        }
        let ring = pusher.join().unwrap();
        core.turn(3);
        assert_eq!(region.region.close(), Ok(()));
        close(ring, thread::spawn(move || poll_on(core)));
    });
}

/// Two producers share the units while some are given back: whatever they see of it, three are enough for two.
#[test]
fn units_of_two_producers() {
    check(3, || {
        let shared = StdArc::new(Shared::new(Engine::loopback(), 3, StdArc::new(Doorbell::new())));
        let other = {
            let shared = StdArc::clone(&shared);
            thread::spawn(move || assert!(shared.take_unit()))
        };
        assert!(shared.take_unit());
        // As the core does when the entry has ended.
        shared.freed.store(1, crate::sync::Ordering::Release);
        assert!(shared.take_unit());
        other.join().unwrap();
        assert_eq!(shared.outstanding(), 3);
        assert!(shared.take_unit());
        assert!(!shared.take_unit(), "three are out");
    });
}

/// Two producers take what there is at once, and one gives back what it has no entries for: nobody gets more than there is, and
/// nothing is lost.
#[test]
fn units_at_once() {
    check(3, || {
        let shared = StdArc::new(Shared::new(Engine::loopback(), 4, StdArc::new(Doorbell::new())));
        let other = {
            let shared = StdArc::clone(&shared);
            thread::spawn(move || {
                let taken = shared.take_units(4, 3);
                assert!(taken <= 3);
                shared.return_units(taken.saturating_sub(1));
                taken.min(1)
            })
        };
        let mine = shared.take_units(4, 2);
        assert!((1..=2).contains(&mine));
        // As the core does when an entry has ended.
        shared.freed.store(1, crate::sync::Ordering::Release);
        let more = shared.take_units(4, 4);
        let theirs = other.join().unwrap();
        assert_eq!(shared.outstanding(), theirs + mine + more);
        assert_eq!(shared.take_units(4, 4), 5 - theirs - mine - more);
    });
}

/// What the poller's thread does, with a clock of its own.
fn poll_until_done(controls: StdArc<Controls>) {
    poll_on(Core::new(controls, 0));
}

fn poll_on(mut core: Core) {
    let doorbell = core.doorbell();
    let mut now = 0;
    loop {
        now += 1_000_000;
        let hint = core.turn(now);
        if core.is_done() {
            return;
        }
        if let crate::transport::Hint::Sleep { until } = hint {
            assert_eq!(until, None);
            doorbell.park(0, None, || core.has_input());
        }
    }
}

/// A ring, and a thread that gives its core turns until the ring is closed.
fn ring(entries: u32) -> (Ring, thread::JoinHandle<()>) {
    let ring = Ring::builder().idle(Duration::ZERO).without_poller(entries, &Engine::loopback());
    let controls = ring.controls();
    (ring, thread::spawn(move || poll_until_done(controls)))
}

fn close(ring: Ring, poller: thread::JoinHandle<()>) {
    drop(ring);
    poller.join().unwrap();
}

/// One entry through a whole ring, and whoever reaps its completion can push at once: the unit and the place are back.
#[test]
fn unit_is_back_before_its_completion() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        ring.submission().push(opcode::Nop::new().build().user_data(1)).unwrap();
        assert_eq!(ring.submit_and_wait(1), Ok(1));
        assert_eq!(ring.completion().next().unwrap().user_data(), 1);
        ring.submission().push(opcode::Nop::new().build().user_data(2)).unwrap();
        assert_eq!(ring.submission().len(), 1);
        close(ring, poller);
    });
}

/// The same without reaping: whoever gets the unit again has the place that goes with it.
#[test]
fn unit_comes_with_its_place() {
    check(2, || {
        let mut ring = Ring::builder().idle(Duration::ZERO).without_poller(1, &Engine::loopback());
        ring.submission().push(opcode::Nop::new().build()).unwrap();
        ring.submit().unwrap();
        let mut core = Core::new(ring.controls(), 0);
        let pusher = thread::spawn(move || {
            if ring.submission().push(opcode::Nop::new().build()).is_ok() {
                assert_eq!(ring.submission().len(), 1);
            }
            ring
        });
        core.turn(1);
        close(pusher.join().unwrap(), thread::spawn(move || poll_on(core)));
    });
}

/// The same in a submitter's lane.
#[test]
fn unit_comes_with_its_place_in_a_lane() {
    check(2, || {
        let mut ring = Ring::builder().idle(Duration::ZERO).without_poller(1, &Engine::loopback());
        let mut submitter = ring.submitter();
        let mut core = Core::new(ring.controls(), 0);
        // Brings the lane.
        core.turn(1);
        submitter.push(opcode::Nop::new().build()).unwrap();
        submitter.submit().unwrap();
        let pusher = thread::spawn(move || {
            let pushed = submitter.push(opcode::Nop::new().build()).is_ok();
            assert!(!pushed || submitter.submit() == Ok(1));
        });
        core.turn(2);
        pusher.join().unwrap();
        close(ring, thread::spawn(move || poll_on(core)));
    });
}

/// A completion comes while the reaper reaps the one before, and goes: then the descriptor is readable, or all is reaped.
#[test]
fn eventfd_and_reaper() {
    check(3, || {
        let mut ring = Ring::builder().idle(Duration::ZERO).without_poller(2, &Engine::loopback());
        let eventfd = ring.eventfd().unwrap();
        let mut core = Core::new(ring.controls(), 0);
        for turn in 1..3 {
            ring.submission().push(opcode::Nop::new().build()).unwrap();
            ring.submit().unwrap();
            if turn == 1 {
                core.turn(turn);
            }
        }
        let core = thread::spawn(move || {
            core.turn(2);
            core
        });
        assert!(eventfd.clear());
        let reaped = ring.completion().count();
        let core = core.join().unwrap();
        assert!(reaped == 2 || eventfd.clear());
        close(ring, thread::spawn(move || poll_on(core)));
    });
}

/// The descriptor is made, or told to signal again, while a completion comes: who then goes to wait for it is woken.
#[test]
fn eventfd_and_core() {
    for muted in [false, true] {
        check(3, move || {
            let mut ring = Ring::builder().idle(Duration::ZERO).without_poller(1, &Engine::loopback());
            if muted {
                ring.eventfd().unwrap().mute();
            }
            ring.submission().push(opcode::Nop::new().build()).unwrap();
            ring.submit().unwrap();
            let mut core = Core::new(ring.controls(), 0);
            let core = thread::spawn(move || {
                core.turn(1);
                core
            });
            let eventfd = ring.eventfd().unwrap();
            let mut reaped = 0;
            if muted {
                eventfd.unmute();
                assert!(eventfd.clear());
                reaped = ring.completion().count();
            }
            let core = core.join().unwrap();
            assert!(reaped == 1 || eventfd.clear());
            close(ring, thread::spawn(move || poll_on(core)));
        });
    }
}

/// A completion that finds the CQ full waits; the reaper that makes room wakes the poller for it.
#[test]
fn overflow_and_release() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let mut seen = Vec::new();
        for n in 0..3 {
            ring.submission().push(opcode::Nop::new().build().user_data(n)).unwrap();
            ring.submit().unwrap();
            if n < 2 {
                // The unit of the one before is back when its completion is there. The third finds the CQ full.
                assert_eq!(ring.wait(n as usize + 1), Ok(n as usize + 1));
            }
        }
        while seen.len() < 3 {
            ring.wait(1).unwrap();
            seen.extend(ring.completion().map(|cqe| cqe.user_data()));
        }
        assert_eq!(seen, [0, 1, 2]);
        close(ring, poller);
    });
}

/// A submitter pushes and goes while the owner waits: the owner gets the completion, and then hears that no more can come.
#[test]
fn submitter_gone_and_reaper() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let mut submitter = ring.submitter();
        let other = thread::spawn(move || submitter.push(opcode::Nop::new().build().user_data(5)).unwrap());
        assert_eq!(ring.wait(1), Ok(1));
        assert_eq!(ring.completion().next().unwrap().user_data(), 5);
        assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
        other.join().unwrap();
        close(ring, poller);
    });
}

/// The owner waits for more than the submitter pushes before it goes: whether that goes or the entry ends last, the owner hears
/// that no more can come.
#[test]
fn submitter_gone_and_reaper_of_more() {
    check(2, || {
        let (mut ring, poller) = ring(2);
        let mut submitter = ring.submitter();
        let other = thread::spawn(move || submitter.push(opcode::Nop::new().build()).unwrap());
        assert_eq!(ring.wait(2), Ok(1));
        other.join().unwrap();
        close(ring, poller);
    });
}

/// The same, and it has taken room for one more than it pushes: the owner does not wait for that.
#[test]
fn submitter_gone_with_room_taken_ahead() {
    check(2, || {
        let (mut ring, poller) = ring(2);
        let mut submitter = ring.submitter();
        submitter.expect(2);
        let other = thread::spawn(move || submitter.push(opcode::Nop::new().build()).unwrap());
        assert_eq!(ring.wait(2), Ok(1));
        other.join().unwrap();
        close(ring, poller);
    });
}

/// A submitter submits and stays, while the poller goes to sleep: the word for it wakes the poller.
#[test]
fn submitter_and_poller_park() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let mut submitter = ring.submitter();
        let other = thread::spawn(move || {
            submitter.push(opcode::Nop::new().build().user_data(5)).unwrap();
            assert_eq!(submitter.submit(), Ok(1));
            submitter
        });
        assert_eq!(ring.wait(1), Ok(1));
        assert_eq!(ring.completion().next().unwrap().user_data(), 5);
        drop(other.join().unwrap());
        close(ring, poller);
    });
}

/// Whoever sees that the last submitter is gone sees what it pushed, too.
#[test]
fn what_a_submitter_left_is_outstanding() {
    check(3, || {
        let mut ring = Ring::builder().idle(Duration::ZERO).without_poller(1, &Engine::loopback());
        let controls = ring.controls();
        let mut submitter = ring.submitter();
        let other = thread::spawn(move || submitter.push(opcode::Nop::new().build()).unwrap());
        // Nobody ends it yet.
        assert_eq!(ring.wait_timeout(1, Duration::ZERO), Err(WaitError::TimedOut));
        other.join().unwrap();
        close(ring, thread::spawn(move || poll_until_done(controls)));
    });
}

/// The same for what was pushed elsewhere and will post a completion here.
#[test]
fn what_a_sender_left_is_outstanding() {
    check(3, || {
        let [mut target, mut source] =
            [(); 2].map(|()| Ring::builder().idle(Duration::ZERO).without_poller(1, &Engine::loopback()));
        let controls = [target.controls(), source.controls()];
        let messages = target.messages();
        let sender = thread::spawn(move || {
            source.submission().push(opcode::MsgRing::new(&messages, 5, 0).build()).unwrap();
            drop(messages);
            source
        });
        assert_eq!(target.wait_timeout(1, Duration::ZERO), Err(WaitError::TimedOut));
        let source = sender.join().unwrap();
        let [target_controls, source_controls] = controls;
        close(source, thread::spawn(move || poll_until_done(source_controls)));
        close(target, thread::spawn(move || poll_until_done(target_controls)));
    });
}

/// The owner and a submitter push at once into a ring with room for one: both get in, one after the other.
#[test]
fn two_producers_share_one_place() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let mut submitter = ring.submitter();
        let other = thread::spawn(move || submitter.push(opcode::Nop::new().build().user_data(5)).is_ok());
        let mine = ring.submission().push(opcode::Nop::new().build().user_data(6)).is_ok();
        ring.submit().unwrap();
        let theirs = other.join().unwrap();
        assert!(mine || theirs);
        let mut sum = 0;
        while ring.wait(1).is_ok() {
            sum += ring.completion().map(|cqe| cqe.user_data()).sum::<u64>();
        }
        assert_eq!(sum, 5 * u64::from(theirs) + 6 * u64::from(mine));
        close(ring, poller);
    });
}

/// Whoever sees that an engine has ended sees what its end did, and that its thread has let go of it.
#[test]
fn engine_ended() {
    check(3, || {
        let (ending, work) = (StdArc::new(Ending::running()), Work::new());
        let core = {
            let (ending, work) = (StdArc::clone(&ending), Arc::clone(&work));
            thread::spawn(move || {
                if ending.outcome() == Some(true) {
                    work.see(1);
                }
            })
        };
        work.make();
        ending.set(true);
        core.join().unwrap();
    });
}

/// A ring is closed while a submitter pushes: the push is refused or ends with the ring, and nobody waits for ever.
#[test]
fn close_and_submitter() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let mut submitter = ring.submitter();
        let (signaller, fence) = fence::host();
        let kept = fence.clone();
        let other = thread::spawn(move || {
            let _ = submitter.push(opcode::Wait::new().build().wait(&fence));
        });
        close(ring, poller);
        other.join().unwrap();
        drop(signaller);
        drop(kept);
    });
}

/// An entry waits at the gate of a real core while its fence is signalled.
#[test]
fn signal_and_gate() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let (signaller, fence) = fence::host();
        ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
        ring.submit().unwrap();
        signaller.signal();
        assert_eq!(ring.wait(1), Ok(1));
        assert_eq!(ring.completion().next().unwrap().result(), Ok(0));
        close(ring, poller);
    });
}

/// An entry at the gate is cancelled while its fence is signalled: one of the two ends it, and both completions agree on which.
#[test]
fn cancel_and_signal() {
    check(2, || {
        let (mut ring, poller) = ring(2);
        let (signaller, fence) = fence::host();
        ring.submission().push(opcode::Wait::new().build().wait(&fence).user_data(1)).unwrap();
        ring.submission().push(opcode::Cancel::user_data(1).build().user_data(2)).unwrap();
        ring.submit().unwrap();
        signaller.signal();
        assert_eq!(ring.wait(2), Ok(2));
        let mut results: Vec<_> = ring.completion().map(|cqe| (cqe.user_data(), cqe.res())).collect();
        results.sort_unstable();
        let [(1, waited), (2, cancelled)] = results[..] else { panic!("{results:?}") };
        assert_eq!(waited == 0, cancelled != 0, "{results:?}");
        close(ring, poller);
    });
}

/// The future of an entry is dropped while the entry's fence is signalled: it ends once, and its unit comes back.
#[test]
fn dropped_future_and_signal() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let (signaller, fence) = fence::host();
        let future = ring.submission().push_future(opcode::Wait::new().build().wait(&fence)).unwrap();
        ring.submit().unwrap();
        // Like `fence`, kept to the end: loom does not know std's `Arc`, so that what it drops must be dropped by us.
        let kept = future.fence();
        let other = thread::spawn(move || signaller.signal());
        drop(future);
        // Without a completion: nothing is outstanding when it has ended.
        assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
        ring.submission().push(opcode::Nop::new().build()).unwrap();
        other.join().unwrap();
        close(ring, poller);
        drop((kept, fence));
    });
}

/// The same with a timeline, which steps twice: neither step is lost, however the core meets the timeline.
#[test]
fn timeline_and_gate() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let (mut signaller, timeline) = fence::timeline(0);
        let fence = timeline.at(2);
        ring.submission().push(opcode::Wait::new().build().wait(&fence)).unwrap();
        ring.submit().unwrap();
        signaller.signal(1).unwrap();
        signaller.signal(2).unwrap();
        assert_eq!(ring.wait(1), Ok(1));
        assert_eq!(ring.completion().next().unwrap().result(), Ok(0));
        close(ring, poller);
    });
}

/// Two entries of one timeline end at once: whoever comes last moves the word past both, and the failure is there before
/// the word.
#[test]
fn ends_of_neighbours() {
    check(3, || {
        let progress = fence::progress(2);
        let [first, second] = [(); 2].map(|()| progress.cell.reserve().unwrap().1);
        let [before, at] = [1, 2].map(|value| progress.at(value).unwrap());
        let other = thread::spawn(move || first.tell(None));
        // A thread of its own, which comes after the main one at first: loom keeps one load of an atomic, and forgets that of
        // a reader who came before once the one who ends the entry has loaded it, too.
        let reader = {
            let at = at.clone();
            thread::spawn(move || assert_ne!(at.status(), FenceStatus::Signalled))
        };
        second.tell(Some(7));
        for thread in [other, reader] {
            thread.join().unwrap();
        }
        assert_eq!(progress.value(), 2);
        assert_eq!(before.status(), FenceStatus::Signalled);
        assert!(matches!(at.status(), FenceStatus::Failed(_)));
    });
}

/// Two entries of one timeline fail at once: the first of them is the failure.
#[test]
fn failures_of_neighbours() {
    check(3, || {
        let progress = fence::progress(2);
        let [first, second] = [(); 2].map(|()| progress.cell.reserve().unwrap().1);
        let other = thread::spawn(move || first.tell(Some(5)));
        second.tell(Some(7));
        other.join().unwrap();
        assert_eq!((progress.value(), progress.failure()), (2, Some((1, fence::Failure::dependency(5)))));
    });
}

/// Whoever sees that the word has come to a value sees what all entries up to it did, and who gets a place again comes after
/// the entry that had it.
#[test]
fn a_prefix_shows_what_was_done() {
    check(3, || {
        let progress = fence::progress(2);
        let [first, second] = [(); 2].map(|()| progress.cell.reserve().unwrap().1);
        let [one, two] = [(); 2].map(|()| Work::new());
        let seen = (progress.clone(), Arc::clone(&one), Arc::clone(&two));
        let other = {
            let one = Arc::clone(&one);
            thread::spawn(move || {
                one.make();
                first.tell(None);
            })
        };
        let reader = thread::spawn(move || {
            let (progress, one, two) = seen;
            if progress.value() == 2 {
                one.see(1);
                two.see(1);
            }
        });
        two.make();
        second.tell(None);
        for thread in [other, reader] {
            thread.join().unwrap();
        }
    });
}

#[derive(Debug)]
struct Silent;

impl fence::Mirror for Silent {
    fn moved(&self, _: u64) {}
}

/// A value expires whose entry is on its way still: its place is not given to another.
#[test]
fn an_expired_value_keeps_its_place() {
    check(3, || {
        let progress = fence::mirrored(1, Some(StdArc::new(Silent)));
        let late = progress.cell.reserve().unwrap().1;
        let pusher = {
            let progress = progress.clone();
            thread::spawn(move || assert!(progress.cell.reserve().is_none()))
        };
        progress.cell.expire(1, 62);
        pusher.join().unwrap();
        assert_eq!(late.expiring().map(|(_, expired)| expired), Some(true));
        drop(late);
        assert_eq!(progress.cell.reserve().map(|(value, _)| value), Some(2));
    });
}

/// Two values expire, one of which ends by itself at that moment: a core that notices it before the other's entry is late has
/// something to notice again.
#[test]
fn an_expiry_is_noticed_again() {
    check(3, || {
        let progress = fence::mirrored(2, Some(StdArc::new(Silent)));
        let [ends, late] = [1, 2].map(|_| progress.cell.reserve().unwrap().1);
        let core = {
            let cell = StdArc::clone(&progress.cell);
            // As `Gate::step_timelines` and `Core::end_expired`.
            thread::spawn(move || (cell.expiries(), late.expiring().is_some_and(|(_, expired)| expired)))
        };
        let other = thread::spawn(move || ends.tell(None));
        progress.cell.expire(2, 62);
        let (noticed, found) = core.join().unwrap();
        assert!(found || noticed < progress.cell.expiries());
        other.join().unwrap();
    });
}

/// A core has just heard of another step when a value expires: whatever it sees of that then, it finds that the value's
/// entry is late.
#[test]
fn a_late_entry_is_found() {
    check(3, || {
        let progress = fence::mirrored(1, Some(StdArc::new(Silent)));
        let late = progress.cell.reserve().unwrap().1;
        let doorbell = StdArc::new(Doorbell::new());
        let inbox = Inbox::new(StdArc::clone(&doorbell));
        progress.cell.registrations.add_for_good(Node::new(Arc::clone(&inbox), NodeKey::Timeline(0, true)));
        let core = {
            let (cell, doorbell) = (StdArc::clone(&progress.cell), StdArc::clone(&doorbell));
            thread::spawn(move || {
                // As `Gate::step_timelines` and `Core::end_expired`.
                let (mut step, mut noticed) = (true, 0);
                loop {
                    let expiries = if std::mem::take(&mut step) { cell.expiries() } else { 0 };
                    if noticed < expiries {
                        noticed = expiries;
                        if late.expiring().is_some_and(|(_, expired)| expired) {
                            break;
                        }
                    }
                    inbox.take_fired(|node, _| {
                        cell.registrations.rearm(node);
                        step = true;
                    });
                    if !step {
                        doorbell.park(0, None, || inbox.has_fired_before_sleep());
                    }
                }
                inbox.close();
            })
        };
        progress.cell.expire(1, 62);
        core.join().unwrap();
    });
}

/// A thread that waits for a fence is woken, whoever sees whom first.
#[test]
fn signal_and_thread() {
    check(3, || {
        let (signaller, fence) = fence::host();
        let other = thread::spawn(move || signaller.signal());
        assert_eq!(fence.wait_timeout(Duration::MAX), FenceStatus::Signalled);
        other.join().unwrap();
    });
}

/// An entry with a future ends with `MORE`, then with `NOTIF`, while a task waits for both: it is woken for each.
#[test]
fn route_and_task() {
    check(3, || {
        let route = StdArc::new(Route::new());
        let core = StdArc::clone(&route);
        let core = thread::spawn(move || {
            core.complete(Cqe::new(1, -7, CqeFlags::MORE.bits(), 0, 0, 0));
            core.complete(Cqe::new(1, 0, CqeFlags::NOTIF.bits(), 0, 0, 0));
        });
        let notified = StdArc::new(Notified(Notify::new()));
        let waker = Waker::from(StdArc::clone(&notified));
        for bit in [future::RESULT, future::LAST] {
            while route.poll(bit, &waker).is_pending() {
                notified.0.wait();
            }
            assert_eq!(route.result().res(), -7);
        }
        assert_eq!(route.notif().map(|notif| notif.flags()), Some(CqeFlags::NOTIF));
        core.join().unwrap();
    });
}

/// A future is dropped while its entry ends: one of the two sides lets go of the buffer, and none before the last completion.
#[test]
fn route_and_dropped_future() {
    struct Buffer(StdArc<Count>);
    impl Drop for Buffer {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    check(3, || {
        let route = StdArc::new(Route::new());
        let dropped = StdArc::new(Count::new(0));
        let core = (StdArc::clone(&route), StdArc::clone(&dropped));
        let core = thread::spawn(move || {
            let (route, dropped) = core;
            route.complete(Cqe::new(1, -7, CqeFlags::MORE.bits(), 0, 0, 0));
            assert_eq!(dropped.load(SeqCst), 0);
            route.complete(Cqe::new(1, 0, CqeFlags::NOTIF.bits(), 0, 0, 0));
        });
        route.leave(Box::new(Buffer(StdArc::clone(&dropped))));
        core.join().unwrap();
        assert_eq!(dropped.load(SeqCst), 1);
    });
}

/// The same for a value of a timeline.
#[test]
fn timeline_and_thread() {
    check(3, || {
        let progress = fence::progress(1);
        let place = progress.cell.reserve().unwrap().1;
        let fence = progress.at(1).unwrap();
        let other = thread::spawn(move || place.tell(None));
        assert_eq!(fence.wait_timeout(Duration::MAX), FenceStatus::Signalled);
        other.join().unwrap();
    });
}

/// A Store's worker answers while the poller goes to sleep.
#[test]
fn answer_and_poller_park() {
    check(2, || {
        let (mut ring, poller) = ring(1);
        let store = Client::without_threads(ring.engine(), 1, Box::new(Memory::new(0).backend()));
        let pool = StdArc::clone(&store.inner.pool);
        // Loom does not know std's `Arc`: the doorbell is not to be dropped by the worker.
        let kept = ring.controls();
        let worker = {
            let pool = StdArc::clone(&pool);
            thread::spawn(move || pool.serve(0))
        };
        ring.submission().push(opcode::Exist::new(&store, "a").build()).unwrap();
        assert_eq!(ring.submit_and_wait(1), Ok(1));
        assert_eq!(ring.completion().next().unwrap().result(), Ok(0));
        close(ring, poller);
        pool.close();
        worker.join().unwrap();
        drop(kept);
    });
}

/// A worker that was another poller's becomes idle, is taken by that one again, and becomes idle again, while a poller that
/// found none goes to sleep.
#[test]
fn idle_worker_and_starved_poller() {
    check(3, || {
        let pool = StdArc::new(
            Client::without_threads(&Engine::loopback(), 1, Box::new(Memory::new(0).backend())).inner.pool.clone(),
        );
        let doorbells = [(); 2].map(|()| StdArc::new(Doorbell::new()));
        let [ours, theirs] = doorbells.clone().map(|doorbell| pool.ends(doorbell));
        let taken = pool.take_idle(&theirs).unwrap();
        let worker = {
            let pool = StdArc::clone(&pool);
            thread::spawn(move || {
                pool.become_idle(taken, &theirs);
                if let Some(again) = pool.take_idle(&theirs) {
                    pool.become_idle(again, &theirs);
                }
            })
        };
        while pool.take_idle(&ours).is_none() {
            doorbells[0].park(0, None, || pool.has_idle(&ours));
        }
        worker.join().unwrap();
    });
}
