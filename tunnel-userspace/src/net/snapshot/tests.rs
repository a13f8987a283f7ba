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

/// Returns the addresses that stand for clients on the links 7 and 8, of a node with these IPv6 addresses.
fn client_addresses(addresses: &[(u32, &str, AddressHeaderFlags)]) -> [Option<IpAddr>; 2] {
    let message = |(link, address, flags): &(u32, &str, AddressHeaderFlags)| {
        let mut message = AddressMessage::default();
        message.header.index = *link;
        message.header.scope = AddressScope::Universe;
        message.header.flags = *flags;
        message.attributes = vec![AddressAttribute::Address(ip(address))];
        message
    };
    let addresses = Vec::from_iter(addresses.iter().map(message));
    let snapshot = Snapshot::of(&[], &addresses, Vec::new());
    let found = snapshot.client_addresses([LINK, LINK + 1].into_iter(), &[]);
    [LINK, LINK + 1].map(|link| found[&link].v6.map(IpAddr::V6))
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
