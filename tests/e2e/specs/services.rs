//! Checks Services backed by pods, using clients in pods and on hosts.

use std::{io, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_cluster::{DNS, run_concurrently};
use tunnel_tests::wait;

use crate::{
    fixture::{BACKENDS, Client, Fixture, SYNC_TIMEOUT},
    manifests::{self, NAMESPACE},
};

/// The number of requests to send. With random selection, this is enough to reach each of four backends.
const REQUESTS: u32 = 80;
/// The time limit for a connect that should be refused. The kernel ignores the ICMP error for the first SYN
/// if the sender still holds the socket lock. In that case, the connect fails only after the error for the
/// retransmission, a second later.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn names_resolve(fixture: &Fixture<'_>) -> Result<()> {
    let name = format!("web.{NAMESPACE}.svc.cluster.local");
    let server = format!("@{DNS}");
    let addresses = fixture.addresses("web")?;
    let [web, _] = addresses[..] else {
        anyhow::bail!("the Service does not have two addresses, but {addresses:?}");
    };
    for node in &fixture.cluster.nodes {
        for protocol in ["+notcp", "+tcp"] {
            let dig = ["dig", "+short", "+time=2", protocol, &server, &name, "A"];
            let mut output = String::new();
            wait::until(SYNC_TIMEOUT, || {
                output = fixture
                    .exec(node.name, &dig)
                    .unwrap_or_else(|error| format!("{error:#}"));
                output.trim() == web.ip().to_string()
            })
            .with_context(|| {
                let (dig, ip) = (dig.join(" "), web.ip());
                format!("`{dig}` on {} prints {output:?}, not {ip}", node.name)
            })?;
        }
        let url = "https://kubernetes.default/version";
        let curl = ["curl", "--silent", "--insecure", "--max-time", "10", url];
        let output = fixture.exec(node.name, &curl)?;
        ensure!(
            output.contains("gitVersion"),
            "{url} on {} returns no version, but {output:?}",
            node.name
        );
    }
    Ok(())
}

pub(super) fn all_backends_answer(fixture: &Fixture<'_>) -> Result<()> {
    let addresses = fixture.wait_until_served("web")?;
    ensure!(
        addresses.len() == 2,
        "the Service does not have two addresses, but {addresses:?}"
    );
    for client in &fixture.clients {
        for to in &addresses {
            let report = client.request_names(*to, REQUESTS);
            let name = &client.name;
            ensure!(report.failed() == 0, "{name} → {to}: {:?}", report.failures);
            let backends = report.servers.len();
            ensure!(
                backends == BACKENDS,
                "{name} → {to}: not all of {BACKENDS} backends responded: {:?}",
                report.servers
            );
        }
    }
    Ok(())
}

pub(super) fn no_endpoints_refuse(fixture: &Fixture<'_>) -> Result<()> {
    let service = manifests::service("nobody", &["TCP"]);
    fixture.kubectl().apply(&service)?;
    let addresses = fixture.addresses("nobody")?;
    let is_refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    let check = |client: &Client| {
        for to in &addresses {
            let refuses = || client.connect(*to, REFUSAL_TIMEOUT).is_err_and(is_refused);
            wait::until(SYNC_TIMEOUT, refuses)
                .with_context(|| format!("{} → {to}: not refused", client.name))?;
        }
        Ok(())
    };
    run_concurrently(&fixture.clients, check).map(drop)
}

pub(super) fn two_protocols_on_one_port(fixture: &Fixture<'_>) -> Result<()> {
    for to in fixture.wait_until_served("web")? {
        for client in &fixture.clients {
            let report = client.request_names(to, 1);
            let name = &client.name;
            ensure!(
                report.failed() == 0,
                "{name} → {to} over TCP: {:?}",
                report.failures
            );
            check_udp(client, to)?;
        }
    }
    Ok(())
}

/// Expects a backend to reply to a datagram.
fn check_udp(client: &Client, to: SocketAddr) -> Result<()> {
    let mut last = Ok(String::new());
    wait::until(Duration::from_secs(10), || {
        last = client.request_name_by_udp(to);
        last.as_ref().is_ok_and(|name| name.starts_with("web-"))
    })
    .with_context(|| format!("{} → {to} over UDP: {last:?}", client.name))
}
