use std::time::Duration;

use kube::core::Status;

use super::{Anew, Lists};
use crate::model::Kind;

/// The reason why a list or watch ended.
#[derive(Debug)]
pub(super) enum Stop {
    /// A reason that determines the next step.
    Anew(Anew),
    /// A failed request.
    Failed(Failure),
}

impl From<Anew> for Stop {
    fn from(anew: Anew) -> Self {
        Self::Anew(anew)
    }
}

impl Stop {
    /// Wraps an error with the moment at which it occurred.
    pub(super) const fn at(at: Moment) -> impl FnOnce(kube::Error) -> Self {
        move |error| Self::Failed(Failure { error, at })
    }
}

/// The moment of a failure.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Moment {
    /// At the request of a list, or of a page.
    ListStart,
    /// During a list.
    List,
    /// At the request of a watch.
    WatchStart,
    /// During a watch.
    Watch,
}

/// A failed request.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: kube::Error,
    pub(super) at: Moment,
}

impl Failure {
    /// Returns an error if the failure requires more than a retry.
    pub(super) fn judge(&self, lists: Lists, kind: Kind) -> Result<(), Anew> {
        let Some(status) = status(&self.error) else {
            return Ok(());
        };
        let is_streamed = lists == Lists::Streamed;
        let is_start = matches!(self.at, Moment::ListStart | Moment::WatchStart);
        match status.code {
            // Only for this kind a 404 means that it is absent: a proxy before an API server may send it
            // for any path.
            404 if is_start && kind == Kind::ServiceCidr => Err(Anew::Absent),
            400 | 422 if is_start && is_streamed => Err(Anew::NotStreamed { is_refused: true }),
            // The version is too large: the server lags, or its data are older.
            504 if is_too_large(status) => Err(Anew::Lost),
            // Some servers refuse only during the list: an API server whose etcd can't report its
            // progress (3.4.24 and older) ends the list with an error. Pages show if there is another
            // cause.
            _ if self.at == Moment::List && is_streamed => {
                Err(Anew::NotStreamed { is_refused: false })
            }
            // The version is too old, for the watch or the next page.
            410 => Err(Anew::Lost),
            _ => Ok(()),
        }
    }

    /// Returns the pause that the server requests.
    pub(super) fn wanted_pause(&self) -> Duration {
        /// The limit of the pause, for any request of the server.
        const LONGEST: Duration = Duration::from_secs(60);
        let details = status(&self.error).and_then(|status| status.details.as_ref());
        let seconds = details.map_or(0, |details| details.retry_after_seconds);
        Duration::from_secs(seconds.into()).min(LONGEST)
    }
}

/// Returns true if the server does not have the requested version yet (apimachinery
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
