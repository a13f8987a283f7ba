//! `culvert`: parses the arguments, runs the subcommand, and returns the exit code.

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser as _;
use tunnel_userspace::{
    app::{self, RoleError},
    cli::{self, CaCommand, CaIssue, Cli, Command, LogFormat, NodeArgs, RunArgs},
    config::{Config, Warning},
    error_chain, telemetry,
};

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let as_json = command.logs_json();
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error, as_json);
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    let text = match command {
        Command::Node(args) => return node(&args),
        Command::Agent(args) => return run_with_config(&args, app::agent),
        Command::Controller(args) => return run_with_config(&args, app::controller),
        Command::Sockets(args) => return run_with_config(&args, app::sockets_helper),
        Command::Query(look) => return Ok(look.run()?),
        Command::Prepare(args) => app::prepare_mounts(&args.config()?)?.join("\n"),
        Command::Cleanup(args) => app::cleanup(&Config::read(&args.config)?)?.join("\n"),
        Command::Ca { command } => match command {
            CaCommand::Init(args) => app::ca_init(&args.dir, args.days)?,
            CaCommand::Issue {
                whom: CaIssue::Gateway(args),
            } => app::ca_issue_gateway(&args.dir, args.out.as_deref(), args.days)?,
            CaCommand::Issue {
                whom: CaIssue::Agent { node, args },
            } => app::ca_issue_agent(&args.dir, &node, args.out.as_deref(), args.days)?,
            CaCommand::Show(args) => return Ok(args.run()?),
        },
    };
    Ok(cli::print(&text)?)
}

fn node(args: &NodeArgs) -> Result<()> {
    let (config, warnings) = args.config()?;
    run_role(&args.run, config, |config| {
        for Warning { field, why } in &warnings {
            tracing::warn!(
                field,
                why,
                "a field of kube-proxy's config has no effect here"
            );
        }
        app::node(config, args.wait)
    })
}

/// Reads the config and runs a role with it.
fn run_with_config<F>(args: &RunArgs, role: impl FnOnce(Config) -> F) -> Result<()>
where
    F: Future<Output = Result<(), RoleError>>,
{
    run_role(args, Config::read(&args.config.config)?, role)
}

/// Starts logging and the async runtime, and runs a role until it returns.
fn run_role<F>(args: &RunArgs, config: Config, role: impl FnOnce(Config) -> F) -> Result<()>
where
    F: Future<Output = Result<(), RoleError>>,
{
    telemetry::start(
        &config.log.filter(&args.log),
        args.log_format == LogFormat::Json,
    )?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let done = runtime.block_on(role(config));
    // Dropping the runtime would wait for any DNS lookup that is still blocking a thread.
    runtime.shutdown_background();
    Ok(done?)
}

#[expect(
    clippy::print_stderr,
    reason = "prints the error that ends the process"
)]
fn report(error: &anyhow::Error, as_json: bool) {
    eprintln!(
        "{}",
        telemetry::fatal_error_line(&error_chain::chain(error.as_ref()), as_json)
    );
}
