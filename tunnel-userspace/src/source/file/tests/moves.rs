//! Files that get other names.

use std::fs;

use super::{
    PATIENCE,
    watched::{BAD, Watched, service},
};

/// Renames files in turn, each time until a later change is told, and asserts that no Service ever
/// goes.
async fn rename_without_loss(steps: &[(&str, &str)]) {
    let mut watched = Watched::new().await;
    watched.write("b.yaml", service("b", "10.0.0.2"));
    watched.until("a=10.0.0.1 b=10.0.0.2").await;
    for (round, (from, to)) in (1..=120_u8).zip(steps.iter().cycle()) {
        fs::rename(watched.path(from), watched.path(to)).expect("renamed");
        let ip = format!("10.0.1.{round}");
        watched.replace("c.yaml", &service("c", &ip));
        let all = format!("a=10.0.0.1 b=10.0.0.2 c={ip}");
        watched.until_without_loss(&all).await;
    }
    watched.until_problems(&[]).await;
    watched.stop().await;
}

#[tokio::test]
async fn a_file_that_is_renamed_back_and_forth_keeps_its_objects() {
    rename_without_loss(&[("a.yaml", "z.yaml"), ("z.yaml", "a.yaml")]).await;
}

#[tokio::test]
async fn a_file_that_is_renamed_takes_the_last_good_version_along() {
    let mut watched = Watched::new().await;
    let both = |bad: &str| format!("{}---\n{bad}", service("a", "10.0.0.2"));
    watched.write("a.yaml", both(&service("bad", "10.0.0.7")));
    watched.until("a=10.0.0.2 bad=10.0.0.7").await;
    watched.write("a.yaml", both(BAD));
    watched.until_problems(&["manifests/a.yaml:6: "]).await;

    fs::rename(watched.path("a.yaml"), watched.path("z.yaml")).expect("renamed");
    watched.until_problems(&["manifests/z.yaml:6: "]).await;
    watched.write("c.yaml", service("c", "10.0.0.3"));

    watched
        .until_without_loss("a=10.0.0.2 bad=10.0.0.7 c=10.0.0.3")
        .await;
    watched.stop().await;
}

#[tokio::test]
async fn a_file_that_is_moved_out_of_the_folder_takes_its_objects_with_it() {
    let mut watched = Watched::new().await;

    fs::rename(watched.path("a.yaml"), watched.dir.path().join("a.yaml")).expect("renamed");

    let told = tokio::time::timeout(PATIENCE, watched.until(""));
    told.await.expect("told");
    watched.stop().await;
}
