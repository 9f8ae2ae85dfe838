//! Loading a shared object, with what it needs: system libraries that lie in a folder of their own, and Python's symbols.

use std::ffi::{CStr, OsStr, OsString, c_int, c_void};
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, PoisonError};

use libloading::Error;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use crate::error::Reason;
use crate::find;

/// A loaded shared object. It is never unloaded: an engine has threads, and they run its code.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Image(*mut c_void);

impl Image {
    /// For `dlsym`.
    pub(crate) fn handle(self) -> *mut c_void {
        self.0
    }

    fn keep(library: Library) -> Self {
        Self(library.into_raw())
    }
}

/// Loads `path`, and from `folders` what it needs and the system does not have.
///
/// # Safety
///
/// The initialisers of `path` and of what it needs run.
pub(crate) unsafe fn load(path: &Path, folders: &[PathBuf]) -> Result<Image, Reason> {
    // SAFETY: as promised by the caller.
    unsafe { load_with(path, folders, &mut Vec::new()) }
}

/// `helped`: the libraries taken from `folders` so far, so that two that need each other end in an error.
unsafe fn load_with(path: &Path, folders: &[PathBuf], helped: &mut Vec<String>) -> Result<Image, Reason> {
    loop {
        // Everything is bound now, so that a symbol that is missing is an error here and not the process's end later.
        // SAFETY: the caller answers for the initialisers.
        let text = match unsafe { open(path, RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => return Ok(Image::keep(library)),
            Err(text) => text,
        };
        let Some(library) = missing_library(&text, path) else {
            return Err(match undefined_python_symbol(&text) {
                Some(symbol) => Reason::PythonSymbol { symbol: symbol.into() },
                None => Reason::Loader(text),
            });
        };
        let library = library.to_owned();
        let found = folders.iter().find_map(|folder| find::file_below(folder, OsStr::new(&library)));
        match found {
            Some(found) if !helped.contains(&library) => {
                helped.push(library);
                // Loaded by path, it satisfies whoever needs it by name.
                // SAFETY: it is one of the things that `path` needs.
                unsafe { load_with(&found, folders, helped)? };
            }
            _ => return Err(Reason::MissingLibrary { library }),
        }
    }
}

/// # Safety
///
/// The initialisers of `path` run.
unsafe fn open(path: &Path, flags: c_int) -> Result<Library, String> {
    // SAFETY: as promised by the caller.
    unsafe { Library::open(Some(path), flags) }.map_err(|error| match error {
        Error::DlOpen { source } => source.to_string(),
        other => format!("{}: {other}", path.display()),
    })
}

/// The library that the loader says it cannot find. Its messages start with the file that they are about, which for a
/// needed library is a bare name; the rest may be translated.
fn missing_library<'a>(text: &'a str, path: &Path) -> Option<&'a str> {
    let (about, _) = text.split_once(": ")?;
    let bare = about.contains(".so") && !about.contains(['/', ' ']);
    (bare && Path::new(about) != path).then_some(about)
}

fn undefined_python_symbol(text: &str) -> Option<&str> {
    let symbol = text.rsplit([' ', ':']).next()?;
    (symbol.starts_with("Py") || symbol.starts_with("_Py")).then_some(symbol)
}

/// An image that is mapped in this process already.
pub(crate) fn mapped(path: &Path) -> Result<Image, Reason> {
    // SAFETY: RTLD_NOLOAD maps nothing and so runs nothing.
    unsafe { open(path, RTLD_NOW | libc::RTLD_NOLOAD) }.map(Image::keep).map_err(Reason::Loader)
}

/// The paths of all images mapped in this process. The executable's own is empty and left out.
pub(crate) fn all_mapped() -> Vec<PathBuf> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _size: usize, paths: *mut c_void) -> c_int {
        // SAFETY: `paths` is what `all_mapped` passed; `info` and the name in it are valid during this call.
        let (paths, name) = unsafe { (&mut *paths.cast::<Vec<PathBuf>>(), (*info).dlpi_name) };
        if !name.is_null() {
            // SAFETY: as above.
            let name = unsafe { CStr::from_ptr(name) }.to_bytes();
            if !name.is_empty() {
                paths.push(PathBuf::from(OsString::from_vec(name.to_vec())));
            }
        }
        0
    }
    let mut paths: Vec<PathBuf> = Vec::new();
    // SAFETY: `collect` has the type that is asked for, does not unwind, and `paths` lives through the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut paths).cast()) };
    paths
}

/// Sees to it that Python's symbols are there for a wheel: Python's own where it is in the process, else the stand-in.
pub(crate) fn provide_python() -> Result<(), Reason> {
    if python_is_visible() {
        return Ok(());
    }
    let is_python = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libpython3"));
    if let Some(python) = all_mapped().into_iter().find(is_python) {
        // It was loaded for its loader's eyes only; modules cannot work with it until it is promoted.
        // SAFETY: RTLD_NOLOAD maps nothing and so runs nothing.
        let library = unsafe { open(&python, RTLD_NOW | RTLD_GLOBAL | libc::RTLD_NOLOAD) };
        mem::forget(library.map_err(Reason::Loader)?);
        return Ok(());
    }
    let mut loaded = STUB_LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*loaded {
        mem::forget(load_stub().map_err(Reason::PythonStub)?);
        *loaded = true;
    }
    Ok(())
}

static STUB_LOADED: Mutex<bool> = Mutex::new(false);

/// Whether a wheel would find the real Python's symbols. The stand-in does not have this one.
fn python_is_visible() -> bool {
    // SAFETY: the symbol is looked up, not used.
    unsafe { Library::this().get::<*const c_void>("Py_IsInitialized") }.is_ok()
}

fn load_stub() -> Result<Library, String> {
    static STUB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libmoonring_pystub.so"));
    let file = memory_file(c"libmoonring_pystub.so", STUB).map_err(|error| error.to_string())?;
    // With the process's id and not `self`: the loader knows an image by this name for ever, and must not take somebody
    // else's /proc/self/fd/3 for it.
    let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
    // SAFETY: the stand-in has no initialisers.
    unsafe { open(Path::new(&path), RTLD_NOW | RTLD_GLOBAL) }
}

/// A file that is nowhere on a disk.
fn memory_file(name: &CStr, contents: &[u8]) -> io::Result<File> {
    // SAFETY: the name ends with a zero.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let mut file = unsafe { File::from_raw_fd(fd) };
    file.write_all(contents)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_a_missing_library_from_other_complaints() {
        let path = Path::new("/w/mooncake/engine.so");
        let missing = |text| missing_library(text, path);
        assert_eq!(
            missing("libnuma.so.1: cannot open shared object file: No such file or directory"),
            Some("libnuma.so.1")
        );
        assert_eq!(missing("libnuma.so.1: Datei nicht gefunden"), Some("libnuma.so.1"));
        assert_eq!(missing("/w/mooncake/engine.so: file too short"), None);
        assert_eq!(missing("/w/mooncake/engine.so: undefined symbol: PyLong_New"), None);
        let bare = "libtransfer_engine.so";
        assert_eq!(missing_library(&format!("{bare}: not there"), Path::new(bare)), None);
    }

    #[test]
    fn tells_a_symbol_of_python() {
        let of = undefined_python_symbol;
        assert_eq!(of("/w/engine.so: undefined symbol: PyNew_Thing"), Some("PyNew_Thing"));
        assert_eq!(of("/w/engine.so: undefined symbol: _Py_New"), Some("_Py_New"));
        assert_eq!(of("/w/engine.so: undefined symbol: ibv_open"), None);
    }
}
