//! From the places where an engine may be to an [`Api`].

use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use crate::api::{Api, Text};
use crate::error::{Attempt, LoadError, NO_CODE, Reason};
use crate::image::{self, Image};
use crate::version::{self, Version};
use crate::{find, shim};

/// Names a `libtransfer_engine.so` that exports the C interface.
pub const LIBRARY_VAR: &str = "MOONRING_TRANSFER_ENGINE";

/// Names a folder with a pip wheel's contents: `mooncake/engine.so` and a `*.dist-info` folder. An environment's
/// `site-packages` is one.
pub const WHEEL_VAR: &str = "MOONRING_MOONCAKE_WHEEL";

const LIBRARY: &str = "libtransfer_engine.so";
const MODULE: &str = "mooncake/engine.so";

/// A place to load an engine from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A library that exports the C interface. A bare name is looked up on the loader's search path.
    Library(PathBuf),
    /// A folder with a pip wheel's contents, as for [`WHEEL_VAR`].
    Wheel(PathBuf),
}

static LOADED: Mutex<Option<&'static Api>> = Mutex::new(None);
static ADOPTED: Mutex<Option<&'static Api>> = Mutex::new(None);

impl Api {
    /// Loads an engine library, once for the process: later calls answer the same `Api`. The first of these that works:
    ///
    /// 1. what [`LIBRARY_VAR`] and [`WHEEL_VAR`] name; if either is set, nothing else is tried
    /// 2. `libtransfer_engine.so` on the loader's search path
    /// 3. the wheel that `cargo xtask setup` put into `.mooncake/wheel`, at or above the current directory or the executable
    /// 4. the `mooncake` package of the `python3` on `PATH`
    ///
    /// Loading runs the library's initialisers, as it would if the program were linked to it: those who can set the
    /// environment variables choose what code that is.
    pub fn load() -> Result<&'static Api, LoadError> {
        once(&LOADED, search)
    }

    /// Loads an engine library from one place. Unlike [`load`](Self::load) this makes a new `Api` each time, a small leak:
    /// keep it.
    ///
    /// # Safety
    ///
    /// The file must be what `source` says it is: its initialisers run now, and its functions are called with the types
    /// that Mooncake's have.
    pub unsafe fn load_from(source: &Source) -> Result<&'static Api, LoadError> {
        let (what, loaded) = match source {
            // SAFETY: as promised by the caller.
            Source::Library(path) => (path.clone(), unsafe { library(path) }),
            // SAFETY: as promised by the caller.
            Source::Wheel(folder) => (folder.join(MODULE), unsafe { wheel(folder) }),
        };
        loaded.map_err(|reason| {
            let what = what.display().to_string();
            LoadError::new(vec![Attempt { what, reason }])
        })
    }

    /// Takes the functions from an engine library that is mapped in this process already, because Python imported it or
    /// somebody linked to it. For engines that were made there: call their functions and no other copy's. Loads nothing.
    pub fn adopt() -> Result<&'static Api, LoadError> {
        once(&ADOPTED, || {
            let images = image::all_mapped();
            let total = images.len();
            let mut attempts = Vec::new();
            let mut found: Vec<&'static Api> = Vec::new();
            for path in images {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let loaded = if name.starts_with(LIBRARY) {
                    image::mapped(&path).and_then(|image| from_library(image, &path))
                } else if path.ends_with(MODULE) {
                    let folder = path.ancestors().nth(2).unwrap_or(Path::new(""));
                    version::of_wheel(folder)
                        .and_then(|v| image::mapped(&path).and_then(|image| from_wheel(image, &path, v)))
                } else {
                    continue;
                };
                match loaded {
                    Ok(api) => found.push(api),
                    Err(reason) => attempts.push(Attempt { what: path.display().to_string(), reason }),
                }
            }
            let reason = match found[..] {
                [api] => return Ok(api),
                [] => Reason::NotFound(format!("none of {total} is a {LIBRARY} or a {MODULE} that can be used")),
                _ => {
                    let paths: Vec<String> = found.iter().map(|a| a.path().display().to_string()).collect();
                    Reason::Ambiguous(paths.join(", "))
                }
            };
            attempts.push(Attempt { what: "the images mapped in this process".into(), reason });
            Err(LoadError::new(attempts))
        })
    }
}

