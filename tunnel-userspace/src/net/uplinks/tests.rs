use std::slice::from_ref;

use super::*;

fn prefix(text: &str) -> Prefix {
    text.parse().expect("a prefix")
}

fn prefixes(texts: &str) -> Vec<Prefix> {
    texts.split_whitespace().map(prefix).collect()
}

fn link(index: u32, kind: LinkKind, bridge: Option<u32>) -> Link {
    Link {
        index,
        name: format!("link{index}"),
        kind,
        bridge,
        subnets: Vec::new(),
        reached: Vec::new(),
    }
}

/// Returns a pair with host routes, and with permanent addresses in subnets.
fn pair(index: u32, reached: &str, subnets: &str) -> Link {
    let permanent = |prefix| Subnet {
        prefix,
        is_permanent: true,
    };
    Link {
        subnets: prefixes(subnets).into_iter().map(permanent).collect(),
        reached: reached
            .split_whitespace()
            .map(|address| address.parse().expect("an address"))
            .collect(),
        ..link(index, LinkKind::Pair, None)
    }
}

const NONE: &BTreeSet<u32> = &BTreeSet::new();

/// Classifies a link, and returns `u` for an uplink, `p` for a pod link, and `-` for neither.
fn letter(link: &Link, ranges: &PodRanges, rules: impl Fn(Rules<'_>) -> ClassifiedLinks) -> char {
    let classified = rules(Rules {
        uplinks: &[],
        pod_links: &[],
        ranges,
        gateways: NONE,
        former_uplinks: NONE,
    });
    if classified.uplinks.contains_key(&link.index) {
        assert!(!classified.inside_links.contains(&link.index));
        'u'
    } else if classified.inside_links.contains(&link.index) {
        'p'
    } else {
        '-'
    }
}

#[test]
fn a_pair_leads_to_a_pod_only_if_a_pod_address_is_reached_over_it() {
    let configured = PodRanges {
        configured: prefixes("10.244.0.0/16 fd00:244::/48"),
        of_node: prefixes("10.244.1.0/24"),
    };
    let of_node = PodRanges {
        configured: Vec::new(),
        of_node: prefixes("10.244.1.0/24"),
    };
    let unknown = PodRanges::default();
    for (claim, reached, subnets, wanted) in [
        (
            "no route yet, or Cilium without endpoint routes",
            "",
            "",
            "--p",
        ),
        ("a pod's host route", "10.244.1.5", "", "ppp"),
        ("a pod's IPv6 host route", "fd00:244::5", "", "ppp"),
        ("Calico with its own ranges", "192.168.3.4", "", "-pp"),
        ("a second NIC", "", "172.18.0.0/16", "uuu"),
        ("a second NIC with IPv6", "", "2001:db8::/64", "uuu"),
        (
            "a second NIC with a host route",
            "172.18.0.9",
            "172.18.0.0/16",
            "uuu",
        ),
        (
            "a second NIC with a pod's host route",
            "10.244.1.5",
            "172.18.0.0/16",
            "uuu",
        ),
        (
            "a veth with the node's address for pods",
            "",
            "10.244.1.0/24",
            "ppu",
        ),
        (
            "a subnet that contains the pod ranges",
            "",
            "10.0.0.0/8",
            "uuu",
        ),
    ] {
        let link = pair(2, reached, subnets);
        let found = [&configured, &of_node, &unknown]
            .map(|ranges| letter(&link, ranges, |rules| classify(from_ref(&link), rules)));
        assert_eq!(String::from_iter(found), wanted, "{claim}");
    }
}

#[test]
fn an_address_that_a_neighbour_chose_proves_no_pod() {
    let ranges = PodRanges {
        configured: prefixes("fd00:244::/48"),
        of_node: Vec::new(),
    };
    let mut link = pair(2, "", "fd00:244::/64");
    assert_eq!(
        letter(&link, &ranges, |rules| classify(from_ref(&link), rules)),
        'p'
    );

    link.subnets[0].is_permanent = false;

    assert_eq!(
        letter(&link, &ranges, |rules| classify(from_ref(&link), rules)),
        '-'
    );
}

#[test]
fn a_bridge_leads_to_pods_if_it_has_an_address_for_pods() {
    let ranges = PodRanges {
        configured: Vec::new(),
        of_node: prefixes("10.244.1.0/24"),
    };
    let bridge = |subnets| Link {
        kind: LinkKind::Bridge,
        ..pair(4, "", subnets)
    };
    let pod_port = link(5, LinkKind::Pair, Some(4));
    let other_port = link(6, LinkKind::Other, Some(4));
    for (claim, subnets, ports, wanted) in [
        ("cni0", "10.244.1.0/24", vec![pod_port.clone()], "pp"),
        (
            "minikube's bridge, with the range of all nodes' pods",
            "10.244.0.0/16",
            vec![pod_port.clone()],
            "pp",
        ),
        (
            "cni0 with an uplink",
            "10.244.1.0/24",
            vec![pod_port.clone(), other_port],
            "uu",
        ),
        (
            "a bridge with the node's NIC",
            "172.18.0.0/16",
            vec![pod_port.clone()],
            "up",
        ),
        (
            "a bridge without an address",
            "",
            vec![pod_port.clone()],
            "-p",
        ),
        ("an empty bridge", "", vec![], "-p"),
    ] {
        let bridge = bridge(subnets);
        let links: Vec<_> = iter::once(bridge.clone()).chain(ports).collect();
        let found = [&ranges, &PodRanges::default()]
            .map(|ranges| letter(&bridge, ranges, |rules| classify(&links, rules)));
        assert_eq!(String::from_iter(found), wanted, "{claim}");
    }
    // The port has the same destination as the bridge, but is not listed.
    let links = [bridge("10.244.1.0/24"), pod_port];
    let found = classify(
        &links,
        Rules {
            uplinks: &[],
            pod_links: &[],
            ranges: &ranges,
            gateways: NONE,
            former_uplinks: NONE,
        },
    );
    assert_eq!(found.inside_links, BTreeSet::from([4, 5]));
    assert_eq!(found.pod_links.into_values().collect::<Vec<_>>(), ["link4"]);
}

#[test]
fn loopback_and_links_to_pods_are_inside_and_all_others_are_uplinks() {
    let all_links = [
        link(1, LinkKind::Loopback, None),
        link(2, LinkKind::Other, None),
        pair(3, "10.244.1.5", ""),
        Link {
            kind: LinkKind::Bridge,
            ..pair(4, "", "10.244.1.0/24")
        },
        link(5, LinkKind::Pair, Some(4)),
        link(6, LinkKind::Other, Some(4)),
        link(7, LinkKind::Pair, None),
    ];
    let ranges = PodRanges {
        configured: Vec::new(),
        of_node: prefixes("10.244.1.0/24"),
    };
    let rows: [(_, [&[u32]; 5]); 8] = [
        (
            "loopback and a pair",
            [&[1, 2, 3], &[2], &[], &[2], &[1, 3]],
        ),
        ("a pair before a gateway", [&[3, 5], &[3], &[], &[3], &[]]),
        (
            "a former uplink without a pod",
            [&[1, 7], &[], &[7], &[7], &[1]],
        ),
        (
            "a former uplink that got a pod's route",
            [&[1, 3], &[], &[3], &[], &[1, 3]],
        ),
        ("a bridge of pods", [&[4, 5], &[], &[], &[], &[4, 5]]),
        (
            "a bridge with a way out",
            [&[4, 5, 6], &[], &[], &[4, 6], &[]],
        ),
        ("a bridge at a gateway", [&[4, 5], &[4], &[], &[4, 5], &[]]),
        (
            "a pair without a pod's route",
            [&[1, 7], &[], &[], &[], &[1]],
        ),
    ];
    for (claim, [there, gateways, former, uplinks, inside]) in rows {
        let set = |indices: &[u32]| BTreeSet::from_iter(indices.iter().copied());
        let is_there = |link: &&Link| there.contains(&link.index);
        let links: Vec<_> = all_links.iter().filter(is_there).cloned().collect();

        let found = classify(
            &links,
            Rules {
                uplinks: &[],
                pod_links: &[],
                ranges: &ranges,
                gateways: &set(gateways),
                former_uplinks: &set(former),
            },
        );

        let found_uplinks: Vec<_> = found.uplinks.into_keys().collect();
        assert_eq!(found_uplinks, uplinks, "{claim}");
        assert_eq!(found.inside_links, set(inside), "{claim}");
    }
}

#[test]
fn an_uplink_that_loses_its_addresses_is_no_pod_link_even_if_the_ranges_are_unknown() {
    let nic = pair(3, "", "172.18.0.0/16");
    let unknown = PodRanges::default();
    assert_eq!(
        letter(&nic, &unknown, |rules| classify(from_ref(&nic), rules)),
        'u'
    );

    let nic = pair(3, "", "");
    let former = BTreeSet::from([3]);
    let found = letter(&nic, &unknown, |rules| {
        let rules = Rules {
            former_uplinks: &former,
            ..rules
        };
        classify(from_ref(&nic), rules)
    });

    assert_eq!(found, 'u');
}

#[test]
fn the_config_overrides_the_detection() {
    let links = [
        link(1, LinkKind::Loopback, None),
        link(2, LinkKind::Other, None),
        pair(3, "10.244.1.5", ""),
        link(4, LinkKind::Pair, None),
    ];
    let ranges = PodRanges {
        configured: prefixes("10.244.0.0/16"),
        of_node: Vec::new(),
    };
    let names = |names: &[&str]| Vec::from_iter(names.iter().map(|name| (*name).to_owned()));
    let configured = |uplinks: &[&str], pod_links: &[&str]| {
        classify(
            &links,
            Rules {
                uplinks: &names(uplinks),
                pod_links: &names(pod_links),
                ranges: &ranges,
                gateways: NONE,
                former_uplinks: &BTreeSet::from([4]),
            },
        )
    };

    let found = configured(&["link3"], &[]);
    assert_eq!(found.uplinks, BTreeMap::from([(3, "link3".to_owned())]));
    assert_eq!(found.inside_links, BTreeSet::from([1, 2, 4]));
    assert_eq!(found.proven_pod_links, BTreeSet::new());
    let found = configured(&["link2"], &["link4"]);
    assert_eq!(found.inside_links, BTreeSet::from([1, 3, 4]));
    assert_eq!(found.proven_pod_links, BTreeSet::from([3, 4]));

    // While link9 is missing, link2 may be link9 under another name, so it is neither an uplink nor a pod link.
    let found = configured(&["link3", "link9"], &[]);
    assert_eq!(found.missing.as_deref(), Some("link9"));
    assert_eq!(found.uplinks, BTreeMap::from([(3, "link3".to_owned())]));
    assert_eq!(found.inside_links, BTreeSet::from([1]));

    // A link that is named leads to pods, although another kind of link leads outside, and although it was an uplink.
    for entry in ["link2", "link4"] {
        let found = configured(&[], &[entry]);
        assert!(
            found.pod_links.values().any(|name| name == entry),
            "{found:?}"
        );
        assert!(
            !found.uplinks.values().any(|name| name == entry),
            "{found:?}"
        );
    }
    let found = configured(&[], &["lin*"]);
    assert_eq!(found.inside_links, BTreeSet::from([1, 2, 3, 4]));
    assert_eq!(
        configured(&[], &["ink*"]).inside_links,
        BTreeSet::from([1, 3])
    );
}

#[test]
fn ports_without_programs_have_a_warning_if_the_links_that_their_packets_arrive_on_have_none_either()
 {
    let links = [
        link(1, LinkKind::Other, Some(2)),
        link(2, LinkKind::Other, Some(3)),
        link(3, LinkKind::Bridge, None),
        link(4, LinkKind::Other, Some(5)),
        link(5, LinkKind::OpenVSwitch, None),
        link(6, LinkKind::Other, Some(7)),
        link(7, LinkKind::Vrf, None),
        link(8, LinkKind::Other, None),
        link(9, LinkKind::Other, Some(99)),
    ];
    let names = |names: &[&str]| Vec::from_iter(names.iter().map(|name| (*name).to_owned()));
    let port = |port, master| {
        format!(
            "packets on {port} are not translated, because it is a port of {master}; service.uplinks should name {master}"
        )
    };
    let vrf = "packets on link6 are not translated, because it is in the VRF link7".to_owned();
    for (uplinks, pod_links, wanted) in [
        (&[][..], &[][..], vec![vrf.clone()]),
        (&[], &["link3"], vec![vrf.clone()]),
        (&["link1", "link8"], &[], vec![port("link1", "link3")]),
        (&["link1", "link2"], &[], vec![port("link2", "link3")]),
        (&["link1", "link3"], &[], vec![]),
        (&["link1"], &["link3"], vec![]),
        (&["link1", "gone"], &[], vec![]),
        (&["link4", "link9"], &[], vec![]),
        (&["link6", "link7"], &[], vec![vrf]),
    ] {
        let classified = classify(
            &links,
            Rules {
                uplinks: &names(uplinks),
                pod_links: &names(pod_links),
                ranges: &PodRanges::default(),
                gateways: NONE,
                former_uplinks: NONE,
            },
        );
        assert_eq!(
            classified.port_warnings, wanted,
            "{uplinks:?} {pod_links:?}"
        );
    }
}
