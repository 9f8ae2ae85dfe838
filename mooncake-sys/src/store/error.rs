//! A Store call that failed.

use std::fmt;

use super::types::store_code_name;
use crate::error::write_failure;

/// A call that the Store did not do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct StoreError {
    /// The call and what it was about, as in `get_into("key", 65536 bytes)`.
    pub call: String,
    /// Mooncake's number, one of the `STORE_` constants or another negative one; or
    /// [`EXCEPTION`](crate::EXCEPTION) or [`NO_CODE`](crate::NO_CODE).
    pub code: i32,
    /// What an exception said, or what this crate has to say.
    pub message: String,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_failure(f, &self.call, self.code, store_code_name(self.code), &self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::NO_CODE;

    #[test]
    fn it_names_the_call_and_the_store_s_own_meaning_of_the_code() {
        let error = |code| StoreError { call: "get_size(\"k\")".into(), code, message: String::new() }.to_string();
        assert_eq!(error(-704), "get_size(\"k\") failed with code -704 (object not found)");
        assert_eq!(error(-1), "get_size(\"k\") failed with code -1 (internal error)");
        assert_eq!(error(-7), "get_size(\"k\") failed with code -7");
        assert_eq!(error(NO_CODE), "get_size(\"k\") failed");
    }
}
