//! Tests of servers that fail, lag or stop responding.

use super::{
    server::{Asked, end_of_list, failed, listed, too_many_twice},
    *,
};

/// Returns a list of one Service, streamed or as a page, as requested. The lines in `then` follow a
/// streamed list.
fn one_of(asked: &Asked, name: &str, address: &str, version: u64, then: Vec<String>) -> Reply {
    if !is_streamed(asked) {
        return listed(&[(name, address)], version, None);
    }
    let mut lines = vec![
        watched("ADDED", name, address, version),
        end_of_list(version),
    ];
    lines.extend(then);
    Reply::Closed(lines)
}

#[tokio::test]
async fn a_server_that_lags_brings_nothing_back_that_is_gone() {
    for is_in_pages in [false, true] {
        let server = Server::start(Script::counting(move |asked, times| {
            if is_in_pages && is_streamed(asked) {
                return status(422, "sendInitialEvents is forbidden for watch");
            }
            if asked.query.contains_key("resourceVersion") && !is_streamed(asked) {
                return match &*asked.query["resourceVersion"] {
                    "700" => Reply::Closed(vec![failed(410, "Expired")]),
                    _ => Reply::Held(Vec::new()),
                };
            }
            let expired = vec![failed(410, "Expired")];
            match times {
                0 | 1 => one_of(asked, "a", "10.0.0.1", 700, expired),
                2..5 => one_of(asked, "gone", "10.0.0.9", 600, Vec::new()),
                _ => one_of(asked, "b", "10.0.0.2", 701, Vec::new()),
            }
        }));
        let mut followed = follow(&[&server]).await;

        followed.until("a=10.0.0.1").await;
        followed
            .until_trouble("version 600, but version 700 was seen")
            .await;
        while followed.words() != "b=10.0.0.2" {
            assert_eq!(followed.words(), "a=10.0.0.1");
            followed.take().await;
        }

        let services = server.asked("/api/v1/services");
        let lists = services
            .iter()
            .filter(|asked| is_streamed(asked) || !is_watch(asked));
        // A request with a version could be served from a cache.
        for asked in lists {
            let version = asked.query.get("resourceVersion");
            assert!(version.is_none_or(String::is_empty), "{asked:?}");
        }
        let server = followed.report.borrow().server.clone();
        assert_eq!(server.and_then(|server| server.error), None);
    }
}

#[tokio::test]
async fn a_server_that_lags_is_left_for_the_next() {
    let behind = Server::start(Script::counting(|asked, times| match times {
        0 => one_of(asked, "a", "10.0.0.1", 700, vec![failed(410, "Expired")]),
        _ => one_of(asked, "gone", "10.0.0.9", 600, Vec::new()),
    }));
    let ahead = Server::start(Script::new(|asked| {
        if is_streamed(asked) {
            return one_of(asked, "b", "10.0.0.2", 701, Vec::new());
        }
        Reply::Held(Vec::new())
    }));
    let mut followed = follow(&[&behind, &ahead]).await;

    followed.until("a=10.0.0.1").await;
    followed.take().await;

    assert_eq!(followed.words(), "b=10.0.0.2");
}

#[tokio::test]
async fn a_server_that_ends_each_watch_at_once_is_asked_no_faster_than_one_that_fails() {
    let server = Server::start(Script::new(|asked| {
        if is_streamed(asked) {
            return Reply::Closed(vec![end_of_list(7)]);
        }
        // Each event has the same version, so none counts as new.
        Reply::Closed(vec![watched("MODIFIED", "a", "10.0.0.1", 6)])
    }));
    let mut followed = follow(&[&server]).await;
    followed.take().await;

    tokio::time::sleep(Duration::from_secs(2)).await;

    // The first backoff is at least 125 ms, each further one at least 150 ms.
    let asked = server.asked("/api/v1/services").len();
    assert!((3..=16).contains(&asked), "{asked}");
}

