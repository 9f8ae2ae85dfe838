//! The system libraries that a wheel's binaries need and do not bring.
//!
//! As root they are installed with apt. Without root their packages are fetched and unpacked into
//! `.mooncake/lib`, and linked into the wheel's own library folder: the run path of every binary in
//! the wheel names that folder, so nothing has to be preloaded and no environment variable is needed.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command;

/// Makes the loader find everything that the binaries in `wheel` need.
///
/// `home` is the set-up folder, `scratch` an empty folder in it. Returns whether anything had to be done.
pub fn ensure(wheel: &Path, home: &Path, scratch: &Path) -> Result<bool> {
    if missing(wheel)?.is_empty() {
        return Ok(false);
    }
    // An earlier set-up may have unpacked them already.
    let unpacked = home.join("lib");
    link(&[unpacked.clone(), wheel.join("nvidia/cuda_runtime/lib")], wheel)?;
    let missed = missing(wheel)?;
    if missed.is_empty() {
        return Ok(true);
    }
    let packages = packages(&missed)?;
    eprintln!("the system lacks {}", list(&missed));
    if can_install() {
        install(&packages)?;
    } else if has_apt() {
        unpack_packages(&packages, &unpacked, scratch).with_context(|| {
            format!("could not fetch them without root; as root: apt-get install {}", packages.join(" "))
        })?;
        link(&[unpacked], wheel)?;
    } else {
        bail!(
            "the loader does not find {} and there is no apt-get to fetch them with: install what Debian \
             calls {} (Fedora: libibverbs, numactl-libs, libcurl), then run `cargo xtask setup` again",
            list(&missed),
            packages.join(", ")
        );
    }
    let missed = missing(wheel)?;
    if !missed.is_empty() {
        bail!(
            "the loader still does not find {} after {} came from apt: install what has it",
            list(&missed),
            packages.join(", ")
        );
    }
    Ok(true)
}

/// Installs Debian packages; only to be called when [`can_install`] says so.
pub fn install(packages: &[&str]) -> Result<()> {
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.args(["-q", "-o", "DPkg::Lock::Timeout=120"]).env("DEBIAN_FRONTEND", "noninteractive");
        apt
    };
    eprintln!("installing {}", packages.join(" "));
    command::run(apt().arg("update"))
        .and_then(|()| command::run(apt().args(["install", "-y", "--no-install-recommends"]).args(packages)))
        .with_context(|| format!("apt could not install {}", packages.join(", ")))
}

/// Whether this process may install Debian packages.
pub fn can_install() -> bool {
    rustix::process::geteuid().is_root() && has_apt()
}

fn has_apt() -> bool {
    command::works(Command::new("apt-get").arg("--version"))
}

/// The libraries that the loader does not find for any binary of the wheel that moonring uses.
fn missing(wheel: &Path) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for name in ["engine.so", "store.so", "mooncake_master"] {
        let mut ldd = Command::new("ldd");
        ldd.arg(wheel.join("mooncake").join(name)).env("LC_ALL", "C");
        let report = command::output(&mut ldd).context("ldd (Debian: libc-bin) is needed to see what is missing")?;
        all.extend(not_found(&report)?);
    }
    Ok(all)
}

/// Reads what ldd printed.
fn not_found(report: &str) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for line in report.lines().filter(|line| line.contains("not found")) {
        match line.split_once(" => not found") {
            Some((name, _)) => names.push(name.trim().to_owned()),
            // "/lib/libc.so.6: version `GLIBC_2.99' not found (required by ...)"
            None => bail!("the system is older than the wheel: {}", line.trim()),
        }
    }
    Ok(names)
}

/// The Debian packages that hold `libraries`.
fn packages(libraries: &BTreeSet<String>) -> Result<Vec<&'static str>> {
    libraries
        .iter()
        .map(|library| match library.as_str() {
            "libibverbs.so.1" => Ok("libibverbs1"),
            "libmlx5.so.1" => Ok("ibverbs-providers"),
            "libnuma.so.1" => Ok("libnuma1"),
            "libcurl.so.4" => Ok("libcurl4"),
            "libstdc++.so.6" => Ok("libstdc++6"),
            "libgcc_s.so.1" => Ok("libgcc-s1"),
            other => bail!("the loader does not find {other}, which Mooncake needs: install the package that has it"),
        })
        .collect()
}

