//! The clients that reach a Service by packets, and the addresses that the backends see: one table for Culvert and for
//! kube-proxy, which the tests in network namespaces and those on Kubernetes work through.

use std::fmt;

/// The address of a Service that a client dials.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Address {
    /// A ClusterIP, to which clients have a route through the node.
    ClusterIp,
    NodePort,
    LoadBalancer,
    ExternalIp,
}

/// The place of the Service's only backend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Place {
    /// A pod on the node that the packets arrive at.
    ThisNode,
    /// The host network of the node that the packets arrive at.
    HostNetwork,
    /// A pod on another node.
    OtherNode,
}

impl Place {
    pub const ALL: [Self; 3] = [Self::ThisNode, Self::HostNetwork, Self::OtherNode];
}

/// The Service's `externalTrafficPolicy`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Policy {
    Cluster,
    Local,
}

impl Policy {
    pub const ALL: [Self; 2] = [Self::Cluster, Self::Local];
}

/// The sender of the packets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Client {
    /// A host outside the cluster.
    Outside,
    /// A pod on another node, whose address is in the range of pods.
    PodElsewhere,
    /// A pod on the same node, whose sockets meet no hook.
    PodHere,
}

/// The outcome of a connection, or of a request over UDP.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// The backend answers, and sees the client's address.
    SeesClient,
    /// The backend answers, and sees an address of the node.
    SeesNode,
    /// The client gets no answer from the address that it has dialled.
    NoAnswer,
}

/// One combination of an address, a backend, a policy and a client.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Case {
    pub address: Address,
    pub place: Place,
    pub policy: Policy,
    pub client: Client,
    /// The outcome with Culvert and `service.packets.links: uplinks`.
    pub culvert: Outcome,
    /// The outcome with kube-proxy in nftables mode, see `pkg/proxy/nftables/proxier.go`, and with Culvert and
    /// `service.packets.links: all`.
    pub kube_proxy: Outcome,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            address,
            place,
            policy,
            client,
            ..
        } = self;
        write!(
            f,
            "{client:?} → {address:?}, policy {policy:?}, backend: {place:?}"
        )
    }
}

/// The outcomes with Culvert and with kube-proxy, first for clients outside, then for pods on other nodes.
type Outcomes = [[Outcome; 2]; 2];

/// Traffic to external addresses: node ports, load balancers' addresses and external IPs.
///
/// kube-proxy differs in one point: under policy Cluster it masquerades traffic to a pod of its own node. Culvert does
/// not, because the replies pass this node anyway. Neither masquerades packets for the host itself.
///
/// Under policy Local, pods on other nodes are external, as in Kubernetes' own specs. kube-proxy chooses among all
/// backends for them if it takes them for local, but the replies of those on other nodes don't reach the pod.
const EXTERNAL: [(Place, Policy, Outcomes); 6] = {
    use Outcome::{NoAnswer, SeesClient, SeesNode};
    use Place::{HostNetwork, OtherNode, ThisNode};
    use Policy::{Cluster, Local};
    [
        (ThisNode, Cluster, [[SeesClient, SeesNode]; 2]),
        (ThisNode, Local, [[SeesClient; 2]; 2]),
        (HostNetwork, Cluster, [[SeesClient; 2]; 2]),
        (HostNetwork, Local, [[SeesClient; 2]; 2]),
        (OtherNode, Cluster, [[SeesNode; 2]; 2]),
        (OtherNode, Local, [[NoAnswer; 2]; 2]),
    ]
};

/// Traffic to cluster IPs, with the same outcome under both policies. Both proxies masquerade what doesn't come from a
/// pod; Culvert does it only if the backend is on another node.
const TO_CLUSTER_IP: [(Place, Outcomes); 3] = {
    use Outcome::{NoAnswer, SeesClient, SeesNode};
    [
        (
            Place::ThisNode,
            [[SeesClient, SeesNode], [SeesClient, SeesClient]],
        ),
        (Place::HostNetwork, [[SeesClient; 2]; 2]),
        // The backend sees the pod's address and replies to it directly, not by way of this node.
        (Place::OtherNode, [[SeesNode; 2], [NoAnswer; 2]]),
    ]
};

/// The outcomes for pods on the same node, with Culvert and `service.packets.links: all`, and with kube-proxy. Under policy
/// Local, pods use all backends, and are not masqueraded.
const OF_PODS_HERE: [(Place, Policy, Outcome); 6] = {
    use Outcome::{SeesClient, SeesNode};
    use Place::{HostNetwork, OtherNode, ThisNode};
    use Policy::{Cluster, Local};
    [
        (ThisNode, Cluster, SeesNode),
        (ThisNode, Local, SeesClient),
        (HostNetwork, Cluster, SeesClient),
        (HostNetwork, Local, SeesClient),
        (OtherNode, Cluster, SeesNode),
        (OtherNode, Local, SeesClient),
    ]
};

/// Returns the combinations with pods on the same node as clients.
#[must_use]
pub fn cases_of_pods_here() -> Vec<Case> {
    use Address::{ClusterIp, ExternalIp, LoadBalancer, NodePort};
    let case = |address, (place, policy, outcome)| Case {
        address,
        place,
        policy,
        client: Client::PodHere,
        culvert: outcome,
        kube_proxy: outcome,
    };
    let of_address = |address| {
        OF_PODS_HERE.map(|(place, policy, outcome)| {
            let is_cluster_ip = address == ClusterIp;
            // kube-proxy masquerades no pod of its own node on the way to a cluster IP.
            let outcome = if is_cluster_ip {
                Outcome::SeesClient
            } else {
                outcome
            };
            case(address, (place, policy, outcome))
        })
    };
    let addresses = [ClusterIp, NodePort, LoadBalancer, ExternalIp];
    addresses.into_iter().flat_map(of_address).collect()
}

/// Returns all combinations with other clients.
#[must_use]
pub fn cases() -> Vec<Case> {
    use Address::{ClusterIp, ExternalIp, LoadBalancer, NodePort};
    let mut cases = Vec::new();
    let mut add = |address, place, policy, outcomes: Outcomes| {
        let clients = [Client::Outside, Client::PodElsewhere];
        for (client, [culvert, kube_proxy]) in clients.into_iter().zip(outcomes) {
            cases.push(Case {
                address,
                place,
                policy,
                client,
                culvert,
                kube_proxy,
            });
        }
    };
    for (place, outcomes) in TO_CLUSTER_IP {
        for policy in Policy::ALL {
            add(ClusterIp, place, policy, outcomes);
        }
    }
    for address in [NodePort, LoadBalancer, ExternalIp] {
        for (place, policy, outcomes) in EXTERNAL {
            add(address, place, policy, outcomes);
        }
    }
    cases
}
