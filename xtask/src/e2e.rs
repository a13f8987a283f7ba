//! Real Kubernetes on this machine: its parts are built and fetched here, and the runner (`tests/e2e`)
//! starts them.

mod debian;
mod go;
mod images;
mod pause;
mod rootfs;

use std::{
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};

use crate::{package, setup, statics::Profile, vm::cache, workspace};

/// The specs to run.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Culvert's own specs and a handful of Kubernetes' own.
    #[arg(long, conflicts_with = "focus")]
    fast: bool,
    /// Three nodes in three zones, with Kubernetes' own Service specs beyond conformance; with --focus
    /// the matching ones
    #[arg(long, conflicts_with = "fast")]
    wider: bool,
    /// Only specs whose names match this regular expression, Culvert's and Kubernetes' own.
    #[arg(long, value_name = "RE")]
    focus: Option<String>,
    /// Keep the cluster for inspection, until Enter.
    #[arg(long)]
    keep: bool,
    /// The service proxy.
    #[arg(long, value_enum, default_value = "culvert")]
    proxy: Proxy,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Proxy {
    /// Culvert: its image and its manifests.
    Culvert,
    /// kube-proxy, in its nftables mode.
    KubeProxy,
}

impl Proxy {
    const fn name(self) -> &'static str {
        match self {
            Self::Culvert => "culvert",
            Self::KubeProxy => "kube-proxy",
        }
    }
}

/// Builds and fetches the missing parts, and replaces this process with the runner.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(
        workspace::is_root(),
        "e2e makes network namespaces, mounts and control groups, so it needs root. Type: sudo \
         --preserve-env=PATH cargo xtask e2e"
    );
    setup::ensure(setup::Scope {
        network: true,
        ..setup::Scope::default()
    })?;
    let place = ready()?;
    let programs = [("tunnel-e2e", "culvert-e2e"), workspace::LAB];
    let [runner, lab] = workspace::build_programs(Profile::Vm.cargo("build")?, programs)?;
    let mut command = Command::new(&runner);
    command
        .env("CULVERT_LAB_BIN", &lab)
        .arg("--kit")
        .arg(&place)
        .args(["--proxy", options.proxy.name()]);
    if options.proxy == Proxy::Culvert {
        let image = place.join("culvert.tar");
        package::run(Profile::Vm, package::NAME.to_owned(), Some(image.clone()))?;
        command.arg("--image").arg(image);
        let manifests = workspace::root().join("deploy");
        command.arg("--manifests").arg(manifests);
    }
    if options.fast {
        command.arg("--fast");
    }
    if options.wider {
        command.arg("--wider");
    }
    if let Some(focus) = &options.focus {
        command.args(["--focus", focus]);
    }
    if options.keep {
        command.arg("--keep");
    }
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start {}", runner.display()))
}

/// Builds and fetches the missing parts of Kubernetes; returns their folder.
pub(crate) fn ready() -> Result<PathBuf> {
    let place = place();
    let _lock = cache::lock("cluster")?;
    go::build(&go::Go::find()?, &place)?;
    debian::ready(&place)?;
    images::ready(&place)?;
    Ok(place)
}

/// Returns the folder of all parts.
fn place() -> PathBuf {
    workspace::root().join("target/cluster")
}

/// Returns true if an artefact was built from exactly this source, which is recorded in its stamp.
fn is_made_from(stamp: &Path, source: &str) -> bool {
    fs::read_to_string(stamp).is_ok_and(|known| known == source)
}

fn stamp(stamp: &Path, source: &str) -> Result<()> {
    cache::file(stamp, |file| {
        Ok(std::io::Write::write_all(file, source.as_bytes())?)
    })
}
