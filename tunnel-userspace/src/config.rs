//! The configuration: one YAML file for every role. Only this module reads it, and the
//! environment.

mod bounds;
mod kube_proxy;
mod log;
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

/// The field that can't be used, and what is wrong with it.
type Refused = (String, String);

/// What the config is shown as; the domain is a placeholder.
const GROUP: &str = "culvert.dev";

/// Everything that can be configured.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// The name of the Node object of this node; empty for what `NODE_NAME` in the environment says,
    /// else for the name of the host.
    pub node_name: String,
    /// How Services are translated.
    pub mode: Mode,
    /// Where objects come from.
    pub source: Source,
    /// Which traffic is translated, and how.
    pub service: Service,
    /// The kernel programs and their maps.
    pub bpf: Bpf,
    /// Open sockets of backends that are gone.
    pub sockets: sockets::Settings,
    /// Where the daemon keeps its socket and state. Relative to the file.
    pub state_dir: PathBuf,
    /// Metrics and status.
    pub admin: Admin,
    /// Health for load balancers and probes.
    pub healthz: Healthz,
    /// What is logged besides.
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

/// A configuration that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("cannot read config {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file is not what a config looks like.
    #[error("config {path}: {field}: {reason}")]
    Field {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Config {
    /// Reads a file. Paths in it that are relative are relative to the file.
    ///
    /// # Errors
    ///
    /// The file can't be read, has a field that there isn't, or a value that can't be.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::of_file(path, read_document(path)?)
    }

    /// Reads a file for a node, over what kube-proxy's own file says, if there is one: what the first
    /// says counts, field by field. Gives the fields of kube-proxy's that have no effect.
    ///
    /// # Errors
    ///
    /// As [`Self::read`], for either file. `path` may be absent where it is the default place and
    /// there is a file of kube-proxy's.
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

    /// Checks a file, kube-proxy's or ours; gives the fields of kube-proxy's that have no effect.
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

    /// Reads the values of a file.
    fn of_file(path: &Path, values: Value) -> Result<Self, ConfigError> {
        let mut config = Self::from_value(values).map_err(|refusal| refused(path, refusal))?;
        config.resolve(&folder(path)?);
        Ok(config)
    }

    /// What the values of a file of kube-proxy's mean here.
    fn read_kube_proxy(path: &Path, values: &Value) -> Result<kube_proxy::Meaning, ConfigError> {
        let meaning = kube_proxy::read(values, &folder(path)?);
        meaning.map_err(|refusal| refused(path, refusal))
    }

    /// Reads the text of a file of kube-proxy's, and gives its fields that have no effect; on failure the
    /// field and the reason.
    pub(crate) fn parse_kube_proxy(text: &str) -> Result<Vec<Warning>, (String, String)> {
        let meaning = kube_proxy::read(&document(text)?, Path::new("/"))?;
        Ok(meaning.warnings)
    }

    /// Reads the text of a file; on failure the field and the reason.
    ///
    /// # Errors
    ///
    /// The text has a field that there isn't, or a value that can't be.
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
            (field, error.into_inner().to_string())
        })?;
        config.check()?;
        Ok(config)
    }

    /// The defaults, as a file with the meaning of each field.
    #[must_use]
    pub const fn default_file() -> &'static str {
        include_str!("config/default.yaml")
    }

    /// All of it as it counts, with what the file leaves out, below the name of its group (as
    /// kube-proxy's `/configz` shows its own).
    #[must_use]
    pub fn effective(&self) -> Value {
        json!({ GROUP: self })
    }

    /// The socket that the daemon answers its command line on.
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.state_dir.join("admin.sock")
    }

    /// The socket that the helper calls which ends sockets in pods.
    #[must_use]
    pub fn helper_socket(&self) -> PathBuf {
        self.state_dir.join("sockets.sock")
    }

    /// The file of what was known last of the API server.
    #[must_use]
    pub fn kept_objects(&self) -> PathBuf {
        self.state_dir.join("objects")
    }

    /// The socket that an agent answers its command line on.
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

    /// Refuses two listeners of one process that would be in each other's way.
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

/// The most characters of the name of a Kubernetes object.
const LONGEST_NAME: usize = 253;

const NO_NODE_NAME: &str = "is no name of a Node: lower-case letters, digits, `-` and `.`, at most 253 of \
                            them; each part between dots begins and ends with a letter or digit";

fn is_node_name(name: &str) -> bool {
    is_subdomain(name) && name.len() <= LONGEST_NAME
}

/// Whether two listeners can't both have their port. The unspecified address of a family stands for
/// both families.
fn is_same_port(one: SocketAddr, other: SocketAddr) -> bool {
    let is_everywhere = one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && (is_everywhere || one.ip() == other.ip())
}

/// What is refused where it is no single field.
const WHOLE: &str = "the file";

/// The values of a file.
fn document(text: &str) -> Result<Value, Refused> {
    if text.trim().is_empty() {
        return Ok(json!({}));
    }
    // Comments are kept for nobody, and more than 96 in a row would be refused.
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

/// The folder that a file's relative paths are relative to.
fn folder(path: &Path) -> Result<PathBuf, ConfigError> {
    let absolute = std::path::absolute(path).map_err(|source| unread(path, source))?;
    let folder = absolute.parent().unwrap_or_else(|| Path::new("/"));
    Ok(folder.to_owned())
}

/// The node that the pod's manifest names; empty outside of a pod.
#[expect(
    clippy::disallowed_methods,
    reason = "the config reads the environment"
)]
fn named_by_pod() -> String {
    std::env::var("NODE_NAME").unwrap_or_default()
}

#[cfg(test)]
mod tests;
