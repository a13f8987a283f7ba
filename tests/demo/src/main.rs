//! `culvert-demo`: runs the real daemon on a node made of network namespaces, sends real traffic, and
//! compares the clients' records with the servers'.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the demo prints to a terminal"
)]

mod edge;
mod fixture;
mod server_counts;
mod services;
mod table;

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    environment, interrupt,
    load::Report,
    sandbox::{Process, Sandbox},
};

/// The extra time that a load process may take to exit after the end of its load.
const SLACK: Duration = Duration::from_secs(10);

#[derive(Parser)]
#[command(
    about = "Shows Culvert on a node of namespaces, with real traffic",
    version
)]
struct Cli {
    /// The culvert program to demonstrate; by default, the one in the same directory as this program.
    #[arg(long)]
    culvert: Option<PathBuf>,
    /// Keep the nodes running until Enter is pressed.
    #[arg(long)]
    keep: bool,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("culvert-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs both parts of the demo. Returns an error if a connection failed, or if the servers' and clients'
/// records differ.
fn run(cli: &Cli) -> Result<()> {
    interrupt::remove_labs_on_signal()?;
    let given = cli.culvert.as_ref();
    let program = given.map_or_else(environment::culvert, |path| Ok(path.canonicalize()?))?;
    let settings = InstanceSettings::for_program(program);
    let mut services_demo = services::ServicesDemo::prepare(settings.clone())?;
    let outcome = services_demo.run();
    let mut edge_demo = edge::EdgeDemo::prepare(settings)?;
    let outcome = outcome.and_then(|()| edge_demo.run());
    if cli.keep {
        let (node, other) = (&services_demo.fixture.node, edge_demo.testbed.node());
        println!(
            "\nThe node stays up. To get in:\n{}\nIts manifests are in {}",
            node.network().enter_commands(),
            node.manifests().display()
        );
        println!(
            "The nodes of the second part stay up, too:\n{}",
            other.network().enter_commands()
        );
        println!("Enter or Ctrl-C ends it, and removes everything.");
        interrupt::wait_for_enter()?;
    }
    outcome
}

/// The faults in one part of the demo: results that differ from the expected ones.
#[derive(Default)]
struct Faults(Vec<String>);

impl Faults {
    fn add(&mut self, fault: String) {
        println!("  FAULT: {fault}");
        self.0.push(fault);
    }

    fn expect(&mut self, is_met: bool, fault: impl FnOnce() -> String) {
        if !is_met {
            self.add(fault());
        }
    }

    fn conclude(&self) -> Result<()> {
        let (count, faults) = (self.0.len(), self.0.join("\n  "));
        ensure!(count == 0, "{count} checks failed:\n  {faults}");
        Ok(())
    }
}

fn heading(text: &str) {
    println!("\n── {text}");
}

/// Starts a load process in a sandbox.
fn start_load(
    sandbox: &Sandbox,
    kind: &[&str],
    to: &[SocketAddr],
    rate: u32,
    duration: Duration,
) -> Result<Process> {
    let command = sandbox.lab_command(&[&["load"], kind].concat())?;
    to.iter()
        .fold(command, |command, to| command.option("--to", to))
        .option("--rate", rate)
        .option("--millis", duration.as_millis())
        .start()
}

fn finish(load: Process, duration: Duration) -> Result<Report> {
    let output = load.finish(duration + SLACK)?;
    output.parse_report().context("a load failed")
}

fn finish_all(loads: Vec<(String, Process)>, duration: Duration) -> Result<Vec<(String, Report)>> {
    let finish = |(name, load)| Ok((name, finish(load, duration)?));
    loads.into_iter().map(finish).collect()
}
