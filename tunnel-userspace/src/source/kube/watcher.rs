//! Lists and watches the objects of one kind, and lists them again if the server can't resume a watch.
//!
//! There are three reasons not to use the watcher from kube-runtime 5.0. It hides the version of a list,
//! which is needed to detect older data. It streams lists starting from version 0, which a lagging cache may
//! serve, and can't fall back to paging. Finally, when a watch ends immediately, it reopens the watch without
//! a backoff.
//!
//! - `list`: reads all objects
//! - `watch_stream`: reads changes
//! - `failure`: decides how to continue after an error
//! - `server_state`: keeps track of the backoff between requests and the last version seen

mod failure;
mod list;
mod server_state;
mod watch_stream;

use std::{convert::Infallible, sync::Arc};

use kube::{
    Client,
    api::ListParams,
    core::{ObjectList, Request},
};
use serde_json::value::RawValue;
use tokio::{
    sync::mpsc,
    time::{Duration, sleep, timeout},
};
use tracing::{debug, info};

use self::{
    failure::{Failure, RequestPhase, StopReason},
    server_state::ServerState,
};
use super::{KubeSettings, Limits, Selection, client::CurrentServer};
use crate::{clock::monotonic, k8s::ReceivedObject, model::Kind};

/// The number of failed streamed lists after which all further lists are read in pages.
const MAX_STREAM_FAILURES: u32 = 2;

/// The interval between requests for a kind that the server doesn't support.
const UNSUPPORTED_RETRY: Duration = Duration::from_secs(300);

/// An event about the objects of one kind.
#[derive(Debug)]
pub(super) struct KindEvent {
    pub(super) kind: Kind,
    /// The monotonic time at which the event was received.
    pub(super) at: Duration,
    pub(super) change: Change,
}

/// The content of a [`KindEvent`].
#[derive(Debug)]
pub(super) enum Change {
    /// A new list begins.
    ListStarted,
    /// An object in the new list.
    Listed(Box<ReceivedObject>),
    /// The list is complete. Objects that are missing from it have been deleted.
    ListCompleted,
    /// An object was created or updated.
    Updated(Box<ReceivedObject>),
    /// An object was deleted.
    Deleted(Box<ReceivedObject>),
    /// A request failed, or the response to it was invalid. It will be retried.
    RequestFailed(String),
    /// A request succeeded after earlier ones had failed.
    RequestSucceeded,
    /// The server doesn't support this kind.
    Unsupported,
}

/// Lists and watches the objects of one kind, and sends events about them.
pub(super) struct KindWatcher {
    pub(super) client: Client,
    pub(super) selection: Selection,
    pub(super) settings: Arc<KubeSettings>,
    pub(super) limits: Limits,
    pub(super) current: CurrentServer,
    pub(super) events: mpsc::Sender<KindEvent>,
}

/// The way in which a list is requested.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum ListMode {
    /// As the first events of a watch (`sendInitialEvents`).
    Streamed,
    /// In pages, before the watch is opened.
    Paged,
}

/// The reason why all objects must be listed again.
#[derive(Debug)]
enum RelistReason {
    /// The receiver of the events was dropped, so no further list is needed.
    ReceiverDropped,
    /// The server did not stream this list, or it refuses to stream lists at all.
    NotStreamed { is_refused: bool },
    /// The server can't resume from the last version seen, or its data may have been restored from a backup.
    VersionLost,
    /// The list is older than the last version seen.
    OlderList,
    /// The server doesn't support this kind.
    Unsupported,
}

impl KindWatcher {
    /// Lists and watches until the receiver of the events is dropped.
    pub(super) async fn run(self) {
        let kind = self.selection.kind;
        let mut server = ServerState::new(self.settings.max_backoff, self.limits.max_lag);
        let mut stream_failures = 0_u32;
        let mut list_mode = ListMode::Streamed;
        loop {
            let Err(reason) = self.list_and_watch(list_mode, &mut server).await;
            list_mode = ListMode::Streamed;
            match reason {
                RelistReason::ReceiverDropped => return,
                RelistReason::NotStreamed { is_refused } => {
                    stream_failures += if is_refused { MAX_STREAM_FAILURES } else { 1 };
                    list_mode = ListMode::Paged;
                    info!(%kind, "the API server doesn't stream this list; reading it in pages");
                }
                RelistReason::VersionLost => info!(%kind, "listing all objects again"),
                RelistReason::OlderList => {}
                RelistReason::Unsupported => {
                    if self.send(Change::Unsupported).await.is_err() {
                        return;
                    }
                    sleep(UNSUPPORTED_RETRY).await;
                }
            }
            if stream_failures >= MAX_STREAM_FAILURES {
                list_mode = ListMode::Paged;
            }
            // The backoff before each list prevents a busy loop if lists keep failing.
            sleep(server.next_backoff()).await;
        }
    }

