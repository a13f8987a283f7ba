//! Handshakes between both ends, in memory.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::{ClientConfig, ServerConfig, client::Resumption, pki_types::CertificateDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::{Site, assert_has, days, identity};
use crate::identity::{ALPN, Identity, Role, agent_of};

/// What both ends know after a handshake in which a byte came through both ways.
struct Met {
    alpn_of_server: Option<Vec<u8>>,
    alpn_of_client: Option<Vec<u8>>,
    leaf_of_agent: CertificateDer<'static>,
    version: Option<rustls::ProtocolVersion>,
}

async fn meet(server: Arc<ServerConfig>, client: Arc<ClientConfig>) -> Result<Met, String> {
    let (near, far) = duplex(1 << 16);
    let accepting = Box::pin(async move {
        let mut stream = TlsAcceptor::from(server)
            .accept(far)
            .await
            .map_err(|error| format!("server: {error}"))?;
        let byte = stream.read_u8().await;
        byte.map_err(|error| format!("server: {error}"))?;
        let written = stream.write_all(&[2]).await;
        written.map_err(|error| format!("server: {error}"))?;
        let (_, tls) = stream.get_ref();
        let leaf = tls.peer_certificates().and_then(|chain| chain.first());
        let leaf = leaf.ok_or("server: no certificate")?.clone().into_owned();
        let alpn = tls.alpn_protocol().map(<[u8]>::to_vec);
        Ok((alpn, leaf, tls.protocol_version()))
    });
    let connecting = Box::pin(async move {
        let mut stream = TlsConnector::from(client)
            .connect(Identity::gateway_name(), near)
            .await
            .map_err(|error| format!("client: {error}"))?;
        // An error here is the server's, which tells it itself.
        let written = stream.write_all(&[1]).await;
        let read = stream.read_u8().await;
        drop((written, read));
        let (_, tls) = stream.get_ref();
        Ok(tls.alpn_protocol().map(<[u8]>::to_vec))
    });
    let (accepted, connected): (Result<_, String>, Result<_, String>) =
        tokio::join!(accepting, connecting);
    match (accepted, connected) {
        (Ok((alpn_of_server, leaf_of_agent, version)), Ok(alpn_of_client)) => Ok(Met {
            alpn_of_server,
            alpn_of_client,
            leaf_of_agent,
            version,
        }),
        (accepted, connected) => {
            let errors = [accepted.err(), connected.err()];
            Err(errors.into_iter().flatten().collect::<Vec<_>>().join("; "))
        }
    }
}

fn now() -> Timestamp {
    Timestamp::now()
}

/// Ends of one CA.
fn ends() -> (Site, Arc<Identity>, Arc<Identity>) {
    let site = Site::new();
    let gateway = identity(&site.gateway(), Role::Gateway, now());
    let agent = identity(&site.agent("edge-1"), Role::Agent, now());
    (site, gateway, agent)
}

async fn refused(server: &Identity, client: &Identity) -> String {
    let met = meet(Arc::clone(&server.server), Arc::clone(&client.client)).await;
    met.err().expect("refused")
}

#[tokio::test]
async fn a_gateway_and_an_agent_of_one_ca_meet_and_know_each_other() {
    let (_site, gateway, agent) = ends();

    let met = meet(Arc::clone(&gateway.server), Arc::clone(&agent.client))
        .await
        .expect("they meet");

    assert_eq!(met.alpn_of_server.as_deref(), Some(ALPN));
    assert_eq!(met.alpn_of_client.as_deref(), Some(ALPN));
    assert_eq!(met.version, Some(rustls::ProtocolVersion::TLSv1_3));
    let peer = agent_of(&met.leaf_of_agent).expect("an agent");
    assert_eq!(&*peer.node, "edge-1");
    assert_eq!(peer.expires, agent.expires);
}

#[tokio::test]
async fn an_agent_cannot_pass_as_a_gateway_nor_a_gateway_as_an_agent() {
    let (site, gateway, agent) = ends();
    let other = identity(&site.agent("edge-2"), Role::Agent, now());

    // Agent as gateway: its certificate lacks the name, and is for no server.
    let no_name = refused(&agent, &other).await;
    // Gateway as agent: its certificate is for no client.
    let no_client = refused(&gateway, &gateway).await;

    assert_has(&no_name, "client: invalid peer certificate");
    assert_has(
        &no_client,
        "server: invalid peer certificate: certificate does not allow extended key usage for client authentication",
    );
}

