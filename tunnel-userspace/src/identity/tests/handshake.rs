//! Tests for TLS handshakes between gateway and agent, performed in memory.

use std::{io, sync::Arc};

use jiff::Timestamp;
use rustls::{ClientConfig, HandshakeKind, ProtocolVersion, ServerConfig, client::Resumption};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream as Client, server::TlsStream};

use super::{TestCa, days, identity};
use crate::identity::{ALPN, Identity, IdentityFiles, Role, identify_agent};

/// The server's and the client's end of a connection, after a handshake and one byte in each direction.
type Connected = (TlsStream<DuplexStream>, Client<DuplexStream>);

async fn connect(
    server: &Arc<ServerConfig>,
    client: &Arc<ClientConfig>,
) -> Result<Connected, String> {
    let (near, far) = duplex(1 << 16);
    let accepting = Box::pin(async {
        let mut stream = TlsAcceptor::from(Arc::clone(server)).accept(far).await?;
        stream.read_u8().await?;
        stream.write_all(&[2]).await?;
        Ok(stream)
    });
    let connecting = Box::pin(async {
        let connector = TlsConnector::from(Arc::clone(client));
        let mut stream = connector.connect(Identity::gateway_name(), near).await?;
        // Errors here are ignored, since they are caused by the server, which also returns an error.
        let written = stream.write_all(&[1]).await;
        let read = stream.read_u8().await;
        drop((written, read));
        Ok(stream)
    });
    let (server, client): (io::Result<_>, io::Result<_>) = tokio::join!(accepting, connecting);
    match (server, client) {
        (Ok(server), Ok(client)) => Ok((server, client)),
        (server, client) => {
            let server = server.err().map(|error| format!("server: {error}"));
            let client = client.err().map(|error| format!("client: {error}"));
            Err([server, client].map(Option::unwrap_or_default).join("; "))
        }
    }
}

fn server(test_ca: &TestCa) -> Arc<ServerConfig> {
    Arc::clone(&identity(&test_ca.gateway(), Role::Gateway, test_ca.now).server)
}

fn client(test_ca: &TestCa) -> Arc<ClientConfig> {
    Arc::clone(&identity(&test_ca.agent("edge-1"), Role::Agent, test_ca.now).client)
}

#[tokio::test]
async fn a_gateway_and_an_agent_of_one_ca_connect_and_identify_each_other() {
    let test_ca = TestCa::new();
    let agent = identity(&test_ca.agent("edge-1"), Role::Agent, test_ca.now);

    let met = connect(&server(&test_ca), &agent.client).await;

    let (server, client) = met.expect("they connect");
    let (server, client) = (server.get_ref().1, client.get_ref().1);
    assert_eq!(server.alpn_protocol(), Some(ALPN));
    assert_eq!(client.alpn_protocol(), Some(ALPN));
    assert_eq!(server.protocol_version(), Some(ProtocolVersion::TLSv1_3));
    let chain = server.peer_certificates().expect("a certificate");
    let peer = identify_agent(&chain[0]).expect("an agent");
    assert_eq!((&*peer.node, peer.expires), ("edge-1", agent.expires));
}

#[tokio::test]
async fn the_side_that_finds_an_error_refuses_the_handshake() {
    let now = Timestamp::now();
    let (test_ca, other) = (TestCa::at(now - days(400)), TestCa::new());
    // Each certificate was valid when its file was read.
    let (old_gateway, old_agent) = (server(&test_ca), client(&test_ca));
    let test_ca = test_ca.later(now + days(30));
    let early_agent = client(&test_ca);
    let test_ca = test_ca.later(now);
    let (gateway, agent) = (server(&test_ca), client(&test_ca));
    let posing = identity(&test_ca.agent("edge-2"), Role::Agent, now);
    let with = |files: &IdentityFiles| Arc::new(test_ca.client(Some(files)));
    let gateway_as_agent = with(&test_ca.gateway());
    let of_other_ca = with(&other.agent("edge-1"));
    let nobody = Arc::new(test_ca.client(None));
    let mut of_h2 = ClientConfig::clone(&agent);
    of_h2.alpn_protocols = vec![b"h2".to_vec()];

    for (server, client, wanted) in [
        (&gateway, &old_agent, "server: certificate expired"),
        (&old_gateway, &agent, "client: certificate expired"),
        (&gateway, &early_agent, "server: certificate not valid yet"),
        (&gateway, &client(&other), "client: UnknownIssuer"),
        (&gateway, &of_other_ca, "server: UnknownIssuer"),
        (&gateway, &nobody, "server: peer sent no certificates"),
        (
            &posing.server,
            &agent,
            "client: certificate does not allow extended key usage for server",
        ),
        (
            &gateway,
            &gateway_as_agent,
            "server: certificate does not allow extended key usage for client authentication",
        ),
        (
            &gateway,
            &Arc::new(of_h2),
            "server: peer doesn't support any known protocol",
        ),
    ] {
        let refused = connect(server, client).await.expect_err(wanted);
        let refused = refused.replace("invalid peer certificate: ", "");
        assert!(refused.contains(wanted), "{refused} for {wanted}");
    }
}

#[tokio::test]
async fn no_session_is_resumed_even_by_an_agent_that_wants_to() {
    let test_ca = TestCa::new();
    let gateway = server(&test_ca);
    let mut eager = ClientConfig::clone(&client(&test_ca));
    eager.resumption = Resumption::in_memory_sessions(8);
    let eager = Arc::new(eager);

    for _ in 0..3 {
        let met = connect(&gateway, &eager).await.expect("they connect");
        let kind = met.0.get_ref().1.handshake_kind();
        assert_eq!(kind, Some(HandshakeKind::Full));
    }
    assert_eq!(gateway.send_tls13_tickets, 0);
    assert!(!gateway.session_storage.can_cache());
}
