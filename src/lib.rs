//! moonring.
