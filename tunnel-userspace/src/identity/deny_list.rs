//! The deny list of a gateway: a file that lists nodes and certificates whose agents the gateway refuses. The file is
//! followed, and the last valid list stays in use if the file becomes invalid.

use std::{
    collections::HashSet,
    future,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{error, info};

use super::{
    FileError, FileProblem, Peer, SerialNumber, check_node_name, file_poll,
    pem_files::{self, file_error},
};
/// The interval between checks of the file. A change takes effect once two successive checks have found the same
/// contents, so that a file that is being written is not used.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The nodes and certificates whose agents are refused.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DenyList {
    nodes: HashSet<Arc<str>>,
    serials: HashSet<SerialNumber>,
}

impl DenyList {
    /// Parses the contents of a file. The error names the first invalid line.
    fn parse(bytes: &[u8]) -> Result<Self, FileProblem> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| FileProblem::Damaged(format!("it is not UTF-8: {error}")))?;
        let mut list = Self::default();
        for (number, line) in (1_usize..).zip(text.lines()) {
            let entry = line.split('#').next().unwrap_or_default();
            let mut words = entry.split_whitespace();
            let reason = match (words.next(), words.next(), words.next()) {
                (None, ..) => continue,
                (Some("node"), Some(name), None) => match check_node_name(name) {
                    Ok(()) => {
                        list.nodes.insert(name.into());
                        continue;
                    }
                    Err(error) => error.to_string(),
                },
                (Some("serial"), Some(digits), None) => match SerialNumber::parse(digits) {
                    Some(serial) => {
                        list.serials.insert(serial);
                        continue;
                    }
                    None => format!(
                        "serial: `{}` is not a serial number; write the hexadecimal digits that culvert ca show prints",
                        digits.escape_debug()
                    ),
                },
                _ => format!(
                    "`{}` is neither `node NAME` nor `serial DIGITS`",
                    entry.trim().escape_debug()
                ),
            };
            return Err(FileProblem::InvalidLine(number, reason));
        }
        Ok(list)
    }

    /// Returns the entry that an agent matches, if there is one.
    #[must_use]
    pub fn entry_of(&self, peer: &Peer) -> Option<DeniedAgent> {
        if self.nodes.contains(&peer.node) {
            Some(DeniedAgent::Node(Arc::clone(&peer.node)))
        } else if self.serials.contains(&peer.serial) {
            let (node, serial) = (Arc::clone(&peer.node), peer.serial.clone());
            Some(DeniedAgent::Certificate(node, serial))
        } else {
            None
        }
    }

    /// Returns true if the list has a node.
    #[must_use]
    pub fn contains_node(&self, node: &str) -> bool {
        self.nodes.contains(node)
    }

    /// Returns true if the list has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.serials.is_empty()
    }
}

/// An agent that matches an entry of the deny list.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DeniedAgent {
    /// The list has the node.
    #[error("the deny list (tunnel.gateway.denyFile) has node {0}")]
    Node(Arc<str>),
    /// The list has the serial number of the certificate.
    #[error(
        "the deny list (tunnel.gateway.denyFile) has the certificate of node {0} with the serial number {1}"
    )]
    Certificate(Arc<str>, SerialNumber),
}

impl DeniedAgent {
    /// Returns the name of the node in the agent's certificate.
    #[must_use]
    pub const fn node(&self) -> &Arc<str> {
        match self {
            Self::Node(node) | Self::Certificate(node, _) => node,
        }
    }
}

/// The state of the deny list, as shown in the status and the metrics.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DenyListState {
    /// The number of nodes on the list in use.
    pub nodes: usize,
    /// The number of certificates on the list in use.
    pub certificates: usize,
    /// The error in the current file, if it is not valid. The last valid list stays in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A receiver for the deny list in use, and for its state.
#[derive(Clone, Debug)]
pub struct DenyListReceiver {
    list: watch::Receiver<Option<Arc<DenyList>>>,
    state: watch::Receiver<DenyListState>,
}

impl DenyListReceiver {
    /// Returns the list in use, or `None` if the file has never been valid.
    #[must_use]
    pub fn current(&self) -> Option<Arc<DenyList>> {
        self.list.borrow().clone()
    }

