//! Decides which edge node gets an address that several objects claim. A kubelet can write the addresses of its
//! own Node, so the addresses of an edge node are only claims.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use tunnel_common::{addr::Address, reason::Reason};

use super::{SteeringInputs, SteeringRules};
use crate::model::{Node, ObjectName};

/// The maximum number of addresses per edge node and family that are steered, and that count as claims: its
/// InternalIPs, and then its addresses of other types. There is
/// a limit because the node's kubelet sets the addresses, and may be compromised.
pub(super) const MAX_ADDRESSES: usize = 4;

/// The maximum number of Nodes that a problem names.
const MAX_NAMES: usize = 3;

/// The name of the Node that holds each address.
pub type AddressHolders = BTreeMap<IpAddr, Arc<str>>;

/// The Nodes that have an address, sorted by name.
#[derive(Default)]
pub(super) struct Claimants<'a> {
    /// Edge nodes with the address as an InternalIP.
    pub(super) edge: Vec<&'a Node>,
    /// Edge nodes with the address as an address of another type.
    other_type: Vec<&'a Node>,
    /// Cloud nodes with the address as an address of any type.
    cloud: Vec<&'a Node>,
}

/// The decision about an address that at least one edge node claims.
pub(super) struct Decision<'a> {
    pub(super) outcome: Outcome<'a>,
    /// The problems, each with the Node that has the problem, and a text that follows the address.
    pub(super) problems: Vec<(&'a Node, Reason, String)>,
}

/// The treatment of connections to an address that at least one edge node claims.
pub(super) enum Outcome<'a> {
    /// Connections are steered to this Node.
    Steered(&'a Node),
    /// Connections are not steered, as if no edge node claimed the address.
    Left,
    /// Connections are refused, because the address may belong to another edge node.
    Disputed {
        /// True if the address is kept for a Node that listed it a short time ago.
        is_reserved: bool,
    },
}

/// Returns true if a Node claims an address, in case it is an edge node.
#[must_use]
pub fn claims_address(node: &Node, address: IpAddr) -> bool {
    claims(&node.internal_ips, &[]).contains(&address)
}

/// Returns the first addresses of each family, without duplicates and without those that can't be steered.
pub(super) fn claims(internal: &[IpAddr], others: &[IpAddr]) -> Vec<IpAddr> {
    let mut claims: Vec<IpAddr> = Vec::new();
    for address in internal.iter().chain(others).map(IpAddr::to_canonical) {
        let siblings = claims.iter();
        let siblings = siblings.filter(|other| other.is_ipv4() == address.is_ipv4());
        let has_room = siblings.count() < MAX_ADDRESSES;
        if has_room && is_host_address(address) && !claims.contains(&address) {
            claims.push(address);
        }
    }
    claims
}

/// Returns true if a host can have an address, and others can reach it there.
pub(super) fn is_host_address(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || is_link_local)
}

/// Returns the Nodes that have each address.
pub(super) fn claimants<'a>(
    inputs: &SteeringInputs<'a>,
    rules: &SteeringRules,
) -> BTreeMap<IpAddr, Claimants<'a>> {
    let mut all: BTreeMap<IpAddr, Claimants<'_>> = BTreeMap::new();
    let [has_v4, has_v6] = rules.families;
    let has_family = |address: &IpAddr| if address.is_ipv4() { has_v4 } else { has_v6 };
    for node in inputs.nodes.values() {
        if !rules.is_edge(node) {
            for address in node.internal_ips.iter().chain(&node.other_ips) {
                let claimants = all.entry(address.to_canonical()).or_default();
                claimants.cloud.push(node);
            }
            continue;
        }
        let internal = claims(&node.internal_ips, &[]);
        for address in claims(&node.internal_ips, &node.other_ips) {
            if !internal.contains(&address) {
                all.entry(address).or_default().other_type.push(node);
            } else if has_family(&address) {
                all.entry(address).or_default().edge.push(node);
            }
        }
    }
    all
}

/// Decides about an address that at least one edge node claims.
pub(super) fn decide<'a>(
    address: IpAddr,
    claimants: &Claimants<'a>,
    inputs: &SteeringInputs<'a>,
    rules: &SteeringRules,
) -> Decision<'a> {
    if let Some(ranges) = &rules.node_ranges
        && !ranges
            .iter()
            .any(|range| range.contains(&Address::from_ip(address)))
    {
        return claimants.refuse("is outside tunnel.steering.nodeCIDRs, so it is not steered");
    }
    if let Some(cloud) = claimants.cloud.first() {
        return claimants.leave_to_cloud_node(cloud);
    }
    if let Some(owner) = inputs.known.owner_of(address, rules) {
        return claimants.refuse(&format!("is {owner}, so it is not steered"));
    }
    let holder = inputs.holders.get(&address);
    let mut decision = match (holder, inputs.known.pod_network_of(address, rules)) {
        (Some(holder), _) => claimants.give_to_holder(holder, inputs.nodes),
        (None, Some(network)) => claimants.refuse(&format!("is {network}, so it is not steered")),
        (None, None) => claimants.decide_without_holder(),
    };
    if let Outcome::Steered(node) = decision.outcome
        && rules.node_ranges.is_none()
        && let Some(doubt) = inputs.known.doubt(address)
    {
        let text =
            format!("is {doubt}; it is steered because tunnel.steering.nodeCIDRs is not set");
        let doubt = (node, Reason::AddressUnconfirmed, text);
        decision.problems.push(doubt);
    }
    decision
}

