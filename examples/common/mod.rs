//! What the examples share: checks of their command lines, a compute stream, pages whose bytes can be checked, and times.

pub mod args;
pub mod pages;
pub mod progress;
pub mod stream;
pub mod times;