    /// Waits until another list is published. Never returns once the store has been dropped.
    pub async fn changed(&mut self) {
        if self.list.changed().await.is_err() {
            future::pending::<()>().await;
        }
    }

    /// Returns the state of the list.
    #[must_use]
    pub fn state(&self) -> DenyListState {
        self.state.borrow().clone()
    }
}

impl Default for DenyListReceiver {
    /// Returns the receiver of a gateway without a file, whose list is always empty.
    fn default() -> Self {
        Self {
            list: watch::channel(Some(Arc::default())).1,
            state: watch::channel(DenyListState::default()).1,
        }
    }
}

/// Reads and watches the file, and publishes the list.
pub struct DenyListStore {
    path: PathBuf,
    /// The contents of the file, or the error, as found by the last check.
    last_check: Result<Vec<u8>, String>,
    /// True if the result of the last check has been published or reported.
    is_handled: bool,
    list: watch::Sender<Option<Arc<DenyList>>>,
    state: watch::Sender<DenyListState>,
}

impl DenyListStore {
    /// Reads the file. An invalid file does not make this fail: its error is in the state, and it is checked again
    /// later.
    #[must_use]
    pub fn open(path: PathBuf) -> (Self, DenyListReceiver) {
        let found = read(&path);
        let mut store = Self {
            path,
            // Initialised as if an earlier check had found the same, so that the file takes effect immediately.
            last_check: found.clone(),
            is_handled: false,
            list: watch::Sender::new(None),
            state: watch::Sender::default(),
        };
        store.handle_check(found);
        let receiver = DenyListReceiver {
            list: store.list.subscribe(),
            state: store.state.subscribe(),
        };
        (store, receiver)
    }

    /// Checks the file every second until the drain begins.
    pub async fn run(mut self, draining: watch::Receiver<bool>) {
        let path = self.path.clone();
        let handle = |found| self.handle_check(found);
        file_poll::poll(
            "the deny list",
            CHECK_INTERVAL,
            move || read(&path),
            handle,
            draining,
        )
        .await;
    }

    /// Handles the result of a check: publishes the list, or reports the error, if the previous check has found the
    /// same.
    fn handle_check(&mut self, found: Result<Vec<u8>, String>) {
        if found != self.last_check {
            (self.last_check, self.is_handled) = (found, false);
            return;
        }
        if self.is_handled {
            return;
        }
        self.is_handled = true;
        let parsed = self.last_check.as_ref().map_err(Clone::clone);
        let parsed = parsed.and_then(|bytes| {
            DenyList::parse(bytes).map_err(|problem| file_error(&self.path, problem).to_string())
        });
        match parsed {
            Ok(list) => self.publish(list),
            Err(problem) => self.report_problem(problem),
        }
    }

    fn publish(&self, list: DenyList) {
        let (nodes, certificates) = (list.nodes.len(), list.serials.len());
        self.state.send_replace(DenyListState {
            nodes,
            certificates,
            problem: None,
        });
        let is_new = self.list.send_if_modified(|current| {
            let is_new = current.as_deref() != Some(&list);
            if is_new {
                *current = Some(Arc::new(list));
            }
            is_new
        });
        if is_new {
            let file = self.path.display();
            info!(%file, nodes, certificates, "the deny list was loaded");
        }
    }

    fn report_problem(&self, problem: String) {
        let is_new = self.state.send_if_modified(|state| {
            let is_new = state.problem.as_ref() != Some(&problem);
            state.problem = Some(problem.clone());
            is_new
        });
        if !is_new {
            return;
        }
        let field = "tunnel.gateway.denyFile";
        if self.list.borrow().is_some() {
            error!(
                field,
                problem, "the deny list is not valid; the last valid one stays in use"
            );
        } else {
            error!(
                field,
                problem, "the deny list is not valid; until it is, the gateway refuses all agents"
            );
        }
    }
}

/// Reads the file. The error names the file.
fn read(path: &Path) -> Result<Vec<u8>, String> {
    let read = pem_files::read(path);
    let read = read.map(|(bytes, _)| bytes);
    read.map_err(|error: FileError| error.to_string())
}

#[cfg(test)]
mod tests;
