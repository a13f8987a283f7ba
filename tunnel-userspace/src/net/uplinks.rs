//! Classifies this node's links: uplinks lead outside the node, and pod links lead to pods on this node. A link
//! is a pod link only if a pod's address is reached over it, or if the config names it, so that links of unknown
//! purpose are not trusted.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    net::IpAddr,
};

use tunnel_common::{addr::Address, steering::Prefix};

/// The attributes of a link that decide where it leads.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) kind: LinkKind,
    /// The index of the bridge or bond that the link is a port of, or of its VRF, if any.
    pub(super) bridge: Option<u32>,
    /// The subnets of this node's addresses on the link, except link-local IPv6 subnets and single addresses.
    pub(super) subnets: Vec<Subnet>,
    /// The addresses to which a program has added a host route over the link, without a gateway.
    pub(super) reached: Vec<IpAddr>,
}

/// The subnet of an address of this node.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Subnet {
    pub(super) prefix: Prefix,
    /// False if the address has a limited lifetime, because a router or a DHCP server on the link chose it.
    pub(super) is_permanent: bool,
}

/// The kind of a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum LinkKind {
    Loopback,
    /// A veth or netkit link whose peer is in another network namespace.
    Pair,
    Bridge,
    Vrf,
    /// The device that all ports of Open vSwitch have as their master. Packets arrive on other ports.
    OpenVSwitch,
    Other,
}

/// The address ranges that the addresses of this node's pods are in. Empty if they are unknown.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PodRanges {
    /// The ranges in the config (`service.clusterCIDRs`).
    pub configured: Vec<Prefix>,
    /// The ranges in this node's Node object (`spec.podCIDRs`), which not every CNI plugin uses.
    pub of_node: Vec<Prefix>,
}

impl PodRanges {
    /// Returns all ranges.
    pub(super) fn all(&self) -> impl Iterator<Item = &Prefix> {
        self.configured.iter().chain(&self.of_node)
    }

    fn contains(&self, address: IpAddr) -> bool {
        let address = Address::from_ip(address);
        self.all().any(|range| range.contains(&address))
    }

    fn contains_all_of(&self, subnet: &Prefix) -> bool {
        self.all()
            .any(|range| range.length() <= subnet.length() && range.contains(&subnet.network()))
    }

    /// Returns true if a range in this node's Node object is part of a subnet.
    fn is_node_range_in(&self, subnet: &Prefix) -> bool {
        self.of_node
            .iter()
            .any(|range| subnet.length() <= range.length() && subnet.contains(&range.network()))
    }

    fn is_known(&self, is_v4: bool) -> bool {
        self.all().any(|range| range.is_v4() == is_v4)
    }

    fn is_configured(&self, is_v4: bool) -> bool {
        self.configured.iter().any(|range| range.is_v4() == is_v4)
    }
}

/// The settings that decide how links are classified.
#[derive(Clone, Debug, Default)]
pub struct LinkSettings {
    /// The names of the uplinks (`service.uplinks`). If empty, the uplinks are detected.
    pub uplinks: Vec<String>,
    /// The names of links that lead to pods (`service.podLinks`). A name may end with `*`, which stands for any text.
    pub pod_links: Vec<String>,
    /// The configured ranges of the pods' addresses (`service.clusterCIDRs`).
    pub pod_ranges: Vec<Prefix>,
}

impl LinkSettings {
    pub(super) fn rules<'a>(
        &'a self,
        ranges: &'a PodRanges,
        gateways: &'a BTreeSet<u32>,
        former_uplinks: &'a BTreeSet<u32>,
    ) -> Rules<'a> {
        Rules {
            uplinks: &self.uplinks,
            pod_links: &self.pod_links,
            ranges,
            gateways,
            former_uplinks,
        }
    }
}

/// The settings and the history that decide how links are classified.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    /// The names of the uplinks (`service.uplinks`); if empty, the uplinks are detected.
    pub(super) uplinks: &'a [String],
    /// The names of pod links (`service.podLinks`). A name may end with `*`.
    pub(super) pod_links: &'a [String],
    pub(super) ranges: &'a PodRanges,
    /// The indices of the links that are used by routes via a gateway.
    pub(super) gateways: &'a BTreeSet<u32>,
    /// The indices of the links that were uplinks earlier.
    pub(super) former_uplinks: &'a BTreeSet<u32>,
}

