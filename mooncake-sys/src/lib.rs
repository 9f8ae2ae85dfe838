//! Mooncake's C interface, loaded at run time from libtransfer_engine.so or from a pip wheel.
