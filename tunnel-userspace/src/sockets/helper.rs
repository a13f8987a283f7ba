//! The helper, a separate process with the privileges to enter pods' network namespaces, and the daemon's
//! server that the helper connects to.
//!
//! The helper connects to the daemon's Unix socket. For each scan, the daemon sends an order and the helper
//! replies with a report, each as a single line of JSON.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    sync::watch,
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};
use tunnel_common::addr::Protocol;

use super::{
    PodTerminator, TerminatorView, TranslationMaps,
    retry::{self, Retry},
    scan::{self, ScanReport, ScanScope},
};
use crate::{drain, listen};

/// The time limit for a scan by the helper.
const SCAN_TIMEOUT: Duration = Duration::from_secs(60);
/// The delay before the helper reconnects, and before the daemon retries a failed accept().
const RETRY_DELAY: Duration = Duration::from_millis(250);
/// The maximum length of a line, in bytes.
const MAX_LINE: u64 = 64 * 1024;

/// A buffered connection between the daemon and the helper.
type Stream = BufReader<UnixStream>;

/// The daemon's order to run a scan.
#[derive(Debug, Deserialize, Serialize)]
struct ScanOrder {
    /// The number of the scan.
    #[serde(rename = "look")]
    number: u64,
    /// The IP protocol numbers of the sockets to terminate.
    protocols: Vec<u8>,
}

/// The helper's report on a scan.
#[derive(Debug, Deserialize, Serialize)]
struct HelperReport {
    /// The number of the scan.
    #[serde(rename = "look")]
    number: u64,
    #[serde(flatten)]
    scan: ScanReport,
}

/// The daemon's server that helpers connect to.
pub(super) struct HelperServer {
    pub(super) protocols: Vec<Protocol>,
    /// The number of the scan that the daemon started last.
    pub(super) scan_number: watch::Receiver<u64>,
    pub(super) view: watch::Sender<TerminatorView>,
    /// The state to publish while no helper is connected.
    pub(super) pods_without_helper: PodTerminator,
}

/// Serves one helper at a time until the drain begins.
pub(super) async fn serve(
    path: PathBuf,
    mut server: HelperServer,
    mut draining: watch::Receiver<bool>,
) {
    let listener = match listen::unix(&path) {
        Ok(listener) => listener,
        Err(error) => {
            warn!(%error, path = %path.display(), "cannot listen for the helper");
            return drain::begun(&mut draining).await;
        }
    };
    loop {
        let served = async {
            match listener.accept().await {
                Ok((stream, _)) => server.serve_helper(stream).await,
                Err(error) => {
                    warn!(%error, "cannot accept a connection");
                    sleep(RETRY_DELAY).await;
                }
            }
        };
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => break,
            () = served => {}
        }
    }
    if let Err(error) = fs::remove_file(&path) {
        debug!(%error, "cannot remove the socket for the helper");
    }
}

impl HelperServer {
    /// Serves a helper until it disconnects, ordering a scan at once and then whenever a backend has been
    /// removed.
    async fn serve_helper(&mut self, stream: UnixStream) {
        info!("the helper that ends sockets in pods has connected");
        let error = self.exchange(stream).await.err();
        let why = error.map_or_else(String::new, |error| error.to_string());
        warn!(%why, "the helper that ends sockets in pods has disconnected");
        let pods = self.pods_without_helper.clone();
        self.view.send_modify(|view| {
            view.pods = pods;
            view.helper_problem = None;
        });
    }

