//! What changes, as the server says it.

use futures_util::{StreamExt as _, stream::BoxStream};
use kube::{Resource, api::WatchParams, core::WatchEvent};
use tokio::time::{Duration, Instant, sleep, timeout_at};
use tracing::{debug, warn};

use super::{
    Following, Incoming, What,
    failure::{Moment, Stop},
    pace::Round,
};
use crate::k8s::Arriving;

/// A watch that ends sooner than this, and has told nothing new, was none.
const SOON: Duration = Duration::from_secs(1);

/// A watch that is open.
pub(super) struct Watch<K> {
    pub(super) events: BoxStream<'static, kube::Result<WatchEvent<Incoming<K>>>>,
    since: Instant,
    /// When it is over, whatever its server thinks.
    until: Instant,
    /// Whether it has told something new.
    is_new: bool,
}

impl<K> Watch<K> {
    /// Takes note that the list is over and the watch begins: that a list came says nothing of it.
    pub(super) fn begun(&mut self) {
        self.since = Instant::now();
        self.is_new = false;
    }
}

impl<K> Following<K>
where
    K: Arriving + Resource<DynamicType = ()> + 'static,
    <K as Resource>::Scope: Send,
{
    /// Opens a watch from a version on, with a list of what is there or without.
    pub(super) async fn open(&self, with_list: bool, version: &str) -> kube::Result<Watch<K>> {
        let seconds = u32::try_from(self.settings.watch_timeout.as_secs()).unwrap_or(u32::MAX);
        // Not all watches of all nodes at once.
        let seconds = (seconds - fastrand::u32(0..=seconds / 10)).max(1);
        let wanted = WatchParams {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            send_initial_events: with_list,
        };
        let events = self.api.watch(&wanted, version).await?.boxed();
        let since = Instant::now();
        Ok(Watch {
            events,
            since,
            until: since + Duration::from_secs(seconds.into()) + self.limits.overtime,
            is_new: false,
        })
    }

    /// Tells what changes until the watch ends, and leaves a pause after one that was none.
    pub(super) async fn watch(
        &self,
        open: Option<Watch<K>>,
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
                warn!(kind = %K::READ_AS, "the API server, or what stands before it, ends watches at once");
            }
            sleep(round.pause()).await;
        }
        ended
    }

    /// Tells what changes until the watch ends.
    async fn hear(
        &self,
        watch: &mut Watch<K>,
        version: &mut String,
        round: &mut Round,
    ) -> Result<(), Stop> {
        loop {
            let Ok(next) = timeout_at(watch.until, watch.events.next()).await else {
                debug!(kind = %K::READ_AS, "a watch was not ended by its server");
                return Ok(());
            };
            let Some(event) = next else {
                return Ok(());
            };
            let (new, what) = match event.map_err(Stop::at(Moment::Watch))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let arrived = Box::new(object.arrived);
                    (arrived.version.clone(), Some(What::Changed(arrived)))
                }
                WatchEvent::Deleted(object) => {
                    let arrived = Box::new(object.arrived);
                    (arrived.version.clone(), Some(What::Gone(arrived)))
                }
                WatchEvent::Bookmark(bookmark) => (bookmark.metadata.resource_version, None),
                WatchEvent::Error(status) => {
                    return Err(Stop::at(Moment::Watch)(kube::Error::Api(status)));
                }
            };
            let is_new = round.moved(&new);
            if !new.is_empty() {
                *version = new;
            }
            if let Some(what) = what {
                watch.is_new |= is_new;
                self.told(what).await?;
            }
        }
    }
}
