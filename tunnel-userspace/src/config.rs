//! The configuration: one YAML file for every role. Only this module reads the file and the
//! environment.

mod bounds;
mod kube_proxy;
mod log;
mod nearest;
mod section;
mod shape;
mod source;
mod tunnel;

use std::{
    fs, io,
    net::{Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
};

pub use kube_proxy::Warning;
pub use log::Log;
pub use section::{Admin, Bpf, Cgroup, DetectLocal, Healthz, Mode, Service};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
pub use source::Source;
pub use tunnel::{Identity, OnIngressDown, Steering, Tunnel};

use crate::{identity::is_subdomain, sockets};

/// The path of an invalid field, and the reason.
type Refused = (String, String);

/// The name of the group that the config is shown under; the domain is a placeholder.
const GROUP: &str = "culvert.dev";

/// The complete configuration of a process.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// The name of this node's Node object. Empty: the environment variable `NODE_NAME`, else the host
    /// name.
    pub node_name: String,
    /// The implementation of Services.
    pub mode: Mode,
    /// The sources of objects.
    pub source: Source,
    /// The translation of Service traffic.
    pub service: Service,
    /// The kernel programs and their maps.
    pub bpf: Bpf,
    /// The termination of sockets of removed backends.
    pub sockets: sockets::Settings,
    /// The folder of the daemon's sockets and state; a relative path is relative to the file.
    pub state_dir: PathBuf,
    /// Metrics and status.
    pub admin: Admin,
    /// Health for load balancers and probes.
    pub healthz: Healthz,
    /// Additional logs.
    #[serde(skip_serializing_if = "Log::is_off")]
    pub log: Log,
    /// The tunnel to edge nodes.
    pub tunnel: Tunnel,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            node_name: String::new(),
            mode: Mode::default(),
            source: Source::default(),
            service: Service::default(),
            bpf: Bpf::default(),
            sockets: sockets::Settings::default(),
            state_dir: "/var/lib/culvert".into(),
            admin: Admin::default(),
            healthz: Healthz::default(),
            log: Log::default(),
            tunnel: Tunnel::default(),
        }
    }
}

/// An error in a configuration file.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("cannot read config {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: io::Error,
    },
    /// A field or its value is invalid.
    #[error("config {path}: {field}: {reason}")]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// The reason.
        reason: String,
    },
}

