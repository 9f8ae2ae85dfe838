//! A real Mooncake Transfer Engine under the ring.
//!
//! ```no_run
//! use moonring::{Region, mooncake};
//! use std::time::Duration;
//!
//! let engine = mooncake::builder("127.0.0.1").build()?;
//! let pages = engine.register(Region::alloc(64 << 20)?)?;
//! println!("peers reach {:?}", pages.info());
//! let peer = engine.open_segment("127.0.0.1:16384", Duration::from_secs(1))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The engine's library is found and loaded by [`mooncake_sys`], which lists the places. Mooncake has no authentication:
//! whoever reaches an engine's port reads and writes what is registered with it.
//!
//! # How transfers end
//!
//! | stage | errno | cause | `detail` | quiet |
//! | --- | --- | --- | --- | --- |
//! | issue | `ENOBUFS` | Mooncake gave no batch | its code | yes |
//! | issue | `EINVAL` | it refused the submit: invalid argument, such as a segment it does not know | 1 | yes |
//! | issue | `EBUSY` | it refused the submit: too many requests | 2 | yes |
//! | issue | `EFAULT` | it refused the submit: address not registered | 3 | yes |
//! | issue | `EOPNOTSUPP` | it refused the submit: no transport for it | 8 | yes |
//! | issue | `EPROTO` | it refused the submit with a C++ exception | [`EXCEPTION`](mooncake_sys::EXCEPTION) | yes |
//! | issue | `EIO` | it refused the submit for another reason | its code | yes |
//! | issue | `ESHUTDOWN` | the engine is closed | 0 | yes |
//! | transfer | `EIO` | the task FAILED: the peer rejected the range, is gone, or was silent for too long | 6 | yes |
//! | transfer | `EFAULT` | the GPU failed the copy of what the task had brought | the `CUresult` | yes |
//! | transfer | `EBADMSG` | the task COMPLETED with a wrong count of bytes | 4 | yes |
//! | transfer | `ETIMEDOUT` | TIMEOUT: given up on, and may go on | 5 | no |
//! | transfer | `EINVAL` | INVALID | 2 | no |
//! | transfer | `ECANCELED` | CANCELED | 3 | no |
//! | transfer | `EPROTO` | a status that this version does not know | the status | no |
//! | transfer | `EREMOTEIO` | the task could not be asked about | the code | no |
//! | transfer | `ENOTRECOVERABLE` | the submit was refused, and this Mooncake cannot say what was started | the code | no |
//!
//! Where it says no, the completion carries `MORE`, and a second one follows when Mooncake says that the task has ended, if
//! ever; until then the region stays registered. With `ENOTRECOVERABLE` only the engine's end does that.

mod driver;
pub(crate) mod env;
mod gpu;
mod transport;

use std::any::Any;
use std::ffi::{CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use mooncake_sys::{Api, CallError, LoadError, TransferEngine};

pub use mooncake_sys::LogLevel;

use crate::Engine;
use crate::thread::Deaf;
use transport::Mooncake;

/// Settings for an engine that peers know by `host`: a name or an address of this machine, without a port.
pub fn builder(host: impl Into<String>) -> Builder {
    Builder {
        host: host.into(),
        protocol: Protocol::default(),
        metadata: Metadata::default(),
        name: None,
        log_level: None,
    }
}

/// Settings of a Mooncake engine, from [`builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    host: String,
    protocol: Protocol,
    metadata: Metadata,
    name: Option<String>,
    log_level: Option<LogLevel>,
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Protocol {
    /// TCP, on any machine.
    #[default]
    Tcp,
    /// RDMA, with the network cards that Mooncake finds. Building fails if it finds none.
    Rdma,
}

/// How engines find each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Metadata {
    /// They ask each other: an engine's name is its address and a port that it picks itself. A peer that restarts has a new
    /// name.
    #[default]
    P2pHandshake,
    /// A metadata server of Mooncake's, by URL, such as `http://10.0.0.1:8080/metadata`.
    Http(String),
    /// An etcd server, by URL, such as `etcd://10.0.0.1:2379`.
    Etcd(String),
    /// A Redis server, by URL, such as `redis://10.0.0.1:6379`: only for a `libtransfer_engine.so` that was built with it.
    /// **One that was not ends the process**; wheels are not, and are refused.
    Redis(String),
}

impl Builder {
    /// How bytes travel; TCP unless set.
    #[must_use]
    pub fn protocol(mut self, protocol: Protocol) -> Builder {
        self.protocol = protocol;
        self
    }

    /// How engines find each other; they ask each other unless set.
    #[must_use]
    pub fn metadata(mut self, metadata: Metadata) -> Builder {
        self.metadata = metadata;
        self
    }

