//! Engines that somebody else made.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use mooncake_sys::{Api, TransferEngine};
use moonring::{CqeFlags, Engine, Region, Ring, mooncake, opcode};

use crate::peer::{LIMIT, Peer, alone, issued};

const PAGE: usize = 4096;

/// Made by calling Mooncake itself, with a page of its own registered.
struct Maker {
    api: &'static Api,
    engine: NonNull<TransferEngine>,
    page: *mut c_void,
}

// SAFETY: Mooncake's engine is made for calls from any thread, and the page is only an address here.
unsafe impl Send for Maker {}
// SAFETY: as above.
unsafe impl Sync for Maker {}

impl Maker {
    fn new() -> Arc<Maker> {
        let api = Api::load().unwrap_or_else(|error| panic!("{error}"));
        api.set_log_level(mooncake::LogLevel::Fatal).unwrap();
        let engine = api.create_engine(c"P2PHANDSHAKE", c"127.0.0.1", c"", 0, false).unwrap();
        // SAFETY: the engine is new, and the page is a mapping of its own that is never unmapped.
        let page = unsafe {
            api.install_transport(engine, c"tcp", ptr::null_mut()).unwrap();
            let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let page = libc::mmap(ptr::null_mut(), PAGE, access, kind, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            api.register_local_memory(engine, page, PAGE, c"cpu:0", true).unwrap();
            page
        };
        Arc::new(Maker { api, engine, page })
    }

    fn adopt(self: &Arc<Maker>) -> Engine {
        let owner: Arc<dyn Any + Send + Sync> = self.clone();
        // SAFETY: the engine lives as long as its maker, of which the owner is a handle.
        unsafe { mooncake::adopt(self.engine.as_ptr().cast(), None, owner) }.unwrap()
    }

    fn name(&self) -> String {
        // SAFETY: the engine lives.
        unsafe { self.api.local_ip_and_port(self.engine) }.unwrap()
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        // SAFETY: every handle is gone, and so is every use.
        unsafe { self.api.destroy_engine(self.engine) }.unwrap();
    }
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn an_adopted_engine_moves_data_and_is_left_to_its_owner() {
    let _alone = alone();
    let mut peer = Peer::start(2 * PAGE);
    peer.fill(1, 0, 2 * PAGE);
    let maker = Maker::new();
    let engine = maker.adopt();
    assert_eq!(engine.name(), maker.name());
    assert_eq!(Arc::strong_count(&maker), 2);

    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    // SAFETY: the page is registered with the engine, and stays so.
    let theirs = unsafe { engine.adopt_registration(maker.page as u64, PAGE as u64, "cpu:0") }.unwrap();
    let ours = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let mut ring = Ring::builder().build(8, &engine).unwrap();
    for region in [&theirs, &ours] {
        ring.submission()
            .push(opcode::Read::new(region.slice(..).unwrap(), segment.at(peer.info.address)).build())
            .unwrap();
    }
    ring.submit().unwrap();
    assert_eq!(ring.wait_timeout(2, LIMIT), Ok(2));
    for cqe in ring.completion() {
        assert_eq!((cqe.result(), cqe.flags()), (Ok(PAGE as u32), CqeFlags::empty()));
    }
    // SAFETY: the page is mapped, and nobody writes it now.
    let bytes = unsafe { std::slice::from_raw_parts(maker.page.cast::<u8>(), PAGE) };
    assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == crate::peer::pattern(1, at)));

    // SAFETY: no peer has used it.
    unsafe { theirs.unregister_foreign() }.unwrap();
    // Its maker's registration is untouched: Mooncake refuses to register it again.
    // SAFETY: the page stays mapped.
    let again = unsafe { engine.register_foreign(maker.page as u64, PAGE as u64, "cpu:0") };
    assert_eq!(again.unwrap_err().cause.code, -7);
    let address = ours.address();
    drop((ring, engine, segment, theirs, ours));
    assert_eq!(Arc::strong_count(&maker), 1, "the owner is kept");
    // The engine lives on without the memory that was registered for the ring, and peers still reach it.
    assert!(!maker.name().is_empty());
    peer.ask(&format!("write {} {} {PAGE}", maker.name(), maker.page as u64));
    assert_eq!(peer.answer(LIMIT), PAGE.to_string());
    peer.ask(&format!("write {} {address} {PAGE}", maker.name()));
    assert!(peer.answer(LIMIT).starts_with('-'), "a peer wrote to memory that is not registered any more");
}

#[test]
#[ignore = "needs cargo xtask setup"]
fn the_owner_is_kept_while_a_transfer_runs() {
    let _alone = alone();
    let peer = Peer::start(PAGE);
    let maker = Maker::new();
    let engine = maker.adopt();
    let segment = engine.open_segment(&peer.info.segment, LIMIT).unwrap();
    let ours = engine.register(Region::alloc(PAGE).unwrap()).unwrap();
    let mut ring = Ring::builder().grace(Duration::from_millis(100)).build(8, &engine).unwrap();
    peer.signal(libc::SIGSTOP);
    let read = opcode::Read::new(ours.slice(..).unwrap(), segment.at(peer.info.address));
    ring.submission().push(read.build()).unwrap();
    ring.submit().unwrap();
    issued(&mut ring);
    let address = ours.address() as *const u8;
    drop((ring, engine, segment, ours));
    assert!(Arc::strong_count(&maker) > 1, "the owner was let go of under a running transfer");
    // The memory is still there.
    // SAFETY: that is what this asserts; a fault would end the test.
    assert_eq!(unsafe { address.read_volatile() }, 0);
}
