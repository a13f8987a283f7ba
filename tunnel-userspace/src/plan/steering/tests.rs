mod disputes;
mod foreign_addresses;

use super::*;
use crate::model::fixture;

fn node(name: &str, edge: bool, addresses: &[&str]) -> Arc<Node> {
    let label = ("openyurt.io/is-edge-worker".to_owned(), edge.to_string());
    Arc::new(Node {
        labels: BTreeMap::from([label]),
        internal_ips: fixture::ips(addresses),
        ..fixture::node(name)
    })
}

fn rules() -> SteeringRules {
    SteeringRules {
        own_node: "cloud-1".to_owned(),
        edge_selector: "openyurt.io/is-edge-worker=true"
            .parse()
            .expect("a selector"),
        config_map: ObjectName::new("kube-system", "yurt-tunnel-server-cfg"),
        families: [true, true],
        node_ranges: None,
        api_servers: fixture::ips(&["10.0.0.6"]).into_iter().collect(),
    }
}

fn config_map(entries: &[(&str, &str)]) -> ConfigMap {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    ConfigMap {
        name: rules().config_map,
        data: entries.iter().map(owned).collect(),
    }
}

/// The state that a plan is computed from.
#[derive(Default)]
struct State {
    nodes: BTreeMap<ObjectName, Arc<Node>>,
    known: KnownAddresses,
    holders: AddressHolders,
}

impl State {
    fn of(nodes: &[Arc<Node>]) -> Self {
        let named = |node: &Arc<Node>| (node.name.clone(), Arc::clone(node));
        Self {
            nodes: nodes.iter().map(named).collect(),
            ..Self::default()
        }
    }

    /// Makes a Node the holder of an address.
    fn held(mut self, address: &str, node: &str) -> Self {
        self.holders.insert(fixture::ip(address), node.into());
        self
    }

    fn plan(&self, config_map: Option<&ConfigMap>, rules: &SteeringRules) -> SteeringPlan {
        let inputs = SteeringInputs {
            nodes: &self.nodes,
            config_map,
            known: &self.known,
            holders: &self.holders,
        };
        plan_steering(inputs, rules)
    }
}

fn plan(nodes: &[Arc<Node>], config_map: Option<&ConfigMap>) -> SteeringPlan {
    State::of(nodes).plan(config_map, &rules())
}

fn targets(plan: &SteeringPlan) -> Vec<String> {
    let describe = |target: &SteeringTarget| {
        let loopback = if target.loopback { " loopback" } else { "" };
        let disputed = if target.is_disputed { " disputed" } else { "" };
        format!("{target}{loopback}{disputed}")
    };
    let mut texts: Vec<_> = plan.targets.values().map(describe).collect();
    texts.sort();
    texts
}

/// Returns the targets for a kubelet at one of a node's addresses.
fn kubelet(node: &str, address: &str) -> [String; 2] {
    [10_250, 10_255].map(|port| format!("{node} ({address}:{port})"))
}

fn problems(plan: &SteeringPlan) -> Vec<String> {
    let describe = |problem: &SteeringProblem| {
        let SteeringProblem { object, text, .. } = problem;
        format!("{}: {object} {text}", problem.reason.label())
    };
    plan.problems.iter().map(describe).collect()
}

#[test]
fn internal_addresses_of_edge_nodes_are_steered() {
    let cases = [
        (
            "all addresses of an edge node are steered, and none of a cloud node",
            vec![
                node("cloud-1", false, &["10.0.0.1"]),
                node("edge-7", true, &["10.1.2.3", "fd00::3"]),
            ],
            vec![
                kubelet("edge-7", "10.1.2.3"),
                kubelet("edge-7", "[fd00::3]"),
            ],
        ),
        (
            "an address in its mapped form is the IPv4 address",
            vec![node("edge-7", true, &["::ffff:10.1.2.3"])],
            vec![kubelet("edge-7", "10.1.2.3")],
        ),
    ];
    for (claim, nodes, wanted) in cases {
        let plan = plan(&nodes, None);

        assert_eq!(targets(&plan), wanted.concat(), "{claim}");
        assert_eq!(problems(&plan), Vec::<String>::new(), "{claim}");
    }
}

