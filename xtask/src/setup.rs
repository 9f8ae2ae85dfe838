//! `cargo xtask setup`: a real Mooncake in the project's own `.mooncake` folder.
//!
//! | path | what |
//! | --- | --- |
//! | `wheel/` | the unpacked CPU wheel (`mooncake/engine.so`, `mooncake/mooncake_master`, `*.dist-info`) |
//! | `wheel-cuda/` | the CUDA 12 wheel and its runtime, where a CUDA driver is present |
//! | `lib/` | system libraries, where they could not be installed |
//! | `tmp/` | what an unfinished set-up left; removed by the next one |

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::pins::Pin;
use crate::{system, wheel};

/// Fetches what is missing below `.mooncake`; does nothing, quickly, when all is there.
pub fn setup() -> Result<()> {
    let arch = std::env::consts::ARCH;
    if !cfg!(target_os = "linux") || !matches!(arch, "x86_64" | "aarch64") {
        bail!("Mooncake's wheels exist for Linux on x86_64 and aarch64, not for {} on {arch}", std::env::consts::OS);
    }
    let home = home();
    let _alone = lock(&home)?;
    make(&home, "wheel", &["mooncake-transfer-engine-non-cuda"], Libraries::Ensured)?;
    if has_cuda_driver() {
        make(&home, "wheel-cuda", &CUDA, Libraries::Ensured)?;
    }
    Ok(())
}

const CUDA: [&str; 2] = ["mooncake-transfer-engine", "nvidia-cuda-runtime-cu12"];

/// The set-up folder.
pub fn home() -> PathBuf {
    crate::project_root().join(".mooncake")
}

/// The CUDA wheel's folder, fetched if it is missing, on any machine: without a driver it cannot be loaded, but be packed.
pub fn cuda_wheel() -> Result<PathBuf> {
    let home = home();
    let _alone = lock(&home)?;
    make(&home, "wheel-cuda", &CUDA, Libraries::Ignored)?;
    Ok(home.join("wheel-cuda"))
}

/// Two set-ups at once would unpack into each other's scratch folder. The lock ends with the file, or the process.
fn lock(home: &Path) -> Result<File> {
    fs::create_dir_all(home).with_context(|| format!("could not make {}", home.display()))?;
    let path = home.join("lock");
    let lock = File::create(&path).with_context(|| format!("could not make {}", path.display()))?;
    lock.lock().with_context(|| format!("could not lock {}", path.display()))?;
    Ok(lock)
}

/// Whether the system libraries that a wheel needs are seen to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Libraries {
    Ensured,
    Ignored,
}

fn make(home: &Path, name: &str, packages: &[&str], libraries: Libraries) -> Result<()> {
    let folder = home.join(name);
    let pins = packages.iter().map(|name| Pin::find(name)).collect::<Result<Vec<_>>>()?;
    let scratch = home.join("tmp");
    if scratch.exists() {
        fs::remove_dir_all(&scratch)?;
    }
    fs::create_dir(&scratch)?;
    let fetched = wheel::ensure(&folder, &pins, &scratch)?;
    let linked = libraries == Libraries::Ensured && system::ensure(&folder, home, &scratch)?;
    fs::remove_dir_all(&scratch)?;
    if fetched || linked {
        eprintln!("Mooncake {} is set up in {}", pins[0].version, folder.display());
    }
    Ok(())
}

fn has_cuda_driver() -> bool {
    // SAFETY: loading the CUDA driver runs its initialisers, which any CUDA program lets them do; nothing
    // of it is called and no symbol outlives the library.
    unsafe { libloading::Library::new("libcuda.so.1") }.is_ok()
}
