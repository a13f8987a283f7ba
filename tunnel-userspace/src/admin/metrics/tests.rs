use std::collections::BTreeSet;

use tokio::sync::watch;
use tunnel_common::addr::Protocol;

use super::*;
use crate::{
    admin::{AgentSetup, TunnelView, fixture},
    identity::{DenyListState, requester::RequestState},
    model::{Family, ObjectName},
    plan::PortName,
    reconcile::{PortCounterList, PortCounters},
    tunnel::AgentView,
};

fn views(stats: ReconcileStats, server: ServerStatus) -> Arc<NodeViews> {
    let source = move || SourceReport {
        server: Some(server.clone()),
        ..SourceReport::default()
    };
    let tunnel = || TunnelView {
        identity: Some(CertificateState::default()),
        deny_list: Some(DenyListState::default()),
        ..TunnelView::default()
    };
    Arc::new(NodeViews {
        source_report: Box::new(source),
        tunnel: Box::new(tunnel),
        kernel_counters: Box::new(|| vec![(Reason::Translated, 7), (Reason::DatagramsMovedV6, 4)]),
        open_connections: Box::new(|| 5),
        port_counts: Box::new(counted),
        health_responses: watch::Sender::new([(("/healthz", 200), 3), (("/livez", 503), 1)].into()),
        ..fixture::views(watch::channel(stats).1)
    })
}

/// Returns the counters of one Service port.
fn counted() -> PortCounterList {
    let name = PortName {
        service: ObjectName::new("shop", "web"),
        port: "http".into(),
        protocol: Protocol::TCP,
        family: Family::V6,
    };
    let port = PortCounters {
        name,
        sent: 11,
        refused: 12,
        open: 13,
    };
    PortCounterList {
        ports: vec![port],
        omitted: 14,
    }
}

fn rendered(stats: ReconcileStats) -> String {
    render(views(stats, ServerStatus::default())).expect("rendered")
}

/// Returns the lines that begin with one of the given names.
fn lines<'a>(page: &'a str, names: &[&str]) -> Vec<&'a str> {
    let is_named = |line: &&str| names.iter().any(|name| line.starts_with(name));
    page.lines().filter(is_named).collect()
}

#[test]
fn an_unreachable_api_server_and_stale_objects_are_reported() {
    let away = ServerStatus {
        error: Some("refused".to_owned()),
        stale: Some("of yesterday".to_owned()),
        ..ServerStatus::default()
    };
    let names = ["culvert_api_server_up", "culvert_source_stale"];
    for (server, values) in [
        (ServerStatus::default(), ["1.0", "0.0"]),
        (away, ["0.0", "1.0"]),
    ] {
        let page = render(views(ReconcileStats::default(), server)).expect("rendered");

        let wanted = [0, 1].map(|i| format!("{} {}", names[i], values[i]));
        assert_eq!(lines(&page, &names), wanted);
    }
}

fn agent() -> String {
    let status = AgentStatus {
        ready: true,
        not_ready: None,
        setup: AgentSetup::default(),
        tunnel: AgentView {
            connections: Vec::new(),
            counts: BTreeMap::from([("target_denied".to_owned(), 3)]),
        },
        identity: CertificateState {
            request: Some(RequestState {
                problem: Some("denied".to_owned()),
                received: 2,
                ..RequestState::default()
            }),
            ..CertificateState::default()
        },
    };
    render_agent(status).expect("rendered")
}

fn controller() -> String {
    let state = ControllerState {
        issued: [("agent", 3)].into(),
        denied: [(("gateway", "subject"), 4)].into(),
        failed: 5,
        waiting: 6,
        ..ControllerState::default()
    };
    render_controller(state, false).expect("rendered")
}

#[test]
fn a_controller_counts_requests_by_role_and_reason() {
    let lines = [
        "culvert_ready 0.0",
        "culvert_certificates_issued_total{role=\"agent\"} 3",
        "culvert_certificates_denied_total{role=\"gateway\",reason=\"subject\"} 4",
        "culvert_certificate_request_failures_total{role=\"all\"} 5",
        "culvert_certificate_requests_waiting 6.0",
    ];
    expect_lines(&controller(), &lines);
}

#[test]
fn an_agent_that_requests_its_certificate_counts_those_that_it_has_received() {
    let lines = [
        "culvert_certificate_request_error 1.0",
        "culvert_certificate_requests_total{result=\"received\"} 2",
    ];
    expect_lines(&agent(), &lines);
}

