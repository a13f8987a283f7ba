//! The `service` section, and the `mode` field.

use std::{net::IpAddr, time::Duration};

use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _, IntoDeserializer as _, value},
};
use tunnel_common::{addr::Address, steering::Prefix};

use super::{FieldError, numeric_ranges::check_each, packets::PacketsConfig};
use crate::{
    duration,
    model::{Algorithm, ExternalIps, NodeAddresses, TopologyKeys},
    net::matches_link,
    plan::NodePortAddresses,
};

/// The maximum length of an interface's name (`IFNAMSIZ` in the kernel's `include/uapi/linux/if.h`).
const MAX_LINK_NAME: usize = 15;

/// The way in which Services are implemented.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The best implementation that the kernel supports; currently the same as `ebpf`.
    Auto,
    /// eBPF programs in the kernel.
    #[default]
    Ebpf,
    /// A user-space proxy that has a listener for each Service. Not implemented yet.
    Userspace,
}

/// The settings for translating Service traffic.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct ServiceConfig {
    /// The method for detecting traffic from pods, which is not external.
    pub detect_local: DetectLocal,
    /// The CIDRs that contain the pods' addresses, for `detectLocal: ClusterCIDR`.
    #[serde(rename = "clusterCIDRs")]
    pub cluster_cidrs: Vec<String>,
    /// The name of the bridge of the pods, for `detectLocal: BridgeInterface`.
    pub bridge_interface: String,
    /// The first characters of the names of the pods' interfaces, for `detectLocal: InterfaceNamePrefix`.
    pub interface_name_prefix: String,
    /// True if packets to cluster IPs are masqueraded whoever sends them.
    pub masquerade_all: bool,
    /// The node addresses that serve NodePorts. If absent: `primary` and `localhost`; if empty: all
    /// addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_port_addresses: Option<Vec<String>>,
    /// The external IPs that are served: all, or only those with a known owner.
    #[serde(rename = "externalIPs")]
    pub external_ips: ExternalIps,
    /// The effect of external IPs and load balancer addresses that are addresses of this node itself.
    pub node_addresses: NodeAddresses,
    /// The effect of OpenYurt's annotation `openyurt.io/topologyKeys` on Services.
    pub topology_keys: TopologyKeys,
    /// The interval between polls for local listeners on cluster IPs.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub local_listener_poll_interval: Duration,
    /// The ids of the users whose local listeners take the place of a Service on its cluster IP.
    pub local_listeners: Vec<u32>,
    /// The names of the uplink interfaces. If empty, the uplinks are detected automatically.
    pub uplinks: Vec<String>,
    /// The names of interfaces that lead to pods, in addition to the detected ones. A name may end with `*`.
    pub pod_links: Vec<String>,
    /// The settings for packets that arrive from outside this node.
    pub packets: PacketsConfig,
    /// The load-balancing algorithm for Services that don't set one by annotation.
    #[serde(deserialize_with = "algorithm")]
    #[schemars(with = "Algorithm")]
    pub algorithm: Algorithm,
    /// The percentage of the map entries not used by other namespaces that the Services of one namespace may
    /// use. 100: no limit.
    pub namespace_share: u8,
    /// The interval between full syncs, which compare the maps with the desired state.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub full_sync_interval: Duration,
}

/// The modes that are implemented.
pub(super) const MODES: &str = "`auto` or `ebpf`";

/// Deserialises a mode. The error omits the mode that is not implemented.
pub(super) fn mode<'de, D: Deserializer<'de>>(source: D) -> Result<Mode, D::Error> {
    from_word(source, MODES)
}

/// Deserialises an algorithm. The error lists the aliases apart.
fn algorithm<'de, D: Deserializer<'de>>(source: D) -> Result<Algorithm, D::Error> {
    from_word(source, Algorithm::FORM)
}

fn from_word<'de, D, T>(source: D, form: &str) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned,
{
    let word = String::deserialize(source)?;
    T::deserialize(word.as_str().into_deserializer()).map_err(|_unknown: value::Error| {
        D::Error::custom(format!("unsupported value `{word}`; use {form}"))
    })
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            detect_local: DetectLocal::default(),
            cluster_cidrs: Vec::new(),
            bridge_interface: String::new(),
            interface_name_prefix: String::new(),
            masquerade_all: false,
            node_port_addresses: None,
            external_ips: ExternalIps::default(),
            node_addresses: NodeAddresses::default(),
            topology_keys: TopologyKeys::default(),
            local_listener_poll_interval: Duration::from_secs(1),
            local_listeners: vec![0],
            uplinks: Vec::new(),
            pod_links: Vec::new(),
            packets: PacketsConfig::default(),
            algorithm: Algorithm::default(),
            namespace_share: 50,
            full_sync_interval: Duration::from_secs(3600),
        }
    }
}

