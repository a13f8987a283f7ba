use std::slice::from_ref;

use rtnetlink::packet_route::route::RouteScope;

use super::*;

const LINK: u32 = 7;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn route(to: &str, protocol: RouteProtocol, more: &[RouteAttribute]) -> RouteMessage {
    let address = ip(to);
    let mut route = RouteMessage::default();
    route.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
    route.header.protocol = protocol;
    route.header.kind = RouteType::Unicast;
    route.header.scope = RouteScope::Link;
    route.attributes = vec![
        RouteAttribute::Destination(address.into()),
        RouteAttribute::Oif(LINK),
    ];
    route.attributes.extend_from_slice(more);
    route
}

#[test]
fn only_a_program_on_this_node_adds_a_host_route_to_a_pod() {
    let gateway = RouteAttribute::Gateway(ip("10.244.1.1").into());
    let metric = RouteAttribute::Priority;
    let (boot, kernel) = (RouteProtocol::Boot, RouteProtocol::Kernel);
    for (claim, route, wanted) in [
        ("most CNI plugins", route("10.244.1.5", boot, &[]), true),
        ("Cilium", route("10.244.1.5", kernel, &[]), true),
        (
            "Cilium with IPv6",
            route("fd00:244::5", kernel, &[metric(1024)]),
            true,
        ),
        (
            "router advertisement",
            route("fd00:244::5", kernel, &[metric(256)]),
            false,
        ),
        (
            "route information",
            route("fd00:244::5", RouteProtocol::Ra, &[]),
            false,
        ),
        ("DHCP", route("10.244.1.5", RouteProtocol::Dhcp, &[]), false),
        (
            "redirect",
            route("10.244.1.5", RouteProtocol::IcmpRedirect, &[]),
            false,
        ),
        (
            "via a gateway",
            route("10.244.1.5", boot, &[gateway]),
            false,
        ),
        ("link-local", route("169.254.1.1", boot, &[]), false),
        ("link-local IPv6", route("fe80::1", boot, &[]), false),
    ] {
        assert_eq!(host_route(&route, LINK).is_some(), wanted, "{claim}");
        assert_eq!(host_route(&route, LINK + 1), None, "{claim}: another link");
    }
    let mut of_this_node = route("10.244.1.1", kernel, &[]);
    of_this_node.header.kind = RouteType::Local;
    assert_eq!(host_route(&of_this_node, LINK), None);
    let mut subnet = route("10.244.1.0", boot, &[]);
    subnet.header.destination_prefix_length = 24;
    assert_eq!(host_route(&subnet, LINK), None);
}

#[test]
fn single_addresses_and_the_link_local_ones_of_every_link_have_no_subnet() {
    let subnet = |address: &str, length, flags| {
        let mut message = AddressMessage::default();
        message.header.prefix_len = length;
        message.header.flags = flags;
        message.attributes = vec![AddressAttribute::Address(ip(address))];
        subnet_of(&message)
    };
    let permanent = AddressHeaderFlags::Permanent;
    let found = subnet("10.244.1.1", 24, permanent).expect("a subnet");
    assert_eq!(found.prefix.to_string(), "10.244.1.0/24");
    assert!(found.is_permanent);
    let found = subnet("fd00:244::1", 64, AddressHeaderFlags::empty()).expect("a subnet");
    assert!(!found.is_permanent);
    assert_eq!(subnet("10.244.1.1", 32, permanent), None);
    assert_eq!(subnet("fd00:244::1", 128, permanent), None);
    assert_eq!(subnet("fe80::1", 64, permanent), None);
    assert!(subnet("169.254.7.7", 16, permanent).is_some());
}

/// An address of this node: the index of its link, the address, and its flags.
type OwnAddress<'a> = (u32, &'a str, AddressHeaderFlags);

/// Returns the addresses that stand for clients on links, of a node with these IPv6 addresses and routes.
fn addresses_for<const COUNT: usize>(
    links: [u32; COUNT],
    addresses: &[OwnAddress<'_>],
    routes: Vec<RouteMessage>,
) -> [Option<IpAddr>; COUNT] {
    let message = |(link, address, flags): &OwnAddress<'_>| {
        let mut message = AddressMessage::default();
        message.header.index = *link;
        message.header.scope = AddressScope::Universe;
        message.header.flags = *flags;
        message.attributes = vec![AddressAttribute::Address(ip(address))];
        message
    };
    let addresses = Vec::from_iter(addresses.iter().map(message));
    let snapshot = Snapshot::of(&[], &addresses, routes);
    let found = snapshot.client_addresses(links.into_iter(), &[]);
    links.map(|link| found[&link].v6.map(IpAddr::V6))
}

