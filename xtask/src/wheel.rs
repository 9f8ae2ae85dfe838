//! One folder of unpacked wheels: fetched by hash with pip, put in place whole, checked on every run.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::command;
use crate::pins::Pin;
use crate::system;

/// The Python whose wheels are taken, whatever Python the machine has: a hash belongs to one tag,
/// and moonring uses only the parts of the wheel that no Python runs.
const PYTHON: &str = "3.11";

/// Written last into the folder before it is put in place; holds what the folder was made from.
const STAMP: &str = "moonring-setup";

/// What a folder made from `pins` on this machine has in its stamp.
fn stamp(pins: &[Pin]) -> String {
    let mut text = format!("python {PYTHON} on {}\n", std::env::consts::ARCH);
    for pin in pins {
        text.push_str(&pin.requirement());
        text.push('\n');
    }
    text
}

/// Makes `folder` hold exactly `pins`, unpacked. `scratch` is an empty folder on the same file system.
///
/// Returns whether anything had to be done.
pub fn ensure(folder: &Path, pins: &[Pin], scratch: &Path) -> Result<bool> {
    let Err(reason) = check(folder, &stamp(pins)) else {
        return Ok(false);
    };
    if folder.exists() {
        eprintln!("{} is made anew: {reason:#}", folder.display());
    }
    let downloads = scratch.join("download");
    let unpacked = scratch.join("unpacked");
    download(pins, &downloads, &scratch.join("requirements.txt"))?;
    for entry in fs::read_dir(&downloads)? {
        unpack(&entry?.path(), &unpacked)?;
    }
    fs::write(unpacked.join(STAMP), stamp(pins))?;
    check(&unpacked, &stamp(pins)).context("the wheel that was just unpacked is incomplete")?;

    // Two renames: whoever is interrupted here leaves the old folder, none, or the new one.
    if folder.exists() {
        fs::rename(folder, scratch.join("replaced"))?;
    }
    fs::rename(&unpacked, folder).with_context(|| format!("could not make {}", folder.display()))?;
    Ok(true)
}

/// Why `folder` is not what a set-up with this `stamp` leaves behind, if it is not.
fn check(folder: &Path, stamp: &str) -> Result<()> {
    let path = folder.join(STAMP);
    let found = fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
    if found != stamp {
        bail!("it was made from other pins");
    }
    let mut records = 0;
    for entry in fs::read_dir(folder)? {
        let record = entry?.path().join("RECORD");
        if record.parent().is_some_and(|dir| dir.extension().is_some_and(|e| e == "dist-info")) {
            let text = fs::read_to_string(&record).with_context(|| format!("no {}", record.display()))?;
            check_record(folder, &text)?;
            records += 1;
        }
    }
    // One line of the stamp is the platform, each of the others a package.
    let packages = stamp.lines().count() - 1;
    if records != packages {
        bail!("it has {records} packages instead of {packages}");
    }
    Ok(())
}

/// Compares the files below `folder` with a wheel's RECORD (`path,hash,size` a line) by their size:
/// the hash of the whole was pip's work, this finds what was deleted or cut short since.
fn check_record(folder: &Path, record: &str) -> Result<()> {
    for line in record.lines() {
        let mut fields = line.rsplitn(3, ',');
        let (size, _hash, name) = (fields.next(), fields.next(), fields.next());
        let name = name.with_context(|| format!("`{line}` is no line of a RECORD"))?;
        let path = folder.join(name.trim_matches('"'));
        let found = fs::metadata(&path).with_context(|| format!("{} is missing", path.display()))?;
        // RECORD lists itself, without a size.
        if let Some(size) = size.filter(|size| !size.is_empty())
            && size.parse() != Ok(found.len())
        {
            bail!("{} has {} bytes instead of {size}", path.display(), found.len());
        }
    }
    Ok(())
}

