//! Reads a list of all objects from the server.

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
/// The maximum silence before the end of a streamed list. A server without streamed lists never sends
/// that end.
const SILENCE: Duration = Duration::from_secs(10);

/// The annotation at the end of a streamed list.
const END_OF_LIST: &str = "k8s.io/initial-events-end";

/// A complete list.
pub(super) struct Listed {
    /// The version to watch from.
    pub(super) version: String,
    /// The open watch that streamed the list.
    pub(super) watch: Option<Watch>,
}

impl Following {
    /// Lists all objects. A list older than the last seen version is refused, unless the server stays at
    /// older versions. Both forms are consistent reads, yet a cache before an API server, or a server
    /// that was restored from a backup, returns such a list.
    pub(super) async fn list(&self, lists: Lists, round: &mut Round) -> Result<Listed, Stop> {
        let server = self.current.index();
        let listed = match lists {
            Lists::Streamed => self.streamed().await?,
            Lists::Paged => self.paged().await?,
        };
        let version = &listed.version;
        if version.is_empty() {
            let why = "a list came without a version".to_owned();
            self.tell(What::Failed(why)).await?;
            return Err(Anew::Lost.into());
        }
        if round.is_behind(version) {
            let seen = round.seen();
            let why = format!("what it has is of version {version}, and {seen} was seen before");
            self.current.leave(server, &why);
            self.tell(What::Failed(why)).await?;
            return Err(Anew::Older.into());
        }
        if let Some(seen) = round.listed(version) {
            warn!(kind = %self.selection.kind, version, seen, "the API server stays at older data: taking it as restored from a backup");
        }
        self.tell(What::ListEnds).await?;
        Ok(listed)
    }

    /// Reads a list from the beginning of a watch.
    async fn streamed(&self) -> Result<Listed, Stop> {
        const NOT_STREAMED: Stop = Stop::Anew(Anew::NotStreamed { is_refused: false });
        // Without a version, this is a consistent read.
        let opened = self.open(true, "").await;
        let mut watch = opened.map_err(Stop::at(Moment::ListStart))?;
        self.tell(What::ListBegins).await?;
        loop {
            let next = timeout(SILENCE, watch.events.next()).await;
            // The stream is silent, or ended without the annotation.
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
                // A list has no deleted objects.
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
