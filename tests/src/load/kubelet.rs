//! Clients of a kubelet-like server: a load of requests, each over a new connection, or a sequence of
//! requests over one connection.

use std::{
    io,
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use rustls::ClientConfig;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Type};

use super::{
    CreateSocket, Failure, Plan, Report, Success, connect_tcp, milliseconds, since_epoch_ms,
    timeout,
};
use crate::{
    clock::{self, Instant},
    fake_kubelet::client::Client,
    pki, sandbox,
};

/// Runs a load of `GET /healthz` requests. In the report, the servers' names are the subjects of their
/// certificates.
pub fn run(plan: &Plan, ca: &Path, sockets: CreateSocket<'_>) -> Result<Report> {
    let tls = pki::client_config(ca)?;
    Ok(super::run(plan, &|to| attempt(to, &tls, sockets)))
}

fn attempt(
    to: SocketAddr,
    tls: &Arc<ClientConfig>,
    sockets: CreateSocket<'_>,
) -> Result<Success, Failure> {
    let (socket, connect) = connect_tcp(to, sockets)?;
    let mut client = Client::handshake(socket.into(), to.ip(), Arc::clone(tls))
        .map_err(|error| Failure::at("handshake")(io_error(&error)))?;
    client
        .healthz()
        .map_err(|error| Failure::at("answer")(io_error(&error)))?;
    Ok(Success {
        server: client.subject().to_owned(),
        connect,
        is_peer_dialled: client.peer().is_ok_and(|peer| peer == to),
    })
}

/// Returns the first I/O error in the chain of `error`, rebuilt from just its error number or its kind.
#[must_use]
pub fn io_error(error: &anyhow::Error) -> io::Error {
    let found = error.chain().find_map(|it| it.downcast_ref::<io::Error>());
    match found {
        Some(error) => error
            .raw_os_error()
            .map_or_else(|| error.kind().into(), io::Error::from_raw_os_error),
        None => io::ErrorKind::InvalidData.into(),
    }
}

/// A request in a dialog, and its result.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Step {
    /// The request, in one of the forms that [`dialog`] accepts.
    pub ask: String,
    /// The time that the request took, in milliseconds.
    pub took_ms: u64,
    /// The response or the error.
    pub outcome: Result<String, String>,
}

/// The client's record of one connection.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Dialog {
    /// The start time, in milliseconds since 1970.
    pub began_ms: u64,
    /// The dialled address.
    pub dialled: SocketAddr,
    /// The address of the socket's peer.
    pub peer: SocketAddr,
    /// The subject of the server's certificate.
    pub subject: String,
    /// The requests and their results.
    pub steps: Vec<Step>,
}

/// Connects, then sends the requests in `asks` one after another until one fails.
///
/// A request is one of `healthz`, `bytes=N`, `sum=N`, `echo=TEXT`, `upgrade`, `exchange=TEXT`,
/// `pause=MILLIS`, `until-end=N`, `close` and `reset`.
pub fn dialog(
    to: SocketAddr,
    ca: &Path,
    asks: &[String],
    sockets: CreateSocket<'_>,
) -> Result<Dialog> {
    let tls = pki::client_config(ca)?;
    let began_ms = since_epoch_ms();
    let socket = sockets(Domain::for_address(to), Type::STREAM)?;
    sandbox::connect_within(&socket, to, timeout()).with_context(|| format!("connect to {to}"))?;
    let client = Client::handshake(TcpStream::from(socket), to.ip(), tls)?;
    client.set_timeout(sandbox::COMMAND_TIMEOUT)?;
    let mut dialog = Dialog {
        began_ms,
        dialled: to,
        peer: client.peer()?,
        subject: client.subject().to_owned(),
        steps: Vec::new(),
    };
    let mut client = Some(client);
    for ask in asks {
        let start = Instant::now();
        let outcome = run_request(&mut client, ask);
        let failed = outcome.is_err();
        dialog.steps.push(Step {
            ask: ask.clone(),
            took_ms: milliseconds(start.elapsed()),
            outcome: outcome.map_err(|error| format!("{error:#}")),
        });
        if failed {
            break;
        }
    }
    Ok(dialog)
}

fn run_request(open_client: &mut Option<Client>, ask: &str) -> Result<String> {
    let (word, value) = ask.split_once('=').unwrap_or((ask, ""));
    let mut last = || open_client.take().context("the connection is over");
    match word {
        "until-end" => return Ok(last()?.until_end(value.parse()?)?.to_string()),
        "close" => return last()?.close().map(|()| "closed by both".to_owned()),
        "reset" => return last()?.reset().map(|()| "reset".to_owned()),
        _ => {}
    }
    let client = open_client.as_mut().context("the connection is over")?;
    match word {
        "healthz" => client.healthz(),
        "bytes" => Ok(client.bytes(value.parse()?)?.to_string()),
        "sum" => Ok(client.sum(value.parse()?)?.to_string()),
        "echo" => client.echo(value).map(|()| value.to_owned()),
        "upgrade" => client.upgrade(),
        "exchange" => client.exchange(value.as_bytes()).map(|()| value.to_owned()),
        "pause" => {
            clock::pause(Duration::from_millis(value.parse()?));
            Ok(String::new())
        }
        _ => bail!("unknown request `{ask}`"),
    }
}
