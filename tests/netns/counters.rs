//! Tests that connections and datagrams are counted exactly, and that `round-robin` distributes connections
//! evenly.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};
use tunnel_tests::{
    admin,
    load::{self, Plan, udp::Mode},
    load_scale::LoadScale,
    node::Node,
    pod::Pod,
    shared_fixture::{Lease, SharedFixture},
    wait,
};

use crate::{
    background_load::expect_all_answered,
    fixture::{OTHER, Scene, WEB},
    race::map_writers::pin_to_cpu,
    support::{
        CHANGE_TIMEOUT, DNS, Dialer, HTTP, count_during, ensure_eq, ports, query_to, until_eq,
    },
};

/// The number of connections whose distribution is measured.
const SAMPLE: u64 = 300;

static SCENE: SharedFixture<Scene> = SharedFixture::new(|| Scene::started(&BACKENDS));
const BACKENDS: [&str; 3] = ["one", "two", "three"];

/// Leases the shared scene and programs a Service that uses the given algorithm.
fn start(algorithm: &str) -> Result<Lease<Scene>> {
    let scene = SCENE.lease()?;
    let web = WEB.service("web").backends(scene.all_addresses());
    scene.program(web.annotated("culvert.dev/algorithm", algorithm))?;
    Ok(scene)
}

/// Waits until every tracked socket has been released, and returns how many sockets have been tracked so far.
pub(crate) fn until_released(node: &Node) -> Result<u64> {
    let (mut tracked, mut released) = (0, 0);
    wait::until(CHANGE_TIMEOUT, || {
        released = node.reason_count("socket_released").unwrap_or(0);
        tracked = node.reason_count("socket_tracked").unwrap_or(0);
        tracked > 0 && tracked == released
    })
    .with_context(|| format!("{tracked} sockets were tracked, {released} released"))?;
    Ok(tracked)
}

#[test]
fn every_connect_and_first_datagram_is_counted_once() -> Result<()> {
    let scene = start("random")?;
    let node = &scene.node;
    let rate = LoadScale::from_environment().count(500);
    let reasons = ["translated", "socket_tracked", "socket_released"];

    for (from, sandbox) in scene.sandboxes() {
        let sockets = |domain, kind| sandbox.socket(domain, kind);
        let plan = |to| Plan::new(to, rate, Duration::from_millis(300));
        let before = until_released(node)?;
        let (reports, increases) = count_during(node, &reasons, || {
            let reports = [Dialer::V4, Dialer::V6].map(|dialer| {
                let (http, dns) = (
                    plan(dialer.address(WEB, HTTP)),
                    plan(dialer.address(WEB, DNS)),
                );
                [
                    load::tcp::run(&http, &sockets),
                    load::udp::run(&dns, Mode::Connected, &sockets),
                    load::udp::run(&dns, Mode::Unconnected, &sockets),
                ]
            });
            let reports = reports.concat();
            until_released(node)?;
            Ok(reports)
        })?;

        let attempts: u64 = reports.iter().map(|report| report.attempts).sum();
        reports
            .iter()
            .try_for_each(expect_all_answered)
            .context(from)?;
        ensure_eq(from, increases, vec![attempts; 3])?;
        ensure_eq(from, until_released(node)?, before + attempts)?;
    }
    scene.give_back()
}

/// Returns a metric of the Service `web` for one address family, summed over the Service's ports.
fn web_metric(node: &Node, metric: &str, family: &str) -> Result<u64> {
    let metrics = node.metrics()?;
    let of_port = |(port, protocol)| {
        let labels = format!(
            "namespace=\"default\",service=\"web\",port=\"{port}\",protocol=\"{protocol}\",\
             ip_family=\"{family}\""
        );
        let name = format!("culvert_service_{metric}{{{labels}}}");
        admin::metric(&metrics, &name).with_context(|| format!("no {name} in {metrics}"))
    };
    let ports = [
        (format!("tcp-{HTTP}"), "TCP"),
        (format!("udp-{DNS}"), "UDP"),
    ];
    ports.into_iter().map(of_port).sum()
}

#[test]
fn each_service_port_has_its_own_counts() -> Result<()> {
    let scene = Scene::web(&BACKENDS)?;
    let (node, client) = (&scene.node, &scene.client);
    node.apply(OTHER.service("other"))?;
    let of_other = || -> Result<_> { Ok(ports(&node.services()?, "other")) };
    until_eq("ports", 4, || Ok(of_other()?.len()))?;
    for (times, sandbox) in [(2_u64, node.host()), (3, &**client)] {
        for _ in 0..times {
            for dialer in [Dialer::V4, Dialer::V6, Dialer::Mapped] {
                dialer.dial(sandbox, WEB, HTTP)?;
                let socket = dialer.udp_socket(sandbox)?;
                // Only the first datagram counts as a connection; the others use the stored backend.
                for _ in 0..3 {
                    query_to(&socket, dialer.address(WEB, DNS))?;
                }
                ensure!(dialer.connect(sandbox, OTHER, HTTP).is_err());
            }
        }
    }

    // V4-mapped addresses count as IPv4. In each of the five rounds, every dialer makes one TCP connection
    // and sends from one UDP socket.
    for (family, sent) in [("IPv4", 5 * 4), ("IPv6", 5 * 2)] {
        ensure_eq(family, web_metric(node, "connections_total", family)?, sent)?;
        ensure_eq(family, web_metric(node, "refused_total", family)?, 0)?;
    }
    let refused = || -> Result<u64> {
        let of =
            |port: &serde_json::Value| port["refused"].as_u64().context("a port without refused");
        of_other()?.iter().map(of).sum()
    };
    ensure_eq("refused", refused()?, 5 * 3)?;

    // The counts are kept in pinned maps, so they are not lost when the daemon is killed.
    node.kill9()?;
    for dialer in [Dialer::V4, Dialer::V6] {
        dialer.dial(client, WEB, HTTP)?;
    }
    node.start()?;
    ensure_eq(
        "sent",
        web_metric(node, "connections_total", "IPv4")?,
        5 * 4 + 1,
    )?;
    ensure_eq(
        "sent",
        web_metric(node, "connections_total", "IPv6")?,
        5 * 2 + 1,
    )?;
    ensure_eq("refused", refused()?, 5 * 3)
}

/// Makes connections from each CPU in turn, and returns how many of them each server answered.
fn distribution(client: &Pod, dialer: Dialer) -> Result<BTreeMap<String, u64>> {
    let here = sched_getaffinity(Pid::from_raw(0))?;
    let cpus = (0..CpuSet::count()).filter(|cpu| here.is_set(*cpu).unwrap_or(false));
    let mut servers = BTreeMap::new();
    for (_, cpu) in (0..SAMPLE).zip(cpus.cycle()) {
        // Pinning affects only this thread.
        pin_to_cpu(u32::try_from(cpu)?)?;
        let name = dialer.dial(client, WEB, HTTP)?;
        *servers.entry(name).or_default() += 1;
    }
    sched_setaffinity(Pid::from_raw(0), &here)?;
    Ok(servers)
}

#[test]
fn round_robin_over_all_cpus_gives_each_backend_equally_many_connects() -> Result<()> {
    let scene = start("round-robin")?;

    for dialer in [Dialer::V4, Dialer::V6] {
        let servers = distribution(&scene.client, dialer)?;

        let expected = BACKENDS.map(|name| (name.to_owned(), SAMPLE / 3));
        ensure_eq(&format!("{dialer:?}"), servers, BTreeMap::from(expected))?;
    }
    scene.give_back()
}
