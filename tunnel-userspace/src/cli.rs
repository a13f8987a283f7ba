//! The command line: arguments, and the queries of a running daemon. The roles themselves are in `app`.

mod agent;
mod ca;
mod nodes;
mod services;
mod status;
mod table;

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use clap::{Args, Parser, Subcommand, ValueEnum};
use jiff::Timestamp;
use serde::{Deserialize, de::DeserializeOwned};

pub use self::ca::{CaCommand, CaInit, CaIssue, CaShow, IssueArgs};
use crate::{
    admin::{self, AskError},
    config::{Config, ConfigError, Warning},
    identity::ca::CaError,
    reconcile::ServiceView,
};

/// The default path of the config.
const DEFAULT_CONFIG: &str = "/etc/culvert/culvert.yaml";

/// An eBPF data plane for Kubernetes Services, and a tunnel to edge nodes.
#[derive(Debug, Parser)]
#[command(name = "culvert", version, arg_required_else_help = true)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the service proxy of this node, and the tunnel's ingress and gateway if the config has them,
    /// in the foreground. SIGTERM, SIGINT or SIGHUP ends it; the data path stays.
    Node(NodeArgs),
    /// Run the agent of an edge node, in the foreground: it connects to the gateways and serves the
    /// targets that the config permits. SIGTERM, SIGINT or SIGHUP lets streams drain, then ends it.
    Agent(RunArgs),
    /// Run the helper that ends sockets in pods when their backend is removed, in the foreground: for
    /// nodes where the service proxy itself lacks the right to enter pods.
    Sockets(RunArgs),
    /// Mount the file systems that a node with this config needs: a BPF file system and the cgroup v2
    /// hierarchy. Existing mounts are left alone.
    Prepare(ConfigArgs),
    /// Remove every program, map and file that a node with this config created.
    Cleanup(ConfigArgs),
    /// Issue the certificates of the tunnel's ends, with a CA of their own.
    Ca {
        /// The subcommand.
        #[command(subcommand)]
        command: CaCommand,
    },
    /// A query.
    #[command(flatten)]
    Look(Look),
}

impl Command {
    /// Returns true if the command logs JSON, up to its last error.
    #[must_use]
    pub fn logs_json(&self) -> bool {
        let args = match self {
            Self::Node(args) => &args.run,
            Self::Agent(args) | Self::Sockets(args) => args,
            Self::Prepare(_) | Self::Cleanup(_) | Self::Ca { .. } | Self::Look(_) => return false,
        };
        args.log_format == LogFormat::Json
    }
}

/// A query of a daemon or a config; changes nothing.
#[derive(Debug, Subcommand)]
pub enum Look {
    /// Show the status of the running daemon, or else agent; fails if it is not ready.
    Status(LookArgs),
    /// Show every Service and its programmed state; of a single one also its addresses, policies and
    /// endpoints.
    Services(ServiceArgs),
    /// Show every endpoint, with its state for new connections and the reason.
    Backends(ServiceArgs),
    /// Show every edge node that the gateway of the running daemon knows, and its sessions.
    Nodes(LookArgs),
    /// Check a config, or print the defaults.
    Config {
        /// The subcommand.
        #[command(subcommand)]
        command: ConfigCommand,
    },
}

/// The subcommands for a config.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a config file, Culvert's or kube-proxy's, and report its errors.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Print every field with its default and meaning.
    Default,
}

/// The config file.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The config file.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub config: PathBuf,
}

/// The arguments of a node.
#[derive(Debug, Args)]
pub struct NodeArgs {
    /// The arguments of any role.
    #[command(flatten)]
    pub run: RunArgs,
    /// kube-proxy's own config file (kubeproxy.config.k8s.io/v1alpha1): its fields apply if they have a
    /// meaning here and the config file does not set them; the log names fields without effect.
    #[arg(long, value_name = "FILE")]
    pub kube_proxy_config: Option<PathBuf>,
}

impl NodeArgs {
    /// Returns the config, and the fields of kube-proxy's file that have no effect.
    ///
    /// # Errors
    ///
    /// A file can't be read, or is invalid.
    pub fn config(&self) -> Result<(Config, Vec<Warning>), ConfigError> {
        let own = &self.run.config.config;
        match &self.kube_proxy_config {
            Some(file) => Config::read_over(own, Path::new(DEFAULT_CONFIG), file),
            None => Ok((Config::read(own)?, Vec::new())),
        }
    }
}

/// The arguments of a role.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The config file.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// The log filter: off, error, warn, info, debug or trace, and levels of single targets, as in
    /// info,tunnel_userspace::source=debug.
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
    /// The format of log lines.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The arguments of a query.
#[derive(Debug, Args)]
pub struct LookArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The output format.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "table")]
    output: Output,
}

/// The arguments of a query about Services.
#[derive(Debug, Args)]
pub struct ServiceArgs {
    /// A Service: its name, or namespace/name.
    #[arg(value_parser = service_name)]
    name: Option<String>,
    #[command(flatten)]
    look: LookArgs,
}

/// Accepts the characters of a Service's name.
fn service_name(text: &str) -> Result<String, String> {
    let is_known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-./".contains(c);
    if text.is_empty() || !text.chars().all(is_known) {
        return Err("lower case letters, digits, '-' and '.', with one '/' at most".to_owned());
    }
    Ok(text.to_owned())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
    /// For programs and people.
    Yaml,
}

