//! Tests of session limits, lifetimes and replacement.

use std::{future::poll_fn, task::Poll, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};
use tunnel_common::reason::Reason;

use super::fixture::{
    Cloud, Edge, NODE, Pki, TIMEOUT, TunnelFixture, agent_settings, gateway_settings, limits, read,
    read_to_end, read_until_reset, tcp_pair, wait_until,
};
use crate::{
    model::SteeringTarget,
    tunnel::{AccessInputs, ConnectionState, gateway, ingress::forward},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_view_of_a_session_has_its_release_and_traffic() {
    let tunnel = TunnelFixture::new().await;
    let (mut client, mut target) = tunnel.connect().await;
    client.write_all(&[0; 99]).await.expect("written");
    read(&mut target, 99).await;
    target.write_all(&[0; 50]).await.expect("written");
    read(&mut client, 50).await;
    let rtt = || tunnel.cloud.session().traffic.rtt_seconds;
    wait_until("a ping", || rtt().is_some()).await;

    let session = tunnel.cloud.session();
    assert_eq!(session.release, env!("CARGO_PKG_VERSION"));
    let traffic = &session.traffic;
    assert_eq!((traffic.bytes_out, traffic.bytes_in), (100, 50));
    assert_eq!(traffic.streams, 1);

    let view = tunnel.edge.connection();
    let traffic = view.traffic;
    assert_eq!(
        (view.state, traffic.streams),
        (ConnectionState::Connected, 1)
    );
    assert_eq!((traffic.bytes_in, traffic.bytes_out), (100, 50));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_opens_the_configured_number_of_connections() {
    let pki = Pki::new();
    let cloud = Cloud::new(&pki, &limits());
    let mut settings = agent_settings(&[cloud.gateway], &[]);
    settings.connections_per_gateway = 2;
    let edge = Edge::new(settings, pki.agent(NODE));
    cloud.connected(NODE, 2).await;

    edge.tasks.drained().await;
    cloud.connected(NODE, 0).await;
    assert!(cloud.node(NODE).last_seen.is_some());
    cloud.tasks.drained().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_drains_serves_new_streams_until_none_is_open() {
    let tunnel = TunnelFixture::new().await;
    let (client, mut target) = tunnel.connect().await;
    // A session that has lasted less than a second is not replaced immediately.
    tokio::time::sleep(Duration::from_millis(1100)).await;

    tunnel.cloud.tasks.drain();

    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(tunnel.connect().await);
    }
    assert_eq!(tunnel.cloud.node(NODE).sessions.len(), 1);
    drop(client);
    read_to_end(&mut target).await;
    drop(target);
    timeout(TIMEOUT, tunnel.cloud.tasks.drained())
        .await
        .expect("drained");
    // The listener is closed, so the agent can't reconnect.
    wait_until("tried", || tunnel.edge.last_error().contains("refused")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_bytes_of_a_drain_arrive_although_the_agent_reads_slowly() {
    const BYTES: usize = 500 << 10;
    let pki = Pki::new();
    let cloud = Cloud::new(&pki, &limits());
    let [relay, target] = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0"));
    let (relay, target) = (relay.await.expect("bound"), target.await.expect("bound"));
    let [at_relay, at_target] = [&relay, &target].map(|it| it.local_addr().expect("an address"));
    let _edge = Edge::new(agent_settings(&[at_relay], &[at_target]), pki.agent(NODE));
    // A relay between the gateway and the agent, which reads slowly from the gateway, and not at all while
    // paused.
    let (agent, _) = relay.accept().await.expect("accepted");
    let gateway = TcpSocket::new_v4().expect("a socket");
    gateway.set_recv_buffer_size(8192).expect("set");
    let gateway = gateway.connect(cloud.gateway).await.expect("connected");
    let (mut from_agent, mut to_agent) = agent.into_split();
    let (mut from_gateway, mut to_gateway) = gateway.into_split();
    let (pause, mut paused) = watch::channel(false);
    let mut relays = JoinSet::new();
    relays.spawn(async move { drop(copy(&mut from_agent, &mut to_gateway).await) });
    relays.spawn(async move {
        let mut bytes = vec![0; 8192];
        while paused.wait_for(|paused| !*paused).await.is_ok() {
            let length = from_gateway.read(&mut bytes).await.expect("read");
            to_agent.write_all(&bytes[..length]).await.expect("written");
        }
    });
    let steered = cloud.steer(NODE, at_target);
    cloud.connected(NODE, 1).await;
    let mut client = TcpStream::connect(steered).await.expect("connected");
    client.write_all(b"!").await.expect("written");
    let (mut target, _) = target.accept().await.expect("accepted");

    cloud.tasks.drain();
    pause.send_replace(true);
    client.write_all(&[7; BYTES]).await.expect("written");
    client.shutdown().await.expect("ended");
    target.shutdown().await.expect("ended");
    read_to_end(&mut client).await;
    cloud.counted(Reason::StreamCompleted, 1).await;
    pause.send_replace(false);

    assert_eq!(read_to_end(&mut target).await.len(), 1 + BYTES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_outlast_the_drain_are_reset() {
    let mut brief = limits();
    brief.drain_timeout = Duration::from_millis(200);
    let tunnel = TunnelFixture::with(&brief, &limits()).await;
    let (mut client, mut target) = tunnel.connect().await;

    timeout(TIMEOUT, tunnel.cloud.tasks.drained())
        .await
        .expect("drained");

    read_until_reset(&mut client).await;
    read_until_reset(&mut target).await;
    tunnel.edge.counted(Reason::Draining, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_drains_lets_streams_end_and_then_stops() {
    let tunnel = TunnelFixture::new().await;
    let (mut client, mut target) = tunnel.connect().await;
    tunnel.edge.tasks.drain();
    wait_until("draining", || {
        tunnel.edge.state() == ConnectionState::Draining
    })
    .await;

    client.write_all(b"still").await.expect("written");
    assert_eq!(read(&mut target, 5).await, b"still");
    // In the meantime, no new streams are permitted.
    let permitted = || tunnel.cloud.sessions.take_permit(&NODE.into()).map(drop);
    wait_until("closed", || permitted() == Err(Reason::AgentNotConnected)).await;
    drop(client);
    read_to_end(&mut target).await;
    drop(target);

    timeout(TIMEOUT, tunnel.edge.tasks.drained())
        .await
        .expect("gone");
    tunnel.cloud.counted(Reason::StreamCompleted, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connect_keeps_its_slot_while_its_client_is_silent() {
    let tunnel = TunnelFixture::new().await;
    let target = SteeringTarget {
        node: NODE.into(),
        address: [127, 0, 0, 1].into(),
        port: tunnel.target.local_addr().expect("an address").port(),
        loopback: false,
        is_disputed: false,
    };
    let (mut client, accepted) = tcp_pair().await;
    let (_stop, stopped) = watch::channel(false);
    let streams = || tunnel.cloud.session().traffic.streams;
    assert_eq!(streams(), 0);

    let mut forwarding = Box::pin(forward(&tunnel.cloud.sessions, &target, accepted, stopped));
    let waits = poll_fn(|cx| Poll::Ready(forwarding.as_mut().poll(cx).is_pending()));
    assert!(waits.await);

    assert_eq!(streams(), 1);
    let serve = async {
        let (mut served, _) = tunnel.target.accept().await.expect("accepted");
        served.write_all(b"!").await.expect("written");
        drop(served);
        assert_eq!(read_to_end(&mut client).await, b"!");
        drop(client);
    };
    let ((reason, _), ()) = timeout(TIMEOUT, async { tokio::join!(forwarding, serve) })
        .await
        .expect("soon");
    assert_eq!((reason, streams()), (Reason::StreamCompleted, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_gateway_is_detected_and_the_agent_reconnects() {
    let pki = Pki::new();
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at = silent.local_addr().expect("an address");
    let cloud = Cloud::new(&pki, &limits());
    let _edge = Edge::new(agent_settings(&[at], &[]), pki.agent(NODE));
    // A relay between the gateway and the agent. Once the session is established, it stops forwarding without
    // closing the connections.
    let connect_through_relay = async || {
        let accepted = timeout(TIMEOUT, silent.accept()).await.expect("soon");
        let (mut to_agent, _) = accepted.expect("accepted");
        let mut to_gateway = TcpStream::connect(cloud.gateway).await.expect("connected");
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut to_agent, &mut to_gateway) => panic!("it holds"),
            () = cloud.connected(NODE, 1) => {}
        }
        (to_agent, to_gateway)
    };
    let _wire = connect_through_relay().await;
    let cut = Instant::now();

    cloud.connected(NODE, 0).await;
    let took = cut.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert!(cloud.last_error(NODE).contains("no sign of life"));
    connect_through_relay().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_bounded_and_one_too_many_is_refused() {
    let pki = Pki::new();
    let settings = gateway::GatewaySettings {
        max_sessions: 1,
        ..gateway_settings()
    };
    let cloud = Cloud::with(settings, &limits(), pki.gateway(), AccessInputs::default());
    let mut settings = agent_settings(&[cloud.gateway], &[]);
    settings.connections_per_gateway = 2;
    let edge = Edge::new(settings, pki.agent(NODE));
    cloud.connected(NODE, 1).await;

    let refused = || cloud.count(Reason::SessionLimit) > 0;
    wait_until("refused", refused).await;
    let errors = || [0, 1].map(|slot| edge.last_error_of(slot));
    let text = "the gateway refused the session: the gateway has 1 sessions \
                (tunnel.gateway.maxSessions)";
    wait_until("the agent's error", || errors().contains(&text.to_owned())).await;
    assert_eq!(cloud.node(NODE).sessions.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_has_sixteen_sessions_from_one_address() {
    let pki = Pki::new();
    let cloud = Cloud::new(&pki, &limits());
    let agents: Vec<_> = (0..5)
        .map(|_| {
            let mut settings = agent_settings(&[cloud.gateway], &[]);
            settings.connections_per_gateway = 4;
            Edge::new(settings, pki.agent(NODE))
        })
        .collect();

    // An agent that is refused only after its hello learns the reason at its next attempt.
    let text = "the node has 16 sessions from this address";
    let refused = || {
        let errors = agents
            .iter()
            .flat_map(|agent| [0, 1, 2, 3].map(|slot| agent.last_error_of(slot)));
        errors.filter(|error| error.contains(text)).count()
    };
    wait_until("four are refused", || refused() >= 4).await;
    cloud.connected(NODE, 16).await;
    assert!(cloud.count(Reason::SessionLimit) >= 4);
    let warnings = cloud.sessions.warnings();
    let warnings = warnings.borrow();
    let texts: Vec<_> = warnings.iter().map(|it| &*it.note).collect();
    assert_eq!(
        texts,
        [format!("the gateway refuses further sessions: {text}")]
    );
    assert_eq!(&*warnings[0].regarding.name.name, NODE);
}
