//! Lists all objects of one kind.

use futures_util::StreamExt as _;
use kube::core::WatchEvent;
use tokio::time::{Duration, timeout};
use tracing::warn;

use super::{
    Change, KindWatcher, ListMode, RelistReason,
    failure::{RequestPhase, StopReason},
    server_state::ServerState,
    watch_stream::OpenWatch,
};
/// The maximum time between two events in a streamed list. A server that can't stream lists never sends the
/// event that ends the list.
const MAX_SILENCE: Duration = Duration::from_secs(10);

/// The annotation on the bookmark that ends a streamed list.
const END_OF_LIST: &str = "k8s.io/initial-events-end";

/// A complete list.
pub(super) struct CompleteList {
    /// The version from which to start watching.
    pub(super) version: String,
    /// The watch that streamed the list and stays open; `None` if the list was read in pages.
    pub(super) watch: Option<OpenWatch>,
}

impl KindWatcher {
    /// Lists all objects. A list that is older than the last version seen is rejected, unless the server has
    /// been returning older lists for some time. Lists are consistent reads, but a cache in front of the API
    /// server may lag, or the server may have been restored from a backup.
    pub(super) async fn list(
        &self,
        list_mode: ListMode,
        server: &mut ServerState,
    ) -> Result<CompleteList, StopReason> {
        let server_index = self.current.index();
        let list = match list_mode {
            ListMode::Streamed => self.stream_list().await?,
            ListMode::Paged => self.page_list().await?,
        };
        let version = &list.version;
        if version.is_empty() {
            let error = "the API server returned a list without a resourceVersion".to_owned();
            self.send(Change::RequestFailed(error)).await?;
            return Err(RelistReason::VersionLost.into());
        }
        if server.is_behind(version) {
            let seen = server.last_version();
            let error =
                format!("the list has version {version}, but version {seen} was seen before");
            self.current.fail_over(server_index, &error);
            self.send(Change::RequestFailed(error)).await?;
            return Err(RelistReason::OlderList.into());
        }
        if let Some(seen) = server.record_list(version) {
            warn!(kind = %self.selection.kind, version, seen, "the API server keeps returning an older list; assuming that it was restored from a backup");
        }
        self.send(Change::ListCompleted).await?;
        Ok(list)
    }

    /// Reads a list from the initial events of a watch.
    async fn stream_list(&self) -> Result<CompleteList, StopReason> {
        const NOT_STREAMED: StopReason =
            StopReason::Relist(RelistReason::NotStreamed { is_refused: false });
        // A list requested without a version is a consistent read.
        let opened = self.open(true, "").await;
        let mut watch = opened.map_err(StopReason::at(RequestPhase::ListStart))?;
        self.send(Change::ListStarted).await?;
        loop {
            let next = timeout(MAX_SILENCE, watch.events.next()).await;
            // The watch was silent for too long, or it ended before the list did.
            let Ok(Some(event)) = next else {
                return Err(NOT_STREAMED);
            };
            match event.map_err(StopReason::at(RequestPhase::List))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    let object = self
                        .parse(&object)
                        .map_err(StopReason::at(RequestPhase::List))?;
                    self.send(Change::Listed(object)).await?;
                }
                WatchEvent::Bookmark(bookmark) => {
                    if bookmark.metadata.annotations.contains_key(END_OF_LIST) {
                        watch.restart();
                        return Ok(CompleteList {
                            version: bookmark.metadata.resource_version,
                            watch: Some(watch),
                        });
                    }
                }
                // Servers are not expected to send this before the end of the list.
                WatchEvent::Deleted(_) => {}
                WatchEvent::Error(status) => {
                    return Err(StopReason::at(RequestPhase::List)(kube::Error::Api(status)));
                }
            }
        }
    }

    /// Reads a list in pages.
    async fn page_list(&self) -> Result<CompleteList, StopReason> {
        let mut page = self.selectors().limit(self.settings.page_size);
        self.send(Change::ListStarted).await?;
        loop {
            let list = self.page(&page).await;
            let list = list.map_err(StopReason::at(RequestPhase::ListStart))?;
            for object in list.items {
                let object = self
                    .parse(&object)
                    .map_err(StopReason::at(RequestPhase::ListStart))?;
                self.send(Change::Listed(object)).await?;
            }
            let next = list.metadata.continue_.filter(|token| !token.is_empty());
            if let Some(next) = next {
                page.continue_token = Some(next);
                continue;
            }
            return Ok(CompleteList {
                version: list.metadata.resource_version.unwrap_or_default(),
                watch: None,
            });
        }
    }
}
