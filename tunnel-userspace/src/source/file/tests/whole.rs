//! Tests of the flag of updates that tells if all objects are present.

use std::{fs, os::unix::fs::symlink, path::Path};

use super::watched::{self, BAD, folder, service};
use crate::source::tests::Followed;

/// Watches a folder with the Service `a` and another entry, and takes the first update. Returns true as
/// well if the update is complete.
async fn beside(make: impl FnOnce(&Path)) -> (Followed, bool) {
    let dir = folder();
    let manifests = dir.path().join("manifests");
    fs::write(manifests.join("a.yaml"), service("a", "10.0.0.1")).expect("written");
    make(&manifests);
    let mut watched = watched::on(dir, "manifests").await;
    let is_whole = watched.take().await.whole;
    assert_eq!(watched.words(), "a=10.0.0.1");
    (watched, is_whole)
}

async fn until_whole(watched: &mut Followed) {
    while !watched.take().await.whole {}
}

#[tokio::test]
async fn nothing_is_missing_where_only_a_field_is_left_out() {
    let odd = service("a", "10.0.0.1").replace(
        "metadata: {",
        "metadata: {annotations: {culvert.dev/algorithm: fastest}, ",
    );
    assert!(odd.contains("fastest"), "{odd}");

    let write = |folder: &Path| fs::write(folder.join("a.yaml"), odd).expect("written");
    let (_, is_whole) = beside(write).await;

    assert!(is_whole);
}

#[tokio::test]
async fn a_bad_document_is_missing_until_it_is_mended() {
    let write = |folder: &Path| fs::write(folder.join("b.yaml"), BAD).expect("written");
    let (mut watched, is_whole) = beside(write).await;
    assert!(!is_whole);

    // The file becomes valid, even without any object.
    watched.write("b.yaml", "# nothing\n");

    until_whole(&mut watched).await;
    assert_eq!(watched.words(), "a=10.0.0.1");
}

#[tokio::test]
async fn a_link_that_leads_nowhere_is_missing_until_it_leads_somewhere() {
    let link = |folder: &Path| symlink("../elsewhere", folder.join("b.yaml")).expect("linked");
    let (mut watched, is_whole) = beside(link).await;
    assert!(!is_whole);

    let elsewhere = watched.dir.path().join("elsewhere");
    fs::write(elsewhere, service("b", "10.0.0.2")).expect("written");

    until_whole(&mut watched).await;
    assert_eq!(watched.words(), "a=10.0.0.1 b=10.0.0.2");
}
