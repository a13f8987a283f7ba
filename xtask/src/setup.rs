//! Finds or installs the tools for building and testing. Debian packages are installed only as root; for
//! other users, the commands to install them are printed.

mod apt;
mod linker;
mod venv;

use std::{
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Result, anyhow, bail};

use crate::{
    host, progress, toolchain,
    toolchain::{Compiler, Toolchain, ToolchainNotFound},
    workspace,
};

/// The groups of tools to search for, besides the toolchain for the kernel programs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scope {
    /// Tools that `lint` uses.
    pub(crate) lint: bool,
    /// Tools for network namespaces, and for packet filters in them.
    pub(crate) network: bool,
    /// Tools that load the benchmarks' nftables and iptables rules.
    pub(crate) rules: bool,
    /// The C++ compiler, which compiles libFuzzer.
    pub(crate) fuzz: bool,
}

/// The tools that were found on this machine, and those that are missing.
#[derive(Debug)]
struct Inventory {
    toolchain: Result<Toolchain, ToolchainNotFound>,
    /// One line for each other tool that was found.
    found: Vec<String>,
    missing: Vec<Tool>,
}

/// A tool other than the toolchain for the kernel programs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Tool {
    /// `make`, which compiles jemalloc.
    Make,
    /// `ip`, for inspecting a demo's namespaces.
    Ip,
    /// `nft`.
    Nft,
    /// `iptables-restore`, both for nftables and for legacy iptables.
    Iptables,
    /// A C++ compiler.
    Cpp,
    /// The `clippy-driver` that belongs to the kernel programs' compiler.
    Clippy,
    /// `typos`, `taplo` and `cargo-deny`.
    LintTools,
}

/// Prints the installed tools; fails if any is missing.
pub(crate) fn check(scope: Scope) -> Result<()> {
    report(&take_inventory(scope), scope)
}

/// Installs the missing tools, then prints all of them.
pub(crate) fn ensure(scope: Scope) -> Result<()> {
    let before = take_inventory(scope);
    if before.is_complete() {
        return report(&before, scope);
    }
    install(&before)?;
    // The clippy package depends on the compiler, which may only just have been installed.
    let between = take_inventory(scope);
    if between.missing.contains(&Tool::Clippy) {
        install(&between)?;
    }
    report(&take_inventory(scope), scope)
}

/// Returns the toolchain for the kernel programs.
pub(crate) fn toolchain() -> Result<Toolchain> {
    toolchain::find(&workspace::tools()).map_err(|error| anyhow!("{error}"))
}

/// Returns the path of the `clippy-driver` that belongs to the kernel programs' compiler.
pub(crate) fn clippy_driver(toolchain: &Toolchain) -> PathBuf {
    toolchain.compiler.sysroot.join("bin/clippy-driver")
}

/// Returns the path of a tool in the lint tools' Python environment.
pub(crate) fn lint_tool(name: &str) -> PathBuf {
    venv::tool(name)
}

/// Looks for the tools in `scope`.
fn take_inventory(scope: Scope) -> Inventory {
    let toolchain = toolchain::find(&workspace::tools());
    let mut inventory = Inventory {
        toolchain,
        found: Vec::new(),
        missing: Vec::new(),
    };
    if scope.network {
        let ip = host::find_program("ip").map(|path| format!("iproute2: {}", path.display()));
        inventory.add(Tool::Ip, ip);
    }
    for (tool, name, is_needed) in [
        (Tool::Make, "make", true),
        (Tool::Nft, "nft", scope.rules || scope.network),
        (Tool::Iptables, "iptables-restore", scope.rules),
        (Tool::Cpp, "c++", scope.fuzz),
    ] {
        if is_needed {
            let found = host::find_program(name).map(|path| format!("{name}: {}", path.display()));
            inventory.add(tool, found);
        }
    }
    if scope.lint {
        let driver = inventory
            .toolchain
            .as_ref()
            .ok()
            .map(clippy_driver)
            .filter(|path| path.is_file());
        let driver = driver.map(|path| format!("lints of kernel programs: {}", path.display()));
        inventory.add(Tool::Clippy, driver);
        inventory.add(Tool::LintTools, venv::describe());
    }
    inventory
}

/// Prints the tools that were found; fails if any is missing.
fn report(inventory: &Inventory, scope: Scope) -> Result<()> {
    if let Ok(toolchain) = &inventory.toolchain {
        println!("compiler of kernel programs: {}", toolchain.compiler);
        println!("linker of kernel programs: {}", toolchain.linker);
    }
    for line in &inventory.found {
        println!("{line}");
    }
    let mut missing: Vec<String> = inventory
        .missing
        .iter()
        .map(|tool| tool.name().to_owned())
        .collect();
    if let Err(not_found) = &inventory.toolchain {
        missing.insert(0, not_found.summary());
    }
    if missing.is_empty() {
        return Ok(());
    }
    let option = if scope.lint { " --lint" } else { "" };
    bail!(
        "missing: {}. Type: cargo xtask setup{option}",
        missing.join("; ")
    )
}