/// A query failed.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// The config can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The daemon did not respond.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The daemon's response does not match this command's types.
    #[error("the daemon answers in a way that this culvert does not know; is it another version?")]
    Answer(#[source] serde_json::Error),
    /// The daemon is not ready; its status has the reasons.
    #[error("not ready")]
    NotReady,
    /// No Service has that name.
    #[error("no Service {0} is known here; `culvert services` shows those that are")]
    NoService(String),
    /// The response can't be converted to that format.
    #[error("cannot write the answer as YAML")]
    Yaml(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A certificate can't be shown.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// The response could not be received or printed.
    #[error("cannot show the answer")]
    Show(#[from] io::Error),
}

impl Look {
    /// Runs the query, and prints its result.
    ///
    /// # Errors
    ///
    /// There is no result; the message has the cause.
    pub fn run(self) -> Result<(), LookError> {
        match self {
            Self::Status(args) => status(&args),
            Self::Nodes(args) => {
                let body = args.ask("/nodes")?;
                let now = Timestamp::now();
                show(args.output, &body, || {
                    Ok(nodes::render(&parse::<Vec<_>>(&body)?, now))
                })
            }
            Self::Services(args) if args.name.is_some() => args.run(services::render_each),
            Self::Services(args) => args.run(services::render),
            Self::Backends(args) => args.run(services::render_backends),
            Self::Config {
                command: ConfigCommand::Default,
            } => Ok(print(Config::default_file().trim_end())?),
            Self::Config {
                command: ConfigCommand::Check { file },
            } => {
                for warning in Config::check_file(&file)? {
                    print(&format!("no effect: {warning}"))?;
                }
                Ok(print(&format!("{} is good", file.display()))?)
            }
        }
    }
}

impl LookArgs {
    /// Requests a path from the daemon.
    fn ask(&self, path: &str) -> Result<Bytes, LookError> {
        fetch(&Config::read(&self.config.config)?.admin_socket(), path)
    }
}

impl ServiceArgs {
    fn run(&self, render: fn(&[ServiceView]) -> String) -> Result<(), LookError> {
        let path = match &self.name {
            Some(name) => format!("/services?name={name}"),
            None => "/services".to_owned(),
        };
        let body = self.look.ask(&path)?;
        let services: Vec<ServiceView> = parse(&body)?;
        match &self.name {
            Some(name) if services.is_empty() => Err(LookError::NoService(name.clone())),
            Some(_) | None => show(self.look.output, &body, || Ok(render(&services))),
        }
    }
}

/// The common beginning of every status.
#[derive(Deserialize)]
struct Headline {
    ready: bool,
}

/// Shows the status of the node, or of the agent if no node runs and the config has an agent.
fn status(args: &LookArgs) -> Result<(), LookError> {
    let config = Config::read(&args.config.config)?;
    let (body, is_agent) = match fetch(&config.admin_socket(), "/status") {
        Err(LookError::Ask(AskError::NoDaemon(..))) if config.tunnel.agent.is_some() => {
            (fetch(&config.agent_socket(), "/status")?, true)
        }
        answer => (answer?, false),
    };
    show(args.output, &body, || {
        Ok(if is_agent {
            agent::render(&parse(&body)?)
        } else {
            status::render(&parse(&body)?)
        })
    })?;
    let Headline { ready } = parse(&body)?;
    ready.then_some(()).ok_or(LookError::NotReady)
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, LookError> {
    serde_json::from_slice(body).map_err(LookError::Answer)
}

fn fetch(socket: &Path, path: &str) -> Result<Bytes, LookError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    Ok(runtime.block_on(admin::ask(socket, path))?)
}

/// Prints a response in the requested format.
fn show(
    output: Output,
    body: &[u8],
    table: impl FnOnce() -> Result<String, LookError>,
) -> Result<(), LookError> {
    let text = match output {
        Output::Json => String::from_utf8_lossy(body).into_owned(),
        Output::Yaml => {
            let value: serde_json::Value = parse(body)?;
            serde_saphyr::to_string(&value).map_err(|error| LookError::Yaml(error.into()))?
        }
        Output::Table => table()?,
    };
    Ok(print(text.trim_end())?)
}

/// Prints a text. A closed pipe is no failure: its reader has seen enough.
///
/// # Errors
///
/// The output can't be written.
pub fn print(text: &str) -> io::Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
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

    #[test]
    fn the_file_of_kube_proxy_counts_where_that_of_the_node_says_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).display().to_string();
        let theirs = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\n\
                      kind: KubeProxyConfiguration\n\
                      hostnameOverride: theirs\n\
                      portRange: 1-2\n";
        std::fs::write(path("own.yaml"), "healthz: { address: '127.0.0.1:1' }").expect("written");
        std::fs::write(path("theirs.yaml"), theirs).expect("written");
        let read = |more: &[&str]| {
            let own = path("own.yaml");
            let words = ["culvert", "node", "--config", &own];
            let cli = Cli::try_parse_from(words.iter().chain(more)).expect("a command");
            let Command::Node(args) = cli.command else {
                panic!("another command");
            };
            args.config().expect("good")
        };

        let (config, warnings) = read(&["--kube-proxy-config", &path("theirs.yaml")]);
        assert_eq!(config.node_name, "theirs");
        assert_eq!(config.healthz.address.port(), 1);
        assert_eq!(warnings.len(), 1);
        let (config, warnings) = read(&[]);
        assert_ne!(config.node_name, "theirs");
        assert_eq!(warnings, []);
    }
}
