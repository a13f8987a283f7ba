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
}

#[tokio::test]
async fn a_file_that_is_replaced_right_after_its_rename_keeps_the_last_good_version() {
    let mut watched = Watched::new().await;
    let both = |bad: &str| format!("{}---\n{bad}", service("a", "10.0.0.2"));
    watched.write("a.yaml", both(&service("bad", "10.0.0.7")));
    watched.until("a=10.0.0.2 bad=10.0.0.7").await;
    watched.write(".new", both(BAD).replace("10.0.0.2", "10.0.0.3"));

    fs::rename(watched.path("a.yaml"), watched.path("z.yaml")).expect("renamed");
    fs::rename(watched.path(".new"), watched.path("z.yaml")).expect("renamed");

    watched.until_without_loss("a=10.0.0.3 bad=10.0.0.7").await;
    watched.until_problems(&["manifests/z.yaml:6: "]).await;
}

#[tokio::test]
async fn a_file_whose_name_a_refused_one_takes_keeps_the_last_good_version() {
    let mut watched = Watched::new().await;
    // Read before it takes the name.
    watched.write("new.yaml", "not: [a manifest");
    watched.until_problems(&["manifests/new.yaml"]).await;

    fs::rename(watched.path("new.yaml"), watched.path("a.yaml")).expect("renamed");

    watched.until_problems(&["manifests/a.yaml"]).await;
    watched.write("c.yaml", service("c", "10.0.0.3"));
    watched.until_without_loss("a=10.0.0.1 c=10.0.0.3").await;
}

#[tokio::test]
async fn two_files_that_exchange_their_names_keep_their_objects() {
    let mut watched = Watched::new().await;
    watched.write("b.yaml", service("b", "10.0.0.2"));
    watched.until("a=10.0.0.1 b=10.0.0.2").await;

    for round in 1..=20_u8 {
        nix::fcntl::renameat2(
            nix::fcntl::AT_FDCWD,
            &watched.path("a.yaml"),
            nix::fcntl::AT_FDCWD,
            &watched.path("b.yaml"),
            nix::fcntl::RenameFlags::RENAME_EXCHANGE,
        )
        .expect("exchanged");
        let ip = format!("10.0.1.{round}");
        watched.replace("c.yaml", &service("c", &ip));
        let all = format!("a=10.0.0.1 b=10.0.0.2 c={ip}");
        watched.until_without_loss(&all).await;
    }
}

#[tokio::test]
async fn a_file_that_is_moved_out_of_the_folder_takes_its_objects_with_it() {
    let mut watched = Watched::new().await;

    fs::rename(watched.path("a.yaml"), watched.dir.path().join("a.yaml")).expect("renamed");

    let told = tokio::time::timeout(PATIENCE, watched.until(""));
    told.await.expect("told");
}
