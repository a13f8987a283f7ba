//! Netfilter beside the programs: it tracks the translated packets, and goes on with the connections that rules like
//! kube-proxy's carry.

use std::io;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::kube_proxy_rules::{NodePortService, nft};

use super::{
    Backend, CLIENT, ENABLED, REMOTE, connect_to_node_port, exchange_stream, remote, route_to_node,
    service, start_with_remote_backend,
};
use crate::{
    fixture::Scene,
    service_addresses::{NODE_HTTP, configured},
    support::{Dialer, HOST, HTTP, HTTP_TARGET},
};

/// A rule that makes the kernel track connections.
pub(super) const TRACKING: &str = "table inet tracking {
  chain forward {
    type filter hook forward priority 0; policy accept
    ct state established,related counter accept
  }
}
";

/// A table that drops all forwarded packets.
const DROPPING: &str = "table inet dropping {
  chain forward {
    type filter hook forward priority 0; policy drop
  }
}
";

/// One of the kernel's tracked connections: the addresses and ports of the first packet and of the expected replies.
#[derive(Debug)]
struct Tracked {
    original: [String; 4],
    reply: [String; 4],
}

impl Tracked {
    /// Returns true if the replies don't come from where the first packet went to, or go elsewhere.
    fn is_translated(&self) -> bool {
        let [from, to, from_port, to_port] = &self.original;
        self.reply != [to, from, to_port, from_port].map(String::clone)
    }

    /// Reads the tracked TCP connections of the client.
    fn of_client(scene: &Scene) -> Result<Vec<Self>> {
        let table = scene.node.host().run(&["cat", "/proc/net/nf_conntrack"])?;
        let client = format!("src={} ", CLIENT.v4);
        let lines = table
            .lines()
            .filter(|line| line.contains(" tcp ") && line.contains(&client));
        lines.map(Self::parse).collect()
    }

    fn parse(line: &str) -> Result<Self> {
        let value = |key: &str, nth: usize| -> Result<String> {
            let mut fields = line
                .split_whitespace()
                .filter_map(|it| it.strip_prefix(key));
            let found = fields
                .nth(nth)
                .with_context(|| format!("no {key} in {line}"))?;
            Ok(found.to_owned())
        };
        let tuple = |nth| -> Result<[String; 4]> {
            let [from, to, from_port, to_port] =
                ["src=", "dst=", "sport=", "dport="].map(|key| value(key, nth));
            Ok([from?, to?, from_port?, to_port?])
        };
        Ok(Self {
            original: tuple(0)?,
            reply: tuple(1)?,
        })
    }
}

pub(super) fn load_rules(scene: &Scene, name: &str, rules: &str) -> Result<()> {
    let directory = scene.node.network().lab().directory();
    nft::loader(scene.node.host())
        .load(directory, name, rules)
        .map(drop)
}

#[test]
#[ignore = "independent of the kernel: `reachability` shows what the programs leave to the stack"]
fn connections_through_rules_like_those_of_kube_proxy_go_on_and_new_ones_are_not_translated_by_netfilter()
-> Result<()> {
    const CONNECTIONS: usize = 100;
    let scene = configured(ENABLED)?;
    route_to_node(&scene)?;
    let remote = remote(&scene)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    let rules = NodePortService {
        protocol: "tcp",
        number: 0,
        port: HTTP,
        node_port: Some(NODE_HTTP),
        endpoint: Dialer::V4.address(REMOTE, HTTP_TARGET),
    };
    load_rules(
        &scene,
        "kube-proxy.nft",
        &nft::node_ports(HOST.v4.into(), &[rules]),
    )?;
    let client = scene.node.outside();
    let connect = || connect_to_node_port(client, &backend);
    let open: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect::<Result<_>>()?;
    let tracked = Tracked::of_client(&scene)?;
    let by_rules = tracked.iter().filter(|it| it.is_translated()).count();
    ensure!(
        by_rules == CONNECTIONS,
        "the rules carry {by_rules} connections"
    );

    scene.node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    for (number, (one, other)) in open.iter().enumerate() {
        exchange_stream(one, other).with_context(|| format!("connection {number}"))?;
    }
    let new: Vec<_> = (0..10).map(|_| connect()).collect::<Result<_>>()?;
    for (one, other) in &new {
        exchange_stream(one, other).context("a new connection")?;
    }
    let tracked = Tracked::of_client(&scene)?;
    let by_rules = tracked.iter().filter(|it| it.is_translated()).count();
    ensure!(
        by_rules == CONNECTIONS,
        "{by_rules} connections are translated by netfilter"
    );
    ensure!(
        tracked.len() >= CONNECTIONS + new.len(),
        "{} tracked",
        tracked.len()
    );
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: `reachability` shows what the programs leave to the stack"]
fn netfilter_tracks_flows_without_nat_and_its_rules_for_forwarded_packets_are_obeyed() -> Result<()>
{
    let scene = configured(ENABLED)?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    load_rules(&scene, "tracking.nft", TRACKING)?;
    let client = scene.node.outside();
    let (one, other) = connect_to_node_port(client, &backend)?;
    exchange_stream(&one, &other)?;
    let tracked = Tracked::of_client(&scene)?;
    ensure!(!tracked.is_empty(), "no connection is tracked");
    for connection in tracked {
        ensure!(!connection.is_translated(), "{connection:?}");
        let [_, to, _, port] = &connection.original;
        let backend = (REMOTE.v4.to_string(), HTTP_TARGET.to_string());
        ensure!((to, port) == (&backend.0, &backend.1), "{connection:?}");
    }

    load_rules(&scene, "dropping.nft", DROPPING)?;
    let socket = Dialer::V4.tcp_socket(client)?;
    let to = Dialer::V4.address(HOST, NODE_HTTP);
    let within = std::time::Duration::from_secs(1);
    let result = tunnel_tests::sandbox::connect_within(&socket, to, within);
    let error = result.err().context("a dropped packet arrived")?.kind();
    ensure!(error == io::ErrorKind::TimedOut, "{error}");
    Ok(())
}
