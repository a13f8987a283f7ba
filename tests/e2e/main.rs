//! `culvert-e2e`: starts a Kubernetes cluster on the local machine, and runs Culvert's and Kubernetes' e2e
//! tests on it.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "this program reports to the terminal"
)]

mod fixture;
mod manifests;
mod result_table;
mod specs;
mod upstream;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use regex_lite::Regex;
use tunnel_cluster::{
    Cluster, components::Components, culvert_deployment::CulvertDeployment, logs::Logs,
    network::Size, proxy::Proxy,
};
use tunnel_tests::{clock::Instant, interrupt};

use self::{result_table::ResultTable, upstream::SpecSet};

/// The number of lines to print from the end of each log after a failure.
const TAIL_LINES: usize = 12;

#[derive(Debug, Parser)]
#[command(
    about = "Starts a Kubernetes cluster on this machine, and runs specs on it",
    version
)]
struct Cli {
    /// The directory that contains the programs and images prepared by `cargo xtask e2e`.
    #[arg(long)]
    kit: PathBuf,
    /// The service proxy to test.
    #[arg(long, value_enum)]
    proxy: ProxyName,
    /// The directory that contains the manifests for deploying Culvert.
    #[arg(long, required_if_eq_any([("proxy", "culvert"), ("proxy", "culvert-all-links")]))]
    manifests: Option<PathBuf>,
    /// The archive that contains Culvert's image.
    #[arg(long, required_if_eq_any([("proxy", "culvert"), ("proxy", "culvert-all-links")]))]
    image: Option<PathBuf>,
    /// Run only Culvert's own tests.
    #[arg(long, conflicts_with = "focus")]
    fast: bool,
    /// Run, on three nodes, Kubernetes' e2e tests for Services, except those in the conformance suite.
    #[arg(long, conflicts_with = "fast")]
    wider: bool,
    /// Run only the tests, both Culvert's and Kubernetes', whose names match this regular expression.
    #[arg(long)]
    focus: Option<String>,
    /// Keep the cluster until Enter is pressed.
    #[arg(long)]
    keep: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum ProxyName {
    /// Culvert.
    Culvert,
    /// Culvert, which also translates packets on the links of pods.
    CulvertAllLinks,
    /// kube-proxy in nftables mode.
    KubeProxy,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("culvert-e2e: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a cluster and runs the tests; returns true if none failed.
fn run(cli: &Cli) -> Result<bool> {
    interrupt::remove_labs_on_signal()?;
    let focus = cli.focus.as_deref().map(Regex::new).transpose()?;
    let components = Components::open(&cli.kit)?;
    let logs = Logs::new(components.logs())?;
    let proxy = match (cli.proxy, &cli.manifests, &cli.image) {
        (ProxyName::Culvert | ProxyName::CulvertAllLinks, Some(manifests), Some(image)) => {
            Proxy::Culvert(CulvertDeployment {
                manifests: manifests.canonicalize()?,
                image: image.canonicalize()?,
                includes_pod_links: cli.proxy == ProxyName::CulvertAllLinks,
            })
        }
        (_, _, _) => Proxy::KubeProxy,
    };

    println!("start a cluster ...");
    let start = Instant::now();
    let size = if cli.wider { Size::Three } else { Size::Two };
    let cluster = Cluster::start(components, logs.clone(), proxy, size);
    let cluster = match cluster {
        Ok(cluster) => cluster,
        Err(error) => {
            interrupt::block_if_ending();
            print!("{}", logs.tails(TAIL_LINES)?);
            return Err(error).context("cannot start the cluster");
        }
    };
    println!("cluster ready in {:.1} s", start.elapsed().as_secs_f32());

    let mut table = ResultTable::default();
    let result = run_specs(&cluster, cli, focus.as_ref(), &mut table);
    interrupt::block_if_ending();
    if result.is_err() || table.failed() > 0 {
        show_failure(&cluster)?;
    }
    if cli.keep {
        let commands = cluster.shell_commands();
        println!("\nPress Enter to remove the cluster. Commands to enter it:\n{commands}");
        interrupt::wait_for_enter()?;
    }
    let start = Instant::now();
    drop(cluster);
    println!("cluster removed in {:.1} s", start.elapsed().as_secs_f32());
    result?;
    print!("{table}");
    ensure!(table.ran() > 0, "no spec ran");
    Ok(table.failed() == 0)
}

fn run_specs(
    cluster: &Cluster,
    cli: &Cli,
    focus: Option<&Regex>,
    table: &mut ResultTable,
) -> Result<()> {
    let set = match (cli.fast, cli.wider, &cli.focus) {
        (_, _, Some(focus)) => Some(SpecSet::Matching(focus.clone())),
        (true, _, None) => None,
        (false, true, None) => Some(SpecSet::Wider),
        (false, false, None) => Some(SpecSet::Conformance),
    };
    // They come first, because some of Culvert's specs disturb the control plane, which takes a minute to recover.
    if let Some(set) = &set {
        println!("run specs of Kubernetes ...");
        for result in upstream::run(cluster, set)? {
            table.add(result);
        }
    }
    let selected: Vec<_> = specs::ALL
        .iter()
        .filter(|_| set.as_ref().is_none_or(SpecSet::includes_culvert_specs))
        .filter(|spec| focus.is_none_or(|focus| focus.is_match(spec.name)))
        .collect();
    if !selected.is_empty() {
        let fixture = fixture::Fixture::create(cluster)
            .context("cannot create the objects that the specs use")?;
        for spec in selected {
            table.add(specs::run(spec, &fixture)?);
        }
    }
    Ok(())
}

/// Saves lists of the cluster's objects as logs, and prints the last lines of each log.
fn show_failure(cluster: &Cluster) -> Result<()> {
    for (name, kinds, option) in [
        ("pods", "pods", "--output=wide"),
        ("services", "services,endpointslices", "--output=wide"),
        ("events", "events", "--sort-by=.lastTimestamp"),
    ] {
        let output = cluster.kubectl.run(&["get", kinds, "-A", option]);
        let output = output.unwrap_or_else(|error| format!("{error:#}"));
        std::fs::write(cluster.shared.logs.path(&format!("{name}.log")), output)?;
    }
    print!("{}", cluster.shared.logs.tails(TAIL_LINES)?);
    Ok(())
}
