//! Mooncake's C interfaces, that of the Transfer Engine ([`transfer_engine_c.h`][h], [`Api`]) and that of the Store's client
//! ([`store_c.h`][s], [`StoreApi`]), loaded at run time. Finds, loads and declares; nothing clever.
//!
//! Nothing of Mooncake is needed to build this crate, only a C++17 compiler: a shim of its own is the one door to the
//! engine, catches C++ exceptions, and makes all sources look the same.
//!
//! ```no_run
//! use mooncake_sys::Api;
//!
//! let api = Api::load()?;
//! let engine = api.create_engine(c"P2PHANDSHAKE", c"127.0.0.1", c"", 0, false)?;
//! // SAFETY: the engine was made by this `Api` and is destroyed last, after which nothing uses it.
//! unsafe {
//!     api.install_transport(engine, c"tcp", std::ptr::null_mut())?;
//!     println!("peers reach this engine as {}", api.local_ip_and_port(engine)?);
//!     api.destroy_engine(engine)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Sources
//!
//! [`Api::load`] takes the first that works:
//!
//! | source | where |
//! | --- | --- |
//! | `libtransfer_engine.so` with the C interface | `MOONRING_TRANSFER_ENGINE` ([`LIBRARY_VAR`]) names the file |
//! | a pip wheel's `mooncake/engine.so` | `MOONRING_MOONCAKE_WHEEL` ([`WHEEL_VAR`]) names the folder that holds `mooncake/` and the `*.dist-info` |
//! | `libtransfer_engine.so` | the loader's search path |
//! | a wheel | `.mooncake/wheel`, filled by `cargo xtask setup`, at or above the current directory or the executable |
//! | a wheel | the `mooncake` package of the `python3` on `PATH` |
//!
//! A variable that is set is a decision: if what it names does not load, that is an error, and no other place is tried. A
//! [`LoadError`] lists all that was tried, each with its reason, and the commands that help. [`Api::adopt`] instead takes the
//! engine library that is mapped in the process already, for engines that Python made.
//!
//! [`StoreApi::load`] looks in the same places: for `libmooncake_store.so`, which `MOONRING_MOONCAKE_STORE`
//! ([`STORE_LIBRARY_VAR`]) names, or for `mooncake/store.so` in the wheel. A Store client makes an engine of its own; both
//! can be loaded in one process.
//!
//! # Wheels
//!
//! A wheel exports no C interface but the C++ class behind it, whose types changed over time and do not tell their layout. So
//! the wheel's version decides, and only versions that this crate was run with are accepted: 0.3.12, 0.3.12.post1, 0.3.13
//! and 0.3.13.post1, for any Python from 3.10 to 3.13. (Older ones report a WRITE over TCP as complete before the target has
//! applied it.) The package may be `mooncake-transfer-engine-non-cuda` or one of those for CUDA, `mooncake-transfer-engine`
//! and `mooncake-transfer-engine-cuda13`, which export the same functions and have not been run. Before 0.3.13.post1 the
//! `store.so` of the CPU package too needs the CUDA runtime. They need the system's `libibverbs.so.1`, `libnuma.so.1` and
//! `libcurl.so.4` (`apt-get install libibverbs1 libnuma1 libcurl4`); what the system lacks is also looked for in
//! `.mooncake/lib`, and in `nvidia/` beside the wheel.
//!
//! `engine.so` is a Python module. In a process without Python, a stand-in for Python's symbols is loaded first, for every
//! library in the process to see. **Such a process can never load Python.** Where Python is there, its own symbols are used.
//! Nothing is ever unloaded.
//!
//! # What is unsafe
//!
//! Nearly all of it: engines and batches are bare addresses, registered memory is written by peers at any time, and
//! transfers go on after everybody has lost interest. Each method of [`Api`] says what its caller has to promise. There is
//! no authentication: whoever reaches an engine's port reads and writes what is registered with it.
//!
//! Left out of the headers: notifications and file buffers; values by copy, health, and removing by pattern. The Store's calls
//! with several buffers for a key are in no header, and in the wheels only.
//!
//! # Log
//!
//! Mooncake logs through glog to standard error; [`Api::set_log_level`] quietens it.
//!
//! [h]: https://github.com/kvcache-ai/Mooncake/blob/main/mooncake-transfer-engine/include/transfer_engine_c.h
//! [s]: https://github.com/kvcache-ai/Mooncake/blob/main/mooncake-store/include/store_c.h

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("Mooncake, and with it mooncake-sys, is for 64-bit Linux");

mod api;
mod error;
mod find;
mod image;
mod load;
mod shim;
mod store;
mod types;
mod version;

pub use api::{Api, Grouping, LogLevel};
pub use error::{Attempt, CallError, EXCEPTION, LoadError, NO_CODE, Reason, code_name};
pub use load::{LIBRARY_VAR, STORE_LIBRARY_VAR, Source, WHEEL_VAR};
pub use store::*;
pub use types::*;