impl ServiceConfig {
    /// Returns which of this node's addresses serve NodePorts.
    #[must_use]
    pub fn node_ports(&self) -> Vec<NodePortAddresses> {
        let Some(entries) = &self.node_port_addresses else {
            return vec![NodePortAddresses::Primary, NodePortAddresses::Localhost];
        };
        if entries.is_empty() {
            return vec![NodePortAddresses::All];
        }
        entries
            .iter()
            .filter_map(|text| parse_node_port_addresses(text))
            .collect()
    }

    /// Returns the ranges of the pods' addresses.
    #[must_use]
    pub fn pod_ranges(&self) -> Vec<Prefix> {
        let ranges = self
            .cluster_cidrs
            .iter()
            .filter_map(|text| parse_cidr(text));
        ranges
            .filter_map(|(network, length)| Prefix::containing(Address::from_ip(network), length))
            .collect()
    }

    fn check_links(&self) -> Result<(), FieldError> {
        let is_valid = |entry: &str| {
            let name = entry.strip_suffix('*').unwrap_or(entry);
            !name.is_empty() && name.len() <= MAX_LINK_NAME && !name.contains(['*', '/', ' '])
        };
        let reason =
            "is not the name of an interface, such as cni0, or the start of one, such as lxc*";
        check_each("service.podLinks", &self.pod_links, is_valid, reason)?;
        let (key, uplinks) = (
            "service.packets.deliveryUplinks",
            &self.packets.delivery_uplinks,
        );
        check_each(
            key,
            uplinks,
            |entry| entry == "*" || is_valid(entry),
            reason,
        )?;
        if uplinks.is_empty() {
            return Err((key.to_owned(), "must have at least one entry".to_owned()));
        }
        let is_uplink = |entry: &str| {
            let mut uplinks = self.uplinks.iter();
            uplinks.any(|uplink| matches_link(entry, uplink))
        };
        let reason = "matches an interface that is in service.uplinks";
        check_each(
            "service.podLinks",
            &self.pod_links,
            |entry| !is_uplink(entry),
            reason,
        )
    }

    pub(super) fn check(&self) -> Result<(), FieldError> {
        self.check_links()?;
        let is_cidr = |text: &str| parse_cidr(text).is_some();
        let reason = "is not a CIDR such as 10.0.0.0/8";
        let ranges = &self.cluster_cidrs;
        check_each("service.clusterCIDRs", ranges, is_cidr, reason)?;
        self.packets.check()?;
        // `chown(2)` uses this number to mean that the owner stays the same, so no user has it.
        let unusable = self
            .local_listeners
            .iter()
            .position(|user| *user == u32::MAX);
        if let Some(index) = unusable {
            let reason = format!("{} is not the id of a user", u32::MAX);
            return Err((format!("service.localListeners[{index}]"), reason));
        }
        let named = self.node_port_addresses.as_deref().unwrap_or_default();
        let reason = "is not a CIDR, `primary`, `localhost` or `all`";
        let is_valid = |text: &str| parse_node_port_addresses(text).is_some();
        check_each("service.nodePortAddresses", named, is_valid, reason)
    }
}

/// Parses an entry in `nodePortAddresses`.
fn parse_node_port_addresses(text: &str) -> Option<NodePortAddresses> {
    match text {
        "all" => Some(NodePortAddresses::All),
        "primary" => Some(NodePortAddresses::Primary),
        "localhost" => Some(NodePortAddresses::Localhost),
        range => {
            parse_cidr(range).map(|(network, length)| NodePortAddresses::Range(network, length))
        }
    }
}

/// Parses a CIDR into its address and prefix length.
fn parse_cidr(text: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = text.split_once('/')?;
    let (address, length) = (address.parse::<IpAddr>().ok()?, length.parse::<u8>().ok()?);
    let longest = if address.is_ipv4() { 32 } else { 128 };
    (length <= longest).then_some((address, length))
}

/// The method for detecting traffic from this node's pods.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum DetectLocal {
    /// By the CIDRs in `clusterCIDRs`.
    #[default]
    #[serde(rename = "ClusterCIDR")]
    ClusterCidr,
    /// By the pod CIDRs in the Node object.
    #[serde(rename = "NodeCIDR")]
    NodeCidr,
    /// By the bridge interface that the pods are connected to.
    BridgeInterface,
    /// By the name prefix of the pods' interfaces.
    InterfaceNamePrefix,
    /// Traffic from pods is not detected.
    None,
}
