//! `culvert-bench`: measures Culvert and checks whether it meets its targets.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "reports are what this program is for"
)]

mod api;
mod certificates;
mod connect;
mod descriptor_limit;
mod packet;
mod plot;
mod program;
mod reconnect;
mod report;
mod services;
mod tunnel;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use tunnel_tests::interrupt;

#[derive(Parser)]
#[command(about = "Culvert's benchmarks", version)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// Measure the cost of a connection, both directly and through Culvert with different numbers of
    /// Services.
    Connect(connect::Options),
    /// Measure the cost of a request from outside the node through a node port, compared with direct requests and with
    /// rules like kube-proxy's.
    Packet(packet::Options),
    /// Measure how long changed files take to reach the kernel, compared with nftables rules, and how much
    /// memory the daemon uses.
    Program(program::Options),
    /// Measure how long changes at the API server take to reach the kernel, compared with kube-proxy.
    Api(api::Options),
    /// Measure the cost of a stream through the tunnel, compared with plain TCP and bare TLS.
    Tunnel(tunnel::Options),
    /// Measure how long many agents take to reconnect to a restarted gateway.
    Reconnect(reconnect::Options),
    /// Measure how long many agents take to get a certificate at once, and how much memory the controllers use.
    Certificates(certificates::Options),
    /// Draw charts of each benchmark's last run.
    Plot(plot::Options),
}

fn main() -> ExitCode {
    match run(&Cli::parse().bench) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("culvert-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(bench: &Bench) -> Result<()> {
    interrupt::remove_labs_on_signal()?;
    match bench {
        Bench::Connect(options) => connect::run(options),
        Bench::Packet(options) => packet::run(options),
        Bench::Program(options) => program::run(options),
        Bench::Api(options) => api::run(options),
        Bench::Tunnel(options) => tunnel::run(options),
        Bench::Reconnect(options) => reconnect::run(options),
        Bench::Certificates(options) => certificates::run(options),
        Bench::Plot(options) => plot::run(options),
    }
}