/// The links, classified by where they lead.
#[derive(Debug, Default, Eq, PartialEq)]
pub(super) struct ClassifiedLinks {
    /// The names of the uplinks, by link index.
    pub(super) uplinks: BTreeMap<u32, String>,
    /// The names of the links over which the connections of pods arrive, by link index.
    pub(super) pod_links: BTreeMap<u32, String>,
    /// The indices of the links over which steered connections may arrive: loopback and the pod links.
    pub(super) inside_links: BTreeSet<u32>,
    /// The indices of the pod links that were detected, or that `service.podLinks` names. The others are pod links only
    /// because the config names all uplinks, and may lead to other nodes.
    pub(super) proven_pod_links: BTreeSet<u32>,
    /// The names of the links that may lead to pods, but over which no pod's address is reached. They have no
    /// guard, since a pod's route may be about to appear, and the ingress resets connections over them.
    pub(super) unproven_links: Vec<String>,
    /// A configured uplink name that no link has.
    pub(super) missing: Option<String>,
    /// Warnings about uplinks whose packets are not translated, although those on the bridge, bond or VRF aren't either.
    pub(super) port_warnings: Vec<String>,
}

impl ClassifiedLinks {
    /// Returns a description of the problem if no link has one of the configured names of uplinks.
    pub(super) fn missing_uplink(&self) -> Option<String> {
        let name = self.missing.as_ref()?;
        Some(format!(
            "service.uplinks names {name}, but this node has no such link"
        ))
    }
}

/// The place that a link leads to, as far as it can be detected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Destination {
    Outside,
    Pods,
    Unproven,
}

/// Classifies the links. The uplinks are the `uplinks` in the rules, and all other links are then pod links. If the
/// rules name no uplink, where each link leads is detected. The links in `pod_links` are pod links in any case. While
/// no link has one of the configured names, links that seem to lead outside are neither uplinks nor pod links.
pub(super) fn classify(links: &[Link], rules: Rules<'_>) -> ClassifiedLinks {
    let is_there = |name: &String| links.iter().any(|link| link.name == *name);
    let mut classified = ClassifiedLinks {
        missing: rules.uplinks.iter().find(|name| !is_there(name)).cloned(),
        ..ClassifiedLinks::default()
    };
    let is_complete = !rules.uplinks.is_empty() && classified.missing.is_none();
    for link in links {
        let is_uplink = rules.uplinks.contains(&link.name);
        let shown = if is_uplink {
            Destination::Outside
        } else if link.kind == LinkKind::Loopback || rules.names_pod_link(&link.name) {
            Destination::Pods
        } else {
            rules.detect(link, links)
        };
        if shown == Destination::Pods && link.kind != LinkKind::Loopback {
            classified.proven_pod_links.insert(link.index);
        }
        let destination = if is_complete && !is_uplink {
            Destination::Pods
        } else {
            shown
        };
        match destination {
            Destination::Outside => {
                // While a configured name is missing, the link may be the one that should have it.
                if classified.missing.is_none() || rules.uplinks.contains(&link.name) {
                    classified.uplinks.insert(link.index, link.name.clone());
                }
            }
            Destination::Pods => {
                classified.inside_links.insert(link.index);
                if link.kind != LinkKind::Loopback && link.bridge.is_none() {
                    classified.pod_links.insert(link.index, link.name.clone());
                }
            }
            Destination::Unproven if link.bridge.is_none() => {
                classified.unproven_links.push(link.name.clone());
            }
            Destination::Unproven => {}
        }
    }
    classified.port_warnings = port_warnings(links, rules, &classified);
    classified
}

/// The highest number of masters above a port (`MAX_NEST_DEV` in the kernel's `include/linux/netdevice.h`).
const MAX_MASTERS: usize = 8;

/// Returns warnings about uplinks whose packets are not translated, although those on the bridge, bond or VRF aren't either.
fn port_warnings(links: &[Link], rules: Rules<'_>, classified: &ClassifiedLinks) -> Vec<String> {
    let by_index: BTreeMap<u32, &Link> = links.iter().map(|link| (link.index, link)).collect();
    let master_of = |link: &&Link| by_index.get(&link.bridge?).copied();
    let is_uplink = |link: &Link| classified.uplinks.contains_key(&link.index);
    let is_elsewhere = |master: &&Link| {
        master.kind == LinkKind::OpenVSwitch
            || is_uplink(master)
            || rules.names_pod_link(&master.name)
    };
    let warning_about = |port: &Link| {
        let masters = iter::successors(master_of(&port), master_of).take(MAX_MASTERS);
        let masters = Vec::from_iter(masters);
        let top = masters.last()?;
        let name = &port.name;
        if let Some(vrf) = masters.iter().find(|master| master.kind == LinkKind::Vrf) {
            let vrf = &vrf.name;
            return Some(format!(
                "packets on {name} are not translated, because it is in the VRF {vrf}"
            ));
        }
        let is_named = classified.missing.is_none() && rules.uplinks.contains(name);
        let has_no_programs = is_named && !masters.iter().any(is_elsewhere);
        has_no_programs.then(|| {
            let top = &top.name;
            format!(
                "packets on {name} are not translated, because it is a port of {top}; service.uplinks should name {top}"
            )
        })
    };
    let uplinks = links.iter().filter(|link| is_uplink(link));
    uplinks.filter_map(warning_about).collect()
}

