//! Finds the pair that compiles the kernel programs: a Rust compiler that has (or can build) `core`
//! for BPF, and a `bpf-linker` of the same LLVM.
//!
//! One file for `build.rs` and `xtask`, so both always choose the same; the standard library only.

use std::{
    env,
    ffi::OsStr,
    fmt,
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
    process::Command,
};

/// The target of the kernel programs.
pub(crate) const TARGET: &str = "bpfel-unknown-none";
/// Names a compiler to use instead of searching for one.
pub(crate) const RUSTC_VARIABLE: &str = "CULVERT_BPF_RUSTC";
/// Names a `bpf-linker` to use instead of searching for one.
pub(crate) const LINKER_VARIABLE: &str = "CULVERT_BPF_LINKER";

/// The source of a compiler's `core` for BPF.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Core {
    /// Already compiled, beside the compiler.
    Compiled,
    /// Its own sources, compiled with `-Z build-std`.
    Source,
}

/// A compiler with `core` for BPF.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Compiler {
    pub(crate) rustc: PathBuf,
    pub(crate) sysroot: PathBuf,
    pub(crate) release: String,
    pub(crate) llvm: u32,
    pub(crate) core: Core,
}

/// A `bpf-linker` that runs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Linker {
    pub(crate) path: PathBuf,
    pub(crate) release: String,
    /// `None` when it carries its LLVM inside and doesn't say which.
    pub(crate) llvm: Option<u32>,
}

/// The compiler and the linker of the kernel programs.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Pair {
    pub(crate) compiler: Compiler,
    pub(crate) linker: Linker,
}

/// No pair: what was found of each half.
#[derive(Debug)]
pub(crate) struct Missing {
    pub(crate) compilers: Vec<Compiler>,
    pub(crate) linkers: Vec<Linker>,
}

/// Finds the pair on this machine; `tools` is the folder where `cargo xtask setup` keeps its own.
pub(crate) fn find(tools: &Path) -> Result<Pair, Missing> {
    let compilers = compilers();
    let linkers = linkers(tools);
    choose(&compilers, &linkers).ok_or(Missing { compilers, linkers })
}

/// Returns the first compiler that has a linker of its LLVM. A linker of unknown LLVM is taken if no
/// other fits.
fn choose(compilers: &[Compiler], linkers: &[Linker]) -> Option<Pair> {
    let with = |is_fit: fn(&Compiler, &Linker) -> bool| {
        compilers.iter().find_map(|compiler| {
            let linker = linkers.iter().find(|linker| is_fit(compiler, linker))?;
            Some(Pair {
                compiler: compiler.clone(),
                linker: linker.clone(),
            })
        })
    };
    with(|compiler, linker| linker.llvm == Some(compiler.llvm))
        .or_else(|| with(|_, linker| linker.llvm.is_none()))
}

fn compilers() -> Vec<Compiler> {
    if let Some(rustc) = env::var_os(RUSTC_VARIABLE) {
        return ask_compiler(Path::new(&rustc)).into_iter().collect();
    }
    let sysroots = toolchains().into_iter().chain(["/usr".into()]);
    sysroots
        .filter_map(|sysroot| describe_compiler(&sysroot.join("bin/rustc"), &sysroot))
        .collect()
}

/// The toolchains of rustup: stable first, nightlies last, newer before older.
fn toolchains() -> Vec<PathBuf> {
    let mut found = entries(home("RUSTUP_HOME", ".rustup"), "toolchains");
    found.sort_by_key(|path| {
        let name = path.file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let rank = u8::from(!name.starts_with("stable")) + u8::from(name.starts_with("nightly"));
        (rank, std::cmp::Reverse(name))
    });
    found
}

fn ask_compiler(rustc: &Path) -> Option<Compiler> {
    let sysroot = output_of(rustc, &["--print", "sysroot"])?;
    describe_compiler(rustc, Path::new(sysroot.trim()))
}

fn describe_compiler(rustc: &Path, sysroot: &Path) -> Option<Compiler> {
    let core = core_of(sysroot)?;
    let version = output_of(rustc, &["-vV"])?;
    let field = |name: &str| version.lines().find_map(|line| line.strip_prefix(name));
    Some(Compiler {
        rustc: rustc.to_owned(),
        sysroot: sysroot.to_owned(),
        release: field("release: ")?.to_owned(),
        llvm: major(field("LLVM version: ")?)?,
        core,
    })
}

