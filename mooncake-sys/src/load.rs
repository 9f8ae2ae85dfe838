//! From the places where an engine or a Store client may be to an [`Api`] or a [`StoreApi`].

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::api::Api;
use crate::error::{Attempt, LoadError, Reason, Wanted};
use crate::find;
use crate::image::{self, Image};
use crate::store::StoreApi;
use crate::version::{self, Version};

/// Names a `libtransfer_engine.so` that exports the C interface.
pub const LIBRARY_VAR: &str = "MOONRING_TRANSFER_ENGINE";

/// Names a `libmooncake_store.so`, which exports the Store's C interface.
pub const STORE_LIBRARY_VAR: &str = "MOONRING_MOONCAKE_STORE";

/// Names a folder with a pip wheel's contents: `mooncake/` and a `*.dist-info` folder. An environment's `site-packages` is
/// one. Both the engine and the Store client are taken from it.
pub const WHEEL_VAR: &str = "MOONRING_MOONCAKE_WHEEL";

pub(crate) static ENGINE: Wanted = Wanted {
    name: "Transfer Engine",
    variable: LIBRARY_VAR,
    library: "libtransfer_engine.so",
    module: "mooncake/engine.so",
};

static STORE: Wanted = Wanted {
    name: "Store client",
    variable: STORE_LIBRARY_VAR,
    library: "libmooncake_store.so",
    module: "mooncake/store.so",
};

/// Turns a loaded image into the table of its functions. A wheel has a version, a library has none.
type Make<T> = fn(Image, &Path, Option<Version>) -> Result<&'static T, Reason>;

/// A place to load an engine, or a Store client, from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A library that exports the C interface. A bare name is looked up on the loader's search path.
    Library(PathBuf),
    /// A folder with a pip wheel's contents, as for [`WHEEL_VAR`].
    Wheel(PathBuf),
}

static LOADED: Mutex<Option<&'static Api>> = Mutex::new(None);
static ADOPTED: Mutex<Option<&'static Api>> = Mutex::new(None);
static STORE_LOADED: Mutex<Option<&'static StoreApi>> = Mutex::new(None);

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
        once(&LOADED, || search(&ENGINE, Api::make))
    }

    /// Loads an engine library from one place. Later calls for that place answer the same `Api`.
    ///
    /// # Safety
    ///
    /// The file must be what `source` says it is: its initialisers run now, and its functions are called with the types
    /// that Mooncake's have.
    pub unsafe fn load_from(source: &Source) -> Result<&'static Api, LoadError> {
        // SAFETY: as promised by the caller.
        unsafe { from(&ENGINE, source, Api::make) }
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
                let loaded = if name.starts_with(ENGINE.library) {
                    image::mapped(&path).and_then(|image| Api::make(image, &path, None))
                } else if path.ends_with(ENGINE.module) {
                    let folder = path.ancestors().nth(2).unwrap_or(Path::new(""));
                    version::of_wheel(folder)
                        .and_then(|v| image::mapped(&path).and_then(|image| Api::make(image, &path, Some(v))))
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
                [] => {
                    let Wanted { library, module, .. } = ENGINE;
                    Reason::NotFound(format!("none of {total} is a {library} or a {module} that can be used"))
                }
                _ => {
                    let paths: Vec<String> = found.iter().map(|a| a.path().display().to_string()).collect();
                    Reason::Ambiguous(paths.join(", "))
                }
            };
            attempts.push(Attempt { what: "the images mapped in this process".into(), reason });
            Err(LoadError::new(&ENGINE, attempts))
        })
    }
}

impl StoreApi {
    /// Loads a Store client, once for the process: later calls answer the same `StoreApi`. Looks where [`Api::load`] looks,
    /// for `libmooncake_store.so` ([`STORE_LIBRARY_VAR`]) or the wheel's `mooncake/store.so`. As there, what a variable names
    /// decides, and loading runs the library's initialisers.
    pub fn load() -> Result<&'static StoreApi, LoadError> {
        once(&STORE_LOADED, || search(&STORE, StoreApi::make))
    }

    /// Loads a Store client from one place. Later calls for that place answer the same `StoreApi`.
    ///
    /// # Safety
    ///
    /// The file must be what `source` says it is: its initialisers run now, and its functions are called with the types
    /// that Mooncake's have.
    pub unsafe fn load_from(source: &Source) -> Result<&'static StoreApi, LoadError> {
        // SAFETY: as promised by the caller.
        unsafe { from(&STORE, source, StoreApi::make) }
    }
}

