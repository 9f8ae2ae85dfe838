//! Messages: completions that entries post on other rings.

mod common;

use std::thread;
use std::time::{Duration, Instant};

use common::{LIMIT, reap_exactly};
use moonring::code::errno::{EBADFD, ECANCELED, EIO};
use moonring::opcode::{Cancel, MsgRing, Nop};
use moonring::{CqeFlags, Engine, Entry, EntryFlags, Messages, Refusal, Ring, Stage, WaitError, fence};

const L: EntryFlags = EntryFlags::IO_LINK;

fn ring(entries: u32) -> Ring {
    Ring::builder().grace(Duration::from_millis(50)).build(entries, &Engine::loopback()).unwrap()
}

fn message(target: &Messages, user_data: u64, res: u32) -> Entry {
    MsgRing::new(target, user_data, res).build().user_data(1000 + user_data)
}

#[test]
fn a_message_arrives_there_and_its_sender_completes_with_0() {
    let (mut sender, mut receiver) = (ring(4), ring(4));
    let target = receiver.messages();
    sender.submission().push(message(&target, 7, u32::MAX)).unwrap();
    sender.submit().unwrap();
    let cqe = reap_exactly(&mut receiver, 1)[0];
    assert_eq!((cqe.user_data(), cqe.res(), cqe.stage()), (7, i32::MAX, Stage::Done));
    assert_eq!(cqe.flags(), CqeFlags::empty());
    let cqe = reap_exactly(&mut sender, 1)[0];
    assert_eq!((cqe.user_data(), cqe.res()), (1007, 0));
    // To itself: a unit for each side of it.
    let own = sender.messages();
    sender.submission().push(message(&own, 8, 3)).unwrap();
    sender.submit().unwrap();
    let mut got: Vec<_> = reap_exactly(&mut sender, 2).iter().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    got.sort_unstable();
    assert_eq!(got, [(8, 3), (1008, 0)]);
}

/// Three rings send to a small one, which is reaped slowly: each message arrives once, and a sender's in order.
#[test]
fn many_senders_and_a_small_target() {
    const EACH: u64 = 300;
    let mut receiver = ring(4);
    let senders: Vec<_> = (0..3)
        .map(|id| {
            let target = receiver.messages();
            thread::spawn(move || {
                let mut ring = ring(2);
                for n in 0..EACH {
                    let mut entry = message(&target, id << 32 | n, n as u32);
                    while let Err(error) = ring.submission().push(entry) {
                        assert!(matches!(error.reason, Refusal::TargetFull { capacity: 4 }), "{error}");
                        entry = error.entry;
                        thread::yield_now();
                    }
                    ring.submit().unwrap();
                    assert_eq!(reap_exactly(&mut ring, 1)[0].res(), 0);
                }
            })
        })
        .collect();
    let mut next = [0; 3];
    for _ in 0..3 * EACH {
        receiver.wait_timeout(1, LIMIT).unwrap();
        let cqe = receiver.completion().next().unwrap();
        let id = (cqe.user_data() >> 32) as usize;
        assert_eq!((cqe.user_data() as u32 as u64, cqe.res()), (next[id], next[id] as i32));
        next[id] += 1;
    }
    for sender in senders {
        sender.join().unwrap();
    }
    assert_eq!(receiver.wait_timeout(1, LIMIT), Err(WaitError::NothingOutstanding));
}

#[test]
fn a_refused_message_takes_nothing() {
    let (mut sender, mut receiver) = (ring(2), ring(1));
    let target = receiver.messages();
    receiver.submission().push(Nop::new().build()).unwrap();
    for _ in 0..5 {
        let error = sender.submission().push(message(&target, 1, 0).gate_limit(LIMIT)).unwrap_err();
        assert_eq!(error.reason, Refusal::TargetFull { capacity: 1 });
    }
    for _ in 0..2 {
        sender.submission().push(Nop::new().build()).unwrap();
    }
    sender.submit().unwrap();
    reap_exactly(&mut sender, 2);
    receiver.submit().unwrap();
    reap_exactly(&mut receiver, 1);
    drop(receiver);
    let error = sender.submission().push(message(&target, 1, 0)).unwrap_err();
    assert_eq!(error.reason, Refusal::TargetClosed);
}

