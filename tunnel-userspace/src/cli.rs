//! The command line: a role, or a look at one that runs.

mod services;
mod status;
mod table;

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{
    admin::{self, AskError},
    app::{self, CleanupError, NodeError},
    config::{Config, ConfigError},
    telemetry::{self, FilterError},
};

/// Where the config is looked for.
const DEFAULT_CONFIG: &str = "/etc/culvert/culvert.yaml";

/// An eBPF data plane for Kubernetes Services.
#[derive(Debug, Parser)]
#[command(name = "culvert", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the service proxy of this node, in the foreground. SIGTERM ends it; the data path
    /// stays.
    Node(NodeArgs),
    /// Show how the running daemon is.
    Status(LookArgs),
    /// Show every Service and what is programmed of it.
    Services(LookArgs),
    /// Remove every program, map and file that a node with this config made.
    Cleanup(ConfigArgs),
    /// Check a config, or print the defaults.
    Config {
        #[command(subcommand)]
        command: ConfigCommand,
    },
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check a config file and say what is wrong with it.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Print every field with its default and meaning.
    Default,
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// The config file.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
}

#[derive(Debug, Args)]
struct NodeArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// What is logged: a level, or levels by module.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,
    /// How a log line looks.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    log_format: telemetry::Format,
}

#[derive(Debug, Args)]
struct LookArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// How the answer looks.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "table")]
    output: Output,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// A command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The config can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The log filter can't be read.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The daemon stopped by itself.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// The daemon gave no answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The daemon gave an answer that this command does not understand.
    #[error("the daemon answers in a way that this culvert does not know; is it another version?")]
    Answer(#[source] serde_json::Error),
    /// The data path could not be removed.
    #[error(transparent)]
    Cleanup(#[from] CleanupError),
    /// The runtime could not start.
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
    /// The answer could not be printed.
    #[error("cannot print")]
    Print(#[from] io::Error),
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    ///
    /// It failed; the message says at what.
    pub fn run(self) -> Result<(), CliError> {
        match self.command {
            Command::Node(args) => {
                let config = Config::read(&args.config.config)?;
                telemetry::start(&args.log, args.log_format)?;
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(2)
                    .enable_all()
                    .build()
                    .map_err(CliError::Runtime)?;
                Ok(runtime.block_on(app::node(config))?)
            }
            Command::Status(args) => look(&args, "/status", status::render),
            Command::Services(args) => look(&args, "/services", services::render),
            Command::Cleanup(args) => {
                let lines = app::cleanup(&Config::read(&args.config)?)?;
                print(&lines.join("\n"))
            }
            Command::Config { command: ConfigCommand::Default } => {
                print(Config::default_file().trim_end())
            }
            Command::Config { command: ConfigCommand::Check { file } } => {
                Config::read(&file)?;
                print(&format!("{} is good", file.display()))
            }
        }
    }
}

fn look<T: serde::de::DeserializeOwned>(
    args: &LookArgs,
    path: &str,
    render: impl Fn(&T) -> String,
) -> Result<(), CliError> {
    let socket = Config::read(&args.config.config)?.admin_socket();
    let body = fetch(&socket, path)?;
    match args.output {
        Output::Json => print(&String::from_utf8_lossy(&body)),
        Output::Table => {
            let value = serde_json::from_slice(&body).map_err(CliError::Answer)?;
            print(render(&value).trim_end())
        }
    }
}

fn fetch(socket: &Path, path: &str) -> Result<bytes::Bytes, CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::Runtime)?;
    Ok(runtime.block_on(admin::ask(socket, path))?)
}

fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}") {
        // The reader has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
