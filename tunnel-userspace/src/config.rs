//! The configuration: a YAML file in the same format for every role. No other module reads the config file or
//! the environment.

mod admin;
mod allowed_values;
mod bpf;
mod conntrack;
mod kube_proxy;
mod log;
mod numeric_ranges;
mod packets;
pub mod schema;
mod section_mappings;
mod service;
mod source;
mod tunnel;
mod unknown_field;

use std::{
    fs, io,
    net::{Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
};

pub use admin::{AdminConfig, HealthzConfig};
pub use bpf::{BpfConfig, Cgroup};
pub use conntrack::ConntrackConfig;
pub use kube_proxy::Warning;
pub use log::LogConfig;
pub use packets::{Delivery, FlowTimeouts, LinkSelection, MasqueradeAddress, PacketsConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
pub use service::{DetectLocal, Mode, ServiceConfig};
pub use source::SourceConfig;
pub use tunnel::{IdentityConfig, OnIngressDown, RequestConfig, SteeringConfig, TunnelConfig};

use crate::{
    controller::ControllerSettings, identity::is_subdomain, sockets,
    tunnel::gateway::GatewaySettings,
};

/// The path of an invalid field, such as `bpf.maps.slots`, and the reason why it is invalid.
type FieldError = (String, String);

/// The key that holds the config in the response to `/configz`. The domain is a placeholder.
const CONFIGZ_KEY: &str = "culvert.dev";

/// The configuration file for every role.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// The name of this node's Node object. If empty, the environment variable `NODE_NAME` is used or, if
    /// that is also empty, the host name.
    pub node_name: String,
    /// The way in which Services are implemented.
    #[serde(deserialize_with = "service::mode")]
    #[schemars(with = "Mode")]
    pub mode: Mode,
    /// The sources of Kubernetes objects.
    pub source: SourceConfig,
    /// The settings for translating Service traffic.
    pub service: ServiceConfig,
    /// The settings for the kernel programs and their maps.
    pub bpf: BpfConfig,
    /// The kernel's settings of connection tracking that `culvert prepare` writes.
    pub conntrack: ConntrackConfig,
    /// The termination of sockets that are connected to a removed backend.
    pub sockets: sockets::TerminatorSettings,
    /// The directory for the daemon's sockets and state.
    pub state_dir: PathBuf,
    /// The admin port, which serves metrics and status.
    pub admin: AdminConfig,
    /// The health port, for load balancers and probes.
    pub healthz: HealthzConfig,
    /// Logging of events in the kernel programs.
    #[serde(skip_serializing_if = "LogConfig::is_off")]
    pub log: LogConfig,
    /// The tunnel to edge nodes.
    pub tunnel: TunnelConfig,
    /// The controller, which issues the tunnel's certificates.
    pub controller: ControllerSettings,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            node_name: String::new(),
            mode: Mode::default(),
            source: SourceConfig::default(),
            service: ServiceConfig::default(),
            bpf: BpfConfig::default(),
            conntrack: ConntrackConfig::default(),
            sockets: sockets::TerminatorSettings::default(),
            state_dir: "/var/lib/culvert".into(),
            admin: AdminConfig::default(),
            healthz: HealthzConfig::default(),
            log: LogConfig::default(),
            tunnel: TunnelConfig::default(),
            controller: ControllerSettings::default(),
        }
    }
}

/// An error in a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("cannot read the config file {path}")]
    Read {
        /// The path of the config file.
        path: PathBuf,
        /// The error from the system call.
        #[source]
        source: io::Error,
    },
    /// A field is unknown, or has an invalid value.
    #[error("config {path}: {field}: {reason}")]
    Field {
        /// The path of the config file.
        path: PathBuf,
        /// The path of the field, such as `bpf.maps.slots`.
        field: String,
        /// The reason why the field is refused.
        reason: String,
    },
}