#[tokio::test]
async fn a_version_that_is_too_old_after_each_list_is_met_with_growing_pauses() {
    let server = Server::start(Script::new(|asked| {
        one_of(asked, "a", "10.0.0.1", 7, vec![failed(410, "Expired")])
    }));
    let mut setup = Setup::of(&[&server]);
    setup.settings.max_backoff = Duration::from_secs(10);
    let mut followed = setup.start().await;
    followed.until("a=10.0.0.1").await;

    tokio::time::sleep(Duration::from_secs(3)).await;

    // The backoffs are at least 125 ms, 250 ms, 500 ms and 1 s.
    let asked = server.asked("/api/v1/services").len();
    assert!((2..=7).contains(&asked), "{asked}");
}

#[tokio::test]
async fn a_server_that_is_silent_is_left_for_the_next() {
    let first = Server::start(Script::counting(|asked, times| match times {
        0 => one_of(asked, "a", "10.0.0.1", 7, Vec::new()),
        1 => status(500, "it is about to freeze"),
        _ => Reply::Silence,
    }));
    let frozen = Server::start(Script::all(|_| Reply::Silence));
    let good = Server::start(Script::new(|asked| {
        if is_streamed(asked) || !is_watch(asked) {
            return one_of(asked, "b", "10.0.0.2", 8, Vec::new());
        }
        Reply::Held(Vec::new())
    }));

    let mut followed = follow_within(A_LITTLE, &[&first, &frozen, &good]).await;

    followed.until("b=10.0.0.2").await;

    followed.stop().await;
}

#[tokio::test]
async fn a_page_that_stops_in_the_middle_is_given_up_and_asked_for_again() {
    let server = Server::start(Script::counting(|asked, times| {
        if is_streamed(asked) {
            return status(422, "sendInitialEvents is forbidden for watch");
        }
        if is_watch(asked) {
            return Reply::Held(Vec::new());
        }
        if times == 1 {
            return Reply::Held(vec![r#"{"apiVersion": "v1", "items": ["#.to_owned()]);
        }
        listed(&[("a", "10.0.0.1")], 7, None)
    }));
    let mut followed = follow_within(A_LITTLE, &[&server]).await;

    followed.until_trouble("sent no data for 500ms").await;
    followed.until("a=10.0.0.1").await;

    // A watch has no such limit.
    tokio::time::sleep(A_LITTLE * 3).await;
    let watches = server.asked("/api/v1/services");
    let watches = watches
        .iter()
        .filter(|asked| is_watch(asked) && !is_streamed(asked));
    assert_eq!(watches.count(), 1);
}

#[tokio::test]
async fn a_watch_that_its_server_has_forgotten_is_opened_anew_where_it_was() {
    let server = Server::start(Script::counting(|asked, times| {
        if is_streamed(asked) {
            return Reply::Held(vec![end_of_list(7)]);
        }
        match times {
            1 => Reply::Held(vec![watched("ADDED", "a", "10.0.0.1", 8)]),
            _ => Reply::Held(vec![watched("ADDED", "b", "10.0.0.2", 9)]),
        }
    }));
    let mut setup = Setup::of(&[&server]);
    setup.limits.overtime = A_LITTLE;
    setup.settings.watch_timeout = Duration::from_secs(1);
    let mut followed = setup.start().await;

    followed.until("a=10.0.0.1 b=10.0.0.2").await;

    let asked = server.asked("/api/v1/services");
    let versions = asked.iter().map(|asked| &*asked.query["resourceVersion"]);
    assert_eq!(versions.take(3).collect::<Vec<_>>(), ["", "7", "8"]);
}

#[tokio::test]
async fn the_longer_of_two_pauses_that_a_server_wants_is_left_and_once_only() {
    let cases = [(2, 2), (1, 2), (2, 0)].map(|(head, body)| async move {
        let server = Server::start(Script::counting(move |asked, times| {
            if times == 0 {
                return too_many_twice(head, body);
            }
            if is_streamed(asked) {
                return Reply::Held(vec![end_of_list(7)]);
            }
            listed(&[], 7, None)
        }));
        let before = Instant::now();
        let mut followed = follow(&[&server]).await;

        followed.take().await;

        let waited = before.elapsed();
        let wanted = Duration::from_secs(2)..Duration::from_millis(3900);
        assert!(wanted.contains(&waited), "{head} {body}: {waited:?}");
    });
    futures_util::future::join_all(cases).await;
}
