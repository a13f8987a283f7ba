//! Problems with steering that become Events.

use super::*;
use crate::plan::SteeringProblem;

#[test]
fn each_node_of_a_dispute_has_a_warning_and_an_unconfirmed_address_has_none() {
    let reconciler = adopt_with(Memory::new(ROOMY), settings());
    let problem = |reason, node: &str| SteeringProblem {
        reason,
        node: Some(ObjectName::new("", node)),
        object: format!("Node {node}: status.addresses"),
        text: "10.1.2.3 is an address".to_owned(),
    };
    let problems = [
        problem(Reason::AddressDisputed, "edge-1"),
        problem(Reason::AddressDisputed, "edge-9"),
        problem(Reason::NodeRejected, "edge-3"),
        problem(Reason::AddressUnconfirmed, "edge-4"),
    ];

    let warnings = reconciler.warnings(&BTreeSet::from(problems));

    let mut nodes: Vec<_> = warnings
        .iter()
        .map(|warning| (&*warning.regarding.name.name, warning.reason))
        .collect();
    nodes.sort();
    assert_eq!(
        nodes,
        [
            ("edge-1", Reason::AddressDisputed),
            ("edge-3", Reason::NodeRejected),
            ("edge-9", Reason::AddressDisputed),
        ]
    );
}
