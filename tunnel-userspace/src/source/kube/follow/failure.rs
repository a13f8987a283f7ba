use std::time::Duration;

use kube::core::Status;

use super::{Anew, Lists};
use crate::model::Kind;

/// Why listing or watching ended.
#[derive(Debug)]
pub(super) enum Stop {
    /// What to do about it is known.
    Anew(Anew),
    /// It failed.
    Failed(Failure),
}

impl From<Anew> for Stop {
    fn from(anew: Anew) -> Self {
        Self::Anew(anew)
    }
}

impl Stop {
    /// Lets an error end what was going on.
    pub(super) const fn at(at: Moment) -> impl FnOnce(kube::Error) -> Self {
        move |error| Self::Failed(Failure { error, at })
    }
}

/// What was going on.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Moment {
    /// A list, or a page of one, was asked for.
    ListStart,
    /// A list was coming.
    List,
    /// A watch was asked for.
    WatchStart,
    /// A watch was open.
    Watch,
}

/// What failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: kube::Error,
    pub(super) at: Moment,
}

impl Failure {
    /// Fails with what it means beyond trying again, if it means anything.
    pub(super) fn judge(&self, lists: Lists, kind: Kind) -> Result<(), Anew> {
        let Some(status) = status(&self.error) else {
            return Ok(());
        };
        let is_streamed = lists == Lists::Streamed;
        let is_start = matches!(self.at, Moment::ListStart | Moment::WatchStart);
        match status.code {
            // Only of this kind it means that: what stands before an API server says it of anything.
            404 if is_start && kind == Kind::ServiceCidr => Err(Anew::Absent),
            400 | 422 if is_start && is_streamed => Err(Anew::NotStreamed { is_refused: true }),
            // Too large, from a server that is behind, or whose data is older.
            504 if is_too_large(status) => Err(Anew::Lost),
            // Some say it only then: an API server whose etcd can't tell how far it is (3.4.24 and
            // older) ends the list with an error. Pages show whether there is more to it.
            _ if self.at == Moment::List && is_streamed => {
                Err(Anew::NotStreamed { is_refused: false })
            }
            // Too old: of the watch, or of the page to go on from.
            410 => Err(Anew::Lost),
            _ => Ok(()),
        }
    }

    /// How long the server wants not to be asked.
    pub(super) fn wanted_pause(&self) -> Duration {
        /// Longer than this nobody waits, whatever the server says.
        const LONGEST: Duration = Duration::from_secs(60);
        let details = status(&self.error).and_then(|status| status.details.as_ref());
        let seconds = details.map_or(0, |details| details.retry_after_seconds);
        Duration::from_secs(seconds.into()).min(LONGEST)
    }
}

/// Whether the version that was asked for is one that the server doesn't have yet
/// (apimachinery `pkg/api/errors/errors.go`, `NewTooLargeResourceVersionError`).
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
