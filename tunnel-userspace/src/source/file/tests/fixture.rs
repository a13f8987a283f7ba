//! Builds watched directories for tests.

use std::{fs, time::Duration};

use tempfile::TempDir;

use crate::source::{
    Store,
    file::{FileSettings, start},
    tests::RunningSource,
};

pub(super) fn service(name: &str, address: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: {address}, \
         ports: [{{port: 80}}]}}\n"
    )
}

pub(super) const INVALID: &str =
    "apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {clusterIP: x}\n";

/// Creates a temporary directory that contains an empty directory named `manifests`.
pub(super) fn directory() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    fs::create_dir(dir.path().join("manifests")).expect("a directory");
    dir
}

/// Watches a directory with a single file `a.yaml`, which contains the Service `a` with the cluster IP
/// 10.0.0.1.
pub(super) async fn with_one_service() -> RunningSource {
    let dir = directory();
    let path = dir.path().join("manifests/a.yaml");
    fs::write(path, service("a", "10.0.0.1")).expect("written");
    let mut source = watch(dir, "manifests").await;
    source.until("a=10.0.0.1").await;
    source
}

pub(super) async fn watch(dir: TempDir, path: &str) -> RunningSource {
    let mut store = Store::default();
    let settings = FileSettings {
        replacement_delay: Duration::from_secs(1),
        ..FileSettings::new(dir.path().join(path))
    };
    let source = start(settings, store.overlay()).await.expect("a source");
    let report = source.report();
    RunningSource::new(dir, store, report, |stop| source.run(stop))
}

/// Returns the content of a file with the Service `a` and one more document.
pub(super) fn service_and(address: &str, other: &str) -> String {
    format!("{}---\n{other}", service("a", address))
}

/// Watches a directory with a single file `a.yaml`, which contains the Services `a` and `bad`.
pub(super) async fn with_two_services() -> RunningSource {
    let mut source = with_one_service().await;
    source.write(
        "a.yaml",
        service_and("10.0.0.2", &service("bad", "10.0.0.7")),
    );
    source.until("a=10.0.0.2 bad=10.0.0.7").await;
    source
}