#[test]
fn a_target_that_closes_after_the_push_is_an_error() {
    let (mut sender, mut receiver) = (ring(2), ring(1));
    let (signaller, fence) = fence::host();
    sender.submission().push(message(&receiver.messages(), 1, 0).wait(&fence)).unwrap();
    sender.submit().unwrap();
    drop(receiver);
    signaller.signal();
    let cqe = reap_exactly(&mut sender, 1)[0];
    assert_eq!((cqe.res(), cqe.stage()), (-EBADFD, Stage::Issue));
}

/// However a message ends that is not sent, its unit goes back to the target, which has only that one.
#[test]
fn a_message_that_is_not_sent_gives_its_unit_back() {
    let mut receiver = ring(1);
    let target = receiver.messages();
    let (signaller, failed) = fence::host();
    let (_kept, never) = fence::host();
    signaller.fail(9);
    let mut sender = ring(8);
    // The unit is back soon after the end.
    let send = |ring: &mut Ring, mut entry: Entry| {
        let start = Instant::now();
        while let Err(error) = ring.submission().push(entry) {
            assert_eq!(error.reason, Refusal::TargetFull { capacity: 1 });
            assert!(start.elapsed() < LIMIT);
            entry = error.entry;
            thread::yield_now();
        }
        ring.submit().unwrap();
    };
    send(&mut sender, message(&target, 1, 0).wait(&failed));
    assert_eq!(reap_exactly(&mut sender, 1)[0].detail(), -9);
    send(&mut sender, message(&target, 2, 0).wait(&never));
    sender.submission().push(Cancel::user_data(1002).build()).unwrap();
    sender.submit().unwrap();
    assert_eq!(reap_exactly(&mut sender, 2).iter().map(|cqe| cqe.res()).min(), Some(-ECANCELED));
    sender.submission().push(Nop::new().result(-EIO).build().flags(L)).unwrap();
    send(&mut sender, message(&target, 3, 0));
    reap_exactly(&mut sender, 2);
    let mut submitter = sender.submitter();
    send(&mut sender, message(&target, 4, 0).wait(&never));
    drop(sender);
    drop(submitter.push(Nop::new().build()).unwrap_err());
    let mut sender = ring(8);
    let mut late = sender.submitter();
    let start = Instant::now();
    while late.push(message(&target, 5, 0)).is_err() {
        assert!(start.elapsed() < LIMIT);
        thread::yield_now();
    }
    drop(sender);
    drop(late);
    let mut sender = ring(8);
    send(&mut sender, message(&target, 6, 1));
    let cqe = reap_exactly(&mut receiver, 1)[0];
    assert_eq!((cqe.user_data(), cqe.res()), (6, 1));
    drop(target);
    assert_eq!(receiver.wait_timeout(1, LIMIT), Err(WaitError::NothingOutstanding));
}

#[test]
fn a_ring_waits_while_somebody_may_send() {
    let mut receiver = ring(1);
    let target = receiver.messages();
    assert_eq!(receiver.wait_timeout(1, Duration::from_millis(20)), Err(WaitError::TimedOut));
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(5));
        drop(target);
    });
    assert_eq!(receiver.wait_timeout(1, LIMIT), Err(WaitError::NothingOutstanding));
    other.join().unwrap();
}

/// It would never end: what is not submitted sends nothing, to the own ring either.
#[test]
fn a_message_to_its_own_ring_that_is_not_submitted_is_not_waited_for() {
    let mut ring = ring(4);
    let own = ring.messages();
    ring.submission().push(message(&own, 1, 0)).unwrap();
    drop(own);
    assert_eq!(ring.wait_timeout(1, Duration::from_millis(200)), Err(WaitError::NothingOutstanding));
    assert_eq!(ring.submit(), Ok(1));
    assert_eq!(reap_exactly(&mut ring, 2).len(), 2);
}