/// Installs the missing tools. It installs the linker's build dependencies first, since the linker takes
/// longest to compile, and then installs all other tools while the linker compiles.
fn install(inventory: &Inventory) -> Result<()> {
    let (llvm, has_compiler) = match &inventory.toolchain {
        Ok(toolchain) => (toolchain.compiler.llvm, true),
        Err(not_found) => choose_llvm(&not_found.compilers),
    };
    let needs_linker = !linker::is_installed(inventory, llvm);
    let linker_packages = if needs_linker {
        linker::packages(llvm)
    } else {
        Vec::new()
    };
    let linker_packages: Vec<&str> = linker_packages.iter().map(String::as_str).collect();
    let mut other_packages = inventory.packages();
    if !has_compiler {
        other_packages.extend(apt::COMPILER);
    }
    if !host::is_root() {
        let all = linker_packages.iter().chain(&other_packages);
        apt::refuse_without_root(&all.copied().collect::<Vec<_>>())?;
    }
    apt::install(&linker_packages)?;
    thread::scope(|scope| {
        let linker = needs_linker.then(|| scope.spawn(|| linker::install(inventory, llvm)));
        let others =
            apt::install(&other_packages).and_then(|()| install_others(inventory, needs_linker));
        let linker = linker.map_or(Ok(()), |thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("the thread that installs the linker panicked")))
        });
        others.and(linker)
    })?;
    correct_linker(llvm)
}

/// Installs the tools that have no Debian package and, if `fetch` is true, downloads the workspace's crates.
fn install_others(inventory: &Inventory, fetch: bool) -> Result<()> {
    if inventory.missing.contains(&Tool::LintTools) {
        venv::install()?;
    }
    if fetch {
        progress::step("cargo fetch", &mut workspace::cargo("fetch"))?;
    }
    Ok(())
}

/// Rebuilds the linker if Debian's compiler, once installed, turns out to have an LLVM other than `assumed`.
fn correct_linker(assumed: u32) -> Result<()> {
    let inventory = take_inventory(Scope::default());
    let Err(not_found) = &inventory.toolchain else {
        return Ok(());
    };
    match not_found.compilers.first() {
        Some(compiler) if compiler.llvm != assumed && !not_found.linkers.is_empty() => {
            let packages = linker::packages(compiler.llvm);
            apt::install(&packages.iter().map(String::as_str).collect::<Vec<_>>())?;
            linker::install(&inventory, compiler.llvm)
        }
        Some(_) | None => Ok(()),
    }
}

/// Returns the LLVM version to build a linker for, and true if a compiler with that version is installed.
/// Chooses the first compiler whose LLVM version Debian has, or else Debian's compiler.
fn choose_llvm(compilers: &[Compiler]) -> (u32, bool) {
    let is_available = |llvm: u32| {
        Path::new(&linker::prefix(llvm))
            .join("bin/llvm-config")
            .is_file()
            || apt::has_candidate(&format!("llvm-{llvm}-dev"))
    };
    compilers
        .iter()
        .map(|compiler| compiler.llvm)
        .find(|llvm| is_available(*llvm))
        .map_or((linker::DEBIAN_LLVM, false), |llvm| (llvm, true))
}

impl Inventory {
    fn is_complete(&self) -> bool {
        self.toolchain.is_ok() && self.missing.is_empty()
    }

    /// Adds a tool as found, with `line` as its description, or as missing if `line` is `None`.
    fn add(&mut self, tool: Tool, line: Option<String>) {
        match line {
            Some(line) => self.found.push(line),
            None => self.missing.push(tool),
        }
    }

    /// Returns the Debian packages that provide the missing tools.
    fn packages(&self) -> Vec<&'static str> {
        let mut packages = Vec::new();
        for tool in &self.missing {
            match tool {
                Tool::Make => packages.push("make"),
                Tool::Ip => packages.push("iproute2"),
                Tool::Nft => packages.push("nftables"),
                Tool::Iptables => packages.push("iptables"),
                Tool::Cpp => packages.push("g++"),
                Tool::Clippy if self.is_debian_compiler() => packages.push("rust-web-clippy"),
                Tool::Clippy => {}
                Tool::LintTools if venv::is_possible() => {}
                Tool::LintTools => packages.push("python3-venv"),
            }
        }
        packages
    }

    fn is_debian_compiler(&self) -> bool {
        self.toolchain
            .as_ref()
            .is_ok_and(|toolchain| toolchain.compiler.sysroot == Path::new("/usr"))
    }
}

impl Tool {
    const fn name(self) -> &'static str {
        match self {
            Self::Make => "`make` (package make)",
            Self::Ip => "`ip` (package iproute2)",
            Self::Nft => "`nft` (package nftables)",
            Self::Iptables => "`iptables-restore` (package iptables)",
            Self::Cpp => "`c++` (package g++)",
            Self::Clippy => {
                "`clippy-driver` of the compiler of the kernel programs (package rust-web-clippy, \
                 or rustup component add clippy)"
            }
            Self::LintTools => "typos, taplo and cargo-deny",
        }
    }
}
