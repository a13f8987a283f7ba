use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use tempfile::TempDir;
use tokio::{sync::watch as latest, task::JoinSet, time::timeout};

use crate::{
    model::Update,
    source::{
        Report, Store,
        file::{Settings, start},
    },
};

pub(super) const PATIENCE: Duration = Duration::from_secs(20);

pub(super) fn service(name: &str, address: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {address}, \
         ports: [{{port: 80}}]}}\n"
    )
}

pub(super) const BAD: &str =
    "apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {clusterIP: x}\n";

/// A folder with an empty folder `manifests`.
pub(super) fn folder() -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    fs::create_dir(dir.path().join("manifests")).expect("a folder");
    dir
}

/// A folder that is watched, and what was told of it.
pub(super) struct Watched {
    pub(super) dir: TempDir,
    store: Store,
    pub(super) report: latest::Receiver<Arc<Report>>,
    /// Each Service that is known, with its cluster IP.
    pub(super) known: Vec<(String, String)>,
    draining: latest::Sender<bool>,
    running: JoinSet<()>,
}

impl Watched {
    /// Starts on a folder with one manifest of one Service, `a` at 10.0.0.1.
    pub(super) async fn new() -> Self {
        let dir = folder();
        let path = dir.path().join("manifests/a.yaml");
        fs::write(path, service("a", "10.0.0.1")).expect("written");
        let mut watched = Self::on(dir, "manifests").await;
        watched.until("a=10.0.0.1").await;
        watched
    }

    pub(super) async fn on(dir: TempDir, path: &str) -> Self {
        let mut store = Store::default();
        let settings = Settings::new(dir.path().join(path));
        let source = start(settings, store.overlay()).await.expect("a source");
        let report = source.report();
        let (draining, stop) = latest::channel(false);
        let mut running = JoinSet::new();
        running.spawn(source.run(stop));
        Self {
            dir,
            store,
            report,
            known: Vec::new(),
            draining,
            running,
        }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("manifests").join(name)
    }

    pub(super) fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        fs::write(self.path(name), text).expect("written");
    }

    /// Replaces a file as editors do.
    pub(super) fn replace(&self, name: &str, text: &str) {
        self.write(".new", text);
        fs::rename(self.path(".new"), self.path(name)).expect("renamed");
    }

    /// The Services that are known, each as `name=address`.
    pub(super) fn words(&self) -> String {
        let words: Vec<String> = self.known.iter().map(|(a, b)| format!("{a}={b}")).collect();
        words.join(" ")
    }

    pub(super) async fn take(&mut self) -> Update {
        let update = timeout(PATIENCE, self.store.update()).await;
        let update = update.unwrap_or_else(|_| panic!("no update; known: {}", self.words()));
        let update = update.expect("the source runs");
        assert!(update.synced, "nothing is told before all was read");
        for (name, state) in &update.services {
            self.known.retain(|(known, _)| known != &*name.name);
            if let Some(state) = state {
                let address = state.service.cluster_ips[0].to_string();
                self.known.push((name.name.to_string(), address));
            }
        }
        self.known.sort();
        update
    }

    /// Takes updates until these Services are known.
    pub(super) async fn until(&mut self, words: &str) {
        while self.words() != words {
            self.take().await;
        }
    }

    /// Takes updates until these Services are known; there must not be fewer meanwhile.
    pub(super) async fn until_without_loss(&mut self, words: &str) {
        let count = self.known.len();
        while self.words() != words {
            self.take().await;
            assert!(self.known.len() >= count, "lost one: {}", self.words());
        }
    }

    /// Waits until what is wrong is this, each problem without the folder before it.
    pub(super) async fn until_problems(&mut self, expected: &[&str]) {
        let folder = format!("{}/", self.dir.path().display());
        let words = |report: &Report| -> Vec<String> {
            report
                .problems
                .iter()
                .map(|p| p.to_string().replace(&folder, ""))
                .collect()
        };
        let is_expected = |report: &Arc<Report>| {
            let words = words(report);
            words.len() == expected.len() && words.iter().zip(expected).all(|(a, b)| a.contains(b))
        };
        let waited = timeout(PATIENCE, self.report.wait_for(is_expected))
            .await
            .is_ok();
        assert!(waited, "problems are {:#?}", words(&self.report.borrow()));
    }

    pub(super) async fn stop(self) {
        self.draining.send(true).expect("someone listens");
        let ended = timeout(PATIENCE, self.running.join_all());
        ended.await.expect("in time");
    }
}
