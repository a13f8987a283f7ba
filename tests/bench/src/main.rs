//! `culvert-bench`: measures the product, and says which of its targets it meets.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "reports are what this program is for"
)]

mod api;
mod connect;
mod program;
mod report;
mod rules;
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
    /// What a connect costs, direct and with several numbers of Services.
    Connect(connect::Options),
    /// How long it takes from a file to the kernel, beside nftables rules; what it takes of memory.
    Program(program::Options),
    /// How long it takes from the API server to the kernel, beside kube-proxy.
    Api(api::Options),
    /// What a stream through the tunnel costs, beside plain TCP and bare TLS.
    Tunnel(tunnel::Options),
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
    interrupt::clean_up_first()?;
    match bench {
        Bench::Connect(options) => connect::run(options),
        Bench::Program(options) => program::run(options),
        Bench::Api(options) => api::run(options),
        Bench::Tunnel(options) => tunnel::run(options),
    }
}
