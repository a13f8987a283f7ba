//! Tests for large files, which are read in the background.

use std::fmt::Write as _;

use tokio::time::Instant;

use super::fixture::{self, service};
use crate::source::tests::RunningSource;

/// Returns the documents of objects that Culvert does not serve, followed by the given text.
fn foreign(documents: usize, text: &str) -> String {
    let mut all = String::new();
    for number in 0..documents {
        write!(
            all,
            "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: d{number}}}\n\
             spec: {{replicas: 3, template: {{spec: {{containers: [{{name: web, image: web}}]}}}}}}\n---\n"
        )
        .expect("written");
    }
    all + text
}

async fn write_large(source: &RunningSource, text: &str) {
    assert!(text.len() > 1 << 20);
    source.write("large.yaml", text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_file_delays_no_change_of_another_file() {
    let mut source = fixture::with_one_service().await;
    let text = foreign(20_000, &service("large", "10.0.0.9"));

    let started = Instant::now();
    write_large(&source, &text).await;
    source.until("a=10.0.0.1 large=10.0.0.9").await;
    let alone = started.elapsed();

    let text = text.replace("replicas: 3", "replicas: 4");
    let started = Instant::now();
    write_large(&source, &text.replace("10.0.0.9", "10.0.0.8")).await;
    for last in 1..5 {
        let ip = format!("10.0.1.{last}");
        source.replace("a.yaml", &service("a", &ip));
        source.until(&format!("a={ip} large=10.0.0.9")).await;
    }
    let others = started.elapsed();
    source.until("a=10.0.1.4 large=10.0.0.8").await;
    assert!(others < alone, "{others:?} for four changes, {alone:?}");
}

#[tokio::test]
async fn a_large_file_that_is_removed_renamed_or_shrunk_meanwhile_is_read_correctly() {
    let mut source = fixture::with_one_service().await;
    let text = foreign(10_000, &service("large", "10.0.0.9"));

    // Removed: the result of the read must not come back.
    write_large(&source, &text).await;
    std::fs::remove_file(source.path("large.yaml")).expect("removed");
    source.write("b.yaml", service("b", "10.0.0.2"));
    source.until("a=10.0.0.1 b=10.0.0.2").await;
    source
        .until_report(|report| report.unknown_kinds.is_empty())
        .await;

    // Renamed.
    write_large(&source, &text).await;
    source.rename("large.yaml", "other.yaml");
    source.until("a=10.0.0.1 b=10.0.0.2 large=10.0.0.9").await;

    // Shrunk.
    source.write("other.yaml", text.replace("10.0.0.9", "10.0.0.8"));
    source.replace("other.yaml", &service("large", "10.0.0.7"));
    source.until("a=10.0.0.1 b=10.0.0.2 large=10.0.0.7").await;
    source.until_problems(&[]).await;
}

#[tokio::test]
async fn a_file_with_too_many_documents_is_refused_and_keeps_its_objects() {
    let mut source = fixture::with_one_service().await;
    let small = "--- {}\n".repeat(500_001);
    source.write("a.yaml", small);

    source
        .until_problems(&[
            "can't be read: it has more than 500000 documents (source.file.maxDocuments)",
        ])
        .await;
    source.write("b.yaml", service("b", "10.0.0.2"));
    source.until("a=10.0.0.1 b=10.0.0.2").await;
}
