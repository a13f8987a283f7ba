//! Compiles the kernel programs with a pair of [`crate::toolchain`]. One file for `build.rs` and
//! `xtask`.

use std::{
    env,
    ffi::OsString,
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use crate::toolchain::{Core, Pair, TARGET, entries, home};

/// The names of the objects as Cargo makes them: plain, and with events logged.
const BINARIES: [&str; 2] = ["culvert-ebpf", "culvert-ebpf-log"];
/// Variables of Cargo that a user sets; all others of that name are one build's own.
const KEPT: [&str; 9] = [
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
/// Further variables that one build sets and another must not inherit.
const DROPPED: [&str; 5] = [
    "CLIPPY_",
    "RUSTC",
    "RUSTDOC",
    "RUSTFLAGS",
    "RUSTUP_TOOLCHAIN",
];

/// The variables that Cargo sets for a build script. Crates of the kernel programs read `HOST`: with it in
/// one caller and not in the other, each would recompile the crates that the other has compiled.
const OF_BUILD_SCRIPT: [&str; 7] = [
    "DEBUG",
    "HOST",
    "NUM_JOBS",
    "OPT_LEVEL",
    "OUT_DIR",
    "PROFILE",
    "TARGET",
];

/// Runs the compiler. Cargo distinguishes crates outside a workspace by their paths, and the names of
/// functions, and with them the objects, would depend on these: our crates are distinguished by name.
const ANYWHERE: &str = r#"#!/bin/sh
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

/// The objects of kernel programs.
pub(crate) struct Objects {
    /// The object that is loaded by default.
    pub(crate) plain: PathBuf,
    /// The same programs, with their events logged.
    pub(crate) logging: PathBuf,
}

/// Compiles the objects for machines of `arch` and says where they lie. `workspace` is the real path
/// of its folder: it is cut from the paths in the objects.
pub(crate) fn compile(pair: &Pair, workspace: &Path, arch: &str) -> io::Result<Objects> {
    let target = target_folder()?;
    let status = cargo(pair, workspace, &target, arch, "build")?.status()?;
    if !status.success() {
        return Err(io::Error::other("the kernel programs don't compile"));
    }
    let folder = target.join(TARGET).join("release");
    let [plain, logging] = BINARIES.map(|name| folder.join(name));
    Ok(Objects { plain, logging })
}

/// A `cargo` of its own for the kernel programs: its compiler, its flags, its target folder, and
/// nothing inherited from the build that calls it.
pub(crate) fn cargo(
    pair: &Pair,
    workspace: &Path,
    target: &Path,
    arch: &str,
    subcommand: &str,
) -> io::Result<Command> {
    let own = pair.compiler.sysroot.join("bin/cargo");
    let program = match pair.compiler.core {
        // Sources of the standard library want the Cargo that came with them.
        Core::Source if own.is_file() => own.into_os_string(),
        Core::Source | Core::Compiled => env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
    };
    let mut command = Command::new(program);
    for (name, _) in env::vars_os() {
        if is_dropped(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    command
        .current_dir(workspace.join("tunnel-ebpf"))
        .arg(subcommand)
        .args(["--release", "--target", TARGET, "--target-dir"])
        .arg(target)
        .env("RUSTC", &pair.compiler.rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTC_WRAPPER", anywhere(target)?)
        // Empty, not absent: a wrapper may also stand in the user's configuration.
        .env("RUSTC_WORKSPACE_WRAPPER", "")
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            flags(pair, workspace, target, arch),
        );
    if pair.compiler.core == Core::Source {
        command.args(["-Z", "build-std=core"]);
    }
    Ok(command)
}

/// Returns the path of [`ANYWHERE`], which is written once: Cargo checks its age.
fn anywhere(target: &Path) -> io::Result<PathBuf> {
    let path = target.join("anywhere");
    if fs::read_to_string(&path).is_ok_and(|text| text == ANYWHERE) {
        return Ok(path);
    }
    fs::create_dir_all(target)?;
    let draft = target.join(format!("anywhere-{}", std::process::id()));
    fs::write(&draft, ANYWHERE)?;
    fs::set_permissions(&draft, fs::Permissions::from_mode(0o755))?;
    fs::rename(&draft, &path)?;
    Ok(path)
}

/// Beside the outer build's own folders, so that all its profiles share one object.
pub(crate) fn target_folder() -> io::Result<PathBuf> {
    let out = env::var_os("OUT_DIR").map(PathBuf::from);
    let inside = out.map_or_else(env::current_exe, Ok)?.canonicalize()?;
    // Cargo marks the top: with the tag when it made the folder, and with its notes on rustc.
    let marks = ["CACHEDIR.TAG", ".rustc_info.json"];
    let is_top = |folder: &&Path| marks.iter().any(|mark| folder.join(mark).is_file());
    let top = inside.ancestors().skip(1).find(is_top);
    let top = top.or_else(|| inside.parent()).unwrap_or(&inside);
    Ok(top.join("bpf"))
}

fn is_dropped(name: &str) -> bool {
    if name.starts_with("CARGO") {
        return !KEPT.iter().any(|kept| name.starts_with(kept));
    }
    OF_BUILD_SCRIPT.contains(&name) || DROPPED.iter().any(|dropped| name.starts_with(dropped))
}

fn flags(pair: &Pair, workspace: &Path, target: &Path, arch: &str) -> OsString {
    let mut flags = vec![
        OsString::from(format!("--cfg=bpf_target_arch=\"{arch}\"")),
        "-Cdebuginfo=2".into(),
        "-Clink-arg=--btf".into(),
        joined("-Clinker=", &pair.linker.path, ""),
    ];
    // The last prefix that fits wins: the target folder often lies in the workspace.
    let mut prefixes = vec![
        (workspace.to_owned(), "culvert"),
        (target.to_owned(), "target"),
    ];
    prefixes.extend(registries().into_iter().map(|folder| (folder, "crates")));
    prefixes.push((pair.compiler.sysroot.join("lib/rustlib/src/rust"), "rust"));
    for (folder, name) in prefixes {
        flags.push(joined("--remap-path-prefix=", &folder, &format!("={name}")));
    }
    flags.join(&OsString::from("\x1f"))
}

/// The folders where Cargo unpacks crates, one per registry.
pub(crate) fn registries() -> Vec<PathBuf> {
    entries(home("CARGO_HOME", ".cargo"), "registry/src")
}

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
    fn what_one_build_hands_down_is_dropped_and_what_a_user_sets_is_kept() {
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
            assert!(is_dropped(name), "{name}");
        }
        for name in [
            "CARGO_HOME",
            "CARGO_HTTP_PROXY",
            "CARGO_MAKEFLAGS",
            "HOSTNAME",
            "PATH",
            "RUSTUP_HOME",
        ] {
            assert!(!is_dropped(name), "{name}");
        }
    }
}