    /// The name that peers open, with a metadata server; the host unless set. It must be the only one of that name. Without
    /// a metadata server the name is not ours to choose, and setting one is an error.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Builder {
        self.name = Some(name.into());
        self
    }

    /// The least important messages that Mooncake writes to standard error, from now on and for the whole process. Unless
    /// set, Mooncake's own setting stays.
    #[must_use]
    pub fn log_level(mut self, level: LogLevel) -> Builder {
        self.log_level = Some(level);
        self
    }

    /// Makes the engine; the first one of the process loads Mooncake. Blocks while it starts, and for the metadata server.
    ///
    /// Over TCP this turns Mooncake's connection pool on, by setting `MC_TCP_ENABLE_CONNECTION_POOL=1` in this process's
    /// environment unless the variable is there. Threads may read the environment meanwhile; one that *changes* it at this
    /// moment may lose its change.
    ///
    /// # Errors
    /// [`BuildError`].
    pub fn build(self) -> Result<Engine, BuildError> {
        let host = check_name("host", &self.host)?;
        let metadata = self.metadata.to_c()?;
        let name = match (&self.name, &self.metadata) {
            (None, _) => host.clone(),
            (Some(name), Metadata::P2pHandshake) => return Err(BuildError::NameNotOurs(name.clone())),
            (Some(name), _) => check_name("name", name)?,
        };
        // Threads inherit the mask of the one that starts them: Mooncake's, and those of the libraries that come with it, which
        // start some when they are loaded.
        let deaf = Deaf::new();
        let api = Api::load()?;
        if let (Metadata::Redis(url), Some(version)) = (&self.metadata, api.wheel_version()) {
            return Err(BuildError::NotInWheel { url: url.clone(), version: version.to_owned() });
        }
        env::enable_pool();
        if let Some(level) = self.log_level {
            api.set_log_level(level)?;
        }
        // Mooncake installs RDMA itself when it has looked for network cards.
        let (protocol, discover) = match self.protocol {
            Protocol::Tcp => (c"tcp", false),
            Protocol::Rdma => (c"rdma", true),
        };
        let engine = api.create_engine(&metadata, &name, &host, 0, discover)?;
        // SAFETY: we have just made the engine, and nobody else knows it.
        let installed = unsafe {
            api.install_transport(engine, protocol, ptr::null_mut()).and_then(|_| api.local_ip_and_port(engine))
        };
        let address = match installed {
            Ok(address) => address,
            Err(error) => {
                // SAFETY: as above, and it is forgotten.
                let _ = unsafe { api.destroy_engine(engine) };
                return Err(error.into());
            }
        };
        drop(deaf);
        let name = match self.metadata {
            Metadata::P2pHandshake => address,
            _ => self.name.unwrap_or(self.host),
        };
        // SAFETY: the engine is live and ours alone.
        let mooncake = unsafe { Mooncake::new(api, engine, name, None) };
        if self.protocol == Protocol::Rdma {
            mooncake.shared.copies.never();
        }
        Ok(Engine::over(Arc::new(mooncake)))
    }
}

impl Metadata {
    /// As Mooncake takes it. A text that it cannot take ends the process there, so it is checked here.
    pub(crate) fn to_c(&self) -> Result<CString, BuildError> {
        let (url, schemes): (&str, &[&str]) = match self {
            Metadata::P2pHandshake => return Ok(c"P2PHANDSHAKE".into()),
            Metadata::Http(url) => (url, &["http", "https"]),
            Metadata::Etcd(url) => (url, &["etcd"]),
            Metadata::Redis(url) => (url, &["redis"]),
        };
        let refuse = |why: &str| BuildError::Metadata { url: url.to_owned(), why: why.to_owned() };
        let rest = url.split_once("://").filter(|(scheme, _)| schemes.contains(scheme));
        let Some((_, rest)) = rest else {
            return Err(refuse(&format!("it must begin with {}://", schemes.join(":// or "))));
        };
        let host = rest.split('/').next().unwrap_or_default();
        if host.is_empty() || host.starts_with(':') {
            return Err(refuse("it names no host"));
        }
        if url.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(refuse("it has white space or control characters in it"));
        }
        CString::new(url).map_err(|_| refuse("it has a zero byte in it"))
    }
}

/// A host's or an engine's name, as Mooncake takes it.
pub(crate) fn check_name(what: &'static str, text: &str) -> Result<CString, BuildError> {
    let refuse = |why| BuildError::Name { what, text: text.to_owned(), why };
    if text.is_empty() {
        return Err(refuse("it is empty"));
    }
    if text.len() > 255 {
        return Err(refuse("it has more than 255 bytes"));
    }
    if text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
        return Err(refuse("it has white space, a slash or control characters in it"));
    }
    CString::new(text).map_err(|_| refuse("it has a zero byte in it"))
}

