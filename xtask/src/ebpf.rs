//! Compiles, lists and checks the kernel programs.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    atomic_instructions, bpf_object, bpf_object::CodeSection, compile, setup, toolchain::Toolchain,
    workspace,
};

/// Compiles the objects, and prints their paths, sizes and programs.
pub(crate) fn show() -> Result<()> {
    setup::ensure(setup::Scope::default())?;
    compile_objects(&setup::toolchain()?)?
        .iter()
        .try_for_each(|object| show_object(object))
}

fn show_object(object: &Path) -> Result<()> {
    let size = fs::metadata(object)?.len();
    println!("object: {} ({size} bytes)", object.display());
    println!("{:<24} {:<24} {:>12}", "section", "program", "instructions");
    for section in bpf_object::read_code(object)? {
        let is_program = section.name != CodeSection::SUBPROGRAMS;
        for function in section.functions.iter().filter(|_| is_program) {
            println!(
                "{:<24} {:<24} {:>12}",
                section.name,
                function.name,
                function.size / 8
            );
        }
    }
    Ok(())
}

/// Returns false if an object contains an atomic instruction that the oldest supported kernel rejects.
pub(crate) fn check_atomics() -> Result<bool> {
    let mut is_good = true;
    for object in compile_objects(&setup::toolchain()?)? {
        let name = object.file_name().unwrap_or_default().display();
        let sections = bpf_object::read_code(&object)?;
        ensure!(
            !sections.is_empty(),
            "{} has no section with code",
            object.display()
        );
        for refused in sections.iter().flat_map(atomic_instructions::find_refused) {
            println!(
                "{name}: {} in {}: instruction {} is an atomic that Linux 5.10 refuses: {}",
                refused.function, refused.section, refused.instruction, refused.operation
            );
            is_good = false;
        }
    }
    Ok(is_good)
}

/// Runs clippy on the kernel programs, with the `clippy-driver` of the toolchain that compiles them.
pub(crate) fn clippy(toolchain: &Toolchain) -> Result<bool> {
    let target = compile::target_directory()?;
    let root = workspace::root();
    let mut command = compile::cargo(toolchain, root, &target, env::consts::ARCH, "check")?;
    command
        .env("RUSTC_WORKSPACE_WRAPPER", setup::clippy_driver(toolchain))
        // `cargo clippy` passes `-D warnings` to its driver in this form.
        .env(
            "CLIPPY_ARGS",
            "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__",
        );
    crate::progress::run_visibly(&mut command)
}

fn compile_objects(toolchain: &Toolchain) -> Result<[PathBuf; 2]> {
    let objects = compile::compile(toolchain, workspace::root(), env::consts::ARCH)
        .context("cannot compile the kernel programs")?;
    Ok([objects.plain, objects.logging])
}
