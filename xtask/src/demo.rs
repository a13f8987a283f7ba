//! The demo and the benchmarks: separate programs, built and started here.

use std::{os::unix::process::CommandExt as _, process::Command};

use anyhow::{Context as _, Result, ensure};

use crate::{e2e, setup, workspace};

/// Runs the demo, with programs of the dev profile.
pub(crate) fn demo(keep: bool, args: &[String]) -> Result<()> {
    ensure_ready("demo", false)?;
    let keep: &[&str] = if keep { &["--keep"] } else { &[] };
    let program = ("tunnel-demo", "culvert-demo");
    run(workspace::cargo("build"), program, keep, args)
}

/// Runs a benchmark, with programs of the release profile.
pub(crate) fn bench(which: &str, args: &[String]) -> Result<()> {
    ensure_ready(
        &format!("bench {which}"),
        matches!(which, "connect" | "program"),
    )?;
    let mut build = workspace::cargo("build");
    build.arg("--release");
    let program = ("tunnel-bench", "culvert-bench");
    if which != "api" {
        return run(build, program, &[which], args);
    }
    let kit = e2e::ready()?;
    let kit = kit.to_str().context("the path of the kit is no UTF-8")?;
    run(build, program, &[which, "--kit", kit], args)
}

/// Installs missing packages; with `rules` also the tools that load rules of kube-proxy's shape.
fn ensure_ready(what: &str, rules: bool) -> Result<()> {
    ensure!(
        workspace::is_root(),
        "{what} makes network namespaces and loads kernel programs, so it needs root. Type: \
         sudo --preserve-env=PATH cargo xtask {what}"
    );
    setup::ensure(setup::Scope {
        network: true,
        rules,
        ..setup::Scope::default()
    })
}

/// Builds a program of the laboratory and replaces this process with it, so that signals and the exit
/// code are its own.
fn run(build: Command, program: workspace::Program, words: &[&str], args: &[String]) -> Result<()> {
    let programs = [workspace::CULVERT, workspace::LAB, program];
    let [culvert, lab, program] = workspace::build_programs(build, programs)?;
    let error = Command::new(&program)
        .env("CULVERT_LAB_BIN", lab)
        .args(words)
        .arg("--culvert")
        .arg(culvert)
        .args(args)
        .exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