/// Returns the addresses that stand for clients on the links 7 and 8, of a node with these IPv6 addresses.
fn client_addresses(addresses: &[OwnAddress<'_>]) -> [Option<IpAddr>; 2] {
    addresses_for([LINK, LINK + 1], addresses, Vec::new())
}

#[test]
fn an_address_stands_for_clients_only_if_ipv6_can_use_it() {
    let permanent = AddressHeaderFlags::Permanent;
    let tentative = permanent | AddressHeaderFlags::Tentative;
    let duplicate = tentative | AddressHeaderFlags::Dadfailed;
    let optimistic = tentative | AddressHeaderFlags::Optimistic;
    let deprecated = AddressHeaderFlags::Deprecated;
    let (first, second, other) = ("fd00:7::1", "fd00:7::2", "fd00:8::1");
    let both = |address: &str| [Some(ip(address)); 2];

    for unusable in [tentative, duplicate] {
        let only = client_addresses(&[(LINK, first, unusable)]);
        assert_eq!(only, [None; 2], "{unusable:?}");
        let usable = [(LINK, first, unusable), (LINK, second, permanent)];
        assert_eq!(client_addresses(&usable), both(second), "{unusable:?}");
    }
    for last_resort in [deprecated, optimistic] {
        let only = client_addresses(&[(LINK, first, last_resort)]);
        assert_eq!(only, both(first), "{last_resort:?}");
        let usable = [(LINK, first, last_resort), (LINK + 1, other, permanent)];
        assert_eq!(client_addresses(&usable), both(other), "{last_resort:?}");
    }
    let each = [(LINK, first, permanent), (LINK + 1, other, permanent)];
    assert_eq!(
        client_addresses(&each),
        [first, other].map(|it| Some(ip(it)))
    );
}

/// Returns a default route in the table `main` over a link.
fn default_route(via: &str, link: u32, more: &[RouteAttribute]) -> RouteMessage {
    let via = ip(via);
    let mut route = RouteMessage::default();
    route.header.address_family = if via.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    route.header.table = RouteHeader::RT_TABLE_MAIN;
    route.header.kind = RouteType::Unicast;
    route.attributes = vec![
        RouteAttribute::Gateway(via.into()),
        RouteAttribute::Oif(link),
    ];
    route.attributes.extend_from_slice(more);
    route
}

/// Returns a route in another table. The attribute, if any, takes precedence over the header.
fn in_table(mut route: RouteMessage, header: u8, attribute: Option<u32>) -> RouteMessage {
    route.header.table = header;
    let table = attribute.map(RouteAttribute::Table);
    route.attributes.extend(table);
    route
}

#[test]
fn the_default_link_is_that_of_the_main_table_with_the_lowest_metric() {
    for (gateway, is_v4) in [("192.0.2.1", true), ("fd00:1::1", false)] {
        let other = |link| default_route(gateway, link, &[]);
        let with_metric =
            |link, metric| default_route(gateway, link, &[RouteAttribute::Priority(metric)]);
        let mut without_gateway = with_metric(5, 1);
        without_gateway.attributes = vec![RouteAttribute::Oif(5)];
        let mut blackhole = other(5);
        blackhole.header.kind = RouteType::BlackHole;
        for (claim, routes, wanted) in [
            ("no route", vec![], None),
            ("one route", vec![with_metric(6, 100)], Some(6)),
            ("another table", vec![in_table(other(5), 100, None)], None),
            (
                "another table first",
                vec![in_table(other(5), 100, None), with_metric(6, 100)],
                Some(6),
            ),
            (
                "another table with a number above 255",
                vec![in_table(other(5), 252, Some(1000)), with_metric(6, 100)],
                Some(6),
            ),
            (
                "the table main in an attribute",
                vec![in_table(other(5), 0, Some(254))],
                Some(5),
            ),
            (
                "a lower metric",
                vec![
                    with_metric(5, 200),
                    with_metric(6, 100),
                    with_metric(7, 300),
                ],
                Some(6),
            ),
            ("the metric 0", vec![with_metric(5, 100), other(6)], Some(6)),
            (
                "equal metrics",
                vec![with_metric(6, 100), with_metric(5, 100)],
                Some(6),
            ),
            (
                "a route without a gateway",
                vec![without_gateway, with_metric(6, 100)],
                Some(6),
            ),
            ("a blackhole", vec![blackhole, with_metric(6, 100)], Some(6)),
        ] {
            assert_eq!(default_link(&routes, is_v4), wanted, "{claim}");
            assert_eq!(default_link(&routes, !is_v4), None, "{claim}");
        }
    }
}

#[test]
fn own_addresses_of_a_link_come_first_then_those_of_the_default_link_and_deprecated_ones_last() {
    let links = [LINK, LINK + 1, LINK + 2];
    let [.., default] = links;
    let flags = [
        AddressHeaderFlags::Permanent,
        AddressHeaderFlags::Deprecated,
    ];
    let places = links.map(|link| flags.map(|flags| (link, flags))).concat();
    // All ways to distribute three addresses.
    for way in 0..places.len().pow(3) {
        let address = |name: &'static str, divisor: usize| {
            let (link, flags) = places[way / divisor % places.len()];
            (link, name, flags)
        };
        let addresses = [
            address("fd00::1", 1),
            address("fd00::2", places.len()),
            address("fd00::3", places.len().pow(2)),
        ];

        let routes = vec![default_route("fd00:1::1", default, &[])];
        let found = addresses_for(links, &addresses, routes);

        let wanted = links.map(|link| {
            let mut ranked = addresses;
            ranked.sort_by_key(|(at, _, flags)| {
                let is_deprecated = flags.contains(AddressHeaderFlags::Deprecated);
                (is_deprecated, *at != link, *at != default)
            });
            ranked.first().map(|(_, address, _)| ip(address))
        });
        assert_eq!(found, wanted, "{addresses:?}");
    }
}

