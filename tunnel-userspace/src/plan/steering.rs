//! Plans which addresses and ports of edge nodes are steered to the tunnel.

mod port_lists;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use tunnel_common::{
    addr::{Address, Port},
    reason::Reason,
    steering::SteeringKey,
};

use crate::model::{ConfigMap, Node, ObjectName, Selector, SteeringTarget};

/// The maximum number of steered addresses per Node and family. There is a limit because the node's kubelet
/// sets the addresses, and may be compromised.
const MAX_ADDRESSES: usize = 4;

/// The rules for steering.
#[derive(Clone, Debug)]
pub struct SteeringRules {
    /// The name of this node's Node object. If this node is an edge node, nothing is steered.
    pub own_node: String,
    /// The label selector for edge nodes.
    pub edge_selector: Selector,
    /// The name of the ConfigMap that lists further ports to steer.
    pub config_map: ObjectName,
    /// For IPv4 and IPv6, respectively: true if the family has a steering prefix.
    pub families: [bool; 2],
}

impl SteeringRules {
    /// Returns true if a Node is an edge node.
    #[must_use]
    pub fn is_edge(&self, node: &Node) -> bool {
        self.edge_selector.matches(&node.labels)
    }

    /// Returns true if this node is an edge node.
    #[must_use]
    pub fn is_own_edge(&self, nodes: &BTreeMap<ObjectName, Arc<Node>>) -> bool {
        let own_node = nodes.get(&ObjectName::new("", &*self.own_node));
        own_node.is_some_and(|node| self.is_edge(node))
    }
}

/// An object, or a part of one, that is not steered, and the reason why.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct SteeringProblem {
    /// The reason under which the problem is counted.
    pub reason: Reason,
    /// The Node's name, if the problem is with a Node.
    pub node: Option<ObjectName>,
    /// The object, and the field or entry in it that has the problem.
    pub object: String,
    /// A description of the problem.
    pub text: String,
}

/// The addresses and ports to steer, and the problems found while planning.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SteeringPlan {
    /// The target for each steered address and port.
    pub targets: BTreeMap<SteeringKey, SteeringTarget>,
    /// The number of edge nodes.
    pub edge_nodes: usize,
    /// The problems with objects that are left out.
    pub problems: BTreeSet<SteeringProblem>,
}

/// Plans steering from the Nodes and the ConfigMap.
#[must_use]
pub fn plan_steering(
    nodes: &BTreeMap<ObjectName, Arc<Node>>,
    config_map: Option<&ConfigMap>,
    rules: &SteeringRules,
) -> SteeringPlan {
    let mut plan = SteeringPlan::default();
    if rules.is_own_edge(nodes) {
        return plan;
    }
    let ports = port_lists::read_ports(config_map, &mut plan.problems);
    let owners = address_owners(nodes, rules);
    for node in nodes.values().filter(|node| rules.is_edge(node)) {
        plan.edge_nodes += 1;
        for address in steerable_addresses(node, &owners, rules, &mut plan.problems) {
            for (port, is_loopback) in &ports {
                let key = SteeringKey::new(Address::from_ip(address), Port::from_host(*port));
                let target = SteeringTarget {
                    node: Arc::clone(&node.name.name),
                    address,
                    port: *port,
                    loopback: *is_loopback,
                };
                plan.targets.insert(key, target);
            }
        }
    }
    plan
}

/// Returns the owner of each address. If several Nodes have the same address, cloud nodes take precedence,
/// since connections to them must not be steered; next comes the oldest Node, then the first by name.
fn address_owners<'a>(
    nodes: &'a BTreeMap<ObjectName, Arc<Node>>,
    rules: &SteeringRules,
) -> BTreeMap<IpAddr, (bool, i64, &'a ObjectName)> {
    let mut owners = BTreeMap::new();
    for node in nodes.values() {
        let rank = (
            rules.is_edge(node),
            node.created.unwrap_or(i64::MAX),
            &node.name,
        );
        for address in &node.internal_ips {
            let owner = owners.entry(address.to_canonical()).or_insert(rank);
            *owner = rank.min(*owner);
        }
    }
    owners
}

/// Returns a Node's addresses that can be steered. Adds a problem for each address that is invalid, belongs
/// to another Node, or exceeds the limit.
fn steerable_addresses(
    node: &Node,
    owners: &BTreeMap<IpAddr, (bool, i64, &ObjectName)>,
    rules: &SteeringRules,
    problems: &mut BTreeSet<SteeringProblem>,
) -> Vec<IpAddr> {
    let mut refuse = |text: String| {
        problems.insert(SteeringProblem {
            reason: Reason::NodeRejected,
            node: Some(node.name.clone()),
            object: format!("Node {}: status.addresses", node.name.name),
            text,
        });
    };
    if node.internal_ips.is_empty() {
        refuse("has no InternalIP, so connects to this node are not steered".to_owned());
    }
    let mut steerable = Vec::new();
    for address in node.internal_ips.iter().map(IpAddr::to_canonical) {
        let [has_v4, has_v6] = rules.families;
        let has_family = if address.is_ipv4() { has_v4 } else { has_v6 };
        let is_sibling = |other: &&IpAddr| other.is_ipv4() == address.is_ipv4();
        match owners.get(&address) {
            _ if !is_host_address(address) => {
                refuse(format!(
                    "{address} is a loopback, link-local, multicast or unspecified address, which can't be steered"
                ));
            }
            Some((is_edge, _, owner)) if **owner != node.name => {
                let kind = if *is_edge { "edge node" } else { "cloud node" };
                let owner = &owner.name;
                refuse(format!(
                    "{address} is also an address of {kind} {owner}, which takes precedence"
                ));
            }
            _ if steerable.iter().filter(is_sibling).count() >= MAX_ADDRESSES => {
                refuse(format!(
                    "{address} is not steered: at most {MAX_ADDRESSES} addresses per family are"
                ));
            }
            _ if has_family => steerable.push(address),
            _ => {}
        }
    }
    steerable
}

fn is_host_address(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || is_link_local)
}

#[cfg(test)]
mod tests;
