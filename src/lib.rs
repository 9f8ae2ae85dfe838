//! moonring: an io_uring-style submission and completion ring for Mooncake transfers whose entries can wait for GPU or
//! host work.
//!
//! # The model
//!
//! * An [`Engine`] owns what outlives a ring: registered memory ([`Registered`]), open peers ([`Segment`]) and the
//!   transport under them.
//! * An [`Entry`] asks for one operation. It is built by a type in [`opcode`] and pushed into a ring.
//! * A [`Fence`] is something that will have happened: a host thread's signal, a value of a timeline, a CUDA event, or
//!   the end of another entry ([`push_fenced`](SubmissionQueue::push_fenced)). An entry waits for up to [`Entry::MAX_FENCES`] of them. The transport is not called for it before all have signalled;
//!   if one fails, the entry fails with its cause and the transport is never called.
//! * A transfer may have up to [`Entry::MAX_PARTS`] parts, given as a list of slices ([`opcode::Readv`]) or by page numbers
//!   ([`opcode::ReadPages`]). It still is one entry with one completion.
//! * A [`store::Client`] is a Mooncake Store, which keeps objects by key: [`opcode::Get`], [`opcode::Put`] and their like are
//!   entries of the same rings.
//! * A [`Ring`] has a submission queue, a completion queue and a poller thread between them. Entries that wait hold up
//!   nobody. Each accepted entry ends in one last completion ([`Cqe`]) with its own `user_data`, result, and times; a
//!   completion with [`CqeFlags::MORE`] is not the last.
//! * An entry may have its own future instead of a completion in the queue ([`push_future`](SubmissionQueue::push_future)):
//!   an [`EntryFuture`] owns a buffer, gives it back when nothing touches it any more, and may be dropped at any time.
//! * [`EntryFlags`] put entries in order: links make chains, drains wait for all before. [`opcode::Timeout`],
//!   [`Entry::gate_limit`] and [`Entry::transfer_limit`] bound time; [`opcode::Cancel`] and [`Controller`] end entries
//!   before theirs, and wait until a buffer is left alone.
//!
//! # A first example
//!
//! It runs anywhere: the loopback engine copies inside the process.
//!
//! ```
//! use std::time::Duration;
//!
//! use moonring::{Engine, Region, Ring, fence, opcode};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Two engines; with Mooncake they are in two processes.
//! let (ours, theirs) = (Engine::loopback(), Engine::loopback());
//! let pool = ours.register(Region::alloc(1 << 20)?)?;
//! let remote = theirs.register(Region::alloc(1 << 20)?)?;
//! remote.write_at(0, b"from prefill")?;
//! let peer = ours.open_segment(theirs.name(), Duration::from_secs(1))?;
//!
//! let mut ring = Ring::builder().build(256, &ours)?;
//! let (signaller, copied) = fence::host();
//! let load = opcode::Read::new(pool.slice(0..12)?, peer.slice(&remote.info(), 0, 12)?)
//!     .build()
//!     .wait(&copied)
//!     .user_data(7);
//! ring.submission().push(load)?;
//! ring.submit()?;
//! assert!(ring.completion().is_empty()); // it waits, and nobody else does
//!
//! pool.write_at(0, b"a late copy!")?;
//! signaller.signal(); // the copy is done
//! ring.wait(1)?;
//! for completion in ring.completion() {
//!     assert_eq!(completion.user_data(), 7);
//!     assert_eq!(completion.result()?, 12);
//! }
//! let mut bytes = [0; 12];
//! pool.read_at(0, &mut bytes)?;
//! assert_eq!(&bytes, b"from prefill");
//! # Ok(())
//! # }
//! ```
//!
//! # With Mooncake
//!
//! Only the engine differs (feature `mooncake`). A peer sends its [`RegionInfo`] as bytes, by any means.
//!
//! ```no_run
//! # #[cfg(not(feature = "mooncake"))]
//! # fn main() {}
//! # #[cfg(feature = "mooncake")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//!
//! use moonring::{Region, RegionInfo, Ring, mooncake, opcode};
//!
//! let engine = mooncake::builder("10.0.0.2").build()?;
//! let pool = engine.register(Region::alloc(64 << 20)?)?;
//! # let received: Vec<u8> = Vec::new();
//! let remote = RegionInfo::from_bytes(&received)?;
//! let peer = engine.open_segment(&remote.segment, Duration::from_secs(5))?;
//! let mut ring = Ring::builder().build(256, &engine)?;
//!
//! let page = 64 << 10;
//! for n in 0..16 {
//!     let local = pool.slice(n * page..(n + 1) * page)?;
//!     let load = opcode::Read::new(local, peer.slice(&remote, (n * page) as u64, page as u64)?);
//!     ring.submission().push(load.build().user_data(n as u64))?;
//! }
//! ring.submit_and_wait(16)?;
//! for completion in ring.completion() {
//!     match completion.result() {
//!         Ok(bytes) => println!("page {}: {bytes} bytes", completion.user_data()),
//!         Err(error) => println!("page {}: {error}", completion.user_data()),
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Mooncake has no authentication: whoever reaches an engine's port reads and writes what is registered with it. What that
//! means, and what to do, is in `docs/security.md` in the repository.
//!
//! # Behind a CUDA stream
//!
//! One event, recorded behind what is queued on the stream, for any number of entries (feature `cuda`).
//!
//! ```no_run
//! # #[cfg(not(feature = "cuda"))]
//! # fn main() {}
//! # #[cfg(feature = "cuda")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use moonring::cuda::{Context, Stream};
//! use moonring::{Engine, Ring, opcode};
//!
//! let context = Context::primary(0)?;
//! let stream = Stream::new(&context)?;
//! let mut ring = Ring::builder().build(256, &Engine::loopback())?;
//!
//! // ... queue copies on stream.as_raw() ...
//! let copied = stream.fence()?;
//! for n in 0..16 {
//!     ring.submission().push(opcode::Wait::new().build().wait(&copied).user_data(n))?;
//! }
//! ring.submit_and_wait(16)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Chains, limits and cancelling
//!
//! As in io_uring: a linked entry starts when the one before has succeeded, and fails with it.
//!
//! ```
//! use std::time::Duration;
//!
//! use moonring::code::errno;
//! use moonring::opcode::{Cancel, Nop, Wait};
//! use moonring::{Engine, EntryFlags, Ring, Stage, fence};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut ring = Ring::builder().build(64, &Engine::loopback())?;
//! let (signaller, fence) = fence::host();
//!
//! // Accepted whole or not at all. A transfer may be any member.
//! ring.submission().push_chain(vec![
//!     Wait::new().build().wait(&fence).user_data(1).flags(EntryFlags::IO_LINK),
//!     Nop::new().build().user_data(2),
//! ])?;
//! // It does not wait at the gate for longer than this.
//! ring.submission().push(Wait::new().build().wait(&fence).user_data(3).gate_limit(Duration::from_millis(1)))?;
//! ring.submit_and_wait(1)?;
//! let late = ring.completion().next().unwrap();
//! let error = late.result().unwrap_err();
//! assert_eq!((late.user_data(), error.stage, error.errno), (3, Stage::Gate, errno::ETIME));
//!
//! // From any thread, also when the ring is full. Both completions say so.
//! assert_eq!(ring.controller().cancel(Cancel::user_data(1))?, 1);
//! ring.wait(2)?;
//! let ends: Vec<_> = ring.completion().map(|completion| (completion.user_data(), completion.stage())).collect();
//! assert_eq!(ends, [(1, Stage::Cancel), (2, Stage::Gate)]);
//! # drop(signaller);
//! # Ok(())
//! # }
//! ```
//!
//! # What blocks and what does not
//!
//! | call | blocks |
//! | --- | --- |
//! | push, [`Ring::submit`], reaping what is ready, signalling a fence, [`Fence::status`] | never |
//! | [`Controller::cancel`] | for a turn or two of the poller |
//! | [`Controller::stats`], [`Ring::stats`] | for a turn or two of the poller, at most 1 s |
//! | [`Controller::quiesce`] | until what it selects is quiet, at most its limit |
//! | [`Fence::wait_timeout`] | until the fence is final, at most its limit |
//! | [`Ring::wait`], [`Ring::submit_and_wait`] | until so many completions are ready; [`Ring::wait_timeout`], [`Ring::wait_min`] at most their limit |
//! | [`Ring::next`], [`Ring::completions`] | never: they are async |
//! | [`Ring::eventfd`], [`EventFd`]'s calls | never |
//! | [`EntryFuture`], its calls and its drop | never |
//! | [`Engine::register`], [`Registered::unregister`] | as long as the transport needs, a metadata server's answer included |
//! | [`Engine::open_segment`], [`Engine::reopen_segment`] | at most their limit |
//! | [`store::Client::register`], [`unregister`](store::Client::unregister) | as long as the Store needs |
//! | [`store::Client::close`] | at most its limit; dropping a client never blocks |
//! | `cuda::Stream::fence`, `cuda::Timeline::signal`, `cuda::Progress::hold` | no waiting for the GPU; a few driver calls, and other threads' calls on the same stream or timeline |
//! | dropping a [`Ring`], or the last of its halves | at most [`Builder::grace`] and 10 s |
//! | [`Ring::close`] | at most its limit and 10 s |
//! | dropping an engine's last user | while the transport ends, with Mooncake at most 5 s |
//!
//! # Threads
//!
//! A ring belongs to one thread at a time and can be moved to another. [`Ring::split`] makes two halves of it, one to submit
//! and one to reap, each for a thread of its own. Any number of further threads push through [`Submitter`]s, one each. Engines, segments, regions, fences and signallers can be sent and shared.
//!
//! Each ring has one thread, `moonring-poller`, or shares that of the ring that it is attached to ([`Builder::attach`]). An
//! [`Engine::open_segment`] runs on a `moonring-open`, a Store's calls on its `moonring-store`s, the end of an engine under a closing ring, and any end of a Mooncake
//! engine or a Store client, on a `moonring-close`. Where CUDA streams wait for entries, one `moonring-limits` sees to
//! their limits, and a `moonring-flush` for each timeline to the device, if it needs that. They receive no signals, and neither do
//! Mooncake's own threads. A forked child has none of them: there calls are errors and drops do nothing (`docs/semantics.md`,
//! *Process*). The poller sleeps when there is nothing to do; while
//! transfers are in flight, or CUDA fences are waited for, it looks again at growing intervals of at most 5 ms.
//!
//! ```
//! # use moonring::{Engine, Ring, opcode};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut ring = Ring::builder().build(64, &Engine::loopback())?;
//! let mut submitter = ring.submitter();
//! let producer = std::thread::spawn(move || {
//!     submitter.push(opcode::Nop::new().build().user_data(1)).unwrap();
//!     submitter.submit().unwrap();
//! });
//! ring.wait(1)?;
//! assert_eq!(ring.completion().next().map(|completion| completion.user_data()), Some(1));
//! producer.join().unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! # Errors
//!
//! * A push that is refused gives the entry back with a [`Refusal`]; nothing has happened.
//! * An entry that was accepted and fails says so in its completion: [`Cqe::result`] gives an [`EntryError`] with the
//!   [`Stage`] at which it ended, an errno, and a detail. Each cause has its own pair of stage and errno, among
//!   transfers and among entries that are none.
//! * [`OpenChain`] refuses a submit that would cut a chain in two: push the rest, then submit.
//! * [`WaitError`] means that no completion is ready; nothing is lost.
//! * Setting up has an error type for each step: [`RegisterError`], [`OpenError`], [`UnregisterError`],
//!   `mooncake::BuildError`, `cuda::CudaError`.
//!
//! The manual page `docs/semantics.md` in the repository has the table of all pairs, and what to do about each.
//!
//! # Times
//!
//! A completion carries two spans by the poller's clock: [`Cqe::gate_time`], from the turn that took the entry to the turn
//! that issued it, its wait in a chain or behind a drain included, and [`Cqe::wire_time`], from then to the turn that saw the transfer's end. The clock is read once in
//! each turn of the poller, so both are rounded to turns: on loopback, which copies within a turn, the second is 0. The
//! time before the poller took the entry and after it posted the completion is in neither.
//!
//! # Features
//!
//! | feature | default | |
//! | --- | --- | --- |
//! | `mooncake` | yes | `moonring::mooncake`: builds a small C++ shim, loads Mooncake at run time |
//! | `cuda` | yes | `moonring::cuda`: loads the CUDA driver at the first call into it |
//! | `prometheus` | no | `moonring::prometheus`: rings' counts in Prometheus's text format |
//! | `tracing` | no | events of the `tracing` crate about rings, engines, segments and peers, under the target `moonring` |
//! | `unstable-transport` | no | `moonring::transport`: write a transport of your own; may change in any version |