fn core_of(sysroot: &Path) -> Option<Core> {
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
    for folder in installed.chain(env::split_paths(&path)) {
        let path = folder.join("bpf-linker");
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

/// Returns the LLVM that a linker was built against: `bpf-linker` has no option for it, but the name of the
/// library it loads (`libLLVM.so.22.1`, `libLLVM-19.so.1`) stands near the start of the file.
fn linked_llvm(path: &Path) -> Option<u32> {
    const NAMES_END: u64 = 1 << 20;
    const LIBRARY: &[u8] = b"libLLVM";
    let (file, mut head) = (File::open(path).ok()?, Vec::new());
    file.take(NAMES_END).read_to_end(&mut head).ok()?;
    let mut windows = head.windows(LIBRARY.len());
    let start = windows.position(|window| window == LIBRARY)?;
    let name = head[start..].split(|byte| *byte == 0).next()?;
    major(&String::from_utf8_lossy(name))
}

/// The first number in a text.
fn major(text: &str) -> Option<u32> {
    text.split(|character: char| !character.is_ascii_digit())
        .find(|digits| !digits.is_empty())?
        .parse()
        .ok()
}

fn output_of(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The folder that a variable names, or one in the user's home.
pub(crate) fn home(variable: &str, folder: &str) -> Option<PathBuf> {
    let named = env::var_os(variable).map(PathBuf::from);
    named.or_else(|| Some(env::home_dir()?.join(folder)))
}

/// Lists the entries of a folder, sorted; none if the folder does not exist.
pub(crate) fn entries(home: Option<PathBuf>, folder: &str) -> Vec<PathBuf> {
    let read = home.and_then(|home| fs::read_dir(home.join(folder)).ok());
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
            None => write!(out, " (LLVM not known)"),
        }
    }
}

impl Missing {
    /// Returns the missing parts, in some words.
    pub(crate) fn summary(&self) -> String {
        let mut text = match (self.compilers.as_slice(), self.linkers.as_slice()) {
            ([], []) => format!("a Rust compiler with `core` for {TARGET}, and bpf-linker"),
            ([], _) => format!("a Rust compiler with `core` for {TARGET}"),
            ([compiler, ..], []) => format!("a bpf-linker that runs, for {compiler}"),
            ([compiler, ..], [linker, ..]) => {
                format!("a bpf-linker of the LLVM of {compiler}; there is {linker}")
            }
        };
        // Then nothing else was looked at.
        for name in [RUSTC_VARIABLE, LINKER_VARIABLE] {
            if let Some(value) = env::var_os(name) {
                text.push_str(&format!(" ({name} is {})", Path::new(&value).display()));
            }
        }
        text
    }
}

/// One line, because Cargo shows one line per error of a build script.
impl fmt::Display for Missing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.summary();
        write!(
            out,
            "the kernel programs cannot be compiled: missing {what}. Type: cargo xtask setup"
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

        let pair = choose(&compilers, &linkers).expect("one fits");

        assert_eq!(
            (pair.compiler.release.as_str(), pair.linker),
            ("1.96", linkers[1].clone())
        );
    }

    #[test]
    fn different_llvms_make_no_pair() {
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

        let both = choose(&compilers, &[unknown.clone(), known.clone()]).expect("one fits");
        let only = choose(&compilers, std::slice::from_ref(&unknown)).expect("it may fit");

        assert_eq!(both.linker, known);
        assert_eq!(
            (only.linker, only.compiler.release.as_str()),
            (unknown, "1.97")
        );
    }

    #[test]
    fn the_llvm_of_a_library_name_is_its_first_number() {
        assert_eq!(major("libLLVM.so.22.1"), Some(22));
        assert_eq!(major("libLLVM-19.so.1"), Some(19));
        assert_eq!(major("22.1.8"), Some(22));
        assert_eq!(major("libLLVM.so"), None);
    }

    #[test]
    fn the_message_names_the_missing_half_and_the_command() {
        let no_linker = Missing {
            compilers: vec![compiler("1.96", 22)],
            linkers: Vec::new(),
        };
        let no_compiler = Missing {
            compilers: Vec::new(),
            linkers: vec![linker("/a", Some(22))],
        };

        assert!(no_linker.to_string().contains("missing a bpf-linker"));
        assert!(no_compiler.to_string().contains("missing a Rust compiler"));
        assert!(no_linker.to_string().ends_with("cargo xtask setup"));
        assert!(!no_linker.to_string().contains('\n'));
    }
}
