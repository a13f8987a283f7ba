//! Finds the toolchain for the kernel programs: a Rust compiler that has or can build `core` for BPF, and a
//! `bpf-linker` with the same LLVM version.
//!
//! `build.rs` and `xtask` both include this file, so that they choose the same toolchain. It uses only the
//! standard library.

use std::{
    env,
    ffi::OsStr,
    fmt,
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
    process::Command,
};

/// The compilation target for the kernel programs.
pub(crate) const TARGET: &str = "bpfel-unknown-none";
/// The environment variable that contains the path of a compiler. If it is set, no other compiler is
/// considered.
pub(crate) const RUSTC_VARIABLE: &str = "CULVERT_BPF_RUSTC";
/// The environment variable that contains the path of a `bpf-linker`. If it is set, no other linker is
/// considered.
pub(crate) const LINKER_VARIABLE: &str = "CULVERT_BPF_LINKER";

/// The form in which a compiler provides `core` for BPF.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Core {
    /// A compiled library, installed with the compiler.
    Compiled,
    /// Source code, to be compiled with `-Z build-std`.
    Source,
}

/// A compiler that has `core` for BPF, or its source code.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Compiler {
    pub(crate) rustc: PathBuf,
    pub(crate) sysroot: PathBuf,
    pub(crate) release: String,
    pub(crate) llvm: u32,
    pub(crate) core: Core,
}

/// A `bpf-linker` that runs on this machine.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Linker {
    pub(crate) path: PathBuf,
    pub(crate) release: String,
    /// LLVM's major version; `None` if LLVM is linked statically, which hides its version.
    pub(crate) llvm: Option<u32>,
}

/// The compiler and the linker for the kernel programs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Toolchain {
    pub(crate) compiler: Compiler,
    pub(crate) linker: Linker,
}

/// The error returned if no compiler has a matching linker. It lists all compilers and linkers that were
/// found.
#[derive(Debug)]
pub(crate) struct ToolchainNotFound {
    pub(crate) compilers: Vec<Compiler>,
    pub(crate) linkers: Vec<Linker>,
}

/// Finds a toolchain on this machine. `tools` is the directory into which `cargo xtask setup` installs tools.
pub(crate) fn find(tools: &Path) -> Result<Toolchain, ToolchainNotFound> {
    let compilers = compilers();
    let linkers = linkers(tools);
    choose(&compilers, &linkers).ok_or(ToolchainNotFound { compilers, linkers })
}

/// Returns the first compiler for which there is a linker with the same LLVM version, or else the first
/// compiler together with a linker whose LLVM version is unknown.
fn choose(compilers: &[Compiler], linkers: &[Linker]) -> Option<Toolchain> {
    let first_match = |matches: fn(&Compiler, &Linker) -> bool| {
        compilers.iter().find_map(|compiler| {
            let linker = linkers.iter().find(|linker| matches(compiler, linker))?;
            Some(Toolchain {
                compiler: compiler.clone(),
                linker: linker.clone(),
            })
        })
    };
    first_match(|compiler, linker| linker.llvm == Some(compiler.llvm))
        .or_else(|| first_match(|_, linker| linker.llvm.is_none()))
}

fn compilers() -> Vec<Compiler> {
    if let Some(rustc) = env::var_os(RUSTC_VARIABLE) {
        return query_compiler(Path::new(&rustc)).into_iter().collect();
    }
    let sysroots = rustup_toolchains().into_iter().chain(["/usr".into()]);
    sysroots
        .filter_map(|sysroot| describe_compiler(&sysroot.join("bin/rustc"), &sysroot))
        .collect()
}

/// Returns the directories of rustup's toolchains: stable ones first, nightlies last, and newer before older.
fn rustup_toolchains() -> Vec<PathBuf> {
    let mut found = entries(home("RUSTUP_HOME", ".rustup"), "toolchains");
    found.sort_by_key(|path| {
        let name = path.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let rank = u8::from(!name.starts_with("stable")) + u8::from(name.starts_with("nightly"));
        (rank, std::cmp::Reverse(name))
    });
    found
}

/// Runs a compiler to find its sysroot, and describes the compiler.
fn query_compiler(rustc: &Path) -> Option<Compiler> {
    let sysroot = output_of(rustc, &["--print", "sysroot"])?;
    describe_compiler(rustc, Path::new(sysroot.trim()))
}

