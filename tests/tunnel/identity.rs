//! Who is let in, and as whom.

use std::{
    io::Read as _,
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    version::TLS13,
};
use tunnel_tests::{
    pki::{Authority, Pair, Validity, provider},
    wait,
};

use crate::{
    support::{ANSWER, Plan, Tunnel, echo, expect_refused},
    targets::{Act, Server},
};

/// What a session speaks.
const PROTOCOL: &[u8] = b"culvert/1";

/// What a gateway sends first to an agent that it let in: it is the client of HTTP/2.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A client of a gateway, with any certificate and protocol.
fn client(ca: &str, pair: Option<&Pair>, protocol: &[u8]) -> Result<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes())?)?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots);
    let mut config = match pair {
        None => builder.with_no_client_auth(),
        Some(Pair { cert, key }) => builder.with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(cert.as_bytes())?],
            PrivateKeyDer::from_pem_slice(key.as_bytes())?,
        )?,
    };
    config.alpn_protocols = vec![protocol.to_vec()];
    Ok(Arc::new(config))
}

/// Whether a gateway lets a client in: it begins to speak HTTP/2 with it.
fn is_let_in(gateway: SocketAddr, config: Arc<ClientConfig>) -> Result<bool> {
    let socket = TcpStream::connect(gateway)?;
    socket.set_read_timeout(Some(ANSWER))?;
    let connection = ClientConnection::new(config, "gateway.culvert.dev".try_into()?)?;
    let mut stream = StreamOwned::new(connection, socket);
    let mut preface = vec![0; PREFACE.len()];
    Ok(stream.read_exact(&mut preface).is_ok() && preface == PREFACE)
}

#[test]
fn only_the_certificate_of_an_agent_lets_in() -> Result<()> {
    let tunnel = Plan::of(&[]).without_agents()?;
    let own = tunnel.authority();
    let other = Authority::new("tunnel")?;
    let ca = own.pem();
    let agent = own.agent("a", Validity::Current)?;
    let good = client(&ca, Some(&agent), PROTOCOL)?;
    ensure!(is_let_in(tunnel.gateway(), good)?, "a good one is let in");
    tunnel.until_disconnected("a")?;

    let agents = "culvert:agents";
    let bad = [
        ("no certificate", None),
        (
            "of another authority",
            Some(other.agent("a", Validity::Current)?),
        ),
        (
            "of no agent",
            Some(own.client("a", "system:nodes", Validity::Current)?),
        ),
        (
            "of no node",
            Some(own.client("Not a name!", agents, Validity::Current)?),
        ),
    ];
    let refused = |tunnel: &Tunnel| -> Result<u64> {
        Ok(tunnel.count("handshake_failed")? + tunnel.count("identity_refused")?)
    };
    for (what, pair) in bad {
        let before = refused(&tunnel)?;
        let config = client(&ca, pair.as_ref(), PROTOCOL)?;
        ensure!(!is_let_in(tunnel.gateway(), config)?, "{what}: let in");
        wait::until(ANSWER, || refused(&tunnel).is_ok_and(|now| now > before))
            .with_context(|| format!("{what}: not counted\n{}", tunnel.logs()))?;
    }
    let config = client(&ca, Some(&agent), b"h2")?;
    ensure!(
        !is_let_in(tunnel.gateway(), config)?,
        "another protocol: let in"
    );
    let nodes = tunnel.record()?.nodes;
    let nodes = nodes.as_array().into_iter().flatten();
    let strangers = nodes.filter(|node| node["node"] != "a").count();
    ensure!(strangers == 0);
    Ok(())
}

#[test]
fn a_session_is_that_of_the_node_in_its_certificate() -> Result<()> {
    let server = Server::start(Act::Echo)?;
    let mut tunnel = Plan::of(&[server.at()]).without_agents()?;

    // It could reach what belongs to node a, and says nothing but that it is b.
    let pair = tunnel.authority().agent("b", Validity::Current)?;
    tunnel.launch_agent("a", &pair)?;
    tunnel.until_connected("b")?;

    let mut stream = tunnel.connect(server.at())?;
    expect_refused(&mut stream)?;
    tunnel.until_counted("agent_not_connected", 1)?;
    ensure!(server.accepted() == 0 && tunnel.record()?.sessions("a") == 0);
    Ok(())
}

#[test]
fn a_client_of_one_node_never_reaches_the_agent_of_another() -> Result<()> {
    let (one, two) = (Server::start(Act::Echo)?, Server::start(Act::Echo)?);
    let mut plan = Plan::nodes(vec![("a", vec![one.at()]), ("b", vec![two.at()])]);
    plan.allow = Some(vec![one.at(), two.at()]);
    let mut tunnel = plan.start()?;
    let mut first = tunnel.connect(one.at())?;
    echo(&mut first, b"hello")?;
    echo(&mut tunnel.connect(two.at())?, b"hello")?;

    tunnel.kill_agent("a")?;
    tunnel.until_disconnected("a")?;

    for _ in 0..20 {
        let mut stream = tunnel.connect(one.at())?;
        expect_refused(&mut stream)?;
    }
    ensure!(one.accepted() == 1 && two.accepted() == 1);
    echo(&mut tunnel.connect(two.at())?, b"hello")
}

/// When the certificate of the only session of a node, or of the gateway, ends.
fn expiries(tunnel: &Tunnel) -> Result<[String; 2]> {
    let record = tunnel.record()?;
    let nodes = record.nodes.as_array().into_iter().flatten();
    let sessions = nodes
        .filter_map(|node| node["sessions"].as_array())
        .flatten();
    let of_agent = sessions
        .map(|session| session["certificateExpires"].to_string())
        .next();
    Ok([
        record.identity["expires"].to_string(),
        of_agent.unwrap_or_default(),
    ])
}

#[test]
fn certificates_are_replaced_under_live_streams() -> Result<()> {
    let server = Server::start(Act::Echo)?;
    let mut tunnel = Plan::of(&[server.at()]).start()?;
    let mut live = tunnel.connect(server.at())?;
    echo(&mut live, b"hello")?;
    let before = expiries(&tunnel)?;

    let authority = tunnel.authority();
    let gateway = authority.gateway(Validity::Longer)?;
    let agent = authority.agent("a", Validity::Longer)?;
    for (stem, pair) in [("gateway", gateway), ("agent-a", agent)] {
        tunnel.files(stem).write(&authority.pem(), &pair)?;
    }
    let renewed = || expiries(&tunnel).is_ok_and(|now| now[0] != before[0]);
    wait::until(ANSWER, renewed).context("the gateway shows its old certificate")?;
    let agent_renewed = tunnel.agent("a")?.agent()?;
    ensure!(
        agent_renewed.identity["problem"].is_null(),
        "{agent_renewed:?}"
    );
    echo(&mut live, b"still there")?;
    echo(&mut tunnel.connect(server.at())?, b"hello")?;

    // What comes next shows the new ones, and is trusted.
    tunnel.kill_cloud()?;
    tunnel.start_cloud()?;
    tunnel.until_connected("a")?;
    let now = expiries(&tunnel)?;
    ensure!(
        now[1] != before[1],
        "the agent shows its old certificate: {now:?}"
    );
    echo(&mut tunnel.connect(server.at())?, b"hello")
}
