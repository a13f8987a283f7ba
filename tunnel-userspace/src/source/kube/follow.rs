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

use std::sync::Arc;

use kube::{Api, Resource, api::ListParams};
use tokio::{
    sync::mpsc,
    time::{Duration, sleep, timeout},
};
use tracing::{debug, info};

use self::{
    failure::{Failure, Moment, Stop},
    pace::Round,
};
use super::{Limits, Settings, arriving::Incoming, client::Current};
use crate::{
    clock::monotonic,
    failure::chain,
    k8s::{Arrived, Arriving},
    model::Kind,
};

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

/// One kind, and which objects of it.
pub(super) struct Following<K> {
    pub(super) api: Api<Incoming<K>>,
    pub(super) labels: Option<String>,
    pub(super) fields: Option<String>,
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

impl<K> Following<K>
where
    K: Arriving + Resource<DynamicType = ()> + 'static,
    <K as Resource>::Scope: Send,
{
    /// Follows until nobody listens.
    pub(super) async fn run(self) {
        let mut round = Round::new(self.settings.longest_pause, self.limits.lag);
        let mut refused = 0_u32;
        let mut lists = Lists::Streamed;
        loop {
            let anew = self.round(lists, &mut round).await;
            lists = Lists::Streamed;
            match anew {
                Anew::Over => return,
                Anew::NotStreamed { is_refused } => {
                    refused += if is_refused { REFUSED } else { 1 };
                    lists = Lists::Paged;
                    info!(kind = %K::READ_AS, "the API server doesn't stream this list, reading it in pages");
                }
                Anew::Lost => info!(kind = %K::READ_AS, "listing anew"),
                Anew::Older => {}
                Anew::Absent => {
                    if self.tell(What::Absent).await.is_none() {
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
    async fn round(&self, lists: Lists, round: &mut Round) -> Anew {
        let listed = loop {
            let stop = match self.list(lists, round).await {
                Ok(listed) => break listed,
                Err(stop) => stop,
            };
            if let Some(anew) = self.cope(stop, lists, round).await {
                return anew;
            }
        };
        let mut version = listed.version;
        let mut watch = listed.watch;
        loop {
            let stop = match self.watch(watch.take(), &mut version, round).await {
                Ok(()) => continue,
                Err(stop) => stop,
            };
            if let Some(anew) = self.cope(stop, lists, round).await {
                return anew;
            }
        }
    }

    /// Tells of a failure and waits until the server answers again. Says whether to begin anew.
    async fn cope(&self, stop: Stop, lists: Lists, round: &mut Round) -> Option<Anew> {
        let failure = match stop {
            Stop::Anew(anew) => return Some(anew),
            Stop::Failed(failure) => failure,
        };
        debug!(kind = %K::READ_AS, error = &failure.error as &dyn std::error::Error, "watch failed");
        if let Some(anew) = failure.judge(lists, K::READ_AS) {
            return Some(anew);
        }
        if let Some(over) = self.failed(chain(&failure.error)).await {
            return Some(over);
        }
        let anew = self.recover(&failure, lists, round).await;
        // What broke off once may do so each time: pages are asked for one by one.
        let is_cut = failure.at == Moment::List && lists == Lists::Streamed;
        anew.or_else(|| is_cut.then_some(Anew::NotStreamed { is_refused: false }))
    }

    /// Waits until the server answers again, and says whether to list anew. One that was away may be
    /// back with other data than it had, as from a backup, and a watch that goes on from a version
    /// ahead of its own tells nothing until it has caught up.
    async fn recover(&self, failure: &Failure, lists: Lists, round: &mut Round) -> Option<Anew> {
        let mut after = failure.wanted_pause();
        let mut was_away = false;
        loop {
            sleep(round.pause().max(after)).await;
            let one = self.selected().limit(1);
            let server = self.current.index();
            let Ok(listed) = timeout(self.limits.probe, self.api.list(&one)).await else {
                was_away = true;
                let why = format!("no answer within {:?}", self.limits.probe);
                self.current.leave(server, &why);
                if let Some(over) = self.failed(why).await {
                    return Some(over);
                }
                continue;
            };
            let error = match listed {
                Ok(list) => {
                    if self.tell(What::Answers).await.is_none() {
                        return Some(Anew::Over);
                    }
                    let version = list.metadata.resource_version.unwrap_or_default();
                    return (was_away || round.is_older(&version)).then_some(Anew::Lost);
                }
                Err(error) => error,
            };
            was_away = true;
            let failure = Failure {
                error,
                at: Moment::ListStart,
            };
            after = failure.wanted_pause();
            if let Some(anew) = failure.judge(lists, K::READ_AS) {
                return Some(anew);
            }
            if let Some(over) = self.failed(chain(&failure.error)).await {
                return Some(over);
            }
        }
    }

    /// Tells why the server can't be asked. Gives an end where nobody listens.
    async fn failed(&self, why: String) -> Option<Anew> {
        self.tell(What::Failed(why))
            .await
            .is_none()
            .then_some(Anew::Over)
    }

    /// The objects that are wanted.
    fn selected(&self) -> ListParams {
        ListParams {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            ..ListParams::default()
        }
    }

    async fn tell(&self, what: What) -> Option<()> {
        let heard = Heard {
            kind: K::READ_AS,
            at: monotonic(),
            what,
        };
        self.heard.send(heard).await.ok()
    }

    /// Tells what was heard, or says that nobody listens.
    async fn told(&self, what: What) -> Result<(), Stop> {
        self.tell(what).await.ok_or(Stop::Anew(Anew::Over))
    }
}
