//! `culvert explain`: what becomes of packets and connections, without an effect on the node.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray};
use serde_json::Value;
use tunnel_common::affinity::{Affinity, AffinityKey};
use tunnel_tests::{manifest::Protocol, wait};

use super::{
    ADDRESSES, CLIENT, ENABLED, REMOTE, connect_to_node_port, exchange_stream, expect_reached,
    host::outside_the_cgroup, service, start_with_remote_backend,
};
use crate::{
    fixture::{Scene, WEB},
    service_addresses::{NODE_HTTP, configured},
    support::{CHANGE_TIMEOUT, Dialer, HOST, HTTP, HTTP_TARGET, ensure_eq, maps_directory, run},
};

/// The Service's port for SCTP.
const SIGNAL: u16 = 3868;

/// Returns the answer of `culvert explain`.
pub(super) fn explain(scene: &Scene, arguments: &[&str]) -> Result<Value> {
    let arguments = [&["explain", "--output", "json"], arguments].concat();
    let output = scene.node.culvert(&arguments)?;
    ensure!(output.stderr.is_empty(), "{}", output.stderr);
    serde_json::from_str(&output.stdout).with_context(|| output.stdout.clone())
}

/// The entries of a map, as bytes.
type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

fn hash<const K: usize, const V: usize>(pin: PathBuf, is_lru: bool) -> Result<Entries> {
    let data = MapData::from_pin(pin)?;
    let map = if is_lru {
        Map::LruHashMap(data)
    } else {
        Map::HashMap(data)
    };
    let map = HashMap::<_, [u8; K], [u8; V]>::try_from(map)?;
    let entries = map
        .iter()
        .map(|entry| entry.map(|(key, value)| (key.to_vec(), value.to_vec())));
    Ok(entries.collect::<Result<_, _>>()?)
}

fn array<const V: usize>(pin: PathBuf) -> Result<Entries> {
    let map = Array::<_, [u8; V]>::try_from(Map::Array(MapData::from_pin(pin)?))?;
    let entries = (0..map.len()).map(|index| {
        let value: [u8; V] = map.get(&index, 0)?;
        Ok((index.to_ne_bytes().to_vec(), value.to_vec()))
    });
    entries.collect()
}

/// The sizes of a key and a value of the map `affinity`.
const AFFINITY_KEY: usize = size_of::<AffinityKey>();
const AFFINITY: usize = size_of::<Affinity>();

/// Reads the maps that the programs write.
fn written_maps(scene: &Scene) -> Result<Vec<(&'static str, Entries)>> {
    let pin = |name: &str| scene.node.bpffs().join(maps_directory("")).join(name);
    let counts = PerCpuArray::<_, u64>::try_from(Map::PerCpuArray(MapData::from_pin(pin(
        "reason_counts",
    ))?))?;
    let mut reasons = Entries::new();
    for index in 0..counts.len() {
        let count: u64 = counts.get(&index, 0)?.iter().sum();
        reasons.insert(index.to_ne_bytes().to_vec(), count.to_ne_bytes().to_vec());
    }
    let arrays = [
        ("recent_flows", array::<44>(pin("recent_flows"))?),
        ("recent_counts", array::<4>(pin("recent_counts"))?),
        ("packet_state", array::<8>(pin("packet_state"))?),
        ("service_counts", array::<24>(pin("service_counts"))?),
    ];
    let hashes = [
        ("flows", hash::<44, 104>(pin("flows"), false)?),
        ("fragments", hash::<40, 64>(pin("fragments"), true)?),
        ("packet_links", hash::<4, 36>(pin("packet_links"), false)?),
        (
            "affinity",
            hash::<AFFINITY_KEY, AFFINITY>(pin("affinity"), true)?,
        ),
        ("reason_counts", reasons),
    ];
    Ok(hashes.into_iter().chain(arrays).collect())
}

