//! Tests with servers that fail, lag or stop responding.

use super::{
    server::{ReceivedRequest, end_of_list, error_line, list_page, too_many_requests},
    *,
};

/// Returns a list with one Service, streamed or as a page, depending on the request. A streamed list is
/// followed by `following_lines`.
fn list_response(
    request: &ReceivedRequest,
    name: &str,
    address: &str,
    version: u64,
    following_lines: Vec<String>,
) -> ScriptedResponse {
    if !is_streamed(request) {
        return list_page(&[(name, address)], version, None);
    }
    let mut lines = vec![
        service_line("ADDED", name, address, version),
        end_of_list(version),
    ];
    lines.extend(following_lines);
    ScriptedResponse::Closed(lines)
}

#[tokio::test]
async fn a_lagging_server_does_not_restore_deleted_objects() {
    for is_paged in [false, true] {
        let server = Server::start(Script::counting(move |request, times| {
            if is_paged && is_streamed(request) {
                return error_status(422, "sendInitialEvents is forbidden for watch");
            }
            if request.query.contains_key("resourceVersion") && !is_streamed(request) {
                return match &*request.query["resourceVersion"] {
                    "700" => ScriptedResponse::Closed(vec![error_line(410, "Expired")]),
                    _ => ScriptedResponse::KeptOpen(Vec::new()),
                };
            }
            let expired = vec![error_line(410, "Expired")];
            match times {
                0 | 1 => list_response(request, "a", "10.0.0.1", 700, expired),
                2..5 => list_response(request, "gone", "10.0.0.9", 600, Vec::new()),
                _ => list_response(request, "b", "10.0.0.2", 701, Vec::new()),
            }
        }));
        let mut source = start_source(&[&server]).await;

        source.until("a=10.0.0.1").await;
        source
            .until_server_error("version 600, but version 700 was seen")
            .await;
        while source.describe() != "b=10.0.0.2" {
            assert_eq!(source.describe(), "a=10.0.0.1");
            source.take().await;
        }

        let services = server.requests("/api/v1/services");
        let lists = services
            .iter()
            .filter(|request| is_streamed(request) || !is_watch(request));
        // A request that specifies a version could be answered from a cache.
        for request in lists {
            let version = request.query.get("resourceVersion");
            assert!(version.is_none_or(String::is_empty), "{request:?}");
        }
        let server = source.report.borrow().server.clone();
        assert_eq!(server.and_then(|server| server.error), None);
    }
}

#[tokio::test]
async fn the_next_server_replaces_a_lagging_one() {
    let behind = Server::start(Script::counting(|request, times| match times {
        0 => list_response(
            request,
            "a",
            "10.0.0.1",
            700,
            vec![error_line(410, "Expired")],
        ),
        _ => list_response(request, "gone", "10.0.0.9", 600, Vec::new()),
    }));
    let ahead = Server::start(Script::new(|request| {
        if is_streamed(request) {
            return list_response(request, "b", "10.0.0.2", 701, Vec::new());
        }
        ScriptedResponse::KeptOpen(Vec::new())
    }));
    let mut source = start_source(&[&behind, &ahead]).await;

    source.until("a=10.0.0.1").await;
    source.take().await;

    assert_eq!(source.describe(), "b=10.0.0.2");
}

#[tokio::test]
async fn a_server_that_ends_each_watch_at_once_is_retried_with_a_backoff() {
    let server = Server::start(Script::new(|request| {
        if is_streamed(request) {
            return ScriptedResponse::Closed(vec![end_of_list(7)]);
        }
        // All events have the same version, so none of them counts as new.
        ScriptedResponse::Closed(vec![service_line("MODIFIED", "a", "10.0.0.1", 6)])
    }));
    let mut source = start_source(&[&server]).await;
    source.take().await;

    tokio::time::sleep(Duration::from_secs(2)).await;

    // The first backoff takes at least 125 ms, and each subsequent one at least 150 ms.
    let count = server.requests("/api/v1/services").len();
    assert!((3..=16).contains(&count), "{count}");
}

#[tokio::test]
async fn repeated_new_lists_have_a_growing_backoff() {
    let server = Server::start(Script::new(|request| {
        list_response(
            request,
            "a",
            "10.0.0.1",
            7,
            vec![error_line(410, "Expired")],
        )
    }));
    let mut setup = Setup::of(&[&server]);
    setup.settings.max_backoff = Duration::from_secs(10);
    let mut source = setup.start().await;
    source.until("a=10.0.0.1").await;

    tokio::time::sleep(Duration::from_secs(3)).await;

    // The backoffs take at least 125 ms, 250 ms, 500 ms and 1 s.
    let count = server.requests("/api/v1/services").len();
    assert!((2..=7).contains(&count), "{count}");
}

