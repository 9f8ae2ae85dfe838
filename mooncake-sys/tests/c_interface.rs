//! Each function once, against a library of ours with Mooncake's C interface: what arrives there, and what comes back.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;

use mooncake_sys::*;

/// The fake remembers one call: one test does all of them.
#[test]
fn every_call_arrives_as_it_was_made() {
    // SAFETY: it has the C interface's names and types.
    let api = unsafe { Api::load_from(&Source::Library(fake_mooncake::library().into())) }.unwrap();
    assert_eq!(api.path(), fake_mooncake::library());
    assert_eq!(api.wheel_version(), None);
    assert!(!api.has_task_groups());

    // SAFETY: loaded before, so this only counts; the function has this type.
    let last_call = unsafe {
        let library = libloading::os::unix::Library::new(fake_mooncake::library()).unwrap();
        let function = library.get::<unsafe extern "C" fn() -> *const c_char>("fake_mooncake_last_call");
        let function = *function.unwrap();
        std::mem::forget(library);
        function
    };
    let last = || {
        // SAFETY: it answers a static text, and no call of the fake runs meanwhile.
        unsafe { CStr::from_ptr(last_call()) }.to_str().unwrap().to_owned()
    };

    let error = api.create_engine(c"refuse", c"me", c"host", 1, false).unwrap_err();
    assert_eq!(error.code, NO_CODE);
    assert!(error.to_string().contains("refuse"), "{error}");
    let engine = api.create_engine(c"meta", c"me", c"host", 0x1_0000_0001, true).unwrap();
    assert_eq!(last(), "createTransferEngine meta me host 4294967297 1");

    let (a, b) = (0x1000 as *mut c_void, 0x2000 as *mut c_void);
    // SAFETY: the fake touches nothing that it is told about.
    unsafe {
        assert_eq!(api.local_ip_and_port(engine).unwrap(), "10.0.0.1:17");
        assert_eq!(last(), "getLocalIpAndPort 1");

        api.install_transport(engine, c"tcp", ptr::null_mut()).unwrap();
        assert_eq!(last(), "installTransport 1 tcp (nil)");
        let error = api.install_transport(engine, c"carrier pigeon", ptr::null_mut()).unwrap_err();
        assert!(error.to_string().contains("carrier pigeon"), "{error}");
        api.uninstall_transport(engine, c"tcp").unwrap();
        assert_eq!(last(), "uninstallTransport 1 tcp");

        assert_eq!(api.open_segment(engine, c"peer").unwrap(), 7);
        assert_eq!(last(), "openSegment 1 peer");
        let error = api.open_segment(engine, c"nobody").unwrap_err();
        assert_eq!(error.to_string(), r#"openSegment("nobody") failed with code -1 (invalid argument)"#);
        let error = api.open_segment(engine, c"throw").unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (EXCEPTION, "thrown by the fake"));
        let error = api.open_segment(engine, c"throw an int").unwrap_err();
        assert_eq!(error.code, EXCEPTION);
        assert_eq!(api.open_segment_no_cache(engine, c"peer").unwrap(), 8);
        assert_eq!(last(), "openSegmentNoCache 1 peer");
        api.close_segment(engine, 7).unwrap();
        assert_eq!(last(), "closeSegment 1 7");
        api.remove_local_segment(engine, c"me").unwrap();
        assert_eq!(last(), "removeLocalSegment 1 me");
        api.sync_segment_cache(engine).unwrap();
        assert_eq!(last(), "syncSegmentCache 1");

        api.register_local_memory(engine, a, 1 << 33, c"cpu:0", true).unwrap();
        assert_eq!(last(), "registerLocalMemory 1 0x1000 8589934592 cpu:0 1");
        api.register_local_memory(engine, a, 5, c"*", false).unwrap();
        assert_eq!(last(), "registerLocalMemory 1 0x1000 5 * 0");
        let error = api.register_local_memory(engine, a, 13, c"*", false).unwrap_err();
        assert_eq!(error.code, -7);
        api.unregister_local_memory(engine, b).unwrap();
        assert_eq!(last(), "unregisterLocalMemory 1 0x2000");
        let ranges = [(a, 16), (b, 32)].map(|(addr, length)| BufferEntry { addr, length });
        api.register_local_memory_batch(engine, &ranges, c"cpu:1").unwrap();
        assert_eq!(last(), "registerLocalMemoryBatch 1 cpu:1 0x1000+16 0x2000+32");
        api.unregister_local_memory_batch(engine, &[a, b]).unwrap();
        assert_eq!(last(), "unregisterLocalMemoryBatch 1 0x1000 0x2000");

        let batch = api.allocate_batch_id(engine, 2).unwrap();
        assert_eq!((last().as_str(), batch), ("allocateBatchID 1 2", 0x1234_5678_90ab));
        assert_eq!(api.allocate_batch_id(engine, 13).unwrap_err().code, -302);

        let request = TransferRequest {
            opcode: OPCODE_WRITE,
            source: a,
            target_id: 7,
            file_id: 0,
            target_offset: 0xfedc_ba98_7654_3210,
            length: 1 << 40,
        };
        let read = TransferRequest { opcode: OPCODE_READ, source: b, target_id: -2, ..request };
        for grouping in [Grouping::None, Grouping::Each] {
            api.submit_transfer(engine, batch, &[request, read], grouping).unwrap();
            let (target, length) = ("fedcba9876543210", 1u64 << 40);
            assert_eq!(
                last(),
                format!("submitTransfer 1 1234567890ab 1:0x1000:7:{target}:{length} 0:0x2000:-2:{target}:{length}")
            );
        }
        let error = api.submit_transfer(engine, batch, &[request; 13], Grouping::None).unwrap_err();
        assert_eq!(error.code, 2);

        let status = api.get_transfer_status(engine, batch, 1).unwrap();
        assert_eq!(last(), "getTransferStatus 1 1234567890ab 1");
        let wanted = TransferStatus { status: STATUS_COMPLETED, transferred_bytes: 0x1_0000_0001 };
        assert_eq!(status, wanted);
        assert_eq!(api.get_transfer_status(engine, batch, 13).unwrap_err().code, 1);

        api.free_batch_id(engine, batch).unwrap();
        assert_eq!(last(), "freeBatchID 1 1234567890ab");
        assert_eq!(api.free_batch_id(engine, 13).unwrap_err().code, 4);

        api.destroy_engine(engine).unwrap();
        assert_eq!(last(), "destroyTransferEngine 1");
    }

    let error = api.set_log_level(LogLevel::Error).unwrap_err();
    assert!(error.to_string().contains("FLAGS_minloglevel"), "{error}");
}

#[test]
fn the_image_that_is_mapped_is_adopted() {
    // SAFETY: it has the C interface's names and types.
    unsafe { Api::load_from(&Source::Library(fake_mooncake::library().into())) }.unwrap();
    let api = Api::adopt().unwrap();
    assert_eq!(api.path().canonicalize().unwrap(), fake_mooncake::library().canonicalize().unwrap());
    assert_eq!(api.wheel_version(), None);
}
