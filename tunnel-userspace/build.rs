//! Compiles the kernel programs, which are embedded in the daemon.

#[path = "build/compile.rs"]
mod compile;
#[path = "build/toolchain.rs"]
mod toolchain;

use std::{env, fs, io, path::PathBuf, process::ExitCode};

/// The paths in the workspace that the BPF objects are built from.
const SOURCES: [&str; 5] = [
    "tunnel-ebpf/src",
    "tunnel-ebpf/Cargo.toml",
    "tunnel-ebpf/Cargo.lock",
    "tunnel-common/src",
    "tunnel-common/Cargo.toml",
];

fn main() -> io::Result<ExitCode> {
    let workspace = directory("CARGO_MANIFEST_DIR")?.join("..").canonicalize()?;
    for source in SOURCES {
        let source = workspace.join(source);
        println!("cargo::rerun-if-changed={}", source.display());
    }
    for name in [toolchain::RUSTC_VARIABLE, toolchain::LINKER_VARIABLE] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let toolchain = match toolchain::find(&workspace.join("target/tools")) {
        Ok(toolchain) => toolchain,
        Err(missing) => {
            println!("cargo::error={missing}");
            return Ok(ExitCode::SUCCESS);
        }
    };
    for program in [&toolchain.compiler.rustc, &toolchain.linker.path] {
        println!("cargo::rerun-if-changed={}", program.display());
    }
    let arch = env::var_os("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    match compile::compile(&toolchain, &workspace, &arch.to_string_lossy()) {
        Ok(objects) => {
            let out = directory("OUT_DIR")?;
            fs::copy(objects.plain, out.join("culvert.bpf.o"))?;
            fs::copy(objects.logging, out.join("culvert-log.bpf.o"))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            let (compiler, linker) = (&toolchain.compiler, &toolchain.linker);
            println!("cargo::error={error}; compiler: {compiler}; linker: {linker}");
            Ok(ExitCode::FAILURE)
        }
    }
}

fn directory(variable: &str) -> io::Result<PathBuf> {
    env::var_os(variable)
        .map(PathBuf::from)
        .ok_or_else(|| io::Error::other(format!("Cargo did not set {variable}")))
}
