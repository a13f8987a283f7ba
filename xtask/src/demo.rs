//! Builds and starts the demo and the benchmarks.

use std::{fs, os::unix::process::CommandExt as _, path::Path, process::Command};

use anyhow::{Context as _, Result, ensure};

use crate::{
    e2e, host, setup, workspace,
    workspace_binaries::{self, CULVERT, LAB, Program},
};

/// The benchmark program.
const BENCH: Program = ("tunnel-bench", "culvert-bench");

/// Path, relative to the workspace, of the directory that holds the figures from each benchmark's last run.
const RUNS: &str = "target/bench";

/// Runs the demo, built with the dev profile.
pub(crate) fn demo(keep: bool, args: &[String]) -> Result<()> {
    ensure_ready("demo", false)?;
    let keep: &[&str] = if keep { &["--keep"] } else { &[] };
    let program = ("tunnel-demo", "culvert-demo");
    run(workspace::cargo("build"), program, keep, args)
}

/// Runs a benchmark, built with the release profile, and saves its figures for [`plot`].
pub(crate) fn bench(name: &str, args: &[String]) -> Result<()> {
    ensure_ready(
        &format!("bench {name}"),
        matches!(name, "connect" | "packet" | "program"),
    )?;
    let runs = workspace::root().join(RUNS);
    fs::create_dir_all(&runs)?;
    let output = utf8(&runs)?.to_owned() + "/" + name + ".json";
    let mut own_args = vec![name];
    if !args.iter().any(|arg| arg.starts_with("--output")) {
        own_args.extend(["--output", &output]);
    }
    let mut build = workspace::cargo("build");
    build.arg("--release");
    if !["api", "certificates"].contains(&name) {
        return run(build, BENCH, &own_args, args);
    }
    let components = e2e::prepare_components(false)?;
    own_args.extend(["--kit", utf8(&components)?]);
    run(build, BENCH, &own_args, args)
}

/// Draws charts from the last run of each benchmark.
pub(crate) fn plot() -> Result<()> {
    let [program] = workspace_binaries::build(workspace::cargo("build"), [BENCH])?;
    let mut command = Command::new(program);
    command.args(["plot", "--runs", RUNS, "--to", "docs"]);
    let status = command.current_dir(workspace::root()).status()?;
    ensure!(status.success(), "no charts were written");
    Ok(())
}

fn utf8(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("the path {} is not UTF-8", path.display()))
}

/// Fails unless this process runs as root; then installs missing packages. If `rules` is true, these include
/// `nft` and `iptables-restore`, which load rules like kube-proxy's.
fn ensure_ready(subcommand: &str, rules: bool) -> Result<()> {
    ensure!(
        host::is_root(),
        "{subcommand} creates network namespaces and loads kernel programs, so it needs root. \
         Type: sudo --preserve-env=PATH cargo xtask {subcommand}"
    );
    setup::ensure(setup::Scope {
        network: true,
        rules,
        ..setup::Scope::default()
    })
}

/// Builds a program and replaces this process with it, so that the program itself receives signals and sets
/// the exit code.
fn run(build: Command, program: Program, own_args: &[&str], args: &[String]) -> Result<()> {
    let [culvert, lab, program] = workspace_binaries::build(build, [CULVERT, LAB, program])?;
    let error = Command::new(&program)
        .env("CULVERT_LAB_BIN", lab)
        .args(own_args)
        .arg("--culvert")
        .arg(culvert)
        .args(args)
        .exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
