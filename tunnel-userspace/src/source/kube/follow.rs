//! Following the objects of one kind: a first list, then what changes, and a new list where the
//! server can't say what changed since.

use std::time::Duration;

use futures_util::StreamExt as _;
use kube::{
    Api, Resource,
    api::ListParams,
    core::Status,
    runtime::watcher::{self, Event, watcher},
};
use tokio::{
    sync::mpsc,
    time::{sleep, timeout},
};
use tracing::{debug, info};

use super::arriving::Incoming;
use crate::{
    clock::monotonic,
    failure::chain,
    k8s::{Arrived, Arriving},
    model::Kind,
};

/// How long a server that streams its list may be silent before the end of it. One that doesn't know
/// of such lists never says that they have ended.
const SILENCE: Duration = Duration::from_secs(10);

/// How long a look at how far the server is may take.
const PROBE: Duration = Duration::from_secs(30);

/// After how many lists that could not be streamed none is streamed any more.
const REFUSED: u32 = 2;

/// How long until a kind that the server doesn't have is asked for again.
const ABSENT_RETRY: Duration = Duration::from_secs(300);

/// How the server is asked.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Objects in a page, where lists come in pages.
    pub(super) page_size: u32,
    /// How long one watch lasts.
    pub(super) watch: Duration,
    /// The first and the longest pause after a failure.
    pub(super) pause: (Duration, Duration),
}

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
    pub(super) pace: Pace,
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
    /// What the server has is older than what it sent before, or it can't go on from there.
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
        let mut round = Round::new(&self.pace);
        let mut refused = 0_u32;
        let mut lists = Lists::Streamed;
        loop {
            let anew = self.round(lists, &mut round).await;
            lists = Lists::Streamed;
            match anew {
                Anew::Over => return,
                Anew::NotStreamed { is_refused } => {
                    refused = refused.saturating_add(if is_refused { REFUSED } else { 1 });
                    lists = Lists::Paged;
                    info!(kind = %K::READ_AS, "the API server doesn't stream this list, reading it in pages");
                }
                Anew::Older => info!(kind = %K::READ_AS, "listing anew"),
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
            round.highest = 0;
            // However often it begins anew, it does so with pauses.
            sleep(round.pause()).await;
        }
    }

    /// Lists and watches until that must begin anew.
    async fn round(&self, lists: Lists, round: &mut Round) -> Anew {
        let mut events = watcher(self.api.clone(), self.config(lists)).boxed();
        let mut is_listing = false;
        loop {
            let next = events.next();
            let next = if is_listing && lists == Lists::Streamed {
                match timeout(SILENCE, next).await {
                    Ok(next) => next,
                    Err(_) => return Anew::NotStreamed { is_refused: false },
                }
            } else {
                next.await
            };
            let error = match next {
                None => return Anew::Older,
                Some(Ok(event)) => {
                    // It comes twice where a list broke off without a word.
                    if is_listing && matches!(event, Event::Init) {
                        return Anew::NotStreamed { is_refused: false };
                    }
                    is_listing = match &event {
                        Event::Init | Event::InitApply(_) => true,
                        Event::InitDone | Event::Apply(_) | Event::Delete(_) => false,
                    };
                    round.succeeded(&event);
                    if self.tell(what(event)).await.is_none() {
                        return Anew::Over;
                    }
                    continue;
                }
                Some(Err(error)) => error,
            };
            debug!(kind = %K::READ_AS, error = &error as &dyn std::error::Error, "watch failed");
            if let Some(anew) = judge(&error, lists, K::READ_AS) {
                return anew;
            }
            // Some say it only then: an API server whose etcd can't tell how far it is (3.4.24 and
            // older) ends the list with an error. Pages show whether there is more to it.
            let is_of_list = is_listing && matches!(error, watcher::Error::WatchError(_));
            if is_of_list && lists == Lists::Streamed {
                return Anew::NotStreamed { is_refused: false };
            }
            if self.tell(What::Failed(chain(&error))).await.is_none() {
                return Anew::Over;
            }
            if let Some(anew) = self.recover(&error, lists, round).await {
                return anew;
            }
        }
    }

    fn config(&self, lists: Lists) -> watcher::Config {
        let seconds = u32::try_from(self.pace.watch.as_secs()).unwrap_or(u32::MAX);
        // Not all watches of all nodes at once.
        let seconds = seconds
            .saturating_sub(fastrand::u32(0..=seconds / 10))
            .max(1);
        let config = watcher::Config {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            page_size: Some(self.pace.page_size),
            ..watcher::Config::default()
        }
        .timeout(seconds);
        match lists {
            Lists::Streamed => config.streaming_lists(),
            Lists::Paged => config,
        }
    }

    /// Waits until the server answers again, and says whether to list anew. One that was away may be
    /// back with other data than it had, as from a backup, and a watch that goes on from a version
    /// ahead of its own tells nothing until it has caught up.
    async fn recover(
        &self,
        error: &watcher::Error,
        lists: Lists,
        round: &mut Round,
    ) -> Option<Anew> {
        let mut after = retry_after(error);
        let mut was_away = false;
        loop {
            sleep(round.pause().max(after)).await;
            let one = ListParams {
                label_selector: self.labels.clone(),
                field_selector: self.fields.clone(),
                ..ListParams::default()
            }
            .limit(1);
            let Ok(listed) = timeout(PROBE, self.api.list(&one)).await else {
                was_away = true;
                continue;
            };
            let error = match listed {
                Ok(list) => {
                    if self.tell(What::Answers).await.is_none() {
                        return Some(Anew::Over);
                    }
                    let version = list.metadata.resource_version.as_deref();
                    let version = version.and_then(|version| version.parse::<u64>().ok());
                    let is_older = version.is_some_and(|version| version < round.highest);
                    return (was_away || is_older).then_some(Anew::Older);
                }
                Err(error) => error,
            };
            was_away = true;
            after = status(&error).map(wanted_pause).unwrap_or_default();
            let failed = What::Failed(chain(&error));
            let error = watcher::Error::InitialListFailed(error);
            if let Some(anew) = judge(&error, lists, K::READ_AS) {
                return Some(anew);
            }
            if self.tell(failed).await.is_none() {
                return Some(Anew::Over);
            }
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
}

/// What is known of the server over several rounds.
struct Round {
    first: Duration,
    last: Duration,
    failures: u32,
    /// The highest version that was seen.
    highest: u64,
}

impl Round {
    const fn new(pace: &Pace) -> Self {
        let (first, last) = pace.pause;
        Self {
            first,
            last,
            failures: 0,
            highest: 0,
        }
    }

    fn succeeded<K: Resource<DynamicType = ()>>(&mut self, event: &Event<K>) {
        // That a list begins, and goes on, says nothing of its end.
        if let Event::InitDone | Event::Apply(_) | Event::Delete(_) = event {
            self.failures = 0;
        }
        if let Event::InitApply(object) | Event::Apply(object) | Event::Delete(object) = event {
            let version = object
                .meta()
                .resource_version
                .as_deref()
                .unwrap_or_default();
            self.highest = self.highest.max(version.parse().unwrap_or(0));
        }
    }

    /// How long to wait after a failure: twice as long as after the one before, of which half is
    /// left to chance, so that not every node comes at once.
    fn pause(&mut self) -> Duration {
        let full = self
            .first
            .saturating_mul(1 << self.failures.min(16))
            .min(self.last);
        self.failures = self.failures.saturating_add(1);
        full.mul_f64(fastrand::f64().mul_add(0.5, 0.5))
    }
}

fn what<K>(event: Event<Incoming<K>>) -> What {
    match event {
        Event::Init => What::ListBegins,
        Event::InitApply(object) => What::Listed(Box::new(object.arrived)),
        Event::InitDone => What::ListEnds,
        Event::Apply(object) => What::Changed(Box::new(object.arrived)),
        Event::Delete(object) => What::Gone(Box::new(object.arrived)),
    }
}

/// What an error means beyond trying again.
fn judge(error: &watcher::Error, lists: Lists, kind: Kind) -> Option<Anew> {
    let (status, is_start) = match error {
        watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::InitialListFailed(kube::Error::Api(status)) => (status, true),
        watcher::Error::WatchError(status)
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => (status, false),
        watcher::Error::WatchStartFailed(_)
        | watcher::Error::InitialListFailed(_)
        | watcher::Error::WatchFailed(_)
        | watcher::Error::NoResourceVersion => return None,
    };
    let is_streamed = lists == Lists::Streamed;
    match status.code {
        // Only of this kind it means that: what stands before an API server says it of anything.
        404 if is_start && kind == Kind::ServiceCidr => Some(Anew::Absent),
        400 | 422 if is_start && is_streamed => Some(Anew::NotStreamed { is_refused: true }),
        // Too old is what the watcher begins anew from by itself; too large (from a server whose
        // data is older) it would ask for again and again.
        504 if is_too_large(status) => Some(Anew::Older),
        _ => None,
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

/// How long the server wants not to be asked.
fn retry_after(error: &watcher::Error) -> Duration {
    let status = match error {
        watcher::Error::WatchStartFailed(error)
        | watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchFailed(error) => status(error),
        watcher::Error::WatchError(status) => Some(&**status),
        watcher::Error::NoResourceVersion => None,
    };
    status.map(wanted_pause).unwrap_or_default()
}

fn wanted_pause(status: &Status) -> Duration {
    /// Longer than this nobody waits, whatever the server says.
    const LONGEST: Duration = Duration::from_secs(60);
    let seconds = status
        .details
        .as_ref()
        .map_or(0, |details| details.retry_after_seconds);
    Duration::from_secs(seconds.into()).min(LONGEST)
}
