//! Tests for renaming files.

use std::fs;

use super::fixture::{self, INVALID, service, service_and};
use crate::source::tests::RunningSource;

/// Renames files in several rounds, waiting after each round until a later change is visible, and asserts
/// that no Service disappears.
async fn rename_without_loss(rounds: u8, step: impl Fn(&RunningSource, u8)) {
    let mut source = fixture::with_one_service().await;
    source.write("b.yaml", service("b", "10.0.0.2"));
    source.until("a=10.0.0.1 b=10.0.0.2").await;
    for round in 1..=rounds {
        step(&source, round);
        let ip = format!("10.0.1.{round}");
        source.replace("c.yaml", &service("c", &ip));
        let all = format!("a=10.0.0.1 b=10.0.0.2 c={ip}");
        source.until_without_loss(&all).await;
    }
    source.until_problems(&[]).await;
}

#[tokio::test]
async fn a_file_that_is_renamed_back_and_forth_keeps_its_objects() {
    let rename = |source: &RunningSource, round: u8| match round % 2 {
        1 => source.rename("a.yaml", "z.yaml"),
        _ => source.rename("z.yaml", "a.yaml"),
    };
    rename_without_loss(120, rename).await;
}

#[tokio::test]
async fn two_files_that_exchange_their_names_keep_their_objects() {
    let exchange = |source: &RunningSource, _: u8| {
        nix::fcntl::renameat2(
            nix::fcntl::AT_FDCWD,
            &source.path("a.yaml"),
            nix::fcntl::AT_FDCWD,
            &source.path("b.yaml"),
            nix::fcntl::RenameFlags::RENAME_EXCHANGE,
        )
        .expect("exchanged");
    };
    rename_without_loss(20, exchange).await;
}

#[tokio::test]
async fn a_renamed_file_keeps_its_last_valid_version() {
    let mut source = fixture::with_two_services().await;
    source.write("a.yaml", service_and("10.0.0.2", INVALID));
    source.until_problems(&["manifests/a.yaml:6: "]).await;

    source.rename("a.yaml", "z.yaml");
    source.until_problems(&["manifests/z.yaml:6: "]).await;
    source.write("c.yaml", service("c", "10.0.0.3"));

    let all = "a=10.0.0.2 bad=10.0.0.7 c=10.0.0.3";
    source.until_without_loss(all).await;
}

#[tokio::test]
async fn a_file_that_is_replaced_right_after_its_rename_keeps_the_last_valid_version() {
    let mut source = fixture::with_two_services().await;
    source.write(".new", service_and("10.0.0.3", INVALID));

    source.rename("a.yaml", "z.yaml");
    source.rename(".new", "z.yaml");

    source.until_without_loss("a=10.0.0.3 bad=10.0.0.7").await;
    source.until_problems(&["manifests/z.yaml:6: "]).await;
}

#[tokio::test]
async fn a_file_that_is_replaced_by_an_invalid_one_keeps_the_last_valid_version() {
    let mut source = fixture::with_one_service().await;
    // The invalid file has already been read by the time it replaces the other one.
    source.write("new.yaml", "not: [a manifest");
    source.until_problems(&["manifests/new.yaml"]).await;

    source.rename("new.yaml", "a.yaml");

    source.until_problems(&["manifests/a.yaml"]).await;
    source.write("c.yaml", service("c", "10.0.0.3"));
    source.until_without_loss("a=10.0.0.1 c=10.0.0.3").await;
}

#[tokio::test]
async fn the_objects_of_a_file_that_is_moved_out_of_the_directory_are_deleted() {
    let mut source = fixture::with_one_service().await;

    fs::rename(source.path("a.yaml"), source.dir.path().join("a.yaml")).expect("renamed");

    source.until("").await;
}
