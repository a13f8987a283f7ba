//! Tests of renamed files.

use std::fs;

use super::watched::{self, BAD, service, with};
use crate::source::tests::Followed;

/// Renames files in several rounds, each until a later change is visible, and asserts that no Service
/// disappears.
async fn move_without_loss(rounds: u8, step: impl Fn(&Followed, u8)) {
    let mut watched = watched::new().await;
    watched.write("b.yaml", service("b", "10.0.0.2"));
    watched.until("a=10.0.0.1 b=10.0.0.2").await;
    for round in 1..=rounds {
        step(&watched, round);
        let ip = format!("10.0.1.{round}");
        watched.replace("c.yaml", &service("c", &ip));
        let all = format!("a=10.0.0.1 b=10.0.0.2 c={ip}");
        watched.until_without_loss(&all).await;
    }
    watched.until_problems(&[]).await;
}

#[tokio::test]
async fn a_file_that_is_renamed_back_and_forth_keeps_its_objects() {
    let rename = |watched: &Followed, round: u8| match round % 2 {
        1 => watched.rename("a.yaml", "z.yaml"),
        _ => watched.rename("z.yaml", "a.yaml"),
    };
    move_without_loss(120, rename).await;
}

#[tokio::test]
async fn two_files_that_exchange_their_names_keep_their_objects() {
    let exchange = |watched: &Followed, _: u8| {
        nix::fcntl::renameat2(
            nix::fcntl::AT_FDCWD,
            &watched.path("a.yaml"),
            nix::fcntl::AT_FDCWD,
            &watched.path("b.yaml"),
            nix::fcntl::RenameFlags::RENAME_EXCHANGE,
        )
        .expect("exchanged");
    };
    move_without_loss(20, exchange).await;
}

#[tokio::test]
async fn a_file_that_is_renamed_takes_the_last_good_version_along() {
    let mut watched = watched::of_two().await;
    watched.write("a.yaml", with("10.0.0.2", BAD));
    watched.until_problems(&["manifests/a.yaml:6: "]).await;

    watched.rename("a.yaml", "z.yaml");
    watched.until_problems(&["manifests/z.yaml:6: "]).await;
    watched.write("c.yaml", service("c", "10.0.0.3"));

    let all = "a=10.0.0.2 bad=10.0.0.7 c=10.0.0.3";
    watched.until_without_loss(all).await;
}

#[tokio::test]
async fn a_file_that_is_replaced_right_after_its_rename_keeps_the_last_good_version() {
    let mut watched = watched::of_two().await;
    watched.write(".new", with("10.0.0.3", BAD));

    watched.rename("a.yaml", "z.yaml");
    watched.rename(".new", "z.yaml");

    watched.until_without_loss("a=10.0.0.3 bad=10.0.0.7").await;
    watched.until_problems(&["manifests/z.yaml:6: "]).await;
}

#[tokio::test]
async fn a_file_whose_name_a_refused_one_takes_keeps_the_last_good_version() {
    let mut watched = watched::new().await;
    // The invalid file is read before it replaces the other one.
    watched.write("new.yaml", "not: [a manifest");
    watched.until_problems(&["manifests/new.yaml"]).await;

    watched.rename("new.yaml", "a.yaml");

    watched.until_problems(&["manifests/a.yaml"]).await;
    watched.write("c.yaml", service("c", "10.0.0.3"));
    watched.until_without_loss("a=10.0.0.1 c=10.0.0.3").await;
}

#[tokio::test]
async fn a_file_that_is_moved_out_of_the_folder_takes_its_objects_with_it() {
    let mut watched = watched::new().await;

    fs::rename(watched.path("a.yaml"), watched.dir.path().join("a.yaml")).expect("renamed");

    watched.until("").await;
}
