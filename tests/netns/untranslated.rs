//! Tests that traffic is not translated if it is not for a Service, or if it comes from outside this node's
//! cgroup.

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::sandbox::Sandbox;

use crate::{
    fixture::{DIALLED, WEB},
    support::{
        DNS, DNS_TARGET, Dialer, HTTP, HTTP_TARGET, Vip, count_during, ensure_eq, errno,
        is_unreachable, query,
    },
};

const UNUSED: Vip = Vip::of(99);

/// The reasons that the kernel programs count for Service traffic.
pub(crate) const SERVICE_REASONS: [&str; 10] = [
    "translated",
    "translated_sticky",
    "no_backend",
    "record_unstable",
    "record_invalid",
    "socket_storage_full",
    "translated_untracked",
    "socket_tracked",
    "socket_released",
    "overflowed",
];

/// Dials a pod's own address with every dialer.
fn expect_direct(sandbox: &Sandbox, pod: Vip) -> Result<()> {
    for dialer in Dialer::TCP {
        dialer.expect_served(sandbox, pod, HTTP_TARGET, "backend")?;
    }
    for dialer in Dialer::UDP {
        let socket = dialer.udp_socket(sandbox)?;
        dialer.expect_answer(&socket, pod, DNS_TARGET, "backend")?;
        socket.connect(dialer.address(pod, DNS_TARGET))?;
        ensure_eq(
            "peer",
            socket.peer_addr()?,
            dialer.reported_address(pod, DNS_TARGET),
        )?;
        ensure_eq("server", query(&socket)?, "backend")?;
    }
    Ok(())
}

/// Asserts that connections to the given TCP port, and datagrams to the given UDP port, fail because there is
/// no route.
fn expect_unreachable(sandbox: &Sandbox, vip: Vip, [tcp, udp]: [u16; 2]) -> Result<()> {
    for dialer in Dialer::TCP {
        let failed = errno(dialer.connect(sandbox, vip, tcp));
        ensure!(
            is_unreachable(failed),
            "{dialer:?} to TCP port {tcp}: {failed}"
        );
    }
    for dialer in Dialer::UDP {
        let failed = errno(
            dialer
                .udp_socket(sandbox)?
                .send_to(b"who?", dialer.address(vip, udp)),
        );
        ensure!(
            is_unreachable(failed),
            "{dialer:?} to UDP port {udp}: {failed}"
        );
    }
    Ok(())
}

#[test]
fn direct_connections_show_the_real_peer_and_are_not_counted() -> Result<()> {
    let scene = DIALLED.lease()?;
    let backend = scene.backend("backend")?;

    let ((), increases) = count_during(&scene.node, &SERVICE_REASONS, || {
        expect_direct(scene.node.host(), Vip::of_pod(backend))?;
        expect_direct(&scene.client, Vip::of_pod(backend))
    })?;

    ensure_eq("counted", increases, vec![0; SERVICE_REASONS.len()])?;
    scene.give_back()
}

#[test]
fn an_address_port_or_protocol_that_no_service_has_is_not_translated() -> Result<()> {
    let scene = DIALLED.lease()?;

    let ((), increases) = count_during(&scene.node, &SERVICE_REASONS, || {
        for (from, sandbox) in scene.sandboxes() {
            // The Service offers DNS only over UDP, and HTTP only over TCP.
            for (vip, ports) in [
                (UNUSED, [HTTP, DNS]),
                (WEB, [HTTP + 1, DNS + 1]),
                (WEB, [DNS, HTTP]),
            ] {
                expect_unreachable(sandbox, vip, ports).context(from)?;
            }
        }
        Ok(())
    })?;

    ensure_eq("counted", increases, vec![0; SERVICE_REASONS.len()])?;
    scene.give_back()
}

#[test]
fn a_client_outside_of_the_cgroup_is_not_translated() -> Result<()> {
    let scene = DIALLED.lease()?;
    let node = &scene.node;
    let outside_cgroup = node
        .network()
        .share_namespace(&scene.client, "outside/beside", None)?;
    let answered = || Ok(scene.backend("backend")?.server.record()?.total().answered);
    let before: Result<u64> = answered();

    let ((), increases) = count_during(&scene.node, &SERVICE_REASONS, || {
        for (from, sandbox) in [
            ("outside", node.outside()),
            ("outside of the cgroup", &outside_cgroup),
        ] {
            expect_unreachable(sandbox, WEB, [HTTP, DNS]).context(from)?;
        }
        Ok(())
    })?;

    ensure_eq("counted", increases, vec![0; SERVICE_REASONS.len()])?;
    ensure_eq("answered", answered()?, before?)?;
    scene.give_back()
}
