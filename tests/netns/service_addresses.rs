//! Tests Services' node ports, load balancer addresses and external IPs, and the policies that restrict
//! traffic to endpoints on this node.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use socket2::SockRef;
use tunnel_tests::{
    culvert_instance,
    manifest::{Protocol, Service},
    node_network,
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    shared_fixture::SharedFixture,
    wait,
};

use crate::{
    fixture::{Scene, WEB},
    local_listeners::TestListeners,
    support::{
        CHANGE_TIMEOUT, DNS, DNS_TARGET, Dialer, HOST, HTTP, HTTP_TARGET, Vip, ensure_eq, errno,
        expect_refusal, unreachable_errors, until_backends,
    },
};

pub(crate) const LOOPBACK: Vip = Vip {
    v4: Ipv4Addr::LOCALHOST,
    v6: Ipv6Addr::LOCALHOST,
};
const OUTSIDE: Vip = Vip {
    v4: node_network::OUTSIDE_V4,
    v6: node_network::OUTSIDE_V6,
};
/// Addresses that a test adds to the host while the daemon is running.
const NEW: Vip = Vip {
    v4: Ipv4Addr::new(198, 51, 100, 7),
    v6: Ipv6Addr::new(0x2001, 0xdb8, 0x51, 0, 0, 0, 0, 7),
};
/// The Service's load balancer addresses and external IPs. There is no route to them.
pub(crate) const BALANCER: Vip = Vip::of(200);
pub(crate) const EXTERNAL: Vip = Vip::of(201);
pub(crate) const NODE_HTTP: u16 = 30_080;
pub(crate) const NODE_DNS: u16 = 30_053;

static SCENE: SharedFixture<Scene> = SharedFixture::new(|| Scene::started(&["backend"]));

/// Creates a node with one backend and the given line in the config's `service` section, but does not start
/// the daemon.
pub(crate) fn configured(setting: &str) -> Result<Scene> {
    Scene::with(&["backend"], |settings| {
        setting.clone_into(&mut settings.node_ports);
    })
}

/// Builds a Service with node ports but no endpoints.
pub(crate) fn service() -> Service {
    Service::new("web", WEB.ips())
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .node_port(NODE_HTTP)
        .port(Protocol::UDP, DNS, DNS_TARGET)
        .node_port(NODE_DNS)
}

/// Builds the same Service as [`service`], but with an external IP and a load balancer address in each
/// address family.
pub(crate) fn service_at_all_addresses() -> Service {
    service()
        .spec(&format!("externalIPs: [{}]", EXTERNAL.yaml_list()))
        .load_balancer(&BALANCER.yaml_ingress())
}

/// Asserts that the backend answers TCP and UDP clients with every dialer, and that they see the dialled
/// address as the peer or sender.
pub(crate) fn expect_all_answer(
    sandbox: &Sandbox,
    vip: Vip,
    [http_port, dns_port]: [u16; 2],
) -> Result<()> {
    for dialer in Dialer::TCP {
        dialer.expect_served(sandbox, vip, http_port, "backend")?;
    }
    for dialer in Dialer::UDP {
        dialer.expect_answer(&dialer.udp_socket(sandbox)?, vip, dns_port, "backend")?;
    }
    Ok(())
}

#[test]
fn loopback_has_node_ports_on_the_host_but_not_in_pods() -> Result<()> {
    let scene = SCENE.lease()?;
    scene.program(service().backends(scene.all_addresses()))?;

    expect_all_answer(scene.node.host(), LOOPBACK, [NODE_HTTP, NODE_DNS])?;

    for dialer in [Dialer::V4, Dialer::V6] {
        let refused = errno(dialer.connect(&scene.client, LOOPBACK, NODE_HTTP));
        ensure_eq("error in a pod", refused, Errno::ECONNREFUSED)?;
        let own = scene.client.listen(dialer.address(LOOPBACK, NODE_HTTP))?;
        dialer.connect(&scene.client, LOOPBACK, NODE_HTTP)?;
        drop(own);
    }
    scene.give_back()
}

#[test]
fn loopback_node_ports_do_not_translate_sockets_that_are_bound_to_loopback() -> Result<()> {
    let scene = SCENE.lease()?;
    let host = scene.node.host();
    scene.program(service().backends(scene.all_addresses()))?;
    expect_all_answer(host, LOOPBACK, [NODE_HTTP, NODE_DNS])?;

    for dialer in Dialer::TCP {
        let connect = || -> Result<_> {
            let socket = dialer.tcp_socket(host)?;
            socket.bind(&dialer.address(LOOPBACK, 0).into())?;
            let to = dialer.address(LOOPBACK, NODE_HTTP);
            Ok(connect_within(&socket, to, RESPONSE_TIMEOUT))
        };
        ensure_eq(
            "error without a listener",
            errno(connect()?),
            Errno::ECONNREFUSED,
        )?;
        let own = host.listen(dialer.address(LOOPBACK, NODE_HTTP))?;
        connect()?.with_context(|| format!("{dialer:?} to its own listener"))?;
        drop(own);
    }
    for dialer in Dialer::UDP {
        let own = host.udp(dialer.address(LOOPBACK, NODE_DNS))?;
        let socket = dialer.udp_socket(host)?;
        SockRef::from(&socket).bind(&dialer.reported_address(LOOPBACK, 0).into())?;
        socket
            .send_to(b"who?", dialer.address(LOOPBACK, NODE_DNS))
            .with_context(|| format!("{dialer:?} to its own listener"))?;
        let (_, from) = own.recv_from(&mut [0; 16])?;
        ensure_eq("sender", from.port(), socket.local_addr()?.port())?;
    }
    scene.give_back()
}

