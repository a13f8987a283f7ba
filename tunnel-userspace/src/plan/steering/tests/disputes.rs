//! Addresses that several Nodes have.

use super::*;

/// Returns the targets of a kubelet whose address is disputed.
fn disputed(node: &str, address: &str) -> [String; 2] {
    kubelet(node, address).map(|target| format!("{target} disputed"))
}

/// Returns a problem with an address of a Node.
fn dispute(node: &str, text: &str) -> String {
    format!("address_disputed: Node {node}: status.addresses {text}")
}

#[test]
fn the_edge_node_that_had_an_address_first_keeps_it_and_the_problem_names_both() {
    let nodes = [
        node("edge-1", true, &["10.1.2.3", "10.1.2.4"]),
        node("edge-9", true, &["10.1.2.3"]),
    ];

    let plan = State::of(&nodes)
        .held("10.1.2.3", "edge-9")
        .plan(None, &rules());

    let wanted = [kubelet("edge-1", "10.1.2.4"), kubelet("edge-9", "10.1.2.3")];
    assert_eq!(targets(&plan), wanted.concat());
    assert_eq!(
        problems(&plan),
        [
            dispute(
                "edge-1",
                "10.1.2.3 is also an address of edge node edge-9, which had it first and keeps it"
            ),
            dispute(
                "edge-9",
                "10.1.2.3 is also claimed by edge node edge-1; this Node had it first and keeps it"
            ),
        ]
    );
    assert_eq!(plan.owners[&fixture::ip("10.1.2.3")], "edge-9".into());
}

#[test]
fn nobody_gets_an_address_if_it_is_unknown_who_had_it_first() {
    let internal = node("edge-1", true, &["10.1.2.3"]);
    let mut external = node("edge-9", true, &["10.1.2.9"]);
    Arc::make_mut(&mut external).other_ips = fixture::ips(&["10.1.2.3"]);
    for other in [
        node("edge-9", true, &["::ffff:10.1.2.3", "10.1.2.9"]),
        external,
    ] {
        let plan = plan(&[Arc::clone(&internal), other], None);

        let wanted = [
            disputed("edge-1", "10.1.2.3"),
            kubelet("edge-9", "10.1.2.9"),
        ];
        assert_eq!(targets(&plan), wanted.concat());
        let refused = "it is unknown which of them had it first, so connections to it are refused";
        assert_eq!(
            problems(&plan),
            [
                dispute(
                    "edge-1",
                    &format!("10.1.2.3 is also an address of edge node edge-9; {refused}")
                ),
                dispute(
                    "edge-9",
                    &format!("10.1.2.3 is also an address of edge node edge-1; {refused}")
                ),
            ]
        );
        assert!(!plan.owners.contains_key(&fixture::ip("10.1.2.3")));
    }
}

#[test]
fn an_address_of_a_cloud_node_is_never_steered() {
    let mut cloud = node("cloud-2", false, &["10.1.2.3"]);
    let claimant = node("edge-7", true, &["10.1.2.3"]);
    for other_type in [false, true] {
        if other_type {
            let cloud = Arc::make_mut(&mut cloud);
            cloud.other_ips = std::mem::take(&mut cloud.internal_ips);
        }
        let nodes = [Arc::clone(&claimant), Arc::clone(&cloud)];

        let plan = State::of(&nodes)
            .held("10.1.2.3", "edge-7")
            .plan(None, &rules());

        assert_eq!(targets(&plan), Vec::<String>::new());
        assert_eq!(
            problems(&plan),
            [
                dispute(
                    "cloud-2",
                    "10.1.2.3 is also claimed by edge node edge-7; this Node takes precedence, because it is a \
                     cloud node"
                ),
                dispute(
                    "edge-7",
                    "10.1.2.3 is also an address of cloud node cloud-2, which takes precedence"
                ),
            ]
        );
    }
}

