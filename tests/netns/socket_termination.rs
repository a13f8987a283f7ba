//! Tests that when a backend is removed, the daemon terminates the sockets connected to it, and no others.

use std::{net::UdpSocket, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::errno::Errno;
use tunnel_tests::{
    clock::Instant,
    feature::{self, Feature},
    load_scale::LoadScale,
    test_name, wait,
};

use crate::{
    fixture::{Client, OTHER, Scene, WEB, configure, expect_all_ended, expect_answers},
    service_addresses::{self, BALANCER, EXTERNAL},
    support::{
        CHANGE_TIMEOUT, DNS, DNS_TARGET, Dialer, HOST, HTTP, RECOVERY_LIMIT, Vip, ensure_eq, errno,
        expect_ended, http_server_name, query, receive, until_backends, until_eq,
    },
};

/// Starts a node with the Service `web`, whose backend is `one`, and a daemon that terminates sockets of the
/// given protocols.
fn ending(protocols: &str) -> Result<Scene> {
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    configure(
        &scene.node,
        "sockets",
        &format!("{{ terminate: {protocols} }}"),
    )?;
    scene.node.start()?;
    Ok(scene)
}

impl Scene {
    fn answers_of_one(&self) -> Result<u64> {
        Ok(self.backend("one")?.server.record()?.total().answered)
    }
}

/// Waits until all of the given sockets have been terminated. Sending on them must then fail.
fn expect_all_disconnected(sockets: &[(Client<'_>, UdpSocket)]) -> Result<()> {
    expect_all_ended(sockets)?;
    for (client, socket) in sockets {
        let failed = errno(socket.send(b"who?"));
        ensure_eq("send", failed, Errno::EDESTADDRREQ).with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn a_connected_client_gets_another_backend_at_once_when_its_own_is_removed() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = ending("[udp]")?;
    let sockets = scene.connect_udp_clients(WEB, "one")?;
    let count = sockets.len();

    let longest = thread::scope(|scope| -> Result<_> {
        let mut recovered = Vec::new();
        for (client, socket) in sockets {
            recovered.push(scope.spawn(move || -> Result<Instant> {
                expect_ended(&socket).with_context(|| client.to_string())?;
                socket.connect(client.dialer.address(WEB, DNS))?;
                ensure_eq("server", query(&socket)?, "two")?;
                Ok(Instant::now())
            }));
        }
        let start = Instant::now();
        scene.apply_web(&["two"])?;
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
    let allowed = LoadScale::from_environment().timeout(RECOVERY_LIMIT);
    ensure!(longest < allowed, "recovered only after {longest:?}");
    Ok(())
}

#[test]
fn no_datagram_reaches_the_last_backend_after_its_removal_or_that_of_the_service() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    for is_deleted in [false, true] {
        let scene = ending("[udp]")?;
        let sockets = scene.connect_udp_clients(WEB, "one")?;
        let answers = scene.answers_of_one()?;

        if is_deleted {
            scene.node.delete("web.yaml")?;
        } else {
            scene.apply_web(&[])?;
        }

        expect_all_disconnected(&sockets)?;
        for (client, socket) in sockets.iter().filter(|_| !is_deleted) {
            let connected = socket.connect(client.dialer.address(WEB, DNS));
            let answered = connected.is_ok() && query(socket).is_ok();
            ensure!(!answered, "{client} is answered");
        }
        ensure_eq("datagrams", scene.answers_of_one()?, answers)?;
    }
    Ok(())
}

#[test]
fn no_datagram_reaches_the_removed_last_backend_by_other_addresses_of_the_service() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = Scene::new(&["one"])?;
    scene.start([service_addresses::service_at_all_addresses().backends(scene.all_addresses())])?;
    let destinations = [
        (EXTERNAL, DNS),
        (BALANCER, DNS),
        (HOST, service_addresses::NODE_DNS),
    ];
    let mut sockets = Vec::new();
    for (vip, port) in destinations {
        sockets.extend(scene.map_clients(&Dialer::UDP, |sandbox, dialer| {
            dialer.connect_udp_to(sandbox, vip, port, "one")
        })?);
    }
    let answers = scene.answers_of_one()?;

    scene
        .node
        .apply(service_addresses::service_at_all_addresses())?;

    expect_all_disconnected(&sockets)?;
    ensure_eq("datagrams", scene.answers_of_one()?, answers)
}

#[test]
fn an_unconnected_socket_changes_its_backend_and_still_receives_from_the_removed_one() -> Result<()>
{
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = ending("[udp]")?;
    let late = scene.node.pod("late")?;
    let listener = late.udp(("::", DNS_TARGET))?;
    let sockets = scene.map_clients(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        dialer.expect_answer(&socket, WEB, DNS, "one")?;
        Ok(socket)
    })?;
    let witnesses = scene.connect_udp_clients(WEB, "one")?;

    // All flows move to the backend `late`, which replies only after it has been removed itself.
    let service = WEB.service("web").backends([late.v4(), late.v6()]);
    scene.node.apply(service)?;
    scene.until_ended(witnesses.len())?;
    let mut waiting = Vec::new();
    for (client, socket) in sockets {
        socket.send_to(b"who?", client.dialer.address(WEB, DNS))?;
        let (_, from) = listener.recv_from(&mut [0; 64])?;
        waiting.push((client, socket, from));
    }
    let more = scene.map_clients(&Dialer::UDP, |sandbox, dialer| {
        Ok(dialer.connect_udp(sandbox, WEB, DNS)?)
    })?;

    scene.apply_web(&["two"])?;
    more.iter()
        .try_for_each(|(_, socket)| expect_ended(socket))?;

    for (client, socket, from) in &waiting {
        let check = || {
            listener.send_to(b"late answer", from)?;
            let expected = ("late".to_owned(), client.dialer.reported_address(WEB, DNS));
            ensure_eq("answer", receive(socket)?, expected)?;
            client.dialer.expect_answer(socket, WEB, DNS, "two")
        };
        check().with_context(|| client.to_string())?;
    }
    scene.until_ended(witnesses.len() + more.len())
}

#[test]
fn a_tcp_connection_continues_with_a_removed_backend() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = ending("[udp]")?;
    let streams = scene.map_clients(&Dialer::TCP, |sandbox, dialer| {
        Ok(dialer.connect(sandbox, WEB, HTTP)?)
    })?;
    let witnesses = scene.connect_udp_clients(WEB, "one")?;

    scene.apply_web(&["two"])?;
    scene.until_ended(witnesses.len())?;

    for (client, stream) in streams {
        ensure_eq(
            "peer",
            stream.peer_addr()?,
            client.dialer.reported_address(WEB, HTTP),
        )?;
        let name = http_server_name(stream).with_context(|| client.to_string())?;
        ensure_eq("server", name, "one")?;
    }
    Ok(())
}

#[test]
fn a_tcp_connection_is_ended_if_the_config_says_so() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = ending("[tcp]")?;
    let streams = scene.map_clients(&Dialer::TCP, |sandbox, dialer| {
        Ok(dialer.connect(sandbox, WEB, HTTP)?)
    })?;
    let direct = scene
        .client
        .connect(scene.backend("one")?.addr_v4(crate::support::HTTP_TARGET))?;
    let stays = scene.connect_udp_clients(WEB, "one")?;

    scene.apply_web(&["two"])?;

    for (client, stream) in &streams {
        let error = errno(stream.peek(&mut [0]));
        ensure_eq("error", error, Errno::ECONNABORTED).with_context(|| client.to_string())?;
    }
    scene.until_ended(streams.len())?;
    ensure_eq("server", http_server_name(direct)?, "one")?;
    expect_answers(&stays, "one")
}

#[test]
fn a_socket_that_was_not_translated_to_the_backend_is_not_ended() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = ending("[udp]")?;
    scene.apply_service(OTHER, "other", &["two"])?;
    until_backends(&scene.node, "other", 1)?;
    let one = Vip::of_pod(scene.backend("one")?);
    let two = Vip::of_pod(scene.backend("two")?);
    let mut direct = Vec::new();
    for (client, ()) in scene.map_clients(&Dialer::UDP, |_, _| Ok(()))? {
        let dialer = client.dialer;
        // A socket connected directly to the backend, which has never used the Service.
        let plain = dialer.connect_udp(client.sandbox, one, DNS_TARGET)?;
        direct.push((client, plain, "one"));
        // A socket that used the Service before it was connected directly to the backend.
        let former = dialer.connect_udp(client.sandbox, WEB, DNS)?;
        former.connect(dialer.address(one, DNS_TARGET))?;
        direct.push((client, former, "one"));
        // A socket that sends to the Service while it is connected to another address.
        let besides = dialer.connect_udp(client.sandbox, two, DNS_TARGET)?;
        besides.send_to(b"who?", dialer.address(WEB, DNS))?;
        direct.push((client, besides, "two"));
        // Sockets that send to the Service while they are connected directly to the backend.
        for others in [&[WEB][..], &[WEB, OTHER], &[WEB, OTHER, WEB]] {
            let both = dialer.connect_udp(client.sandbox, one, DNS_TARGET)?;
            for vip in others {
                both.send_to(b"who?", dialer.address(*vip, DNS))?;
            }
            let expected = dialer.reported_address(one, DNS_TARGET);
            ensure_eq("peer", both.peer_addr()?, expected)?;
            direct.push((client, both, "one"));
        }
    }
    let witnesses = scene.connect_udp_clients(WEB, "one")?;

    scene.apply_web(&["two"])?;
    scene.until_ended(witnesses.len())?;

    for (client, socket, name) in &direct {
        let answer = query(socket).and_then(|server| ensure_eq("server", server, *name));
        answer.with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
fn a_socket_that_sent_to_another_service_is_ended_with_its_own_backend() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = ending("[udp]")?;
    scene.apply_service(OTHER, "other", &["two"])?;
    until_backends(&scene.node, "other", 1)?;
    let sockets = scene.connect_udp_clients(WEB, "one")?;
    for (client, socket) in &sockets {
        socket.send_to(b"who?", client.dialer.address(OTHER, DNS))?;
    }

    scene.node.delete("web.yaml")?;

    expect_all_ended(&sockets)
}

#[test]
fn sockets_that_a_killed_daemon_did_not_end_are_ended_by_the_next_one() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    // The first daemon removes the backend but does not terminate any sockets, as if it had been killed in
    // between.
    let scene = ending("[]")?;
    let lost = scene.connect_udp_clients(WEB, "one")?;
    scene.apply_web(&["two"])?;
    until_backends(&scene.node, "web", 1)?;
    let serving = scene.map_clients(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        wait::until(CHANGE_TIMEOUT, || {
            let again = socket.connect(dialer.address(WEB, DNS)).is_ok();
            again && query(&socket).is_ok_and(|name| name == "two")
        })?;
        Ok(socket)
    })?;
    expect_answers(&lost, "one")?;

    scene.node.kill9()?;
    configure(&scene.node, "sockets", "{ terminate: [udp] }")?;
    scene.node.start()?;

    expect_all_ended(&lost)?;
    scene.until_ended(lost.len())?;
    expect_answers(&serving, "two")?;
    // Sockets are also terminated if their backend was removed while no daemon was running.
    scene.node.kill9()?;
    scene.apply_web(&["one"])?;
    scene.node.start()?;
    expect_all_ended(&serving)?;
    scene.until_ended(serving.len())
}