#[test]
fn node_ports_follow_the_addresses_of_the_node() -> Result<()> {
    let scene = configured("nodePortAddresses: [198.51.100.0/24, \"2001:db8:51::/64\"]")?;
    scene.start([service().backends(scene.all_addresses())])?;
    let host = scene.node.host();
    for dialer in [Dialer::V4, Dialer::V6] {
        let primary = errno(dialer.connect(host, HOST, NODE_HTTP));
        ensure_eq(
            "error at an address outside of the ranges",
            primary,
            Errno::ECONNREFUSED,
        )?;
    }

    // Connections to addresses in these ranges fail at once, unless the node has the address.
    host.ip("route add unreachable 198.51.100.0/24\nroute add unreachable 2001:db8:51::/64\n")?;
    NEW.add_to(host, "uplink")?;

    for (name, sandbox) in scene.sandboxes() {
        wait::until(CHANGE_TIMEOUT, || {
            expect_all_answer(sandbox, NEW, [NODE_HTTP, NODE_DNS]).is_ok()
        })
        .with_context(|| format!("from {name}"))?;
    }
    NEW.delete_from(host, "uplink")?;
    let is_gone = |dialer: Dialer| dialer.connect(host, NEW, NODE_HTTP).is_err();
    wait::until(CHANGE_TIMEOUT, || Dialer::TCP.into_iter().all(is_gone))
        .context("the node port is still served at the removed address")
}

#[test]
fn node_ports_belong_to_their_service_despite_listeners_on_the_host() -> Result<()> {
    let scene = SCENE.lease()?;
    let host = scene.node.host();
    let _tcp = host.listen(("::", NODE_HTTP))?;
    let _udp = host.udp(("::", NODE_DNS))?;
    scene.program(service().backends(scene.all_addresses()))?;

    for (name, sandbox) in scene.sandboxes() {
        expect_all_answer(sandbox, HOST, [NODE_HTTP, NODE_DNS]).with_context(|| name.to_owned())?;
    }
    scene.give_back()
}

#[test]
#[ignore = "independent of the kernel: map entries"]
fn external_and_load_balancer_ips_belong_to_their_service_despite_listeners_on_the_node()
-> Result<()> {
    let scene = configured("nodeAddresses: serve")?;
    let host = scene.node.host();
    let mut listening = Vec::new();
    for vip in [BALANCER, EXTERNAL] {
        vip.add_to(host, "lo")?;
        listening.push(TestListeners::at(host, vip.ips(), [HTTP, DNS])?);
    }
    scene.start([service_at_all_addresses().backends(scene.all_addresses())])?;

    for (name, sandbox) in scene.sandboxes() {
        for vip in [BALANCER, EXTERNAL] {
            expect_all_answer(sandbox, vip, [HTTP, DNS])
                .with_context(|| format!("{vip:?} from {name}"))?;
        }
    }
    Ok(())
}

#[test]
fn policy_local_without_an_endpoint_of_this_node_is_unreachable() -> Result<()> {
    let (error, _) = unreachable_errors()?;
    let scene = SCENE.lease()?;
    let away = service()
        .spec("internalTrafficPolicy: Local")
        .on_node("other")
        .backends(OUTSIDE.ips());
    scene.program(away)?;

    scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
        expect_refusal(&scene.node, "no_local_backend", error, || {
            dialer.connect(sandbox, WEB, HTTP)
        })
    })?;
    // If the Service has no endpoints at all, connections are refused, as they are for any other Service.
    scene
        .node
        .apply(service().spec("internalTrafficPolicy: Local"))?;
    for dialer in [Dialer::V4, Dialer::V6] {
        let failed = || errno(dialer.connect(scene.node.host(), WEB, HTTP));
        wait::until(CHANGE_TIMEOUT, || failed() == Errno::ECONNREFUSED)
            .with_context(|| format!("{dialer:?}: the connect is not refused"))?;
    }
    scene.give_back()
}

#[test]
#[ignore = "independent of the kernel: the daemon chooses the endpoints"]
fn a_service_restricted_to_its_node_leads_to_endpoints_of_this_node_or_refuses() -> Result<()> {
    let scene = configured("topologyKeys: honor")?;
    let web = |node| {
        service()
            .annotated("openyurt.io/topologyKeys", "kubernetes.io/hostname")
            .on_node(node)
            .backends(scene.all_addresses())
    };
    scene.start([web("other")])?;

    scene.for_each_client(&[Dialer::V4, Dialer::V6], |sandbox, dialer| {
        let refused = errno(dialer.connect(sandbox, WEB, HTTP));
        ensure_eq("error", refused, Errno::ECONNREFUSED)
    })?;

    scene.node.apply(web(culvert_instance::NODE_NAME))?;
    until_backends(&scene.node, "web", 1)?;
    for (name, sandbox) in scene.sandboxes() {
        expect_all_answer(sandbox, WEB, [HTTP, DNS]).with_context(|| format!("from {name}"))?;
    }
    Ok(())
}
