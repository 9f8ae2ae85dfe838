//! moonring: an io_uring-style submission and completion ring for Mooncake transfers whose entries can wait for GPU or
//! host work.

mod bytes;
pub mod code;
mod core;
mod cqe;
#[cfg(feature = "cuda")]
pub mod cuda;
mod doorbell;
mod engine;
mod entry;
pub mod fence;
#[cfg(feature = "mooncake")]
pub mod mooncake;
pub mod opcode;
mod poller;
mod region;
mod ring;
mod spsc;
mod sqe;
mod sync;
mod thread;
#[cfg(feature = "unstable-transport")]
pub mod transport;
#[cfg(not(feature = "unstable-transport"))]
mod transport;

pub use code::Stage;
pub use cqe::{Cqe, CqeFlags, EntryError};
pub use engine::{Engine, OpenError, RegisterError, Remote, Segment};
pub use entry::Entry;
pub use fence::Fence;
pub use region::{AccessError, InfoError, RangeError, Region, RegionInfo, Registered, Slice, UnregisterError};
pub use ring::{
    Builder, CompletionQueue, Completions, PushError, Refusal, Ring, SubmissionQueue, Submitter, WaitError,
};
pub use transport::{RawMemory, TransportError, sim};
