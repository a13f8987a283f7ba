//! Checks that connected UDP sockets fail when their Service is deleted.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use crate::{
    fixture::{Client, Fixture, SYNC_TIMEOUT},
    manifests,
};

const NAME: &str = "leaving";

/// Expects connected UDP sockets in pods and on hosts to fail at once when their Service is deleted, so that
/// programs do not wait for replies that will never arrive.
pub(super) fn is_ended_with_its_service(fixture: &Fixture<'_>) -> Result<()> {
    let service = manifests::service(NAME, &["UDP"]);
    let selector = format!("{{app: {NAME}}}");
    ensure!(
        service.contains(&selector),
        "the Service has no selector {selector}:\n{service}"
    );
    let service = service.replace(&selector, "{app: web}");
    fixture.kubectl().apply(&service)?;
    let mut sockets = Vec::new();
    for client in &fixture.clients {
        for to in fixture.addresses(NAME)? {
            sockets.push((client, to, connect(client, to)?));
        }
    }
    fixture.run_kubectl(&["delete", "service", NAME])?;
    for (client, to, socket) in sockets {
        socket.set_read_timeout(Some(SYNC_TIMEOUT))?;
        let result = socket.recv(&mut [0; 256]);
        ensure!(
            matches!(&result, Err(error) if error.kind() == ErrorKind::ConnectionAborted),
            "{} → {to}: expected ECONNABORTED, got {result:?}",
            client.name
        );
    }
    Ok(())
}

/// Returns a connected socket that has already received a reply.
fn connect(client: &Client, to: SocketAddr) -> Result<UdpSocket> {
    let try_once = || -> Result<UdpSocket> {
        let socket = client.udp_socket(to)?;
        socket.connect(to)?;
        socket.send(b"hostname")?;
        socket.recv(&mut [0; 256])?;
        Ok(socket)
    };
    wait::until_some(SYNC_TIMEOUT, || try_once().ok())
        .with_context(|| format!("{} → {to}: no reply", client.name))
}