/// Returns true if an entry of `service.podLinks` matches the name of a link.
pub fn matches_link(entry: &str, name: &str) -> bool {
    match entry.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == entry,
    }
}

impl Rules<'_> {
    fn names_pod_link(&self, name: &str) -> bool {
        let mut entries = self.pod_links.iter();
        entries.any(|entry| matches_link(entry, name))
    }

    fn detect(&self, link: &Link, links: &[Link]) -> Destination {
        match link.kind {
            LinkKind::Loopback => Destination::Pods,
            LinkKind::Vrf | LinkKind::OpenVSwitch | LinkKind::Other => Destination::Outside,
            LinkKind::Bridge => self.detect_bridge(link, links),
            LinkKind::Pair => {
                let is_master = |other: &&Link| {
                    Some(other.index) == link.bridge && other.kind == LinkKind::Bridge
                };
                match links.iter().find(is_master) {
                    None => self.detect_endpoint(link),
                    Some(bridge) if self.gateways.contains(&bridge.index) => Destination::Outside,
                    // The connections arrive over the bridge itself, which has a guard if it leads outside.
                    Some(bridge) => match self.detect_bridge(bridge, links) {
                        Destination::Pods => Destination::Pods,
                        Destination::Outside | Destination::Unproven => Destination::Unproven,
                    },
                }
            }
        }
    }

    fn detect_bridge(&self, bridge: &Link, links: &[Link]) -> Destination {
        let mut ports = links
            .iter()
            .filter(|port| port.bridge == Some(bridge.index));
        if ports.all(|port| port.kind == LinkKind::Pair) {
            self.detect_endpoint(bridge)
        } else {
            Destination::Outside
        }
    }

    /// Detects where a pair, or a bridge whose ports are all pairs, leads.
    fn detect_endpoint(&self, link: &Link) -> Destination {
        let ranges = self.ranges;
        if self.gateways.contains(&link.index) {
            return Destination::Outside;
        }
        // Some CNI plugins give the bridge the range of all nodes' pods.
        let covers_pods = |subnet: &Subnet| {
            link.kind == LinkKind::Bridge
                && subnet.is_permanent
                && ranges.is_node_range_in(&subnet.prefix)
        };
        let is_foreign = |subnet: &Subnet| {
            let prefix = &subnet.prefix;
            if covers_pods(subnet) {
                false
            } else if ranges.is_known(prefix.is_v4()) {
                !ranges.contains_all_of(prefix)
            } else {
                // A bridge of pods has a subnet. A pod's own link has none, since the pod is its only neighbour.
                link.kind == LinkKind::Pair
            }
        };
        if link.subnets.iter().any(is_foreign) {
            return Destination::Outside;
        }
        let is_of_pods = |subnet: &Subnet| {
            covers_pods(subnet) || subnet.is_permanent && ranges.contains_all_of(&subnet.prefix)
        };
        let reaches_pod = link.reached.iter().any(|address| ranges.contains(*address));
        if reaches_pod || link.subnets.iter().any(is_of_pods) {
            return Destination::Pods;
        }
        // An uplink that has lost its routes and addresses must not be taken for a pod link.
        if self.former_uplinks.contains(&link.index) {
            return Destination::Outside;
        }
        let is_unknown = [true, false].map(|is_v4| ranges.is_known(is_v4)) == [false; 2];
        // Many CNI plugins take addresses from ranges of their own, and not from the Node object's.
        let mut reached = link.reached.iter();
        if is_unknown || reached.any(|address| !ranges.is_configured(address.is_ipv4())) {
            Destination::Pods
        } else {
            Destination::Unproven
        }
    }
}

#[cfg(test)]
mod tests;
