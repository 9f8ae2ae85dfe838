//! Which wheels are known, and how long a `TransferRequest` is in each.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use crate::error::Reason;

/// The wheel versions that this crate was run with. A wheel does not say how it lays its types out, so any other is refused.
/// Those before 0.3.12 can be called, but are left out: over TCP they report a WRITE as COMPLETED before the target has
/// applied it, and even one that the target refuses.
const KNOWN: &[(&str, usize)] = &[("0.3.12", 48), ("0.3.12.post1", 48), ("0.3.13", 56), ("0.3.13.post1", 56)];

/// The length from which a request has a `task_group_id`.
pub(crate) const WITH_TASK_GROUP: usize = 56;

/// The known versions, for messages.
pub(crate) fn known() -> String {
    let names: Vec<&str> = KNOWN.iter().map(|(version, _)| *version).collect();
    names.join(", ")
}

/// The newest known version, for advice.
pub(crate) fn newest() -> &'static str {
    KNOWN[KNOWN.len() - 1].0
}

/// A wheel's version, and the size of its `TransferRequest`.
#[derive(Debug, PartialEq)]
pub(crate) struct Version {
    pub(crate) name: String,
    pub(crate) request_bytes: usize,
}

/// Reads the version of the wheel unpacked in `folder` off its `*.dist-info`.
pub(crate) fn of_wheel(folder: &Path) -> Result<Version, Reason> {
    let entries = fs::read_dir(folder).map_err(|error| Reason::Unreadable { path: folder.into(), error })?;
    let mut names: Vec<String> = entries.filter_map(|entry| version_in(&entry.ok()?.file_name())).collect();
    names.sort();
    names.dedup();
    // Several packages (for the CPU, for CUDA) put the same engine.so there; only one of them can be it.
    let [name] = &names[..] else {
        return Err(if names.is_empty() { Reason::NoVersion } else { Reason::SeveralVersions(names.join(", ")) });
    };
    match KNOWN.iter().find(|(known, _)| known == name) {
        Some(&(_, request_bytes)) => Ok(Version { name: name.clone(), request_bytes }),
        None => Err(Reason::UnknownVersion { version: name.clone() }),
    }
}

/// `0.3.13` of `mooncake_transfer_engine_non_cuda-0.3.13.dist-info`.
fn version_in(file_name: &OsStr) -> Option<String> {
    let (package, version) = file_name.to_str()?.strip_suffix(".dist-info")?.split_once('-')?;
    package.starts_with("mooncake_transfer_engine").then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wheel(dist_infos: &[&str]) -> Result<Version, Reason> {
        let folder = tempfile::tempdir().unwrap();
        for name in dist_infos {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        of_wheel(folder.path())
    }

    #[test]
    fn reads_the_request_size_off_the_version() {
        let sizes = [
            ("mooncake_transfer_engine_non_cuda-0.3.12.post1.dist-info", 48),
            ("mooncake_transfer_engine-0.3.13.dist-info", 56),
            ("mooncake_transfer_engine_cuda13-0.3.13.post1.dist-info", 56),
        ];
        for (name, bytes) in sizes {
            assert_eq!(wheel(&[name, "numpy-2.0.dist-info"]).unwrap().request_bytes, bytes);
        }
    }

    #[test]
    fn refuses_a_version_it_was_not_run_with() {
        let refused = wheel(&["mooncake_transfer_engine-0.4.0.dist-info"]).unwrap_err();
        assert!(refused.to_string().contains("0.4.0"), "{refused}");
        // A local build may be laid out in any way.
        wheel(&["mooncake_transfer_engine-0.3.13+mine.dist-info"]).unwrap_err();
    }

    #[test]
    fn two_packages_must_agree() {
        let one = "mooncake_transfer_engine-0.3.13.dist-info";
        let refused = wheel(&[one, "mooncake_transfer_engine_non_cuda-0.3.12.dist-info"]).unwrap_err();
        assert!(refused.to_string().contains("0.3.12, 0.3.13"), "{refused}");
        wheel(&[one, "mooncake_transfer_engine_non_cuda-0.3.13.dist-info"]).unwrap();
    }
}
