//! What can go wrong: loading ([`LoadError`]) and calling ([`CallError`]).

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::version;

/// [`CallError::code`]: the engine threw a C++ exception, whose text is the message.
pub const EXCEPTION: i32 = i32::MIN;

/// [`CallError::code`]: the call failed without a code (an engine or a transport that was not made).
pub const NO_CODE: i32 = i32::MIN + 1;

/// A call that the engine did not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct CallError {
    /// The call and what it was about, as in `openSegment("127.0.0.1:16384")`.
    pub call: String,
    /// Mooncake's number: positive from submit, status and free, negative from the others; or [`EXCEPTION`] or [`NO_CODE`].
    pub code: i32,
    /// Mooncake's words, where it has any.
    pub message: String,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_failure(f, &self.call, self.code, code_name(self.code), &self.message)
    }
}

/// Writes what a failed call has to say, with the name that its code has in its library.
pub(crate) fn write_failure(
    f: &mut fmt::Formatter<'_>,
    call: &str,
    code: i32,
    name: Option<&str>,
    message: &str,
) -> fmt::Result {
    write!(f, "{call} failed")?;
    match (code, name) {
        (EXCEPTION, _) => write!(f, " with a C++ exception")?,
        (NO_CODE, _) => {}
        (code, Some(name)) => write!(f, " with code {code} ({name})")?,
        (code, None) => write!(f, " with code {code}")?,
    }
    if !message.is_empty() {
        write!(f, ": {message}")?;
    }
    Ok(())
}

/// What one of Mooncake's codes means. Older calls answer them negated.
pub fn code_name(code: i32) -> Option<&'static str> {
    Some(match code {
        1 | -1 => "invalid argument",
        2 | -2 => "too many requests",
        3 | -3 => "address not registered",
        4 | -4 => "batch busy",
        6 | -6 => "device not found",
        7 | -7 => "address overlapped",
        8 => "transport not supported",
        101 | -101 => "DNS",
        102 | -102 => "socket",
        103 | -103 => "malformed JSON",
        104 | -104 => "handshake rejected",
        200 | -200 => "metadata",
        201 | -201 => "endpoint",
        202 | -202 => "context",
        300 | -300 => "NUMA",
        301 | -301 => "clock",
        302 | -302 => "memory",
        999 | -303 => "not implemented",
        _ => return None,
    })
}

/// No engine, or no Store client, could be loaded: everything that was tried, and what to do. One line each.
#[derive(Debug, thiserror::Error)]
pub struct LoadError {
    wanted: &'static Wanted,
    attempts: Vec<Attempt>,
}

/// What is looked for, and where.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// What it is called in messages.
    pub(crate) name: &'static str,
    /// The environment variable that names a library.
    pub(crate) variable: &'static str,
    /// The library, which exports the C interface.
    pub(crate) library: &'static str,
    /// The module of a wheel.
    pub(crate) module: &'static str,
}

/// One thing that was tried.
#[derive(Debug)]
pub struct Attempt {
    /// What: a path, or the name of a place to look at.
    pub what: String,
    /// Why it did not do.
    pub reason: Reason,
}

/// Why something that was tried did not do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Reason {
    /// The environment variable is not set.
    #[error("not set")]
    NotSet,
    /// There is nothing at that place.
    #[error("{0}")]
    NotFound(String),
    /// A file or folder cannot be read.
    #[error("{}: {error}", path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The folder has no `mooncake_transfer_engine*.dist-info`, so the version is not known.
    #[error("no mooncake_transfer_engine*.dist-info beside the package tells its version")]
    NoVersion,
    /// Packages of different versions are in the folder.
    #[error("packages of different versions are there ({0}): whose modules are there?")]
    SeveralVersions(String),
    /// The wheel's version is none that this crate knows the layout of and trusts.
    #[error("wheel version {version} is none of those known to work ({})", version::known())]
    UnknownVersion {
        /// The version that was found.
        version: String,
    },
    /// A library that the file needs is not on this system.
    #[error("it needs {library}, which is not installed")]
    MissingLibrary {
        /// The library's name.
        library: String,
    },
    /// The wheel needs a symbol of Python that the stand-in for Python does not have.
    #[error("it needs Python's {symbol}, which the stand-in for Python lacks: no known wheel needs that")]
    PythonSymbol {
        /// The symbol.
        symbol: String,
    },
    /// The library does not have what this crate calls.
    #[error("it lacks {0}")]
    MissingSymbols(String),
    /// More than one engine is mapped.
    #[error("more than one engine is mapped in this process: {0}")]
    Ambiguous(String),
    /// The loader refused the file.
    #[error("{0}")]
    Loader(String),
    /// The stand-in for Python could not be loaded.
    #[error("the stand-in for Python's symbols could not be loaded: {0}")]
    PythonStub(String),
}

