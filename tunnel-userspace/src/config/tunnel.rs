//! The `tunnel` section. Steering, the gateway and the agent are each enabled by their own subsection.

use std::{iter, net::IpAddr, path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tunnel_common::{forward::MAX_FORWARD_RANGES, steering::Prefix};

use super::{FieldError, numeric_ranges::check_each};
use crate::{
    duration,
    identity::IdentityFiles,
    model::Selector,
    tunnel::{
        ENTRY_FORM, SessionLimits,
        agent::{self, is_allowed_target},
        gateway, is_client_entry, is_namespace_entry,
    },
};

fn tunnel_error<T>(field: &str, reason: impl Into<String>) -> Result<T, FieldError> {
    Err((format!("tunnel.{field}"), reason.into()))
}

/// The tunnel to edge nodes.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct TunnelConfig {
    /// The `SO_MARK` that Culvert sets on its own sockets, in every role, so that they are neither steered
    /// nor translated.
    pub socket_mark: u32,
    /// The ingress, and the steering of connections to edge nodes into the tunnel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steering: Option<SteeringConfig>,
    /// The gateway, to which agents connect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<gateway::GatewaySettings>,
    /// The agent on this edge node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<agent::AgentSettings>,
    /// The certificate of this gateway or agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<IdentityConfig>,
    /// The limits for a session.
    pub session: SessionLimits,
}

impl Default for TunnelConfig {
    fn default() -> Self {
        Self {
            socket_mark: 0x1_0000,
            steering: None,
            gateway: None,
            agent: None,
            identity: None,
            session: SessionLimits::default(),
        }
    }
}

impl TunnelConfig {
    pub(super) fn check(&self) -> Result<(), FieldError> {
        if self.socket_mark == 0 {
            return tunnel_error(
                "socketMark",
                "must not be 0, which is the mark of every unmarked socket; omit the field for the default, 0x10000",
            );
        }
        let needs_identity = self.gateway.is_some() || self.agent.is_some();
        if needs_identity && self.identity.is_none() {
            let reason = "is required, because tunnel.gateway or tunnel.agent is set; set the paths in tunnel.identity.files: ca, cert and key, or use tunnel.identity.request";
            return tunnel_error("identity", reason);
        }
        if let Some(identity) = &self.identity {
            identity.check()?;
        }
        if self.gateway.is_some() && self.agent.is_some() {
            let reason = "cannot be combined with tunnel.gateway, since a certificate is valid for one of \
                          the two roles only; give the agent a separate config file";
            return tunnel_error("agent", reason);
        }
        if let Some(steering) = &self.steering {
            steering.check()?;
            if self.gateway.is_none() {
                let reason = "is missing: tunnel.steering needs a gateway in the same process (an ingress \
                              without one is not implemented yet)";
                return tunnel_error("gateway", reason);
            }
        }
        if let Some(agent) = &self.agent {
            let (gateways, allow) = (&agent.gateways, &agent.allowed_targets);
            if gateways.is_empty() {
                return tunnel_error(
                    "agent.gateways",
                    "must list at least one gateway as HOST:PORT",
                );
            }
            let reason = "is not HOST:PORT";
            check_each("tunnel.agent.gateways", gateways, is_host_and_port, reason)?;
            let reason = "is not self:PORT, localhost:PORT or ADDRESS:PORT";
            check_each(
                "tunnel.agent.allowedTargets",
                allow,
                is_allowed_target,
                reason,
            )?;
        }
        let bytes = self
            .session
            .max_streams
            .checked_mul(self.session.stream_window_bytes);
        if bytes.is_none_or(|bytes| bytes > MAX_WINDOW) {
            let reason = format!(
                "times tunnel.session.maxStreams must be at most {MAX_WINDOW}, the largest window of a \
                 session, but is {} × {}",
                self.session.stream_window_bytes, self.session.max_streams
            );
            return tunnel_error("session.streamWindowBytes", reason);
        }
        Ok(())
    }

    /// Returns true if only the Pods of some namespaces may use the ingress, so that this node's Pods must be known.
    #[must_use]
    pub fn allows_namespaces(&self) -> bool {
        let steering = self.steering.as_ref();
        let allow = steering.and_then(|steering| steering.allow.as_ref());
        allow.is_some_and(|allow| allow.iter().any(|entry| is_namespace_entry(entry)))
    }

