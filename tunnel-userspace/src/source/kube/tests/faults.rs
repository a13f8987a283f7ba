//! Servers that do what they shouldn't.

use super::{
    server::{end_of_list, listed, too_many_twice},
    *,
};

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
    }))
    .await;
    let mut followed = Followed::within(A_LITTLE, &[&server]).await;

    followed.until_trouble("was silent for 500ms").await;
    followed.until("a=10.0.0.1").await;

    // A watch may be silent.
    tokio::time::sleep(A_LITTLE * 3).await;
    let watches = server.asked("/api/v1/services");
    let watches = watches
        .iter()
        .filter(|asked| is_watch(asked) && !is_streamed(asked));
    assert_eq!(watches.count(), 1);
    followed.stop().await;
}

#[tokio::test]
async fn the_longer_of_two_pauses_that_a_server_wants_is_left_once() {
    for (head, body) in [(2, 1), (1, 2), (2, 0)] {
        let server = Server::start(Script::counting(move |asked, times| {
            if times == 0 {
                return too_many_twice(head, body);
            }
            if is_streamed(asked) {
                return Reply::Held(vec![end_of_list(7)]);
            }
            listed(&[], 7, None)
        }))
        .await;
        let before = Instant::now();
        let mut followed = Followed::of(&[&server]).await;

        followed.take().await;

        let waited = before.elapsed();
        let wanted = Duration::from_secs(2)..Duration::from_millis(2900);
        assert!(wanted.contains(&waited), "{head} {body}: {waited:?}");
        followed.stop().await;
    }
}
