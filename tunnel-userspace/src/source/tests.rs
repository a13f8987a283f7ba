//! Runs a source, for tests of both the `file` and the `kube` source.

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Arc, time::Duration};

use tempfile::TempDir;
use tokio::{sync::watch, task::JoinSet, time::timeout};

use super::{SourceReport, Store};
use crate::model::ClusterUpdate;

pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// A running source, and the Services from its updates so far.
pub(super) struct RunningSource {
    pub(super) dir: TempDir,
    store: Store,
    pub(super) report: watch::Receiver<Arc<SourceReport>>,
    /// The known Services and their cluster IPs.
    pub(super) known: BTreeMap<String, String>,
    draining: watch::Sender<bool>,
    running: JoinSet<()>,
}

impl RunningSource {
    /// Starts a source, which then runs until `stop` is called.
    pub(super) fn new<R: Future<Output = ()> + Send + 'static>(
        dir: TempDir,
        store: Store,
        report: watch::Receiver<Arc<SourceReport>>,
        run: impl FnOnce(watch::Receiver<bool>) -> R,
    ) -> Self {
        let (draining, stop) = watch::channel(false);
        let mut running = JoinSet::new();
        running.spawn(run(stop));
        Self {
            dir,
            store,
            report,
            known: BTreeMap::new(),
            draining,
            running,
        }
    }

    /// Returns the path of a manifest.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("manifests").join(name)
    }

    pub(super) fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.path(name), text).expect("written");
    }

    /// Replaces a manifest by renaming another file over it, as editors do.
    pub(super) fn replace(&self, name: &str, text: &str) {
        self.write(".new", text);
        self.rename(".new", name);
    }

    pub(super) fn rename(&self, from: &str, to: &str) {
        fs::rename(self.path(from), self.path(to)).expect("renamed");
    }

    /// Formats the known Services as `name=address`, separated by spaces.
    pub(super) fn describe(&self) -> String {
        let words: Vec<String> = self.known.iter().map(|(a, b)| format!("{a}={b}")).collect();
        words.join(" ")
    }

    pub(super) async fn take(&mut self) -> ClusterUpdate {
        let update = timeout(TIMEOUT, self.store.update()).await;
        let update = update.unwrap_or_else(|_| panic!("no update; known: {}", self.describe()));
        let update = update.expect("the source runs");
        assert!(
            update.synced,
            "the first update comes after the first complete list"
        );
        for (name, state) in &update.services {
            let name = name.name.to_string();
            match state {
                Some(state) => {
                    let address = state.service.cluster_ips[0].to_string();
                    self.known.insert(name, address)
                }
                None => self.known.remove(&name),
            };
        }
        update
    }

    /// Takes updates until exactly these Services are known. Returns the last update that it took, if any.
    pub(super) async fn until(&mut self, words: &str) -> Option<ClusterUpdate> {
        let mut last = None;
        while self.describe() != words {
            last = Some(self.take().await);
        }
        last
    }

    /// Takes updates until exactly these Services are known, and asserts that the number of known Services
    /// never falls.
    pub(super) async fn until_without_loss(&mut self, words: &str) {
        let count = self.known.len();
        while self.describe() != words {
            self.take().await;
            assert!(self.known.len() >= count, "lost one: {}", self.describe());
        }
    }

    pub(super) async fn until_report(
        &mut self,
        is_wanted: impl Fn(&SourceReport) -> bool + Send + Sync,
    ) {
        let is_wanted = |report: &Arc<SourceReport>| is_wanted(report);
        let wait = timeout(TIMEOUT, self.report.wait_for(is_wanted));
        let is_published = wait.await.is_ok();
        assert!(is_published, "{:#?}", self.report.borrow());
    }

    /// Waits until the report has exactly one problem for each expected string, in order, and each problem
    /// contains its string. The path of the temporary directory is first removed from the problems.
    pub(super) async fn until_problems(&mut self, expected: &[&str]) {
        let directory = format!("{}/", self.dir.path().display());
        let is_expected = |report: &SourceReport| {
            let words = report.problems.iter().map(ToString::to_string);
            let mut pairs = words.zip(expected);
            report.problems.len() == expected.len()
                && pairs.all(|(word, part)| word.replace(&directory, "").contains(part))
        };
        self.until_report(is_expected).await;
    }

    /// Waits until the reported API server error contains this text.
    pub(super) async fn until_server_error(&mut self, words: &str) {
        let has_words = |report: &SourceReport| {
            let server = report.server.as_ref();
            let trouble = server.and_then(|server| server.error.as_ref());
            trouble.is_some_and(|trouble| trouble.contains(words))
        };
        self.until_report(has_words).await;
    }

    /// Stops the source and returns its directory.
    pub(super) async fn stop(self) -> TempDir {
        self.draining.send(true).expect("someone listens");
        let ended = timeout(TIMEOUT, self.running.join_all());
        ended.await.expect("in time");
        self.dir
    }
}