fn download(pins: &[Pin], to: &Path, requirements: &Path) -> Result<()> {
    let lines: Vec<_> = pins.iter().map(Pin::requirement).collect();
    let names: Vec<_> = pins.iter().map(|pin| format!("{} {}", pin.name, pin.version)).collect();
    fs::write(requirements, lines.join("\n") + "\n")?;
    eprintln!("fetching {}", names.join(" and "));

    let arch = std::env::consts::ARCH;
    let mut pip = pip()?;
    pip.args(["download", "--disable-pip-version-check", "--no-input"])
        .args(["--require-hashes", "--no-deps", "--only-binary=:all:"])
        .args(["--implementation", "cp", "--python-version", PYTHON]);
    for tag in ["manylinux_2_28", "manylinux2014", "manylinux_2_17"] {
        pip.args(["--platform", &format!("{tag}_{arch}")]);
    }
    pip.arg("--dest").arg(to).arg("--requirement").arg(requirements);
    command::run(&mut pip).with_context(|| {
        format!(
            "pip could not fetch {}: it needs the Python package registry (or the mirror in pip's \
             configuration), and the hash of what it gets must be one in xtask/requirements-mooncake.txt",
            names.join(" and ")
        )
    })
}

/// A pip that works, of any Python.
fn pip() -> Result<Command> {
    if let Some(pip) = find_pip() {
        return Ok(pip);
    }
    let help = "no pip was found (tried `python3 -m pip`, `pip3` and `pip`); setup needs one of any \
                Python to fetch Mooncake. Debian and Ubuntu: `apt-get install python3-pip`; elsewhere: \
                `python3 -m ensurepip --user`";
    if !system::can_install() {
        bail!(help);
    }
    system::install(&["python3-pip"]).context(help)?;
    find_pip().ok_or_else(|| anyhow!(help))
}

fn find_pip() -> Option<Command> {
    [&["python3", "-m", "pip"] as &[&str], &["pip3"], &["pip"]].into_iter().find_map(|words| {
        let command = || {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            command
        };
        command::works(command().arg("--version")).then(command)
    })
}

fn unpack(wheel: &Path, to: &Path) -> Result<()> {
    let shown = wheel.display();
    let file = File::open(wheel)?;
    zip::ZipArchive::new(file)
        .and_then(|mut archive| archive.extract(to))
        .with_context(|| format!("could not unpack {shown}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin(version: &str) -> Pin {
        Pin { name: "a".into(), version: version.into(), hashes: vec!["sha256:00".into()] }
    }

    /// A folder as a set-up of `pin("1")` leaves it.
    fn made() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let info = folder.path().join("a-1.dist-info");
        fs::create_dir(&info).unwrap();
        fs::write(folder.path().join("engine.so"), "12345").unwrap();
        fs::write(info.join("RECORD"), "engine.so,sha256=x,5\na-1.dist-info/RECORD,,\n").unwrap();
        fs::write(folder.path().join(STAMP), stamp(&[pin("1")])).unwrap();
        folder
    }

    fn refusal(folder: &Path, stamp: &str) -> String {
        format!("{:#}", check(folder, stamp).unwrap_err())
    }

    #[test]
    fn a_complete_folder_is_left_alone() {
        let folder = made();
        check(folder.path(), &stamp(&[pin("1")])).unwrap();
        // With nothing to do, neither pip nor the scratch folder is touched.
        assert!(!ensure(folder.path(), &[pin("1")], Path::new("/nonexistent")).unwrap());
    }

    #[test]
    fn other_pins_are_noticed() {
        let folder = made();
        assert!(refusal(folder.path(), &stamp(&[pin("2")])).contains("other pins"));
        let more = stamp(&[pin("1"), pin("1")]);
        fs::write(folder.path().join(STAMP), &more).unwrap();
        assert!(refusal(folder.path(), &more).contains("1 packages instead of 2"));
    }

    #[test]
    fn damage_is_noticed() {
        let stamp = stamp(&[pin("1")]);
        let folder = made();
        fs::write(folder.path().join("engine.so"), "123").unwrap();
        assert!(refusal(folder.path(), &stamp).contains("engine.so has 3 bytes instead of 5"));
        fs::remove_file(folder.path().join("engine.so")).unwrap();
        assert!(refusal(folder.path(), &stamp).contains("engine.so is missing"));
        fs::remove_file(folder.path().join("a-1.dist-info/RECORD")).unwrap();
        assert!(refusal(folder.path(), &stamp).contains("RECORD"));
        fs::remove_file(folder.path().join(STAMP)).unwrap();
        assert!(refusal(folder.path(), &stamp).contains(STAMP));
        assert!(check(&folder.path().join("absent"), &stamp).is_err());
    }

    #[test]
    fn a_malformed_record_is_refused() {
        let folder = made();
        let error = check_record(folder.path(), "engine.so,5").unwrap_err().to_string();
        assert!(error.contains("engine.so,5"), "{error}");
        assert!(check_record(folder.path(), "engine.so,sha256=x,five").is_err());
    }
}
