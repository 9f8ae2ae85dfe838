//! Each function once, against a library of ours with the Store's C interface: what arrives there, and what comes back.

use std::ffi::{CStr, c_char, c_void};

use mooncake_sys::*;

/// The fake remembers one call: one test does all of them.
#[test]
fn every_call_arrives_as_it_was_made() {
    let library = fake_mooncake::store_library();
    // SAFETY: it has the C interface's names and types.
    let api = unsafe { StoreApi::load_from(&Source::Library(library.clone())) }.unwrap();
    assert_eq!(api.path(), library);
    assert_eq!(api.wheel_version(), None);
    assert!(!api.has_multi_buffers());

    // SAFETY: loaded before, so this only counts; the function has this type.
    let last_call = unsafe {
        let library = libloading::os::unix::Library::new(&library).unwrap();
        let function =
            *library.get::<unsafe extern "C" fn() -> *const c_char>("fake_mooncake_store_last_call").unwrap();
        std::mem::forget(library);
        function
    };
    let last = || {
        // SAFETY: it answers a static text, and no call of the fake runs meanwhile.
        unsafe { CStr::from_ptr(last_call()) }.to_str().unwrap().to_owned()
    };

    let store = api.create().unwrap();
    assert_eq!(last(), "create");
    let setup = StoreSetup {
        local_hostname: c"me",
        metadata_server: c"meta",
        segment_bytes: 1 << 33,
        buffer_bytes: 7,
        protocol: c"tcp",
        device: c"card",
        master: c"host:1",
    };
    let (a, b) = (0x1000 as *mut c_void, 0x2000 as *mut c_void);
    let (at_a, at_b) = ([BufferEntry { addr: a, length: 16 }], [BufferEntry { addr: b, length: 13 }]);
    // SAFETY: the fake touches nothing that it is told about.
    unsafe {
        api.setup(store, &setup).unwrap();
        assert_eq!(last(), "setup 1 me meta 8589934592 7 tcp card host:1");
        let error = api.setup(store, &StoreSetup { protocol: c"carrier pigeon", ..setup }).unwrap_err();
        assert!(error.code == STORE_INVALID_PARAMS && error.to_string().contains("carrier pigeon"), "{error}");

        api.register_buffer(store, BufferEntry { addr: a, length: 1 << 33 }).unwrap();
        assert_eq!(last(), "register_buffer 1 0x1000 8589934592");
        let error = api.register_buffer(store, at_b[0]).unwrap_err();
        assert_eq!(error.to_string(), "register_buffer(0x2000, 13 bytes) failed with code -600 (invalid parameters)");
        api.unregister_buffer(store, b).unwrap();
        assert_eq!(last(), "unregister_buffer 1 0x2000");

        let bytes = api.get_into(store, c"k", BufferEntry { addr: a, length: 1 << 33 }).unwrap();
        assert_eq!((bytes, last().as_str()), (1 << 33, "get_into 1 k 0x1000 8589934592"));
        assert_eq!(api.get_into(store, c"nobody", at_a[0]).unwrap_err().code, STORE_NOT_FOUND);
        let error = api.get_into(store, c"throw", at_a[0]).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (EXCEPTION, "thrown by the fake"));

        api.put_from(store, c"k", at_a[0], 2).unwrap();
        assert_eq!(last(), "put_from 1 k 0x1000 16 x2 0 0 (nil) 0");
        assert_eq!(api.put_from(store, c"k", at_b[0], 1).unwrap_err().code, STORE_NO_SPACE);

        let items = [StoreItem::new(c"k", &at_a), StoreItem::new(c"nobody", &at_b)];
        let mut results = [7; 2];
        api.batch_get_into(store, &items, &mut results).unwrap();
        assert_eq!(last(), "batch_get_into 1 k:0x1000:16 nobody:0x2000:13");
        assert_eq!(results, [16, STORE_NOT_FOUND.into()]);
        api.batch_put_from(store, &items, 3, &mut results).unwrap();
        assert_eq!(last(), "batch_put_from 1 k:0x1000:16 nobody:0x2000:13 x3 0 0 (nil) 0");
        assert_eq!(results, [0, STORE_NO_SPACE.into()]);
        let three = [items[0], items[0], items[0]];
        let error = api.batch_get_into(store, &three, &mut [0; 3]).unwrap_err();
        assert_eq!(error.to_string(), "batch_get_into(3 keys) failed with code -1 (internal error)");
        assert_eq!(api.batch_put_from(store, &three, 1, &mut [0; 3]).unwrap_err().code, STORE_INTERNAL);

        // The header has no such calls.
        let error = api.batch_get_into_multi_buffers(store, &items, &mut results).unwrap_err();
        assert!(error.code == NO_CODE && error.message.contains("several buffers"), "{error}");
        assert_eq!(api.batch_put_from_multi_buffers(store, &items, 1, &mut results).unwrap_err().code, NO_CODE);

        assert!(api.is_exist(store, c"k").unwrap());
        assert_eq!(last(), "is_exist 1 k");
        assert!(!api.is_exist(store, c"nobody").unwrap());
        assert_eq!(api.is_exist(store, c"broken").unwrap_err().code, STORE_RPC_FAILED);
        let mut results = [7; 3];
        api.batch_is_exist(store, &[c"k", c"nobody", c"broken"], &mut results).unwrap();
        assert_eq!(last(), "batch_is_exist 1 k nobody broken");
        assert_eq!(results, [1, 0, STORE_RPC_FAILED.into()]);

        assert_eq!(api.get_size(store, c"k").unwrap(), 0x1_0000_0001);
        assert_eq!(api.get_size(store, c"nobody").unwrap_err().code, STORE_NOT_FOUND);
        api.remove(store, c"k", true).unwrap();
        assert_eq!(last(), "remove 1 k 1");
        assert_eq!(api.remove(store, c"leased", false).unwrap_err().code, STORE_HAS_LEASE);
        assert_eq!(last(), "remove 1 leased 0");

        api.destroy(store).unwrap();
        assert_eq!(last(), "destroy 1");
    }
    assert!(api.set_log_level(LogLevel::Error).is_err());
}

#[test]
fn an_incomplete_library_names_what_it_lacks() {
    // SAFETY: what it has is of the C interface's types.
    let error = unsafe { StoreApi::load_from(&Source::Library(fake_mooncake::incomplete_store())) }.unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("no Mooncake Store client could be loaded"), "{text}");
    assert!(text.contains("it lacks mooncake_store_get_size mooncake_store_remove"), "{text}");
    assert!(text.contains("MOONRING_MOONCAKE_STORE to a libmooncake_store.so"), "{text}");
}
