//! Progress bars.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over so many of `what`. On standard error, and only if that is a terminal.
pub fn bar(count: u64, what: &str, message: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template(&format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {what}, {{eta}} left"));
    ProgressBar::new(count).with_style(style.expect("the template is sound")).with_message(message)
}