/// Tables of functions. They live for ever, as the images that they belong to do: an image that is loaded again by the same path
/// has its table already.
pub(crate) struct Tables<T: 'static>(Mutex<Vec<&'static T>>);

impl<T> Tables<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    pub(crate) fn get(
        &self,
        is_it: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T, Reason>,
    ) -> Result<&'static T, Reason> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(table) = made.iter().find(|table| is_it(table)) {
            return Ok(table);
        }
        let table = Box::leak(Box::new(make()?));
        made.push(table);
        Ok(table)
    }
}

fn once<T>(
    place: &Mutex<Option<&'static T>>,
    make: impl FnOnce() -> Result<&'static T, LoadError>,
) -> Result<&'static T, LoadError> {
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(api) = *place {
        return Ok(api);
    }
    let api = make()?;
    *place = Some(api);
    Ok(api)
}

/// # Safety
///
/// As for [`Api::load_from`].
unsafe fn from<T>(wanted: &'static Wanted, source: &Source, make: Make<T>) -> Result<&'static T, LoadError> {
    let (what, loaded) = match source {
        // SAFETY: as promised by the caller.
        Source::Library(path) => (path.clone(), unsafe { library(path, make) }),
        // SAFETY: as promised by the caller.
        Source::Wheel(folder) => (folder.join(wanted.module), unsafe { wheel(folder, wanted, make) }),
    };
    loaded.map_err(|reason| {
        let what = what.display().to_string();
        LoadError::new(wanted, vec![Attempt { what, reason }])
    })
}

fn search<T>(wanted: &'static Wanted, make: Make<T>) -> Result<&'static T, LoadError> {
    let mut attempts = Vec::new();
    let mut named = false;
    for (variable, is_wheel) in [(wanted.variable, false), (WHEEL_VAR, true)] {
        let Some(path) = find::variable(variable) else {
            attempts.push(Attempt { what: variable.into(), reason: Reason::NotSet });
            continue;
        };
        named = true;
        // SAFETY: whoever sets these variables names what they are for, as `load` says.
        let loaded = unsafe { if is_wheel { wheel(&path, wanted, make) } else { library(&path, make) } };
        match loaded {
            Ok(api) => return Ok(api),
            Err(reason) => attempts.push(Attempt { what: format!("{variable}={}", path.display()), reason }),
        }
    }
    if named {
        return Err(LoadError::new(wanted, attempts));
    }

    // SAFETY: a library of that name on the search path is Mooncake's, as it would be for a linked program.
    match unsafe { library(Path::new(wanted.library), make) } {
        Ok(api) => return Ok(api),
        Err(reason) => {
            attempts.push(Attempt { what: format!("{} on the loader's search path", wanted.library), reason })
        }
    }

    type Find = fn() -> Result<PathBuf, Reason>;
    let places: [(&str, Find); 2] = [
        ("the set-up folder", || find::setup_folder().map(|folder| folder.join("wheel"))),
        ("the mooncake package of python3", find::python_package),
    ];
    for (place, find) in places {
        let mut what = place.to_owned();
        let loaded = find().and_then(|folder| {
            what = format!("{place}, {}", folder.join(wanted.module).display());
            // SAFETY: what `cargo xtask setup` or pip installed under that name is Mooncake's.
            unsafe { wheel(&folder, wanted, make) }
        });
        match loaded {
            Ok(api) => return Ok(api),
            Err(reason) => attempts.push(Attempt { what, reason }),
        }
    }
    Err(LoadError::new(wanted, attempts))
}

/// # Safety
///
/// As for [`Api::load_from`].
unsafe fn library<T>(path: &Path, make: Make<T>) -> Result<&'static T, Reason> {
    // SAFETY: as promised by the caller.
    let image = unsafe { image::load(path, &[]) }?;
    make(image, path, None)
}

/// # Safety
///
/// As for [`Api::load_from`].
unsafe fn wheel<T>(folder: &Path, wanted: &Wanted, make: Make<T>) -> Result<&'static T, Reason> {
    let module = folder.join(wanted.module);
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
    make(image, &module, Some(version))
}