#[test]
fn nothing_is_steered_on_an_edge_node() {
    let nodes = [
        node("cloud-1", true, &["10.0.0.1"]),
        node("edge-7", true, &["10.1.2.3"]),
    ];

    assert_eq!(plan(&nodes, None), SteeringPlan::default());
}

#[test]
fn an_address_is_not_steered_without_a_prefix_of_its_family() {
    let node = node("edge-7", true, &["10.1.2.3", "fd00::3"]);
    let rules = SteeringRules {
        families: [true, false],
        ..rules()
    };

    assert_eq!(State::of(&[node]).plan(None, &rules).targets.len(), 2);
}

#[test]
fn a_node_without_a_valid_address_is_a_problem_and_others_are_steered() {
    let of_no_host = "127.0.0.1 fe80::1 169.254.1.1 0.0.0.0 224.0.0.1";
    let nodes = [
        node("edge-1", true, &[]),
        node("edge-2", true, &Vec::from_iter(of_no_host.split(' '))),
        node("edge-3", true, &["10.1.2.3"]),
    ];

    let plan = plan(&nodes, None);

    assert_eq!(targets(&plan).len(), 2);
    assert_eq!(plan.edge_nodes, 3);
    assert_eq!(
        problems(&plan),
        [
            "node_rejected: Node edge-1: status.addresses has no InternalIP, so connects to this node are not \
             steered",
            "node_rejected: Node edge-2: status.addresses 0.0.0.0, 127.0.0.1, 169.254.1.1, 224.0.0.1 and 1 more: \
             loopback, link-local, multicast and unspecified addresses can't be steered",
        ]
    );
}

#[test]
fn every_list_of_the_config_map_adds_ports_and_one_uses_loopback() {
    let config_map = config_map(&[
        ("dnat-ports-pair", "9051=10264, 9052 = 10264"),
        ("http-proxy-ports", "9445, 9100"),
        ("https-proxy-ports", "9443,9443"),
        ("localhost-proxy-ports", "10266, 9100"),
    ]);

    let plan = plan(&[node("edge-7", true, &["10.1.2.3"])], Some(&config_map));

    assert_eq!(
        targets(&plan),
        [
            "edge-7 (10.1.2.3:10250)",
            "edge-7 (10.1.2.3:10255)",
            "edge-7 (10.1.2.3:10266) loopback",
            "edge-7 (10.1.2.3:9051)",
            "edge-7 (10.1.2.3:9052)",
            "edge-7 (10.1.2.3:9100) loopback",
            "edge-7 (10.1.2.3:9443)",
            "edge-7 (10.1.2.3:9445)",
        ]
    );
    assert_eq!(problems(&plan), Vec::<String>::new());
}

#[test]
fn an_invalid_entry_is_a_problem_and_others_are_steered() {
    let pairs = "9051=10263,9052,a=10264,9053=10264=1,9054=10264";
    let config_map = config_map(&[
        ("dnat-ports-pair", pairs),
        ("http-proxy-ports", "0,65536,x,,+80,9100, 9443"),
        ("https-proxy-ports", "9443"),
        ("localhost-proxy-ports", "-1"),
    ]);

    let plan = plan(&[node("edge-7", true, &["10.1.2.3"])], Some(&config_map));

    let ports: BTreeSet<u16> = plan.targets.values().map(|target| target.port).collect();
    assert_eq!(ports, BTreeSet::from([9054, 9100, 9443, 10250, 10255]));
    let object = "ConfigMap kube-system/yurt-tunnel-server-cfg: data";
    let text = problems(&plan).join("\n");
    for problem in [
        "[dnat-ports-pair] `9051=10263` does not end with 10264",
        "[dnat-ports-pair] `9052` is not a pair of ports, for example 9100=10264",
        "[dnat-ports-pair] `a` is not a port",
        "[dnat-ports-pair] `10264=1` is not a port",
        "[http-proxy-ports] `0` is not a port from 1 to 65535",
        "[http-proxy-ports] `65536` is not a port",
        "[http-proxy-ports] `x` is not a port",
        "[http-proxy-ports] `+80` is not a port",
        "[http-proxy-ports] 9443 is in https-proxy-ports, too",
        "[localhost-proxy-ports] `-1` is not a port",
    ] {
        let problem = format!("ports_rejected: {object}{problem}");
        assert!(text.contains(&problem), "{problem}:\n{text}");
    }
    assert_eq!(plan.problems.len(), 10);
}
