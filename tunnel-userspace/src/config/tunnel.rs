//! The tunnel: a role is enabled by its section.

use std::{net::IpAddr, path::PathBuf};

use serde::{Deserialize, Serialize};
use tunnel_common::steering::Prefix;

use super::{Refused, bounds::each};
use crate::{
    identity::Files,
    model::Selector,
    tunnel::{
        Limits,
        agent::{self, is_allowance},
        gateway,
    },
};

fn refused<T>(field: &str, reason: impl Into<String>) -> Result<T, Refused> {
    Err((format!("tunnel.{field}"), reason.into()))
}

/// The tunnel to edge nodes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Tunnel {
    /// The `SO_MARK` of Culvert's own sockets, in every role: they are neither steered nor translated.
    pub socket_mark: u32,
    /// The steering of connects to edge nodes into the tunnel, and its ingress.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steering: Option<Steering>,
    /// The gateway, to which agents connect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<gateway::Settings>,
    /// The agent of this edge node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<agent::Settings>,
    /// The certificate of this gateway or agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// The limits of a session.
    pub session: Limits,
}

impl Default for Tunnel {
    fn default() -> Self {
        Self {
            socket_mark: 0x1_0000,
            steering: None,
            gateway: None,
            agent: None,
            identity: None,
            session: Limits::default(),
        }
    }
}

impl Tunnel {
    pub(super) fn check(&self) -> Result<(), Refused> {
        if self.socket_mark == 0 {
            return refused(
                "socketMark",
                "must not be 0, the mark of every other socket",
            );
        }
        let needs_identity = self.gateway.is_some() || self.agent.is_some();
        if needs_identity && self.identity.is_none() {
            let reason = "must be there, for the certificate of the gateway or agent";
            return refused("identity", reason);
        }
        if self.gateway.is_some() && self.agent.is_some() {
            let reason = "can't be beside tunnel.gateway: a certificate is that of one of them; \
                          give the agent a config of its own";
            return refused("agent", reason);
        }
        if let Some(steering) = &self.steering {
            steering.check()?;
            if self.gateway.is_none() {
                let reason = "must be there with tunnel.steering: an ingress without a gateway in \
                              its process is not built yet";
                return refused("gateway", reason);
            }
        }
        if let Some(agent) = &self.agent {
            let (gateways, allow) = (&agent.gateways, &agent.allowed_targets);
            if gateways.is_empty() {
                return refused("agent.gateways", "must name a gateway as host:port");
            }
            let reason = "is not host:port";
            each("tunnel.agent.gateways", gateways, is_host_and_port, reason)?;
            let reason = "is not self:PORT, localhost:PORT or ADDRESS:PORT";
            each("tunnel.agent.allowedTargets", allow, is_allowance, reason)?;
        }
        let bytes = self
            .session
            .max_streams
            .checked_mul(self.session.stream_window_bytes);
        if bytes.is_none_or(|bytes| bytes > LARGEST_WINDOW) {
            let reason = "times session.maxStreams must be at most 2147483647: what every stream may hold \
                          must fit into one session";
            return refused("session.streamWindowBytes", reason);
        }
        Ok(())
    }

    pub(super) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let files = self.identity.iter_mut().map(|identity| &mut identity.files);
        files.flat_map(|Files { ca, cert, key }| [ca, cert, key])
    }
}

/// The steering of connects to edge nodes into the tunnel, and its ingress.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Steering {
    /// The CIDRs of the addresses that each represent an edge node and port: at most one of each
    /// family.
    pub prefixes: Vec<String>,
    /// The port of the ingress.
    pub ingress_port: u16,
    /// The label selector of edge nodes.
    pub edge_node_selector: String,
    /// The action on connects while the ingress is down.
    pub on_ingress_down: OnIngressDown,
    /// The routing protocol number of Culvert's routes (`ip route … proto`).
    pub route_protocol: u8,
    /// The ConfigMap of additional ports, as `namespace/name`.
    pub config_map: String,
}

impl Default for Steering {
    fn default() -> Self {
        Self {
            prefixes: vec!["198.19.0.0/16".to_owned(), "fd00:c01e::/64".to_owned()],
            ingress_port: 10_270,
            edge_node_selector: "openyurt.io/is-edge-worker=true".to_owned(),
            on_ingress_down: OnIngressDown::Refuse,
            route_protocol: 176,
            config_map: "kube-system/yurt-tunnel-server-cfg".to_owned(),
        }
    }
}

impl Steering {
    fn check(&self) -> Result<(), Refused> {
        let mut families = Vec::new();
        for (index, text) in self.prefixes.iter().enumerate() {
            let quoted = |why: &str| format!("`{text}` {why}");
            let reason = match text.parse::<Prefix>().ok() {
                None => quoted("is no range such as 198.19.0.0/16, without bits beyond its length"),
                Some(prefix) if prefix.room() == 0 => quoted("has no address to give out"),
                Some(prefix) if !is_fit(&prefix) => {
                    quoted("is too large, or has addresses with a meaning of their own")
                }
                Some(prefix) if families.contains(&prefix.is_v4()) => {
                    "is the second of its family".to_owned()
                }
                Some(prefix) => {
                    families.push(prefix.is_v4());
                    continue;
                }
            };
            return refused(&format!("steering.prefixes[{index}]"), reason);
        }
        if families.is_empty() {
            return refused("steering.prefixes", "must name a range");
        }
        if let Err(error) = self.edge_node_selector.parse::<Selector>() {
            return refused("steering.edgeNodeSelector", error.to_string());
        }
        if self.edge_node_selector.trim().is_empty() {
            let reason = "must not be empty: it would take every Node";
            return refused("steering.edgeNodeSelector", reason);
        }
        if self.on_ingress_down == OnIngressDown::Pass {
            return refused(
                "steering.onIngressDown",
                "pass is not built yet, use refuse",
            );
        }
        match self.config_map.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(()),
            _ => refused("steering.configMap", "must be namespace/name"),
        }
    }

    /// Returns the valid prefixes; a checked config has no others.
    #[must_use]
    pub fn ranges(&self) -> Vec<Prefix> {
        self.prefixes
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect()
    }
}

/// True if a prefix may be routed to this host: not too short, and without loopback, multicast,
/// link-local or reserved addresses.
fn is_fit(prefix: &Prefix) -> bool {
    let shortest = if prefix.is_v4() { 8 } else { 16 };
    let has_meaning = match prefix.network().to_ip() {
        IpAddr::V4(v4) => {
            v4.is_loopback()
                || v4.is_multicast()
                || v4.is_link_local()
                || v4.octets()[0] == 0
                || v4.octets()[0] >= 240
        }
        IpAddr::V6(v6) => v6.is_multicast() || v6.is_unicast_link_local() || v6.segments()[0] == 0,
    };
    prefix.length() >= shortest && !has_meaning
}

/// The action on connects while the ingress is down.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnIngressDown {
    /// Connects are refused at once.
    Refuse,
    /// Connects bypass the tunnel. Not built yet.
    Pass,
}

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

/// The certificate of this gateway or agent.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The files of the certificate.
    pub files: Files,
}

/// The largest flow-control window of an HTTP/2 connection, in bytes (RFC 9113 section 6.9.1).
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
