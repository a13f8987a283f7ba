//! kube-proxy's config file (`kubeproxy.config.k8s.io/v1alpha1`): converts the fields with an equivalent
//! here, and returns one warning for each other field that is set.

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
use super::{Config, Refused};
use crate::model::Algorithm;

/// The API group, its supported version, and the kind.
const GROUP: &str = "kubeproxy.config.k8s.io";
const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
const KIND: &str = "KubeProxyConfiguration";

/// kube-proxy's default ports for health and metrics (`pkg/cluster/ports`).
const HEALTH: u16 = 10_256;
const METRICS: u16 = 10_249;

/// A field of kube-proxy's file that has no effect, or only a part of it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Warning {
    /// The path of the field.
    pub field: String,
    /// The reason.
    pub why: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

/// The equivalent of a kube-proxy file.
#[derive(Debug, Default)]
pub(super) struct Meaning {
    /// The values of our own config.
    pub(super) config: Value,
    /// The fields that have no effect.
    pub(super) warnings: Vec<Warning>,
}

impl Meaning {
    /// Sets the value at a path.
    fn put(&mut self, path: &str, value: Value) {
        let names = path.rsplit('.');
        let value = names.fold(value, |value, name| json!({ name: value }));
        self.config = over(mem::take(&mut self.config), value);
    }

    fn warn(&mut self, field: &str, why: impl Into<String>) {
        self.warnings.push(Warning {
            field: field.to_owned(),
            why: why.into(),
        });
    }
}

/// True if a file is kube-proxy's, by its API group or its kind.
pub(super) fn is_one(file: &Value) -> bool {
    let group = file.get("apiVersion").and_then(Value::as_str);
    let group = group.and_then(|version| version.split('/').next());
    group == Some(GROUP) || file.get("kind").and_then(Value::as_str) == Some(KIND)
}

/// Returns the field of kube-proxy's file that sets a field of ours.
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

/// Converts a file. Relative paths in it are relative to `folder`.
pub(super) fn read(value: &Value, folder: &Path) -> Result<Meaning, Refused> {
    let head: Head = file::part(value)?;
    for (field, found, wanted) in [
        ("apiVersion", head.api_version, API_VERSION),
        ("kind", head.kind, KIND),
    ] {
        if found != wanted {
            let found = if found.is_empty() { "nothing" } else { &found };
            return Err((field.to_owned(), format!("must be {wanted}, is {found}")));
        }
    }
    let file: File = file::part(value)?;
    let mut meaning = Meaning {
        config: json!({}),
        warnings: unused(value),
    };
    if file.mode == Mode::Kernelspace {
        meaning.warn("mode", "it is for Windows");
    }
    client(&file, folder, &mut meaning);
    ports(&file, &mut meaning)?;
    node_ports(&file, &mut meaning);
    scheduler(&file, &mut meaning);
    traffic(&file, &mut meaning)?;
    meaning
        .warnings
        .sort_by(|one, other| one.field.cmp(&other.field));
    // The converted values must be valid alone, since our own file may override none of them.
    match Config::from_value(meaning.config.clone()) {
        Ok(_) => Ok(meaning),
        Err((field, reason)) => Err((named(field), reason)),
    }
}

/// Returns a warning for each unknown field, and for each field without effect that is not at its default.
fn unused(file: &Value) -> Vec<Warning> {
    let mut found = Vec::new();
    leaves(file, "", &mut found);
    let warning = |(field, value): (String, &Value)| {
        let why = why_unused(&field, value)?.to_owned();
        Some(Warning { field, why })
    };
    found.into_iter().filter_map(warning).collect()
}

/// Collects the fields of a file, down to the depth of the known fields.
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
        // An empty section.
        None if is_inner && value.is_null() => {}
        Some(_) | None => found.push((path.to_owned(), value)),
    }
}

/// Converts the API server, which is always kube-proxy's source, and the name of the node.
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

/// Converts the addresses for health and metrics; the family of `bindAddress` determines their defaults.
fn ports(file: &File, meaning: &mut Meaning) -> Result<(), Refused> {
    let own = match file.bind_address.as_str() {
        "" => "0.0.0.0",
        own => own,
    };
    let reason = format!("`{own}` is no address");
    let own = ip_of(own).ok_or_else(|| ("bindAddress".to_owned(), reason))?;
    if !own.is_unspecified() {
        let why = "the addresses of the node are those of its Node object; only its family counts, \
                   for healthzBindAddress and metricsBindAddress";
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
            let reason = format!("`{wanted}` is no address, and none with a port");
            (named(ours.to_owned()), reason)
        })?;
        meaning.put(ours, json!(address));
    }
    Ok(())
}

/// Converts the addresses of NodePorts; an empty list means the same as an absent field.
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
            meaning.warn(LOOPBACK, "nodePortAddresses says which there are");
        }
        (false, Mode::Ipvs | Mode::Nftables | Mode::Kernelspace, _) => {
            meaning.warn(LOOPBACK, "it counts in mode iptables only");
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
        (_, _) => return meaning.warn(FIELD, "it counts in mode ipvs only"),
    };
    match Algorithm::named(name) {
        Some(algorithm) => meaning.put("service.algorithm", json!(algorithm)),
        None => {
            let why = format!("`{name}` is no choice here; backends are chosen at random");
            meaning.warn(FIELD, why);
        }
    }
}

/// Converts the detection of local traffic and masquerading, for the packet path.
fn traffic(file: &File, meaning: &mut Meaning) -> Result<(), Refused> {
    match file.detect_local_mode.as_str() {
        "" => {}
        detect @ ("ClusterCIDR" | "NodeCIDR" | "BridgeInterface" | "InterfaceNamePrefix") => {
            meaning.put("service.detectLocal", json!(detect));
        }
        other => {
            let reason = format!(
                "`{other}` is none of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix"
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

/// Merges `top` over `under`, field by field. A field that is null in `top` is removed if `under` has it,
/// and kept as null (a section with defaults) if not.
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
