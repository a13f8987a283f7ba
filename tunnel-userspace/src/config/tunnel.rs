//! The tunnel: a role is on when its section is there.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tunnel_common::steering::Prefix;

use super::duration;
use crate::model::Selector;

type Refused = (String, String);

fn refused<T>(field: &str, reason: impl Into<String>) -> Result<T, Refused> {
    Err((format!("tunnel.{field}"), reason.into()))
}

/// The tunnel to edge nodes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tunnel {
    /// The mark of our own sockets, of every role: they are neither steered nor led to backends.
    pub mark: u32,
    /// Which connects are sent to the tunnel, and where they land.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steering: Option<Steering>,
    /// Where agents connect to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Gateway>,
    /// What this edge node serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<Agent>,
    /// The certificate of this end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// Bounds of a session.
    pub session: Session,
}

impl Default for Tunnel {
    fn default() -> Self {
        Self {
            mark: 0x1_0000,
            steering: None,
            gateway: None,
            agent: None,
            identity: None,
            session: Session::default(),
        }
    }
}

impl Tunnel {
    pub(super) fn check(&self) -> Result<(), Refused> {
        if self.mark == 0 {
            return refused("mark", "must not be 0, the mark of every other socket");
        }
        let needs_identity = self.gateway.is_some() || self.agent.is_some();
        if needs_identity && self.identity.is_none() {
            return refused(
                "identity",
                "must be there, for the certificate of the gateway or agent",
            );
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
        if let Some(gateway) = &self.gateway {
            gateway.check()?;
        }
        if let Some(agent) = &self.agent {
            agent.check()?;
        }
        self.session.check()
    }

    pub(super) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let files = self.identity.iter_mut().map(|identity| &mut identity.files);
        files.flat_map(|IdentityFiles { ca, cert, key }| [ca, cert, key])
    }
}

/// Which connects are sent to the tunnel, and where they land.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Steering {
    /// The ranges whose addresses stand for a node and port: one of IPv4, one of IPv6, or one of
    /// them.
    pub prefixes: Vec<String>,
    /// The port of the ingress.
    pub port: u16,
    /// Which Nodes are edge nodes: a label selector.
    pub edge_selector: String,
    /// What becomes of connects while the ingress is down.
    pub when_down: WhenDown,
    /// The routing protocol that our routes are marked with.
    pub route_protocol: u8,
    /// The ConfigMap with further ports, as `namespace/name`.
    pub config_map: String,
}

impl Default for Steering {
    fn default() -> Self {
        Self {
            prefixes: vec!["198.19.0.0/16".to_owned(), "fd00:c01e::/64".to_owned()],
            port: 10_270,
            edge_selector: "openyurt.io/is-edge-worker=true".to_owned(),
            when_down: WhenDown::Refuse,
            route_protocol: 176,
            config_map: "kube-system/yurt-tunnel-server-cfg".to_owned(),
        }
    }
}

impl Steering {
    fn check(&self) -> Result<(), Refused> {
        let mut families = Vec::new();
        for (index, text) in self.prefixes.iter().enumerate() {
            let field = format!("steering.prefixes[{index}]");
            match text.parse::<Prefix>().ok() {
                None => {
                    let reason =
                        "is no range such as 198.19.0.0/16, without bits beyond its length";
                    return refused(&field, format!("`{text}` {reason}"));
                }
                Some(prefix) if prefix.room() == 0 => {
                    return refused(&field, format!("`{text}` has no address to give out"));
                }
                Some(prefix) if !is_fit(&prefix) => {
                    let reason = "is too large, or has addresses with a meaning of their own";
                    return refused(&field, format!("`{text}` {reason}"));
                }
                Some(prefix) if families.contains(&prefix.is_v4()) => {
                    return refused(&field, "is the second of its family");
                }
                Some(prefix) => families.push(prefix.is_v4()),
            }
        }
        if families.is_empty() {
            return refused("steering.prefixes", "must name a range");
        }
        if self.port == 0 {
            return refused("steering.port", "must be from 1 to 65535");
        }
        if let Err(error) = self.edge_selector.parse::<Selector>() {
            return refused("steering.edgeSelector", error.to_string());
        }
        if self.edge_selector.trim().is_empty() {
            return refused(
                "steering.edgeSelector",
                "must not be empty: it would take every Node",
            );
        }
        if self.when_down == WhenDown::Pass {
            return refused("steering.whenDown", "pass is not built yet, use refuse");
        }
        // Up to 4 are the kernel's own (include/uapi/linux/rtnetlink.h).
        if self.route_protocol <= 4 {
            return refused("steering.routeProtocol", "must be from 5 to 255");
        }
        match self.config_map.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(()),
            _ => refused("steering.configMap", "must be namespace/name"),
        }
    }

    /// The ranges.
    #[must_use]
    pub fn ranges(&self) -> Vec<Prefix> {
        self.prefixes
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect()
    }
}

/// Whether a range may be made local: not one that the host itself, multicast or half of the world
/// is in.
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

/// What becomes of connects while the ingress is down.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenDown {
    /// They are refused at once.
    Refuse,
    /// They go the plain way. Not built yet.
    Pass,
}

/// Where agents connect to.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Gateway {
    /// The address and port.
    pub listen: SocketAddr,
    /// How many sessions of agents there may be.
    pub sessions: usize,
    /// How many handshakes may be under way.
    pub handshakes: usize,
    /// How long a handshake may take.
    #[serde(with = "duration")]
    pub handshake_timeout: Duration,
}

