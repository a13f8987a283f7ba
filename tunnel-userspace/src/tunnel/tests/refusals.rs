//! Who is refused, and what is said of it.

use std::{io::ErrorKind, sync::Arc, time::Duration};

use nix::net::if_::if_nametoindex;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
};
use tunnel_common::reason::Reason;

use super::harness::{
    Cloud, Edge, NODE, Pki, World, agent_settings, gateway_settings, limits, read, until,
    until_reset,
};

async fn refused(at: std::net::SocketAddr) {
    let mut client = match TcpStream::connect(at).await {
        Ok(client) => client,
        Err(error) => {
            // The reset may be quicker than tokio's look at the socket.
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            return;
        }
    };
    // Or than this.
    drop(client.write_all(b"hello").await);
    until_reset(&mut client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_session_a_client_is_reset_at_once_and_told_since_when() {
    let world = World::new().await;
    let never = "10.1.2.3:10250".parse().expect("an address");
    refused(world.cloud.steer("edge-8", never)).await;
    assert_eq!(
        world.cloud.last_error("edge-8"),
        "edge-8 (10.1.2.3:10250): agent not connected, never seen"
    );

    world.edge.run.drained().await;
    world.cloud.connected(NODE, 0).await;
    refused(world.steered).await;

    world.cloud.counted(Reason::AgentNotConnected, 2).await;
    let said = world.cloud.last_error(NODE);
    assert!(
        said.ends_with("agent not connected, last seen 0 s ago"),
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_did_not_come_as_a_steered_connect_is_reset() {
    let world = World::new().await;

    refused(world.cloud.outside()).await;
    world.cloud.counted(Reason::ArrivedOutside, 1).await;

    refused(world.cloud.steering_address(99)).await;
    world.cloud.counted(Reason::TargetUnknown, 1).await;

    let loopback = if_nametoindex("lo").expect("an index");
    world.cloud.inside.send_replace(Arc::default());
    refused(world.steered).await;
    world.cloud.counted(Reason::ArrivedOutside, 2).await;

    // A link that becomes known in time is that of a new pod.
    let pair = world.pair();
    tokio::pin!(pair);
    let early = tokio::time::timeout(Duration::from_millis(100), &mut pair).await;
    assert!(early.is_err(), "not known yet");
    world.cloud.inside.send_replace(Arc::new([loopback].into()));
    pair.await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_meets_no_gateway_of_its_ca_says_that_tls_failed() {
    let (own, foreign) = (Pki::new(), Pki::new());
    for (what, identity, why) in [
        (
            "a gateway of another CA",
            foreign.gateway(),
            "UnknownIssuer",
        ),
        (
            "another agent",
            own.agent("edge-8"),
            "certificate does not allow extended key usage for server",
        ),
    ] {
        let cloud = Cloud::with(gateway_settings(), &limits(), identity);
        let edge = Edge::new(agent_settings(&[cloud.gateway], &[]), own.agent(NODE));

        until(what, || !edge.last_error().is_empty()).await;

        let at = cloud.gateway;
        let start = format!("TLS with {at} failed: invalid peer certificate: {why}");
        let error = edge.last_error();
        assert!(error.starts_with(&start), "{what}: {error}");
        assert_eq!(cloud.node(NODE).sessions, [], "{what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dial_too_many_is_refused_and_a_slow_one_times_out_alone() {
    let pki = Pki::new();
    let cloud = Cloud::new(&pki, &limits());
    // A full accept queue answers nobody.
    let full = full_listener();
    let slow = full.0.local_addr().expect("an address");
    let quick = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at_quick = quick.local_addr().expect("an address");
    let mut settings = agent_settings(&[cloud.gateway], &[slow, at_quick]);
    settings.dials = 2;
    settings.dial_timeout = Duration::from_secs(3);
    let edge = Edge::new(settings, pki.agent(NODE));
    let (slow, steered) = (cloud.steer(NODE, slow), cloud.steer(NODE, at_quick));
    cloud.connected(NODE, 1).await;

    let mut first = TcpStream::connect(slow).await.expect("connected");
    until("dials", || cloud.session().traffic.streams == 1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut beside = TcpStream::connect(steered).await.expect("connected");
    beside.write_all(b"ping").await.expect("written");
    let (mut accepted, _) = quick.accept().await.expect("accepted");
    assert_eq!(read(&mut accepted, 4).await, b"ping");

    let mut second = TcpStream::connect(slow).await.expect("connected");
    until("dials", || cloud.session().traffic.streams == 3).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    refused(steered).await;
    edge.counted(Reason::DialsFull, 1).await;

    until_reset(&mut first).await;
    until_reset(&mut second).await;
    cloud.counted(Reason::DialTimedOut, 2).await;
}

/// A listener whose accept queue is full, and those who fill it.
fn full_listener() -> (std::net::TcpListener, Vec<socket2::Socket>) {
    use socket2::{Domain, Socket, Type};
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().expect("an address");
    listener.bind(&any.into()).expect("bound");
    listener.listen(0).expect("listening");
    let address = listener.local_addr().expect("an address");
    let fill = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_nonblocking(true).expect("set");
        drop(socket.connect(&address));
        socket
    };
    let filled = std::iter::repeat_with(fill).take(4).collect();
    (listener.into(), filled)
}
