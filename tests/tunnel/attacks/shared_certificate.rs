//! Tests in which a second machine uses the certificate of a node.

use std::thread;

use anyhow::Result;
use tunnel_tests::{hostile_peer::HostilePeer, pki::Validity, wait};

use crate::{
    fixture::{ANSWER, TunnelSettings, echo},
    targets::{Behaviour, Server},
};

/// The number of connections that clients open. The gateway prefers the session with the fewest streams, so
/// it would choose the second machine for most of them.
const CLIENTS: usize = 20;

#[test]
fn a_second_machine_that_refuses_every_target_turns_no_client_away() -> Result<()> {
    let server = Server::start(Behaviour::Echo)?;
    let tunnel = TunnelSettings::of(&[server.at()]).start()?;
    let files = tunnel.files("second");
    let pair = tunnel.authority().agent("a", Validity::Current)?;
    files.write(&tunnel.authority().pem(), &pair)?;
    let mut second = HostilePeer::agent(tunnel.gateway(), &files)?;
    second.answer_hello()?;
    wait::until(ANSWER, || {
        tunnel.record().is_ok_and(|it| it.sessions("a") == 3)
    })?;
    let refuser = thread::spawn(move || {
        let mut refused = 0;
        while second.deny_target().is_ok() {
            refused += 1;
        }
        refused
    });

    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let mut client = tunnel.connect(server.at())?;
        echo(&mut client, b"hello")?;
        clients.push(client);
    }

    let count = tunnel.count("target_denied")?;
    drop(tunnel);
    let refused = refuser
        .join()
        .map_err(|_panic| anyhow::anyhow!("it panicked"))?;
    anyhow::ensure!(refused > 0, "the second machine was never chosen");
    anyhow::ensure!(count == 0, "{count} clients were refused");
    Ok(())
}
