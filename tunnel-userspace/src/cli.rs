//! The command line: its arguments, and the subcommands that query the daemon or a config file. The other
//! subcommands are in `app`.

mod agent_status;
mod ca;
mod explain;
mod flows;
mod node_status;
mod nodes;
mod rows;
mod service_tables;
mod table;

use std::{
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::runtime::{Builder, Runtime};

pub use self::{
    ca::{CaCommand, CaInit, CaIssue, CaShow, IssueArgs},
    explain::ExplainArgs,
    flows::FlowsArgs,
    nodes::{NodesArgs, NodesCommand},
};
use crate::{
    admin::{self, RequestError},
    config::{Config, ConfigError, Warning, schema},
    identity::ca::CaError,
    reconcile::ServiceView,
};

/// The default path of the config file.
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
    /// Run this node's service proxy in the foreground, with the tunnel's ingress and gateway if they are
    /// configured. SIGTERM, SIGINT or SIGHUP stops it; Services continue to be translated.
    Node(NodeArgs),
    /// Run an edge node's agent in the foreground. It connects to the gateways and forwards streams to the
    /// allowed targets. SIGTERM, SIGINT or SIGHUP stops it after open streams have drained.
    Agent(RunArgs),
    /// Run the controller in the foreground. It issues the certificates of gateways and agents on request, and keeps
    /// their CA. Any number of controllers may run at once.
    Controller(RunArgs),
    /// Run the socket helper in the foreground. It terminates sockets in pods when their backend is removed,
    /// and is needed only where the service proxy lacks the privileges to enter pods.
    Sockets(RunArgs),
    /// Mount the file systems that culvert node needs: a BPF file system and the cgroup v2 hierarchy.
    /// Existing mounts are left alone. Write the kernel's settings of connection tracking that the config contains.
    Prepare(PrepareArgs),
    /// Remove everything that culvert node created with this config: programs, maps, routes and files.
    Cleanup(ConfigArgs),
    /// Create a CA for the tunnel, and issue certificates for gateways and agents.
    Ca {
        /// The subcommand.
        #[command(subcommand)]
        command: CaCommand,
    },
    /// A query about the daemon or a config file.
    #[command(flatten)]
    Query(QueryCommand),
}

impl Command {
    /// Returns true if the command logs JSON, and must therefore also print its final error as JSON.
    #[must_use]
    pub fn logs_json(&self) -> bool {
        let args = match self {
            Self::Node(args) => &args.run,
            Self::Agent(args) | Self::Controller(args) | Self::Sockets(args) => args,
            Self::Prepare(_) | Self::Cleanup(_) | Self::Ca { .. } | Self::Query(_) => return false,
        };
        args.log_format == LogFormat::Json
    }
}

/// The subcommands that query the daemon or a config file. Only `culvert nodes end` changes something.
#[derive(Debug, Subcommand)]
pub enum QueryCommand {
    /// Show the status of the daemon or, if no daemon is running, of the agent. Exits with an error if it is
    /// not ready.
    Status(QueryArgs),
    /// Show all Services and their programmed state, or the full details of a single Service.
    Services(ServiceArgs),
    /// Show the endpoints of all Services: the backend sets they are in, or why they get no new connections.
    Backends(ServiceArgs),
    /// Show the flows of packets from outside this node that are translated.
    Flows(FlowsArgs),
    /// Explain what becomes of a packet or connection on this node, and why, without an effect on it.
    Explain(ExplainArgs),
    /// Show the edge nodes that this node's gateway knows, and their sessions. For a single node, also show the
    /// clients that hold the most streams. The subcommand end ends the sessions of a node.
    Nodes(NodesArgs),
    /// Check a config file, or print the defaults or the JSON Schema.
    Config {
        /// The subcommand.
        #[command(subcommand)]
        command: ConfigCommand,
    },
}

/// The subcommands of `culvert config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Check a Culvert or kube-proxy config file, and report the first error.
    Check {
        /// The file to check.
        file: PathBuf,
    },
    /// Print a config file that contains every field, with its default and its meaning.
    Default,
    /// Print the JSON Schema of the config file, for editors and validators.
    Schema,
}

/// The `--config` option.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The path of the config file.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub config: PathBuf,
}

