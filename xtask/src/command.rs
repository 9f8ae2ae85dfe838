//! Running other programs: their output is progress, so it goes to standard error.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::process::{Signal, set_parent_process_death_signal};

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

/// The same command for at most so many seconds, in the folder `at`; more arguments can follow. coreutils' timeout ends what it has
/// started with it.
pub fn within(seconds: u64, command: &Command, at: &Path) -> Command {
    let mut limited = Command::new("timeout");
    limited.arg(seconds.to_string()).arg(command.get_program()).args(command.get_args()).current_dir(at);
    limited.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    limited
}

/// Where cargo puts what it builds.
pub fn target_folder() -> Result<PathBuf> {
    let metadata = output(cargo().args(["metadata", "--format-version=1", "--no-deps"]))?;
    let target = metadata.split_once("\"target_directory\":\"").and_then(|(_, rest)| rest.split_once('"'));
    Ok(target.context("cargo metadata names no target folder")?.0.into())
}

/// Has the process that `command` starts killed when the thread that starts it ends, and so with this program, however that
/// ends. It holds for what the process becomes: `cargo run` becomes the program that it runs.
pub fn end_with_us(command: &mut Command) {
    // SAFETY: one system call, which may be made between fork and exec.
    unsafe { command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?)) };
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|arg| arg.to_string_lossy()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::thread;

    use super::*;

    #[test]
    fn a_process_ends_with_who_started_it() {
        let started = thread::spawn(|| {
            // Becomes another program, as cargo does.
            let mut command = Command::new("sh");
            command.args(["-c", "exec sleep 600"]);
            end_with_us(&mut command);
            command.spawn().unwrap()
        });
        let status = started.join().unwrap().wait().unwrap();
        assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
    }
}
