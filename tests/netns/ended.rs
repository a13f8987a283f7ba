//! When a backend is removed, the daemon ends the sockets that are connected to it, and only these.

use std::{net::UdpSocket, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{clock::Instant, scale::Scale, wait};

use crate::{
    reach::{self, BALANCER, EXTERNAL},
    scene::{Client, OTHER, Scene, WEB, are_answered, are_ended, configure},
    support::{
        CHANGE, DNS, DNS_TARGET, HOST, HTTP, RECOVERY, Vip, Way, ask, errno, http, is_ended,
        receive, same, until_backends,
    },
};

/// Starts a node that ends sockets of these protocols, with the Service `web` and its backend `one`.
fn ending(protocols: &str) -> Result<Scene> {
    let scene = Scene::leading_to(&["one", "two"], &["one"])?;
    configure(
        &scene.node,
        "sockets",
        &format!("{{ terminate: {protocols} }}"),
    )?;
    scene.node.start()?;
    Ok(scene)
}

impl Scene {
    fn asked(&self) -> Result<u64> {
        Ok(self.backend("one")?.server.record()?.total().answered)
    }
}

/// Waits until each of these sockets is ended, and expects a later send to fail.
fn are_lost(sockets: &[(Client<'_>, UdpSocket)]) -> Result<()> {
    are_ended(sockets)?;
    for (client, socket) in sockets {
        let failed = errno(socket.send(b"who?"));
        same("send", failed, Errno::EDESTADDRREQ).with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn a_connected_resolver_has_another_backend_at_once_when_its_own_is_removed() -> Result<()> {
    let scene = ending("[udp]")?;
    let sockets = scene.connected(WEB, "one")?;
    let count = sockets.len();

    let longest = thread::scope(|scope| -> Result<_> {
        let mut recovered = Vec::new();
        for (client, socket) in sockets {
            recovered.push(scope.spawn(move || -> Result<Instant> {
                is_ended(&socket).with_context(|| client.to_string())?;
                socket.connect(client.way.to(WEB, DNS))?;
                same("server", ask(&socket)?, "two")?;
                Ok(Instant::now())
            }));
        }
        let start = Instant::now();
        scene.lead_to(&["two"])?;
        let mut longest = Duration::ZERO;
        for client in recovered {
            let at = client.join().ok().context("a client panicked")??;
            longest = longest.max(at.duration_since(start));
        }
        Ok(longest)
    })?;

    let scan = scene.node.status()?["sockets"]["lastScanSeconds"].clone();
    println!("recovered within {longest:?} of the change; the scan took {scan} s");
    scene.until_ended(count)?;
    let allowed = Scale::from_environment().patience(RECOVERY);
    ensure!(longest < allowed, "recovered only after {longest:?}");
    Ok(())
}

#[test]
fn nothing_reaches_the_last_backend_of_a_service_that_lost_it_or_is_deleted() -> Result<()> {
    for is_deleted in [false, true] {
        let scene = ending("[udp]")?;
        let sockets = scene.connected(WEB, "one")?;
        let asked = scene.asked()?;

        if is_deleted {
            scene.node.withdraw("web.yaml")?;
        } else {
            scene.lead_to(&[])?;
        }

        are_lost(&sockets)?;
        for (client, socket) in sockets.iter().filter(|_| !is_deleted) {
            let connected = socket.connect(client.way.to(WEB, DNS));
            let answered = connected.is_ok() && ask(socket).is_ok();
            ensure!(!answered, "{client} is answered");
        }
        same("datagrams", scene.asked()?, asked)?;
    }
    Ok(())
}

#[test]
fn nothing_reaches_the_last_backend_by_any_other_address_of_its_service_either() -> Result<()> {
    let scene = Scene::new(&["one"])?;
    scene.start([reach::service_everywhere().backends(scene.all())])?;
    let ways = [(EXTERNAL, DNS), (BALANCER, DNS), (HOST, reach::NODE_DNS)];
    let mut sockets = Vec::new();
    for (vip, port) in ways {
        sockets.extend(scene.open(&Way::UDP, |place, way| way.asked(place, vip, port, "one"))?);
    }
    let asked = scene.asked()?;

    scene.node.apply(reach::service_everywhere())?;

    are_lost(&sockets)?;
    same("datagrams", scene.asked()?, asked)
}

#[test]
fn a_socket_that_is_not_connected_goes_over_and_still_hears_the_backend_that_went() -> Result<()> {
    let scene = ending("[udp]")?;
    let late = scene.node.pod("late")?;
    let listener = late.udp(("::", DNS_TARGET))?;
    let sockets = scene.open(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        way.is_answered(&socket, WEB, DNS, "one")?;
        Ok(socket)
    })?;
    let witnesses = scene.connected(WEB, "one")?;

    // All flows move to the backend `late`, which answers only after its own removal.
    let service = WEB.service("web").backends([late.v4(), late.v6()]);
    scene.node.apply(service)?;
    scene.until_ended(witnesses.len())?;
    let mut waiting = Vec::new();
    for (client, socket) in sockets {
        socket.send_to(b"who?", client.way.to(WEB, DNS))?;
        let (_, from) = listener.recv_from(&mut [0; 64])?;
        waiting.push((client, socket, from));
    }
    let more = scene.open(&Way::UDP, |place, way| Ok(way.connected(place, WEB, DNS)?))?;

    scene.lead_to(&["two"])?;
    more.iter().try_for_each(|(_, socket)| is_ended(socket))?;

    for (client, socket, from) in &waiting {
        let story = || {
            listener.send_to(b"late answer", from)?;
            let expected = ("late".to_owned(), client.way.shown(WEB, DNS));
            same("answer", receive(socket)?, expected)?;
            client.way.is_answered(socket, WEB, DNS, "two")
        };
        story().with_context(|| client.to_string())?;
    }
    scene.until_ended(witnesses.len() + more.len())
}

#[test]
fn a_connection_over_tcp_goes_on_with_a_backend_that_left_its_service() -> Result<()> {
    let scene = ending("[udp]")?;
    let streams = scene.open(&Way::TCP, |place, way| Ok(way.connect(place, WEB, HTTP)?))?;
    let witnesses = scene.connected(WEB, "one")?;

    scene.lead_to(&["two"])?;
    scene.until_ended(witnesses.len())?;

    for (client, stream) in streams {
        same("peer", stream.peer_addr()?, client.way.shown(WEB, HTTP))?;
        let name = http(stream).with_context(|| client.to_string())?;
        same("server", name, "one")?;
    }
    Ok(())
}

#[test]
fn a_connection_over_tcp_is_ended_where_the_config_wants_that() -> Result<()> {
    let scene = ending("[tcp]")?;
    let streams = scene.open(&Way::TCP, |place, way| Ok(way.connect(place, WEB, HTTP)?))?;
    let direct = scene
        .client
        .connect(scene.backend("one")?.at4(crate::support::HTTP_TARGET))?;
    let stays = scene.connected(WEB, "one")?;

    scene.lead_to(&["two"])?;

    for (client, stream) in &streams {
        let error = errno(stream.peek(&mut [0]));
        same("error", error, Errno::ECONNABORTED).with_context(|| client.to_string())?;
    }
    scene.until_ended(streams.len())?;
    same("server", http(direct)?, "one")?;
    are_answered(&stays, "one")
}

#[test]
fn a_socket_that_was_not_sent_to_the_backend_by_its_service_is_left_alone() -> Result<()> {
    let scene = ending("[udp]")?;
    let one = Vip::of_pod(scene.backend("one")?);
    let two = Vip::of_pod(scene.backend("two")?);
    let mut direct = Vec::new();
    for (client, ()) in scene.open(&Way::UDP, |_, _| Ok(()))? {
        let way = client.way;
        // A socket that never used the Service.
        let plain = way.connected(client.place, one, DNS_TARGET)?;
        direct.push((client, plain, "one"));
        // A socket that used the Service, then connected to the backend directly.
        let former = way.connected(client.place, WEB, DNS)?;
        former.connect(way.to(one, DNS_TARGET))?;
        direct.push((client, former, "one"));
        // A socket that sends to the Service, but has another address as peer.
        let besides = way.connected(client.place, two, DNS_TARGET)?;
        besides.send_to(b"who?", way.to(WEB, DNS))?;
        direct.push((client, besides, "two"));
    }
    let witnesses = scene.connected(WEB, "one")?;

    scene.lead_to(&["two"])?;
    scene.until_ended(witnesses.len())?;

    for (client, socket, name) in &direct {
        let answer = ask(socket).and_then(|server| same("server", server, *name));
        answer.with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn a_socket_that_asked_another_service_since_it_connected_goes_with_its_own_backend() -> Result<()>
{
    let scene = ending("[udp]")?;
    scene.lead(OTHER, "other", &["two"])?;
    until_backends(&scene.node, "other", 1)?;
    let sockets = scene.connected(WEB, "one")?;
    for (client, socket) in &sockets {
        socket.send_to(b"who?", client.way.to(OTHER, DNS))?;
    }

    scene.node.withdraw("web.yaml")?;

    are_ended(&sockets)
}

#[test]
fn what_a_daemon_left_that_was_killed_is_ended_by_the_next_one() -> Result<()> {
    // The first daemon removes the backend but ends no sockets, like a daemon that is killed in between.
    let scene = ending("[]")?;
    let lost = scene.connected(WEB, "one")?;
    scene.lead_to(&["two"])?;
    until_backends(&scene.node, "web", 1)?;
    let serving = scene.open(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        wait::until(CHANGE, || {
            let again = socket.connect(way.to(WEB, DNS)).is_ok();
            again && ask(&socket).is_ok_and(|name| name == "two")
        })?;
        Ok(socket)
    })?;
    are_answered(&lost, "one")?;

    scene.node.kill9()?;
    configure(&scene.node, "sockets", "{ terminate: [udp] }")?;
    scene.node.start()?;

    are_ended(&lost)?;
    scene.until_ended(lost.len())?;
    are_answered(&serving, "two")?;
    // The same for a backend that is removed while no daemon runs.
    scene.node.kill9()?;
    scene.lead_to(&["one"])?;
    scene.node.start()?;
    are_ended(&serving)?;
    scene.until_ended(serving.len())
}