/// The arguments of `culvert node`.
#[derive(Debug, Args)]
pub struct NodeArgs {
    /// The arguments that every role takes.
    #[command(flatten)]
    pub run: RunArgs,
    /// The path of kube-proxy's config file (kubeproxy.config.k8s.io/v1alpha1). Its fields are converted;
    /// those in the --config file override them. Fields that have no effect are logged.
    #[arg(long, value_name = "FILE")]
    pub kube_proxy_config: Option<PathBuf>,
    /// Wait while another culvert process uses the pin directory or stateDir, such as the process that this one
    /// replaces. Without this flag, the daemon then fails.
    #[arg(long)]
    pub wait: bool,
}

impl NodeArgs {
    /// Reads the config. Also returns the fields in kube-proxy's file that have no effect.
    ///
    /// # Errors
    ///
    /// Returns an error if a file can't be read or is invalid.
    pub fn config(&self) -> Result<(Config, Vec<Warning>), ConfigError> {
        read_config(&self.run.config.config, self.kube_proxy_config.as_deref())
    }
}

/// The arguments that every role takes.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The config file.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// The log filter: off, error, warn, info, debug or trace, and TARGET=LEVEL for a single target, as in
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
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

/// The arguments that every query takes.
#[derive(Debug, Args)]
pub struct QueryArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// The output format.
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "table")]
    output: OutputFormat,
}

/// The arguments of `culvert prepare`.
#[derive(Debug, Args)]
pub struct PrepareArgs {
    /// The config file.
    #[command(flatten)]
    config: ConfigArgs,
    /// kube-proxy's config file, as for culvert node.
    #[arg(long, value_name = "FILE")]
    kube_proxy_config: Option<PathBuf>,
}

impl PrepareArgs {
    /// Reads the config.
    ///
    /// # Errors
    ///
    /// Returns an error if a file can't be read or is invalid.
    pub fn config(&self) -> Result<Config, ConfigError> {
        let read = read_config(&self.config.config, self.kube_proxy_config.as_deref());
        read.map(|(config, _)| config)
    }
}

/// Reads a config and, if there is one, kube-proxy's config file. Also returns the fields in that file that have no effect.
fn read_config(
    own: &Path,
    kube_proxy: Option<&Path>,
) -> Result<(Config, Vec<Warning>), ConfigError> {
    match kube_proxy {
        Some(file) => Config::read_with_kube_proxy(own, Path::new(DEFAULT_CONFIG), file),
        None => Ok((Config::read(own)?, Vec::new())),
    }
}

/// The arguments of a query about Services.
#[derive(Debug, Args)]
pub struct ServiceArgs {
    /// The Service to show, as NAME or NAMESPACE/NAME. If absent, all Services are shown.
    #[arg(value_parser = service_name)]
    name: Option<String>,
    #[command(flatten)]
    query: QueryArgs,
}

