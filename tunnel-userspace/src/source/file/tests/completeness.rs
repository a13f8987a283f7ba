//! Tests for `ClusterUpdate::complete`.

use std::{fs, os::unix::fs::symlink, path::Path};

use super::fixture::{self, INVALID, directory, service};
use crate::source::tests::RunningSource;

/// Watches a directory that contains the Service `a` and whatever `create` adds. Returns the source, and true
/// if its first update is complete.
async fn watch_with(create: impl FnOnce(&Path)) -> (RunningSource, bool) {
    let dir = directory();
    let manifests = dir.path().join("manifests");
    fs::write(manifests.join("a.yaml"), service("a", "10.0.0.1")).expect("written");
    create(&manifests);
    let mut source = fixture::watch(dir, "manifests").await;
    let is_complete = source.take().await.complete;
    assert_eq!(source.describe(), "a=10.0.0.1");
    (source, is_complete)
}

async fn until_complete(source: &mut RunningSource) {
    while !source.take().await.complete {}
}

#[tokio::test]
async fn an_ignored_field_leaves_the_update_complete() {
    let odd = service("a", "10.0.0.1").replace(
        "metadata: {",
        "metadata: {annotations: {culvert.dev/algorithm: fastest}, ",
    );
    assert!(odd.contains("fastest"), "{odd}");

    let write = |directory: &Path| fs::write(directory.join("a.yaml"), odd).expect("written");
    let (_, is_complete) = watch_with(write).await;

    assert!(is_complete);
}

#[tokio::test]
async fn an_invalid_document_makes_updates_incomplete_until_it_is_fixed() {
    let write = |directory: &Path| fs::write(directory.join("b.yaml"), INVALID).expect("written");
    let (mut source, is_complete) = watch_with(write).await;
    assert!(!is_complete);

    // The file becomes valid, although it contains no objects.
    source.write("b.yaml", "# nothing\n");

    until_complete(&mut source).await;
    assert_eq!(source.describe(), "a=10.0.0.1");
}

#[tokio::test]
async fn a_dangling_link_makes_updates_incomplete_until_its_target_exists() {
    let link =
        |directory: &Path| symlink("../elsewhere", directory.join("b.yaml")).expect("linked");
    let (mut source, is_complete) = watch_with(link).await;
    assert!(!is_complete);

    let elsewhere = source.dir.path().join("elsewhere");
    fs::write(elsewhere, service("b", "10.0.0.2")).expect("written");

    until_complete(&mut source).await;
    assert_eq!(source.describe(), "a=10.0.0.1 b=10.0.0.2");
}