    async fn exchange(&mut self, stream: UnixStream) -> io::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut retry = Retry::default();
        loop {
            let order = ScanOrder {
                number: *self.scan_number.borrow_and_update(),
                protocols: self.protocols.iter().map(|its| its.number()).collect(),
            };
            let report = timeout(SCAN_TIMEOUT, request_scan(&mut stream, &order)).await??;
            let Some(report) = report else {
                return Ok(());
            };
            let delay = retry.next_delay(report.scan.is_retryable);
            self.publish(report);
            tokio::select! {
                changed = self.scan_number.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    retry.reset();
                }
                () = retry::wait(delay) => {}
                // The helper sends nothing but reports; anything else ends the connection.
                rest = stream.fill_buf() => {
                    let has_data = !rest?.is_empty();
                    return if has_data {
                        Err(invalid_data("unexpected data from the helper"))
                    } else {
                        Ok(())
                    };
                }
            }
        }
    }

    fn publish(&self, HelperReport { number, scan }: HelperReport) {
        let is_known = self.view.borrow().helper_problem == scan.problem;
        if let Some(problem) = &scan.problem
            && !is_known
        {
            warn!(%problem, "the helper cannot end every socket of removed backends");
        }
        if scan.ended > 0 {
            let ended = scan.ended;
            info!(
                number,
                ended, "the helper ended sockets of removed backends"
            );
        }
        self.view.send_modify(|view| {
            view.pods = PodTerminator::Helper;
            view.count(scan.ended, scan.problem.is_some());
            view.stale = scan.left;
            view.helper_problem = scan.problem;
        });
    }
}

async fn request_scan(stream: &mut Stream, order: &ScanOrder) -> io::Result<Option<HelperReport>> {
    write_line(stream, order).await?;
    let report: Option<HelperReport> = read_line(stream).await?;
    match report {
        Some(report) if report.number != order.number => {
            Err(invalid_data("the report is about another scan"))
        }
        report => Ok(report),
    }
}

/// Runs the helper until the drain begins: connects to the daemon and runs a scan for each order. Keeps
/// trying to connect while no daemon is running, and reconnects after the daemon has exited. `open` opens the
/// maps and is called again for each connection.
pub async fn run_helper<M, E, F>(socket: &Path, open: F, mut draining: watch::Receiver<bool>)
where
    M: TranslationMaps + 'static,
    E: std::fmt::Display + Send + 'static,
    F: Fn() -> Result<M, E> + Clone + Send + 'static,
{
    let mut was_connected = true;
    loop {
        let connection = connect_and_scan(socket, open.clone());
        let attempt = async {
            match connection.await {
                Ok(()) => {
                    info!("the daemon closed the connection");
                    was_connected = true;
                }
                Err(error) => {
                    if was_connected {
                        info!(%error, socket = %socket.display(), "no connection to the daemon; retrying");
                    }
                    was_connected = false;
                }
            }
            sleep(RETRY_DELAY).await;
        };
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            () = attempt => {}
        }
    }
}

async fn connect_and_scan<M, E, F>(socket: &Path, open: F) -> io::Result<()>
where
    M: TranslationMaps + 'static,
    E: std::fmt::Display + Send + 'static,
    F: Fn() -> Result<M, E> + Send + 'static,
{
    let mut stream = BufReader::new(UnixStream::connect(socket).await?);
    info!("connected to the daemon");
    let opened = spawn_blocking(move || open().map(Arc::new).map_err(|error| error.to_string()));
    let maps = opened.await.map_err(io::Error::other)?;
    while let Some(order) = read_line::<ScanOrder>(&mut stream).await? {
        let scan = match &maps {
            Ok(maps) => {
                let of_number = |number: u8| Protocol::of_socket(number.into());
                let protocols = order.protocols.into_iter().filter_map(of_number);
                scan::run(ScanScope::Others, protocols.collect(), Arc::clone(maps)).await
            }
            Err(problem) => ScanReport {
                problem: Some(problem.clone()),
                ..ScanReport::default()
            },
        };
        let number = order.number;
        write_line(&mut stream, &HelperReport { number, scan }).await?;
    }
    Ok(())
}

async fn write_line(stream: &mut Stream, value: &(impl Serialize + Sync)) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line).await
}

/// Reads a line of JSON. Returns `None` at the end of the connection.
async fn read_line<T: DeserializeOwned>(stream: &mut Stream) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    stream.take(MAX_LINE).read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Ok(None);
    }
    if line.last() != Some(&b'\n') {
        return Err(invalid_data("a line is truncated, or longer than 64 KiB"));
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

fn invalid_data(how: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, how)
}

#[cfg(test)]
mod tests;
