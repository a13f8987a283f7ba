//! `culvert-lab`, the lab's own program, which keeps sandboxes alive and runs servers and loads in them.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the program prints reports"
)]

mod commands;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use nix::{
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::Pid,
};
use serde::Serialize;
use tunnel_tests::{
    executor::{self, SandboxSpec},
    interrupt, lab,
    load::race,
    node_network::NodeNetwork,
    server, tunnel_process,
};

#[derive(Parser)]
#[command(about = "Culvert's laboratory", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create a sandbox, and execute the requests that arrive on standard input (started by the lab itself).
    #[command(hide = true)]
    Executor(SandboxSpec),
    /// Wait until a process has exited, then remove its labs (started by the lab itself).
    #[command(hide = true)]
    SweepAfter { owner: i32 },
    /// Create a node without a daemon, and keep it until Enter is pressed, standard input ends or a signal
    /// arrives.
    Up {
        /// The number of pods to create.
        #[arg(long, default_value_t = 2)]
        pods: u8,
    },
    /// Serve several ports, and publish a record of the requests on a Unix socket.
    Serve(server::process::ProcessOptions),
    /// Run one side of a tunnel, without kernel programs, and publish its state on a Unix socket.
    Tunnel {
        role: TunnelRole,
        #[arg(long)]
        settings: PathBuf,
        #[arg(long)]
        record: PathBuf,
    },
    /// Measure the throughput or latency of streams between a server and its clients.
    Throughput {
        #[command(subcommand)]
        command: commands::throughput::ThroughputCommand,
    },
    /// Open connections and print a report.
    Load {
        #[command(subcommand)]
        load: commands::load::LoadCommand,
    },
    /// Load every kernel program in each variant that this kernel accepts, and print the verifier's
    /// statistics.
    Verify,
    /// Attach a program that does nothing to each direction of links at tc, until this process is killed.
    AttachEmpty {
        /// The names of the links.
        #[arg(required = true)]
        links: Vec<String>,
        /// Attach filters, also if the kernel has tcx links.
        #[arg(long)]
        filter: bool,
    },
    /// Create one end of a link whose packets have no link-layer header, until this process is killed.
    Tun(commands::tun::Options),
    /// Connect UDP sockets to many VIPs as fast as possible, and send datagrams that name the intended
    /// Service.
    RaceRead(race::Plan),
}

#[derive(Clone, Copy, ValueEnum)]
enum TunnelRole {
    /// A gateway, together with an ingress.
    Cloud,
    /// An agent.
    Agent,
    /// Many agents on slow links.
    Agents,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("culvert-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Executor(spec) => executor::process::execute_requests(&spec),
        Command::SweepAfter { owner } => lab::sweep_after(Pid::from_raw(owner)),
        Command::Up { pods } => up(pods),
        Command::Serve(options) => {
            raise_file_limit()?;
            server::process::run_server(options)
        }
        Command::Tunnel {
            role,
            settings,
            record,
        } => match role {
            TunnelRole::Cloud => tunnel_process::roles::run_cloud(&settings, &record),
            TunnelRole::Agent => tunnel_process::roles::run_agent(&settings, &record),
            TunnelRole::Agents => tunnel_process::roles::run_agents(&settings, &record),
        },
        Command::Throughput { command } => commands::throughput::run(command),
        Command::Load { load } => {
            raise_file_limit()?;
            commands::load::run(load)
        }
        Command::Verify => commands::verify::run(),
        Command::Tun(options) => commands::tun::run(&options),
        Command::AttachEmpty { links, filter } => commands::empty_programs::attach(&links, filter),
        Command::RaceRead(plan) => print(&race::run(&plan)?),
    }
}

/// Raises the number of files that this process may have open as far as it may.
fn raise_file_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

fn up(pods: u8) -> Result<()> {
    interrupt::remove_labs_on_signal()?;
    let network = NodeNetwork::new()?;
    for number in 1..=pods {
        network.pod(&format!("pod-{number}"))?;
    }
    println!("{}", network.enter_commands());
    interrupt::wait_for_enter()
}

fn print(report: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(report)?);
    Ok(())
}
