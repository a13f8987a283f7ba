//! Converts kube-proxy's config file (`kubeproxy.config.k8s.io/v1alpha1`) to Culvert's, and returns a warning
//! for each field that has no equivalent.

mod converted_fields;
mod field_table;
mod value_formats;

use std::{fmt, mem, num::NonZeroUsize, path::Path, thread};

use serde_json::{Value, json};

use self::{
    converted_fields::{ConntrackSection, FileType, KubeProxyFile, Mode},
    field_table::{paths, reason_unused},
    value_formats::{parse_address, parse_go_duration, parse_ip},
};
use super::{Config, FieldError, numeric_ranges::MAX_ENTRIES};
use crate::model::Algorithm;

/// The API group, supported API version and kind of kube-proxy's config file.
const GROUP: &str = "kubeproxy.config.k8s.io";
const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
const KIND: &str = "KubeProxyConfiguration";

/// kube-proxy's defaults of `conntrack.maxPerCore` and `conntrack.min` (`pkg/proxy/apis/config/v1alpha1/defaults.go`).
const MAX_PER_CORE: u32 = 32_768;
const MIN: u32 = 131_072;

/// kube-proxy's default ports for health and metrics (`pkg/cluster/ports`).
const HEALTH_PORT: u16 = 10_256;
const METRICS_PORT: u16 = 10_249;

/// A field in kube-proxy's file that has no effect, or only part of its usual effect.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Warning {
    /// The path of the field, such as `ipvs.scheduler`.
    pub field: String,
    /// The reason why the field has no effect, or only a partial one.
    pub why: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.why)
    }
}

/// The result of converting kube-proxy's config file.
#[derive(Debug, Default)]
pub(super) struct Conversion {
    /// The converted fields, in the format of Culvert's config.
    pub(super) config: Value,
    /// The fields that have no effect.
    pub(super) warnings: Vec<Warning>,
}

impl Conversion {
    /// Sets a field of Culvert's config by its path, such as `service.algorithm`.
    fn set(&mut self, path: &str, value: Value) {
        let names = path.rsplit('.');
        let value = names.fold(value, |value, name| json!({ name: value }));
        self.config = merge(mem::take(&mut self.config), value);
    }

    /// Adds a warning about a field in kube-proxy's file.
    fn warn(&mut self, field: &str, why: impl Into<String>) {
        self.warnings.push(Warning {
            field: field.to_owned(),
            why: why.into(),
        });
    }
}

/// Returns true if a file has the API group or the kind of kube-proxy's config.
pub(super) fn is_kube_proxy_file(file: &Value) -> bool {
    let group = file.get("apiVersion").and_then(Value::as_str);
    let group = group.and_then(|version| version.split('/').next());
    group == Some(GROUP) || file.get("kind").and_then(Value::as_str) == Some(KIND)
}

/// Returns the field in kube-proxy's file from which a field of Culvert's config was converted.
fn kube_proxy_field(ours: String) -> String {
    let (field, index) = ours.split_at(ours.find('[').unwrap_or(ours.len()));
    match field {
        "nodeName" => "hostnameOverride".to_owned(),
        "healthz.address" => "healthzBindAddress".to_owned(),
        "admin.address" => "metricsBindAddress".to_owned(),
        "service.nodePortAddresses" => format!("nodePortAddresses{index}"),
        "service.clusterCIDRs" => "clusterCIDR".to_owned(),
        "service.packets.timeouts.tcpEstablished" => "conntrack.tcpEstablishedTimeout".to_owned(),
        "service.packets.timeouts.tcpHalfClosed" => "conntrack.tcpCloseWaitTimeout".to_owned(),
        "service.packets.timeouts.udp" => "conntrack.udpTimeout".to_owned(),
        "service.packets.timeouts.udpAnswered" => "conntrack.udpStreamTimeout".to_owned(),
        _ => ours,
    }
}

/// Converts kube-proxy's config file. Relative paths in it are relative to `directory`.
pub(super) fn convert(value: &Value, directory: &Path) -> Result<Conversion, FieldError> {
    let head: FileType = converted_fields::deserialize(value)?;
    for (field, found, wanted) in [
        ("apiVersion", head.api_version, API_VERSION),
        ("kind", head.kind, KIND),
    ] {
        if found != wanted {
            let found = if found.is_empty() { "absent" } else { &found };
            return Err((
                field.to_owned(),
                format!("must be {wanted}, but is {found}"),
            ));
        }
    }
    let file: KubeProxyFile = converted_fields::deserialize(value)?;
    let mut conversion = Conversion {
        // kube-proxy serves external IPs and load balancer addresses that are the node's own.
        config: json!({ "service": { "nodeAddresses": "serve" } }),
        warnings: unused_field_warnings(value),
    };
    if file.mode == Mode::Kernelspace {
        conversion.warn("mode", "Windows only");
    }
    convert_client(&file, directory, &mut conversion);
    convert_addresses(&file, &mut conversion)?;
    convert_node_ports(&file, &mut conversion);
    convert_scheduler(&file, &mut conversion);
    convert_packet_path(&file, &mut conversion)?;
    conversion
        .warnings
        .sort_by(|one, other| one.field.cmp(&other.field));
    // The converted fields must be valid on their own, since Culvert's own file may override none of them.
    match Config::from_value(conversion.config.clone()) {
        Ok(_) => Ok(conversion),
        Err((field, reason)) => Err((kube_proxy_field(field), reason)),
    }
}

