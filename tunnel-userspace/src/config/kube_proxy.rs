//! Converts kube-proxy's config file (`kubeproxy.config.k8s.io/v1alpha1`) to Culvert's, and returns a warning
//! for each field without an equivalent.

mod fields;
mod file;
mod read;

use std::{fmt, mem, path::Path};

use serde_json::{Value, json};

use self::{
    fields::{paths, why_unused},
    file::{File, Head, Mode},
    read::{address, ip_of},
};
use super::{Config, FieldError};
use crate::model::Algorithm;

/// The API group, its supported version, and the kind.
const GROUP: &str = "kubeproxy.config.k8s.io";
const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
const KIND: &str = "KubeProxyConfiguration";

/// kube-proxy's default ports for health and metrics (`pkg/cluster/ports`).
const HEALTH: u16 = 10_256;
const METRICS: u16 = 10_249;

/// A field of kube-proxy's file that has no effect, or only a part of its effect.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Warning {
    /// The path of the field.
    pub field: String,
    /// The reason why the field has no effect.
    pub why: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

/// The result of converting a kube-proxy file.
#[derive(Debug, Default)]
pub(super) struct Meaning {
    /// The fields of Culvert's config.
    pub(super) config: Value,
    /// The fields that have no effect.
    pub(super) warnings: Vec<Warning>,
}

impl Meaning {
    /// Sets a field of Culvert's config, as in `service.algorithm`.
    fn put(&mut self, path: &str, value: Value) {
        let names = path.rsplit('.');
        let value = names.fold(value, |value, name| json!({ name: value }));
        self.config = over(mem::take(&mut self.config), value);
    }

    /// Adds a warning about a field of kube-proxy's file.
    fn warn(&mut self, field: &str, why: impl Into<String>) {
        self.warnings.push(Warning {
            field: field.to_owned(),
            why: why.into(),
        });
    }
}

/// True if a file has the API group or the kind of kube-proxy's config.
pub(super) fn is_one(file: &Value) -> bool {
    let group = file.get("apiVersion").and_then(Value::as_str);
    let group = group.and_then(|version| version.split('/').next());
    group == Some(GROUP) || file.get("kind").and_then(Value::as_str) == Some(KIND)
}

/// Returns the field of kube-proxy's file from which a field of Culvert's config was converted.
fn named(ours: String) -> String {
    let (field, index) = ours.split_at(ours.find('[').unwrap_or(ours.len()));
    match field {
        "nodeName" => "hostnameOverride".to_owned(),
        "healthz.address" => "healthzBindAddress".to_owned(),
        "admin.address" => "metricsBindAddress".to_owned(),
        "service.nodePortAddresses" => format!("nodePortAddresses{index}"),
        "service.clusterCIDRs" => "clusterCIDR".to_owned(),
        _ => ours,
    }
}

/// Converts a kube-proxy file. Relative paths in it are relative to `folder`.
pub(super) fn read(value: &Value, folder: &Path) -> Result<Meaning, FieldError> {
    let head: Head = file::part(value)?;
    for (field, found, wanted) in [
        ("apiVersion", head.api_version, API_VERSION),
        ("kind", head.kind, KIND),
    ] {
        if found != wanted {
            let found = if found.is_empty() { "absent" } else { &found };
            return Err((field.to_owned(), format!("must be {wanted}, but is {found}")));
        }
    }
    let file: File = file::part(value)?;
    let mut meaning = Meaning {
        config: json!({}),
        warnings: unused(value),
    };
    if file.mode == Mode::Kernelspace {
        meaning.warn("mode", "it is for Windows only");
    }
    client(&file, folder, &mut meaning);
    ports(&file, &mut meaning)?;
    node_ports(&file, &mut meaning);
    scheduler(&file, &mut meaning);
    traffic(&file, &mut meaning)?;
    meaning
        .warnings
        .sort_by(|one, other| one.field.cmp(&other.field));
    // The converted fields must be valid by themselves: Culvert's own file may override none of them.
    match Config::from_value(meaning.config.clone()) {
        Ok(_) => Ok(meaning),
        Err((field, reason)) => Err((named(field), reason)),
    }
}

/// Returns a warning for each unknown field, and for each field without effect that differs from its default.
fn unused(file: &Value) -> Vec<Warning> {
    let mut found = Vec::new();
    leaves(file, "", &mut found);
    let warning = |(field, value): (String, &Value)| {
        let why = why_unused(&field, value)?.to_owned();
        Some(Warning { field, why })
    };
    found.into_iter().filter_map(warning).collect()
}

/// Collects the paths and values of the fields in a file. The mapping in a known field, such as
/// `featureGates`, is one value.
fn leaves<'a>(value: &'a Value, path: &str, found: &mut Vec<(String, &'a Value)>) {
    let is_inner = path.is_empty() || {
        let inside = format!("{path}.");
        paths().any(|field| field.starts_with(&inside))
    };
    match value.as_object() {
        Some(map) if is_inner => {
            for (name, value) in map {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                leaves(value, &path, found);
            }
        }
        // An empty section has no fields.
        None if is_inner && value.is_null() => {}
        Some(_) | None => found.push((path.to_owned(), value)),
    }
}

