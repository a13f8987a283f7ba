//! Traffic that is not for a Service, or not from this node's cgroup, is not translated.

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::place::Place;

use crate::{
    scene::{DIALLED, WEB},
    support::{
        DNS, DNS_TARGET, HTTP, HTTP_TARGET, Vip, Way, ask, counted, errno, is_nowhere, same,
    },
};

const NOBODY: Vip = Vip::of(99);

/// All reasons that the kernel programs count for Services.
pub(crate) const ALL: [&str; 10] = [
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

/// Dials a pod by its own address with every dialer.
fn direct(place: &Place, pod: Vip) -> Result<()> {
    for way in Way::TCP {
        way.is_served(place, pod, HTTP_TARGET, "backend")?;
    }
    for way in Way::UDP {
        let socket = way.udp(place)?;
        way.is_answered(&socket, pod, DNS_TARGET, "backend")?;
        socket.connect(way.to(pod, DNS_TARGET))?;
        same("peer", socket.peer_addr()?, way.shown(pod, DNS_TARGET))?;
        same("server", ask(&socket)?, "backend")?;
    }
    Ok(())
}

/// Asserts that connects to this TCP port and datagrams to this UDP port fail for lack of a route.
fn lead_nowhere(place: &Place, vip: Vip, [tcp, udp]: [u16; 2]) -> Result<()> {
    for way in Way::TCP {
        let failed = errno(way.connect(place, vip, tcp));
        ensure!(is_nowhere(failed), "{way:?} to TCP port {tcp}: {failed}");
    }
    for way in Way::UDP {
        let failed = errno(way.udp(place)?.send_to(b"who?", way.to(vip, udp)));
        ensure!(is_nowhere(failed), "{way:?} to UDP port {udp}: {failed}");
    }
    Ok(())
}

#[test]
fn direct_connections_show_the_real_peer_and_are_not_counted() -> Result<()> {
    let scene = DIALLED.take()?;
    let backend = scene.backend("backend")?;

    let ((), grown) = counted(&scene.node, &ALL, || {
        direct(scene.node.host(), Vip::of_pod(backend))?;
        direct(&scene.client, Vip::of_pod(backend))
    })?;

    same("counted", grown, vec![0; ALL.len()])?;
    scene.give_back()
}

#[test]
fn an_address_port_or_protocol_that_no_service_has_is_not_translated() -> Result<()> {
    let scene = DIALLED.take()?;

    let ((), grown) = counted(&scene.node, &ALL, || {
        for (from, place) in scene.places() {
            // The Service has DNS only over UDP, and HTTP only over TCP.
            for (vip, ports) in [
                (NOBODY, [HTTP, DNS]),
                (WEB, [HTTP + 1, DNS + 1]),
                (WEB, [DNS, HTTP]),
            ] {
                lead_nowhere(place, vip, ports).context(from)?;
            }
        }
        Ok(())
    })?;

    same("counted", grown, vec![0; ALL.len()])?;
    scene.give_back()
}

#[test]
fn a_client_outside_of_the_cgroup_is_not_translated() -> Result<()> {
    let scene = DIALLED.take()?;
    let node = &scene.node;
    let beside = node
        .topology()
        .beside(&scene.client, "outside/beside", None)?;
    let answered = || Ok(scene.backend("backend")?.server.record()?.total().answered);
    let before: Result<u64> = answered();

    let ((), grown) = counted(&scene.node, &ALL, || {
        for (from, place) in [("outside", node.outside()), ("beside a pod", &beside)] {
            lead_nowhere(place, WEB, [HTTP, DNS]).context(from)?;
        }
        Ok(())
    })?;

    same("counted", grown, vec![0; ALL.len()])?;
    same("answered", answered()?, before?)?;
    scene.give_back()
}
