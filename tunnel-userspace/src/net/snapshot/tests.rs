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
