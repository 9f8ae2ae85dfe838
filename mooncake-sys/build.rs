//! Builds the C++ shim, and the stand-in for Python's symbols as a shared object that the library carries inside.

use std::path::PathBuf;
use std::{env, process};

fn main() {
    for file in ["shim/common.h", "shim/shim.cpp", "shim/store.cpp", "shim/pystub.c", "shim/python_symbols.def"] {
        println!("cargo:rerun-if-changed={file}");
    }

    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // The engine was built with the new string ABI; a compiler set to the old one would pass it other strings.
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        .warnings(true)
        .extra_warnings(true)
        .files(["shim/shim.cpp", "shim/store.cpp"])
        .compile("moonring_shim");

    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let stub = out.join("libmoonring_pystub.so");
    let mut command = cc::Build::new().pic(true).get_compiler().to_command();
    command.args(["-shared", "-Wl,-soname,libmoonring_pystub.so", "-o"]).arg(&stub).arg("shim/pystub.c");
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{command:?}: {status}")),
        Err(error) => fail(&format!("{command:?}: {error}")),
    }
}

fn fail(what: &str) -> ! {
    eprintln!("the stand-in for Python's symbols could not be built: {what}");
    process::exit(1)
}
