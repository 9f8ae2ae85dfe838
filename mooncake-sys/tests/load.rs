//! Where an engine is looked for, and what is said when there is none. Each case runs in a child process, whose
//! environment, current directory and executable it chooses.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mooncake_sys::{Api, LIBRARY_VAR, STORE_LIBRARY_VAR, Source, StoreApi, WHEEL_VAR};
use tempfile::TempDir;

/// What the child does.
#[test]
fn child() {
    if std::env::var_os("MOONRING_TEST_CHILD").is_some() {
        let loaded = match std::env::var_os("MOONRING_TEST_STORE") {
            None => Api::load().map(|api| api.path()),
            Some(_) => StoreApi::load().map(|api| api.path()),
        };
        match loaded {
            Ok(path) => println!("loaded {}", path.display()),
            Err(error) => println!("{error}"),
        }
    }
}

/// A world with nothing in it but this test's executable. One at a time: a process that is started just while another is
/// being written to would keep it open, and "text file busy" would be the result.
struct World {
    root: TempDir,
    _one: MutexGuard<'static, ()>,
}

static ONE: Mutex<()> = Mutex::new(());

impl World {
    fn new() -> Self {
        let world =
            Self { root: tempfile::tempdir().unwrap(), _one: ONE.lock().unwrap_or_else(PoisonError::into_inner) };
        fs::copy(std::env::current_exe().unwrap(), world.path("test")).unwrap();
        fs::create_dir(world.path("bin")).unwrap();
        fs::create_dir(world.path("inside")).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// A wheel whose engine.so is a copy of `module`.
    fn wheel(&self, folder: &str, version: &str, module: &Path) -> PathBuf {
        let wheel = self.path(folder);
        fs::create_dir_all(wheel.join("mooncake")).unwrap();
        fs::create_dir(wheel.join(format!("mooncake_transfer_engine_non_cuda-{version}.dist-info"))).unwrap();
        fs::copy(module, wheel.join("mooncake/engine.so")).unwrap();
        wheel
    }

    fn python(&self, script: &str) {
        let python = self.path("bin/python3");
        fs::write(&python, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn load(&self, variables: &[(&str, &Path)]) -> String {
        let output = Command::new(self.path("test"))
            .args(["--exact", "child", "--nocapture"])
            .current_dir(self.path("inside"))
            .env_clear()
            .env("MOONRING_TEST_CHILD", "1")
            .env("PATH", self.path("bin"))
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
}

#[test]
fn nothing_found_lists_every_place_and_the_way_out() {
    let world = World::new();
    let inside = world.path("inside");
    assert_says(
        &world.load(&[]),
        &[
            "MOONRING_TRANSFER_ENGINE: not set",
            "MOONRING_MOONCAKE_WHEEL: not set",
            "libtransfer_engine.so on the loader's search path: libtransfer_engine.so: cannot open",
            &format!("the set-up folder: no .mooncake at or above {}", inside.display()),
            "the mooncake package of python3: python3 does not start",
            "cargo xtask setup",
        ],
    );
}

#[test]
fn python_is_asked_last() {
    let world = World::new();
    world.python("");
    assert_says(&world.load(&[]), &["python3: it has no package called mooncake"]);
    world.python("echo Traceback >&2; echo 'Broken: thing' >&2; exit 3");
    assert_says(&world.load(&[]), &["exit status: 3: Broken: thing"]);
    let site = world.wheel("site", "9.9", fake_mooncake::library());
    world.python(&format!("printf %s {}", site.join("mooncake").display()));
    assert_says(&world.load(&[]), &[&format!("python3, {}/mooncake/engine.so: wheel version 9.9", site.display())]);
}

#[test]
fn a_variable_that_is_set_is_a_decision() {
    let world = World::new();
    let library = fake_mooncake::library();
    let loaded = format!("loaded {}", library.display());
    assert_says(&world.load(&[(LIBRARY_VAR, library)]), &[&loaded]);

    let nowhere = world.path("nowhere.so");
    let text = world.load(&[(LIBRARY_VAR, &nowhere)]);
    assert_says(&text, &[&format!("{LIBRARY_VAR}={}", nowhere.display()), "cannot open"]);
    assert!(!text.contains("search path"), "{text}");

    let text = world.load(&[(WHEEL_VAR, &nowhere)]);
    assert_says(&text, &[&format!("there is no {}/mooncake/engine.so", nowhere.display())]);
    assert!(!text.contains("python3"), "{text}");
}

#[test]
fn a_library_on_the_search_path_is_found() {
    let world = World::new();
    let folder = fake_mooncake::library().parent().unwrap();
    assert_says(&world.load(&[("LD_LIBRARY_PATH", folder)]), &["loaded libtransfer_engine.so"]);
}

#[test]
fn an_incomplete_library_names_what_it_lacks() {
    let world = World::new();
    let text = world.load(&[(LIBRARY_VAR, &fake_mooncake::incomplete())]);
    assert_says(&text, &["it lacks freeBatchID syncSegmentCache"]);
}

#[test]
fn an_unknown_wheel_is_refused_before_it_is_loaded() {
    let world = World::new();
    // Nothing that could be loaded: the version decides first.
    let text_file = world.path("inside/text");
    fs::write(&text_file, "no library").unwrap();
    let wheel = world.wheel("wheel", "0.4.0", &text_file);
    assert_says(
        &world.load(&[(WHEEL_VAR, &wheel)]),
        &[
            "wheel version 0.4.0 is none of those known",
            "0.3.13.post1",
            "pip install mooncake-transfer-engine-non-cuda==",
        ],
    );
    // With a known version it is the loader's turn.
    let wheel = world.wheel("known", "0.3.13", &text_file);
    assert_says(&world.load(&[(WHEEL_VAR, &wheel)]), &["file too short"]);
}

#[test]
fn a_wheel_without_its_dist_info_is_refused() {
    let world = World::new();
    let wheel = world.wheel("wheel", "0.3.13", fake_mooncake::library());
    fs::remove_dir(wheel.join("mooncake_transfer_engine_non_cuda-0.3.13.dist-info")).unwrap();
    assert_says(&world.load(&[(WHEEL_VAR, &wheel)]), &["no mooncake_transfer_engine*.dist-info"]);
}

#[test]
fn a_missing_system_library_is_named_or_taken_from_the_setup_folder() {
    let world = World::new();
    let wheel = world.wheel(".mooncake/wheel", "0.3.13", &fake_mooncake::needs_absent_library());
    let missing = "it needs libmoonring_absent.so.1, which is not installed";
    assert_says(
        &world.load(&[]),
        &[
            &format!("the set-up folder, {}/mooncake/engine.so: {missing}", wheel.display()),
            "install what provides libmoonring_absent.so.1",
        ],
    );

    let lib = world.path(".mooncake/lib/usr/lib");
    fs::create_dir_all(&lib).unwrap();
    let absent = "libmoonring_absent.so.1";
    fs::copy(fake_mooncake::lib_folder().join("usr/lib").join(absent), lib.join(absent)).unwrap();
    let text = world.load(&[]);
    // It loads, and turns out to be no engine.
    assert_says(&text, &["it lacks _ZN8mooncake14TransferEngineC1Eb"]);
    assert!(!text.contains(missing), "{text}");
}

#[test]
fn a_python_symbol_that_no_wheel_needs_is_an_error_and_no_crash() {
    let world = World::new();
    let wheel = world.wheel("wheel", "0.3.13", &fake_mooncake::needs_python_symbol());
    assert_says(&world.load(&[(WHEEL_VAR, &wheel)]), &["it needs Python's PyMoonring_New"]);
}

#[test]
fn nothing_mapped_is_nothing_to_adopt() {
    let error = Api::adopt().unwrap_err();
    assert_says(&error.to_string(), &["the images mapped in this process: none of"]);
}

#[test]
fn a_store_client_is_looked_for_in_the_same_places() {
    let world = World::new();
    let store = |variables: &[(&str, &Path)]| {
        let mut all = vec![("MOONRING_TEST_STORE", Path::new("1"))];
        all.extend_from_slice(variables);
        world.load(&all)
    };
    assert_says(
        &store(&[]),
        &[
            "no Mooncake Store client could be loaded",
            "MOONRING_MOONCAKE_STORE: not set",
            "libmooncake_store.so on the loader's search path: libmooncake_store.so: cannot open",
            "the set-up folder: no .mooncake",
            "or set MOONRING_MOONCAKE_WHEEL to a folder with a pip wheel's mooncake/store.so",
        ],
    );
    let library = fake_mooncake::store_library();
    let loaded = format!("loaded {}", library.display());
    assert_says(&store(&[(STORE_LIBRARY_VAR, &library)]), &[&loaded]);
    assert_says(&store(&[("LD_LIBRARY_PATH", library.parent().unwrap())]), &["loaded libmooncake_store.so"]);
    // The engine's variable says nothing about the Store.
    assert_says(&store(&[(LIBRARY_VAR, &library)]), &["python3 does not start"]);
    let wheel = world.wheel("wheel", "0.3.13", &library);
    assert_says(&store(&[(WHEEL_VAR, &wheel)]), &["there is no", "mooncake/store.so"]);
    fs::copy(&library, wheel.join("mooncake/store.so")).unwrap();
    assert_says(&store(&[(WHEEL_VAR, &wheel)]), &["it lacks _ZN8mooncake10RealClient6createEv"]);
}

#[test]
fn one_place_can_be_named() {
    let nowhere = Source::Wheel("/nowhere".into());
    // SAFETY: there is nothing there that could run.
    let error = unsafe { Api::load_from(&nowhere) }.unwrap_err();
    assert_says(&error.to_string(), &["/nowhere/mooncake/engine.so"]);
}