/// Returns a warning for each unknown field, and for each field that differs from its default but has no
/// effect.
fn unused_field_warnings(file: &Value) -> Vec<Warning> {
    let mut found = Vec::new();
    collect_fields(file, "", &mut found);
    let warning = |(field, value): (String, &Value)| {
        let why = reason_unused(&field, value)?.to_owned();
        Some(Warning { field, why })
    };
    found.into_iter().filter_map(warning).collect()
}

/// Collects the paths and values of the fields in a file. If the value of a known field is itself a mapping,
/// as in `featureGates`, it is collected as one value.
fn collect_fields<'a>(value: &'a Value, path: &str, found: &mut Vec<(String, &'a Value)>) {
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
                collect_fields(value, &path, found);
            }
        }
        // An empty section has no fields.
        None if is_inner && value.is_null() => {}
        Some(_) | None => found.push((path.to_owned(), value)),
    }
}

/// Converts the node name and the kubeconfig, and enables the API server as a source.
fn convert_client(file: &KubeProxyFile, directory: &Path, conversion: &mut Conversion) {
    let kubeconfig = &file.client_connection.kubeconfig;
    let kube = if kubeconfig.is_empty() {
        json!({})
    } else {
        json!({ "kubeconfig": directory.join(kubeconfig) })
    };
    conversion.set("source.kube", kube);
    let name = file.hostname_override.trim().to_lowercase();
    if !name.is_empty() {
        conversion.set("nodeName", json!(name));
    }
}

/// Converts the addresses for health and metrics. Their defaults have the same address family as
/// `bindAddress`.
fn convert_addresses(file: &KubeProxyFile, conversion: &mut Conversion) -> Result<(), FieldError> {
    let bind_address = match file.bind_address.as_str() {
        "" => "0.0.0.0",
        own => own,
    };
    let reason = format!("`{bind_address}` is not an IP address");
    let bind_address = parse_ip(bind_address).ok_or_else(|| ("bindAddress".to_owned(), reason))?;
    if !bind_address.is_unspecified() {
        let why = "only its address family has an effect, on the defaults of healthzBindAddress and \
                   metricsBindAddress; the addresses of this node are those of its Node object";
        conversion.warn("bindAddress", why);
    }
    let (all, loopback) = if bind_address.is_ipv4() {
        ("0.0.0.0", "127.0.0.1")
    } else {
        ("::", "::1")
    };
    let (healthz, metrics) = (&file.healthz_bind_address, &file.metrics_bind_address);
    for (ours, wanted, default, port) in [
        ("healthz.address", healthz, all, HEALTH_PORT),
        ("admin.address", metrics, loopback, METRICS_PORT),
    ] {
        let wanted = if wanted.is_empty() { default } else { wanted };
        let address = parse_address(wanted, port).ok_or_else(|| {
            let reason = format!("`{wanted}` is not an IP address, with or without a port");
            (kube_proxy_field(ours.to_owned()), reason)
        })?;
        conversion.set(ours, json!(address));
    }
    Ok(())
}

/// Converts the addresses that serve NodePorts. An empty list means the same as an absent field.
fn convert_node_ports(file: &KubeProxyFile, conversion: &mut Conversion) {
    const LOOPBACK: &str = "iptables.localhostNodePorts";
    const OURS: &str = "service.nodePortAddresses";
    let named = &file.node_port_addresses;
    if !named.is_empty() {
        conversion.set(OURS, json!(named));
    }
    let wants_loopback = file.iptables.localhost_node_ports.unwrap_or(true);
    match (wants_loopback, file.mode, named.is_empty()) {
        (true, _, _) => {}
        (false, Mode::Iptables, true) => conversion.set(OURS, json!(["primary"])),
        (false, Mode::Iptables, false) => {
            conversion.warn(LOOPBACK, "nodePortAddresses selects the addresses");
        }
        (false, Mode::Ipvs | Mode::Nftables | Mode::Kernelspace, _) => {
            conversion.warn(LOOPBACK, "it has an effect in mode iptables only");
        }
    }
}