impl Config {
    /// Reads a file. Relative paths in it are relative to the file.
    ///
    /// # Errors
    ///
    /// The file can't be read, or has an unknown field or an invalid value.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::of_file(path, read_document(path)?)
    }

    /// Reads the config of a node and merges it over kube-proxy's file: a field of `path` overrides
    /// the same field of `kube_proxy`. Also returns kube-proxy's fields that have no effect.
    ///
    /// # Errors
    ///
    /// As [`Self::read`], for either file. The file `path` may be absent if it is the `default` path.
    pub fn read_over(
        path: &Path,
        default: &Path,
        kube_proxy: &Path,
    ) -> Result<(Self, Vec<Warning>), ConfigError> {
        let meaning = Self::read_kube_proxy(kube_proxy, &read_document(kube_proxy)?)?;
        let is_absent = path == default && matches!(path.try_exists(), Ok(false));
        let own = if is_absent {
            json!({})
        } else {
            read_document(path)?
        };
        let config = Self::of_file(path, kube_proxy::over(meaning.config, own))?;
        Ok((config, meaning.warnings))
    }

    /// Checks a file, kube-proxy's or ours; returns kube-proxy's fields that have no effect.
    ///
    /// # Errors
    ///
    /// As [`Self::read`].
    pub fn check_file(path: &Path) -> Result<Vec<Warning>, ConfigError> {
        let file = read_document(path)?;
        if kube_proxy::is_one(&file) {
            return Ok(Self::read_kube_proxy(path, &file)?.warnings);
        }
        Self::of_file(path, file)?;
        Ok(Vec::new())
    }

    /// Creates a config from the values of a file, and makes its paths absolute.
    fn of_file(path: &Path, values: Value) -> Result<Self, ConfigError> {
        let mut config = Self::from_value(values).map_err(|refusal| refused(path, refusal))?;
        config.resolve(&folder(path)?);
        Ok(config)
    }

    /// Converts the values of a kube-proxy file.
    fn read_kube_proxy(path: &Path, values: &Value) -> Result<kube_proxy::Meaning, ConfigError> {
        let meaning = kube_proxy::read(values, &folder(path)?);
        meaning.map_err(|refusal| refused(path, refusal))
    }

    /// Parses the text of a kube-proxy file and returns its fields that have no effect; on failure the
    /// field and the reason.
    pub(crate) fn parse_kube_proxy(text: &str) -> Result<Vec<Warning>, (String, String)> {
        let meaning = kube_proxy::read(&document(text)?, Path::new("/"))?;
        Ok(meaning.warnings)
    }

    /// Parses the text of a file; on failure returns the field and the reason.
    ///
    /// # Errors
    ///
    /// The text has an unknown field or an invalid value.
    pub fn parse(text: &str) -> Result<Self, Refused> {
        Self::from_value(document(text)?)
    }

    fn from_value(mut value: Value) -> Result<Self, Refused> {
        shape::check(&mut value)?;
        let config: Self = serde_path_to_error::deserialize(value).map_err(|error| {
            let mut field = error.path().to_string();
            if field == "." {
                WHOLE.clone_into(&mut field);
            }
            (field, nearest::suggest(error.into_inner().to_string()))
        })?;
        config.check()?;
        Ok(config)
    }

    /// Returns the file of defaults, in which comments explain each field.
    #[must_use]
    pub const fn default_file() -> &'static str {
        include_str!("config/default.yaml")
    }

    /// Returns the effective config, including the defaults of absent fields, under the key of its API
    /// group, as in kube-proxy's `/configz`.
    #[must_use]
    pub fn effective(&self) -> Value {
        json!({ GROUP: self })
    }

    /// Returns the path of the admin socket, on which the daemon serves the command line.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.state_dir.join("admin.sock")
    }

    /// Returns the path of the socket to which the helper connects that terminates sockets in pods.
    #[must_use]
    pub fn helper_socket(&self) -> PathBuf {
        self.state_dir.join("sockets.sock")
    }

    /// Returns the path of the last snapshot of the API server's objects.
    #[must_use]
    pub fn kept_objects(&self) -> PathBuf {
        self.state_dir.join("objects")
    }

    /// Returns the path of the admin socket of an agent.
    #[must_use]
    pub fn agent_socket(&self) -> PathBuf {
        self.state_dir.join("agent.sock")
    }

    fn check(&self) -> Result<(), Refused> {
        let refuse = |field: &str, reason: &str| Err((field.to_owned(), reason.to_owned()));
        if !self.node_name.is_empty() && !is_node_name(&self.node_name) {
            return refuse("nodeName", &format!("`{}` {NO_NODE_NAME}", self.node_name));
        }
        for (field, folder) in [
            ("stateDir", &self.state_dir),
            ("bpf.bpffs", &self.bpf.bpffs),
        ] {
            if folder.as_os_str().is_empty() {
                return refuse(field, "must name a folder, is empty");
            }
        }
        if self.mode == Mode::Userspace {
            return refuse("mode", "userspace is not built yet, use ebpf");
        }
        bounds::check(self)?;
        self.source.check()?;
        self.service.check()?;
        let ended = &self.sockets.terminate;
        let is_twice = |index: &usize| ended[..*index].contains(&ended[*index]);
        if let Some(index) = (0..ended.len()).find(is_twice) {
            return refuse(&format!("sockets.terminate[{index}]"), "is there already");
        }
        self.log.check()?;
        self.tunnel.check()?;
        self.check_ports()
    }

    /// Refuses two listeners of one process on the same port.
    fn check_ports(&self) -> Result<(), Refused> {
        let tunnel = &self.tunnel;
        let gateway = tunnel.gateway.as_ref().map(|gateway| gateway.listen);
        let all = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        let ingress = tunnel.steering.as_ref();
        let ingress = ingress.map(|steering| all(steering.ingress_port));
        let listeners = [
            ("admin.address", Some(self.admin.address)),
            ("healthz.address", Some(self.healthz.address)),
            ("tunnel.gateway.listen", gateway),
            ("tunnel.steering.ingressPort", ingress),
        ];
        let mut seen: Vec<(&str, SocketAddr)> = Vec::new();
        for (field, listener) in listeners {
            let Some(one) = listener else { continue };
            if let Some((earlier, other)) = seen.iter().find(|(_, it)| is_same_port(one, *it)) {
                let reason = format!("must be another port than that of {earlier}, {other}");
                return Err((field.to_owned(), reason));
            }
            seen.push((field, one));
        }
        Ok(())
    }

    fn resolve(&mut self, folder: &Path) {
        let own = [&mut self.bpf.bpffs, &mut self.state_dir];
        let own = own.into_iter().chain(&mut self.bpf.cgroup.0);
        let parts = self.source.paths().chain(self.tunnel.paths());
        for path in own.chain(parts) {
            *path = folder.join(&path);
        }
        if self.node_name.is_empty() {
            self.node_name = named_by_pod();
        }
        if self.node_name.is_empty() {
            let host = nix::unistd::gethostname().unwrap_or_default();
            self.node_name = host.to_string_lossy().to_lowercase();
        }
    }
}