/// An engine could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Mooncake could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Mooncake refused; its messages on standard error may say more.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The host or the name is none.
    #[error("the {what} {text:?} cannot be used: {why}")]
    Name {
        /// Which of them.
        what: &'static str,
        /// The text.
        text: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A name was set where Mooncake picks it.
    #[error(
        "the name {0:?} cannot be set: without a metadata server an engine's name is its address and port, see Engine::name"
    )]
    NameNotOurs(String),
    /// The metadata server's URL is none.
    #[error("the metadata server's URL {url:?} cannot be used: {why}")]
    Metadata {
        /// The URL.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The pip wheel was built without it.
    #[error("the metadata server {url:?} cannot be used with the wheel {version}, which has http, https and etcd only")]
    NotInWheel {
        /// The URL.
        url: String,
        /// The wheel's version.
        version: String,
    },
    /// An engine to adopt was null.
    #[error("there is no engine at address 0")]
    Null,
}

/// Puts rings on an engine that somebody else made, such as vLLM's: Python's `TransferEngine.get_engine_ptr()`. It is never
/// destroyed, and `owner` is kept alive until nothing of ours uses it any more, or for ever if a transfer does not end.
///
/// Mooncake's functions are taken from the image that is mapped already. `name` is what peers open it by: needed if the engine
/// uses a metadata server, otherwise its address and port. Memory that its maker has registered can be used in entries after
/// [`Engine::adopt_registration`].
///
/// Over TCP, start the process with `MC_TCP_ENABLE_CONNECTION_POOL=1`: Mooncake then keeps connections, and connects in its own
/// thread. An engine is taken to have been made with it if the environment says so when it is adopted and it was not moonring
/// that put it there, as [`Builder::build`] does. Otherwise each request becomes a group of its own, for which Mooncake takes some
/// 0.6 µs more; with a wheel older than 0.3.13, which knows no groups, connecting to a peer blocks the poller then. It does so too
/// if the variable was set after the engine was made.
///
/// Memory registered through the new [`Engine`] is not unmapped when that ends, because the adopted one goes on; its pages are
/// given back, its addresses are not.
///
/// # Safety
/// `engine` is the address of a complete Transfer Engine of the one Mooncake that is mapped in this process, and stays one
/// for as long as `owner` lives.
///
/// # Errors
/// [`BuildError`].
pub unsafe fn adopt(
    engine: *mut c_void,
    name: Option<&str>,
    owner: Arc<dyn Any + Send + Sync>,
) -> Result<Engine, BuildError> {
    let engine = NonNull::new(engine.cast::<TransferEngine>()).ok_or(BuildError::Null)?;
    if let Some(name) = name {
        check_name("name", name)?;
    }
    let api = Api::adopt()?;
    // SAFETY: the engine is live, by the caller's word.
    let address = unsafe { api.local_ip_and_port(engine) }?;
    let name = name.map_or(address, str::to_owned);
    // SAFETY: as above.
    Ok(Engine::over(Arc::new(unsafe { Mooncake::new(api, engine, name, Some(owner)) })))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_that_would_end_the_process_is_refused() {
        let ok = |metadata: Metadata| metadata.to_c().unwrap();
        assert_eq!(ok(Metadata::P2pHandshake).as_c_str(), c"P2PHANDSHAKE");
        assert_eq!(ok(Metadata::Http("http://h:1/metadata".into())).as_c_str(), c"http://h:1/metadata");
        ok(Metadata::Http("https://h".into()));
        ok(Metadata::Etcd("etcd://h:2379".into()));
        let bad =
            ["", "h:1", "etcd://h", "http://", "http://:80", "http:///x", "http://a b", "http://a\0b", "HTTP://h"];
        for url in bad {
            let error = Metadata::Http(url.into()).to_c().unwrap_err().to_string();
            assert!(error.contains(&format!("{url:?}")), "{error}");
        }
    }

    #[test]
    fn names_are_checked_before_anything_is_loaded() {
        for host in ["", "a b", "a\0b", "http://h", &"x".repeat(256)] {
            assert!(matches!(builder(host).build(), Err(BuildError::Name { .. })), "{host:?}");
        }
        assert!(matches!(builder("127.0.0.1").name("x").build(), Err(BuildError::NameNotOurs(_))));
        let owner: Arc<dyn Any + Send + Sync> = Arc::new(());
        // SAFETY: null is refused before it is used.
        let null = unsafe { adopt(ptr::null_mut(), None, owner) };
        assert!(matches!(null, Err(BuildError::Null)));
    }
}