#[tokio::test]
async fn ends_of_two_cas_refuse_each_other() {
    let (here, there) = (Site::new(), Site::new());
    let gateway = identity(&here.gateway(), Role::Gateway, now());
    let agent = identity(&there.agent("edge-1"), Role::Agent, now());

    // The agent refuses first; so that the gateway gets to, the agent is given the gateway's CA.
    let by_agent = refused(&gateway, &agent).await;
    let mut files = there.agent("edge-1");
    let both = [here.path("ca.pem"), there.path("ca.pem")]
        .map(|path| std::fs::read_to_string(path).expect("a CA"));
    files.ca = there.path("both.pem");
    std::fs::write(&files.ca, both.concat()).expect("written");
    let trusting = identity(&files, Role::Agent, now());
    let by_gateway = refused(&gateway, &trusting).await;

    assert_has(&by_agent, "client: invalid peer certificate: UnknownIssuer");
    assert_has(
        &by_gateway,
        "server: invalid peer certificate: UnknownIssuer",
    );
}

#[tokio::test]
async fn a_certificate_that_expired_since_it_was_read_is_refused_at_the_handshake() {
    let past = now() - days(400);
    let site = Site::at(past);
    let (old_gateway, old_agent) = (site.gateway(), site.agent("edge-1"));
    // Read while they were valid.
    let old_gateway = identity(&old_gateway, Role::Gateway, past);
    let old_agent = identity(&old_agent, Role::Agent, past);
    let fresh = Site {
        dir: site.dir,
        now: now(),
    };
    let gateway = identity(&fresh.gateway(), Role::Gateway, now());
    let agent = identity(&fresh.agent("edge-1"), Role::Agent, now());

    let by_gateway = refused(&gateway, &old_agent).await;
    let by_agent = refused(&old_gateway, &agent).await;

    assert_has(
        &by_gateway,
        "server: invalid peer certificate: certificate expired",
    );
    assert_has(
        &by_agent,
        "client: invalid peer certificate: certificate expired",
    );
}

#[tokio::test]
async fn a_certificate_that_is_not_valid_yet_is_refused_at_the_handshake() {
    let site = Site::new();
    let gateway = identity(&site.gateway(), Role::Gateway, now());
    let future = now() + days(30);
    let ahead = Site {
        dir: site.dir,
        now: future,
    };
    let agent = identity(&ahead.agent("edge-1"), Role::Agent, future);

    let by_gateway = refused(&gateway, &agent).await;

    assert_has(
        &by_gateway,
        "server: invalid peer certificate: certificate not valid yet",
    );
}

#[tokio::test]
async fn an_agent_without_a_certificate_is_refused() {
    let (_site, gateway, agent) = ends();
    let mut nobody = ClientConfig::clone(&agent.client);
    nobody.client_auth_cert_resolver = Arc::new(Nobody);

    let refused = meet(Arc::clone(&gateway.server), Arc::new(nobody)).await;

    let refused = refused.err().expect("refused");
    assert_has(&refused, "server: peer sent no certificates");
}

#[derive(Debug)]
struct Nobody;

impl rustls::client::ResolvesClientCert for Nobody {
    fn resolve(
        &self,
        _hints: &[&[u8]],
        _schemes: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[tokio::test]
async fn another_protocol_is_refused_and_none_is_told_to_the_gateway() {
    let (_site, gateway, agent) = ends();
    let with = |protocols: &[&[u8]]| {
        let mut config = ClientConfig::clone(&agent.client);
        config.alpn_protocols = protocols.iter().map(|it| it.to_vec()).collect();
        Arc::new(config)
    };

    let other = meet(Arc::clone(&gateway.server), with(&[b"h2"])).await;
    let none = meet(Arc::clone(&gateway.server), with(&[])).await;

    let other = other.err().expect("refused");
    assert_has(&other, "server: peer doesn't support any known protocol");
    // The tunnel compares, and closes it.
    assert_eq!(none.expect("rustls lets it pass").alpn_of_server, None);
}

#[tokio::test]
async fn no_session_is_resumed_even_by_an_agent_that_wants_to() {
    let (_site, gateway, agent) = ends();
    let mut eager = ClientConfig::clone(&agent.client);
    eager.resumption = Resumption::in_memory_sessions(8);
    let eager = Arc::new(eager);

    for _ in 0..3 {
        let met = meet(Arc::clone(&gateway.server), Arc::clone(&eager)).await;
        let met = met.expect("they meet");
        // A resumed session has no certificate of this handshake; this one was verified anew.
        agent_of(&met.leaf_of_agent).expect("an agent");
    }
    assert_eq!(gateway.server.send_tls13_tickets, 0);
    assert!(!gateway.server.session_storage.can_cache());
}
