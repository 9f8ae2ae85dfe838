//! moonring project commands.
fn main() {}
