//! Finds or installs the tools for building and testing. As root it installs everything; as another user
//! it does the steps that need no root and prints the others.

mod apt;
mod linker;
mod venv;

use std::{
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Result, anyhow, bail};

use crate::{
    progress, toolchain,
    toolchain::{Compiler, Pair},
    workspace,
};

/// The tools to search for, besides the pair that compiles the kernel programs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scope {
    /// The tools of `lint`.
    pub(crate) lint: bool,
    /// The tools for network namespaces.
    pub(crate) network: bool,
    /// The tools of benchmarks that compare with other rules.
    pub(crate) rules: bool,
    /// The compiler of the fuzzing engine.
    pub(crate) fuzz: bool,
}

/// The state of the machine, item by item.
#[derive(Debug)]
struct Inventory {
    pair: Result<Pair, toolchain::Missing>,
    /// The other items: a line about each present one, and the missing ones.
    present: Vec<String>,
    missing: Vec<Item>,
}

/// A tool besides the pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Item {
    /// `ip`, for the inspection of a demo's namespaces.
    Ip,
    /// `nft`, and `iptables-restore` of either kind.
    Nft,
    Iptables,
    /// A C++ compiler.
    Cpp,
    /// The `clippy-driver` of the compiler of the kernel programs.
    Clippy,
    /// `typos`, `taplo` and `cargo-deny`.
    LintTools,
}

/// Reports the present tools; fails if one is missing.
pub(crate) fn check(scope: Scope) -> Result<()> {
    report(&look(scope), scope)
}

/// Installs the missing tools, and reports.
pub(crate) fn ensure(scope: Scope) -> Result<()> {
    let before = look(scope);
    if before.is_complete() {
        return report(&before, scope);
    }
    install(&before)?;
    // The matching clippy is known only after the compiler is installed.
    let between = look(scope);
    if between.missing.contains(&Item::Clippy) {
        install(&between)?;
    }
    report(&look(scope), scope)
}

/// Returns the pair that compiles the kernel programs.
pub(crate) fn pair() -> Result<Pair> {
    toolchain::find(&workspace::tools()).map_err(|missing| anyhow!("{missing}"))
}

/// Returns the lint driver of the compiler of the kernel programs.
pub(crate) fn clippy_driver(pair: &Pair) -> PathBuf {
    pair.compiler.sysroot.join("bin/clippy-driver")
}

/// Returns a tool of the lint step, from its environment.
pub(crate) fn lint_tool(name: &str) -> PathBuf {
    venv::tool(name)
}

fn look(scope: Scope) -> Inventory {
    let pair = toolchain::find(&workspace::tools());
    let mut inventory = Inventory {
        pair,
        present: Vec::new(),
        missing: Vec::new(),
    };
    if scope.network {
        let ip = workspace::program("ip").map(|path| format!("iproute2: {}", path.display()));
        inventory.note(Item::Ip, ip);
    }
    for (item, name, is_needed) in [
        (Item::Nft, "nft", scope.rules),
        (Item::Iptables, "iptables-restore", scope.rules),
        (Item::Cpp, "c++", scope.fuzz),
    ] {
        if is_needed {
            let found = workspace::program(name).map(|path| format!("{name}: {}", path.display()));
            inventory.note(item, found);
        }
    }
    if scope.lint {
        let driver = inventory
            .pair
            .as_ref()
            .ok()
            .map(clippy_driver)
            .filter(|path| path.is_file());
        let driver = driver.map(|path| format!("lints of kernel programs: {}", path.display()));
        inventory.note(Item::Clippy, driver);
        inventory.note(Item::LintTools, venv::describe());
    }
    inventory
}

