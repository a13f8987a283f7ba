//! Open flows go on, and new ones begin, whatever happens to the daemon meanwhile.

use std::{
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    http,
    load::{Plan, StopSignal, tcp, udp},
    load_scale::LoadScale,
    network_drops,
    sandbox::Sandbox,
    wait,
};

use super::{remote_server, serve_in, service};
use crate::{
    background_load::expect_all_answered,
    fixture::Scene,
    migration::imitate_older_layout,
    packets::{REMOTE, pod_links::unhooked, route_to_node},
    service_addresses::{NODE_DNS, NODE_HTTP, configured},
    support::{Dialer, HOST, ensure_eq, query},
};

const TCP_CONNECTIONS: u32 = 500;
const UDP_FLOWS: u32 = 100;

/// The number of new connections and of new UDP flows per second.
const RATE: u32 = 100;

const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// The time limit for all open flows to exchange data once.
const ROUND_TIMEOUT: Duration = Duration::from_secs(60);

/// Flows that stay open.
struct OpenFlows {
    tcp: Vec<TcpStream>,
    udp: Vec<UdpSocket>,
    /// The number of times that each of them has exchanged data.
    rounds: AtomicUsize,
    /// True if one of them has failed.
    is_broken: AtomicBool,
}

impl OpenFlows {
    fn open(client: &Sandbox) -> Result<Self> {
        let scale = LoadScale::from_environment();
        let dialers = || [Dialer::V4, Dialer::V6].into_iter().cycle();
        let tcp = dialers()
            .take(usize::try_from(scale.count(TCP_CONNECTIONS))?)
            .map(|dialer| dialer.connect(client, HOST, NODE_HTTP));
        let udp = dialers()
            .take(usize::try_from(scale.count(UDP_FLOWS))?)
            .map(|dialer| dialer.connect_udp(client, HOST, NODE_DNS));
        Ok(Self {
            tcp: tcp.collect::<Result<_, _>>()?,
            udp: udp.collect::<Result<_, _>>()?,
            rounds: AtomicUsize::new(0),
            is_broken: AtomicBool::new(false),
        })
    }

    /// Exchanges data over each of the flows, again and again.
    fn talk(&self, stop: &StopSignal) -> Result<()> {
        let talked = self.talk_until_stopped(stop);
        self.is_broken.store(talked.is_err(), Ordering::Relaxed);
        talked
    }

