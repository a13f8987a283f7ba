//! Sockets that are bound to addresses that their pod does not have, and network namespaces of unprivileged users
//! with many addresses.

use std::{
    io::{self, IoSlice},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsRawFd as _,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo},
    sys::socket::{ControlMessage, MsgFlags, SockaddrIn, SockaddrIn6, sendmsg},
};
use socket2::{Domain, Socket, Type};
use tunnel_common::table::MapSizes;
use tunnel_tests::sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within};
use tunnel_userspace::model::Family;

use crate::{
    fixture::{Scene, WEB},
    service_addresses::BALANCER,
    support::{
        DNS, Dialer, HTTP, count_during, ensure_eq, expect_refusal, query_to, unreachable_errors,
        until_backends,
    },
};

/// The number of clients in the affinity map of the attacked node.
const CLIENTS: u32 = 256;
/// The number of addresses that the attacker binds sockets to.
const FORGED: u16 = 2000;
/// The number of addresses that the attacker gives to a network namespace, one after another.
const MANY: usize = 1000;
/// The user who attacks.
const UNPRIVILEGED: u32 = 65_534;

/// Creates a socket in a sandbox that is bound to any address.
fn bound(sandbox: &Sandbox, kind: Type, address: IpAddr) -> io::Result<Socket> {
    let address = SocketAddr::new(address, 0);
    let socket = sandbox.socket(Domain::for_address(address), kind)?;
    if address.is_ipv4() {
        socket.set_freebind_v4(true)?;
    } else {
        socket.set_freebind_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

/// Sends a datagram from another source address than the one that the socket is bound to.
fn send_from(socket: &Socket, source: IpAddr, to: SocketAddr) -> io::Result<()> {
    let data = [IoSlice::new(b"who?")];
    let fd = socket.as_raw_fd();
    let sent = match (source, to) {
        (IpAddr::V4(source), SocketAddr::V4(to)) => {
            let info = in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: in_addr {
                    s_addr: u32::from(source).to_be(),
                },
                ipi_addr: in_addr { s_addr: 0 },
            };
            let control = [ControlMessage::Ipv4PacketInfo(&info)];
            sendmsg(
                fd,
                &data,
                &control,
                MsgFlags::empty(),
                Some(&SockaddrIn::from(to)),
            )
        }
        (IpAddr::V6(source), SocketAddr::V6(to)) => {
            let info = in6_pktinfo {
                ipi6_ifindex: 0,
                ipi6_addr: in6_addr {
                    s6_addr: source.octets(),
                },
            };
            let control = [ControlMessage::Ipv6PacketInfo(&info)];
            sendmsg(
                fd,
                &data,
                &control,
                MsgFlags::empty(),
                Some(&SockaddrIn6::from(to)),
            )
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    sent.map(drop).map_err(io::Error::from)
}

#[test]
fn a_forged_address_does_not_pass_the_source_ranges() -> Result<()> {
    let scene = Scene::started(&["one"])?;
    let node = &scene.node;
    let (inside, outside) = (&scene.client, &node.pod("outside")?);
    let ranges = [inside.v4(), inside.v6()].map(|ip| {
        let length = if ip.is_ipv4() { 32 } else { 128 };
        format!("\"{ip}/{length}\"")
    });
    let service = WEB
        .service("web")
        .of_type("LoadBalancer")
        // The loopback range must not admit sockets that are bound to loopback addresses either.
        .spec(&format!(
            "loadBalancerSourceRanges: [{}, \"127.0.0.0/8\", \"::1/128\"]",
            ranges.join(", ")
        ))
        .load_balancer(&BALANCER.yaml_ingress())
        .backends(scene.all_addresses());
    scene.program(service)?;

    let (tcp_error, udp_error) = unreachable_errors()?;
    for dialer in [Dialer::V4, Dialer::V6] {
        let family = dialer.family();
        let loopback: IpAddr = match family {
            Family::V4 => Ipv4Addr::LOCALHOST.into(),
            Family::V6 => Ipv6Addr::LOCALHOST.into(),
        };
        let (forged, own) = (inside.address(family), outside.address(family));
        for address in [forged, loopback] {
            let (http, dns) = (
                dialer.address(BALANCER, HTTP),
                dialer.address(BALANCER, DNS),
            );
            let denied = "source_range_denied";
            let check = || -> Result<()> {
                let socket = bound(outside, Type::STREAM, address)?;
                expect_refusal(node, denied, tcp_error, || {
                    connect_within(&socket, http, RESPONSE_TIMEOUT)
                })
                .context("TCP")?;
                let socket = bound(outside, Type::DGRAM, address)?;
                expect_refusal(node, denied, udp_error, || socket.connect(&dns.into()))
                    .context("connected UDP")?;
                let socket = bound(outside, Type::DGRAM, address)?;
                expect_refusal(node, denied, udp_error, || send_from(&socket, own, dns))
                    .context("UDP with a packet's own source address")
            };
            check().with_context(|| format!("bound to {address}"))?;
        }
        // The addresses that the pods have are checked as before.
        let socket = bound(inside, Type::STREAM, inside.address(family))?;
        connect_within(&socket, dialer.address(BALANCER, HTTP), RESPONSE_TIMEOUT)?;
    }
    Ok(())
}

/// Returns forged addresses: half of them loopback addresses, if the family has several.
fn forged(family: Family) -> impl Iterator<Item = IpAddr> {
    (0..FORGED).map(move |number| {
        let [upper, lower] = number.to_be_bytes();
        match family {
            Family::V4 if number % 2 == 0 => Ipv4Addr::new(127, 1, upper, lower).into(),
            Family::V4 => Ipv4Addr::new(198, 51, upper, lower).into(),
            Family::V6 => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 1, number).into(),
        }
    })
}

/// Starts a node with a small affinity map, and with a Service that has session affinity.
fn start_with_affinity() -> Result<Scene> {
    let scene = Scene::with(&["one", "two", "three"], |settings| {
        settings.maps = MapSizes {
            affinity: CLIENTS,
            ..settings.maps
        };
    })?;
    let node = &scene.node;
    node.start()?;
    let service = WEB.service("web").spec("sessionAffinity: ClientIP");
    node.apply(service.backends(scene.all_addresses()))?;
    until_backends(node, "web", 3)?;
    Ok(scene)
}

/// Dials the Service as another client while `attack` connects many sockets to the given address. The client must keep
/// its backend.
fn expect_affinity_during(
    scene: &Scene,
    attack: impl Fn(Dialer, SocketAddr) -> Result<()>,
) -> Result<()> {
    let victim = &scene.client;
    for dialer in [Dialer::V4, Dialer::V6] {
        let first = dialer.dial(victim, WEB, HTTP)?;
        let to = dialer.address(WEB, DNS);
        attack(dialer, to)?;

        let reasons = ["translated_affinity", "translated"];
        let ((), increases) = count_during(&scene.node, &reasons, || {
            (0..12).try_for_each(|_| dialer.expect_served(victim, WEB, HTTP, &first))
        })?;
        ensure_eq("with affinity, without", increases, vec![12, 0])?;
        let socket = dialer.udp_socket(victim)?;
        let (server, _) = query_to(&socket, to)?;
        ensure!(!server.is_empty());
    }
    Ok(())
}

#[test]
fn forged_addresses_do_not_evict_the_affinity_of_others() -> Result<()> {
    let scene = start_with_affinity()?;
    let attacker = scene.node.pod("attacker")?;
    expect_affinity_during(&scene, |dialer, to| {
        for address in forged(dialer.family()) {
            // Sends nothing, so that the servers' replies do not fill the node's neighbour table.
            let socket = bound(&attacker, Type::DGRAM, address)?;
            let _no_route = socket.connect(&to.into());
        }
        Ok(())
    })
}

#[test]
fn addresses_in_a_user_namespace_do_not_evict_the_affinity_of_others() -> Result<()> {
    let scene = start_with_affinity()?;
    let network = scene.node.network();
    let attacker = network.create_in_user_namespace("attacker", UNPRIVILEGED)?;
    attacker.ip("link set lo up")?;
    expect_affinity_during(&scene, |dialer, to| {
        let length = if to.is_ipv4() { 32 } else { 128 };
        let others = forged(dialer.family()).filter(|address| !address.is_loopback());
        for address in others.take(MANY) {
            let prefix = format!("{address}/{length}");
            attacker.ip(&format!("addr add {prefix} dev lo nodad"))?;
            let socket = bound(&attacker, Type::DGRAM, address)?;
            let _no_route = socket.connect(&to.into());
            attacker.ip(&format!("addr del {prefix} dev lo"))?;
        }
        Ok(())
    })?;

    // The user namespaces that users create are one client. Those that root creates, as container runtimes do, are
    // one client each.
    let connect = |sandbox: &Sandbox| -> Result<()> {
        sandbox.ip("link set lo up")?;
        let socket = sandbox.socket(Domain::IPV4, Type::DGRAM)?;
        let _no_route = socket.connect(&Dialer::V4.address(WEB, DNS).into());
        Ok(())
    };
    for (user, expected) in [
        (UNPRIVILEGED, [2, 0]),
        (UNPRIVILEGED + 1, [2, 0]),
        (0, [0, 2]),
    ] {
        let create = |name| network.create_in_user_namespace(&format!("{name}-{user}"), user);
        let sandboxes = [create("one")?, create("two")?];
        let reasons = ["translated_affinity", "translated"];
        for expected in [expected, [2, 0]] {
            let ((), increases) = count_during(&scene.node, &reasons, || {
                sandboxes.iter().try_for_each(connect)
            })?;
            ensure_eq("with affinity, without", increases, expected.to_vec())?;
        }
    }
    Ok(())
}