/// The longest name of a Kubernetes object, in characters.
const LONGEST_NAME: usize = 253;

const NO_NODE_NAME: &str = "is no name of a Node: lower-case letters, digits, `-` and `.`, at most 253 of \
                            them; each part between dots begins and ends with a letter or digit";

fn is_node_name(name: &str) -> bool {
    is_subdomain(name) && name.len() <= LONGEST_NAME
}

/// True if two listeners conflict over a port. The unspecified address of either family listens on both
/// families.
fn is_same_port(one: SocketAddr, other: SocketAddr) -> bool {
    let is_everywhere = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && (is_everywhere || one.ip() == other.ip())
}

/// The name in an error that concerns no single field.
const WHOLE: &str = "the file";

/// Parses the YAML of a file; an empty file is an empty map.
fn document(text: &str) -> Result<Value, Refused> {
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    // Comments are not needed, and the parser refuses more than 96 in a row.
    let options = serde_saphyr::options! { emit_comments: false };
    let value: Value = serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| (WHOLE.to_owned(), error.to_string()))?;
    Ok(if value.is_null() { json!({}) } else { value })
}

fn read_document(path: &Path) -> Result<Value, ConfigError> {
    let text = fs::read_to_string(path).map_err(|source| unread(path, source))?;
    document(&text).map_err(|refusal| refused(path, refusal))
}

fn unread(path: &Path, source: io::Error) -> ConfigError {
    ConfigError::Read {
        path: path.to_owned(),
        source,
    }
}

fn refused(path: &Path, (field, reason): Refused) -> ConfigError {
    ConfigError::Field {
        path: path.to_owned(),
        field,
        reason,
    }
}

/// Returns the absolute folder of a file, to which the file's relative paths are relative.
fn folder(path: &Path) -> Result<PathBuf, ConfigError> {
    let absolute = std::path::absolute(path).map_err(|source| unread(path, source))?;
    let folder = absolute.parent().unwrap_or_else(|| Path::new("/"));
    Ok(folder.to_owned())
}

/// Returns the node name that the pod's manifest sets in the environment; empty outside a pod.
#[expect(
    clippy::disallowed_methods,
    reason = "the config reads the environment"
)]
fn named_by_pod() -> String {
    std::env::var("NODE_NAME").unwrap_or_default()
}

#[cfg(test)]
mod tests;