/// Returns an error if an argument can't be a Service name.
fn service_name(text: &str) -> Result<String, String> {
    let is_known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-./".contains(c);
    if text.is_empty() || !text.chars().all(is_known) {
        return Err(
            "must be NAME or NAMESPACE/NAME, of lower-case letters, digits, '-' and '.'".to_owned(),
        );
    }
    Ok(text.to_owned())
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum OutputFormat {
    /// A human-readable table.
    Table,
    /// JSON, for programs.
    Json,
    /// YAML, for humans and programs.
    Yaml,
}

/// The error from a failed query.
#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// The config file is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The request to the daemon failed.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The daemon's response does not match this command's types.
    #[error("cannot parse the response of the daemon; is it another version of culvert?")]
    InvalidResponse(#[source] serde_json::Error),
    /// The daemon or agent is not ready; the printed status gives the reasons.
    #[error("not ready")]
    NotReady,
    /// No Service has that name.
    #[error("no Service {0} is known on this node; `culvert services` lists the known ones")]
    NoService(String),
    /// The gateway doesn't know the node.
    #[error("the gateway of this node knows no node {0}")]
    NoNode(String),
    /// The node has no session with the gateway.
    #[error(
        "node {0} has no session with the gateway of this node; `culvert nodes` lists the sessions"
    )]
    NoSession(String),
    /// The response can't be converted to YAML.
    #[error("cannot convert the response to YAML")]
    Yaml(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A certificate can't be shown.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// The response could not be printed.
    #[error("cannot print the response")]
    Print(#[from] io::Error),
}

impl QueryCommand {
    /// Runs the query, and prints its result.
    ///
    /// # Errors
    ///
    /// Returns an error if the query fails, or if `culvert status` finds that the daemon or agent is not
    /// ready.
    pub fn run(self) -> Result<(), QueryError> {
        match self {
            Self::Status(args) => status(&args),
            Self::Nodes(args) => args.run(),
            Self::Flows(args) => args.run(),
            Self::Explain(args) => args.run(),
            Self::Services(args) if args.name.is_some() => args.run(service_tables::render_details),
            Self::Services(args) => args.run(service_tables::render),
            Self::Backends(args) => args.run(service_tables::render_backends),
            Self::Config {
                command: ConfigCommand::Default,
            } => Ok(print(Config::default_file().trim_end())?),
            Self::Config {
                command: ConfigCommand::Schema,
            } => Ok(print(&schema::of_config())?),
            Self::Config {
                command: ConfigCommand::Check { file },
            } => {
                let warnings = Config::check_file(&file)?;
                for warning in &warnings {
                    print(&format!("ignored: {warning}"))?;
                }
                let file = file.display();
                Ok(print(&match warnings.len() {
                    0 => format!("{file} is valid"),
                    1 => format!("{file} is valid, except for 1 field that is ignored"),
                    count => format!("{file} is valid, except for {count} fields that are ignored"),
                })?)
            }
        }
    }
}

impl QueryArgs {
    /// Requests a path from the daemon and returns the response body.
    fn request(&self, path: &str) -> Result<Bytes, QueryError> {
        fetch(&Config::read(&self.config.config)?.admin_socket(), path)
    }
}

impl ServiceArgs {
    fn run(&self, render: fn(&[ServiceView]) -> String) -> Result<(), QueryError> {
        let path = match &self.name {
            Some(name) => format!("/services?name={name}"),
            None => "/services".to_owned(),
        };
        let body = self.query.request(&path)?;
        let services: Vec<ServiceView> = parse(&body)?;
        match &self.name {
            Some(name) if services.is_empty() => Err(QueryError::NoService(name.clone())),
            Some(_) | None => print_response(self.query.output, &body, || Ok(render(&services))),
        }
    }
}

/// The field that a node's status and an agent's status have in common.
#[derive(Deserialize)]
struct StatusHead {
    ready: bool,
}

/// Shows the status of `culvert node` or, if that is not running and the config has an agent section, the
/// status of `culvert agent`.
fn status(args: &QueryArgs) -> Result<(), QueryError> {
    let config = Config::read(&args.config.config)?;
    let (body, is_agent) = match fetch(&config.admin_socket(), "/status") {
        Err(QueryError::Request(RequestError::NoDaemon(..))) if config.tunnel.agent.is_some() => {
            (fetch(&config.agent_socket(), "/status")?, true)
        }
        response => (response?, false),
    };
    print_response(args.output, &body, || {
        Ok(if is_agent {
            agent_status::render(&parse(&body)?)
        } else {
            node_status::render(&parse(&body)?)
        })
    })?;
    let StatusHead { ready } = parse(&body)?;
    ready.then_some(()).ok_or(QueryError::NotReady)
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, QueryError> {
    serde_json::from_slice(body).map_err(QueryError::InvalidResponse)
}

fn fetch(socket: &Path, path: &str) -> Result<Bytes, QueryError> {
    Ok(runtime()?.block_on(admin::request(socket, path))?)
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Prints a JSON response in the requested format. `table` renders it as a table.
fn print_response(
    output: OutputFormat,
    body: &[u8],
    table: impl FnOnce() -> Result<String, QueryError>,
) -> Result<(), QueryError> {
    let text = match output {
        OutputFormat::Json => String::from_utf8_lossy(body).into_owned(),
        OutputFormat::Yaml => {
            let value: serde_json::Value = parse(body)?;
            serde_saphyr::to_string(&value).map_err(|error| QueryError::Yaml(error.into()))?
        }
        OutputFormat::Table => table()?,
    };
    Ok(print(text.trim_end())?)
}

/// Prints text to stdout. A closed pipe, as in `culvert services | head`, is not an error.
///
/// # Errors
///
/// Returns an error if the output can't be written.
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
    fn the_definition_of_the_command_line_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn fields_of_the_config_override_those_of_kube_proxy() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name).display().to_string();
        let kube_proxy_config = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\n\
                      kind: KubeProxyConfiguration\n\
                      hostnameOverride: theirs\n\
                      portRange: 1-2\n";
        std::fs::write(path("own.yaml"), "healthz: { address: '127.0.0.1:1' }").expect("written");
        std::fs::write(path("theirs.yaml"), kube_proxy_config).expect("written");
        let read = |more: &[&str]| {
            let own = path("own.yaml");
            let arguments = ["culvert", "node", "--config", &own];
            let cli = Cli::try_parse_from(arguments.iter().chain(more)).expect("a command");
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