// tests/common/gpu.rs, which the unit tests of CUDA use too, knows this crate by its name.
#[cfg(all(test, feature = "cuda"))]
extern crate self as moonring;

mod bytes;
mod clock;
pub mod code;
mod core;
mod cqe;
#[cfg(feature = "cuda")]
pub mod cuda;
mod doorbell;
mod engine;
mod entry;
pub mod fence;
mod fork;
mod keep;
#[cfg(all(test, loom))]
mod models;
#[cfg(feature = "mooncake")]
pub mod mooncake;
pub mod opcode;
mod poller;
#[cfg(feature = "prometheus")]
pub mod prometheus;
mod region;
mod ring;
#[cfg(all(test, not(loom)))]
mod simulation;
mod spsc;
mod sqe;
pub mod store;
mod sync;
mod thread;
mod trace;
#[cfg(feature = "unstable-transport")]
pub mod transport;
#[cfg(not(feature = "unstable-transport"))]
mod transport;

pub use code::Stage;
pub use cqe::{Cqe, CqeFlags, EntryError, Outcome};
pub use engine::{Engine, OpenError, RegisterError, Remote, Segment};
pub use entry::{Entry, EntryFlags};
pub use fence::Fence;
pub use region::{AccessError, InfoError, RangeError, Region, RegionInfo, Registered, Slice, UnregisterError};
pub use ring::{
    Builder, CloseReport, Completion, CompletionQueue, Completions, ControlError, Controller, Counts, Ended,
    EntryFuture, EventFd, Messages, OpenChain, PeerStats, PushChainError, PushError, Refusal, Ring, StageCounts, Stats,
    Submission, SubmissionQueue, Submitter, WaitError,
};
pub use transport::{RawMemory, TransportError, sim};

/// The README's example runs with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
