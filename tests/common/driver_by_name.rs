//! Programs that look for a CUDA driver by its name, as the loader does.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::{env, fs, iter};

/// Runs a program that finds the fake driver under the driver's name; with `MOONRING_LIBCUDA` set, what the loader finds by
/// itself.
pub fn run_with_driver(program: &mut Command) -> Output {
    if env::var_os("MOONRING_LIBCUDA").is_some() {
        return program.output().unwrap();
    }
    let folder = env::temp_dir().join(format!("moonring-driver-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::copy(fake_cuda::path(), folder.join("libcuda.so")).unwrap();
    // What the program needs beside may be found by the same variable.
    let before = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let others = env::split_paths(&before).filter(|folder| !folder.as_os_str().is_empty());
    let folders: Vec<PathBuf> = iter::once(folder.clone()).chain(others).collect();
    let output = program.env("LD_LIBRARY_PATH", env::join_paths(folders).unwrap()).output();
    fs::remove_dir_all(&folder).unwrap();
    output.unwrap()
}
