//! Prepares the components of a Kubernetes cluster on this machine, and runs the end-to-end tests
//! (`tests/e2e`) against it.

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

use crate::{
    host, package, setup,
    static_build::Profile,
    vm::download_cache,
    workspace,
    workspace_binaries::{self, LAB},
};

/// Options for `cargo xtask e2e`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Run only Culvert's own tests, for which Kubernetes' tests need not be built.
    #[arg(long, conflicts_with = "focus")]
    fast: bool,
    /// Run Kubernetes' Service tests beyond conformance, on three nodes in three zones; with --focus, only
    /// the matching ones.
    #[arg(long, conflicts_with = "fast")]
    wider: bool,
    /// Run only the tests, both Culvert's and Kubernetes', whose names match this regular expression.
    #[arg(long, value_name = "RE")]
    focus: Option<String>,
    /// Keep the cluster for inspection until Enter is pressed.
    #[arg(long)]
    keep: bool,
    /// Service proxy to test.
    #[arg(long, value_enum, default_value = "culvert")]
    proxy: ServiceProxy,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum ServiceProxy {
    /// Culvert, deployed with its image and manifests.
    Culvert,
    /// The same, but packets are also translated on the links of pods (`service.packets.links: all`).
    CulvertAllLinks,
    /// kube-proxy in its nftables mode.
    KubeProxy,
}

impl ServiceProxy {
    const fn name(self) -> &'static str {
        match self {
            Self::Culvert => "culvert",
            Self::CulvertAllLinks => "culvert-all-links",
            Self::KubeProxy => "kube-proxy",
        }
    }
}

/// Prepares the cluster's components, then replaces this process with the test program.
pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(
        host::is_root(),
        "e2e creates network namespaces, mounts and control groups, so it needs root. Type: sudo \
         --preserve-env=PATH cargo xtask e2e"
    );
    setup::ensure(setup::Scope {
        network: true,
        ..setup::Scope::default()
    })?;
    let components = prepare_components(!options.fast)?;
    let programs = [("tunnel-e2e", "culvert-e2e"), LAB];
    let [runner, lab] = workspace_binaries::build(Profile::Vm.cargo("build")?, programs)?;
    let mut command = Command::new(&runner);
    command
        .env("CULVERT_LAB_BIN", &lab)
        .arg("--kit")
        .arg(&components)
        .args(["--proxy", options.proxy.name()]);
    if options.proxy != ServiceProxy::KubeProxy {
        let image = components.join("culvert.tar");
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

/// Builds or downloads the components that a cluster still lacks: programs, Debian packages and images.
/// Returns the directory that contains them. Kubernetes' own specs are built only if they are wanted, since that takes minutes.
pub(crate) fn prepare_components(has_kubernetes_specs: bool) -> Result<PathBuf> {
    let directory = workspace::root().join("target/cluster");
    let _lock = download_cache::lock("cluster")?;
    go::build(&go::Go::find()?, &directory, has_kubernetes_specs)?;
    debian::unpack_packages(&directory)?;
    images::build(&directory, has_kubernetes_specs)?;
    Ok(directory)
}

/// Returns true if a stamp file records that its artefact was built from exactly the given inputs.
fn is_built_from(stamp: &Path, inputs: &str) -> bool {
    fs::read_to_string(stamp).is_ok_and(|recorded| recorded == inputs)
}

/// Records the inputs that an artefact was built from.
fn write_stamp(stamp: &Path, inputs: &str) -> Result<()> {
    download_cache::write_file(stamp, |file| {
        Ok(std::io::Write::write_all(file, inputs.as_bytes())?)
    })
}
