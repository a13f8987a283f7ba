//! Decides how to continue after a failed list or watch.

use std::time::Duration;

use kube::core::Status;

use super::{ListMode, RelistReason};
use crate::{error_chain::chain, model::Kind};

/// The reason why a list or watch ended.
#[derive(Debug)]
pub(super) enum StopReason {
    /// A new list is needed.
    Relist(RelistReason),
    /// A request failed.
    Failed(Failure),
}

impl From<RelistReason> for StopReason {
    fn from(reason: RelistReason) -> Self {
        Self::Relist(reason)
    }
}

impl StopReason {
    /// Returns a function that wraps an error together with the phase in which it occurred.
    pub(super) const fn at(at: RequestPhase) -> impl FnOnce(kube::Error) -> Self {
        move |error| Self::Failed(Failure { error, at })
    }
}

/// The phase in which a request failed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RequestPhase {
    /// At the start of a list, or while reading a page.
    ListStart,
    /// In the middle of a streamed list.
    List,
    /// At the start of a watch.
    WatchStart,
    /// In the middle of a watch.
    Watch,
}

/// A failed request.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: kube::Error,
    pub(super) at: RequestPhase,
}

impl Failure {
    /// Describes the error and its sources, without the client library's name for a failed connection.
    pub(super) fn describe(&self) -> String {
        chain(&self.error).replace("ServiceError: client error (Connect): ", "cannot connect: ")
    }

    /// Returns `Ok` if the request should be retried, or the reason for a new list if one is needed.
    pub(super) fn check_retry(&self, list_mode: ListMode, kind: Kind) -> Result<(), RelistReason> {
        let Some(status) = status(&self.error) else {
            return Ok(());
        };
        let is_streamed = list_mode == ListMode::Streamed;
        let is_start = matches!(self.at, RequestPhase::ListStart | RequestPhase::WatchStart);
        match status.code {
            // Servers older than Kubernetes 1.33 don't support ServiceCIDRs. For any other kind, a 404 can
            // only come from a proxy in front of the API server, so the request is retried.
            404 if is_start && kind == Kind::ServiceCidr => Err(RelistReason::Unsupported),
            400 | 422 if is_start && is_streamed => {
                Err(RelistReason::NotStreamed { is_refused: true })
            }
            // The requested version is newer than the server's, so the server lags or was restored from a
            // backup.
            504 if is_too_large(status) => Err(RelistReason::VersionLost),
            // An API server whose etcd can't report progress (3.4.24 and older) fails in the middle of the
            // list, not at its start. If the failure has another cause, paging will fail, too.
            _ if self.at == RequestPhase::List && is_streamed => {
                Err(RelistReason::NotStreamed { is_refused: false })
            }
            // The version of the watch or of the next page is too old.
            410 => Err(RelistReason::VersionLost),
            _ => Ok(()),
        }
    }

    /// Returns the delay before the next attempt, as requested by the server.
    pub(super) fn requested_delay(&self) -> Duration {
        /// The maximum delay, regardless of the server's request.
        const MAX_DELAY: Duration = Duration::from_secs(60);
        let details = status(&self.error).and_then(|status| status.details.as_ref());
        let seconds = details.map_or(0, |details| details.retry_after_seconds);
        Duration::from_secs(seconds.into()).min(MAX_DELAY)
    }
}

/// Returns true if the version in the request was newer than the server's (apimachinery
/// `pkg/api/errors/errors.go`, `NewTooLargeResourceVersionError`).
fn is_too_large(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.message.contains("Too large resource version")
        || causes
            .into_iter()
            .any(|cause| cause.reason == "ResourceVersionTooLarge")
}

fn status(error: &kube::Error) -> Option<&Status> {
    if let kube::Error::Api(status) = error {
        Some(status)
    } else {
        None
    }
}
