//! What is read more where it matters who has an address, or where a Node is.

use super::*;

#[tokio::test]
async fn all_nodes_and_services_of_other_proxies_are_read_where_owners_matter() {
    let server = Server::start(Script::new(|asked| {
        if is_watch(asked) && !is_streamed(asked) {
            return Reply::Held(Vec::new());
        }
        Reply::Held(list_of_one("a", "10.0.0.1", 5, 7))
    }))
    .await;
    let mut setup = Setup::of(&[&server]);
    setup.scope.owners = true;
    let mut followed = setup.start().await;

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

#[tokio::test]
async fn the_node_pools_of_all_nodes_are_read_where_they_matter() {
    let server = Server::start(Script::all(|asked| {
        if asked.query.contains_key("limit") {
            return listed(&[], u64::MAX, None);
        }
        if !asked.path.ends_with("/nodes") {
            return Reply::Held(vec![server::end_of_list(7)]);
        }
        let labels = serde_json::json!({NODE_POOL: "edge", "rack": "7"});
        let metadata = serde_json::json!({
            "name": "node-b", "resourceVersion": "5", "labels": labels,
        });
        let node = serde_json::json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata});
        Reply::Held(vec![server::line("ADDED", &node), server::end_of_list(7)])
    }))
    .await;
    let mut setup = Setup::of(&[&server]);
    setup.scope.pools = true;
    let mut followed = setup.start().await;

    let update = followed.take().await;

    let (_, node) = &update.nodes[0];
    let labels = &node.as_ref().expect("a Node").labels;
    let wanted = BTreeMap::from([(NODE_POOL.to_owned(), "edge".to_owned())]);
    assert_eq!(*labels, wanted);
    let nodes = server.asked("/api/v1/nodes");
    assert!(!nodes[0].query.contains_key("fieldSelector"));
    let services = server.asked("/api/v1/services");
    assert!(services[0].query.contains_key("labelSelector"));
    followed.stop().await;
}