impl Config {
    /// Reads a config file. Relative paths in it are relative to the file's directory.
    ///
    /// # Errors
    ///
    /// Returns an error if the file can't be read, or if it has an unknown field or an invalid value.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::from_file_values(path, read_yaml(path)?)
    }

    /// Reads the config file `path` and kube-proxy's config file `kube_proxy`, and merges them: fields in
    /// `path` override those in `kube_proxy`. Also returns the fields in kube-proxy's file that have no
    /// effect. The file `path` may be absent if it is the `default` path.
    ///
    /// # Errors
    ///
    /// Returns an error if a file can't be read, or if it has an unknown field or an invalid value.
    pub fn read_with_kube_proxy(
        path: &Path,
        default: &Path,
        kube_proxy: &Path,
    ) -> Result<(Self, Vec<Warning>), ConfigError> {
        let conversion = Self::read_kube_proxy(kube_proxy, &read_yaml(kube_proxy)?)?;
        let is_absent = path == default && matches!(path.try_exists(), Ok(false));
        let own = if is_absent {
            json!({})
        } else {
            read_yaml(path)?
        };
        let config = Self::from_file_values(path, kube_proxy::merge(conversion.config, own))?;
        Ok((config, conversion.warnings))
    }

    /// Checks a Culvert or kube-proxy config file. For a kube-proxy file, returns the fields that have no
    /// effect.
    ///
    /// # Errors
    ///
    /// Returns an error if the file can't be read, or if it has an unknown field or an invalid value.
    pub fn check_file(path: &Path) -> Result<Vec<Warning>, ConfigError> {
        let file = read_yaml(path)?;
        if kube_proxy::is_kube_proxy_file(&file) {
            return Ok(Self::read_kube_proxy(path, &file)?.warnings);
        }
        Self::from_file_values(path, file)?;
        Ok(Vec::new())
    }

    /// Converts a config file's parsed YAML to a config, and makes the paths in it absolute.
    fn from_file_values(path: &Path, values: Value) -> Result<Self, ConfigError> {
        let mut config = Self::from_value(values).map_err(|refusal| field_error(path, refusal))?;
        config.resolve(&directory(path)?);
        Ok(config)
    }

    /// Converts the parsed YAML of kube-proxy's config file.
    fn read_kube_proxy(path: &Path, values: &Value) -> Result<kube_proxy::Conversion, ConfigError> {
        let conversion = kube_proxy::convert(values, &directory(path)?);
        conversion.map_err(|refusal| field_error(path, refusal))
    }

    /// Parses the text of a kube-proxy config file, and returns the fields that have no effect.
    ///
    /// # Errors
    ///
    /// Returns an error if a field has an invalid value. The error contains the field and the reason.
    pub(crate) fn parse_kube_proxy(text: &str) -> Result<Vec<Warning>, (String, String)> {
        let conversion = kube_proxy::convert(&parse_yaml(text)?, Path::new("/"))?;
        Ok(conversion.warnings)
    }

    /// Parses the text of a config file.
    ///
    /// # Errors
    ///
    /// Returns an error if the text has an unknown field or an invalid value. The error contains the field
    /// and the reason.
    pub fn parse(text: &str) -> Result<Self, FieldError> {
        Self::from_value(parse_yaml(text)?)
    }

    /// Deserialises and checks a config.
    fn from_value(mut value: Value) -> Result<Self, FieldError> {
        section_mappings::check(&mut value)?;
        let config: Self = serde_path_to_error::deserialize(value).map_err(|error| {
            let mut field = error.path().to_string();
            if field == "." {
                TOP_LEVEL.clone_into(&mut field);
            }
            let reason = unknown_field::reword(&error.into_inner().to_string());
            let reason = allowed_values::reword(&field, reason);
            (field, reason)
        })?;
        config.check()?;
        Ok(config)
    }

    /// Returns a config file that contains every field with its default and a comment that explains it.
    #[must_use]
    pub const fn default_file() -> &'static str {
        include_str!("config/default.yaml")
    }

    /// Returns the config, including the defaults for absent fields, in the format of kube-proxy's
    /// `/configz`: an object with a single key, whose value is the config.
    #[must_use]
    pub fn effective(&self) -> Value {
        json!({ CONFIGZ_KEY: self })
    }

    /// Returns the path of the admin socket, to which the command line connects.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.state_dir.join("admin.sock")
    }

    /// Returns the path of the socket to which the helper, `culvert sockets`, connects.
    #[must_use]
    pub fn helper_socket(&self) -> PathBuf {
        self.state_dir.join("sockets.sock")
    }

    /// Returns the path of the snapshot file for the API server's objects.
    #[must_use]
    pub fn objects_snapshot(&self) -> PathBuf {
        self.state_dir.join("objects")
    }

    /// Returns the path of an agent's admin socket.
    #[must_use]
    pub fn agent_socket(&self) -> PathBuf {
        self.state_dir.join("agent.sock")
    }

    /// Checks the values that have the right type but may be out of range or contradict each other.
    fn check(&self) -> Result<(), FieldError> {
        let invalid = |field: &str, reason: &str| Err((field.to_owned(), reason.to_owned()));
        if !self.node_name.is_empty() && !is_node_name(&self.node_name) {
            return invalid(
                "nodeName",
                &format!("`{}` {INVALID_NODE_NAME}", self.node_name),
            );
        }
        for (field, directory) in [
            ("stateDir", &self.state_dir),
            ("bpf.bpffs", &self.bpf.bpffs),
        ] {
            if directory.as_os_str().is_empty() {
                return invalid(field, "is empty, but must be the path of a directory");
            }
        }
        if self.mode == Mode::Userspace {
            return invalid("mode", "`userspace` is not implemented yet; use `ebpf`");
        }
        numeric_ranges::check(self)?;
        self.source.check()?;
        self.service.check()?;
        self.conntrack.check()?;
        let protocols = &self.sockets.terminate;
        let is_duplicate = |index: &usize| protocols[..*index].contains(&protocols[*index]);
        if let Some(index) = (0..protocols.len()).find(is_duplicate) {
            let reason = format!("`{}` is listed twice", protocols[index]);
            return invalid(&format!("sockets.terminate[{index}]"), &reason);
        }
        self.log.check()?;
        self.tunnel.check()?;
        self.check_forwarding()?;
        self.check_ports()
    }

    /// Returns an error if connections are to be forwarded into the tunnel, but packets are not translated.
    fn check_forwarding(&self) -> Result<(), FieldError> {
        let steering = self.tunnel.steering.as_ref();
        let is_forwarding = steering.is_some_and(|steering| !steering.forwarded.is_empty());
        if is_forwarding && !self.service.packets.enabled {
            let reason = "needs service.packets.enabled: true, because connections of other machines arrive as packets";
            return Err(("tunnel.steering.forwarded".to_owned(), reason.to_owned()));
        }
        Ok(())
    }

    /// Returns an error if two listeners need the same port.
    fn check_ports(&self) -> Result<(), FieldError> {
        let tunnel = &self.tunnel;
        let gateway = tunnel.gateway.as_ref().map(|gateway| gateway.listen);
        let all = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        let ingress = tunnel.steering.as_ref();
        let ingress = ingress.map(|steering| all(steering.ingress_port));
        let listeners = [
            (
                "admin.address",
                Some(self.admin.address),
                AdminConfig::default().address,
            ),
            (
                "healthz.address",
                Some(self.healthz.address),
                HealthzConfig::default().address,
            ),
            (
                "tunnel.gateway.listen",
                gateway,
                GatewaySettings::default().listen,
            ),
            (
                "tunnel.steering.ingressPort",
                ingress,
                all(SteeringConfig::default().ingress_port),
            ),
        ];
        let mut seen: Vec<(&str, SocketAddr)> = Vec::new();
        for (field, listener, default) in listeners {
            let Some(address) = listener else { continue };
            if let Some((earlier, other)) =
                seen.iter().find(|(_, it)| is_port_conflict(address, *it))
            {
                let its = if address == default {
                    "its default "
                } else {
                    ""
                };
                let port = address.port();
                let reason = format!("{its}port {port} is already used by {earlier} ({other})");
                return Err((field.to_owned(), reason));
            }
            seen.push((field, address));
        }
        Ok(())
    }

    /// Makes all paths absolute by resolving them against `directory`, and sets the node name if it is empty.
    fn resolve(&mut self, directory: &Path) {
        let own = [&mut self.bpf.bpffs, &mut self.state_dir];
        let own = own.into_iter().chain(&mut self.bpf.cgroup.0);
        let own = own.chain(&mut self.controller.deny_file);
        let parts = self.source.paths().chain(self.tunnel.paths());
        for path in own.chain(parts) {
            *path = directory.join(&path);
        }
        if self.node_name.is_empty() {
            self.node_name = node_name_from_env();
        }
        if self.node_name.is_empty() {
            let host = nix::unistd::gethostname().unwrap_or_default();
            self.node_name = host.to_string_lossy().to_lowercase();
        }
    }
}

