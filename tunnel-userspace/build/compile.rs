//! Compiles the kernel programs. `build.rs` and `xtask` both include this file.

use std::{
    env,
    ffi::OsString,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use crate::toolchain::{Core, TARGET, Toolchain, entries, home};

/// The names of the binaries that Cargo builds: the default object, and the one that logs events.
const BINARIES: [&str; 2] = ["culvert-ebpf", "culvert-ebpf-log"];
/// Prefixes of the Cargo variables that a user may set and that the inner build inherits. All other `CARGO*`
/// variables were set by Cargo for the outer build.
const USER_VARIABLES: [&str; 9] = [
    "CARGO_HOME",
    "CARGO_HTTP_",
    "CARGO_MAKEFLAGS",
    "CARGO_NET_",
    "CARGO_REGISTRIES_",
    "CARGO_REGISTRY_",
    "CARGO_SOURCE_",
    "CARGO_TERM_",
    "CARGO_BUILD_JOBS",
];
/// Prefixes of other variables that the inner build must not inherit from the outer one.
const COMPILER_VARIABLES: [&str; 5] = [
    "CLIPPY_",
    "RUSTC",
    "RUSTDOC",
    "RUSTFLAGS",
    "RUSTUP_TOOLCHAIN",
];

/// Environment variables that Cargo sets for a build script. Dependencies of the kernel programs read `HOST`:
/// if `build.rs` passed it on and `xtask` did not, each would recompile the crates that the other has
/// compiled.
const BUILD_SCRIPT_VARIABLES: [&str; 7] = [
    "DEBUG",
    "HOST",
    "NUM_JOBS",
    "OPT_LEVEL",
    "OUT_DIR",
    "PROFILE",
    "TARGET",
];

/// The shell script that Cargo runs instead of the compiler. For a crate outside a workspace, Cargo derives
/// `-C metadata` from the crate's path, and function names depend on this value. The script replaces it with
/// a constant for our crates, so that the objects are the same in every checkout.
const RUSTC_WRAPPER: &str = r#"#!/bin/sh
case " $* " in
  *" --crate-name tunnel_common "* | *" --crate-name culvert_ebpf"*)
    for word; do
      shift
      case $word in metadata=*) word=metadata=culvert ;; esac
      set -- "$@" "$word"
    done
    ;;
esac
exec "$@"
"#;

/// The paths of the compiled kernel programs.
pub(crate) struct Objects {
    /// The object that is loaded by default.
    pub(crate) plain: PathBuf,
    /// The object with the same programs, which also log events.
    pub(crate) logging: PathBuf,
}

/// Compiles the objects for kernels on the architecture `arch`, and returns their paths. `workspace` is the
/// canonical path of the workspace; the objects contain paths relative to it.
pub(crate) fn compile(toolchain: &Toolchain, workspace: &Path, arch: &str) -> io::Result<Objects> {
    let target = target_directory()?;
    let status = cargo(toolchain, workspace, &target, arch, "build")?.status()?;
    if !status.success() {
        return Err(io::Error::other("the kernel programs do not compile"));
    }
    let directory = target.join(TARGET).join("release");
    let [plain, logging] = BINARIES.map(|name| directory.join(name));
    Ok(Objects { plain, logging })
}

/// Returns a `cargo` command for the kernel programs, with their compiler, flags and target directory. It
/// inherits no variables from an outer build.
pub(crate) fn cargo(
    toolchain: &Toolchain,
    workspace: &Path,
    target: &Path,
    arch: &str,
    subcommand: &str,
) -> io::Result<Command> {
    let toolchain_cargo = toolchain.compiler.sysroot.join("bin/cargo");
    let program = match toolchain.compiler.core {
        // `build-std` works only if Cargo is from the same release as the sources.
        Core::Source if toolchain_cargo.is_file() => toolchain_cargo.into_os_string(),
        Core::Source | Core::Compiled => env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
    };
    let mut command = Command::new(program);
    for (name, _) in env::vars_os() {
        if is_removed(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
        .current_dir(workspace.join("tunnel-ebpf"))
        .arg(subcommand)
        .args(["--release", "--target", TARGET, "--target-dir"])
        .arg(target)
        .env("RUSTC", &toolchain.compiler.rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTC_WRAPPER", write_rustc_wrapper(target)?)
        // Set to an empty string, not removed, to override a wrapper in the user's Cargo configuration.
        .env("RUSTC_WORKSPACE_WRAPPER", "")
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            flags(toolchain, workspace, target, arch),
        );
    if toolchain.compiler.core == Core::Source {
        command.args(["-Z", "build-std=core"]);
    }
    Ok(command)
}

/// Writes [`RUSTC_WRAPPER`] to a file and returns the file's path. An up-to-date file is left alone, since a
/// newer modification time would make Cargo rebuild everything.
fn write_rustc_wrapper(target: &Path) -> io::Result<PathBuf> {
    let path = target.join("rustc-wrapper");
    if fs::read_to_string(&path).is_ok_and(|text| text == RUSTC_WRAPPER) {
        return Ok(path);
    }
    fs::create_dir_all(target)?;
    let draft = target.join(format!("rustc-wrapper-{}", std::process::id()));
    fs::write(&draft, RUSTC_WRAPPER)?;
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o755))?;
    fs::rename(&draft, &path)?;
    Ok(path)
}

