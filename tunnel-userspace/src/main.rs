//! `culvert`: arguments in, a role or a look at one, an exit code.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use tunnel_userspace::cli::Cli;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    Cli::parse().run().context("culvert")
}

#[expect(clippy::print_stderr, reason = "the reporter prints the chain of an error")]
fn report(error: &anyhow::Error) {
    eprintln!("{error:#}");
}
