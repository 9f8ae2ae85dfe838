//! `cargo xtask gpu`: a bundle that checks and measures moonring on a machine with a GPU and neither Rust nor a network.
//!
//! What is in it stands in gpu/src/bundle.rs. The programs are built and stripped here; of the wheels goes in what the
//! loader would load for the engine's module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{command, setup};

/// The most that the archive may have. One must be able to carry it to a machine that fetches nothing.
const MOST: u64 = 60 << 20;

/// The tests that run on any driver: what to ask cargo for. Which part of a program that is stands in gpu/src/bundle.rs.
const TESTS: [(&str, &[&str]); 2] = [
    ("fake-cuda", &["driver"]),
    ("moonring", &["cuda_fences", "cuda_settings", "cuda_timelines", "demo", "store_offload"]),
];
/// What the last two of them start.
const EXAMPLES: [&str; 2] = ["ring_demo", "store_offload"];

/// Of every system that the bundle can run on, or belongs to its driver.
const ALWAYS_THERE: [&str; 10] = [
    "ld-linux",
    "linux-vdso",
    "libc.so",
    "libm.so",
    "libdl.so",
    "libpthread.so",
    "librt.so",
    "libresolv.so",
    "libutil.so",
    "libcuda.so",
];

/// Builds `target/gpu/bundle.tar.gz`, unpacks it elsewhere and runs it there. Its report is the last line of the output.
pub fn gpu() -> Result<ExitCode> {
    setup::setup()?;
    let wheel = setup::home().join("wheel");
    let cuda = match setup::cuda_wheel() {
        Ok(folder) => Some(folder),
        Err(error) => {
            eprintln!("warning: the bundle gets no engine for GPU memory: {error:#}");
            None
        }
    };
    let built = build()?;

    let home = target().join("gpu");
    let (staging, archive) = (home.join("bundle"), home.join("bundle.tar.gz"));
    for folder in [&staging, &home.join("try")] {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        fs::create_dir_all(folder)?;
    }
    strip(built.program("bin", "moonring-gpu")?, &staging.join("moonring-gpu"))?;
    fs::copy(crate::project_root().join("gpu/run.sh"), staging.join("run")).context("gpu/run.sh is gone")?;
    for name in TESTS.iter().flat_map(|(_, names)| names.iter()) {
        strip(built.program("test", name)?, &staging.join("bin").join(name))?;
    }
    // The unit tests.
    strip(built.program("lib", "moonring")?, &staging.join("bin/moonring"))?;
    for name in EXAMPLES {
        strip(built.program("example", name)?, &staging.join("examples").join(name))?;
    }
    strip(built.said("FAKE_CUDA_LIBRARY")?, &staging.join("libfakecuda.so"))?;
    strip(built.said("FAKE_CUDA_EMPTY")?, &staging.join("libempty.so"))?;
    strip(&built.said("FAKE_MOONCAKE")?.join("scripted.so"), &staging.join("fake-mooncake/scripted.so"))?;
    stage_engine(&wheel, &staging, "wheel")?;
    if let Some(cuda) = cuda {
        stage_engine(&cuda, &staging, "wheel-cuda")?;
    }
    complete(&staging)?;
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--owner=0", "--group=0", "--file"]).arg(&archive);
    command::run(tar.arg("--directory").arg(&staging).arg("."))?;
    let size = fs::metadata(&archive)?.len();
    eprintln!("{} has {:.1} MiB", archive.display(), size as f64 / f64::from(1 << 20));
    ensure!(size <= MOST, "the bundle has {size} bytes, more than {MOST}: leave something out");

    run(&archive, &home.join("try"))
}

