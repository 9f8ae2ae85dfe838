//! Running other programs: their output is progress, so it goes to standard error.

use std::io;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs `command` to its end with its standard output sent to standard error.
pub fn run(command: &mut Command) -> Result<()> {
    command.stdin(Stdio::null()).stdout(io::stderr());
    let status = command.status().with_context(|| format!("could not start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` ended with {status}", shown(command));
    }
    Ok(())
}

/// Runs `command` to its end and returns what it wrote to standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("could not start `{}`", shown(command)))?;
    if !output.status.success() {
        bail!("`{}` ended with {}", shown(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` wrote something that is not UTF-8", shown(command)))
}

/// Whether `command` starts and ends well; it stays silent.
pub fn works(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The cargo that runs this program.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::project_root());
    command
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy()));
    words.join(" ")
}