/// Converts the load-balancing algorithm.
fn convert_scheduler(file: &KubeProxyFile, conversion: &mut Conversion) {
    const FIELD: &str = "ipvs.scheduler";
    let name = match (file.mode, file.ipvs.scheduler.as_str()) {
        (Mode::Ipvs, "") => "rr",
        (Mode::Ipvs, name) => name,
        (_, "") => return,
        (_, _) => return conversion.warn(FIELD, "it has an effect in mode ipvs only"),
    };
    match Algorithm::named(name) {
        Some(algorithm) => conversion.set("service.algorithm", json!(algorithm)),
        None => {
            let why =
                format!("`{name}` has no equivalent; the algorithm stays at its default, random");
            conversion.warn(FIELD, why);
        }
    }
}

/// Converts the fields for the packet path: the detection of local traffic, and masquerading.
fn convert_packet_path(
    file: &KubeProxyFile,
    conversion: &mut Conversion,
) -> Result<(), FieldError> {
    match file.detect_local_mode.as_str() {
        "" => {}
        detect @ ("ClusterCIDR" | "NodeCIDR" | "BridgeInterface" | "InterfaceNamePrefix") => {
            conversion.set("service.detectLocal", json!(detect));
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
        conversion.set("service.clusterCIDRs", json!(ranges));
    }
    let masquerades = match file.mode {
        Mode::Iptables | Mode::Ipvs | Mode::Kernelspace => file.iptables.masquerade_all,
        Mode::Nftables => file.nftables.masquerade_all,
    };
    if masquerades {
        conversion.set("service.masqueradeAll", json!(true));
    }
    if file.mode == Mode::Iptables && file.iptables.snat_node_internal_ip {
        conversion.set("service.packets.address", json!("node"));
    }
    for (ours, name) in [
        ("bridgeInterface", &file.detect_local.bridge_interface),
        (
            "interfaceNamePrefix",
            &file.detect_local.interface_name_prefix,
        ),
    ] {
        if !name.is_empty() {
            conversion.set(&format!("service.{ours}"), json!(name));
        }
    }
    convert_conntrack(&file.conntrack, conversion)
}

/// Converts the limit and the timeouts of connection tracking to those of flows, and to the kernel's settings
/// (`cmd/kube-proxy/app/conntrack.go`). As in kube-proxy, 0 leaves the default.
fn convert_conntrack(
    section: &ConntrackSection,
    conversion: &mut Conversion,
) -> Result<(), FieldError> {
    for (field, ours, timeout) in [
        (
            "tcpEstablishedTimeout",
            "tcpEstablished",
            &section.tcp_established_timeout,
        ),
        (
            "tcpCloseWaitTimeout",
            "tcpHalfClosed",
            &section.tcp_close_wait_timeout,
        ),
        ("udpTimeout", "udp", &section.udp_timeout),
        (
            "udpStreamTimeout",
            "udpAnswered",
            &section.udp_stream_timeout,
        ),
    ] {
        let Some(text) = timeout else { continue };
        let duration = parse_go_duration(text).filter(|it| !it.is_negative());
        let Some(duration) = duration else {
            let reason = format!("`{text}` is not a duration such as 1h0m0s");
            return Err((format!("conntrack.{field}"), reason));
        };
        if !duration.is_zero() {
            let path = format!("service.packets.timeouts.{ours}");
            let milliseconds = json!(format!("{}ms", duration.as_millis()));
            conversion.set(&path, milliseconds.clone());
            conversion.set(&format!("conntrack.{field}"), milliseconds);
        }
    }
    if section.tcp_be_liberal {
        conversion.set("conntrack.tcpBeLiberal", json!(true));
    }
    if let (None, None) | (Some(0), _) = (section.max_per_core, section.min) {
        return Ok(());
    }
    let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let cpus = u32::try_from(cpus).unwrap_or(u32::MAX);
    let of_cpus = section
        .max_per_core
        .unwrap_or(MAX_PER_CORE)
        .saturating_mul(cpus);
    let flows = of_cpus.max(section.min.unwrap_or(MIN));
    conversion.set("bpf.maps.flows", json!(flows.min(MAX_ENTRIES)));
    conversion.set("conntrack.max", json!(flows));
    Ok(())
}

/// Merges two configs field by field; the fields in `overrides` replace those in `base`. A null field in
/// `overrides` removes the field from `base`. If `base` lacks the field, it stays null, which stands for a
/// section with its defaults.
pub(super) fn merge(base: Value, overrides: Value) -> Value {
    match (base, overrides) {
        (Value::Object(mut base), Value::Object(overrides)) => {
            for (name, value) in overrides {
                let old = base.remove(&name);
                if !value.is_null() || old.is_none() {
                    base.insert(name, merge(old.unwrap_or_default(), value));
                }
            }
            Value::Object(base)
        }
        (_, overrides) => overrides,
    }
}

#[cfg(test)]
mod tests;