impl<'a> Claimants<'a> {
    /// Returns the decision that no edge node gets the address, with the same problem for each of them.
    fn refuse(&self, text: &str) -> Decision<'a> {
        let problem = |node: &&'a Node| (*node, Reason::NodeRejected, text.to_owned());
        Decision {
            outcome: Outcome::Left,
            problems: self.edge.iter().map(problem).collect(),
        }
    }

    fn leave_to_cloud_node(&self, cloud: &'a Node) -> Decision<'a> {
        let name = &cloud.name.name;
        let of_edge = format!("is also an address of cloud node {name}, which takes precedence");
        let of_cloud = format!(
            "is also claimed by {}; this Node takes precedence, because it is a cloud node",
            names(&self.edge)
        );
        let edge = self.edge.iter().map(|node| (*node, of_edge.clone()));
        Decision {
            outcome: Outcome::Left,
            problems: disputes(edge.chain([(cloud, of_cloud)])),
        }
    }

    /// Gives the address to the Node that had it first, if this Node still lists it.
    fn give_to_holder(
        &self,
        holder: &str,
        nodes: &'a BTreeMap<ObjectName, Arc<Node>>,
    ) -> Decision<'a> {
        let (owner, others): (Vec<_>, Vec<_>) = self
            .edge
            .iter()
            .partition(|node| *node.name.name == *holder);
        let Some(owner) = owner.first() else {
            return self.keep_for(holder, nodes.get(&ObjectName::new("", holder)));
        };
        let text =
            format!("is also an address of edge node {holder}, which had it first and keeps it");
        let mut problems = disputes(others.iter().map(|node| (*node, text.clone())));
        if !others.is_empty() {
            let text = format!(
                "is also claimed by {}; this Node had it first and keeps it",
                names(&others)
            );
            problems.push((owner, Reason::AddressDisputed, text));
        }
        Decision {
            outcome: Outcome::Steered(owner),
            problems,
        }
    }

    /// Returns the decision that the address is kept for a Node that no longer lists it, or that was deleted.
    fn keep_for(&self, name: &str, holder: Option<&'a Arc<Node>>) -> Decision<'a> {
        let end = "for ten minutes, and connections to it are refused until then";
        let text = match holder {
            Some(_) => format!(
                "was an address of edge node {name}, which no longer lists it; it is kept for that node {end}"
            ),
            None => format!(
                "was an address of edge node {name}, whose Node was deleted; it is kept for a new Node of that name \
                 {end}"
            ),
        };
        let of_holder = format!(
            "is claimed by {}; this Node had it first, but no longer lists it; it is kept for this Node {end}",
            names(&self.edge)
        );
        let edge = self.edge.iter().map(|node| (*node, text.clone()));
        let holder = holder.map(|node| (&**node, of_holder));
        Decision {
            outcome: Outcome::Disputed { is_reserved: true },
            problems: disputes(edge.chain(holder)),
        }
    }

    fn decide_without_holder(&self) -> Decision<'a> {
        let mut all: Vec<&'a Node> = self.edge.iter().chain(&self.other_type).copied().collect();
        all.sort_by_key(|node| &node.name);
        all.dedup_by_key(|node| &node.name);
        if let [only] = all[..] {
            return Decision {
                outcome: Outcome::Steered(only),
                problems: Vec::new(),
            };
        }
        let problem = |node: &&'a Node| {
            let others = all.iter().filter(|other| other.name != node.name);
            let others: Vec<_> = others.copied().collect();
            let text = format!(
                "is also an address of {}; it is unknown which of them had it first, so connections to it are \
                 refused",
                names(&others)
            );
            (*node, text)
        };
        Decision {
            outcome: Outcome::Disputed { is_reserved: false },
            problems: disputes(all.iter().map(problem)),
        }
    }
}

/// Adds the reason for a dispute between Nodes to each problem.
fn disputes<'a>(
    problems: impl Iterator<Item = (&'a Node, String)>,
) -> Vec<(&'a Node, Reason, String)> {
    problems
        .map(|(node, text)| (node, Reason::AddressDisputed, text))
        .collect()
}

/// Formats the names of edge nodes. Names only the first of them if there are many.
fn names(nodes: &[&Node]) -> String {
    let first = nodes.iter().take(MAX_NAMES);
    let first: Vec<_> = first.map(|node| &*node.name.name).collect();
    match nodes.len() {
        1 => format!("edge node {}", first.concat()),
        count if count > MAX_NAMES => {
            let more = count - MAX_NAMES;
            format!("edge nodes {} and {more} more", first.join(", "))
        }
        _ => format!("edge nodes {}", first.join(", ")),
    }
}
