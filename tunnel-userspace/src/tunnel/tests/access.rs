//! Tests of sessions that end, or are refused, although the agent's certificate is valid.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use tempfile::TempDir;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::watch,
    time::sleep,
};
use tunnel_common::reason::Reason;

use super::fixture::{
    Cloud, Edge, NODE, Pki, TunnelFixture, agent_settings, gateway_settings, limits, read,
    read_until_reset, wait_until,
};
use crate::{
    identity::DenyListStore,
    model::NodeList,
    tunnel::{AccessInputs, ConnectionState, gateway::GatewaySettings},
};

/// A gateway with a deny list that the test can change, and names of Nodes.
struct Fixture {
    pki: Pki,
    cloud: Cloud,
    deny_file: PathBuf,
    nodes: watch::Sender<NodeList>,
    _directory: TempDir,
}

impl Fixture {
    fn new(denied: &str, missing_node_timeout: Duration) -> Self {
        let (pki, directory) = (Pki::new(), tempfile::tempdir().expect("a directory"));
        let deny_file = directory.path().join("deny");
        fs::write(&deny_file, denied).expect("written");
        let (store, deny_list) = DenyListStore::open(deny_file.clone());
        let nodes = watch::Sender::new(list_of(&["cloud-1", NODE]));
        let settings = GatewaySettings {
            missing_node_timeout,
            ..gateway_settings()
        };
        let access = AccessInputs {
            deny_list,
            nodes: Some(nodes.subscribe()),
        };
        let mut cloud = Cloud::with(settings, &limits(), pki.gateway(), access);
        cloud.tasks.start(|draining| store.run(draining));
        Self {
            pki,
            cloud,
            deny_file,
            nodes,
            _directory: directory,
        }
    }

    fn edge(&self, node: &str) -> Edge {
        let settings = agent_settings(&[self.cloud.gateway], &[]);
        Edge::new(settings, self.pki.agent(node))
    }
}

fn list_of(names: &[&str]) -> NodeList {
    NodeList {
        names: Arc::new(names.iter().map(|name| Arc::from(*name)).collect()),
        is_current: true,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_node_is_refused_with_an_alert_and_connects_once_it_is_allowed() {
    let fixture = Fixture::new(&format!("node {NODE}\n"), Duration::ZERO);
    let (edge, other) = (fixture.edge(NODE), fixture.edge("edge-8"));
    fixture.cloud.connected("edge-8", 1).await;
    wait_until("an error", || !edge.last_error().is_empty()).await;

    let error = edge.last_error();
    let text = "the gateway's deny list has this node (TLS alert AccessDenied)";
    assert!(error.contains(text), "{error}");
    let cause = format!("the deny list (tunnel.gateway.denyFile) has node {NODE}");
    assert_eq!(fixture.cloud.last_error(NODE), cause);
    assert!(fixture.cloud.count(Reason::SessionRevoked) > 0);
    assert_eq!(fixture.cloud.count(Reason::HandshakeFailed), 0);

    fs::write(&fixture.deny_file, "# nobody\n").expect("written");
    fixture.cloud.connected(NODE, 1).await;
    assert_eq!(fixture.cloud.last_error(NODE), "");
    assert_eq!(other.state(), ConnectionState::Connected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_whose_deny_list_was_never_valid_refuses_everybody() {
    let fixture = Fixture::new("nodes: [edge-7]\n", Duration::ZERO);
    let edge = fixture.edge(NODE);
    wait_until("an error", || !edge.last_error().is_empty()).await;
    assert_eq!(fixture.cloud.node(NODE).sessions, []);

    fs::write(&fixture.deny_file, "").expect("written");

    fixture.cloud.connected(NODE, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_node_object_loses_its_session_until_the_object_is_back() {
    let fixture = Fixture::new("", Duration::from_millis(500));
    let edge = fixture.edge(NODE);
    fixture.cloud.connected(NODE, 1).await;
    sleep(Duration::from_secs(3)).await;
    assert_eq!(fixture.cloud.count(Reason::SessionRevoked), 0);

    fixture.nodes.send_replace(list_of(&["cloud-1"]));
    fixture.cloud.connected(NODE, 0).await;
    let refused = "the gateway refused the session: the node has no Node object \
                   (tunnel.gateway.missingNodeTimeout)";
    wait_until("an error", || edge.last_error().contains(refused)).await;

    fixture.nodes.send_replace(list_of(&["cloud-1", NODE]));
    fixture.cloud.connected(NODE, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_an_operator_ends_have_their_streams_reset_and_come_back() {
    let tunnel = TunnelFixture::new().await;
    let (mut client, mut target) = tunnel.connect().await;
    let before = tunnel.cloud.session().name;
    assert_eq!(tunnel.cloud.sessions.end("edge-9"), 0);

    assert_eq!(tunnel.cloud.sessions.end(NODE), 1);

    read_until_reset(&mut client).await;
    read_until_reset(&mut target).await;
    tunnel.edge.counted(Reason::SessionRevoked, 1).await;
    // One for the session, and one for the stream.
    tunnel.cloud.counted(Reason::SessionRevoked, 2).await;
    let is_new = || {
        let sessions = tunnel.cloud.node(NODE).sessions;
        sessions.len() == 1 && sessions[0].name != before
    };
    wait_until("another session", is_new).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_without_a_session_learns_why_the_gateway_has_ended_it() {
    let fixture = Fixture::new("", Duration::ZERO);
    let _edge = fixture.edge(NODE);
    fixture.cloud.connected(NODE, 1).await;
    let target = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = target.local_addr().expect("an address");
    let steered = fixture.cloud.steer(NODE, address);

    fs::write(&fixture.deny_file, format!("node {NODE}")).expect("written");
    fixture.cloud.connected(NODE, 0).await;

    // The reset may already arrive during the connect.
    if let Ok(mut client) = TcpStream::connect(steered).await {
        read_until_reset(&mut client).await;
    }
    fixture.cloud.counted(Reason::AgentNotConnected, 1).await;
    // The agent's next attempt may already have replaced the client's error.
    let error = fixture.cloud.last_error(NODE);
    let cause = format!("the deny list (tunnel.gateway.denyFile) has node {NODE}");
    assert!(error.ends_with(&cause), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_streams_on_which_no_byte_moves_are_reset() {
    let mut idle = limits();
    idle.idle_timeout = Duration::from_secs(1);
    for (of_cloud, of_edge) in [(&idle, &limits()), (&limits(), &idle)] {
        let tunnel = TunnelFixture::with(of_cloud, of_edge).await;
        let (mut silent, mut silent_target) = tunnel.connect().await;
        let (mut busy, mut busy_target) = tunnel.connect().await;
        for _ in 0..5 {
            sleep(Duration::from_millis(500)).await;
            busy_target.write_all(b"!").await.expect("written");
            assert_eq!(read(&mut busy, 1).await, b"!");
        }
        read_until_reset(&mut silent).await;
        read_until_reset(&mut silent_target).await;
        tunnel.cloud.counted(Reason::StreamIdle, 1).await;
        tunnel.edge.counted(Reason::StreamIdle, 1).await;
        let error = tunnel.cloud.last_error(NODE);
        let text = "reset: no byte moved for tunnel.session.idleTimeout";
        assert!(
            error.starts_with("edge-7 (127.0.0.1:") && error.ends_with(text),
            "{error}"
        );
    }
}
