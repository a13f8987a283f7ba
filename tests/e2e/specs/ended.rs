//! Open sockets of a deleted Service.

use std::{
    io::ErrorKind,
    net::{SocketAddr, UdpSocket},
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use crate::{
    manifests,
    stage::{Client, KNOWN, Stage},
};

const NAME: &str = "leaving";

/// Expects a connected UDP socket whose Service is deleted to be ended at once, in pods and on hosts, so
/// that its owner does not wait for answers in vain.
pub(super) fn with_their_backend(stage: &Stage<'_>) -> Result<()> {
    let service = manifests::service(NAME, &["UDP"]);
    let own = format!("{{app: {NAME}}}");
    ensure!(service.contains(&own), "{service}");
    let service = service.replace(&own, "{app: web}");
    stage.kubectl().apply(&service)?;
    let mut sockets = Vec::new();
    for client in &stage.clients {
        for to in stage.addresses(NAME)? {
            sockets.push((client, to, answered(client, to)?));
        }
    }
    stage.run(&["delete", "service", NAME])?;
    for (client, to, socket) in sockets {
        socket.set_read_timeout(Some(KNOWN))?;
        let ended = socket.recv(&mut [0; 256]);
        ensure!(
            matches!(&ended, Err(error) if error.kind() == ErrorKind::ConnectionAborted),
            "{} → {to}: {ended:?}",
            client.name
        );
    }
    Ok(())
}

/// Creates a connected socket, and waits for an answer on it.
fn answered(client: &Client, to: SocketAddr) -> Result<UdpSocket> {
    let ask = || -> Result<UdpSocket> {
        let socket = client.udp(to)?;
        socket.connect(to)?;
        socket.send(b"hostname")?;
        socket.recv(&mut [0; 256])?;
        Ok(socket)
    };
    wait::some(KNOWN, || ask().ok()).with_context(|| format!("{} → {to}", client.name))
}