#[test]
fn a_daemon_in_another_pid_namespace_ends_the_sockets_of_the_host_and_says_why_no_others()
-> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    configure(&scene.node, "sockets", "{ terminate: [udp, tcp] }")?;
    let prefix = ["unshare", "--pid", "--fork", "--kill-child=SIGTERM"].map(str::to_owned);
    scene.node.launch_with(&prefix)?;
    scene.node.wait_ready()?;
    let sockets = scene.connect_udp_clients(WEB, "one")?;
    let (of_host, of_pod) = sockets.split_at(Dialer::UDP.len());
    let streams = scene.map_clients(&Dialer::TCP, |sandbox, dialer| {
        Ok(dialer.connect(sandbox, WEB, HTTP)?)
    })?;

    scene.apply_web(&["two"])?;

    expect_all_ended(of_host)?;
    expect_answers(of_pod, "one")?;
    for (client, stream) in &streams[..Dialer::TCP.len()] {
        let error = errno(stream.peek(&mut [0]));
        ensure_eq("error", error, Errno::ECONNABORTED).with_context(|| client.to_string())?;
    }
    let reason = "this process is not in the host's PID namespace (hostPID)";
    let unreached = || Ok(scene.node.status()?["sockets"]["pods"]["unreached"].take());
    until_eq("reason", serde_json::Value::from(reason), unreached)
}
