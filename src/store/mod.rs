//! Mooncake's Store under the ring: objects by key, in entries beside Reads and Writes, ordered by the same fences and links.
//!
//! A [`Client`] belongs to an engine. Rings on that engine take its entries, [`Get`](crate::opcode::Get),
//! [`Put`](crate::opcode::Put), [`Exist`](crate::opcode::Exist) and [`Remove`](crate::opcode::Remove), and those of its segments, in any
//! mixture. A program that uses nothing but a Store takes [`Engine::loopback`](crate::Engine::loopback).
//!
//! ```
//! use moonring::{Engine, EntryFlags, Region, Ring, fence, opcode, store};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::loopback();
//! let store = store::Client::memory(&engine, &store::Memory::new(1 << 20))?; // with Mooncake: store::builder(host, master).build(&engine)?
//! let pages = engine.register(Region::alloc(8192)?)?;
//! store.register(&pages)?;
//! let mut ring = Ring::builder().build(64, &engine)?;
//!
//! // Stored when prefill has written it, then loaded into another page.
//! let (signaller, prefilled) = fence::host();
//! let put = opcode::Put::new(&store, "prefix/1", pages.slice(0..4096)?).build();
//! let get = opcode::Get::new(&store, "prefix/1", pages.slice(4096..8192)?).build();
//! ring.submission().push_chain(vec![put.wait(&prefilled).flags(EntryFlags::IO_LINK), get])?;
//! ring.submit()?;
//!
//! pages.write_at(0, b"keys and values")?;
//! signaller.signal();
//! ring.wait(2)?;
//! for completion in ring.completion() {
//!     assert_eq!(completion.result()?, 4096);
//! }
//! let mut bytes = [0; 15];
//! pages.read_at(4096, &mut bytes)?;
//! assert_eq!(&bytes, b"keys and values");
//! # Ok(())
//! # }
//! ```
//!
//! # Calls
//!
//! A Store's calls block, so a client has a bounded set of threads that make them, four unless set, named `moonring-store`. When
//! one is idle, the poller gives it what is ready: up to 64 keys, and no further one once they come to 16 MiB. It makes one call
//! for each kind of entry among them; while more than one is idle, each kind has a thread of its own. While calls run, the
//! next is made when they have returned, or a millisecond after the last was begun. What has to wait stays in the ring, where
//! it can still be cancelled, and is grouped with what comes meanwhile. So a call that hangs holds up its own keys and, when it
//! takes the last thread, other entries for the same Store; never those for segments, and never the poller.
//!
//! The keys of one call end together: a slow one delays the completions of the others, which have nonetheless each their own
//! result. A call that is made cannot be taken back: an entry that passes its limit, or is cancelled with `detach()`, has its
//! result with `MORE`, and `NOTIF` when the call has returned.

pub(crate) mod answer;
mod client;
mod driver;
mod memory;
#[cfg(feature = "mooncake")]
mod mooncake;
pub(crate) mod opcode;
pub(crate) mod pool;
pub(crate) mod request;

pub use client::{Client, CloseError, ConnectError};
pub(crate) use driver::StoreDriver;
pub use memory::Memory;
#[cfg(feature = "mooncake")]
pub use mooncake::{Builder, builder};