/// Describes a compiler; returns `None` if it can't be run or lacks `core` for BPF.
fn describe_compiler(rustc: &Path, sysroot: &Path) -> Option<Compiler> {
    let core = find_core(sysroot)?;
    let version = output_of(rustc, &["-vV"])?;
    let field = |name: &str| version.lines().find_map(|line| line.strip_prefix(name));
    Some(Compiler {
        rustc: rustc.to_owned(),
        sysroot: sysroot.to_owned(),
        release: field("release: ")?.to_owned(),
        llvm: first_number(field("LLVM version: ")?)?,
        core,
    })
}

fn find_core(sysroot: &Path) -> Option<Core> {
    let rustlib = sysroot.join("lib/rustlib");
    let libraries = entries(Some(rustlib.join(TARGET)), "lib");
    let is_core = |name: &OsStr| name.to_string_lossy().starts_with("libcore-");
    if libraries
        .iter()
        .filter_map(|path| path.file_name())
        .any(is_core)
    {
        return Some(Core::Compiled);
    }
    let source = rustlib.join("src/rust/library/core/Cargo.toml");
    source.exists().then_some(Core::Source)
}

fn linkers(tools: &Path) -> Vec<Linker> {
    if let Some(path) = env::var_os(LINKER_VARIABLE) {
        return describe_linker(path.into()).into_iter().collect();
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let installed = [Some(tools.to_owned()), home("CARGO_HOME", ".cargo")];
    let installed = installed.into_iter().flatten().map(|home| home.join("bin"));
    let mut found: Vec<Linker> = Vec::new();
    for directory in installed.chain(env::split_paths(&path)) {
        let path = directory.join("bpf-linker");
        if path.is_file() && found.iter().all(|linker| linker.path != path) {
            found.extend(describe_linker(path));
        }
    }
    found
}

fn describe_linker(path: PathBuf) -> Option<Linker> {
    let version = output_of(&path, &["--version"])?;
    let release = version.trim().strip_prefix("bpf-linker ");
    Some(Linker {
        release: release.unwrap_or("unknown").to_owned(),
        llvm: linked_llvm(&path),
        path,
    })
}

/// Returns the major version of the LLVM library that a linker loads. `bpf-linker` has no option to print it,
/// but the library's name (such as `libLLVM.so.22.1` or `libLLVM-19.so.1`) appears near the start of the
/// linker's binary.
fn linked_llvm(path: &Path) -> Option<u32> {
    const SEARCHED_BYTES: u64 = 1 << 20;
    const LIBRARY: &[u8] = b"libLLVM";
    let (file, mut head) = (File::open(path).ok()?, Vec::new());
    file.take(SEARCHED_BYTES).read_to_end(&mut head).ok()?;
    let mut windows = head.windows(LIBRARY.len());
    let start = windows.position(|window| window == LIBRARY)?;
    let name = head[start..].split(|byte| *byte == 0).next()?;
    first_number(&String::from_utf8_lossy(name))
}

/// Returns the first number in a string.
fn first_number(text: &str) -> Option<u32> {
    text.split(|character: char| !character.is_ascii_digit())
        .find(|digits| !digits.is_empty())?
        .parse()
        .ok()
}

/// Runs a program, and returns its standard output if it succeeds.
fn output_of(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the directory that an environment variable names or, if the variable is not set, `directory` in
/// the user's home directory.
pub(crate) fn home(variable: &str, directory: &str) -> Option<PathBuf> {
    let named = env::var_os(variable).map(PathBuf::from);
    named.or_else(|| Some(env::home_dir()?.join(directory)))
}

/// Returns the sorted paths of a directory's entries; empty if the directory does not exist.
pub(crate) fn entries(home: Option<PathBuf>, directory: &str) -> Vec<PathBuf> {
    let read = home.and_then(|home| fs::read_dir(home.join(directory)).ok());
    let entries = read.into_iter().flatten().filter_map(Result::ok);
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

impl fmt::Display for Compiler {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = match self.core {
            Core::Compiled => "its own compiled core",
            Core::Source => "its own rust-src",
        };
        let (rustc, release, llvm) = (self.rustc.display(), &self.release, self.llvm);
        write!(out, "{rustc} {release} (LLVM {llvm}, {core})")
    }
}

impl fmt::Display for Linker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.path.display(), self.release)?;
        match self.llvm {
            Some(llvm) => write!(out, " (LLVM {llvm})"),
            None => write!(out, " (unknown LLVM)"),
        }
    }
}

