//! Watches the changes of a kind.

use futures_util::{StreamExt as _, stream::BoxStream};
use kube::{api::WatchParams, core::WatchEvent};
use serde_json::value::RawValue;
use tokio::time::{Duration, Instant, sleep, timeout_at};
use tracing::{debug, warn};

use super::{
    Following, What,
    failure::{Moment, Stop},
    pace::Round,
};

/// The minimum duration of a watch without new events. A shorter one counts as a failure.
const SOON: Duration = Duration::from_secs(1);

/// An open watch.
pub(super) struct Watch {
    pub(super) events: BoxStream<'static, kube::Result<WatchEvent<Box<RawValue>>>>,
    since: Instant,
    /// The time when this side closes the watch, if the server hasn't.
    until: Instant,
    /// True if an event had a newer version than all earlier ones.
    is_new: bool,
}

impl Watch {
    /// Restarts the measured duration at the end of the list, whose objects do not count as new events.
    pub(super) fn begun(&mut self) {
        self.since = Instant::now();
        self.is_new = false;
    }
}

impl Following {
    /// Opens a watch from a version. It begins with a list of all objects if `with_list` is true.
    pub(super) async fn open(&self, with_list: bool, version: &str) -> kube::Result<Watch> {
        let seconds = u32::try_from(self.settings.watch_timeout.as_secs()).unwrap_or(u32::MAX);
        // The random part spreads the reconnects of all nodes.
        let seconds = (seconds - fastrand::u32(0..=seconds / 10)).max(1);
        let wanted = WatchParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.fields.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: with_list,
        };
        let request = self.request().watch(&wanted, version);
        let request = request.map_err(kube::Error::BuildRequest)?;
        let events = self.client.request_events(request).await?.boxed();
        let since = Instant::now();
        Ok(Watch {
            events,
            since,
            until: since + Duration::from_secs(seconds.into()) + self.limits.overtime,
            is_new: false,
        })
    }

    /// Sends events about changes until the watch ends. Waits for the backoff after a watch that ended too
    /// early.
    pub(super) async fn watch(
        &self,
        open: Option<Watch>,
        version: &mut String,
        round: &mut Round,
    ) -> Result<(), Stop> {
        let mut watch = match open {
            Some(watch) => watch,
            None => {
                let opened = self.open(false, version).await;
                opened.map_err(Stop::at(Moment::WatchStart))?
            }
        };
        let ended = self.hear(&mut watch, version, round).await;
        if watch.is_new || watch.since.elapsed() >= SOON {
            round.succeeded();
        } else if ended.is_ok() {
            if round.failures() == 1 {
                warn!(kind = %self.selection.kind, "the API server or a proxy in front of it ends watches immediately");
            }
            sleep(round.pause()).await;
        }
        ended
    }

    /// Sends events about changes until the watch ends.
    async fn hear(
        &self,
        watch: &mut Watch,
        version: &mut String,
        round: &mut Round,
    ) -> Result<(), Stop> {
        // Records a version. Returns true if it is newer than all earlier ones.
        let mut note = |new: String| {
            let is_new = round.moved(&new);
            if !new.is_empty() {
                *version = new;
            }
            is_new
        };
        loop {
            let Ok(next) = timeout_at(watch.until, watch.events.next()).await else {
                debug!(kind = %self.selection.kind, "the API server did not end a watch in time");
                return Ok(());
            };
            let Some(event) = next else {
                return Ok(());
            };
            let (object, what): (_, fn(_) -> _) = match event.map_err(Stop::at(Moment::Watch))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, What::Changed),
                WatchEvent::Deleted(object) => (object, What::Gone),
                WatchEvent::Bookmark(bookmark) => {
                    note(bookmark.metadata.resource_version);
                    continue;
                }
                WatchEvent::Error(status) => {
                    return Err(Stop::at(Moment::Watch)(kube::Error::Api(status)));
                }
            };
            let arrived = self.read(&object).map_err(Stop::at(Moment::Watch))?;
            watch.is_new |= note(arrived.version.clone());
            self.tell(what(arrived)).await?;
        }
    }
}
