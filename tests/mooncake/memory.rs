//! Memory that peers write late: regions that are unregistered meanwhile, copies that come after a load.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use moonring::code::errno;
use moonring::fence::{self, Signaller};
use moonring::{AccessError, CqeFlags, Region, Registered, Ring, UnregisterError, opcode};

use crate::peer::{LIMIT, Peer, alone, engine, fill, matching};

const PAGE: usize = 4096;

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_late_write_never_reaches_a_region_that_was_unregistered() {
    let _alone = alone();
    const LEN: usize = 256 << 20;
    let mut peer = Peer::start(LEN);
    let engine = engine();
    let region = engine.register(Region::alloc(LEN).unwrap()).unwrap();
    let bystander = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    peer.fill(1, 0, PAGE);
    assert_eq!(peer.ask(&format!("write {} {} {LEN}", engine.name(), region.address())), "begun");
    // The first bytes are here, most are not.
    let mut waited = Duration::ZERO;
    while matching(&region, 1, 0, PAGE) < PAGE {
        assert!(waited < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
        waited += Duration::from_millis(1);
    }
    region.unregister().unwrap();
    // Whoever gets memory now gets other memory, and nobody writes to it.
    let new: Vec<Registered> = (0..4).map(|_| engine.register(Region::alloc(LEN / 8).unwrap()).unwrap()).collect();
    for new in &new {
        let (start, end) = (new.address(), new.address() + new.len() as u64);
        assert!(end <= region.address() || start >= region.address() + LEN as u64, "addresses are used again");
    }
    assert_eq!(peer.answer(LIMIT), (-errno::EIO).to_string(), "the peer is told that its write failed");
    for new in &new {
        let mut bytes = vec![1; new.len()];
        new.read_at(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
    }
    assert_eq!(region.read_at(0, &mut [0]), Err(AccessError::Unregistered));
    assert!(matches!(region.unregister(), Err(UnregisterError::NotRegistered)));
    // The engine is well, and the peer may write elsewhere.
    assert_eq!(peer.ask(&format!("write {} {} {PAGE}", engine.name(), bystander.address())), "begun");
    assert_eq!(peer.answer(LIMIT), PAGE.to_string());
    assert_eq!(matching(&bystander, 1, 0, PAGE), PAGE);
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_region_stays_registered_while_a_transfer_of_ours_uses_it() {
    let _alone = alone();
    let peer = Peer::start(PAGE);
    let engine = engine();
    let region = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    let (signaller, gate) = fence::host();
    let read = || opcode::Read::new(region.slice(..).unwrap(), segment.at(peer.info.address)).build();
    // One waits at the gate, one is with a peer that does not answer.
    peer.signal(libc::SIGSTOP);
    ring.submission().push(read().wait(&gate)).unwrap();
    ring.submission().push(read()).unwrap();
    ring.submit().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(matches!(region.unregister(), Err(UnregisterError::Busy(2))));
    peer.signal(libc::SIGCONT);
    assert_eq!(ring.wait_timeout(1, LIMIT), Ok(1));
    assert!(matches!(region.unregister(), Err(UnregisterError::Busy(1))));
    signaller.signal();
    assert_eq!(ring.wait_timeout(2, LIMIT), Ok(2));
    for cqe in ring.completion() {
        assert_eq!((cqe.result(), cqe.flags()), (Ok(PAGE as u32), CqeFlags::empty()));
    }
    region.unregister().unwrap();
}

/// A stand-in for a compute stream: copies pages one after the other, each late, and then signals.
struct Stream {
    queue: Option<Sender<(usize, usize, Signaller)>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    fn new(pages: Registered, late: Duration) -> Stream {
        let (queue, copies) = channel::<(usize, usize, Signaller)>();
        let thread = std::thread::spawn(move || {
            for (from, to, signaller) in copies {
                std::thread::sleep(late);
                pages.copy_within(from, to, PAGE).unwrap();
                signaller.signal();
            }
        });
        Stream { queue: Some(queue), thread: Some(thread) }
    }

    fn copy(&self, from: usize, to: usize) -> moonring::Fence {
        let (signaller, fence) = fence::host();
        self.queue.as_ref().unwrap().send((from, to, signaller)).unwrap();
        fence
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        drop(self.queue.take());
        let _ = self.thread.take().unwrap().join();
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn a_load_behind_a_late_copy_is_corrupted_without_the_fence_and_never_with_it() {
    let _alone = alone();
    const PAGES: usize = 100;
    const COPIED: u8 = 9;
    let mut peer = Peer::start(PAGES * PAGE);
    let engine = engine();
    // Page 0 is what the stream copies, the others are loaded into.
    let region = engine.register(Region::alloc((PAGES + 1) * PAGE).unwrap()).unwrap();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let mut ring = Ring::builder().build(PAGES as u32, &engine).unwrap();
    let mut corrupted = |fenced: bool, seed: u8| {
        peer.fill(seed, 0, PAGES * PAGE);
        fill(&region, COPIED, 0, PAGE);
        let stream = Stream::new(region.clone(), Duration::from_millis(2));
        for page in 0..PAGES {
            // The stream's copy of this page is queued first; the load of the same page must come after it.
            let to = (page + 1) * PAGE;
            let fence = stream.copy(0, to);
            let remote = segment.at(peer.info.address + (page * PAGE) as u64);
            let load = opcode::Read::new(region.slice(to..to + PAGE).unwrap(), remote).build();
            ring.submission().push(if fenced { load.wait(&fence) } else { load }).unwrap();
            ring.submit().unwrap();
        }
        assert_eq!(ring.wait_timeout(PAGES, LIMIT), Ok(PAGES));
        for cqe in ring.completion() {
            assert_eq!(cqe.result(), Ok(PAGE as u32), "{cqe:?}");
        }
        drop(stream);
        let mut page = vec![0; PAGE];
        let wrong = |&at: &usize| {
            region.read_at((at + 1) * PAGE, &mut page).unwrap();
            page.iter().zip(at * PAGE..).any(|(&byte, at)| byte != crate::peer::pattern(seed, at))
        };
        (0..PAGES).filter(wrong).count()
    };
    assert!(corrupted(false, 1) > 0, "without the fence nothing went wrong: the test shows nothing");
    assert_eq!(corrupted(true, 2), 0);
}
