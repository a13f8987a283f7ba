//! The demo and the benches: built here, run by the lab.

use std::{os::unix::process::CommandExt as _, process::Command};

use anyhow::{Context as _, Result, ensure};

use crate::{e2e, setup, workspace};

/// Shows Culvert at work, with programs of the dev profile.
pub(crate) fn demo(keep: bool, args: &[String]) -> Result<()> {
    let keep: &[&str] = if keep { &["--keep"] } else { &[] };
    run(&["demo"], keep, args, setup::Scope::default())
}

/// Measures, with programs of the release profile.
pub(crate) fn bench(which: &str, args: &[String]) -> Result<()> {
    let scope = setup::Scope {
        rules: matches!(which, "connect" | "program"),
        ..setup::Scope::default()
    };
    if which != "api" {
        return run(&["bench", which], &[], args, scope);
    }
    let kit = e2e::ready()?;
    let kit = kit.to_str().context("the path of the kit is no UTF-8")?;
    run(&["bench", which], &["--kit", kit], args, scope)
}

/// Becomes the lab, so that signals reach it and its exit code is ours. Benchmarks run programs of
/// the release profile.
fn run(what: &[&str], options: &[&str], args: &[String], scope: setup::Scope) -> Result<()> {
    let words = what.join(" ");
    let is_release = what.first() == Some(&"bench");
    ensure!(
        workspace::is_root(),
        "{words} makes network namespaces and loads kernel programs, so it needs root. Type: \
         sudo --preserve-env=PATH cargo xtask {words}"
    );
    setup::ensure(setup::Scope {
        network: true,
        ..scope
    })?;
    let mut build = workspace::cargo("build");
    if is_release {
        build.arg("--release");
    }
    let programs = workspace::build_programs(build)?;
    let error = Command::new(&programs.lab)
        .args(what)
        .arg("--culvert")
        .arg(&programs.culvert)
        .args(options)
        .args(args)
        .exec();
    Err(error).with_context(|| format!("cannot start {}", programs.lab.display()))
}
