//! What the command lines check.

use clap::builder::RangedU64ValueParser;

/// A number from 1 to `most`.
pub fn count(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// A page's bytes.
pub fn page_size(text: &str) -> Result<usize, String> {
    const MOST: usize = 1 << 30;
    match text.parse() {
        Ok(bytes @ 8..=MOST) if bytes % 8 == 0 => Ok(bytes),
        _ => Err(format!("a page has 8 to {MOST} bytes, a multiple of 8")),
    }
}