/// Returns a link with a name, of a kind if it has one.
fn link(index: u32, kind: Option<InfoKind>, more: &[LinkAttribute]) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.attributes = vec![LinkAttribute::IfName(format!("link{index}"))];
    let kind = kind.map(|kind| LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]));
    link.attributes.extend(kind);
    link.attributes.extend_from_slice(more);
    link
}

/// Returns a node with a link of each kind, with addresses and host routes.
fn node_with_each_kind_of_link() -> Snapshot {
    let elsewhere = LinkAttribute::LinkNetNsId(0);
    let port = LinkAttribute::Controller(4);
    let mut loopback = link(1, None, &[]);
    loopback.header.flags = LinkFlags::Loopback;
    let links = [
        loopback,
        link(2, None, &[]),
        link(3, Some(InfoKind::Veth), from_ref(&elsewhere)),
        link(4, Some(InfoKind::Bridge), &[]),
        link(5, Some(InfoKind::Netkit), &[elsewhere.clone(), port]),
        link(6, Some(InfoKind::Veth), &[]),
        link(7, Some(InfoKind::Veth), from_ref(&elsewhere)),
        link(8, Some(InfoKind::Vrf), &[]),
        link(9, Some(InfoKind::Other("openvswitch".to_owned())), &[]),
        link(10, None, &[LinkAttribute::Controller(8)]),
    ];
    let addresses = [
        (4, "10.244.1.1", 24),
        (1, "127.0.0.1", 8),
        (2, "192.0.2.2", 24),
        (3, "169.254.1.1", 32),
        (2, "fd00:1::2", 64),
    ];
    let addresses = addresses.map(|(link, address, length)| {
        let mut message = AddressMessage::default();
        message.header.index = link;
        message.header.prefix_len = length;
        message.attributes = vec![AddressAttribute::Address(ip(address))];
        message
    });
    let routes = [
        (3, "10.244.1.5"),
        (2, "192.0.2.9"),
        (4, "10.244.1.6"),
        (4, "10.244.1.1"),
        (5, "10.244.1.7"),
        (6, "10.244.1.8"),
        (3, "fd00:244::5"),
        (11, "10.244.1.9"),
    ];
    let routes = routes.map(|(link, to)| {
        let mut route = route(to, RouteProtocol::Boot, &[]);
        route.attributes = vec![
            RouteAttribute::Destination(ip(to).into()),
            RouteAttribute::Oif(link),
        ];
        route
    });
    Snapshot::of(&links, &addresses, Vec::from(routes))
}

#[test]
fn each_link_has_its_own_subnets_and_host_routes() {
    let snapshot = node_with_each_kind_of_link();
    let wanted = [
        (LinkKind::Loopback, None, "127.0.0.0/8", ""),
        (LinkKind::Other, None, "192.0.2.0/24 fd00:1::/64", ""),
        (LinkKind::Pair, None, "", "10.244.1.5 fd00:244::5"),
        (LinkKind::Bridge, None, "10.244.1.0/24", "10.244.1.6"),
        (LinkKind::Pair, Some(4), "", "10.244.1.7"),
        (LinkKind::Other, None, "", ""),
        (LinkKind::Pair, None, "", ""),
        (LinkKind::Vrf, None, "", ""),
        (LinkKind::OpenVSwitch, None, "", ""),
        (LinkKind::Other, Some(8), "", ""),
    ];
    let wanted = (1..).zip(wanted);
    let wanted = wanted.map(|(index, (kind, bridge, subnets, reached))| Link {
        index,
        name: format!("link{index}"),
        kind,
        bridge,
        subnets: subnets
            .split_whitespace()
            .map(|prefix| Subnet {
                prefix: prefix.parse().expect("a prefix"),
                is_permanent: false,
            })
            .collect(),
        reached: reached.split_whitespace().map(ip).collect(),
    });
    assert_eq!(snapshot.links, Vec::from_iter(wanted));
    let ports = (1..=11).filter(|index| snapshot.has_master(*index));
    assert_eq!(Vec::from_iter(ports), [5, 10]);
}

#[test]
fn each_network_has_the_name_of_its_link_if_the_link_is_known() {
    let snapshot = node_with_each_kind_of_link();

    let networks = snapshot.networks(&BTreeSet::from([3, 11]));

    for (address, wanted) in [
        ("10.244.1.5", Some(("link3", true))),
        ("10.244.1.6", Some(("link4", false))),
        ("10.244.1.9", Some(("", true))),
        ("fd00:244::5", Some(("link3", true))),
        ("fd00:244::6", None),
    ] {
        let found = networks.find(ip(address));
        let found = found.map(|network| (&*network.link, network.leads_to_pods));
        assert_eq!(found, wanted, "{address}");
    }
}