impl LoadError {
    pub(crate) fn new(wanted: &'static Wanted, attempts: Vec<Attempt>) -> Self {
        Self { wanted, attempts }
    }

    /// What was tried, in order.
    pub fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wanted { name, variable, library, module } = self.wanted;
        write!(f, "no Mooncake {name} could be loaded. Tried:")?;
        for Attempt { what, reason } in &self.attempts {
            write!(f, "\n  - {what}: {reason}")?;
        }
        write!(f, "\nTo get one:")?;
        for Attempt { reason, .. } in &self.attempts {
            match reason {
                Reason::MissingLibrary { library } => write!(f, "\n  - {}", provider(library))?,
                Reason::UnknownVersion { .. } => {
                    write!(f, "\n  - pip install mooncake-transfer-engine-non-cuda=={}", version::newest())?
                }
                _ => {}
            }
        }
        write!(
            f,
            "\n  - cargo xtask setup (in moonring's source tree)\
             \n  - or set {} to a folder with a pip wheel's {module} and *.dist-info\
             \n  - or set {variable} to a {library} that exports the C interface",
            crate::WHEEL_VAR
        )
    }
}

/// How to get a library that is missing.
fn provider(library: &str) -> String {
    const DEBIAN: &[(&str, &str)] = &[
        ("libibverbs.so", "libibverbs1 libnuma1 libcurl4"),
        ("libnuma.so", "libibverbs1 libnuma1 libcurl4"),
        ("libcurl.so", "libibverbs1 libnuma1 libcurl4"),
        ("libmlx5.so", "ibverbs-providers"),
    ];
    if let Some((_, packages)) = DEBIAN.iter().find(|(name, _)| library.starts_with(name)) {
        return format!("apt-get install {packages}");
    }
    if library.starts_with("libcuda") {
        return format!(
            "install what provides {library} (NVIDIA's driver, or its CUDA runtime), or use the wheel without CUDA, \
             mooncake-transfer-engine-non-cuda"
        );
    }
    format!("install what provides {library}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_error_names_the_call_the_code_and_the_message() {
        let error = |code, message: &str| {
            let call = "submitTransfer(1 request)".into();
            let message = message.into();
            CallError { call, code, message }.to_string()
        };
        assert_eq!(
            error(2, "Exceed the limitation"),
            "submitTransfer(1 request) failed with code 2 (too many requests): Exceed the limitation"
        );
        assert_eq!(error(-5, ""), "submitTransfer(1 request) failed with code -5");
        assert_eq!(error(EXCEPTION, "bad_alloc"), "submitTransfer(1 request) failed with a C++ exception: bad_alloc");
        assert_eq!(error(NO_CODE, ""), "submitTransfer(1 request) failed");
    }

    #[test]
    fn a_load_error_says_what_was_tried_and_what_to_do() {
        let missing = |library: &str| Attempt {
            what: "a wheel".into(),
            reason: Reason::MissingLibrary { library: library.into() },
        };
        let attempts = ["libnuma.so.1", "libmlx5.so.1", "libcudart.so.12", "libother.so.3"].map(missing);
        let text = LoadError::new(&crate::load::ENGINE, attempts.into()).to_string();
        for part in [
            "- a wheel: it needs libnuma.so.1, which is not installed",
            "apt-get install libibverbs1 libnuma1 libcurl4",
            "apt-get install ibverbs-providers",
            "mooncake-transfer-engine-non-cuda",
            "install what provides libother.so.3",
            "cargo xtask setup",
            "MOONRING_MOONCAKE_WHEEL",
            "MOONRING_TRANSFER_ENGINE",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }
}
