//! kube-proxy's own config file (`kubeproxy.config.k8s.io/v1alpha1`), read for what of it has a
//! meaning here. The rest is named, each field once.

pub(super) mod fields;
mod read;

use std::{fmt, path::Path};

use serde_json::{Value, json};

use self::{
    fields::{FIELDS, Field, Use},
    read::{address, has_default, ip_of, range, text, texts},
};
use crate::model::Algorithm;

/// The group of the API, the versions of it that are known, and the kind.
const GROUP: &str = "kubeproxy.config.k8s.io";
const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
const KIND: &str = "KubeProxyConfiguration";

/// kube-proxy's ports for health and metrics (`pkg/cluster/ports`).
const HEALTH: u16 = 10_256;
const METRICS: u16 = 10_249;

/// A field of kube-proxy's that has no effect, or not all of it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Warning {
    /// Its path.
    pub field: String,
    /// Why not.
    pub why: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

/// Why a file can't be used: field and reason.
type Refusal = (String, String);

/// What a file means here.
#[derive(Debug, Default)]
pub(super) struct Meaning {
    /// As fields of our own config.
    pub(super) config: Value,
    /// What has no effect.
    pub(super) warnings: Vec<Warning>,
}

impl Meaning {
    fn warn(&mut self, field: &str, why: impl Into<String>) {
        self.warnings.push(Warning {
            field: field.to_owned(),
            why: why.into(),
        });
    }
}

/// Whether a file is kube-proxy's, by the group that it says it is of, or the kind.
pub(super) fn is_one(file: &Value) -> bool {
    let group = file.get("apiVersion").and_then(Value::as_str);
    let group = group.and_then(|version| version.split('/').next());
    group == Some(GROUP) || file.get("kind").and_then(Value::as_str) == Some(KIND)
}

/// The field of kube-proxy's that a field of ours was read from.
pub(super) fn named(ours: String) -> String {
    let theirs = match ours.as_str() {
        "nodeName" => "hostnameOverride",
        "healthz.address" => "healthzBindAddress",
        "admin.address" => "metricsBindAddress",
        _ => return ours,
    };
    theirs.to_owned()
}

/// Reads a file. Paths in it that are relative are relative to its folder.
pub(super) fn read(file: &Value, folder: &Path) -> Result<Meaning, Refusal> {
    for (field, wanted) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        let found = text(file, field)?;
        if found != wanted {
            let found = if found.is_empty() { "nothing" } else { found };
            return Err((field.to_owned(), format!("must be {wanted}, is {found}")));
        }
    }
    let mut meaning = Meaning {
        config: json!({}),
        warnings: unused(file),
    };
    let mode = mode(file, &mut meaning)?;
    client(file, folder, &mut meaning)?;
    ports(file, &mut meaning)?;
    node_ports(file, mode, &mut meaning)?;
    scheduler(file, mode, &mut meaning)?;
    traffic(file, mode, &mut meaning)?;
    meaning
        .warnings
        .sort_by(|one, other| one.field.cmp(&other.field));
    Ok(meaning)
}

/// The fields that have no meaning here and are not at their default, and those that nobody knows.
fn unused(file: &Value) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let mut found = Vec::new();
    leaves(file, "", &mut found);
    for (path, value) in found {
        let Some(field) = FIELDS.iter().find(|field| field.path == path) else {
            warnings.push(Warning {
                field: path,
                why: "no field of kube-proxy's that is known".to_owned(),
            });
            continue;
        };
        if let Use::None(why) = field.use_
            && !has_default(value, field)
        {
            warnings.push(Warning {
                field: path,
                why: why.to_owned(),
            });
        }
    }
    warnings
}

/// Every field of a file, as deep as fields are known.
fn leaves<'a>(value: &'a Value, path: &str, found: &mut Vec<(String, &'a Value)>) {
    let is_inner = path.is_empty() || {
        let inside = format!("{path}.");
        FIELDS.iter().any(|field| field.path.starts_with(&inside))
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
        // A section that says nothing.
        None if is_inner && value.is_null() => {}
        Some(_) | None => found.push((path.to_owned(), value)),
    }
}

/// A mode of kube-proxy's: whose section counts.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Mode {
    Iptables,
    Ipvs,
    Nftables,
    Windows,
}

fn mode(file: &Value, meaning: &mut Meaning) -> Result<Mode, Refusal> {
    match text(file, "mode")? {
        "" | "iptables" => Ok(Mode::Iptables),
        "ipvs" => Ok(Mode::Ipvs),
        "nftables" => Ok(Mode::Nftables),
        "kernelspace" => {
            meaning.warn("mode", "it is for Windows");
            Ok(Mode::Windows)
        }
        other => {
            let reason = format!("`{other}` is no mode: iptables, ipvs or nftables");
            Err(("mode".to_owned(), reason))
        }
    }
}

/// The API server, which is always kube-proxy's source, and the name that the node has there.
fn client(file: &Value, folder: &Path, meaning: &mut Meaning) -> Result<(), Refusal> {
    let kubeconfig = text(file, "clientConnection.kubeconfig")?;
    let kube = if kubeconfig.is_empty() {
        json!({})
    } else {
        json!({ "kubeconfig": folder.join(kubeconfig) })
    };
    put(&mut meaning.config, "source.kube", kube);
    let name = text(file, "hostnameOverride")?.trim().to_lowercase();
    if !name.is_empty() {
        put(&mut meaning.config, "nodeName", json!(name));
    }
    Ok(())
}