fn report(inventory: &Inventory, scope: Scope) -> Result<()> {
    if let Ok(pair) = &inventory.pair {
        println!("compiler of kernel programs: {}", pair.compiler);
        println!("linker of kernel programs: {}", pair.linker);
    }
    for line in &inventory.present {
        println!("{line}");
    }
    let mut missing: Vec<String> = inventory
        .missing
        .iter()
        .map(|item| item.name().to_owned())
        .collect();
    if let Err(pair) = &inventory.pair {
        missing.insert(0, pair.summary());
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

/// Installs in one pass: first the linker's build dependencies, then everything else while the linker
/// compiles, which takes longest.
fn install(inventory: &Inventory) -> Result<()> {
    let (llvm, has_compiler) = match &inventory.pair {
        Ok(pair) => (pair.compiler.llvm, true),
        Err(missing) => choose_llvm(&missing.compilers),
    };
    let wants_linker = !linker::is_fit(inventory, llvm);
    let for_linker = if wants_linker {
        linker::packages(llvm)
    } else {
        Vec::new()
    };
    let for_linker: Vec<&str> = for_linker.iter().map(String::as_str).collect();
    let mut others = inventory.packages();
    if !has_compiler {
        others.extend(apt::COMPILER);
    }
    if !workspace::is_root() {
        let all: Vec<&str> = for_linker.iter().chain(&others).copied().collect();
        apt::refuse_without_root(&all)?;
    }
    apt::install(&for_linker)?;
    thread::scope(|scope| {
        let linker = wants_linker.then(|| scope.spawn(|| linker::install(inventory, llvm)));
        let rest = apt::install(&others).and_then(|()| install_rest(inventory, wants_linker));
        let linker = linker.map_or(Ok(()), |thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("the thread of the linker panicked")))
        });
        rest.and(linker)
    })?;
    correct_linker(llvm)
}

fn install_rest(inventory: &Inventory, has_time: bool) -> Result<()> {
    if inventory.missing.contains(&Item::LintTools) {
        venv::install()?;
    }
    if has_time {
        progress::step("cargo fetch", &mut workspace::cargo("fetch"))?;
    }
    Ok(())
}

/// Rebuilds the linker if Debian's compiler, once installed, turns out to use another LLVM than assumed.
fn correct_linker(assumed: u32) -> Result<()> {
    let inventory = look(Scope::default());
    let Err(missing) = &inventory.pair else {
        return Ok(());
    };
    match missing.compilers.first() {
        Some(compiler) if compiler.llvm != assumed && !missing.linkers.is_empty() => {
            let packages = linker::packages(compiler.llvm);
            apt::install(&packages.iter().map(String::as_str).collect::<Vec<_>>())?;
            linker::install(&inventory, compiler.llvm)
        }
        Some(_) | None => Ok(()),
    }
}

/// Returns the LLVM to build a linker for, and true if its compiler is present: the first compiler whose
/// LLVM is installed or available, else Debian's.
fn choose_llvm(compilers: &[Compiler]) -> (u32, bool) {
    let is_at_hand = |llvm: u32| {
        Path::new(&linker::prefix(llvm))
            .join("bin/llvm-config")
            .is_file()
            || apt::has_candidate(&format!("llvm-{llvm}-dev"))
    };
    compilers
        .iter()
        .map(|compiler| compiler.llvm)
        .find(|llvm| is_at_hand(*llvm))
        .map_or((linker::DEBIAN_LLVM, false), |llvm| (llvm, true))
}

impl Inventory {
    fn is_complete(&self) -> bool {
        self.pair.is_ok() && self.missing.is_empty()
    }

    fn note(&mut self, item: Item, line: Option<String>) {
        match line {
            Some(line) => self.present.push(line),
            None => self.missing.push(item),
        }
    }

    /// Returns the Debian packages of the missing items.
    fn packages(&self) -> Vec<&'static str> {
        let mut packages = Vec::new();
        for item in &self.missing {
            match item {
                Item::Ip => packages.push("iproute2"),
                Item::Nft => packages.push("nftables"),
                Item::Iptables => packages.push("iptables"),
                Item::Cpp => packages.push("g++"),
                Item::Clippy if self.is_debian_compiler() => packages.push("rust-web-clippy"),
                Item::Clippy => {}
                Item::LintTools if venv::is_possible() => {}
                Item::LintTools => packages.push("python3-venv"),
            }
        }
        packages
    }

    fn is_debian_compiler(&self) -> bool {
        self.pair
            .as_ref()
            .is_ok_and(|pair| pair.compiler.sysroot == Path::new("/usr"))
    }
}

impl Item {
    const fn name(self) -> &'static str {
        match self {
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
