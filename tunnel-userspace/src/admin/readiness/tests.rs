use std::collections::BTreeMap;

use jiff::Timestamp;

use super::*;
use crate::{
    admin::fixture::{self, ready_stats},
    reconcile::ReconcileStats,
    source::{ServerStatus, SourceReport},
};

/// Returns the statistics of a daemon that still uses the last snapshot of the API server's objects.
fn stale() -> ReconcileStats {
    ReconcileStats {
        stale: true,
        ..ready_stats()
    }
}

fn server(error: Option<&str>, stale: Option<&str>) -> ServerStatus {
    ServerStatus {
        error: error.map(str::to_owned),
        stale: stale.map(str::to_owned),
        ..ServerStatus::default()
    }
}

fn reasons(
    starting: Option<&str>,
    stats: &ReconcileStats,
    server: Option<&ServerStatus>,
) -> Vec<String> {
    let report = SourceReport {
        server: server.cloned(),
        ..SourceReport::default()
    };
    let views = NodeViews {
        starting: watch::channel(starting.map(str::to_owned)).1,
        ..views(stats.clone(), report)
    };
    Readiness::of(&views).reasons
}

#[test]
fn a_node_is_ready_when_the_objects_of_the_sources_are_in_the_maps() {
    let failing = ReconcileStats {
        failing_since: Some(Timestamp::UNIX_EPOCH),
        ..ready_stats()
    };
    let is_ready = |starting, stats: &ReconcileStats| reasons(starting, stats, None).is_empty();

    assert!(is_ready(None, &ready_stats()));
    assert!(!is_ready(Some("waiting"), &ready_stats()));
    assert!(!is_ready(None, &ReconcileStats::default()));
    assert!(!is_ready(None, &failing));
}

#[test]
fn a_stale_node_is_ready_once_the_response_of_the_api_server_is_in_the_maps() {
    let before = reasons(None, &stale(), Some(&server(None, Some("of yesterday"))));
    let meanwhile = reasons(None, &stale(), Some(&server(None, None)));
    let after = reasons(None, &ready_stats(), Some(&server(None, None)));

    assert_eq!(
        before,
        ["no response from the API server since the start: of yesterday"]
    );
    assert_eq!(
        meanwhile,
        ["the first response of the API server is being written"]
    );
    assert_eq!(after, [] as [String; 0]);
}

#[test]
fn an_error_of_the_api_server_is_a_reason_until_its_objects_are_in_the_maps() {
    let refusing = server(Some("Service: Forbidden"), Some("nothing is known yet"));
    let refused = "requests to the API server fail: Service: Forbidden";
    let starting = Some("waiting for the sources");
    assert_eq!(
        reasons(starting, &ReconcileStats::default(), Some(&refusing)),
        ["waiting for the sources", refused]
    );
    assert_eq!(
        reasons(None, &stale(), Some(&refusing)),
        [
            "no response from the API server since the start: nothing is known yet",
            refused
        ]
    );
    // The API server's objects are already in the maps.
    assert_eq!(
        reasons(None, &ready_stats(), Some(&refusing)),
        [] as [String; 0]
    );
}

#[test]
fn each_full_map_is_a_reason_with_a_count() {
    let problems = [
        (Reason::FrontendsFull, 2),
        (Reason::BackendsFull, 1),
        (Reason::FrontendConflict, 5),
        (Reason::NamespaceShareExceeded, 7),
        (Reason::SlotsReduced, 1),
    ];
    let problems = problems.map(|(reason, count)| (reason.label().to_owned(), count));
    let full = ReconcileStats {
        problems: problems.into(),
        ..ready_stats()
    };
    let mut unsteered = ready_stats();
    unsteered.steering.unprogrammed = 3;
    let mut failing = ready_stats();
    failing.steering.failing = true;
    let mut ready = full.clone();
    ready.problems.retain(|reason, _| {
        ![Reason::FrontendsFull.label(), Reason::BackendsFull.label()].contains(&&**reason)
    });
    assert_eq!(ready.problems.len(), 3);

    assert_eq!(
        reasons(None, &full, None),
        [
            "2 service ports not programmed as planned: bpf.maps.frontends is used up",
            "1 service ports not programmed as planned: bpf.maps.backends is used up",
        ]
    );
    assert_eq!(
        reasons(None, &unsteered, None),
        ["3 ports of nodes not steered: bpf.maps.steering or a steering prefix is used up"]
    );
    assert_eq!(reasons(None, &failing, None).len(), 1);
    assert_eq!(reasons(None, &ready, None), [] as [String; 0]);
}

/// Returns the views of a daemon with the given statistics and source report.
fn views(stats: ReconcileStats, report: SourceReport) -> NodeViews {
    NodeViews {
        source_report: Box::new(move || report.clone()),
        ..fixture::views(watch::channel(stats).1)
    }
}

#[test]
fn a_port_in_use_is_a_reason() {
    let views = views(ready_stats(), SourceReport::default());
    let name = "admin 127.0.0.1:10249".to_owned();
    views.unbound_ports.send_modify(|listening| {
        listening.insert(name, "Address in use".to_owned());
    });

    assert_eq!(
        Readiness::of(&views).summary().as_deref(),
        Some("cannot listen on admin 127.0.0.1:10249: Address in use")
    );
}

#[test]
fn a_missing_node_object_is_reported_once_the_sources_have_synced() {
    let unknown = ReconcileStats {
        node_known: false,
        ..ready_stats()
    };
    let api = SourceReport {
        server: Some(ServerStatus::default()),
        ..SourceReport::default()
    };
    let files = |nodes| SourceReport {
        objects: BTreeMap::from([(crate::model::Kind::Node, nodes)]),
        ..SourceReport::default()
    };
    let is_reported = |stats: &ReconcileStats, report: &SourceReport| {
        missing_node(&views(stats.clone(), report.clone())).is_some()
    };

    assert!(is_reported(&unknown, &api));
    assert!(is_reported(&unknown, &files(1)));
    // Manifest files need not contain Nodes.
    assert!(!is_reported(&unknown, &files(0)));
    assert!(!is_reported(&ready_stats(), &api));
    let stale = ReconcileStats {
        stale: true,
        ..unknown
    };
    assert!(!is_reported(&stale, &api));
    assert!(!is_reported(&ReconcileStats::default(), &api));
}