#[tokio::test]
async fn the_next_server_replaces_a_silent_one() {
    let first = Server::start(Script::counting(|request, times| match times {
        0 => list_response(request, "a", "10.0.0.1", 7, Vec::new()),
        1 => error_status(500, "it is about to freeze"),
        _ => ScriptedResponse::Never,
    }));
    let frozen = Server::start(Script::all(|_| ScriptedResponse::Never));
    let good = Server::start(Script::new(|request| {
        if is_streamed(request) || !is_watch(request) {
            return list_response(request, "b", "10.0.0.2", 8, Vec::new());
        }
        ScriptedResponse::KeptOpen(Vec::new())
    }));

    let mut source = start_source_with_limits(SHORT_LIMIT, &[&first, &frozen, &good]).await;

    source.until("b=10.0.0.2").await;

    source.stop().await;
}

#[tokio::test]
async fn a_page_that_stops_in_the_middle_is_requested_again() {
    let server = Server::start(Script::counting(|request, times| {
        if is_streamed(request) {
            return error_status(422, "sendInitialEvents is forbidden for watch");
        }
        if is_watch(request) {
            return ScriptedResponse::KeptOpen(Vec::new());
        }
        if times == 1 {
            return ScriptedResponse::KeptOpen(vec![
                r#"{"apiVersion": "v1", "items": ["#.to_owned(),
            ]);
        }
        list_page(&[("a", "10.0.0.1")], 7, None)
    }));
    let mut source = start_source_with_limits(SHORT_LIMIT, &[&server]).await;

    source.until_server_error("sent no data for 500ms").await;
    source.until("a=10.0.0.1").await;

    // Watches are not subject to this limit.
    tokio::time::sleep(SHORT_LIMIT * 3).await;
    let watches = server.requests("/api/v1/services");
    let watches = watches
        .iter()
        .filter(|request| is_watch(request) && !is_streamed(request));
    assert_eq!(watches.count(), 1);
}

#[tokio::test]
async fn a_watch_that_the_server_has_lost_is_reopened_at_its_last_version() {
    let server = Server::start(Script::counting(|request, times| {
        if is_streamed(request) {
            return ScriptedResponse::KeptOpen(vec![end_of_list(7)]);
        }
        match times {
            1 => ScriptedResponse::KeptOpen(vec![service_line("ADDED", "a", "10.0.0.1", 8)]),
            _ => ScriptedResponse::KeptOpen(vec![service_line("ADDED", "b", "10.0.0.2", 9)]),
        }
    }));
    let mut setup = Setup::of(&[&server]);
    setup.limits.watch_overtime = SHORT_LIMIT;
    setup.settings.watch_timeout = Duration::from_secs(1);
    let mut source = setup.start().await;

    source.until("a=10.0.0.1 b=10.0.0.2").await;

    let requests = server.requests("/api/v1/services");
    let versions = requests
        .iter()
        .map(|request| &*request.query["resourceVersion"]);
    assert_eq!(versions.take(3).collect::<Vec<_>>(), ["", "7", "8"]);
}

#[tokio::test]
async fn the_longer_of_two_requested_delays_is_observed_once() {
    let cases = [(2, 2), (1, 2), (2, 0)].map(|(head, body)| async move {
        let server = Server::start(Script::counting(move |request, times| {
            if times == 0 {
                return too_many_requests(head, body);
            }
            if is_streamed(request) {
                return ScriptedResponse::KeptOpen(vec![end_of_list(7)]);
            }
            list_page(&[], 7, None)
        }));
        let before = Instant::now();
        let mut source = start_source(&[&server]).await;

        source.take().await;

        let waited = before.elapsed();
        let wanted = Duration::from_secs(2)..Duration::from_millis(3900);
        assert!(wanted.contains(&waited), "{head} {body}: {waited:?}");
    });
    futures_util::future::join_all(cases).await;
}

#[tokio::test]
async fn without_permission_to_read_pods_all_other_kinds_are_used_and_saved() {
    let server = Server::start(Script::all(|request| match &*request.path {
        "/api/v1/pods" => error_status(403, "pods is forbidden: User \"culvert\" cannot list them"),
        "/api/v1/services" if is_watch(request) => ScriptedResponse::KeptOpen(vec![
            service_line("ADDED", "a", "10.0.0.1", 1),
            end_of_list(1),
        ]),
        _ if is_watch(request) => ScriptedResponse::KeptOpen(vec![end_of_list(1)]),
        _ => list_page(&[], 1, None),
    }));
    let mut setup = Setup::of(&[&server]);
    let snapshot = setup.scope.snapshot.clone();
    setup.scope.steering = Some(SteeringScope {
        labels: BTreeSet::new(),
        config_map: ObjectName::new("kube-system", "ports"),
        pods: true,
    });
    let mut source = setup.start().await;

    source.until("a=10.0.0.1").await;
    source.until_server_error("pods is forbidden").await;

    let directory = source.stop().await;
    assert!(snapshot.exists(), "the last known state is saved");
    drop(directory);
}
