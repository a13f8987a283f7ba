//! Follows the objects of one kind: a first list, then its changes, and a new list if the server can't
//! send the changes since the last one. kube-runtime's watcher (5.0) can't replace it: it hides the
//! version of a list, which reveals older data; it streams lists from version 0, which a lagging cache
//! may answer, and doesn't fall back to pages; and it reopens a watch that ends at once without a pause.
//!
//! - `list`: all objects
//! - `watch`: changes
//! - `failure`: the meaning of errors
//! - `pace`: pauses between requests, and the known state of the server

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

/// The number of failed attempts to stream a list after which lists are paged.
const REFUSED: u32 = 2;

/// The interval of requests for a kind that the server doesn't have.
const ABSENT_RETRY: Duration = Duration::from_secs(300);

/// An event of one kind.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) kind: Kind,
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
    /// The list is complete: objects outside it are gone.
    ListEnds,
    /// An object was created or updated.
    Changed(Box<Arrived>),
    /// An object was deleted.
    Gone(Box<Arrived>),
    /// A request failed, or its response was invalid; requests are retried.
    Failed(String),
    /// The server responds again.
    Answers,
    /// The server doesn't have this kind.
    Absent,
}

/// Follows the objects of one kind.
pub(super) struct Following {
    pub(super) client: Client,
    pub(super) selection: Selection,
    pub(super) settings: Arc<Settings>,
    pub(super) limits: Limits,
    pub(super) current: Current,
    pub(super) heard: mpsc::Sender<Heard>,
}

/// The form of the first list.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Lists {
    /// Streamed at the beginning of the watch (`sendInitialEvents`).
    Streamed,
    /// Requested in pages, before the watch.
    Paged,
}

/// The reason for a new list.
#[derive(Debug)]
enum Anew {
    /// The receiver of events is gone.
    Over,
    /// The server doesn't stream this list, or refuses to stream any.
    NotStreamed { is_refused: bool },
    /// The server can't continue from the last seen version, or may have other data than before.
    Lost,
    /// The server's data are older than the last seen version.
    Older,
    /// The server doesn't have the kind.
    Absent,
}

impl Following {
    /// Follows until the receiver of events is gone.
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
                    info!(%kind, "the API server doesn't stream this list, reading it in pages");
                }
                Anew::Lost => info!(%kind, "listing anew"),
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
            // Each new list is preceded by a pause, so that repeated failures never form a busy loop.
            sleep(round.pause()).await;
        }
    }

    /// Lists and watches until a new list is necessary.
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

    /// Reports a failure and waits until the server responds again.
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
        // A stream that broke off once may do so each time, whereas pages are requested one by one.
        if failure.at == Moment::List && lists == Lists::Streamed {
            return Err(Anew::NotStreamed { is_refused: false });
        }
        Ok(())
    }

    /// Waits until the server responds, then resumes the watch or requests a new list. A server that was
    /// away may return with other data, as from a backup, and a watch from a version ahead of its own
    /// would be silent until it has caught up.
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
                    let why = format!("no answer within {:?}", self.limits.probe);
                    self.current.leave(server, &why);
                    why
                }
            };
            was_away = true;
            self.tell(What::Failed(why)).await?;
        }
    }

    /// Returns the selectors of the objects.
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

    /// Requests a list, or a page of it.
    async fn page(&self, wanted: &ListParams) -> kube::Result<ObjectList<Box<RawValue>>> {
        let request = self.request().list(wanted);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request(request).await
    }

    /// Parses an object completely as it arrives, so that unused fields are never stored.
    fn read(&self, object: &RawValue) -> kube::Result<Box<Arrived>> {
        let arrived = (self.selection.read)(object.get());
        arrived.map(Box::new).map_err(kube::Error::SerdeError)
    }

    /// Sends an event. Fails once the receiver is gone.
    async fn tell(&self, what: What) -> Result<(), Anew> {
        let heard = Heard {
            kind: self.selection.kind,
            at: monotonic(),
            what,
        };
        self.heard.send(heard).await.ok().ok_or(Anew::Over)
    }
}
