//! A core without a thread: what it keeps when rings come and go.

use std::time::Duration;

use super::*;
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
    let controls = Arc::new(Controls::new(8));
    let mut core = Core::new(Arc::clone(&controls), 0);
    let first = add(&mut core, &controls, 8, &Engine::loopback());
    let sizes = |core: &Core| {
        let edges = core.spare_edges.iter().map(Range::len).sum::<usize>();
        (core.rings.len(), core.slots.len(), core.drivers.len(), edges)
    };
    let mut after_one = None;
    for round in 0..100 {
        controls.join(64).unwrap();
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
    assert_eq!(sizes(&core).1, 72);
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