    /// Returns the file paths in this section.
    pub(super) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let identity = self.identity.as_mut();
        let (files, request) = identity.map_or((None, None), |identity| {
            (identity.files.as_mut(), identity.request.as_mut())
        });
        let files = files.into_iter();
        let files = files.flat_map(|IdentityFiles { ca, cert, key }| [ca, cert, key]);
        let request = request.into_iter();
        let request =
            request.flat_map(|request| iter::once(&mut request.ca).chain(&mut request.kubeconfig));
        let gateway = self.gateway.iter_mut();
        files
            .chain(request)
            .chain(gateway.flat_map(|gateway| &mut gateway.deny_file))
    }
}

/// The ingress, and the steering of connections to edge nodes into the tunnel.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct SteeringConfig {
    /// The CIDRs that steering addresses are taken from, at most one per address family. A steering address
    /// represents an edge node and port.
    pub prefixes: Vec<String>,
    /// The port that the ingress listens on.
    pub ingress_port: u16,
    /// The label selector for edge nodes.
    pub edge_node_selector: String,
    /// The CIDRs that contain the edge nodes' addresses. Other addresses of edge nodes are not steered. If absent,
    /// an edge node may have any address that is not known to belong to something else.
    #[serde(rename = "nodeCIDRs", skip_serializing_if = "Option::is_none")]
    pub node_cidrs: Option<Vec<String>>,
    /// The treatment of steered connections while the ingress is down.
    pub on_ingress_down: OnIngressDown,
    /// The protocol number of the routes that Culvert adds (`ip route … proto`).
    pub route_protocol: u8,
    /// The ConfigMap that lists additional ports to steer, as `namespace/name`.
    pub config_map: String,
    /// The clients that may use the ingress: `host`, CIDRs, and `namespace:NAME`. If absent, every process and pod
    /// of this node may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow: Option<Vec<String>>,
    /// The CIDRs of the machines outside this node whose connections to edge nodes this node forwards into the tunnel,
    /// if their packets pass this node. `allow` doesn't apply to them.
    pub forwarded: Vec<String>,
}

impl Default for SteeringConfig {
    fn default() -> Self {
        Self {
            prefixes: vec!["198.19.0.0/16".to_owned(), "fd00:c01e::/64".to_owned()],
            ingress_port: 10_270,
            edge_node_selector: "openyurt.io/is-edge-worker=true".to_owned(),
            node_cidrs: None,
            on_ingress_down: OnIngressDown::Refuse,
            route_protocol: 176,
            config_map: "kube-system/yurt-tunnel-server-cfg".to_owned(),
            allow: None,
            forwarded: Vec::new(),
        }
    }
}

/// The maximum number of entries of `tunnel.steering.forwarded`.
const MAX_FORWARDED: usize = 16;
const _: () = assert!(MAX_FORWARD_RANGES == 16);

/// The form of a range.
const RANGE_FORM: &str =
    "must be a CIDR without bits set after the prefix length, such as 10.20.0.0/16";

impl SteeringConfig {
    fn check(&self) -> Result<(), FieldError> {
        let mut families = Vec::new();
        for (index, text) in self.prefixes.iter().enumerate() {
            let quoted = |why: &str| format!("`{text}` {why}");
            let reason = match text.parse::<Prefix>().ok() {
                None => quoted(
                    "must be a CIDR without bits set after the prefix length, such as 198.19.0.0/16",
                ),
                Some(prefix) if prefix.capacity() == 0 => {
                    quoted("is too small: it has no usable address")
                }
                Some(prefix) if !is_usable(&prefix) => quoted(
                    "is too large (use /8 or longer for IPv4, /16 or longer for IPv6), or has loopback, \
                     multicast, link-local or reserved addresses",
                ),
                Some(prefix) if families.contains(&prefix.is_v4()) => {
                    quoted("is the second prefix of its address family; at most one is allowed")
                }
                Some(prefix) => {
                    families.push(prefix.is_v4());
                    continue;
                }
            };
            return tunnel_error(&format!("steering.prefixes[{index}]"), reason);
        }
        if families.is_empty() {
            return tunnel_error("steering.prefixes", "must list at least one CIDR");
        }
        if let Err(error) = self.edge_node_selector.parse::<Selector>() {
            return tunnel_error("steering.edgeNodeSelector", error.to_string());
        }
        if self.edge_node_selector.trim().is_empty() {
            let reason = "must not be empty: an empty selector matches every Node";
            return tunnel_error("steering.edgeNodeSelector", reason);
        }
        if let Some(ranges) = &self.node_cidrs {
            if ranges.is_empty() {
                let reason = "must list at least one CIDR; omit the field to steer any address of an edge node \
                              that is not known to belong to something else";
                return tunnel_error("steering.nodeCIDRs", reason);
            }
            let is_range = |text: &str| text.parse::<Prefix>().is_ok();
            check_each("tunnel.steering.nodeCIDRs", ranges, is_range, RANGE_FORM)?;
        }
        if self.on_ingress_down == OnIngressDown::Pass {
            return tunnel_error(
                "steering.onIngressDown",
                "`pass` is not implemented yet; use `refuse`",
            );
        }
        if let Some(allow) = &self.allow {
            if allow.is_empty() {
                let reason = "must have at least one entry; omit the field to allow every client";
                return tunnel_error("steering.allow", reason);
            }
            check_each("tunnel.steering.allow", allow, is_client_entry, ENTRY_FORM)?;
        }
        let is_range = |text: &str| text.parse::<Prefix>().is_ok();
        check_each(
            "tunnel.steering.forwarded",
            &self.forwarded,
            is_range,
            RANGE_FORM,
        )?;
        if self.forwarded.len() > MAX_FORWARDED {
            let reason = format!("must have at most {MAX_FORWARDED} entries");
            return tunnel_error("steering.forwarded", reason);
        }
        match self.config_map.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(()),
            _ => {
                let reason = format!("`{}` is not NAMESPACE/NAME", self.config_map);
                tunnel_error("steering.configMap", reason)
            }
        }
    }

    /// Returns the parsed prefixes. In a checked config, all of them are valid.
    #[must_use]
    pub fn ranges(&self) -> Vec<Prefix> {
        parse_prefixes(&self.prefixes)
    }

    /// Returns the parsed ranges of the machines whose connections are forwarded. In a checked config, all of them are
    /// valid.
    #[must_use]
    pub fn forwarded_ranges(&self) -> Vec<Prefix> {
        parse_prefixes(&self.forwarded)
    }

    /// Returns the parsed ranges of the edge nodes' addresses, or `None` if the config has none. In a checked
    /// config, all of them are valid.
    #[must_use]
    pub fn node_ranges(&self) -> Option<Vec<Prefix>> {
        self.node_cidrs.as_deref().map(parse_prefixes)
    }
}

