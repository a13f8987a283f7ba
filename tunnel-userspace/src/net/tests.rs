use std::{convert::Infallible, sync::mpsc};

use tokio::time::timeout;

use super::{snapshot::Snapshot, uplinks::ClassifiedLinks, *};

/// A guard on one link, which reports its calls.
struct ReportingGuard(mpsc::Sender<&'static str>);

impl UplinkGuard for ReportingGuard {
    type Error = Infallible;

    fn guard_uplinks(
        &mut self,
        _uplinks: &BTreeMap<u32, String>,
        _reattach: bool,
    ) -> Result<(), Infallible> {
        self.0.send("guard").expect("received");
        Ok(())
    }

    fn guarded_links(&self) -> BTreeSet<u32> {
        BTreeSet::from([2])
    }

    fn set_steering(&mut self, families: [bool; 2]) -> Result<(), Infallible> {
        assert_eq!(families, [false; 2]);
        self.0.send("disable").expect("received");
        Ok(())
    }

    fn remove_unused(&mut self, _uplinks: &BTreeMap<u32, String>) -> Result<(), Infallible> {
        self.0.send("remove").expect("received");
        Ok(())
    }
}

#[tokio::test]
async fn steering_is_disabled_before_what_an_earlier_process_left_is_removed() {
    let state = tempfile::tempdir().expect("a directory");
    let (calls, made) = mpsc::channel();

    let cleared = NetworkSetup::clear(ReportingGuard(calls), &record_path(state.path())).await;

    cleared.expect("cleared");
    assert_eq!(made.iter().collect::<Vec<_>>(), ["disable", "remove"]);
}

#[tokio::test(start_paused = true)]
async fn links_are_classified_once_the_follower_knows_the_node_or_fails() {
    let own_node = OwnNode {
        pod_cidrs: vec![([10, 244, 1, 0].into(), 24)],
        internal_ips: vec![[192, 0, 2, 9].into()],
    };
    let unclassified = NetworkState {
        snapshot: Arc::new(Snapshot::of(&[], &[], Vec::new())),
        links: Arc::new(ClassifiedLinks::default()),
        pod_ranges: PodRanges::default(),
        internal_ips: Vec::new(),
        problem: None,
    };
    let mut classified = unclassified.clone();
    classified.pod_ranges.of_node = pod_ranges_of(&own_node);
    let without_addresses = classified.clone();
    classified.internal_ips.clone_from(&own_node.internal_ips);
    let mut failed = unclassified.clone();
    failed.problem = Some("not read".to_owned());

    for (first, last) in [
        (&unclassified, &classified),
        (&without_addresses, &classified),
        (&unclassified, &failed),
    ] {
        let sender = watch::Sender::new(first.clone());
        let mut network = sender.subscribe();
        let waiting = wait_until_classified(&mut network, &own_node);
        let early = timeout(CHECK_INTERVAL, waiting).await;
        early.expect_err("the Node object is not known yet");

        sender.send_replace(last.clone());
        let waiting = wait_until_classified(&mut network, &own_node);
        timeout(CHECK_INTERVAL, waiting).await.expect("classified");
    }
}