fn once(
    place: &Mutex<Option<&'static Api>>,
    make: impl FnOnce() -> Result<&'static Api, LoadError>,
) -> Result<&'static Api, LoadError> {
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(api) = *place {
        return Ok(api);
    }
    let api = make()?;
    *place = Some(api);
    Ok(api)
}

fn search() -> Result<&'static Api, LoadError> {
    let mut attempts = Vec::new();
    let mut named = false;
    for (variable, is_wheel) in [(LIBRARY_VAR, false), (WHEEL_VAR, true)] {
        let Some(path) = find::variable(variable) else {
            attempts.push(Attempt { what: variable.into(), reason: Reason::NotSet });
            continue;
        };
        named = true;
        // SAFETY: whoever sets these variables names an engine, as `Api::load` says.
        let loaded = unsafe { if is_wheel { wheel(&path) } else { library(&path) } };
        match loaded {
            Ok(api) => return Ok(api),
            Err(reason) => attempts.push(Attempt { what: format!("{variable}={}", path.display()), reason }),
        }
    }
    if named {
        return Err(LoadError::new(attempts));
    }

    // SAFETY: a library of that name on the search path is Mooncake's, as it would be for a linked program.
    match unsafe { library(Path::new(LIBRARY)) } {
        Ok(api) => return Ok(api),
        Err(reason) => attempts.push(Attempt { what: format!("{LIBRARY} on the loader's search path"), reason }),
    }

    type Find = fn() -> Result<PathBuf, Reason>;
    let places: [(&str, Find); 2] = [
        ("the set-up folder", || find::setup_folder().map(|folder| folder.join("wheel"))),
        ("the mooncake package of python3", find::python_package),
    ];
    for (place, find) in places {
        let mut what = place.to_owned();
        let loaded = find().and_then(|folder| {
            what = format!("{place}, {}", folder.join(MODULE).display());
            // SAFETY: what `cargo xtask setup` or pip installed under that name is Mooncake's.
            unsafe { wheel(&folder) }
        });
        match loaded {
            Ok(api) => return Ok(api),
            Err(reason) => attempts.push(Attempt { what, reason }),
        }
    }
    Err(LoadError::new(attempts))
}

/// # Safety
///
/// As for [`Api::load_from`].
unsafe fn library(path: &Path) -> Result<&'static Api, Reason> {
    // SAFETY: as promised by the caller.
    let image = unsafe { image::load(path, &[]) }?;
    from_library(image, path)
}

/// # Safety
///
/// As for [`Api::load_from`].
unsafe fn wheel(folder: &Path) -> Result<&'static Api, Reason> {
    let module = folder.join(MODULE);
    if !module.is_file() {
        return Err(Reason::NotFound(format!("there is no {}", module.display())));
    }
    // Before anything of it is loaded: an unknown wheel must not get that far.
    let version = version::of_wheel(folder)?;
    image::provide_python()?;
    // What set-up could not install, and the CUDA runtime's wheels, which lie beside the engine's.
    let mut helpers = vec![folder.join("nvidia")];
    if let Ok(setup) = find::setup_folder() {
        helpers.push(setup.join("lib"));
    }
    // SAFETY: as promised by the caller.
    let image = unsafe { image::load(&module, &helpers) }?;
    from_wheel(image, &module, version)
}

fn from_library(image: Image, path: &Path) -> Result<&'static Api, Reason> {
    make(image, path, None)
}

fn from_wheel(image: Image, module: &Path, version: Version) -> Result<&'static Api, Reason> {
    make(image, module, Some(version))
}

fn make(image: Image, path: &Path, wheel: Option<Version>) -> Result<&'static Api, Reason> {
    let request_bytes = wheel.as_ref().map_or(0, |version| version.request_bytes);
    let mut source = ptr::null_mut();
    let mut text = Text::new();
    // SAFETY: the handle is a loaded image's, and `text` has the room that it says.
    let code = unsafe {
        let (at, capacity): (*mut c_char, usize) = text.room();
        shim::moonring_source(image.handle(), request_bytes, &mut source, at, capacity)
    };
    match code {
        0 => Ok(Box::leak(Box::new(Api::new(source, image, path.to_path_buf(), wheel)))),
        NO_CODE => Err(Reason::MissingSymbols(text.read())),
        _ => Err(Reason::Loader(text.read())),
    }
}
