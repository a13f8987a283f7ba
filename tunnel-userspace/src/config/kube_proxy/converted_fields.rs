//! The structs into which the converted fields of kube-proxy's config file are deserialised.

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;

use crate::config::FieldError;

/// Deserialises a file into `T`, ignoring the fields that `T` lacks. A null field is treated as absent.
pub(super) fn deserialize<T: DeserializeOwned>(file: &Value) -> Result<T, FieldError> {
    let read = serde_path_to_error::deserialize(without_nulls(file));
    read.map_err(|error| (error.path().to_string(), error.into_inner().to_string()))
}

fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let non_null = fields.iter().filter(|(_, value)| !value.is_null());
            non_null
                .map(|(name, value)| (name.clone(), without_nulls(value)))
                .collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            value.clone()
        }
    }
}

/// A file's API version and kind.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct FileType {
    pub(super) api_version: String,
    pub(super) kind: String,
}

/// The fields of `KubeProxyConfiguration` that are converted.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct KubeProxyFile {
    pub(super) client_connection: ClientConnection,
    pub(super) hostname_override: String,
    pub(super) bind_address: String,
    pub(super) healthz_bind_address: String,
    pub(super) metrics_bind_address: String,
    pub(super) mode: Mode,
    pub(super) node_port_addresses: Vec<String>,
    pub(super) iptables: RulesSection,
    pub(super) ipvs: IpvsSection,
    pub(super) nftables: RulesSection,
    pub(super) detect_local_mode: String,
    #[serde(rename = "clusterCIDR")]
    pub(super) cluster_cidr: String,
    pub(super) detect_local: DetectLocalSection,
    pub(super) conntrack: ConntrackSection,
}

/// The `detectLocal` section.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct DetectLocalSection {
    pub(super) bridge_interface: String,
    pub(super) interface_name_prefix: String,
}

/// The `conntrack` section.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ConntrackSection {
    pub(super) max_per_core: Option<u32>,
    pub(super) min: Option<u32>,
    pub(super) tcp_established_timeout: Option<String>,
    pub(super) tcp_close_wait_timeout: Option<String>,
    pub(super) tcp_be_liberal: bool,
    pub(super) udp_timeout: Option<String>,
    pub(super) udp_stream_timeout: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ClientConnection {
    pub(super) kubeconfig: String,
}

/// kube-proxy's mode, which determines the section that applies.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(super) enum Mode {
    #[default]
    #[serde(alias = "")]
    Iptables,
    Ipvs,
    Nftables,
    /// The mode for Windows.
    Kernelspace,
}

/// The `iptables` or `nftables` section.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct RulesSection {
    pub(super) localhost_node_ports: Option<bool>,
    pub(super) masquerade_all: bool,
    #[serde(rename = "snatNodeInternalIP")]
    pub(super) snat_node_internal_ip: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct IpvsSection {
    pub(super) scheduler: String,
}