/// Unpacks the archive and runs it as on a machine that has nothing of ours.
fn run(archive: &Path, folder: &Path) -> Result<ExitCode> {
    command::run(Command::new("tar").args(["--extract", "--file"]).arg(archive).arg("--directory").arg(folder))?;
    let mut run = Command::new(folder.join("run"));
    run.current_dir(folder).env_clear().env("PATH", "/usr/bin:/bin");
    let status = run.status().with_context(|| format!("could not start {}", folder.join("run").display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// Where cargo builds, for this program as for those that it starts.
fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => crate::project_root().join(folder),
        None => crate::project_root().join("target"),
    }
}

/// What cargo has built.
#[derive(Default)]
struct Built {
    /// By kind and name of the target.
    programs: BTreeMap<(String, String), PathBuf>,
    /// What the build scripts of the stand-ins tell their crates: places, by variable.
    said: BTreeMap<String, PathBuf>,
}

impl Built {
    fn program(&self, kind: &str, name: &str) -> Result<&Path> {
        let found = self.programs.get(&(kind.to_owned(), name.to_owned()));
        Ok(found.with_context(|| format!("cargo has built no {kind} {name}"))?)
    }

    fn said(&self, variable: &str) -> Result<&Path> {
        Ok(self.said.get(variable).with_context(|| format!("no build script has said {variable}"))?)
    }
}

fn build() -> Result<Built> {
    let mut messages = String::new();
    let mut cargo = |arguments: &[&str]| -> Result<()> {
        eprintln!("building: cargo {}", arguments.join(" "));
        let mut cargo = command::cargo();
        cargo.args(arguments).args(["--quiet", "--release", "--message-format=json-render-diagnostics"]);
        messages += &command::output(&mut cargo)?;
        Ok(())
    };
    cargo(&["build", "--package", "moonring-gpu"])?;
    for (package, names) in TESTS {
        let names = names.iter().flat_map(|name| ["--test", name]);
        let unit = (package == "moonring").then_some("--lib");
        let all: Vec<_> = ["test", "--no-run", "--package", package].into_iter().chain(unit).chain(names).collect();
        cargo(&all)?;
    }
    let examples = EXAMPLES.iter().flat_map(|name| ["--example", name]);
    cargo(&["build", "--package", "moonring"].into_iter().chain(examples).collect::<Vec<_>>())?;
    read(&messages)
}

/// Reads cargo's messages, one JSON object a line.
fn read(messages: &str) -> Result<Built> {
    let mut built = Built::default();
    for line in messages.lines() {
        let message: Value = serde_json::from_str(line).with_context(|| format!("cargo wrote {line:?}"))?;
        let target = &message["target"];
        if let (Some(kind), Some(name), Some(path)) =
            (target["kind"][0].as_str(), target["name"].as_str(), message["executable"].as_str())
        {
            built.programs.insert((kind.to_owned(), name.to_owned()), path.into());
        }
        for pair in message["env"].as_array().into_iter().flatten() {
            if let (Some(variable), Some(value)) = (pair[0].as_str(), pair[1].as_str()) {
                built.said.insert(variable.to_owned(), value.into());
            }
        }
    }
    Ok(built)
}

/// Checks that every library which something in the folder needs is there as well, or on every system; and says how new the
/// system's C library must be.
fn complete(staging: &Path) -> Result<()> {
    let mut files = Vec::new();
    collect(staging, &mut files)?;
    let there: BTreeSet<_> = files.iter().filter_map(|file| file.file_name()?.to_str()).collect();
    let mut newest = (0, 0);
    for file in &files {
        if !fs::read(file)?.starts_with(b"\x7fELF") {
            continue;
        }
        let mut readelf = Command::new("readelf");
        readelf.env("LC_ALL", "C").args(["--wide", "--dynamic", "--version-info"]).arg(file);
        let dynamic = command::output(&mut readelf).context("readelf is one of the compiler's tools")?;
        for library in values_between(&dynamic, "Shared library: [", "]") {
            let known = there.contains(library) || ALWAYS_THERE.iter().any(|name| library.starts_with(name));
            ensure!(known, "{} needs {library}, which is not in the bundle", file.display());
        }
        // What is only there for systems without it does not count.
        if !file.starts_with(staging.join(".mooncake/lib")) {
            let version = |text: &str| -> Option<(u32, u32)> {
                let (major, minor) = text.split_once('.')?;
                Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
            };
            newest = values_between(&dynamic, "Name: GLIBC_", " ").filter_map(version).fold(newest, Ord::max);
        }
    }
    eprintln!("it needs a C library of version {}.{} or newer", newest.0, newest.1);
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { collect(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// What stands between two marks, each time.
fn values_between<'a>(text: &'a str, before: &'a str, after: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(before).skip(1).filter_map(move |rest| rest.split(after).next())
}

fn strip(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().context("a file is in a folder")?)?;
    command::run(Command::new("strip").arg("--strip-unneeded").arg("-o").arg(to).arg(from))
        .context("strip is one of the compiler's tools (Debian: binutils)")
}

/// Copies what a wheel's engine needs: of the wheel, to its place in it, and of the system, into a folder that moonring
/// looks into where the system lacks it.
fn stage_engine(wheel: &Path, staging: &Path, name: &str) -> Result<()> {
    let engines = staging.join(".mooncake");
    let module = Path::new("mooncake/engine.so");
    let wheel = wheel.canonicalize()?;
    let copy = |from: &Path, to: &Path| -> Result<()> {
        if to.exists() {
            return Ok(());
        }
        fs::create_dir_all(to.parent().context("a file is in a folder")?)?;
        fs::copy(from, to).with_context(|| format!("could not copy {}", from.display()))?;
        Ok(())
    };
    copy(&wheel.join(module), &engines.join(name).join(module))?;
    for entry in fs::read_dir(&wheel)? {
        // The version stands in this folder's name, and the licence in it.
        let folder = entry?.path();
        let shown = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if shown.starts_with("mooncake_transfer_engine") && shown.ends_with(".dist-info") {
            copy(&folder.join("METADATA"), &engines.join(name).join(shown).join("METADATA"))?;
        }
    }
    let runtime = wheel.join("nvidia/cuda_runtime/lib");
    let mut ldd = Command::new("ldd");
    ldd.arg(wheel.join(module)).env("LC_ALL", "C").env("LD_LIBRARY_PATH", &runtime);
    for (library, found) in needed(&command::output(&mut ldd).context("ldd (Debian: libc-bin) is needed")?) {
        if ALWAYS_THERE.iter().any(|known| library.starts_with(known)) {
            continue;
        }
        let Some(found) = found else {
            bail!("{} needs {library}, which this system does not have", wheel.join(module).display());
        };
        // As the loader came to it, which may be through a folder's "..", and where it lies.
        let real = found.canonicalize()?;
        match found.parent().and_then(|folder| folder.canonicalize().ok()).and_then(|folder| {
            let below = folder.strip_prefix(&wheel).ok()?;
            Some(engines.join(name).join(below).join(&library))
        }) {
            // Both wheels have the same files under most names: the archive has each once.
            Some(place) => match same_in_other(&engines, name, &place, &real)? {
                Some(other) => {
                    fs::create_dir_all(place.parent().context("a file is in a folder")?)?;
                    fs::hard_link(other, place)?;
                }
                None => copy(&real, &place)?,
            },
            None => copy(&real, &engines.join("lib").join(&library))?,
        }
    }
    Ok(())
}

/// A file of the same bytes that another wheel has put beside, if there is one.
fn same_in_other(engines: &Path, name: &str, place: &Path, real: &Path) -> Result<Option<PathBuf>> {
    let file = place.file_name().context("a library has a name")?;
    for other in fs::read_dir(engines)? {
        let other = other?.path();
        if other.ends_with(name) || other.ends_with("lib") {
            continue;
        }
        for folder in fs::read_dir(&other)? {
            let candidate = folder?.path().join(file);
            if candidate.is_file() && fs::read(&candidate)? == fs::read(real)? {
                return Ok(Some(candidate));
            }
        }
    }
    Ok(None)
}

/// Reads what ldd printed: each library by the name that is asked for, and where it was found.
fn needed(report: &str) -> Vec<(String, Option<PathBuf>)> {
    let mut all = Vec::new();
    for line in report.lines().map(str::trim) {
        let name = line.split([' ', '=']).next().unwrap_or_default();
        let name = name.rsplit('/').next().unwrap_or_default();
        let found = line.split_once(" => ").map(|(_, rest)| rest.split(" (").next().unwrap_or(rest));
        match found {
            Some("not found") => all.push((name.to_owned(), None)),
            Some(path) => all.push((name.to_owned(), Some(path.into()))),
            None if !name.is_empty() => all.push((name.to_owned(), None)),
            None => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_cargos_messages() {
        let messages = r#"{"reason":"compiler-artifact","target":{"kind":["lib"],"name":"moonring"},"executable":null}
{"reason":"build-script-executed","env":[["OTHER","x"],["FAKE_CUDA_LIBRARY","/t/libfakecuda.so"]]}
{"reason":"compiler-artifact","target":{"kind":["test"],"name":"driver"},"executable":"/t/driver-1"}
{"reason":"compiler-artifact","target":{"kind":["example"],"name":"driver"},"executable":"/t/driver-2"}
{"reason":"build-finished","success":true}"#;
        let built = read(messages).unwrap();
        assert_eq!(built.program("test", "driver").unwrap(), Path::new("/t/driver-1"));
        assert_eq!(built.program("example", "driver").unwrap(), Path::new("/t/driver-2"));
        assert_eq!(built.said("FAKE_CUDA_LIBRARY").unwrap(), Path::new("/t/libfakecuda.so"));
        assert!(built.program("lib", "moonring").is_err());
        assert!(read("warning: x").is_err());
    }

    #[test]
    fn what_the_bundle_needs_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        fs::copy(std::env::current_exe().unwrap(), folder.path().join("program")).unwrap();
        fs::write(folder.path().join("text"), "no program").unwrap();
        let error = complete(folder.path()).unwrap_err();
        assert!(error.to_string().contains("needs libgcc_s.so.1"), "{error}");
        fs::write(folder.path().join("libgcc_s.so.1"), "").unwrap();
        complete(folder.path()).unwrap();
    }

    #[test]
    fn reads_what_ldd_found() {
        let report = "\tlinux-vdso.so.1 (0x0)\n\tlibglog.so.0 => /w/mooncake/../a.libs/libglog.so.0 (0x1)\n\
                      \tlibcuda.so.1 => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x2)\n";
        let found = needed(report);
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["linux-vdso.so.1", "libglog.so.0", "libcuda.so.1", "ld-linux-x86-64.so.2"]);
        assert_eq!(found[1].1.as_deref(), Some(Path::new("/w/mooncake/../a.libs/libglog.so.0")));
        assert_eq!(found[2].1, None);
    }

    #[test]
    fn an_engine_is_staged_with_what_it_needs() {
        let folder = tempfile::tempdir().unwrap();
        let staging = folder.path().join("staging");
        for (name, text) in [("one", "same"), ("two", "same"), ("three", "other")] {
            let place = staging.join(".mooncake").join(name).join("mooncake/libasio.so");
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(&place, text).unwrap();
        }
        let engines = staging.join(".mooncake");
        let place = engines.join("two/mooncake/libasio.so");
        let found = same_in_other(&engines, "two", &place, &place).unwrap();
        assert_eq!(found, Some(engines.join("one/mooncake/libasio.so")));
        let place = engines.join("three/mooncake/libasio.so");
        assert_eq!(same_in_other(&engines, "three", &place, &place).unwrap(), None);
    }
}