fn expect_lines(page: &str, lines: &[&str]) {
    for line in lines {
        assert!(page.lines().any(|found| found == *line), "{line}\n{page}");
    }
}

#[test]
fn an_agent_labels_its_counts_by_reason() {
    let line = "culvert_reason_total{reason=\"target_denied\"} 3";
    expect_lines(&agent(), &["culvert_ready 1.0", line]);
}

#[test]
fn reasons_of_the_kernel_and_of_the_daemon_are_in_one_metric() {
    let page = rendered(ReconcileStats {
        counts: BTreeMap::from([("frontends_full".to_owned(), 2)]),
        ..ReconcileStats::default()
    });

    let lines = [
        "culvert_reason_total{reason=\"translated\"} 7",
        "culvert_reason_total{reason=\"frontends_full\"} 2",
        "kubeproxy_proxy_healthz_total{code=\"200\"} 3",
    ];
    expect_lines(&page, &lines);
    assert!(page.ends_with("# EOF\n"), "{page}");
}

#[test]
fn metrics_of_a_service_port_have_its_name_as_labels() {
    let labels = r#"{namespace="shop",service="web",port="http",protocol="TCP",ip_family="IPv6"}"#;
    let page = rendered(ReconcileStats::default()).replace(labels, "");
    let lines = [
        "culvert_service_connections_total 11",
        "culvert_service_refused_total 12",
        "culvert_service_open_connections 13.0",
        "culvert_service_ports_without_metrics 14.0",
    ];
    expect_lines(&page, &lines);
}

#[test]
fn only_finished_steps_of_the_start_have_a_duration() {
    let start = StartTimes {
        load: Some(0.25),
        sync: Some(1.5),
        ..StartTimes::default()
    };
    let views = NodeViews {
        start_times: watch::channel(start).1,
        ..fixture::views(watch::channel(ReconcileStats::default()).1)
    };

    let page = render(Arc::new(views)).expect("rendered");

    assert_eq!(
        lines(&page, &["culvert_startup_duration_seconds"]),
        [
            "culvert_startup_duration_seconds{step=\"load\"} 0.25",
            "culvert_startup_duration_seconds{step=\"sync\"} 1.5"
        ]
    );
}

#[test]
fn the_page_on_metrics_lists_each_metric_and_each_reason_and_no_other() {
    let page = include_str!("../../../../docs/metrics.md");
    let first_cells = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let named: BTreeSet<_> = first_cells
        .filter_map(|rest| rest.split('`').next())
        .collect();
    let text = rendered(ReconcileStats::default()) + &agent() + &controller();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let mut wanted: BTreeSet<String> = types
        .map(|line| match line.split_once(' ') {
            Some((name, "counter")) => format!("{name}_total"),
            Some((name, _)) => name.to_owned(),
            None => line.to_owned(),
        })
        .collect();
    wanted.extend(Reason::ALL.map(|reason| reason.label().to_owned()));

    assert_eq!(named, wanted.iter().map(String::as_str).collect());
}

#[test]
fn metrics_of_kube_proxy_have_its_names_and_labels() {
    let mut stats = ReconcileStats::default();
    stats.sync.endpoint_changes.v6 = 5;
    stats.sync.pending_services = 2;
    stats.sync.no_local_endpoints.v4.external = 3;
    stats.last_complete_sync_at = Some(Timestamp::from_second(1_800_000_000).expect("a time"));

    let page = rendered(stats);

    let lines = [
        "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.001\",ip_family=\"IPv4\"} 0",
        "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"+Inf\",ip_family=\"IPv6\"} 0",
        "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv6\"} 0",
        "kubeproxy_sync_proxy_rules_endpoint_changes_total{ip_family=\"IPv4\"} 0",
        "kubeproxy_sync_proxy_rules_endpoint_changes_total{ip_family=\"IPv6\"} 5",
        "kubeproxy_sync_proxy_rules_service_changes_pending{ip_family=\"IPv4\"} 2.0",
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"external\"} 3.0",
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv6\",traffic_policy=\"internal\"} 0.0",
        "kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv6\"} 1800000000.0",
        "kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family=\"IPv4\"} 0",
        "kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family=\"IPv6\"} 4",
    ];
    expect_lines(&page, &lines);
}