/// The maximum length of a Kubernetes object's name, in characters.
const MAX_NAME_LENGTH: usize = 253;

/// The reason given for an invalid node name.
const INVALID_NODE_NAME: &str = "is not a valid Node name; use lower-case letters, digits, `-` and `.`, at most \
                            253 characters; each part between dots must begin and end with a letter or digit";

fn is_node_name(name: &str) -> bool {
    is_subdomain(name) && name.len() <= MAX_NAME_LENGTH
}

/// Returns true if two listeners can't both bind their address and port. The unspecified address of either
/// family covers both families.
fn is_port_conflict(one: SocketAddr, other: SocketAddr) -> bool {
    let is_everywhere = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && (is_everywhere || one.ip() == other.ip())
}

/// The field name in errors that concern the file as a whole.
const TOP_LEVEL: &str = "top level";

/// Parses YAML, treating empty text as an empty mapping.
fn parse_yaml(text: &str) -> Result<Value, FieldError> {
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    // With comments enabled, the parser fails on more than 96 consecutive comment lines.
    let options = serde_saphyr::options! { emit_comments: false };
    let value: Value = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let message = error.to_string();
        let message = message.strip_prefix("error: ").unwrap_or(&message);
        ("invalid YAML".to_owned(), message.to_owned())
    })?;
    Ok(if value.is_null() { json!({}) } else { value })
}

fn read_yaml(path: &Path) -> Result<Value, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| read_error(path, source))?;
    parse_yaml(&text).map_err(|refusal| field_error(path, refusal))
}

fn read_error(path: &Path, source: io::Error) -> ConfigError {
    ConfigError::Read {
        path: path.to_owned(),
        source,
    }
}

fn field_error(path: &Path, (field, reason): FieldError) -> ConfigError {
    ConfigError::Field {
        path: path.to_owned(),
        field,
        reason,
    }
}

/// Returns the absolute path of the directory that contains a file.
fn directory(path: &Path) -> Result<PathBuf, ConfigError> {
    let absolute = std::path::absolute(path).map_err(|source| read_error(path, source))?;
    let directory = absolute.parent().unwrap_or_else(|| Path::new("/"));
    Ok(directory.to_owned())
}

/// Returns the value of the environment variable `NODE_NAME`, which the pod's manifest sets, or an empty
/// string if it is not set.
#[expect(
    clippy::disallowed_methods,
    reason = "the config reads the environment"
)]
fn node_name_from_env() -> String {
    std::env::var("NODE_NAME").unwrap_or_default()
}

#[cfg(test)]
mod tests;
