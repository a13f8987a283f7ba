//! Tests for a directory that is replaced by another one.

use std::{fs, os::unix::fs::symlink, time::Duration};

use tokio::time::Instant;

use super::fixture::{self, service};

/// Watches a directory with the files `a.yaml` and `b.yaml`, each of which contains the Service of that name.
async fn with_two_files() -> crate::source::tests::RunningSource {
    let mut source = fixture::with_one_service().await;
    source.write("b.yaml", service("b", "10.0.0.2"));
    source.until("a=10.0.0.1 b=10.0.0.2").await;
    source
}

#[tokio::test]
async fn a_new_directory_that_is_filled_file_by_file_deletes_nothing_meanwhile() {
    let mut source = with_two_files().await;
    let [directory, away] = ["manifests", "away"].map(|name| source.dir.path().join(name));
    fs::rename(&directory, &away).expect("renamed");
    fs::create_dir(&directory).expect("a directory");

    // The first file applies at once, and the objects that the new directory still lacks stay.
    source.write("a.yaml", service("a", "10.0.1.1"));
    source.until_without_loss("a=10.0.1.1 b=10.0.0.2").await;
    source
        .until_problems(&["manifests: was replaced by another directory"])
        .await;
    source.write("c.yaml", service("c", "10.0.1.3"));
    let all = "a=10.0.1.1 b=10.0.0.2 c=10.0.1.3";
    source.until_without_loss(all).await;
    source.write("b.yaml", service("b", "10.0.1.2"));

    let all = "a=10.0.1.1 b=10.0.1.2 c=10.0.1.3";
    source.until_without_loss(all).await;
    source.until_problems(&[]).await;
    source.write("d.yaml", service("d", "10.0.1.4"));
    source
        .until_without_loss(&format!("{all} d=10.0.1.4"))
        .await;
}

#[tokio::test]
async fn objects_that_the_new_directory_lacks_are_deleted_once_it_is_quiet() {
    let mut source = with_two_files().await;
    let directory = source.dir.path().join("manifests");
    let new = source.dir.path().join("new");
    fs::create_dir(&new).expect("a directory");
    fs::write(new.join("a.yaml"), service("a", "10.0.1.1")).expect("written");

    let old = source.dir.path().join("old");
    fs::rename(&directory, &old).expect("renamed");
    fs::rename(&new, &directory).expect("renamed");

    source.until_without_loss("a=10.0.1.1 b=10.0.0.2").await;
    source.until("a=10.0.1.1").await;
    source.until_problems(&[]).await;
}

#[tokio::test]
async fn each_further_replacement_of_the_directory_starts_the_delay_again() {
    let mut source = with_two_files().await;
    let [directory, old, new] =
        ["manifests", "old", "new"].map(|name| source.dir.path().join(name));
    fs::create_dir(&new).expect("a directory");
    fs::write(new.join("a.yaml"), service("a", "10.0.1.1")).expect("written");
    fs::rename(&directory, &old).expect("renamed");
    fs::rename(&new, &directory).expect("renamed");
    let lacks_files =
        ["manifests: was replaced by another directory, which lacks some of the files"];
    source.until_problems(&lacks_files).await;

    // The delay is one second.
    let started = Instant::now();
    let mut replaced_at = started;
    while started.elapsed() < Duration::from_millis(2500) {
        fs::rename(&directory, &new).expect("renamed");
        source
            .until_problems(&["manifests: can't be reached"])
            .await;
        fs::rename(&new, &directory).expect("renamed");
        replaced_at = Instant::now();
        source.until_problems(&lacks_files).await;
    }
    source.until_without_loss("a=10.0.1.1 b=10.0.0.2").await;
    source.until("a=10.0.1.1").await;

    let delay = replaced_at.elapsed();
    assert!(delay >= Duration::from_secs(1), "deleted after {delay:?}");
}

#[tokio::test]
async fn a_link_that_is_swapped_to_another_directory_deletes_once_it_is_quiet() {
    let dir = tempfile::tempdir().expect("a directory");
    for (revision, files) in [("1", &["a", "b"][..]), ("2", &["a", "c"])] {
        let revision = dir.path().join(revision);
        fs::create_dir(&revision).expect("a directory");
        for name in files {
            let path = revision.join(format!("{name}.yaml"));
            fs::write(path, service(name, "10.0.0.1")).expect("written");
        }
    }
    symlink("1", dir.path().join("manifests")).expect("linked");
    let mut source = fixture::watch(dir, "manifests").await;
    source.until("a=10.0.0.1 b=10.0.0.1").await;

    let draft = source.dir.path().join("draft");
    symlink("2", &draft).expect("linked");
    fs::rename(&draft, source.dir.path().join("manifests")).expect("renamed");

    source
        .until_without_loss("a=10.0.0.1 b=10.0.0.1 c=10.0.0.1")
        .await;
    source.until("a=10.0.0.1 c=10.0.0.1").await;
    source.until_problems(&[]).await;
}
