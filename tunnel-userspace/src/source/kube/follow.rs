//! Following the objects of one kind: a first list, then what changes, and a new list where the
//! server can't say what changed since. kube-runtime's watcher (5.0) can't take its place: it hides the
//! version of a list, which tells older data; it streams lists from version 0, which a cache that lags
//! may answer, and doesn't fall back to pages; and it opens a watch that ends at once again without a
//! pause.
//!
//! - `list`: all objects
//! - `watch`: what changes
//! - `failure`: what an error means
//! - `pace`: how often is asked, and what is known of the server

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

/// After how many lists that could not be streamed none is streamed any more.
const REFUSED: u32 = 2;

/// How long until a kind that the server doesn't have is asked for again.
const ABSENT_RETRY: Duration = Duration::from_secs(300);

/// What was heard of one kind.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) kind: Kind,
    pub(super) at: Duration,
    pub(super) what: What,
}

/// What happened.
#[derive(Debug)]
pub(super) enum What {
    /// A new list begins.
    ListBegins,
    /// An object of the list.
    Listed(Box<Arrived>),
    /// The list is complete: what was not in it is gone.
    ListEnds,
    /// An object is new or another one.
    Changed(Box<Arrived>),
    /// An object is gone.
    Gone(Box<Arrived>),
    /// The server can't be asked, or doesn't answer as it should; it is asked again.
    Failed(String),
    /// The server answers again.
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

/// How the first list comes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Lists {
    /// As the beginning of the watch (`sendInitialEvents`).
    Streamed,
    /// In pages, before the watch.
    Paged,
}

/// Why the objects are listed anew.
#[derive(Debug)]
enum Anew {
    /// Nobody listens any more.
    Over,
    /// The server doesn't stream this list, or refuses to stream any.
    NotStreamed { is_refused: bool },
    /// The server can't go on from what was seen, or it may have other data than it had.
    Lost,
    /// What the server has is older than what was seen.
    Older,
    /// The server doesn't have the kind.
    Absent,
}

impl Following {
    /// Follows until nobody listens.
    pub(super) async fn run(self) {
        let kind = self.selection.kind;
        let mut round = Round::new(self.settings.longest_pause, self.limits.lag);
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
            // However often it begins anew, it does so with pauses.
            sleep(round.pause()).await;
        }
    }

    /// Lists and watches until that must begin anew.
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

    /// Tells of a failure and waits until the server answers again.
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
        // What broke off once may do so each time: pages are asked for one by one.
        if failure.at == Moment::List && lists == Lists::Streamed {
            return Err(Anew::NotStreamed { is_refused: false });
        }
        Ok(())
    }

    /// Waits until the server answers again, to go on from there or to list anew. One that was away may
    /// be back with other data than it had, as from a backup, and a watch that goes on from a version
    /// ahead of its own tells nothing until it has caught up.
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

    /// The objects that are wanted.
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

    /// Asks for a list, or for a page of it.
    async fn page(&self, wanted: &ListParams) -> kube::Result<ObjectList<Box<RawValue>>> {
        let request = self.request().list(wanted);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request(request).await
    }

    /// Reads an object to the end as it comes off the wire, so that what nobody needs is never kept.
    fn read(&self, object: &RawValue) -> kube::Result<Box<Arrived>> {
        let arrived = (self.selection.read)(object.get());
        arrived.map(Box::new).map_err(kube::Error::SerdeError)
    }

    /// Tells what was heard. Fails once nobody listens.
    async fn tell(&self, what: What) -> Result<(), Anew> {
        let heard = Heard {
            kind: self.selection.kind,
            at: monotonic(),
            what,
        };
        self.heard.send(heard).await.ok().ok_or(Anew::Over)
    }
}
