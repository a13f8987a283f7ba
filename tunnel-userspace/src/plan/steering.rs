//! Plans which addresses and ports of edge nodes are steered to the tunnel.

mod address_claims;
mod known_addresses;
mod port_lists;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use tunnel_common::{
    addr::{Address, Port},
    reason::Reason,
    steering::{Prefix, SteeringKey},
};

use self::address_claims::{MAX_ADDRESSES, Outcome};
pub use self::{
    address_claims::{AddressHolders, claims_address},
    known_addresses::KnownAddresses,
};
use crate::model::{ConfigMap, Node, ObjectName, Selector, SteeringTarget};

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
    /// The ranges that edge nodes' addresses are in; `None` if the config lists none.
    pub node_ranges: Option<Vec<Prefix>>,
    /// The addresses of API servers in the config.
    pub api_servers: BTreeSet<IpAddr>,
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
    /// The Node that each steered address belongs to.
    pub owners: AddressHolders,
    /// All addresses that edge nodes claim, including those that are not steered.
    pub claimed: BTreeSet<IpAddr>,
    /// True if another Node claims an address that is kept for a Node that no longer lists it, or was deleted.
    pub has_reserved: bool,
    /// The number of edge nodes.
    pub edge_nodes: usize,
    /// The problems with objects that are left out.
    pub problems: BTreeSet<SteeringProblem>,
}

/// The state that steering is planned from.
#[derive(Clone, Copy, Debug)]
pub struct SteeringInputs<'a> {
    /// All Nodes.
    pub nodes: &'a BTreeMap<ObjectName, Arc<Node>>,
    /// The ConfigMap that lists further ports to steer.
    pub config_map: Option<&'a ConfigMap>,
    /// The addresses that don't belong to Nodes.
    pub known: &'a KnownAddresses,
    /// The Node that had each address first. It holds an address for some time after it no longer lists it.
    pub holders: &'a AddressHolders,
}

/// Plans steering. Each edge node's addresses are steered, except those that the node may not have.
#[must_use]
pub fn plan_steering(inputs: SteeringInputs<'_>, rules: &SteeringRules) -> SteeringPlan {
    let mut plan = SteeringPlan::default();
    if rules.is_own_edge(inputs.nodes) {
        return plan;
    }
    let ports = port_lists::read_ports(inputs.config_map, &mut plan.problems);
    for node in inputs.nodes.values().filter(|node| rules.is_edge(node)) {
        plan.edge_nodes += 1;
        plan.problems.extend(unusable_addresses(node));
    }
    for (address, claimants) in address_claims::claimants(&inputs, rules) {
        let Some(first) = claimants.edge.first() else {
            continue;
        };
        plan.claimed.insert(address);
        let decision = address_claims::decide(address, &claimants, &inputs, rules);
        for (node, reason, text) in decision.problems {
            let problem = SteeringProblem::of_node(node, reason, format!("{address} {text}"));
            plan.problems.insert(problem);
        }
        let node = match decision.outcome {
            Outcome::Left => continue,
            Outcome::Steered(node) => {
                plan.owners.insert(address, Arc::clone(&node.name.name));
                node
            }
            Outcome::Disputed { is_reserved } => {
                plan.has_reserved |= is_reserved;
                first
            }
        };
        for (port, is_loopback) in &ports {
            let key = SteeringKey::new(Address::from_ip(address), Port::from_host(*port));
            let target = SteeringTarget {
                node: Arc::clone(&node.name.name),
                address,
                port: *port,
                loopback: *is_loopback,
                is_disputed: matches!(decision.outcome, Outcome::Disputed { .. }),
            };
            plan.targets.insert(key, target);
        }
    }
    plan
}

impl SteeringProblem {
    /// Returns true if something is not steered, or a Node has another Node's address.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.reason != Reason::AddressUnconfirmed
    }

    fn of_node(node: &Node, reason: Reason, text: String) -> Self {
        Self {
            reason,
            node: Some(node.name.clone()),
            object: format!("Node {}: status.addresses", node.name.name),
            text,
        }
    }
}

/// Returns a problem if an edge node has no address, or has addresses that can't be steered.
fn unusable_addresses(node: &Node) -> Vec<SteeringProblem> {
    let mut texts = Vec::new();
    if node.internal_ips.is_empty() {
        texts.push("has no InternalIP, so connects to this node are not steered".to_owned());
    }
    let addresses = || node.internal_ips.iter().map(IpAddr::to_canonical);
    let is_host = |address: &IpAddr| address_claims::is_host_address(*address);
    let others: BTreeSet<_> = addresses().filter(|address| !is_host(address)).collect();
    if let Some(others) = first_of(&others) {
        texts.push(format!(
            "{others}: loopback, link-local, multicast and unspecified addresses can't be steered"
        ));
    }
    let claims = address_claims::claims(&node.internal_ips, &[]);
    let extra = addresses().filter(|address| is_host(address) && !claims.contains(address));
    if let Some(extra) = first_of(&extra.collect()) {
        texts.push(format!(
            "{extra}: at most {MAX_ADDRESSES} addresses per family are steered"
        ));
    }
    let problem = |text| SteeringProblem::of_node(node, Reason::NodeRejected, text);
    texts.into_iter().map(problem).collect()
}

/// Formats the first addresses and the number of the others. A Node may have very many addresses.
fn first_of(addresses: &BTreeSet<IpAddr>) -> Option<String> {
    let first = addresses.iter().take(MAX_ADDRESSES);
    let first: Vec<_> = first.map(ToString::to_string).collect();
    let more = addresses.len() - first.len();
    (!first.is_empty()).then(|| match more {
        0 => first.join(", "),
        _ => format!("{} and {more} more", first.join(", ")),
    })
}

#[cfg(test)]
mod tests;
