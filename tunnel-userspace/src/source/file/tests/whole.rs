//! Whether updates say that nothing is missing.

use std::{fs, os::unix::fs::symlink};

use super::watched::{BAD, Watched, folder, service};

/// Starts on a folder with `a` and something that can't be used, and takes the first update.
async fn with_trouble(make: impl FnOnce(&std::path::Path)) -> Watched {
    let dir = folder();
    let manifests = dir.path().join("manifests");
    fs::write(manifests.join("a.yaml"), service("a", "10.0.0.1")).expect("written");
    make(&manifests);
    let mut watched = Watched::on(dir, "manifests").await;
    let update = watched.take().await;
    assert!(!update.whole, "something is missing");
    assert_eq!(watched.words(), "a=10.0.0.1");
    watched
}

async fn until_whole(watched: &mut Watched) {
    while !watched.take().await.whole {}
}

#[tokio::test]
async fn nothing_is_missing_where_only_a_field_is_left_out() {
    let dir = folder();
    let manifests = dir.path().join("manifests");
    let odd = service("a", "10.0.0.1").replace(
        "metadata: {",
        "metadata: {annotations: {culvert.dev/algorithm: fastest}, ",
    );
    assert!(odd.contains("fastest"), "{odd}");
    fs::write(manifests.join("a.yaml"), odd).expect("written");

    let mut watched = Watched::on(dir, "manifests").await;

    assert!(watched.take().await.whole);
    assert_eq!(watched.words(), "a=10.0.0.1");
}

#[tokio::test]
async fn a_bad_document_is_missing_until_it_is_mended() {
    let bad = |manifests: &std::path::Path| {
        fs::write(manifests.join("b.yaml"), BAD).expect("written");
    };
    let mut watched = with_trouble(bad).await;

    // Even if nothing is left of it.
    watched.write("b.yaml", "# nothing\n");

    until_whole(&mut watched).await;
    assert_eq!(watched.words(), "a=10.0.0.1");
}

#[tokio::test]
async fn a_link_that_leads_nowhere_is_missing_until_it_leads_somewhere() {
    let link = |manifests: &std::path::Path| {
        symlink("../elsewhere", manifests.join("b.yaml")).expect("linked");
    };
    let mut watched = with_trouble(link).await;

    fs::write(
        watched.dir.path().join("elsewhere"),
        service("b", "10.0.0.2"),
    )
    .expect("written");

    until_whole(&mut watched).await;
    assert_eq!(watched.words(), "a=10.0.0.1 b=10.0.0.2");
}
