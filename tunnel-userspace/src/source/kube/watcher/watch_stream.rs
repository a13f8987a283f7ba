//! Watches the objects of one kind for changes.

use futures_util::{StreamExt as _, stream::BoxStream};
use kube::{api::WatchParams, core::WatchEvent};
use serde_json::value::RawValue;
use tokio::time::{Duration, Instant, sleep, timeout_at};
use tracing::{debug, warn};

use super::{
    Change, KindWatcher,
    failure::{RequestPhase, StopReason},
    server_state::ServerState,
};

/// The minimum duration of a watch that sends no new events. A shorter one counts as a failure.
const MIN_DURATION: Duration = Duration::from_secs(1);

/// An open watch.
pub(super) struct OpenWatch {
    pub(super) events: BoxStream<'static, kube::Result<WatchEvent<Box<RawValue>>>>,
    since: Instant,
    /// The time at which the client closes the watch if the server has not ended it by then.
    deadline: Instant,
    /// True if any event had a newer version than all versions seen before.
    has_new_version: bool,
}

impl OpenWatch {
    /// Restarts the watch's clock at the end of the initial list, whose objects do not count as new events.
    pub(super) fn restart(&mut self) {
        self.since = Instant::now();
        self.has_new_version = false;
    }
}

impl KindWatcher {
    /// Opens a watch that starts at a version. If `with_list` is true, the watch begins with a list of all
    /// objects.
    pub(super) async fn open(&self, with_list: bool, version: &str) -> kube::Result<OpenWatch> {
        let seconds = u32::try_from(self.settings.watch_timeout.as_secs()).unwrap_or(u32::MAX);
        // The random part keeps nodes from all reopening their watches at the same time.
        let seconds = (seconds - fastrand::u32(0..=seconds / 10)).max(1);
        let params = WatchParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.fields.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: with_list,
        };
        let request = self.request().watch(&params, version);
        let request = request.map_err(kube::Error::BuildRequest)?;
        let events = self.client.request_events(request).await?.boxed();
        let since = Instant::now();
        Ok(OpenWatch {
            events,
            since,
            deadline: since + Duration::from_secs(seconds.into()) + self.limits.watch_overtime,
            has_new_version: false,
        })
    }

    /// Sends events for changes until the watch ends. If the watch ended too early, waits before returning.
    pub(super) async fn watch(
        &self,
        open: Option<OpenWatch>,
        version: &mut String,
        server: &mut ServerState,
    ) -> Result<(), StopReason> {
        let mut watch = match open {
            Some(watch) => watch,
            None => {
                let opened = self.open(false, version).await;
                opened.map_err(StopReason::at(RequestPhase::WatchStart))?
            }
        };
        let ended = self.forward_events(&mut watch, version, server).await;
        if watch.has_new_version || watch.since.elapsed() >= MIN_DURATION {
            server.reset_backoff();
        } else if ended.is_ok() {
            if server.failures() == 1 {
                warn!(kind = %self.selection.kind, "the API server or a proxy in front of it ends watches immediately");
            }
            sleep(server.next_backoff()).await;
        }
        ended
    }

    /// Sends events for changes until the watch ends.
    async fn forward_events(
        &self,
        watch: &mut OpenWatch,
        version: &mut String,
        server: &mut ServerState,
    ) -> Result<(), StopReason> {
        // Records a version. Returns true if it is newer than all versions seen before.
        let mut record_version = |new: String| {
            let is_new = server.record_event(&new);
            if !new.is_empty() {
                *version = new;
            }
            is_new
        };
        loop {
            let Ok(next) = timeout_at(watch.deadline, watch.events.next()).await else {
                debug!(kind = %self.selection.kind, "the API server did not end a watch in time");
                return Ok(());
            };
            let Some(event) = next else {
                return Ok(());
            };
            let (object, to_change): (_, fn(_) -> _) =
                match event.map_err(StopReason::at(RequestPhase::Watch))? {
                    WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                        (object, Change::Updated)
                    }
                    WatchEvent::Deleted(object) => (object, Change::Deleted),
                    WatchEvent::Bookmark(bookmark) => {
                        record_version(bookmark.metadata.resource_version);
                        continue;
                    }
                    WatchEvent::Error(status) => {
                        return Err(StopReason::at(RequestPhase::Watch)(kube::Error::Api(
                            status,
                        )));
                    }
                };
            let object = self
                .parse(&object)
                .map_err(StopReason::at(RequestPhase::Watch))?;
            watch.has_new_version |= record_version(object.version.clone());
            self.send(to_change(object)).await?;
        }
    }
}
