//! Tests the backend that is stored with each UDP socket, and sockets for which there is no memory to store
//! one.

use std::{collections::BTreeSet, net::UdpSocket, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Map, MapData, SkStorage};
use nix::{errno::Errno, time::ClockId};
use tunnel_common::{
    older::OlderFew,
    origin::{Origin, UDP_IDLE_NS},
    table,
};
use tunnel_tests::{
    feature::{self, Feature},
    manifest::{Protocol, Service},
    sandbox::RESPONSE_TIMEOUT,
    shared_fixture::SharedFixture,
    test_name, wait,
};

use crate::{
    fixture::{OTHER, Scene, WEB},
    support::{
        DNS, DNS_TARGET, Dialer, HTTP, HTTP_TARGET, Vip, count_during, ensure_eq, errno,
        http_server_name, maps_directory, query, query_to, receive, run, until_backends,
        until_each_has,
    },
};

static SCENE: SharedFixture<Scene> =
    SharedFixture::new(|| Scene::web(&["one", "two", "three"])?.record_manifests());

/// Sends `count` datagrams, all of which the same server must answer, and returns that server's name.
fn steady(socket: &UdpSocket, dialer: Dialer, count: u32) -> Result<String> {
    let (first, _) = query_to(socket, dialer.address(WEB, DNS))?;
    for number in 1..count {
        let (name, sender) = query_to(socket, dialer.address(WEB, DNS))?;
        ensure_eq(&format!("datagram {number}"), &name, &first)?;
        ensure_eq("sender", sender, dialer.reported_address(WEB, DNS))?;
    }
    Ok(first)
}

#[test]
fn datagrams_of_a_socket_stay_with_their_backend_until_it_is_removed() -> Result<()> {
    let scene = SCENE.lease()?;
    let without = |name: &str| WEB.service("web").backends(scene.addresses_without(name));

    for dialer in Dialer::UDP {
        let socket = dialer.udp_socket(&scene.client)?;
        let (first, increases) =
            count_during(&scene.node, &["translated", "translated_sticky"], || {
                steady(&socket, dialer, 100)
            })?;
        ensure_eq("counted", increases, vec![1, 99])?;

        let leaving = scene.addresses(&[&first])?.into_iter();
        let terminating = leaving.fold(without(&first), Service::terminating);
        scene.node.apply(terminating)?;
        until_backends(&scene.node, "web", 2)?;
        ensure_eq(
            "server while the backend terminates",
            steady(&socket, dialer, 10)?,
            first.clone(),
        )?;
        for _ in 0..20 {
            let (fresh, _) =
                query_to(&dialer.udp_socket(&scene.client)?, dialer.address(WEB, DNS))?;
            ensure!(fresh != first, "a new socket got the terminating backend");
        }

        scene.node.apply(without(&first))?;
        until_each_has(&scene.node, "web", "draining", 0)?;
        let second = steady(&socket, dialer, 10)?;
        ensure!(
            second != first,
            "the socket still uses the removed backend {first}"
        );

        scene.node.apply(without(""))?;
        until_backends(&scene.node, "web", 3)?;
        ensure_eq(
            "server after the return of the backend",
            steady(&socket, dialer, 10)?,
            second,
        )?;
    }
    scene.give_back()
}

#[test]
fn late_answers_of_a_removed_backend_do_not_change_the_backend_of_a_socket() -> Result<()> {
    const MOVED: Vip = Vip::of(20);
    const FILLER: Vip = Vip::of(21);
    const FIRST_PORT: u16 = 2000;
    let scene = SCENE.lease()?;
    let late = scene.node.pod("late")?;
    let listener = late.udp(("::", DNS_TARGET))?;
    let moved = || MOVED.service("moved");
    // Enough ports to move all other translations of a socket to `older_many`.
    let ports = FIRST_PORT..FIRST_PORT + 12;
    let filler = Service::new("filler", FILLER.ips());
    let filler = ports.clone().fold(filler, |filler, port| {
        filler.port(Protocol::UDP, port, DNS_TARGET)
    });
    scene.program(filler.backends(scene.addresses(&["one"])?))?;
    scene.program(moved().backends([late.v4(), late.v6()]))?;
    let sockets = scene.map_clients(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        socket.send_to(b"who?", dialer.address(MOVED, DNS))?;
        let (_, from) = listener.recv_from(&mut [0; 64])?;
        Ok((socket, from))
    })?;

    scene.node.apply(moved().backends(scene.all_addresses()))?;
    until_backends(&scene.node, "moved", 3)?;

    for (client, (socket, from)) in &sockets {
        let dialer = client.dialer;
        let ask = || query_to(socket, dialer.address(MOVED, DNS)).map(|(server, _)| server);
        let check = || -> Result<()> {
            let server = ask()?;
            for others in [1, ports.len(), 1] {
                for port in ports.clone().take(others) {
                    dialer.expect_answer(socket, FILLER, port, "one")?;
                }
                listener.send_to(b"late answer", from)?;
                let expected = ("late".to_owned(), dialer.reported_address(MOVED, DNS));
                ensure_eq("late answer", receive(socket)?, expected)?;
                let (again, increases) = count_during(&scene.node, &["translated"], ask)?;
                ensure_eq(
                    "server, new choices",
                    (&again, increases),
                    (&server, vec![0]),
                )?;
            }
            Ok(())
        };
        check().with_context(|| client.to_string())?;
    }
    scene.give_back()
}

