//! Where an engine may be: environment variables, the loader's search path, the set-up folder, Python.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Reason;

/// The folder that `cargo xtask setup` fills: `wheel/` with a pip wheel, `lib/` with the system libraries that it could
/// not install.
const SETUP: &str = ".mooncake";

/// A non-empty environment variable.
pub(crate) fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The nearest set-up folder at or above the current directory or the running executable.
pub(crate) fn setup_folder() -> Result<PathBuf, Reason> {
    let starts: Vec<PathBuf> = [env::current_dir(), env::current_exe()].into_iter().flatten().collect();
    starts
        .iter()
        .flat_map(|start| start.ancestors())
        .map(|folder| folder.join(SETUP))
        .find(|folder| folder.is_dir())
        .ok_or_else(|| {
            let starts: Vec<String> = starts.iter().map(|s| s.display().to_string()).collect();
            Reason::NotFound(format!("no {SETUP} at or above {}", starts.join(" or ")))
        })
}

/// The folder that holds the `mooncake` package of the Python on `PATH`.
pub(crate) fn python_package() -> Result<PathBuf, Reason> {
    // The current directory is taken off Python's path: a folder there that is called mooncake is no package.
    const FIND: &str = "import sys, importlib.util
sys.path[:] = [p for p in sys.path if p]
spec = importlib.util.find_spec('mooncake')
print(*(spec.submodule_search_locations or []) if spec else '', sep='\\n', end='')";
    let output = Command::new("python3")
        .args(["-c", FIND])
        .output()
        .map_err(|error| Reason::NotFound(format!("python3 does not start: {error}")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let last = said.trim_end().lines().last().unwrap_or("");
        return Err(Reason::NotFound(format!("python3 ended with {}: {last}", output.status)));
    }
    let first = output.stdout.split(|&byte| byte == b'\n').next().unwrap_or(&[]);
    let package = PathBuf::from(OsString::from_vec(first.to_vec()));
    match package.parent() {
        Some(folder) => Ok(folder.to_path_buf()),
        None => Err(Reason::NotFound("it has no package called mooncake".into())),
    }
}

/// A file of that name in `folder` or, a few levels deep, below it.
pub(crate) fn file_below(folder: &Path, name: &OsStr) -> Option<PathBuf> {
    // usr/lib/x86_64-linux-gnu/libnuma.so.1 in an unpacked Debian package is at depth 4.
    fn search(folder: &Path, name: &OsStr, depth: u32) -> Option<PathBuf> {
        let here = folder.join(name);
        if here.is_file() {
            return Some(here);
        }
        if depth == 0 {
            return None;
        }
        folder
            .read_dir()
            .ok()?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.is_dir())
            .find_map(|path| search(&path, name, depth - 1))
    }
    search(folder, name, 4)
}
