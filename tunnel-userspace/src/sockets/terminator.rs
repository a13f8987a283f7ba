//! The task that starts a scan for stale sockets whenever a backend has been removed.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tracing::{info, warn};
use tunnel_common::addr::Protocol;

use super::{
    PodTerminator, TerminatorView, TranslationMaps,
    helper::{self, HelperServer},
    namespaces,
    retry::{self, Retry},
    scan::{self, ScanScope},
};
use crate::drain;

/// The time within which a helper must connect after startup. If none does, a warning is logged that sockets
/// in pods are not being terminated.
const HELPER_TIMEOUT: Duration = Duration::from_secs(5);

/// The settings for terminating connected sockets whose backend no longer serves its Service.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct TerminatorSettings {
    /// The protocols whose sockets are terminated. If the list is empty, no sockets are terminated.
    pub terminate: Vec<Transport>,
    /// True to terminate sockets in pods as well.
    pub include_pods: bool,
}

impl Default for TerminatorSettings {
    fn default() -> Self {
        Self {
            terminate: vec![Transport::Udp],
            include_pods: true,
        }
    }
}

/// A protocol whose sockets can be terminated.
#[derive(
    Clone, Copy, Debug, Deserialize, Eq, JsonSchema, Ord, PartialEq, PartialOrd, Serialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// UDP: a client that is waiting for a reply gets an error at once and can use another backend.
    Udp,
    /// TCP: connections to a backend that has left its Service are terminated even if the backend is still
    /// running.
    Tcp,
}

impl Transport {
    /// Converts the transport to the protocol type used in the maps.
    const fn protocol(self) -> Protocol {
        match self {
            Self::Udp => Protocol::UDP,
            Self::Tcp => Protocol::TCP,
        }
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Terminates sockets that are connected to removed backends.
pub struct Terminator<M> {
    maps: Arc<M>,
    protocols: Vec<Protocol>,
    include_pods: bool,
    /// The path of the Unix socket for the helper, which terminates sockets in pods if the daemon can't.
    helper: PathBuf,
    view: watch::Sender<TerminatorView>,
    /// The number of the scan that was started last.
    scan_number: watch::Sender<u64>,
}

impl<M: TranslationMaps + 'static> Terminator<M> {
    /// Creates a terminator that publishes its state to `view`. `helper` is the path of the Unix socket for
    /// the helper, which terminates sockets in pods if the daemon can't.
    pub fn new(
        settings: &TerminatorSettings,
        helper: PathBuf,
        maps: M,
        view: watch::Sender<TerminatorView>,
    ) -> Self {
        Self {
            maps: Arc::new(maps),
            protocols: settings.terminate.iter().map(|it| it.protocol()).collect(),
            include_pods: settings.include_pods,
            helper,
            view,
            scan_number: watch::Sender::new(0),
        }
    }

    /// Scans once and then again whenever `removals` changes, until the drain begins. `removals` must change
    /// after a backend has been removed, once no program can choose it any more. If it changes several times
    /// during a scan, only one further scan follows.
    pub async fn run(self, removals: watch::Receiver<u64>, draining: watch::Receiver<bool>) {
        let pods = self.process_for_pods();
        self.view.send_modify(|view| view.pods = pods.clone());
        let (scope, needs_helper) = match pods {
            PodTerminator::Daemon => (ScanScope::All, false),
            PodTerminator::Off => (ScanScope::Own, false),
            PodTerminator::Helper | PodTerminator::Unreached(_) => (ScanScope::Own, true),
        };
        let scanning = self.scan_on_removals(scope, removals, draining.clone());
        if needs_helper {
            let server = HelperServer {
                protocols: self.protocols.clone(),
                scan_number: self.scan_number.subscribe(),
                view: self.view.clone(),
                pods_without_helper: pods,
            };
            let helper = helper::serve(self.helper.clone(), server, draining.clone());
            tokio::join!(scanning, helper, self.warn(draining));
        } else {
            scanning.await;
        }
    }

    /// Logs a warning that sockets in pods are not being terminated if no helper connects in time.
    async fn warn(&self, mut draining: watch::Receiver<bool>) {
        tokio::select! {
            () = drain::begun(&mut draining) => {}
            () = sleep(HELPER_TIMEOUT) => {
                let pods = self.view.borrow().pods.clone();
                if let PodTerminator::Unreached(why) = pods {
                    warn!(%why, "connected sockets in pods are not ended when their backend is removed");
                }
            }
        }
    }

    async fn scan_on_removals(
        &self,
        scope: ScanScope,
        mut removals: watch::Receiver<u64>,
        mut draining: watch::Receiver<bool>,
    ) {
        let mut retry = Retry::default();
        loop {
            removals.mark_unchanged();
            self.scan_number
                .send_modify(|number| *number = number.wrapping_add(1));
            let delay = retry.next_delay(self.scan_once(scope).await);
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                changed = removals.changed() => {
                    if changed.is_err() {
                        // The task that owns the maps has ended, so no more backends will be removed.
                        return drain::begun(&mut draining).await;
                    }
                    retry.reset();
                }
                () = retry::wait(delay) => {}
            }
        }
    }

    /// Returns the process that terminates sockets in pods, as far as this is known at startup.
    fn process_for_pods(&self) -> PodTerminator {
        if !self.include_pods {
            return PodTerminator::Off;
        }
        namespaces::obstacle_to_entering().map_or(PodTerminator::Daemon, PodTerminator::Unreached)
    }

    /// Scans once. Returns true if the scan failed but a retry may succeed.
    async fn scan_once(&self, scope: ScanScope) -> bool {
        let (maps, protocols) = (Arc::clone(&self.maps), self.protocols.clone());
        let start = Instant::now();
        let scan = scan::run(scope, protocols, maps).await;
        let seconds = start.elapsed().as_secs_f64();
        let known = self.view.borrow().problem.clone();
        match &scan.problem {
            Some(problem) if known.as_ref() != Some(problem) => {
                warn!(%problem, retry = scan.is_retryable, "cannot end every socket of removed backends");
            }
            None if known.is_some() => info!("all sockets of removed backends can be ended again"),
            Some(_) | None => {}
        }
        if scan.ended > 0 {
            info!(
                ended = scan.ended,
                seconds, "ended sockets of removed backends"
            );
        }
        self.view.send_modify(|view| {
            view.count(scan.ended, scan.problem.is_some());
            // While a helper is connected, it reports this number, since it is the one that scans pods.
            if view.pods != PodTerminator::Helper {
                view.stale = scan.left;
            }
            view.last_scan_seconds = seconds;
            view.problem = scan.problem;
        });
        scan.is_retryable
    }
}