/// Health and metrics. Where a file doesn't name their addresses, the family of `bindAddress` does.
fn ports(file: &Value, meaning: &mut Meaning) -> Result<(), Refusal> {
    let own = text(file, "bindAddress")?;
    let own = if own.is_empty() { "0.0.0.0" } else { own };
    let own = ip_of(own).ok_or_else(|| {
        let reason = format!("`{own}` is no address");
        ("bindAddress".to_owned(), reason)
    })?;
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
    for (field, ours, default, port) in [
        ("healthzBindAddress", "healthz.address", all, HEALTH),
        ("metricsBindAddress", "admin.address", loopback, METRICS),
    ] {
        let wanted = text(file, field)?;
        let wanted = if wanted.is_empty() { default } else { wanted };
        let address = address(wanted, port).ok_or_else(|| {
            let reason = format!("`{wanted}` is no address, and none with a port");
            (field.to_owned(), reason)
        })?;
        put(&mut meaning.config, ours, json!(address));
    }
    Ok(())
}

/// The addresses of node ports; none stands for what there is without the field.
fn node_ports(file: &Value, mode: Mode, meaning: &mut Meaning) -> Result<(), Refusal> {
    const FIELD: &str = "nodePortAddresses";
    const LOOPBACK: &str = "iptables.localhostNodePorts";
    const OURS: &str = "service.nodePortAddresses";
    let named = texts(file, FIELD)?;
    for (index, entry) in named.iter().enumerate() {
        if !matches!(*entry, "primary" | "localhost" | "all") && range(entry).is_none() {
            let reason = format!("`{entry}` is no range, and not primary, localhost or all");
            return Err((format!("{FIELD}[{index}]"), reason));
        }
    }
    let wants_loopback = match at(file, LOOPBACK) {
        None | Some(Value::Null) => true,
        Some(value) => value.as_bool().ok_or_else(|| {
            let reason = format!("`{value}` is neither true nor false");
            (LOOPBACK.to_owned(), reason)
        })?,
    };
    if !named.is_empty() {
        put(&mut meaning.config, OURS, json!(named));
    }
    match (wants_loopback, mode, named.is_empty()) {
        (true, _, _) => {}
        (false, Mode::Iptables, true) => put(&mut meaning.config, OURS, json!(["primary"])),
        (false, Mode::Iptables, false) => {
            meaning.warn(LOOPBACK, "nodePortAddresses says which there are");
        }
        (false, Mode::Ipvs | Mode::Nftables | Mode::Windows, _) => {
            meaning.warn(LOOPBACK, "it counts in mode iptables only");
        }
    }
    Ok(())
}

/// How a backend is chosen.
fn scheduler(file: &Value, mode: Mode, meaning: &mut Meaning) -> Result<(), Refusal> {
    const FIELD: &str = "ipvs.scheduler";
    let name = text(file, FIELD)?;
    if mode != Mode::Ipvs {
        if !name.is_empty() {
            meaning.warn(FIELD, "it counts in mode ipvs only");
        }
        return Ok(());
    }
    let name = if name.is_empty() { "rr" } else { name };
    match Algorithm::named(name) {
        Some(algorithm) => put(&mut meaning.config, "service.algorithm", json!(algorithm)),
        None => {
            let why = format!("`{name}` is no choice here; backends are chosen at random");
            meaning.warn(FIELD, why);
        }
    }
    Ok(())
}

/// Which traffic is local, and what is masqueraded: taken over for the packet path.
fn traffic(file: &Value, mode: Mode, meaning: &mut Meaning) -> Result<(), Refusal> {
    let detect = text(file, "detectLocalMode")?;
    match detect {
        "" => {}
        "ClusterCIDR" | "NodeCIDR" | "BridgeInterface" | "InterfaceNamePrefix" => {
            put(&mut meaning.config, "service.detectLocal", json!(detect));
        }
        other => {
            let reason = format!(
                "`{other}` is none of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix"
            );
            return Err(("detectLocalMode".to_owned(), reason));
        }
    }
    let ranges = text(file, "clusterCIDR")?;
    let ranges: Vec<&str> = ranges
        .split(',')
        .map(str::trim)
        .filter(|range| !range.is_empty())
        .collect();
    if let Some(bad) = ranges.iter().find(|text| range(text).is_none()) {
        let reason = format!("`{bad}` is no range such as 10.0.0.0/8");
        return Err(("clusterCIDR".to_owned(), reason));
    }
    if !ranges.is_empty() {
        put(&mut meaning.config, "service.clusterCIDRs", json!(ranges));
    }
    let section = match mode {
        Mode::Iptables | Mode::Ipvs | Mode::Windows => "iptables.masqueradeAll",
        Mode::Nftables => "nftables.masqueradeAll",
    };
    if at(file, section).and_then(Value::as_bool) == Some(true) {
        put(&mut meaning.config, "service.masqueradeAll", json!(true));
    }
    Ok(())
}

/// What is at a path.
fn at<'a>(file: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.')
        .try_fold(file, |value, name| value.get(name))
}

/// Puts a value at a path.
fn put(config: &mut Value, path: &str, value: Value) {
    let value = path
        .rsplit('.')
        .fold(value, |value, name| json!({ name: value }));
    *config = over(std::mem::take(config), value);
}

/// The one with what the other says in the place of what it says itself, field by field; a field that the
/// other has without a value is taken out.
pub(super) fn over(under: Value, top: Value) -> Value {
    match (under, top) {
        (Value::Object(mut under), Value::Object(top)) => {
            for (name, value) in top {
                let below = under.remove(&name).unwrap_or_default();
                if !value.is_null() {
                    under.insert(name, over(below, value));
                }
            }
            Value::Object(under)
        }
        (_, top) => top,
    }
}

#[cfg(test)]
mod tests;
