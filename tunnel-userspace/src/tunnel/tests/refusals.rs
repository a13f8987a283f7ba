//! Tests of refused connections, and of the reasons reported for them.

use std::{io::ErrorKind, net::SocketAddr, sync::Arc, time::Duration};

use nix::net::if_::if_nametoindex;
use rcgen::ExtendedKeyUsagePurpose::ClientAuth;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_rustls::TlsConnector;
use tunnel_common::reason::Reason;

use super::fixture::{
    Cloud, Edge, NODE, Pki, TIMEOUT, TunnelFixture, agent_settings, limits, read, read_until_reset,
    wait_until,
};
use crate::identity::Identity;

async fn refused(at: SocketAddr) {
    let mut client = match TcpStream::connect(at).await {
        Ok(client) => client,
        Err(error) => {
            // The reset may arrive before tokio checks the connected socket.
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            return;
        }
    };
    // The reset may also arrive before this write.
    drop(client.write_all(b"hello").await);
    read_until_reset(&mut client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_session_a_client_is_reset_and_the_error_has_the_time_of_the_last_one() {
    let tunnel = TunnelFixture::new().await;
    let never = "10.1.2.3:10250".parse().expect("an address");
    refused(tunnel.cloud.steer("edge-8", never)).await;
    assert_eq!(
        tunnel.cloud.last_error("edge-8"),
        "edge-8 (10.1.2.3:10250): agent not connected, never seen"
    );

    tunnel.edge.tasks.drained().await;
    tunnel.cloud.connected(NODE, 0).await;
    refused(tunnel.steered).await;

    tunnel.cloud.counted(Reason::AgentNotConnected, 2).await;
    let error = tunnel.cloud.last_error(NODE);
    assert!(
        error.ends_with("agent not connected, last seen 0 s ago"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_was_not_steered_is_reset() {
    let tunnel = TunnelFixture::new().await;

    refused(tunnel.cloud.unsteered_address()).await;
    tunnel.cloud.counted(Reason::ArrivedUnsteered, 1).await;

    refused(tunnel.cloud.steering_address(99)).await;
    tunnel.cloud.counted(Reason::TargetUnknown, 1).await;

    let loopback = if_nametoindex("lo").expect("an index");
    tunnel.cloud.inside.send_replace(Arc::default());
    refused(tunnel.steered).await;
    tunnel.cloud.counted(Reason::ArrivedUnsteered, 2).await;

    // A connection over a link that is added within a second, as when a pod has just started, is accepted.
    let pair = tunnel.connect();
    tokio::pin!(pair);
    let early = timeout(Duration::from_millis(100), &mut pair).await;
    assert!(early.is_err(), "not known yet");
    tunnel
        .cloud
        .inside
        .send_replace(Arc::new([loopback].into()));
    pair.await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_from_outside_is_accepted_if_its_flow_shows_that_it_dialled_the_target() {
    let tunnel = TunnelFixture::new().await;
    let cloud = &tunnel.cloud;
    let target = tunnel.target.local_addr().expect("an address");
    let set_dialled = |dialled| *cloud.dialled.lock().expect("no panic") = dialled;
    let inside = cloud.inside.send_replace(Arc::default());

    refused(tunnel.steered).await;
    cloud.counted(Reason::ArrivedUnsteered, 1).await;
    let asked = *cloud.asked.lock().expect("no panic");
    assert_eq!(asked, Some(tunnel.steered));

    set_dialled(Some(target));
    // There is no wait, as for a link of pods that may be about to be known.
    let connected = timeout(Duration::from_millis(900), tunnel.connect()).await;
    connected.expect("no wait");

    // The flow of a client that is gone: the steering address has stood for another node.
    set_dialled(Some(SocketAddr::new(target.ip(), 1)));
    refused(tunnel.steered).await;
    cloud.counted(Reason::TargetUnknown, 1).await;
    cloud.inside.send_replace(inside);
    refused(tunnel.steered).await;
    cloud.counted(Reason::TargetUnknown, 2).await;
    set_dialled(None);
    tunnel.connect().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_reports_a_failed_tls_handshake_with_a_gateway_of_another_ca() {
    let (own, foreign) = (Pki::new(), Pki::new());
    let cloud = Cloud::new(&foreign, &limits());
    let edge = Edge::new(agent_settings(&[cloud.gateway], &[]), own.agent(NODE));

    wait_until("an error", || !edge.last_error().is_empty()).await;

    let (at, error) = (cloud.gateway, edge.last_error());
    let start =
        format!("the TLS handshake with {at} failed: invalid peer certificate: UnknownIssuer");
    assert!(error.starts_with(&start), "{error}");
    assert_eq!(cloud.node(NODE).sessions, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_accepts_only_agents_that_offer_the_protocol() {
    use Reason::{HandshakeFailed, IdentityRejected};
    let (Pki(own), Pki(foreign)) = (Pki::new(), Pki::new());
    let with = |files| own.client(Some(&files));
    let of_other_ca = with(foreign.agent(NODE));
    let of_no_node = with(own.forged(["culvert:agents", "Not a name!"], &[ClientAuth]));
    let of_no_agent = with(own.forged(["system:nodes", NODE], &[ClientAuth]));
    let of_agent = with(own.agent(NODE));
    let mut without_protocol = of_agent.clone();
    without_protocol.alpn_protocols = Vec::new();
    let without_certificate = own.client(None);
    let cloud = Cloud::new(&Pki(own), &limits());
    let enter = async |client| {
        let tcp = TcpStream::connect(cloud.gateway).await.expect("connected");
        let connector = TlsConnector::from(Arc::new(client));
        connector.connect(Identity::gateway_name(), tcp).await
    };

    // The gateway sends the HTTP/2 preface to a valid agent.
    let (mut tls, mut received) = (enter(of_agent).await.expect("an agent"), [0; 3]);
    let read = timeout(TIMEOUT, tls.read_exact(&mut received)).await;
    read.expect("soon").expect("read");
    assert_eq!(&received, b"PRI");
    drop(tls);
    cloud.counted(HandshakeFailed, 1).await;

    for (what, client, reason) in [
        (
            "without a certificate",
            without_certificate,
            HandshakeFailed,
        ),
        ("of another CA", of_other_ca, HandshakeFailed),
        ("of no agent", of_no_agent, IdentityRejected),
        ("of no node", of_no_node, IdentityRejected),
        ("without a protocol", without_protocol, HandshakeFailed),
    ] {
        let before = cloud.count(reason);
        let (mut tls, mut received) = (enter(client).await.expect(what), Vec::new());
        let read = timeout(TIMEOUT, tls.read_to_end(&mut received)).await;
        // The connection may end with or without a TLS alert.
        drop(read.expect(what));
        assert_eq!(received, b"", "{what}: the gateway began to speak HTTP/2");
        cloud.counted(reason, before + 1).await;
    }
    assert_eq!(cloud.sessions.nodes(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_target_gets_half_of_the_dials_and_times_out_alone() {
    let pki = Pki::new();
    let cloud = Cloud::new(&pki, &limits());
    // While the listener's accept queue is full, connection attempts go unanswered.
    let full = full_listener();
    let slow = full.0.local_addr().expect("an address");
    let quick = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let at_quick = quick.local_addr().expect("an address");
    let mut settings = agent_settings(&[cloud.gateway], &[slow, at_quick]);
    settings.max_pending_dials = 2;
    settings.dial_timeout = Duration::from_secs(3);
    let edge = Edge::new(settings, pki.agent(NODE));
    let (slow, steered) = (cloud.steer(NODE, slow), cloud.steer(NODE, at_quick));
    cloud.connected(NODE, 1).await;

    let mut first = TcpStream::connect(slow).await.expect("connected");
    wait_until("dials", || cloud.session().traffic.streams == 1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let mut quick_client = TcpStream::connect(steered).await.expect("connected");
    quick_client.write_all(b"ping").await.expect("written");
    let (mut accepted, _) = quick.accept().await.expect("accepted");
    assert_eq!(read(&mut accepted, 4).await, b"ping");

    // The silent target has its half.
    let mut second = TcpStream::connect(slow).await.expect("connected");
    wait_until("dials", || cloud.session().traffic.streams == 3).await;
    let mut quick_client = TcpStream::connect(steered).await.expect("connected");
    quick_client.write_all(b"ping").await.expect("written");
    let (mut accepted, _) = quick.accept().await.expect("accepted");
    assert_eq!(read(&mut accepted, 4).await, b"ping");
    edge.counted(Reason::DialLimit, 1).await;

    read_until_reset(&mut first).await;
    read_until_reset(&mut second).await;
    cloud.counted(Reason::DialTimedOut, 1).await;
    cloud.counted(Reason::DialLimit, 1).await;
}

/// Returns a listener with a full accept queue, and the sockets that fill it.
fn full_listener() -> (std::net::TcpListener, Vec<socket2::Socket>) {
    use socket2::{Domain, Socket, Type};
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let any: SocketAddr = "127.0.0.1:0".parse().expect("an address");
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