/// Changes all values of a socket in a pinned map so that each translation was last used at `time`.
fn set_last_used<const SIZE: usize>(
    scene: &Scene,
    map: &table::Map,
    socket: &UdpSocket,
    time: u64,
) -> Result<()> {
    let pin = scene.node.bpffs().join(maps_directory("")).join(map.name);
    let mut map = SkStorage::<_, [u8; SIZE]>::try_from(Map::SkStorage(MapData::from_pin(pin)?))?;
    let mut value = map.get(socket, 0)?;
    for origin in value.chunks_exact_mut(size_of::<Origin>()) {
        origin[..8].copy_from_slice(&time.to_ne_bytes());
    }
    Ok(map.insert(socket, value, 0)?)
}

#[test]
fn the_flow_of_a_connected_socket_is_never_idle() -> Result<()> {
    const TWO_MINUTES_AGO: &str = "the machine has run for two minutes";
    const ORIGIN_SIZE: usize = size_of::<Origin>();
    const FEW_SIZE: usize = size_of::<OlderFew>();
    let now = || ClockId::CLOCK_MONOTONIC.now().map(Duration::from);
    let idle = Duration::from_nanos(UDP_IDLE_NS);
    wait::until(2 * idle, || now().is_ok_and(|now| now > idle)).context(TWO_MINUTES_AGO)?;
    let long_ago = u64::try_from((now()? - idle).as_nanos())?;
    let scene = SCENE.lease()?;
    scene.program(OTHER.service("other").backends(scene.addresses(&["one"])?))?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let to = dialer.address(WEB, DNS);
        let expect_kept = |socket: &UdpSocket, is_kept: bool| -> Result<()> {
            let reasons = ["translated_sticky", "translated"];
            let (_, increases) =
                count_during(&scene.node, &reasons, || Ok(socket.send_to(b"who?", to)?))?;
            let expected = vec![u64::from(is_kept), u64::from(!is_kept)];
            ensure_eq("kept, chosen again", increases, expected)
        };
        let unconnected = dialer.udp_socket(sandbox)?;
        query_to(&unconnected, to)?;
        set_last_used::<ORIGIN_SIZE>(&scene, &table::ORIGIN, &unconnected, long_ago)?;
        expect_kept(&unconnected, false)?;

        // For a v4-mapped socket, the send hook runs for each send(), too.
        let connected = dialer.connect_udp(sandbox, WEB, DNS)?;
        let server = query(&connected)?;
        set_last_used::<ORIGIN_SIZE>(&scene, &table::ORIGIN, &connected, long_ago)?;
        expect_kept(&connected, true)?;
        ensure_eq("server", receive(&connected)?.0, &*server)?;

        // The translation to the peer is in `older_few`.
        connected.send_to(b"who?", dialer.address(OTHER, DNS))?;
        set_last_used::<FEW_SIZE>(&scene, &table::OLDER_FEW, &connected, long_ago)?;
        expect_kept(&connected, true)?;
        let others = &connected;
        wait::until(RESPONSE_TIMEOUT, || {
            receive(others).is_ok_and(|(name, _)| name == server)
        })?;
        ensure_eq("server", query(&connected)?, server)
    })?;
    scene.give_back()
}

#[test]
fn new_sockets_are_spread_over_all_backends() -> Result<()> {
    let scene = SCENE.lease()?;
    for dialer in [Dialer::V4, Dialer::V6, Dialer::Mapped] {
        let [mut tcp, mut connected, mut unconnected] = [const { BTreeSet::new() }; 3];
        // The probability that one of the three backends is never chosen in 60 attempts is 10^-10.
        for _ in 0..60 {
            tcp.insert(dialer.dial(&scene.client, WEB, HTTP)?);
            let socket = dialer.udp_socket(&scene.client)?;
            unconnected.insert(query_to(&socket, dialer.address(WEB, DNS))?.0);
            connected.insert(query(&dialer.connect_udp(&scene.client, WEB, DNS)?)?);
        }
        let servers = [tcp.len(), connected.len(), unconnected.len()];
        ensure_eq("servers", servers, [3; 3])?;
    }
    scene.give_back()
}

#[test]
fn without_memory_for_socket_storage_tcp_is_counted_and_udp_is_refused() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::OwnOptmem])? {
        return Ok(());
    }
    let scene = SCENE.lease()?;
    let reasons = [
        "translated_untracked",
        "socket_storage_full",
        "socket_tracked",
    ];
    let room = "net.core.optmem_max";
    let before = run(&scene.client, "cat /proc/sys/net/core/optmem_max")?;
    scene.client.sysctl(room, "1")?;

    for dialer in Dialer::TCP {
        let (stream, increases) = count_during(&scene.node, &reasons, || {
            Ok(dialer.connect(&scene.client, WEB, HTTP)?)
        })?;
        ensure_eq("counted", increases, vec![1, 0, 0])?;
        // Without socket storage, the socket's peer is the backend itself.
        ensure_eq("port", stream.peer_addr()?.port(), HTTP_TARGET)?;
        ensure!(!http_server_name(stream)?.is_empty());
    }
    for dialer in Dialer::UDP {
        let (failed, increases) = count_during(&scene.node, &reasons, || {
            let socket = dialer.udp_socket(&scene.client)?;
            let to = dialer.address(WEB, DNS);
            let refused = [socket.connect(to), socket.send_to(b"who?", to).map(drop)];
            Ok(refused.map(errno))
        })?;
        ensure_eq("errors", failed, [Errno::ENOMEM; 2])?;
        ensure_eq("counted", increases, vec![0, 2, 0])?;
    }

    scene.client.sysctl(room, before.trim())?;
    for dialer in Dialer::TCP {
        let (stream, increases) = count_during(&scene.node, &reasons, || {
            Ok(dialer.connect(&scene.client, WEB, HTTP)?)
        })?;
        ensure_eq("counted", increases, vec![0, 0, 1])?;
        ensure_eq(
            "peer",
            stream.peer_addr()?,
            dialer.reported_address(WEB, HTTP),
        )?;
    }
    scene.give_back()
}