/// Fetches packages, and what they depend on and the system lacks, and puts their libraries into `to`.
fn unpack_packages(packages: &[&str], to: &Path, scratch: &Path) -> Result<()> {
    // apt's own lists belong to root and are empty in most containers: use lists of our own.
    let apt_home = scratch.join("apt");
    let (lists, cache, debs) = (apt_home.join("lists"), apt_home.join("cache"), scratch.join("deb"));
    for dir in [lists.join("partial"), cache.join("archives/partial"), debs.clone()] {
        fs::create_dir_all(dir)?;
    }
    let apt = || {
        let mut apt = Command::new("apt-get");
        apt.arg("-q");
        for (option, path) in [("Dir::State::Lists", &lists), ("Dir::Cache", &cache)] {
            apt.arg("-o").arg(format!("{option}={}", path.display()));
        }
        apt.current_dir(&debs).env("LC_ALL", "C");
        apt
    };
    command::run(apt().arg("update"))?;
    let plan = command::output(apt().args(["install", "--simulate", "--no-install-recommends"]).args(packages))?;
    let names = planned(&plan);
    if names.is_empty() {
        bail!("apt says that {} are installed, but the loader does not find their libraries", packages.join(", "));
    }
    eprintln!("unpacking {} into {}", names.join(" "), to.display());
    command::run(apt().arg("download").args(names))?;

    let root = scratch.join("root");
    for deb in entries(&debs)? {
        command::run(Command::new("dpkg-deb").arg("--extract").arg(deb).arg(&root))?;
    }
    let arch = std::env::consts::ARCH;
    fs::create_dir_all(to)?;
    for dir in ["lib", "usr/lib"] {
        let dir = root.join(dir).join(format!("{arch}-linux-gnu"));
        for file in entries(&dir)?.iter().filter(|path| is_library(path)) {
            // A copy under each name (a link's target would have to be kept beside it), whole or not at
            // all: a library cut short would stop every later run.
            let whole = scratch.join("library");
            fs::copy(file, &whole)
                .and_then(|_| fs::rename(&whole, to.join(file.file_name().unwrap_or_default())))
                .with_context(|| format!("could not copy {}", file.display()))?;
        }
    }
    Ok(())
}

/// The packages that a simulated install would add.
fn planned(plan: &str) -> Vec<&str> {
    plan.lines().filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next()).collect()
}

/// Links every library of `folders` into the folder that the wheel's binaries have in their run path.
fn link(folders: &[PathBuf], wheel: &Path) -> Result<()> {
    let target = entries(wheel)?
        .into_iter()
        .find(|path| path.extension() == Some(OsStr::new("libs")))
        .with_context(|| format!("{} has no *.libs folder", wheel.display()))?;
    for library in folders.iter().map(|folder| entries(folder)).collect::<Result<Vec<_>>>()?.iter().flatten() {
        let Some(name) = library.file_name().filter(|_| is_library(library)) else {
            continue;
        };
        let link = target.join(name);
        if fs::symlink_metadata(&link).is_ok_and(|found| found.is_symlink()) {
            fs::remove_file(&link)?;
        }
        if !link.exists() {
            symlink(library, &link).with_context(|| format!("could not make {}", link.display()))?;
        }
    }
    Ok(())
}

fn is_library(path: &Path) -> bool {
    path.is_file() && path.file_name().is_some_and(|name| name.to_string_lossy().contains(".so."))
}

/// What is in a folder; nothing if there is none.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
}

fn list(names: &BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_ldd_prints() {
        let report = "\tlinux-vdso.so.1 (0x00007ff)\n\tlibibverbs.so.1 => not found\n\
                      \tlibc.so.6 => /lib/libc.so.6 (0x00007f)\n\tlibnuma.so.1 => not found\n";
        assert_eq!(not_found(report).unwrap(), ["libibverbs.so.1", "libnuma.so.1"]);
        assert!(not_found("\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n").unwrap().is_empty());
        let old = "./x: /lib/libc.so.6: version `GLIBC_2.99' not found (required by ./x)\n";
        assert!(not_found(old).unwrap_err().to_string().contains("GLIBC_2.99"));
    }

    #[test]
    fn names_the_package_or_the_library_it_does_not_know() {
        let known = BTreeSet::from(["libcurl.so.4".to_owned(), "libmlx5.so.1".to_owned()]);
        assert_eq!(packages(&known).unwrap(), ["libcurl4", "ibverbs-providers"]);
        let unknown = BTreeSet::from(["libfoo.so.1".to_owned()]);
        assert!(packages(&unknown).unwrap_err().to_string().contains("libfoo.so.1"));
    }

    #[test]
    fn reads_what_apt_would_install() {
        let plan = "Reading package lists...\nInst libnl-3-200 (3.7.0-0.2+b1 Debian:12 [amd64])\n\
                    Inst libibverbs1 (44.0-2 Debian:12 [amd64])\nConf libnl-3-200 (3.7.0 Debian:12 [amd64])\n";
        assert_eq!(planned(plan), ["libnl-3-200", "libibverbs1"]);
        assert!(planned("Reading package lists...\n").is_empty());
    }

    #[test]
    fn links_libraries_into_the_wheels_own_folder() {
        let folder = tempfile::tempdir().unwrap();
        let (lib, wheel) = (folder.path().join("lib"), folder.path().join("wheel"));
        let libs = wheel.join("some_package.libs");
        fs::create_dir_all(&libs).unwrap();
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("libnuma.so.1"), "new").unwrap();
        fs::write(lib.join("libown.so.1"), "other").unwrap();
        fs::write(lib.join("readme.txt"), "").unwrap();
        fs::write(libs.join("libown.so.1"), "own").unwrap();
        symlink("/nonexistent/libnuma.so.1", libs.join("libnuma.so.1")).unwrap();

        let absent = folder.path().join("absent");
        for _ in 0..2 {
            link(&[lib.clone(), absent.clone()], &wheel).unwrap();
            assert_eq!(fs::read_to_string(libs.join("libnuma.so.1")).unwrap(), "new");
            assert_eq!(fs::read_to_string(libs.join("libown.so.1")).unwrap(), "own");
            assert!(!libs.join("readme.txt").exists());
        }
        fs::remove_dir_all(&libs).unwrap();
        let error = link(&[lib], &wheel).unwrap_err().to_string();
        assert!(error.contains("*.libs"), "{error}");
    }
}