#[test]
fn an_address_is_kept_for_a_deleted_node() {
    let claimant = node("edge-7", true, &["10.1.2.3"]);

    let plan = State::of(&[claimant])
        .held("10.1.2.3", "edge-1")
        .plan(None, &rules());

    assert_eq!(targets(&plan), disputed("edge-7", "10.1.2.3"));
    assert!(plan.has_reserved && plan.owners.is_empty());
    let problems = problems(&plan).concat();
    let kept = "10.1.2.3 was an address of edge node edge-1, whose Node was deleted";
    assert!(problems.contains(&dispute("edge-7", kept)), "{problems}");
}

#[test]
fn an_address_is_kept_for_a_node_that_no_longer_lists_it_and_the_problem_names_both() {
    let nodes = [
        node("edge-1", true, &[]),
        node("edge-7", true, &["10.1.2.3"]),
    ];

    let plan = State::of(&nodes)
        .held("10.1.2.3", "edge-1")
        .plan(None, &rules());

    assert_eq!(targets(&plan), disputed("edge-7", "10.1.2.3"));
    assert!(plan.has_reserved && plan.owners.is_empty());
    let problems = problems(&plan).concat();
    for (node, kept) in [
        (
            "edge-7",
            "10.1.2.3 was an address of edge node edge-1, which no longer lists it; it is kept for that node",
        ),
        (
            "edge-1",
            "10.1.2.3 is claimed by edge node edge-7; this Node had it first, but no longer lists it",
        ),
    ] {
        assert!(problems.contains(&dispute(node, kept)), "{problems}");
    }
}

#[test]
fn addresses_of_all_types_count_towards_one_limit() {
    let victims = ["10.1.2.1", "10.1.2.2", "10.1.2.3", "10.1.2.4", "10.1.2.5"];
    let victims = victims.map(|address| node(&format!("edge-{}", &address[7..]), true, &[address]));
    let mut attacker = node("edge-9", true, &["10.1.2.9", "10.1.2.10"]);
    Arc::make_mut(&mut attacker).other_ips =
        fixture::ips(&["10.1.2.10", "10.1.2.1", "10.1.2.2", "10.1.2.3", "10.1.2.4"]);
    let nodes: Vec<_> = victims.into_iter().chain([attacker]).collect();

    let plan = plan(&nodes, None);

    let targets = targets(&plan);
    let refused: Vec<_> = targets
        .iter()
        .filter(|it| it.contains("disputed"))
        .collect();
    assert_eq!(
        refused.len(),
        4,
        "two addresses with two ports each: {refused:?}"
    );
}

#[test]
fn only_the_first_addresses_of_a_node_count_as_claims_and_a_problem_names_few() {
    let all: Vec<_> = (1..=200).map(|last| format!("10.1.2.{last}")).collect();
    let all: Vec<_> = all.iter().map(String::as_str).collect();
    let victims = [
        node("edge-1", true, &["10.1.2.1"]),
        node("edge-2", true, &["10.1.2.200"]),
    ];
    let attackers = (3..=7).map(|number| node(&format!("edge-{number}"), true, &all));
    let nodes: Vec<_> = victims.into_iter().chain(attackers).collect();

    let plan = State::of(&nodes)
        .held("10.1.2.1", "edge-1")
        .plan(None, &rules());

    let targets = targets(&plan);
    for target in [
        kubelet("edge-1", "10.1.2.1"),
        kubelet("edge-2", "10.1.2.200"),
    ]
    .concat()
    {
        assert!(
            targets.contains(&target),
            "{target} is missing: {targets:?}"
        );
    }
    let text = problems(&plan).join("\n");
    assert!(
        text.contains("claimed by edge nodes edge-3, edge-4, edge-5 and 2 more"),
        "{text}"
    );
    assert!(
        text.contains("10.1.2.5, 10.1.2.6, 10.1.2.7, 10.1.2.8 and 192 more: at most 4"),
        "{text}"
    );
    assert!(plan.problems.len() < 50, "{text}");
}
