//! What lies beside this program in a bundle.
//!
//! | path | what |
//! | --- | --- |
//! | `run` | starts this program, with libraries of the bundle where the system lacks them |
//! | `moonring-gpu` | this program |
//! | `bin/` | test programs: each is run whole, or what [`PARTS`] says of it |
//! | `examples/` | the examples that two of them start |
//! | `libfakecuda.so`, `libempty.so`, `fake-mooncake/` | the fake driver, a driver without functions, and a fake engine |
//! | `.mooncake/wheel/` | what the engine without CUDA consists of |
//! | `.mooncake/wheel-cuda/` | what the engine for CUDA 12 consists of, with its CUDA runtime |
//! | `.mooncake/lib/` | system libraries that either needs and a machine may lack |

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::device::REAL;

/// The driver by the name that NVIDIA's own has on every machine; `libcuda.so` may be a toolkit's stub.
const DRIVER: &str = "libcuda.so.1";

/// The parts of test programs that are about CUDA, by what is in the tests' names, where it is not the whole program.
pub const PARTS: [(&str, &[&str]); 3] =
    [("moonring", &["cuda::", "gpu_tests::"]), ("demo", &["cuda"]), ("store_offload", &["cuda"])];

/// Programs of this run know from their environment where the driver and the engine are.
pub struct Bundle {
    folder: PathBuf,
    real: bool,
    /// The engine loads only with the bundle's own system libraries.
    own_libraries: bool,
}

impl Bundle {
    /// Around the running program, with the machine's driver or the fake one.
    pub fn with(real: bool) -> Result<Bundle> {
        let exe = env::current_exe().context("this program does not know where it is")?;
        let folder = exe.parent().context("this program is in no folder")?.to_owned();
        Ok(Bundle { folder, real, own_libraries: false })
    }

    pub fn is_real(&self) -> bool {
        self.real
    }

    /// From now on programs get the bundle's own system libraries in place of the system's, if it has any.
    pub fn use_own_libraries(&mut self) -> bool {
        self.own_libraries = self.libraries().is_dir();
        self.own_libraries
    }

    fn libraries(&self) -> PathBuf {
        self.folder.join(".mooncake/lib")
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
        // With this a launch waits for its kernel, which a held stream never lets run.
        command.env_remove("CUDA_LAUNCH_BLOCKING");
        let mut set = |name: &str, path: &Path| {
            if path.exists() {
                command.env(name, path);
            }
        };
        let wheels = self.folder.join(".mooncake");
        set("MOONRING_MOONCAKE_WHEEL", &wheels.join(if self.real { "wheel-cuda" } else { "wheel" }));
        set("FAKE_CUDA_LIBRARY", &self.folder.join("libfakecuda.so"));
        set("FAKE_CUDA_EMPTY", &self.folder.join("libempty.so"));
        set("FAKE_MOONCAKE", &self.folder.join("fake-mooncake"));
        if self.real {
            command.env(REAL, DRIVER);
        } else {
            command.env_remove(REAL);
        }
        if self.own_libraries {
            let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
            let folders = env::split_paths(&before).chain([self.libraries()]).filter(|f| !f.as_os_str().is_empty());
            if let Ok(joined) = env::join_paths(folders) {
                command.env("LD_LIBRARY_PATH", joined);
            }
        }
        command
    }
}