    /// Lists and watches until a new list is needed.
    async fn list_and_watch(
        &self,
        list_mode: ListMode,
        server: &mut ServerState,
    ) -> Result<Infallible, RelistReason> {
        let mut list = loop {
            match self.list(list_mode, server).await {
                Ok(list) => break list,
                Err(stop) => self.handle_stop(stop, list_mode, server).await?,
            }
        };
        loop {
            let watch = list.watch.take();
            if let Err(stop) = self.watch(watch, &mut list.version, server).await {
                self.handle_stop(stop, list_mode, server).await?;
            }
        }
    }

    /// Sends an event that reports a failure, and waits until the server responds again.
    async fn handle_stop(
        &self,
        stop: StopReason,
        list_mode: ListMode,
        server: &mut ServerState,
    ) -> Result<(), RelistReason> {
        let kind = self.selection.kind;
        let failure = match stop {
            StopReason::Relist(reason) => return Err(reason),
            StopReason::Failed(failure) => failure,
        };
        debug!(%kind, error = &failure.error as &dyn std::error::Error, "watch failed");
        failure.check_retry(list_mode, kind)?;
        self.send(Change::RequestFailed(failure.describe())).await?;
        self.wait_for_server(&failure, list_mode, server).await?;
        // A streamed list that broke off once may break off every time, so paging is used instead.
        if failure.at == RequestPhase::List && list_mode == ListMode::Streamed {
            return Err(RelistReason::NotStreamed { is_refused: false });
        }
        Ok(())
    }

    /// Waits until the server responds again. Returns `Ok` if the watch can continue, or an error if a new
    /// list is needed: a server that was unreachable may have been restored from a backup, in which case it
    /// would send no events until its version exceeds that of the watch.
    async fn wait_for_server(
        &self,
        failure: &Failure,
        list_mode: ListMode,
        server: &mut ServerState,
    ) -> Result<(), RelistReason> {
        let mut after = failure.requested_delay();
        let mut was_unreachable = false;
        loop {
            sleep(server.next_backoff().max(after)).await;
            let one = self.selectors().limit(1);
            let server_index = self.current.index();
            let error = match timeout(self.limits.probe_timeout, self.page(&one)).await {
                Ok(Ok(list)) => {
                    self.send(Change::RequestSucceeded).await?;
                    let version = list.metadata.resource_version.unwrap_or_default();
                    if was_unreachable || server.is_older(&version) {
                        return Err(RelistReason::VersionLost);
                    }
                    return Ok(());
                }
                Ok(Err(error)) => {
                    let at = RequestPhase::ListStart;
                    let failure = Failure { error, at };
                    after = failure.requested_delay();
                    failure.check_retry(list_mode, self.selection.kind)?;
                    failure.describe()
                }
                Err(_) => {
                    let error = format!("no response within {:?}", self.limits.probe_timeout);
                    self.current.fail_over(server_index, &error);
                    error
                }
            };
            was_unreachable = true;
            self.send(Change::RequestFailed(error)).await?;
        }
    }

    /// Returns the selectors as request parameters.
    fn selectors(&self) -> ListParams {
        ListParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.fields.clone(),
            ..ListParams::default()
        }
    }

    fn request(&self) -> Request {
        Request::new(&*self.selection.path)
    }

    /// Requests one page of a list.
    async fn page(&self, params: &ListParams) -> kube::Result<ObjectList<Box<RawValue>>> {
        let request = self.request().list(params);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request(request).await
    }

    /// Parses an object as soon as it is received, so that its unused fields are not kept in memory.
    fn parse(&self, object: &RawValue) -> kube::Result<Box<ReceivedObject>> {
        let object = (self.selection.parse)(object.get());
        object.map(Box::new).map_err(kube::Error::SerdeError)
    }

    /// Sends an event. Fails if the receiver has been dropped.
    async fn send(&self, change: Change) -> Result<(), RelistReason> {
        let event = KindEvent {
            kind: self.selection.kind,
            at: monotonic(),
            change,
        };
        self.events
            .send(event)
            .await
            .ok()
            .ok_or(RelistReason::ReceiverDropped)
    }
}
