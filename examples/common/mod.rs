//! What the examples share: a compute stream, pages whose bytes can be checked, and times.

pub mod pages;
pub mod progress;
pub mod stream;
pub mod times;
