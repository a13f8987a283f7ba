//! Packets of this host whose sockets meet no socket program.

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{sandbox::Sandbox, wait};

use super::{
    ADDRESSES, Backend, CLIENT, ENABLED, REMOTE, exchange_stream, expect_reached, link_to,
    refusals::expect_refused, remote, service,
};
use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{CHANGE_TIMEOUT, Dialer, HOST, Vip, ensure_eq, until_backends},
};

/// Returns the addresses of the Service that are on no link of the host.
pub(super) fn elsewhere() -> impl Iterator<Item = (&'static str, Vip, [u16; 2])> {
    ADDRESSES
        .into_iter()
        .filter(|(_, vip, _)| vip.v4 != HOST.v4)
}

/// Routes the Service's addresses from the host to a router, as a default route would.
pub(super) fn route_to(scene: &Scene, router: Vip) -> Result<()> {
    let routes = elsewhere().map(|(_, Vip { v4, v6 }, _)| {
        let Vip { v4: via4, v6: via6 } = router;
        format!("route add {v4}/32 via {via4}\nroute add {v6}/128 via {via6}\n")
    });
    scene.node.host().ip(&routes.collect::<String>())
}

/// Creates a sandbox that shares the host's network namespace, but whose sockets meet no socket program. Their packets to the
/// Service leave for a router.
pub(super) fn outside_the_cgroup(scene: &Scene, router: Vip) -> Result<Sandbox> {
    route_to(scene, router)?;
    let (network, host) = (scene.node.network(), scene.node.host());
    network.share_namespace(host, "host-without-hooks", None)
}

#[test]
fn processes_of_the_host_outside_the_cgroup_reach_backends_on_another_node() -> Result<()> {
    let scene = configured(ENABLED)?;
    let remote = remote(&scene)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.node.start()?;
    scene.program(service("Local").backends(REMOTE.ips()))?;
    let process = outside_the_cgroup(&scene, CLIENT)?;
    for (what, vip, ports) in elsewhere() {
        // The host counts as a local client, so all backends are there for it.
        expect_reached(&process, &backend, (vip, ports), HOST.ips()).context(what)?;
    }

    // The daemon may be absent, and another one may follow it.
    let (_, vip, [http, _]) = ADDRESSES[0];
    let stream = Dialer::V6.connect(&process, vip, http)?;
    let (accepted, _) = backend.tcp[1].accept()?;
    scene.node.kill9()?;
    exchange_stream(&stream, &accepted).context("without the daemon")?;
    scene.node.start()?;
    exchange_stream(&stream, &accepted).context("with another daemon")
}

#[test]
fn a_service_excluded_from_sockets_is_reached_by_packets() -> Result<()> {
    let scene = configured(ENABLED)?;
    let remote = remote(&scene)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.node.start()?;
    route_to(&scene, CLIENT)?;
    let excluded = service("Cluster").annotated("culvert.dev/socket-translation", "disabled");
    scene.program(excluded.backends(REMOTE.ips()))?;
    let (what, vip, ports) = ADDRESSES[0];
    expect_reached(scene.node.host(), &backend, (vip, ports), HOST.ips()).context(what)
}

#[test]
fn backends_on_this_node_need_the_programs_on_their_links() -> Result<()> {
    for (links, is_served) in [("all", true), ("uplinks", false)] {
        let scene = configured(&format!("packets: {{ links: {links} }}"))?;
        let pod = scene.node.pod("local")?;
        let ips = [pod.v4(), pod.v6()];
        let backend = Backend::at(&pod, ips)?;
        scene.node.start()?;
        scene.program(service("Cluster").backends(ips))?;
        let process = outside_the_cgroup(&scene, CLIENT)?;
        let (what, vip, ports) = ADDRESSES[0];
        if is_served {
            expect_reached(&process, &backend, (vip, ports), HOST.ips()).context(what)?;
        } else {
            expect_both_refused(&process, (vip, ports)).context(what)?;
            let refused = scene.node.reason_count("host_no_route")?;
            ensure_eq("refused", refused, 4)?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the daemon reads a setting"]
fn the_status_warns_about_links_that_drop_replies() -> Result<()> {
    let scene = configured("packets: { links: all }")?;
    let pod = scene.node.pod("local")?;
    let ips = [pod.v4(), pod.v6()];
    let backend = Backend::at(&pod, ips)?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(ips))?;
    let process = outside_the_cgroup(&scene, CLIENT)?;
    let link = link_to(Vip::of_pod(&pod));
    let setting = format!("net.ipv4.conf.{link}.rp_filter");
    let set = |value| scene.node.host().sysctl(&setting, value);
    let (what, vip, [http, dns]) = ADDRESSES[0];

    set("1")?;
    let socket = Dialer::V4.tcp_socket(&process)?;
    socket.set_nonblocking(true)?;
    // It stays without a reply.
    drop(socket.connect(&Dialer::V4.address(vip, http).into()));
    let warning = || {
        let status = scene.node.status().unwrap_or_default();
        status["packets"]["warnings"].to_string()
    };
    // The flows are counted every ten seconds.
    wait::until(3 * CHANGE_TIMEOUT, || warning().contains(&setting))
        .with_context(|| format!("warnings: {}", warning()))?;

    set("2")?;
    expect_reached(&process, &backend, (vip, [http, dns]), HOST.ips()).context(what)
}

/// Asserts that connections and datagrams of both families are refused at once.
fn expect_both_refused(process: &Sandbox, to: (Vip, [u16; 2])) -> Result<()> {
    for dialer in [Dialer::V4, Dialer::V6] {
        expect_refused(process, dialer, to)?;
    }
    Ok(())
}

#[test]
fn errors_come_from_the_frontend() -> Result<()> {
    let scene = configured(ENABLED)?;
    let remote = remote(&scene)?;
    scene.node.start()?;
    let process = outside_the_cgroup(&scene, CLIENT)?;
    let (_, vip, ports) = ADDRESSES[0];

    // The backend's own reset and ICMP error, since nothing listens there.
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    expect_both_refused(&process, (vip, ports)).context("a backend without servers")?;
    ensure!(scene.node.reason_count("icmp_error_translated")? >= 2);

    scene.program(service("Cluster"))?;
    until_backends(&scene.node, "web", 0)?;
    expect_both_refused(&process, (vip, ports)).context("no endpoints")?;
    ensure_eq("refused", scene.node.reason_count("no_backend")?, 4)?;
    ensure_eq("unanswered", scene.node.reason_count("refusal_unsent")?, 0)?;

    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    until_backends(&scene.node, "web", 1)?;
    expect_reached(&process, &backend, (vip, ports), HOST.ips())
}
