//! In a process that has Python: nothing stands in for it, and an engine that it made is adopted.

use std::path::Path;
use std::process::Command;

const SCRIPT: &str = r#"
import ctypes, sys
rust = ctypes.CDLL(sys.argv[1])
rust.load.restype = rust.adopt.restype = ctypes.c_char_p
rust.adopt.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

def check(error):
    if error is not None:
        sys.exit(error.decode())

if sys.argv[2] == "load":
    check(rust.load())
else:
    from mooncake.engine import TransferEngine
    engines = [TransferEngine(), TransferEngine()]
    for engine in engines:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    check(rust.adopt(*(engine.get_engine_ptr() for engine in engines)))
print("done")
"#;

fn run(what: &str) {
    // The examples are built with the tests, beside them.
    let test = std::env::current_exe().unwrap();
    let library = test.ancestors().nth(2).unwrap().join("examples/libin_python.so");
    assert!(library.exists(), "run all of `cargo test -p mooncake-sys` once: no {}", library.display());
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    // The wheel that set-up fetches is for this Python.
    let output = Command::new("python3.11")
        .args(["-c", SCRIPT])
        .arg(&library)
        .arg(what)
        .env("PYTHONPATH", root.join(".mooncake/wheel"))
        .env("MC_LOG_LEVEL", "ERROR")
        .output()
        .expect("python3.11 starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{output:?}");
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "needs cargo xtask setup and python3.11"]
fn nothing_stands_in_for_python() {
    run("load");
}

#[test]
#[ignore = "needs cargo xtask setup and python3.11"]
fn an_engine_that_python_made_is_adopted() {
    run("adopt");
}