/// Converts the node name and the kubeconfig, and enables the API server as a source.
fn client(file: &File, folder: &Path, meaning: &mut Meaning) {
    let kubeconfig = &file.client_connection.kubeconfig;
    let kube = if kubeconfig.is_empty() {
        json!({})
    } else {
        json!({ "kubeconfig": folder.join(kubeconfig) })
    };
    meaning.put("source.kube", kube);
    let name = file.hostname_override.trim().to_lowercase();
    if !name.is_empty() {
        meaning.put("nodeName", json!(name));
    }
}

/// Converts the addresses for health and metrics. Their defaults have the address family of `bindAddress`.
fn ports(file: &File, meaning: &mut Meaning) -> Result<(), FieldError> {
    let own = match file.bind_address.as_str() {
        "" => "0.0.0.0",
        own => own,
    };
    let reason = format!("`{own}` is not an IP address");
    let own = ip_of(own).ok_or_else(|| ("bindAddress".to_owned(), reason))?;
    if !own.is_unspecified() {
        let why = "only its address family has an effect, on the defaults of healthzBindAddress and \
                   metricsBindAddress; the addresses of this node are those of its Node object";
        meaning.warn("bindAddress", why);
    }
    let (all, loopback) = if own.is_ipv4() {
        ("0.0.0.0", "127.0.0.1")
    } else {
        ("::", "::1")
    };
    let (healthz, metrics) = (&file.healthz_bind_address, &file.metrics_bind_address);
    for (ours, wanted, default, port) in [
        ("healthz.address", healthz, all, HEALTH),
        ("admin.address", metrics, loopback, METRICS),
    ] {
        let wanted = if wanted.is_empty() { default } else { wanted };
        let address = address(wanted, port).ok_or_else(|| {
            let reason = format!("`{wanted}` is not an IP address, with or without a port");
            (named(ours.to_owned()), reason)
        })?;
        meaning.put(ours, json!(address));
    }
    Ok(())
}

/// Converts the addresses that serve NodePorts. An empty list is the same as an absent field.
fn node_ports(file: &File, meaning: &mut Meaning) {
    const LOOPBACK: &str = "iptables.localhostNodePorts";
    const OURS: &str = "service.nodePortAddresses";
    let named = &file.node_port_addresses;
    if !named.is_empty() {
        meaning.put(OURS, json!(named));
    }
    let wants_loopback = file.iptables.localhost_node_ports.unwrap_or(true);
    match (wants_loopback, file.mode, named.is_empty()) {
        (true, _, _) => {}
        (false, Mode::Iptables, true) => meaning.put(OURS, json!(["primary"])),
        (false, Mode::Iptables, false) => {
            meaning.warn(LOOPBACK, "nodePortAddresses selects the addresses");
        }
        (false, Mode::Ipvs | Mode::Nftables | Mode::Kernelspace, _) => {
            meaning.warn(LOOPBACK, "it has an effect in mode iptables only");
        }
    }
}

/// Converts the load-balancing algorithm.
fn scheduler(file: &File, meaning: &mut Meaning) {
    const FIELD: &str = "ipvs.scheduler";
    let name = match (file.mode, file.ipvs.scheduler.as_str()) {
        (Mode::Ipvs, "") => "rr",
        (Mode::Ipvs, name) => name,
        (_, "") => return,
        (_, _) => return meaning.warn(FIELD, "it has an effect in mode ipvs only"),
    };
    match Algorithm::named(name) {
        Some(algorithm) => meaning.put("service.algorithm", json!(algorithm)),
        None => {
            let why = format!("`{name}` has no equivalent; the algorithm stays at its default, random");
            meaning.warn(FIELD, why);
        }
    }
}

/// Converts the fields for the packet path: the detection of local traffic, and masquerading.
fn traffic(file: &File, meaning: &mut Meaning) -> Result<(), FieldError> {
    match file.detect_local_mode.as_str() {
        "" => {}
        detect @ ("ClusterCIDR" | "NodeCIDR" | "BridgeInterface" | "InterfaceNamePrefix") => {
            meaning.put("service.detectLocal", json!(detect));
        }
        other => {
            let reason = format!(
                "`{other}` is not ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix"
            );
            return Err(("detectLocalMode".to_owned(), reason));
        }
    }
    let ranges = file.cluster_cidr.split(',').map(str::trim);
    let ranges: Vec<_> = ranges.filter(|range| !range.is_empty()).collect();
    if !ranges.is_empty() {
        meaning.put("service.clusterCIDRs", json!(ranges));
    }
    let masquerades = match file.mode {
        Mode::Iptables | Mode::Ipvs | Mode::Kernelspace => file.iptables.masquerade_all,
        Mode::Nftables => file.nftables.masquerade_all,
    };
    if masquerades {
        meaning.put("service.masqueradeAll", json!(true));
    }
    Ok(())
}

/// Merges two configs, field by field; `top` overrides `under`. A null field in `top` removes the field of
/// `under`. If `under` lacks the field, it stays null, which is a section with its defaults.
pub(super) fn over(under: Value, top: Value) -> Value {
    match (under, top) {
        (Value::Object(mut under), Value::Object(top)) => {
            for (name, value) in top {
                let below = under.remove(&name);
                if !value.is_null() || below.is_none() {
                    under.insert(name, over(below.unwrap_or_default(), value));
                }
            }
            Value::Object(under)
        }
        (_, top) => top,
    }
}

#[cfg(test)]
mod tests;