fn parse_prefixes(texts: &[String]) -> Vec<Prefix> {
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

/// Returns true if a prefix may be used for steering: it is not too short, and contains no loopback,
/// multicast, link-local or reserved addresses.
fn is_usable(prefix: &Prefix) -> bool {
    let shortest = if prefix.is_v4() { 8 } else { 16 };
    let is_reserved = match prefix.network().to_ip() {
        IpAddr::V4(v4) => {
            v4.is_loopback()
                || v4.is_multicast()
                || v4.is_link_local()
                || v4.octets()[0] == 0
                || v4.octets()[0] >= 240
        }
        IpAddr::V6(v6) => v6.is_multicast() || v6.is_unicast_link_local() || v6.segments()[0] == 0,
    };
    prefix.length() >= shortest && !is_reserved
}

/// The treatment of steered connections while the ingress is down.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnIngressDown {
    /// Connections are refused at once.
    Refuse,
    /// Connections bypass the tunnel. Not implemented yet.
    Pass,
}

/// Returns true if the text is `HOST:PORT`, with an IPv6 address in brackets and a port other than 0.
fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let inner = host.strip_prefix('[');
    let is_host = match inner.and_then(|inner| inner.strip_suffix(']')) {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '/', ' ', '[', ']']),
    };
    is_host && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// The certificate of this gateway or agent: files that something else renews, or requests to the controller.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct IdentityConfig {
    /// The files that contain the CA, the certificate and the private key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<IdentityFiles>,
    /// The requests for certificates, which `culvert controller` answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<RequestConfig>,
}

/// The requests for certificates.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct RequestConfig {
    /// The life of a certificate. Zero means that the controller decides.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub life: Duration,
    /// The file with the trusted CAs: the key `ca.pem` of the ConfigMap `culvert-ca`.
    pub ca: PathBuf,
    /// The kubeconfig for the requests. Without one, that of `source.kube` is used, else the pod's service account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
}

impl Default for RequestConfig {
    fn default() -> Self {
        Self {
            life: Duration::ZERO,
            ca: "/etc/culvert-ca/ca.pem".into(),
            kubeconfig: None,
        }
    }
}

impl IdentityConfig {
    fn check(&self) -> Result<(), FieldError> {
        match (&self.files, &self.request) {
            (Some(_), Some(_)) => tunnel_error(
                "identity.request",
                "cannot be combined with tunnel.identity.files; remove one of them",
            ),
            (None, None) => tunnel_error(
                "identity",
                "must have the section files (ca, cert and key) or the section request",
            ),
            (Some(_), None) | (None, Some(_)) => Ok(()),
        }
    }
}

/// The largest flow-control window of an HTTP/2 connection, in bytes (RFC 9113 section 6.9.1).
const MAX_WINDOW: u32 = (1 << 31) - 1;