/// Returns the target directory for the kernel programs: `bpf` in the outer build's target directory, so that
/// all profiles share the objects.
pub(crate) fn target_directory() -> io::Result<PathBuf> {
    let out = env::var_os("OUT_DIR").map(PathBuf::from);
    let inside = out.map_or_else(env::current_exe, Ok)?.canonicalize()?;
    // Cargo writes these files at the top of a target directory. It writes the tag only into directories that
    // it has created itself.
    let marks = ["CACHEDIR.TAG", ".rustc_info.json"];
    let is_top = |directory: &&Path| marks.iter().any(|mark| directory.join(mark).is_file());
    let top = inside.ancestors().skip(1).find(is_top);
    let top = top.or_else(|| inside.parent()).unwrap_or(&inside);
    Ok(top.join("bpf"))
}

/// Returns true if the inner build must not inherit the given variable.
fn is_removed(name: &str) -> bool {
    let has_prefix = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if name.starts_with("CARGO") {
        return !has_prefix(&USER_VARIABLES);
    }
    BUILD_SCRIPT_VARIABLES.contains(&name) || has_prefix(&COMPILER_VARIABLES)
}

/// Returns the compiler flags, separated as `CARGO_ENCODED_RUSTFLAGS` requires.
fn flags(toolchain: &Toolchain, workspace: &Path, target: &Path, arch: &str) -> OsString {
    let mut flags = vec![
        OsString::from(format!("--cfg=bpf_target_arch=\"{arch}\"")),
        "-Cdebuginfo=2".into(),
        "-Clink-arg=--btf".into(),
        joined("-Clinker=", &toolchain.linker.path, ""),
    ];
    // The last matching prefix wins, so the target directory, which is often inside the workspace, comes
    // second.
    let mut prefixes = vec![
        (workspace.to_owned(), "culvert"),
        (target.to_owned(), "target"),
    ];
    prefixes.extend(
        registries()
            .into_iter()
            .map(|directory| (directory, "crates")),
    );
    let std_sources = toolchain.compiler.sysroot.join("lib/rustlib/src/rust");
    prefixes.push((std_sources, "rust"));
    for (directory, name) in prefixes {
        flags.push(joined(
            "--remap-path-prefix=",
            &directory,
            &format!("={name}"),
        ));
    }
    flags.join(&OsString::from("\x1f"))
}

/// Returns the directories into which Cargo unpacks crates, one per registry.
pub(crate) fn registries() -> Vec<PathBuf> {
    entries(home("CARGO_HOME", ".cargo"), "registry/src")
}

/// Concatenates `before`, a path that need not be valid UTF-8, and `after`.
pub(crate) fn joined(before: &str, path: &Path, after: &str) -> OsString {
    let mut text = OsString::from(before);
    text.push(path);
    text.push(after);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_outer_build_are_removed_and_those_of_the_user_are_inherited() {
        for name in [
            "CARGO_MANIFEST_DIR",
            "CARGO_ENCODED_RUSTFLAGS",
            "CARGO_TARGET_DIR",
            "CARGO_PROFILE_RELEASE_LTO",
            "CLIPPY_ARGS",
            "HOST",
            "RUSTC_WORKSPACE_WRAPPER",
            "RUSTFLAGS",
            "RUSTUP_TOOLCHAIN",
        ] {
            assert!(is_removed(name), "{name}");
        }
        for name in [
            "CARGO_HOME",
            "CARGO_HTTP_PROXY",
            "CARGO_MAKEFLAGS",
            "HOSTNAME",
            "PATH",
            "RUSTUP_HOME",
        ] {
            assert!(!is_removed(name), "{name}");
        }
    }
}