impl Default for Gateway {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 10_262)),
            sessions: 10_000,
            handshakes: 256,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

impl Gateway {
    fn check(&self) -> Result<(), Refused> {
        for (field, is_zero) in [
            ("gateway.sessions", self.sessions == 0),
            ("gateway.handshakes", self.handshakes == 0),
            ("gateway.handshakeTimeout", self.handshake_timeout.is_zero()),
        ] {
            if is_zero {
                return refused(field, "must not be 0");
            }
        }
        Ok(())
    }
}

/// What this edge node serves.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Agent {
    /// The gateways, each as host:port; at least one.
    pub gateways: Vec<String>,
    /// What may be dialled: `self:PORT` (an address of this node), `localhost:PORT`, or
    /// `ADDRESS:PORT`.
    pub allow: Vec<String>,
    /// Connections to each gateway, from 1 to 4.
    pub connections: u8,
    /// How long a target may take to answer a connect.
    #[serde(with = "duration")]
    pub dial_timeout: Duration,
    /// How many connects to targets may be under way.
    pub dials: usize,
    /// The address of the agent's own `/metrics`, `/healthz` and `/readyz`.
    pub admin: SocketAddr,
}

impl Default for Agent {
    fn default() -> Self {
        Self {
            gateways: Vec::new(),
            allow: vec!["self:10250".to_owned(), "self:10255".to_owned()],
            connections: 2,
            dial_timeout: Duration::from_secs(5),
            dials: 64,
            admin: SocketAddr::from(([127, 0, 0, 1], 10_289)),
        }
    }
}

impl Agent {
    fn check(&self) -> Result<(), Refused> {
        if self.gateways.is_empty() {
            return refused("agent.gateways", "must name a gateway as host:port");
        }
        for (index, gateway) in self.gateways.iter().enumerate() {
            if !is_host_and_port(gateway) {
                let field = format!("agent.gateways[{index}]");
                return refused(&field, format!("`{gateway}` is not host:port"));
            }
        }
        for (index, allowed) in self.allow.iter().enumerate() {
            if !is_allowance(allowed) {
                let field = format!("agent.allow[{index}]");
                let reason = "is not self:PORT, localhost:PORT or ADDRESS:PORT";
                return refused(&field, format!("`{allowed}` {reason}"));
            }
        }
        if !(1..=4).contains(&self.connections) {
            return refused("agent.connections", "must be from 1 to 4");
        }
        if self.dials == 0 {
            return refused("agent.dials", "must not be 0");
        }
        if self.dial_timeout.is_zero() {
            return refused("agent.dialTimeout", "must not be 0");
        }
        Ok(())
    }
}

fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_host = match host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
    {
        Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '/', ' ', '[', ']']),
    };
    is_host && port.parse::<u16>().is_ok_and(|port| port != 0)
}

fn is_allowance(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else {
        return false;
    };
    let is_known = matches!(host, "self" | "localhost") || text.parse::<SocketAddr>().is_ok();
    is_known && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// The certificate of this end.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Where it is.
    pub files: IdentityFiles,
}

/// PEM files. Relative to the config file.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct IdentityFiles {
    /// The certificates of the authorities that the other end's must come from.
    pub ca: PathBuf,
    /// The certificate of this end.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// Bounds of a session, on either end.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Session {
    /// How many streams a session may carry.
    pub streams: u32,
    /// How many bytes of a stream may be under way to an end that doesn't take them.
    pub window: u32,
    /// How many threads carry sessions at most; never more than there are CPUs.
    pub threads: usize,
    /// How often the other end is asked for a sign of life.
    #[serde(with = "duration")]
    pub ping_every: Duration,
    /// How long it may take to give one.
    #[serde(with = "duration")]
    pub ping_timeout: Duration,
    /// How long streams may go on after SIGTERM.
    #[serde(with = "duration")]
    pub drain: Duration,
}

impl Default for Session {
    fn default() -> Self {
        Self {
            streams: 250,
            window: 1 << 20,
            threads: 4,
            ping_every: Duration::from_secs(5),
            ping_timeout: Duration::from_secs(10),
            drain: Duration::from_secs(30),
        }
    }
}

/// The most bytes that HTTP/2 lets a connection have under way (RFC 9113 section 6.9.1).
const LARGEST_WINDOW: u32 = (1 << 31) - 1;

impl Session {
    fn check(&self) -> Result<(), Refused> {
        if !(1..=10_000).contains(&self.streams) {
            return refused("session.streams", "must be from 1 to 10000");
        }
        if !(1..=64).contains(&self.threads) {
            return refused("session.threads", "must be from 1 to 64");
        }
        if self.window < 65_535 {
            return refused("session.window", "must be at least 65535");
        }
        match self.streams.checked_mul(self.window) {
            Some(bytes) if bytes <= LARGEST_WINDOW => {}
            _ => {
                let reason = "times session.streams must be at most 2147483647: what every stream \
                              may hold must fit into one session";
                return refused("session.window", reason);
            }
        }
        if self.ping_every.is_zero() || self.ping_timeout.is_zero() {
            return refused("session.pingEvery", "and session.pingTimeout must not be 0");
        }
        Ok(())
    }
}
