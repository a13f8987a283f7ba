//! Sessions: who may have one, how long they live, and what replaces them.

use std::{future::poll_fn, task::Poll, time::Duration};

use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{Instant, timeout},
};
use tunnel_common::reason::Reason;

use super::harness::{
    Cloud, Edge, NODE, Pki, SOON, World, agent_settings, gateway_settings, limits, read, rest,
    until, until_reset,
};
use crate::{
    model::Target,
    tunnel::{ConnectionState, gateway, ingress::carry},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_shows_whose_it_is_and_what_it_carries() {
    let world = World::new().await;
    let (mut client, mut target) = world.pair().await;
    client.write_all(&[0; 99]).await.expect("written");
    read(&mut target, 99).await;
    target.write_all(&[0; 50]).await.expect("written");
    read(&mut client, 50).await;
    until("a ping", || {
        world.cloud.registry.nodes()[0].sessions[0]
            .traffic
            .rtt_seconds
            .is_some()
    })
    .await;

    let nodes = world.cloud.registry.nodes();
    let session = &nodes[0].sessions[0];
    assert_eq!(nodes[0].node, NODE);
    assert_eq!(session.release, env!("CARGO_PKG_VERSION"));
    let carried = &session.traffic;
    assert_eq!((carried.bytes_out, carried.bytes_in), (100, 50));
    assert_eq!(carried.streams, 1);

    let view = world.edge.connection();
    let carried = view.traffic;
    assert_eq!(
        (view.state, carried.streams),
        (ConnectionState::Connected, 1)
    );
    assert_eq!((carried.bytes_in, carried.bytes_out), (100, 50));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_connection_stands_beside_the_first_and_takes_its_share() {
    let pki = Pki::new();
    let cloud = Cloud::new(&pki, &limits());
    let mut settings = agent_settings(&[cloud.gateway], &[]);
    settings.connections = 2;
    let edge = Edge::new(settings, pki.agent(NODE));
    cloud.connected(NODE, 2).await;

    edge.run.drained().await;
    cloud.connected(NODE, 0).await;
    let nodes = cloud.registry.nodes();
    assert!(nodes[0].last_seen.is_some());
    cloud.run.drained().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_drains_is_replaced_while_its_streams_go_on() {
    let world = World::new().await;
    let (mut client, mut target) = world.pair().await;
    // A replacement within the first second would count as one that flaps.
    tokio::time::sleep(Duration::from_millis(1100)).await;

    world.cloud.run.drain();

    world.cloud.connected(NODE, 0).await;
    client.write_all(b"still").await.expect("written");
    assert_eq!(read(&mut target, 5).await, b"still");
    // The listener is gone, so the replacement is tried in vain.
    until("tried", || world.edge.last_error().contains("refused")).await;
    drop(client);
    rest(&mut target).await;
    drop(target);
    timeout(SOON, world.cloud.run.drained())
        .await
        .expect("drained");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_outlast_the_drain_are_reset() {
    let mut brief = limits();
    brief.drain = Duration::from_millis(200);
    let world = World::with(&brief, &limits()).await;
    let (mut client, mut target) = world.pair().await;

    timeout(SOON, world.cloud.run.drained())
        .await
        .expect("drained");

    until_reset(&mut client).await;
    until_reset(&mut target).await;
    world.edge.counted(Reason::Draining, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_drains_lets_streams_end_and_then_goes() {
    let world = World::new().await;
    let (mut client, mut target) = world.pair().await;
    world.edge.run.drain();
    until("draining", || {
        world.edge.state() == ConnectionState::Draining
    })
    .await;

    client.write_all(b"still").await.expect("written");
    assert_eq!(read(&mut target, 5).await, b"still");
    // No new ones meanwhile.
    let placed = || world.cloud.registry.sessions.permit(&NODE.into()).map(drop);
    until("closed", || placed() == Err(Reason::AgentNotConnected)).await;
    drop(client);
    rest(&mut target).await;
    drop(target);

    timeout(SOON, world.edge.run.drained()).await.expect("gone");
    world.cloud.counted(Reason::StreamServed, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connect_keeps_the_place_that_it_was_given_while_its_client_is_silent() {
    let world = World::new().await;
    let registry = &world.cloud.registry;
    let target = Target {
        node: NODE.into(),
        address: [127, 0, 0, 1].into(),
        port: world.target.local_addr().expect("an address").port(),
        loopback: false,
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at = listener.local_addr().expect("an address");
    let mut client = TcpStream::connect(at).await.expect("connected");
    let (accepted, _) = listener.accept().await.expect("accepted");
    let (_stop, stopped) = watch::channel(false);
    let streams = || registry.nodes()[0].sessions[0].traffic.streams;
    assert_eq!(streams(), 0);

    let mut carried = Box::pin(carry(registry, &target, accepted, stopped));
    let waits = poll_fn(|cx| Poll::Ready(carried.as_mut().poll(cx).is_pending()));
    assert!(waits.await);

    assert_eq!(streams(), 1);
    let serve = async {
        let (mut served, _) = world.target.accept().await.expect("accepted");
        served.write_all(b"!").await.expect("written");
        drop(served);
        assert_eq!(rest(&mut client).await, b"!");
        drop(client);
    };
    let ((reason, _), ()) = timeout(SOON, async { tokio::join!(carried, serve) })
        .await
        .expect("soon");
    assert_eq!((reason, streams()), (Reason::StreamServed, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_falls_silent_is_noticed_and_one_that_comes_back_is_found() {
    let pki = Pki::new();
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at = silent.local_addr().expect("an address");
    let cloud = Cloud::new(&pki, &limits());
    let _edge = Edge::new(agent_settings(&[at], &[]), pki.agent(NODE));
    // A wire between them that can be cut without a word.
    let (mut to_agent, _) = silent.accept().await.expect("accepted");
    let mut to_gateway = TcpStream::connect(cloud.gateway).await.expect("connected");
    {
        let both = tokio::io::copy_bidirectional(&mut to_agent, &mut to_gateway);
        tokio::select! {
            _ = both => panic!("it holds"),
            () = cloud.connected(NODE, 1) => {}
        }
    }
    let cut = Instant::now();

    cloud.connected(NODE, 0).await;
    assert!(
        cut.elapsed() < Duration::from_secs(5),
        "{:?}",
        cut.elapsed()
    );
    assert!(cloud.last_error(NODE).contains("no sign of life"));

    let again = timeout(SOON, silent.accept()).await.expect("soon");
    let (mut to_agent, _) = again.expect("accepted");
    let mut to_gateway = TcpStream::connect(cloud.gateway).await.expect("connected");
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut to_agent, &mut to_gateway) => panic!("it holds"),
        () = cloud.connected(NODE, 1) => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_bounded_and_one_too_many_is_refused() {
    let pki = Pki::new();
    let settings = gateway::Settings {
        sessions: 1,
        ..gateway_settings()
    };
    let cloud = Cloud::with(settings, &limits(), pki.gateway());
    let mut settings = agent_settings(&[cloud.gateway], &[]);
    settings.connections = 2;
    let _edge = Edge::new(settings, pki.agent(NODE));
    cloud.connected(NODE, 1).await;

    let refused = || cloud.count(Reason::HandshakesFull) > 0;
    until("refused", refused).await;
    assert_eq!(cloud.sessions(NODE), 1);
}
