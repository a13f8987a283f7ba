//! Lists all objects of a kind.

use futures_util::StreamExt as _;
use kube::core::WatchEvent;
use tokio::time::{Duration, timeout};
use tracing::warn;

use super::{
    Anew, Following, Lists, What,
    failure::{Moment, Stop},
    pace::Round,
    watch::Watch,
};
/// The maximum time without an event in a streamed list. A server that can't stream lists never sends the
/// end of the list.
const SILENCE: Duration = Duration::from_secs(10);

/// The annotation of the bookmark at the end of a streamed list.
const END_OF_LIST: &str = "k8s.io/initial-events-end";

/// A complete list.
pub(super) struct Listed {
    /// The version from which to watch.
    pub(super) version: String,
    /// The watch that streamed the list, which continues; `None` after pages.
    pub(super) watch: Option<Watch>,
}

impl Following {
    /// Lists all objects. Refuses a list that is older than the last seen version, until the server has
    /// returned older lists for some time. Lists are consistent reads, but a cache in front of the API
    /// server may lag, and the server may have been restored from a backup.
    pub(super) async fn list(&self, lists: Lists, round: &mut Round) -> Result<Listed, Stop> {
        let server = self.current.index();
        let listed = match lists {
            Lists::Streamed => self.streamed().await?,
            Lists::Paged => self.paged().await?,
        };
        let version = &listed.version;
        if version.is_empty() {
            let why = "the API server returned a list without a resourceVersion".to_owned();
            self.tell(What::Failed(why)).await?;
            return Err(Anew::Lost.into());
        }
        if round.is_behind(version) {
            let seen = round.seen();
            let why = format!("the list has version {version}, but version {seen} was seen before");
            self.current.leave(server, &why);
            self.tell(What::Failed(why)).await?;
            return Err(Anew::Older.into());
        }
        if let Some(seen) = round.listed(version) {
            warn!(kind = %self.selection.kind, version, seen, "the API server keeps returning an older list; assuming that it was restored from a backup");
        }
        self.tell(What::ListEnds).await?;
        Ok(listed)
    }

    /// Reads a list from the first events of a watch.
    async fn streamed(&self) -> Result<Listed, Stop> {
        const NOT_STREAMED: Stop = Stop::Anew(Anew::NotStreamed { is_refused: false });
        // Without a version, the list is a consistent read.
        let opened = self.open(true, "").await;
        let mut watch = opened.map_err(Stop::at(Moment::ListStart))?;
        self.tell(What::ListBegins).await?;
        loop {
            let next = timeout(SILENCE, watch.events.next()).await;
            // The watch was silent for too long, or ended before the end of the list.
            let Ok(Some(event)) = next else {
                return Err(NOT_STREAMED);
            };
            match event.map_err(Stop::at(Moment::List))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let arrived = self.read(&object).map_err(Stop::at(Moment::List))?;
                    self.tell(What::Listed(arrived)).await?;
                }
                WatchEvent::Bookmark(bookmark) => {
                    if bookmark.metadata.annotations.contains_key(END_OF_LIST) {
                        watch.begun();
                        return Ok(Listed {
                            version: bookmark.metadata.resource_version,
                            watch: Some(watch),
                        });
                    }
                }
                // Not expected before the end of the list.
                WatchEvent::Deleted(_) => {}
                WatchEvent::Error(status) => {
                    return Err(Stop::at(Moment::List)(kube::Error::Api(status)));
                }
            }
        }
    }

    /// Reads a list in pages.
    async fn paged(&self) -> Result<Listed, Stop> {
        let mut page = self.selected().limit(self.settings.page_size);
        self.tell(What::ListBegins).await?;
        loop {
            let listed = self.page(&page).await;
            let listed = listed.map_err(Stop::at(Moment::ListStart))?;
            for object in listed.items {
                let arrived = self.read(&object).map_err(Stop::at(Moment::ListStart))?;
                self.tell(What::Listed(arrived)).await?;
            }
            let next = listed.metadata.continue_.filter(|token| !token.is_empty());
            if let Some(next) = next {
                page.continue_token = Some(next);
                continue;
            }
            return Ok(Listed {
                version: listed.metadata.resource_version.unwrap_or_default(),
                watch: None,
            });
        }
    }
}
