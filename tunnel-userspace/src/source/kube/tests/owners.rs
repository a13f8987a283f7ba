//! What is read more where it matters who has an address.

use super::*;

#[tokio::test]
async fn all_nodes_and_services_of_other_proxies_are_read_where_owners_matter() {
    let server = Server::start(Script::new(|asked| {
        if is_watch(asked) && !is_streamed(asked) {
            return Reply::Held(Vec::new());
        }
        Reply::Held(vec![
            watched("ADDED", "a", "10.0.0.1", 5),
            server::end_of_list(7),
        ])
    }))
    .await;
    let folder = tempfile::tempdir().expect("a folder");
    let settings = Settings {
        owners: true,
        ..Followed::settings(&[&server], &folder)
    };
    let mut followed = Followed::start(LIMITS, settings, folder).await;

    followed.until("a=10.0.0.1").await;

    for path in ["/api/v1/nodes", "/api/v1/services"] {
        let query = &server.asked(path)[0].query;
        assert!(!query.contains_key("labelSelector"), "{path}: {query:?}");
    }
    let nodes = server.asked("/api/v1/nodes");
    assert!(!nodes[0].query.contains_key("fieldSelector"));
    let services = server.asked("/api/v1/services");
    assert_eq!(services[0].query["fieldSelector"], "spec.clusterIP!=None");
    followed.stop().await;
}
