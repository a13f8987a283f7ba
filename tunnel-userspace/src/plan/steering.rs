//! The addresses and ports that are steered to the tunnel: those of edge nodes.

mod ports;

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

use crate::model::{ConfigMap, Node, ObjectName, Selector, Target};

/// The maximum number of addresses of a Node per family: a kubelet, perhaps a compromised one, writes
/// them.
const MOST: usize = 4;

/// The rules of steering.
#[derive(Clone, Debug)]
pub struct SteeringRules {
    /// The name of this node's own Node; if that is an edge node, nothing is steered.
    pub own_node: String,
    /// The selector of edge nodes.
    pub edge: Selector,
    /// The ConfigMap with further ports.
    pub config_map: ObjectName,
    /// True for each family with a steering prefix: IPv4, IPv6.
    pub families: [bool; 2],
}

impl SteeringRules {
    /// Returns true if a Node is an edge node.
    #[must_use]
    pub fn is_edge(&self, node: &Node) -> bool {
        self.edge.matches(&node.labels)
    }

    /// Returns true if this node's own Node is an edge node.
    #[must_use]
    pub fn is_own_edge(&self, nodes: &BTreeMap<ObjectName, Arc<Node>>) -> bool {
        let own = nodes.get(&ObjectName::new("", &*self.own_node));
        own.is_some_and(|node| self.is_edge(node))
    }
}

/// An object that is not steered, and the cause.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct SteeringProblem {
    /// The reason to count.
    pub reason: Reason,
    /// The Node with the problem, if it is one.
    pub node: Option<ObjectName>,
    /// The object, with its field or entry.
    pub object: String,
    /// The description of the problem.
    pub text: String,
}

/// The desired steering.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct SteeringPlan {
    /// The target of every address and port.
    pub targets: BTreeMap<SteeringKey, Target>,
    /// The number of edge nodes.
    pub edge_nodes: usize,
    /// The objects that are left out.
    pub problems: BTreeSet<SteeringProblem>,
}

/// Plans which connects are steered.
#[must_use]
pub fn steering(
    nodes: &BTreeMap<ObjectName, Arc<Node>>,
    config_map: Option<&ConfigMap>,
    rules: &SteeringRules,
) -> SteeringPlan {
    let mut plan = SteeringPlan::default();
    if rules.is_own_edge(nodes) {
        return plan;
    }
    let ports = ports::read(config_map, &mut plan.problems);
    let owners = owners(nodes, rules);
    for node in nodes.values().filter(|node| rules.is_edge(node)) {
        plan.edge_nodes += 1;
        for address in own_addresses(node, &owners, rules, &mut plan.problems) {
            for (port, is_loopback) in &ports {
                let key = SteeringKey::new(Address::from_ip(address), Port::from_host(*port));
                let target = Target {
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

/// Returns the owner of each address. Of several Nodes it is the one that is not an edge node, whose
/// traffic must not be redirected, then the oldest, then the first by name.
fn owners<'a>(
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

/// Returns the addresses that a Node owns and that can be steered; adds a problem for each other
/// address.
fn own_addresses(
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
        refuse("has no InternalIP, so nothing of it is steered".to_owned());
    }
    let mut own = Vec::new();
    for address in node.internal_ips.iter().map(IpAddr::to_canonical) {
        let [has_v4, has_v6] = rules.families;
        let has_family = if address.is_ipv4() { has_v4 } else { has_v6 };
        let is_sibling = |other: &&IpAddr| other.is_ipv4() == address.is_ipv4();
        match owners.get(&address) {
            _ if !is_of_one_host(address) => {
                refuse(format!("{address} is not the address of one host"));
            }
            Some((is_edge, _, owner)) if **owner != node.name => {
                let kind = if *is_edge { "edge node" } else { "cloud node" };
                let owner = &owner.name;
                refuse(format!(
                    "{address} is that of {kind} {owner} too, which has it"
                ));
            }
            _ if own.iter().filter(is_sibling).count() >= MOST => {
                refuse(format!(
                    "{address} is one of more than {MOST} of its family"
                ));
            }
            _ if has_family => own.push(address),
            _ => {}
        }
    }
    own
}

fn is_of_one_host(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || is_link_local)
}

#[cfg(test)]
mod tests;