impl ToolchainNotFound {
    /// Describes the missing tools.
    pub(crate) fn summary(&self) -> String {
        let mut text = match (self.compilers.as_slice(), self.linkers.as_slice()) {
            ([], []) => format!("a Rust compiler with `core` for {TARGET}, and bpf-linker"),
            ([], _) => format!("a Rust compiler with `core` for {TARGET}"),
            ([compiler, ..], []) => format!("a bpf-linker that runs, for {compiler}"),
            ([compiler, ..], [linker, ..]) => {
                format!("a bpf-linker of the LLVM of {compiler}; found {linker}")
            }
        };
        // If one of these variables is set, it replaces the search.
        for name in [RUSTC_VARIABLE, LINKER_VARIABLE] {
            if let Some(value) = env::var_os(name) {
                text.push_str(&format!(" ({name} is {})", Path::new(&value).display()));
            }
        }
        text
    }
}

/// Writes a single line, because Cargo shows only one line per error from a build script.
impl fmt::Display for ToolchainNotFound {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tools = self.summary();
        write!(
            out,
            "the kernel programs cannot be compiled: missing {tools}. Type: cargo xtask setup"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiler(release: &str, llvm: u32) -> Compiler {
        Compiler {
            rustc: PathBuf::from(format!("/{release}/bin/rustc")),
            sysroot: PathBuf::from(format!("/{release}")),
            release: release.to_owned(),
            llvm,
            core: Core::Source,
        }
    }

    fn linker(path: &str, llvm: Option<u32>) -> Linker {
        Linker {
            path: PathBuf::from(path),
            release: "0.13.0".to_owned(),
            llvm,
        }
    }

    #[test]
    fn the_first_compiler_with_a_linker_of_its_llvm_is_chosen() {
        let compilers = [
            compiler("1.97", 23),
            compiler("1.96", 22),
            compiler("1.95", 22),
        ];
        let linkers = [linker("/a", Some(21)), linker("/b", Some(22))];

        let chosen = choose(&compilers, &linkers).expect("a linker of LLVM 22 matches");

        assert_eq!(
            (chosen.compiler.release.as_str(), chosen.linker),
            ("1.96", linkers[1].clone())
        );
    }

    #[test]
    fn a_compiler_and_a_linker_of_different_llvms_are_refused() {
        assert_eq!(
            choose(&[compiler("1.97", 23)], &[linker("/a", Some(22))]),
            None
        );
    }

    #[test]
    fn a_linker_of_unknown_llvm_is_the_last_choice() {
        let compilers = [compiler("1.97", 23), compiler("1.96", 22)];
        let unknown = linker("/unknown", None);
        let known = linker("/known", Some(22));

        let both = choose(&compilers, &[unknown.clone(), known.clone()]).expect("one matches");
        let only = choose(&compilers, std::slice::from_ref(&unknown)).expect("it may match");

        assert_eq!(both.linker, known);
        assert_eq!(
            (only.linker, only.compiler.release.as_str()),
            (unknown, "1.97")
        );
    }

    #[test]
    fn the_llvm_of_a_library_name_is_its_first_number() {
        assert_eq!(first_number("libLLVM.so.22.1"), Some(22));
        assert_eq!(first_number("libLLVM-19.so.1"), Some(19));
        assert_eq!(first_number("22.1.8"), Some(22));
        assert_eq!(first_number("libLLVM.so"), None);
    }

    #[test]
    fn the_message_names_the_missing_tool_and_the_command() {
        let no_linker = ToolchainNotFound {
            compilers: vec![compiler("1.96", 22)],
            linkers: Vec::new(),
        };
        let no_compiler = ToolchainNotFound {
            compilers: Vec::new(),
            linkers: vec![linker("/a", Some(22))],
        };

        assert!(no_linker.to_string().contains("missing a bpf-linker"));
        assert!(no_compiler.to_string().contains("missing a Rust compiler"));
        assert!(no_linker.to_string().ends_with("cargo xtask setup"));
        assert!(!no_linker.to_string().contains('\n'));
    }
}
