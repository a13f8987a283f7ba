//! What is no Service, or not this node's business, is left alone.

use std::io::ErrorKind;

use anyhow::{Result, ensure};
use nix::errno::Errno;
use tunnel_tests::place::Place;

use crate::{
    scene::{DIALLED, WEB},
    support::{DNS, DNS_TARGET, HTTP, HTTP_TARGET, Vip, Way, ask, counted, errno, same},
};

const NOBODY: Vip = Vip::of(99);

/// Everything that the kernel programs count.
pub(crate) const ALL: [&str; 10] = [
    "translated",
    "translated_sticky",
    "no_backend",
    "record_unstable",
    "record_broken",
    "storage_full",
    "translated_untracked",
    "socket_tracked",
    "socket_released",
    "overflowed",
];

/// Reaches a pod by its own address in every way.
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
    let unreachable = [ErrorKind::NetworkUnreachable, ErrorKind::HostUnreachable];

    let ((), grown) = counted(&scene.node, &ALL, || {
        for (from, place) in scene.places() {
            for way in Way::TCP {
                // DNS is UDP's alone, and HTTP is TCP's.
                for (vip, port) in [(NOBODY, HTTP), (WEB, HTTP + 1), (WEB, DNS)] {
                    let failed = way.connect(place, vip, port).map_err(|error| error.kind());
                    let as_expected = failed.as_ref().is_err_and(|it| unreachable.contains(it));
                    ensure!(as_expected, "{way:?} from the {from}: {failed:?}");
                }
            }
            for way in Way::UDP {
                let sent = way.udp(place)?.send_to(b"who?", way.to(WEB, HTTP));
                let failed = sent.map_err(|error| error.kind());
                let as_expected = failed.as_ref().is_err_and(|it| unreachable.contains(it));
                ensure!(as_expected, "{way:?} from the {from}: {failed:?}");
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
            for way in Way::TCP {
                let failed = errno(way.connect(place, WEB, HTTP));
                let as_expected = [Errno::ENETUNREACH, Errno::EHOSTUNREACH].contains(&failed);
                ensure!(as_expected, "{way:?} from {from}: {failed}");
            }
            for way in Way::UDP {
                let failed = errno(way.udp(place)?.send_to(b"who?", way.to(WEB, DNS)));
                let as_expected = [Errno::ENETUNREACH, Errno::EHOSTUNREACH].contains(&failed);
                ensure!(as_expected, "{way:?} from {from}: {failed}");
            }
        }
        Ok(())
    })?;

    same("counted", grown, vec![0; ALL.len()])?;
    same("answered", answered()?, before?)?;
    scene.give_back()
}
