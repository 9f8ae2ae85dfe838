//! Completions that find the queue full, where something depends on them.

mod common;

use std::time::{Duration, Instant};

use common::{LIMIT, reap_exactly};
use moonring::code::errno::ETIME;
use moonring::fence::FenceStatus;
use moonring::opcode::{Nop, Timeout, TimeoutUpdate};
use moonring::{CqeFlags, Engine, EntryFlags, Ring, Stage, WaitError};

fn ring(entries: u32) -> Ring {
    Ring::builder().build(entries, &Engine::loopback()).unwrap()
}

/// Drains on a ring that nobody reaps: each starts when those before have their results, posted or not, and none is lost.
#[test]
fn drains_go_on_with_a_full_queue() {
    let mut ring = ring(8);
    let mut accepted = 0;
    let end = Instant::now() + LIMIT;
    // As many as the completion queue has room for, and the ring's capacity on top.
    while accepted < 16 + 8 {
        assert!(Instant::now() < end, "{accepted} accepted");
        let entry = Nop::new().build().user_data(accepted).flags(EntryFlags::IO_DRAIN);
        accepted += u64::from(ring.submission().push(entry).is_ok());
        ring.submit().unwrap();
    }
    assert_eq!(ring.wait(16), Ok(16));
    assert!(ring.submission().push(Nop::new().build()).is_err());
    let all: Vec<_> = reap_exactly(&mut ring, 24).iter().map(|cqe| (cqe.user_data(), cqe.res())).collect();
    assert_eq!(all, (0..24).map(|n| (n, 0)).collect::<Vec<_>>());
    assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
    ring.submission().push(Nop::new().build().user_data(24).flags(EntryFlags::IO_DRAIN)).unwrap();
    ring.submit().unwrap();
    assert_eq!(reap_exactly(&mut ring, 1)[0].user_data(), 24);
}

/// A tick that finds the queue full is the last, and not lost.
#[test]
fn a_multishot_timeout_ends_with_a_full_queue() {
    let mut ring = ring(1);
    let ticks = Timeout::new(Duration::from_millis(1)).multishot(0).build().user_data(7);
    let end = ring.submission().push_fenced(ticks).unwrap();
    ring.submit().unwrap();
    assert!(matches!(end.wait_timeout(LIMIT), FenceStatus::Failed(_)));
    let all: Vec<_> = reap_exactly(&mut ring, 3).iter().map(|cqe| (cqe.res(), cqe.stage(), cqe.flags())).collect();
    let tick = |flags| (-ETIME, Stage::Done, flags);
    assert_eq!(all, [tick(CqeFlags::MORE), tick(CqeFlags::MORE), tick(CqeFlags::empty())]);
    assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
    ring.submission().push(Nop::new().build()).unwrap();
}

/// A multishot Timeout gets another span: the ticks that are left come by that one.
#[test]
fn a_multishot_timeout_is_updated() {
    let mut ring = ring(4);
    ring.submission().push(Timeout::new(Duration::from_secs(3600)).multishot(3).build().user_data(1)).unwrap();
    ring.submission().push(TimeoutUpdate::new(1, Duration::from_millis(1)).build().user_data(2)).unwrap();
    ring.submit().unwrap();
    let all = reap_exactly(&mut ring, 4);
    let all: Vec<_> = all.iter().map(|cqe| (cqe.user_data(), cqe.res(), cqe.flags())).collect();
    let tick = |flags| (1, -ETIME, flags);
    let more = tick(CqeFlags::MORE);
    assert_eq!(all, [(2, 0, CqeFlags::empty()), more, more, tick(CqeFlags::empty())]);
    assert_eq!(ring.wait(1), Err(WaitError::NothingOutstanding));
}