#[test]
fn an_explanation_follows_a_packet_to_its_backend_and_changes_no_map() -> Result<()> {
    let scene = configured("packets: { refusalsPerSecond: 5 }")?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let (_, vip, _) = ADDRESSES[1];
    let (one, other) = connect_to_node_port(scene.node.outside(), &backend)?;
    exchange_stream(&one, &other)?;
    let node_port = format!("{}:{NODE_HTTP}/TCP", vip.v4);
    let before = written_maps(&scene)?;
    ensure!(
        before
            .iter()
            .any(|(name, entries)| *name == "flows" && entries.len() == 3)
    );

    // A new flow, the open one, and one that is refused.
    let new = explain(&scene, &["--from", "192.0.2.2", "--to", &node_port])?;
    ensure_eq("outcome", new["outcome"].as_str(), Some("delivered"))?;
    ensure_eq("reason", new["reason"].as_str(), Some("translated"))?;
    ensure_eq("backend", new["backend"].as_str(), Some("203.0.113.2:8080"))?;
    let seen = new["seenAs"].as_str().unwrap_or_default();
    ensure!(seen.starts_with("192.0.2.1:"), "seen as {seen}");
    let client = one.local_addr()?.to_string();
    let open = explain(&scene, &["--from", &client, "--to", &node_port])?;
    let steps = open["steps"].to_string();
    ensure!(steps.contains("established with the backend"), "{steps}");
    let seen = other.peer_addr()?.to_string();
    ensure_eq("seen as", open["seenAs"].as_str(), Some(&*seen))?;

    ensure_eq("maps", written_maps(&scene)?, before)?;
    exchange_stream(&one, &other)
}

#[test]
fn an_explanation_follows_a_packet_of_this_host() -> Result<()> {
    let scene = configured(ENABLED)?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let process = outside_the_cgroup(&scene, CLIENT)?;
    let before = written_maps(&scene)?;
    let (what, vip, ports) = ADDRESSES[0];
    for (dialler, own) in [Dialer::V4, Dialer::V6].into_iter().zip(HOST.ips()) {
        let to = dialler.address(vip, ports[0]).to_string();
        let from = own.to_string();
        let packet = explain(&scene, &["--from", &from, "--to", &to, "--by", "uplink"])?;
        ensure_eq("outcome", packet["outcome"].as_str(), Some("delivered"))?;
        let at = dialler.address(REMOTE, HTTP_TARGET).to_string();
        ensure_eq("backend", packet["backend"].as_str(), Some(&*at))?;
        let seen: SocketAddr = packet["seenAs"].as_str().context("no sender")?.parse()?;
        ensure_eq("seen as", seen.ip(), own)?;
        let socket = explain(&scene, &["--from", &from, "--to", &to])?;
        ensure_eq("kind", socket["kind"].as_str(), Some("socket"))?;
    }
    ensure_eq("maps", written_maps(&scene)?, before)?;
    expect_reached(&process, &backend, (vip, ports), HOST.ips()).context(what)?;

    // A Service that is excluded from sockets has the packets of all processes.
    let excluded = service("Cluster").annotated("culvert.dev/socket-translation", "disabled");
    scene.node.apply(excluded.backends(REMOTE.ips()))?;
    let to = format!("{}:{HTTP}", WEB.v4);
    let from = HOST.v4.to_string();
    let steps = || {
        let answer = explain(&scene, &["--from", &from, "--to", &to]).unwrap_or_default();
        (
            answer["outcome"] == "delivered",
            answer["steps"].to_string(),
        )
    };
    wait::until(CHANGE_TIMEOUT, || steps().1.contains("leaves by uplink"))?;
    let (is_delivered, followed) = steps();
    ensure!(
        is_delivered && followed.contains("does not serve this socket"),
        "{followed}"
    );

    // The route may depend on the source.
    let rule = format!("from {from} to {} unreachable", WEB.v4);
    run(scene.node.host(), &format!("ip rule add {rule}"))?;
    let (_, steps) = steps();
    ensure!(steps.contains("no way to the receiver"), "{steps}");
    run(scene.node.host(), &format!("ip rule del {rule}"))?;

    // Packets to the host's own addresses reach no link.
    let own = format!("{}:{NODE_HTTP}", HOST.v4);
    for by in [&["--by", "uplink"][..], &[]] {
        let answer = explain(&scene, &[&["--from", &from, "--to", &own], by].concat())?;
        ensure_eq("outcome", answer["outcome"].as_str(), Some("leftAlone"))?;
        let steps = answer["steps"].to_string();
        ensure!(steps.contains("reach no link"), "{steps}");
    }

    // Without the programs on the link to the backend, packets are refused.
    let pod = scene.node.pod("local")?;
    scene
        .node
        .apply(service("Cluster").backends([pod.v4(), pod.v6()]))?;
    let refused = || {
        let answer = explain(&scene, &["--from", &from, "--to", &to, "--by", "uplink"]);
        let answer = answer.unwrap_or_default();
        answer["outcome"] == "refused" && answer["reason"] == "host_no_route"
    };
    wait::until(CHANGE_TIMEOUT, refused).context("not refused")
}

