//! `culvert`: arguments in, a role or a look at one, an exit code.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use tunnel_userspace::{
    app,
    cli::{self, CaCommand, CaIssue, Cli, Command, LogFormat, NodeArgs, RunArgs},
    config::{Config, Warning},
    telemetry,
};

mod memory;

fn main() -> ExitCode {
    memory::keep();
    let command = Cli::parse().command;
    let as_json = command.logs_json();
    let done = match command {
        Command::Node(args) => node(&args),
        Command::Agent(args) => configured(&args, app::agent),
        Command::Sockets(args) => configured(&args, app::sockets),
        Command::Prepare(args) => prepare(&args),
        Command::Cleanup(args) => cleanup(&args),
        Command::Ca { command } => ca(&command),
        Command::Look(look) => look.run().map_err(Into::into),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error, as_json);
            ExitCode::FAILURE
        }
    }
}

fn node(args: &NodeArgs) -> Result<()> {
    let (config, warnings) = args.config()?;
    run(&args.run, config, |config| {
        for Warning { field, why } in &warnings {
            tracing::warn!(field, why, "a field of kube-proxy's config has no effect");
        }
        app::node(config, memory::give_back)
    })
}

/// Runs a role that goes by its own config alone.
fn configured<F, E>(args: &RunArgs, role: impl FnOnce(Config) -> F) -> Result<()>
where
    F: Future<Output = Result<(), E>>,
    E: std::error::Error + Send + Sync + 'static,
{
    run(args, Config::read(&args.config.config)?, role)
}

/// Runs a role to its end.
fn run<F, E>(args: &RunArgs, config: Config, role: impl FnOnce(Config) -> F) -> Result<()>
where
    F: Future<Output = Result<(), E>>,
    E: std::error::Error + Send + Sync + 'static,
{
    telemetry::start(
        &config.log.filter(&args.log),
        args.log_format == LogFormat::Json,
    )?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let done = runtime.block_on(role(config));
    // A look-up of a name that hangs must not hold up the end.
    runtime.shutdown_background();
    Ok(done?)
}

fn prepare(args: &cli::ConfigArgs) -> Result<()> {
    let lines = app::prepare(&Config::read(&args.config)?)?;
    Ok(cli::print(&lines.join("\n"))?)
}

fn cleanup(args: &cli::ConfigArgs) -> Result<()> {
    let lines = app::cleanup(&Config::read(&args.config)?)?;
    Ok(cli::print(&lines.join("\n"))?)
}

fn ca(command: &CaCommand) -> Result<()> {
    let lines = match command {
        CaCommand::Init(args) => app::ca_init(&args.dir, args.days)?,
        CaCommand::Issue {
            whom: CaIssue::Gateway(args),
        } => app::ca_issue_gateway(&args.dir, args.out.as_deref(), args.days)?,
        CaCommand::Issue {
            whom: CaIssue::Agent { node, args },
        } => app::ca_issue_agent(&args.dir, node, args.out.as_deref(), args.days)?,
        CaCommand::Show(args) => return Ok(args.run()?),
    };
    Ok(cli::print(&lines.join("\n"))?)
}

#[expect(
    clippy::print_stderr,
    reason = "the reporter prints the chain of an error"
)]
fn report(error: &anyhow::Error, as_json: bool) {
    eprintln!("{}", telemetry::last_line(&format!("{error:#}"), as_json));
}