    fn talk_until_stopped(&self, stop: &StopSignal) -> Result<()> {
        while !stop.is_stopped() {
            for (number, stream) in self.tcp.iter().enumerate() {
                let name = http::get(stream).with_context(|| format!("connection {number}"))?;
                ensure_eq("server", &*name, "backend")?;
            }
            for (number, socket) in self.udp.iter().enumerate() {
                let name = query(socket).with_context(|| format!("UDP flow {number}"))?;
                ensure_eq("server", &*name, "backend")?;
            }
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Waits until each of the flows has exchanged data.
    fn wait_for_round(&self) -> Result<()> {
        // The round that has begun may have passed some flows before.
        let wanted = self.rounds.load(Ordering::Relaxed) + 2;
        let timeout = LoadScale::from_environment().timeout(ROUND_TIMEOUT);
        wait::until(timeout, || {
            let rounds = self.rounds.load(Ordering::Relaxed);
            rounds >= wanted || self.is_broken.load(Ordering::Relaxed)
        })
        .context("the open flows stand still")?;
        ensure!(
            !self.is_broken.load(Ordering::Relaxed),
            "an open flow broke"
        );
        Ok(())
    }
}

/// A change of the daemon, and its name.
type Change<'a> = (&'static str, &'a dyn Fn() -> Result<()>);

#[test]
fn open_flows_go_on_and_new_ones_begin_while_the_daemon_is_killed_replaced_and_upgraded()
-> Result<()> {
    let scene = Scene::new(&[])?;
    route_to_node(&scene)?;
    let (remote, _server) = remote_server(&scene, "backend")?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    expect_uninterrupted(&scene, scene.node.outside(), &remote)
}

#[test]
#[ignore = "independent of the kernel: the test above makes the same changes"]
fn flows_that_are_translated_on_links_of_pods_go_on_in_the_same_way() -> Result<()> {
    let scene = configured("packets: { links: all }")?;
    let pod = scene.node.pod("masqueraded")?;
    let ips = [pod.v4(), pod.v6()];
    let _server = serve_in(&scene, &pod, "backend")?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(ips))?;
    expect_uninterrupted(&scene, scene.node.outside(), &pod)
}

#[test]
#[ignore = "independent of the kernel: the first test makes the same changes"]
fn flows_of_a_pod_whose_sockets_meet_no_hook_go_on_in_the_same_way() -> Result<()> {
    let scene = configured("packets: { links: all }")?;
    route_to_node(&scene)?;
    let (remote, _server) = remote_server(&scene, "backend")?;
    let pod = scene.node.pod("sender")?;
    let client = unhooked(scene.node.network(), &pod)?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    expect_uninterrupted(&scene, &client, &remote)
}

#[test]
#[ignore = "independent of the kernel: the first test makes the same changes"]
fn flows_that_are_redirected_go_on_in_the_same_way() -> Result<()> {
    let scene = configured("packets: { links: all, delivery: redirect }")?;
    route_to_node(&scene)?;
    let (remote, _server) = remote_server(&scene, "backend")?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    expect_uninterrupted(&scene, scene.node.outside(), &remote)
}

/// Makes changes while flows of a client are open, and others begin.
fn expect_uninterrupted(scene: &Scene, client: &Sandbox, server: &Sandbox) -> Result<()> {
    let node = &scene.node;
    let sandboxes = [("client", client), ("server", server)];
    let open = OpenFlows::open(client)?;

    let kill = || {
        node.kill9()?;
        open.wait_for_round()?;
        node.start()
    };
    let upgrade = || {
        node.kill9()?;
        imitate_older_layout(node)?;
        open.wait_for_round()?;
        node.start()
    };
    let flows = node.status()?["flows"]["capacity"]
        .as_u64()
        .context("no capacity")?
        / 3;
    let flows = u32::try_from(flows)?;
    let resize = |flows: u32| {
        node.resize(|settings| settings.maps.flows = flows)?;
        node.restart()
    };
    let changes: [Change<'_>; 5] = [
        ("kill -9 and a start", &kill),
        ("another program", &|| node.restart()),
        ("a larger map of flows", &|| resize(2 * flows)),
        ("a smaller map of flows", &|| resize(flows)),
        ("an upgrade from an older layout", &upgrade),
    ];
    under_load(client, &open, || {
        for (what, change) in changes {
            change().context(what)?;
            open.wait_for_round()
                .with_context(|| counts((scene, &sandboxes), what))?;
        }
        Ok(())
    })
    .with_context(|| counts((scene, &sandboxes), "in the end"))
}

/// Returns what was changed, and why the programs have refused or dropped packets since then.
fn counts((scene, others): (&Scene, &[(&str, &Sandbox)]), what: &str) -> String {
    let reasons = [
        "cluster_ip_unallocated",
        "cluster_port_unused",
        "fragment_unmatched",
        "icmp_error_unmatched",
        "packet_malformed",
        "no_backend",
        "no_local_backend",
        "record_invalid",
        "record_unstable",
        "flows_full",
        "flow_unallocated",
        "ports_full",
        "icmp_error_translated",
    ];
    let counts = reasons.map(|reason| {
        let count = scene.node.reason_count(reason).unwrap_or_default();
        format!("{reason}: {count}")
    });
    let sandboxes = [("host", scene.node.host())];
    let sandboxes = sandboxes.iter().chain(others);
    let drops = sandboxes.map(|(name, it)| (name, network_drops::of_process(it.pid())));
    let drops: Vec<_> = drops.collect();
    let flows = scene.node.culvert(&["flows"]).map(|flows| flows.stdout);
    let flows = flows.unwrap_or_default();
    let is_unanswered = |line: &&str| line.contains("UDP") && line.contains("unanswered");
    let datagrams: Vec<&str> = flows.lines().filter(is_unanswered).take(20).collect();
    let states = scene.node.status().map(|status| status["flows"].clone());
    format!(
        "{what}; {}; lost packets: {drops:?}; {states:?}; {datagrams:#?}",
        counts.join(", ")
    )
}

/// Runs `action` while the open flows talk and new ones begin, none of which may fail.
fn under_load(
    client: &Sandbox,
    open: &OpenFlows,
    action: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let stop = StopSignal::default();
    let rate = LoadScale::from_environment().count(RATE);
    let plan = |to: SocketAddr| Plan::new(to, rate, LOAD_TIMEOUT).stop_on(&stop);
    let sockets = |domain, kind| client.socket(domain, kind);
    thread::scope(|scope| {
        let mut loads = Vec::new();
        for dialer in [Dialer::V4, Dialer::V6] {
            let http = plan(dialer.address(HOST, NODE_HTTP));
            loads.push(scope.spawn(move || tcp::run(&http, &sockets)));
            let dns = plan(dialer.address(HOST, NODE_DNS));
            loads.push(scope.spawn(move || udp::run(&dns, udp::Mode::Unconnected, &sockets)));
        }
        let talk = scope.spawn(|| open.talk(&stop));
        let result = stop.stop_after(action);
        let talk = talk.join().ok().context("the open flows panicked")?;
        // The change that was being made is a part of the result.
        let change = result.as_ref().err().map(|error| format!(" ({error:#})"));
        talk.with_context(|| format!("an open flow{}", change.unwrap_or_default()))?;
        result?;
        for load in loads {
            expect_all_answered(&load.join().ok().context("a load panicked")?)?;
        }
        ensure!(open.rounds.load(Ordering::Relaxed) > 0, "no flow was used");
        Ok(())
    })
}
