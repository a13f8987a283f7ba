//! `culvert-e2e`: starts a cluster of real Kubernetes on this machine, and runs Culvert's and
//! Kubernetes' own specs on it.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "telling what came of it is what this program is for"
)]

mod manifests;
mod specs;
mod stage;
mod table;
mod upstream;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use regex_lite::Regex;
use tunnel_cluster::{
    Cluster, kit::Kit, logs::Logs, network::Size, product::Product, proxy::Proxy,
};
use tunnel_tests::{clock::Instant, interrupt};

use self::{table::Table, upstream::Range};

/// The number of lines of each log that are shown after a failure.
const TAIL: usize = 12;

#[derive(Debug, Parser)]
#[command(about = "Real Kubernetes on this machine, and specs on it", version)]
struct Cli {
    /// The folder of programs and images that `cargo xtask e2e` prepares.
    #[arg(long)]
    kit: PathBuf,
    /// The service proxy.
    #[arg(long, value_enum)]
    proxy: Which,
    /// The manifests that deploy the product to every node.
    #[arg(long, required_if_eq("proxy", "culvert"))]
    manifests: Option<PathBuf>,
    /// The archive of the product's image.
    #[arg(long, required_if_eq("proxy", "culvert"))]
    image: Option<PathBuf>,
    /// Our own specs and a handful of Kubernetes' own.
    #[arg(long, conflicts_with = "focus")]
    fast: bool,
    /// Three nodes, and the wider list of Kubernetes' own specs.
    #[arg(long, conflicts_with = "fast")]
    wider: bool,
    /// Only specs whose names match.
    #[arg(long)]
    focus: Option<String>,
    /// Keep the cluster until Enter.
    #[arg(long)]
    keep: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Which {
    /// Culvert.
    Culvert,
    /// kube-proxy, in its nftables mode.
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

/// Runs the specs; true if all passed.
fn run(cli: &Cli) -> Result<bool> {
    interrupt::clean_up_first()?;
    let focus = cli.focus.as_deref().map(Regex::new).transpose()?;
    let kit = Kit::open(&cli.kit)?;
    let logs = Logs::new(kit.logs())?;
    let proxy = match (cli.proxy, &cli.manifests, &cli.image) {
        (Which::Culvert, Some(manifests), Some(image)) => Proxy::Culvert(Product {
            manifests: manifests.canonicalize()?,
            image: image.canonicalize()?,
        }),
        (Which::Culvert | Which::KubeProxy, _, _) => Proxy::KubeProxy,
    };

    println!("start a cluster ...");
    let start = Instant::now();
    let size = if cli.wider { Size::Three } else { Size::Two };
    let cluster = Cluster::start(kit, logs.clone(), proxy, size);
    let cluster = match cluster {
        Ok(cluster) => cluster,
        Err(error) => {
            interrupt::leave_to_signal();
            print!("{}", logs.tails(TAIL)?);
            return Err(error).context("the cluster doesn't come up");
        }
    };
    println!("cluster up in {:.1} s", start.elapsed().as_secs_f32());

    let mut table = Table::default();
    let ran = run_specs(&cluster, cli, focus.as_ref(), &mut table);
    interrupt::leave_to_signal();
    if ran.is_err() || table.failed() > 0 {
        show_failure(&cluster)?;
    }
    if cli.keep {
        println!("\nThe cluster stays until Enter:\n{}", cluster.ways_in());
        interrupt::wait_for_enter()?;
    }
    let start = Instant::now();
    drop(cluster);
    println!("cluster removed in {:.1} s", start.elapsed().as_secs_f32());
    ran?;
    print!("{table}");
    ensure!(table.ran() > 0, "no spec was run");
    Ok(table.failed() == 0)
}

fn run_specs(cluster: &Cluster, cli: &Cli, focus: Option<&Regex>, table: &mut Table) -> Result<()> {
    let range = match (cli.fast, cli.wider, &cli.focus) {
        (_, _, Some(focus)) => Range::Matching(focus.clone()),
        (true, _, None) => Range::Few,
        (false, true, None) => Range::Wider,
        (false, false, None) => Range::Conformance,
    };
    let chosen: Vec<_> = specs::ALL
        .iter()
        .filter(|_| range.has_ours())
        .filter(|spec| focus.is_none_or(|focus| focus.is_match(spec.name)))
        .collect();
    if !chosen.is_empty() {
        let stage = stage::Stage::set(cluster).context("the stage of the specs")?;
        for spec in chosen {
            table.add(specs::run(spec, &stage)?);
        }
    }
    let is_product = cli.proxy == Which::Culvert;
    println!("run Kubernetes' own specs ...");
    let (cases, fates) = upstream::run(cluster, &range)?;
    for case in cases {
        table.add(upstream::judge(case, is_product, &fates));
    }
    Ok(())
}

/// Saves the cluster's objects as logs, and prints the end of each log.
fn show_failure(cluster: &Cluster) -> Result<()> {
    for (name, kinds, option) in [
        ("pods", "pods", "--output=wide"),
        ("services", "services,endpointslices", "--output=wide"),
        ("events", "events", "--sort-by=.lastTimestamp"),
    ] {
        let said = cluster.kubectl.run(&["get", kinds, "-A", option]);
        let said = said.unwrap_or_else(|error| format!("{error:#}"));
        std::fs::write(cluster.site.logs.path(&format!("{name}.log")), said)?;
    }
    print!("{}", cluster.site.logs.tails(TAIL)?);
    Ok(())
}
