//! What a Rust extension of a Python program does with an engine that Python made: adopt it, and transfer with it. The
//! test `python` loads this library into Python and calls it. Answers what went wrong, or null.

use std::error::Error;
use std::ffi::{CString, c_char, c_void};
use std::fs;
use std::ptr::{self, NonNull};

use mooncake_sys::{Api, Grouping, OPCODE_WRITE, STATUS_PENDING, StoreApi, TransferEngine, TransferRequest};

/// Loads an engine and a Store client beside Python.
#[unsafe(no_mangle)]
pub extern "C" fn load() -> *mut c_char {
    answer(|| {
        Api::load()?;
        StoreApi::load()?;
        if fs::read_to_string("/proc/self/maps")?.contains("moonring_pystub") {
            return Err("the stand-in for Python was loaded into Python".into());
        }
        Ok(())
    })
}

/// Writes from one of Python's engines to the other.
#[unsafe(no_mangle)]
pub extern "C" fn adopt(from: *mut TransferEngine, to: *mut TransferEngine) -> *mut c_char {
    answer(|| {
        let api = Api::adopt()?;
        let from = NonNull::new(from).ok_or("no engine")?;
        let to = NonNull::new(to).ok_or("no engine")?;
        let (source, mut target) = (vec![7u8; 4096], vec![0u8; 4096]);
        let source_at = source.as_ptr().cast::<c_void>().cast_mut();
        let target_at = target.as_mut_ptr().cast::<c_void>();
        // SAFETY: the script keeps both engines until this returns; the memory is unregistered, with no transfer left, before
        // it is looked at and freed.
        let status = unsafe {
            api.register_local_memory(from, source_at, 4096, c"cpu:0", true)?;
            api.register_local_memory(to, target_at, 4096, c"cpu:0", true)?;
            let name = CString::new(api.local_ip_and_port(to)?)?;
            let request = TransferRequest {
                opcode: OPCODE_WRITE,
                source: source_at,
                target_id: api.open_segment(from, &name)?,
                file_id: 0,
                target_offset: target_at as u64,
                length: 4096,
            };
            let batch = api.allocate_batch_id(from, 1)?;
            api.submit_transfer(from, batch, &[request], Grouping::None)?;
            let status = loop {
                let status = api.get_transfer_status(from, batch, 0)?;
                if status.status > STATUS_PENDING {
                    break status.status;
                }
            };
            api.free_batch_id(from, batch)?;
            api.unregister_local_memory(from, source_at)?;
            api.unregister_local_memory(to, target_at)?;
            status
        };
        if target != source {
            return Err(format!("the bytes did not arrive; status {status}").into());
        }
        Ok(())
    })
}

fn answer(f: impl FnOnce() -> Result<(), Box<dyn Error>>) -> *mut c_char {
    match f() {
        Ok(()) => ptr::null_mut(),
        // Never freed: the process ends soon.
        Err(error) => CString::new(error.to_string()).unwrap_or_default().into_raw(),
    }
}
