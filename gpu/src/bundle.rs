//! What lies beside this program in a bundle.
//!
//! | path | what |
//! | --- | --- |
//! | `run` | starts this program, with libraries of the bundle where the system lacks them |
//! | `moonring-gpu` | this program |
//! | `bin/` | test programs: each is run whole |
//! | `libfakecuda.so` | the fake driver |
//! | `.mooncake/wheel/` | what the engine without CUDA consists of |
//! | `.mooncake/wheel-cuda/` | what the engine for CUDA 12 consists of, with its CUDA runtime |
//! | `.mooncake/lib/` | system libraries that either needs and a machine may lack |

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use libloading::os::unix::Library;

use crate::device::REAL;

/// The driver by the name that NVIDIA's own has on every machine; `libcuda.so` may be a toolkit's stub.
const DRIVER: &str = "libcuda.so.1";

/// Programs of this run know from their environment where the driver and the engine are.
pub struct Bundle {
    folder: PathBuf,
    real: bool,
}

impl Bundle {
    /// Around the running program. Without a driver, or where a fake one is asked for, that is used.
    pub fn find(fake: bool) -> Result<Bundle> {
        let exe = env::current_exe().context("this program does not know where it is")?;
        let folder = exe.parent().context("this program is in no folder")?.to_owned();
        Ok(Bundle { folder, real: !fake && has_gpu() })
    }

    pub fn is_real(&self) -> bool {
        self.real
    }

    /// The test programs, by name.
    pub fn test_programs(&self) -> Result<Vec<PathBuf>> {
        let folder = self.folder.join("bin");
        if !folder.is_dir() {
            return Ok(Vec::new());
        }
        let mut programs = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
        programs.sort();
        Ok(programs)
    }

    /// This program again, with these arguments.
    pub fn again(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = self.command(&env::current_exe()?);
        command.args(arguments);
        Ok(command)
    }

    /// A program that uses the driver and the engine of this run.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        // A kernel that is loaded at its first launch holds up the context until all streams are idle.
        command.env("CUDA_MODULE_LOADING", "EAGER");
        // Streams share the device's queues, 8 unless told otherwise: one that is held holds up those beside it.
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
        let mut set = |name: &str, path: &Path| {
            if path.exists() {
                command.env(name, path);
            }
        };
        let wheels = self.folder.join(".mooncake");
        if self.real {
            set("MOONRING_MOONCAKE_WHEEL", &wheels.join("wheel-cuda"));
            command.env(REAL, DRIVER);
        } else {
            set("MOONRING_MOONCAKE_WHEEL", &wheels.join("wheel"));
            set("FAKE_CUDA_LIBRARY", &self.folder.join("libfakecuda.so"));
            command.env_remove(REAL);
        }
        command
    }
}

/// Whether this machine has a driver and it finds a device. Asked in this process, which uses the driver for nothing else:
/// its children do.
fn has_gpu() -> bool {
    // SAFETY: opening a CUDA driver runs its initialisers, which may run in any program; the two functions have the
    // signatures of cuda.h.
    unsafe {
        let Ok(library) = Library::new(DRIVER) else { return false };
        let Ok(init) = library.get::<unsafe extern "C" fn(u32) -> u32>(b"cuInit\0") else { return false };
        let Ok(count) = library.get::<unsafe extern "C" fn(*mut i32) -> u32>(b"cuDeviceGetCount\0") else {
            return false;
        };
        let mut devices = 0;
        let found = init(0) == 0 && count(&mut devices) == 0 && devices > 0;
        // It may have started threads.
        std::mem::forget(library);
        found
    }
}
