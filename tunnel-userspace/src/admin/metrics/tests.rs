use std::collections::BTreeSet;

use tokio::sync::watch;
use tunnel_common::addr::Protocol;

use super::*;
use crate::{
    admin::{AgentSetup, StartTimes, TunnelViews, fixture},
    model::{Family, ObjectName},
    plan::PortName,
    reconcile::PortCounts,
};

fn views(stats: Stats, server: Server) -> Arc<Views> {
    let source = move || Report {
        server: Some(server.clone()),
        ..Report::default()
    };
    let tunnel = TunnelViews {
        identity: Box::new(|| Some(State::default())),
        ..TunnelViews::default()
    };
    Arc::new(Views {
        source: Box::new(source),
        tunnel,
        counters: Box::new(|| Ok(vec![(Reason::Translated, 7)])),
        connections: Box::new(|| 5),
        ..fixture::views(watch::channel(stats).1)
    })
}

/// What was counted of one service port.
fn counted() -> Counted {
    let name = PortName {
        service: ObjectName::new("shop", "web"),
        port: "http".into(),
        protocol: Protocol::TCP,
        family: Family::V6,
    };
    let port = PortCounts {
        name,
        sent: 11,
        refused: 12,
        open: 13,
    };
    Counted {
        ports: vec![port],
        left_out: 14,
    }
}

fn rendered(stats: Stats) -> String {
    let answers = Answers::from([(("/healthz", 200), 3), (("/livez", 503), 1)]);
    render(&views(stats, Server::default()), answers, counted()).expect("rendered")
}

#[test]
fn an_api_server_that_is_away_shows_and_so_does_what_is_served_meanwhile() {
    let said = |server: Server| {
        let page =
            render(&views(Stats::default(), server), Answers::new(), counted()).expect("rendered");
        let lines = page.lines().map(str::to_owned);
        let ours = |line: &String| {
            line.starts_with("culvert_api_server_up") || line.starts_with("culvert_source_stale")
        };
        lines.filter(ours).collect::<Vec<_>>()
    };
    let away = Server {
        trouble: Some("refused".to_owned()),
        stale: Some("of yesterday".to_owned()),
        ..Server::default()
    };

    assert_eq!(
        said(Server::default()),
        ["culvert_api_server_up 1.0", "culvert_source_stale 0.0"]
    );
    assert_eq!(
        said(away),
        ["culvert_api_server_up 0.0", "culvert_source_stale 1.0"]
    );
}

fn agent() -> String {
    let status = AgentStatus {
        ready: true,
        not_ready: None,
        setup: AgentSetup {
            version: String::new(),
            pid: 1,
            started: String::new(),
            allow: Vec::new(),
        },
        tunnel: AgentView {
            connections: Vec::new(),
            counts: BTreeMap::from([("target_denied".to_owned(), 3)]),
        },
        identity: State::default(),
    };
    render_agent(&status).expect("rendered")
}

fn expect_lines(page: &str, lines: &[&str]) {
    for line in lines {
        assert!(page.lines().any(|found| found == *line), "{line}\n{page}");
    }
}

#[test]
fn an_agent_counts_by_the_same_words() {
    let words = "culvert_reason_total{reason=\"target_denied\"} 3";
    expect_lines(&agent(), &["culvert_ready 1.0", words]);
}

#[test]
fn counters_of_the_kernel_and_of_the_daemon_stand_in_one_metric() {
    let page = rendered(Stats {
        counts: BTreeMap::from([("fronts_full".to_owned(), 2)]),
        ..Stats::default()
    });

    let lines = [
        "culvert_reason_total{reason=\"translated\"} 7",
        "culvert_reason_total{reason=\"fronts_full\"} 2",
        "kubeproxy_proxy_healthz_total{code=\"200\"} 3",
    ];
    expect_lines(&page, &lines);
    assert!(page.ends_with("# EOF\n"), "{page}");
}

#[test]
fn what_was_counted_of_a_service_port_has_its_name() {
    let labels = r#"{namespace="shop",service="web",port="http",protocol="TCP",ip_family="IPv6"}"#;
    let lines = [
        format!("culvert_service_sent_total{labels} 11"),
        format!("culvert_service_refused_total{labels} 12"),
        format!("culvert_service_open_connections{labels} 13.0"),
        "culvert_service_ports_left_out 14.0".to_owned(),
    ];
    let lines = lines.each_ref().map(String::as_str);
    expect_lines(&rendered(Stats::default()), &lines);
}

#[test]
fn only_steps_of_the_start_that_are_done_have_a_time() {
    let start = StartTimes {
        load: Some(0.25),
        read: Some(1.5),
        ..StartTimes::default()
    };
    let views = Views {
        start: watch::channel(start).1,
        ..fixture::views(watch::channel(Stats::default()).1)
    };

    let page = render(&Arc::new(views), Answers::new(), Counted::default()).expect("rendered");

    let lines = page.lines();
    let ours: Vec<_> = lines
        .filter(|line| line.starts_with("culvert_start_seconds"))
        .collect();
    assert_eq!(
        ours,
        [
            "culvert_start_seconds{step=\"load\"} 0.25",
            "culvert_start_seconds{step=\"read\"} 1.5"
        ]
    );
}

#[test]
fn the_page_on_metrics_names_each_metric_and_each_reason_and_no_other() {
    let page = include_str!("../../../../docs/metrics.md");
    let first_cells = page.lines().filter_map(|line| line.strip_prefix("| `"));
    let named: BTreeSet<_> = first_cells
        .filter_map(|rest| rest.split('`').next())
        .collect();
    let text = rendered(Stats::default()) + &agent();
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
fn what_kube_proxy_measures_too_has_its_names_and_labels() {
    let mut stats = Stats::default();
    stats.sync.endpoint_changes.v6 = 5;
    stats.sync.pending_services = 2;
    stats.sync.gaps.v4.external = 3;
    stats.last_whole_pass_at = Some(Timestamp::from_second(1_800_000_000).expect("a time"));

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
    ];
    expect_lines(&page, &lines);
}
