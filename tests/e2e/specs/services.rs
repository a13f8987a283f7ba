//! Services of real pods, dialled by pods and hosts.

use std::{io, net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_cluster::{DNS, at_once};
use tunnel_tests::wait;

use crate::{
    manifests::{self, NAMESPACE},
    stage::{BACKENDS, Client, KNOWN, Stage},
};

/// The number of requests: enough that none of four backends is missed by chance.
const TIMES: u32 = 80;
/// If a packet is refused, the error of the first SYN may arrive while the socket is locked by its
/// sender and is then ignored; that of the retransmission, a second later, ends the connect.
const SECOND_TRY: Duration = Duration::from_secs(2);

pub(super) fn names_resolve(stage: &Stage<'_>) -> Result<()> {
    let name = format!("web.{NAMESPACE}.svc.cluster.local");
    let server = format!("@{DNS}");
    let [web, _] = stage.addresses("web")?[..] else {
        anyhow::bail!("the Service has not two addresses");
    };
    for node in &stage.cluster.nodes {
        for protocol in ["+notcp", "+tcp"] {
            let words = ["dig", "+short", "+time=2", protocol, &server, &name, "A"];
            let mut said = String::new();
            wait::until(KNOWN, || {
                said = stage
                    .exec(node.name, &words)
                    .unwrap_or_else(|error| format!("{error:#}"));
                said.trim() == web.ip().to_string()
            })
            .with_context(|| format!("{} from {}: {said:?}", words.join(" "), node.name))?;
        }
        let url = "https://kubernetes.default/version";
        let words = ["curl", "--silent", "--insecure", "--max-time", "10", url];
        let said = stage.exec(node.name, &words)?;
        ensure!(said.contains("gitVersion"), "{url} said {said:?}");
    }
    Ok(())
}

pub(super) fn all_backends_answer(stage: &Stage<'_>) -> Result<()> {
    let addresses = stage.answering("web")?;
    ensure!(addresses.len() == 2, "only {addresses:?}");
    for client in &stage.clients {
        for to in &addresses {
            let report = client.ask(*to, TIMES);
            let name = &client.name;
            ensure!(report.failed() == 0, "{name} → {to}: {:?}", report.failures);
            let seen = report.servers.len();
            ensure!(seen == BACKENDS, "{name} → {to}: {:?}", report.servers);
        }
    }
    Ok(())
}

pub(super) fn no_endpoints_refuse(stage: &Stage<'_>) -> Result<()> {
    let nobody = manifests::service("nobody", &["TCP"]);
    stage.kubectl().apply(&nobody)?;
    let addresses = stage.addresses("nobody")?;
    let is_refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    let ask = |client: &Client| {
        for to in &addresses {
            let refuses = || client.connect(*to, SECOND_TRY).is_err_and(is_refused);
            wait::until(KNOWN, refuses)
                .with_context(|| format!("{to} never refused {}", client.name))?;
        }
        Ok(())
    };
    at_once(&stage.clients, ask).map(drop)
}

pub(super) fn two_protocols_on_one_port(stage: &Stage<'_>) -> Result<()> {
    for to in stage.answering("web")? {
        for client in &stage.clients {
            let by_stream = client.ask(to, 1);
            ensure!(by_stream.failed() == 0, "{:?}", by_stream.failures);
            answers_datagrams(client, to)?;
        }
    }
    Ok(())
}

fn answers_datagrams(client: &Client, to: SocketAddr) -> Result<()> {
    let mut last = Ok(String::new());
    wait::until(Duration::from_secs(10), || {
        last = client.ask_by_datagram(to);
        last.as_ref().is_ok_and(|name| name.starts_with("web-"))
    })
    .with_context(|| format!("{} → {to} by datagrams: {last:?}", client.name))
}