#[test]
#[ignore = "independent of the kernel: the tests above run the programs for an explanation"]
fn what_a_pod_sends_past_the_programs_at_the_sockets_arrives_at_its_link() -> Result<()> {
    let scene = configured("packets: { links: all }")?;
    let (_remote, _backend) = start_with_remote_backend(&scene)?;
    let pod = scene.node.pod("client")?;
    let before = written_maps(&scene)?;
    let to_unused = format!("{}:{}", WEB.v4, HTTP + 1);
    let unused = explain(
        &scene,
        &["--from", &pod.v4().to_string(), "--to", &to_unused],
    )?;
    ensure_eq("outcome", unused["outcome"].as_str(), Some("refused"))?;
    let reason = unused["reason"].as_str();
    ensure_eq("reason", reason, Some("cluster_port_unused"))?;

    // With session affinity, the explanation keeps no client.
    scene.node.apply(
        service("Cluster")
            .spec("sessionAffinity: ClientIP")
            .annotated("culvert.dev/socket-translation", "disabled")
            .backends(REMOTE.ips()),
    )?;
    let to = format!("{}:{HTTP}", WEB.v4);
    let delivered = || {
        let answer = explain(&scene, &["--from", &pod.v4().to_string(), "--to", &to]);
        let answer = answer.unwrap_or_default();
        answer["outcome"] == "delivered" && answer["backend"] == "203.0.113.2:8080"
    };
    wait::until(CHANGE_TIMEOUT, delivered).context("not delivered")?;
    ensure_eq("maps", written_maps(&scene)?, before)
}

#[test]
#[ignore = "independent of the kernel: the test above runs the programs for an explanation"]
fn an_explanation_names_what_is_refused_dropped_and_left_alone() -> Result<()> {
    let scene = configured("packets: { enabled: true }")?;
    super::route_to_node(&scene)?;
    scene.node.start()?;
    scene.program(service("Cluster").port(Protocol::SCTP, SIGNAL, SIGNAL))?;
    let explained = |arguments: &[&str]| -> Result<(String, String)> {
        let answer = explain(&scene, arguments)?;
        let text = |key: &str| answer[key].as_str().unwrap_or("none").to_owned();
        Ok((text("outcome"), text("reason")))
    };
    let expected = |outcome: &str, reason: &str| (outcome.to_owned(), reason.to_owned());
    let vip = format!("{}:{HTTP}", WEB.v4);
    let refused = explained(&["--from", "192.0.2.2", "--to", &vip])?;
    ensure_eq("outside", refused, expected("refused", "no_backend"))?;
    let socket = explained(&["--from", "192.0.2.1", "--to", &vip])?;
    ensure_eq("this host", socket, expected("refused", "no_backend"))?;
    let signal = format!("{}:{SIGNAL}/SCTP", WEB.v4);
    let refused = explained(&["--from", "192.0.2.2", "--to", &signal])?;
    ensure_eq("SCTP", refused, expected("refused", "no_backend"))?;
    let other_port = format!("{}:1", WEB.v4);
    let foreign = explained(&["--from", "192.0.2.2", "--to", &other_port])?;
    let unused = expected("refused", "cluster_port_unused");
    ensure_eq("another port", foreign, unused)?;
    let elsewhere = explained(&["--from", "192.0.2.2", "--to", &vip, "--by", "lo"])?;
    ensure_eq("another link", elsewhere, expected("leftAlone", "none"))?;

    let table = scene
        .node
        .culvert(&["explain", "--from", "192.0.2.2", "--service", "web"])?;
    ensure_eq("errors", table.stderr.as_str(), "")?;
    let refused = table.stdout.matches("refused (no_backend)").count();
    ensure!(refused == 11, "{refused}: {}", table.stdout);
    let wrong =
        scene
            .node
            .culvert(&["explain", "--from", "192.0.2.2", "--to", &vip, "--by", "x"])?;
    ensure!(wrong.stderr.contains("no link x"), "{}", wrong.stderr);
    Ok(())
}
