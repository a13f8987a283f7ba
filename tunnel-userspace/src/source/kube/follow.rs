//! Lists and watches the objects of one kind, and lists them again if the server can't continue a watch.
//!
//! The watcher of kube-runtime 5.0 is not used for three reasons: it hides the version of a list, which
//! is needed to detect older data; it streams lists from version 0, which a lagging cache may serve, and
//! can't page instead; and it reopens a watch that ends immediately without a backoff.
//!
//! - `list`: reads all objects
//! - `watch`: reads changes
//! - `failure`: decides how to continue after an error
//! - `pace`: the backoff between requests, and the last seen version

mod failure;
mod list;
mod pace;
mod watch;

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
    failure::{Failure, Moment, Stop},
    pace::Round,
};
use super::{Limits, Selection, Settings, client::Current};
use crate::{clock::monotonic, failure::chain, k8s::Arrived, model::Kind};

/// The number of failed streamed lists after which all lists are paged.
const REFUSED: u32 = 2;

/// The interval of requests for a kind that the server doesn't support.
const ABSENT_RETRY: Duration = Duration::from_secs(300);

/// An event about the objects of one kind.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) kind: Kind,
    /// The monotonic time of the event.
    pub(super) at: Duration,
    pub(super) what: What,
}

/// The content of an event.
#[derive(Debug)]
pub(super) enum What {
    /// A new list begins.
    ListBegins,
    /// An object of the list.
    Listed(Box<Arrived>),
    /// The list is complete. Objects that are not in it were deleted.
    ListEnds,
    /// An object was created or updated.
    Changed(Box<Arrived>),
    /// An object was deleted.
    Gone(Box<Arrived>),
    /// A request failed or its response was invalid. It will be retried.
    Failed(String),
    /// A request succeeded after failures.
    Answers,
    /// The server doesn't support the kind.
    Absent,
}

/// Lists and watches the objects of one kind, and sends events about them.
pub(super) struct Following {
    pub(super) client: Client,
    pub(super) selection: Selection,
    pub(super) settings: Arc<Settings>,
    pub(super) limits: Limits,
    pub(super) current: Current,
    pub(super) heard: mpsc::Sender<Heard>,
}

/// The way to request a list.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Lists {
    /// As the first events of the watch (`sendInitialEvents`).
    Streamed,
    /// In pages, before the watch.
    Paged,
}

/// The reason for listing all objects again.
#[derive(Debug)]
enum Anew {
    /// The receiver of events was dropped: no list is needed any more.
    Over,
    /// The server did not stream this list, or refuses to stream any list.
    NotStreamed { is_refused: bool },
    /// The server can't continue from the last seen version, or its data may have been restored from a
    /// backup.
    Lost,
    /// The list is older than the last seen version.
    Older,
    /// The server doesn't support the kind.
    Absent,
}

impl Following {
    /// Lists and watches until the receiver of events is dropped.
    pub(super) async fn run(self) {
        let kind = self.selection.kind;
        let mut round = Round::new(self.settings.max_backoff, self.limits.lag);
        let mut refused = 0_u32;
        let mut lists = Lists::Streamed;
        loop {
            let Err(anew) = self.round(lists, &mut round).await;
            lists = Lists::Streamed;
            match anew {
                Anew::Over => return,
                Anew::NotStreamed { is_refused } => {
                    refused += if is_refused { REFUSED } else { 1 };
                    lists = Lists::Paged;
                    info!(%kind, "the API server doesn't stream this list; reading it in pages");
                }
                Anew::Lost => info!(%kind, "listing all objects again"),
                Anew::Older => {}
                Anew::Absent => {
                    if self.tell(What::Absent).await.is_err() {
                        return;
                    }
                    sleep(ABSENT_RETRY).await;
                }
            }
            if refused >= REFUSED {
                lists = Lists::Paged;
            }
            // The backoff before each list prevents a busy loop of failures.
            sleep(round.pause()).await;
        }
    }

    /// Lists and watches until a new list is needed.
    async fn round(&self, lists: Lists, round: &mut Round) -> Result<Infallible, Anew> {
        let mut listed = loop {
            match self.list(lists, round).await {
                Ok(listed) => break listed,
                Err(stop) => self.cope(stop, lists, round).await?,
            }
        };
        loop {
            let open = listed.watch.take();
            if let Err(stop) = self.watch(open, &mut listed.version, round).await {
                self.cope(stop, lists, round).await?;
            }
        }
    }

    /// Sends an event about a failure, and waits until the server responds again.
    async fn cope(&self, stop: Stop, lists: Lists, round: &mut Round) -> Result<(), Anew> {
        let kind = self.selection.kind;
        let failure = match stop {
            Stop::Anew(anew) => return Err(anew),
            Stop::Failed(failure) => failure,
        };
        debug!(%kind, error = &failure.error as &dyn std::error::Error, "watch failed");
        failure.judge(lists, kind)?;
        self.tell(What::Failed(chain(&failure.error))).await?;
        self.recover(&failure, lists, round).await?;
        // A streamed list that broke off once may do so every time, so pages are used instead.
        if failure.at == Moment::List && lists == Lists::Streamed {
            return Err(Anew::NotStreamed { is_refused: false });
        }
        Ok(())
    }

    /// Waits until the server responds. The watch then continues, or an error requests a new list: a server
    /// that was unreachable may have been restored from a backup, and would send no events until its
    /// version exceeds that of the watch.
    async fn recover(
        &self,
        failure: &Failure,
        lists: Lists,
        round: &mut Round,
    ) -> Result<(), Anew> {
        let mut after = failure.wanted_pause();
        let mut was_away = false;
        loop {
            sleep(round.pause().max(after)).await;
            let one = self.selected().limit(1);
            let server = self.current.index();
            let why = match timeout(self.limits.probe, self.page(&one)).await {
                Ok(Ok(list)) => {
                    self.tell(What::Answers).await?;
                    let version = list.metadata.resource_version.unwrap_or_default();
                    if was_away || round.is_older(&version) {
                        return Err(Anew::Lost);
                    }
                    return Ok(());
                }
                Ok(Err(error)) => {
                    let at = Moment::ListStart;
                    let failure = Failure { error, at };
                    after = failure.wanted_pause();
                    failure.judge(lists, self.selection.kind)?;
                    chain(&failure.error)
                }
                Err(_) => {
                    let why = format!("no response within {:?}", self.limits.probe);
                    self.current.leave(server, &why);
                    why
                }
            };
            was_away = true;
            self.tell(What::Failed(why)).await?;
        }
    }

    /// Returns the selectors as parameters of a request.
    fn selected(&self) -> ListParams {
        ListParams {
            label_selector: self.selection.labels.clone(),
            field_selector: self.selection.fields.clone(),
            ..ListParams::default()
        }
    }

    fn request(&self) -> Request {
        Request::new(&*self.selection.path)
    }

    /// Requests a page of a list.
    async fn page(&self, wanted: &ListParams) -> kube::Result<ObjectList<Box<RawValue>>> {
        let request = self.request().list(wanted);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request(request).await
    }

    /// Parses an object as soon as it is received, so that unused fields are not stored.
    fn read(&self, object: &RawValue) -> kube::Result<Box<Arrived>> {
        let arrived = (self.selection.read)(object.get());
        arrived.map(Box::new).map_err(kube::Error::SerdeError)
    }

    /// Sends an event. Fails if the receiver was dropped.
    async fn tell(&self, what: What) -> Result<(), Anew> {
        let heard = Heard {
            kind: self.selection.kind,
            at: monotonic(),
            what,
        };
        self.heard.send(heard).await.ok().ok_or(Anew::Over)
    }
}
