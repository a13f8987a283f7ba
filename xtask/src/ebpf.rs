//! Compiles, shows and checks the kernel programs.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::{atomics, compile, elf, elf::Code, setup, toolchain::Pair, workspace};

/// Compiles the objects and shows their paths, sizes and programs.
pub(crate) fn show() -> Result<()> {
    setup::ensure(setup::Scope::default())?;
    compile_objects(&setup::pair()?)?
        .iter()
        .try_for_each(|object| show_object(object))
}

fn show_object(object: &Path) -> Result<()> {
    let size = fs::metadata(object)?.len();
    println!("object: {} ({size} bytes)", object.display());
    println!("{:<24} {:<24} {:>12}", "section", "program", "instructions");
    for code in elf::read(object)? {
        let is_program = code.section != Code::SUBPROGRAMS;
        for function in code.functions.iter().filter(|_| is_program) {
            println!(
                "{:<24} {:<24} {:>12}",
                code.section,
                function.name,
                function.size / 8
            );
        }
    }
    Ok(())
}

/// Returns false if an object has an atomic instruction that the oldest supported kernel refuses.
pub(crate) fn check_atomics() -> Result<bool> {
    let mut is_good = true;
    for object in compile_objects(&setup::pair()?)? {
        let name = object.file_name().unwrap_or_default().display();
        let sections = elf::read(&object)?;
        ensure!(!sections.is_empty(), "{} holds no code", object.display());
        for refused in sections.iter().flat_map(atomics::refused) {
            println!(
                "{name}: {} in {}: instruction {} is an atomic that Linux 5.10 refuses: {}",
                refused.function, refused.section, refused.instruction, refused.operation
            );
            is_good = false;
        }
    }
    Ok(is_good)
}

/// Runs clippy of the programs' own compiler on the programs.
pub(crate) fn clippy(pair: &Pair) -> Result<bool> {
    let target = compile::target_folder()?;
    let mut command = compile::cargo(pair, workspace::root(), &target, env::consts::ARCH, "check")?;
    command
        .env("RUSTC_WORKSPACE_WRAPPER", setup::clippy_driver(pair))
        // The form in which `cargo clippy` passes `-D warnings` to its driver.
        .env(
            "CLIPPY_ARGS",
            "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__",
        );
    crate::progress::visible(&mut command)
}

fn compile_objects(pair: &Pair) -> Result<[PathBuf; 2]> {
    let objects = compile::compile(pair, workspace::root(), env::consts::ARCH)
        .context("cannot compile the kernel programs")?;
    Ok([objects.plain, objects.logging])
}
