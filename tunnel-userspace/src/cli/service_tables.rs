//! Renders the output of `culvert services` and `culvert backends` as tables.

use std::fmt;

use super::{
    rows::Row,
    table::{self, or_dash},
};
use crate::reconcile::{EndpointView, FrontendView, PortView, ServiceView};

/// The maximum number of frontends or backends listed in one cell.
const MAX_NAMES: usize = 3;

/// The text that marks a frontend as not translated at sockets because a local process listens on its
/// address.
const LOCAL_LISTENER: &str = "not translated: local listener";

/// The status shown for a Service that has no ports.
const NO_PORT: &str = "no port is programmed";

/// Renders one row for each port of each Service.
pub(super) fn render(services: &[ServiceView]) -> String {
    let mut rows = Vec::new();
    for service in services {
        let mut ports: Vec<_> = service.ports.iter().map(port_row).collect();
        if ports.is_empty() {
            ports.push(["", "", "", NO_PORT].map(str::to_owned).to_vec());
        }
        rows.extend(table::with_name_column(full_name(service), ports));
    }
    table::render(&COLUMNS, &rows)
}

pub(super) const COLUMNS: [&str; 5] = ["SERVICE", "FRONTEND", "ALGORITHM", "BACKENDS", "STATUS"];

fn port_row(port: &PortView) -> Vec<String> {
    let fronts: Vec<_> = port
        .frontends
        .iter()
        .map(|front| &*front.frontend)
        .collect();
    let backends: Vec<_> = port.backends.iter().map(String::as_str).collect();
    vec![
        abbreviate(&fronts),
        port.algorithm.clone(),
        abbreviate(&backends),
        status(port),
    ]
}

/// Renders the full details of each Service.
pub(super) fn render_details(services: &[ServiceView]) -> String {
    let mut blocks = Vec::new();
    for service in services {
        let name = full_name(service);
        if service.ports.is_empty() {
            blocks.push(format!("{name}: {NO_PORT}"));
        }
        blocks.extend(service.ports.iter().map(|port| port_details(&name, port)));
    }
    blocks.join("\n\n")
}

fn port_details(name: &str, port: &PortView) -> String {
    let mut lines = vec![
        format!("{name}  {}", port_name(port)),
        detail(Row::Algorithm, &port.algorithm),
    ];
    if port.affinity_seconds > 0 {
        let timeout = format!("{} s", port.affinity_seconds);
        lines.push(detail(Row::SessionAffinity, timeout));
    }
    if port.socket_translation_disabled {
        lines.push(detail(
            Row::Sockets,
            "not translated: disabled by annotation",
        ));
    }
    if !port.source_ranges.is_empty() {
        lines.push(detail(Row::SourceRanges, port.source_ranges.join(", ")));
    }
    lines.push(detail(Row::Status, status(port)));
    lines.push(detail(Row::Connections, port.connections));
    lines.push(detail(Row::Refused, port.refused));
    let fronts: Vec<_> = port.frontends.iter().map(frontend_row).collect();
    let endpoints: Vec<_> = port.endpoints.iter().map(endpoint_row).collect();
    [
        lines.join("\n"),
        table::render(&FRONTEND_COLUMNS, &fronts),
        table::render(&ENDPOINT_COLUMNS, &endpoints),
    ]
    .join("\n\n")
}

fn detail(row: Row, value: impl fmt::Display) -> String {
    format!("{:<19}{value}", row.label())
}

pub(super) const FRONTEND_COLUMNS: [&str; 4] = ["FRONTEND", "TYPE", "SOCKETS", "PACKETS"];

fn frontend_row(front: &FrontendView) -> Vec<String> {
    let sockets = match front.ignored_listener_user {
        _ if front.local_listener => LOCAL_LISTENER.to_owned(),
        Some(user) => format!("{}; listener of user {user} ignored", front.sockets),
        None => front.sockets.clone(),
    };
    vec![
        front.frontend.clone(),
        front.kind.clone(),
        sockets,
        front.packets.clone(),
    ]
}

pub(super) const ENDPOINT_COLUMNS: [&str; 8] = [
    "ENDPOINT",
    "POD",
    "NODE",
    "ZONE",
    "SETS",
    "WEIGHT",
    "CONNECTIONS",
    "STATUS",
];

fn endpoint_row(endpoint: &EndpointView) -> Vec<String> {
    let sets = (!endpoint.sets.is_empty()).then(|| endpoint.sets.join(", "));
    vec![
        endpoint.endpoint.clone(),
        or_dash(endpoint.pod.as_ref()),
        or_dash(endpoint.node.as_ref()),
        or_dash(endpoint.zone.as_ref()),
        or_dash(sets),
        endpoint.weight.to_string(),
        or_dash(endpoint.open_connections),
        endpoint.status.clone(),
    ]
}

/// Returns a row for the endpoints that the list omits, if there are any.
fn omitted_row(port: &PortView) -> Option<Vec<String>> {
    let omitted = port.omitted_endpoints;
    (omitted > 0).then(|| {
        let mut row = vec!["-".to_owned(); ENDPOINT_COLUMNS.len()];
        if let [first, .., last] = &mut *row {
            *first = format!("{omitted} more");
            "not programmed".clone_into(last);
        }
        row
    })
}

/// Renders one row for each endpoint of each Service port.
pub(super) fn render_backends(services: &[ServiceView]) -> String {
    let mut rows = Vec::new();
    for service in services {
        let ports = service.ports.iter().flat_map(|port| {
            let endpoints = port.endpoints.iter().map(endpoint_row);
            let endpoints = endpoints.chain(omitted_row(port));
            table::with_name_column(port_name(port), endpoints)
        });
        rows.extend(table::with_name_column(full_name(service), ports));
    }
    let head = [&BACKEND_COLUMNS, &ENDPOINT_COLUMNS[..]].concat();
    table::render(&head, &rows)
}

/// The columns of `culvert backends` that come before the endpoint columns.
pub(super) const BACKEND_COLUMNS: [&str; 2] = ["SERVICE", "PORT"];

fn full_name(service: &ServiceView) -> String {
    format!("{}/{}", service.namespace, service.name)
}

fn port_name(port: &PortView) -> String {
    let mut parts = vec![&*port.port, &port.protocol, &port.family];
    parts.retain(|part| !part.is_empty());
    parts.join(" ")
}

/// Joins the first few names, and appends how many more there are.
fn abbreviate(names: &[&str]) -> String {
    match names.split_at_checked(MAX_NAMES) {
        None | Some((_, [])) => or_dash((!names.is_empty()).then(|| names.join(" "))),
        Some((first, more)) => format!("{} and {} more", first.join(" "), more.len()),
    }
}

fn status(port: &PortView) -> String {
    if let Some(problem) = &port.problem {
        return format!("error: {problem}");
    }
    if port.frontends.is_empty() {
        return "not programmed yet".to_owned();
    }
    let mut status = match (port.backends.is_empty(), port.draining.len()) {
        (true, _) if port.has_endpoints => {
            "no backend for this node: connects fail as unreachable".to_owned()
        }
        (true, _) => "no backend: connects are refused".to_owned(),
        (false, 0) => "programmed".to_owned(),
        (false, draining) => format!("programmed, {draining} draining"),
    };
    if port.frontends.iter().any(|front| front.local_listener) {
        status.push_str("; sockets ");
        status.push_str(LOCAL_LISTENER);
    }
    let mut ignored = port
        .frontends
        .iter()
        .filter_map(|it| it.ignored_listener_user);
    if let Some(user) = ignored.next() {
        status.push_str(&format!("; local listener of user {user} ignored"));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn front(front: &str, kind: &str, packets: &str) -> FrontendView {
        FrontendView {
            frontend: front.to_owned(),
            kind: kind.to_owned(),
            sockets: "Cluster".to_owned(),
            packets: packets.to_owned(),
            local_listener: false,
            ignored_listener_user: None,
        }
    }

    fn endpoint(endpoint: &str, pod: Option<&str>, sets: &[&str], status: &str) -> EndpointView {
        EndpointView {
            endpoint: endpoint.to_owned(),
            pod: pod.map(str::to_owned),
            node: pod.map(|_| "node-a".to_owned()),
            zone: None,
            condition: "ready".to_owned(),
            sets: sets.iter().map(|set| (*set).to_owned()).collect(),
            weight: 1,
            programmed: pod.is_some(),
            open_connections: pod.map(|_| 12),
            status: status.to_owned(),
        }
    }

    fn service() -> ServiceView {
        ServiceView {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            ports: vec![PortView {
                port: "http".to_owned(),
                protocol: "TCP".to_owned(),
                family: "IPv4".to_owned(),
                algorithm: "random".to_owned(),
                affinity_seconds: 30,
                socket_translation_disabled: false,
                source_ranges: vec!["10.0.0.0-10.0.0.255".to_owned()],
                connections: 40,
                refused: 2,
                frontends: vec![
                    front("10.96.0.1:80/TCP", "ClusterIP", "Cluster"),
                    front("192.0.2.1:30080/TCP", "NodePort", "Local"),
                ],
                backends: vec!["10.1.0.1:80".to_owned()],
                draining: vec![],
                has_endpoints: true,
                endpoints: vec![
                    endpoint(
                        "10.1.0.1:80",
                        Some("web-0"),
                        &["cluster", "local"],
                        "active",
                    ),
                    endpoint("10.1.0.2:80", None, &[], "inactive"),
                ],
                omitted_endpoints: 0,
                reason: None,
                problem: None,
            }],
        }
    }

    #[test]
    fn a_single_service_is_shown_with_its_frontends_and_endpoints() {
        let expected = "\
shop/web  http TCP IPv4
algorithm          random
session affinity   30 s
source ranges      10.0.0.0-10.0.0.255
status             programmed
connections        40
refused            2

FRONTEND              TYPE        SOCKETS   PACKETS
10.96.0.1:80/TCP      ClusterIP   Cluster   Cluster
192.0.2.1:30080/TCP   NodePort    Cluster   Local

ENDPOINT      POD     NODE     ZONE   SETS             WEIGHT   CONNECTIONS   STATUS
10.1.0.1:80   web-0   node-a   -      cluster, local   1        12            active
10.1.0.2:80   -       -        -      -                1        -             inactive";

        assert_eq!(render_details(&[service()]), expected);
    }

    #[test]
    fn a_frontend_with_a_local_listener_is_marked() {
        let mut service = service();
        service.ports[0].frontends[0].local_listener = true;

        let shown = render_details(&[service.clone()]);
        service.ports[0].backends.clear();
        service.ports[0].has_endpoints = false;
        let without_backends = render_details(&[service]);

        let status = "\nstatus             programmed; sockets not translated: local listener\n";
        let front = "ClusterIP   not translated: local listener   Cluster\n";
        assert!(shown.contains(status) && shown.contains(front), "{shown}");
        let status = "refused; sockets not translated: local listener\n";
        assert!(without_backends.contains(status), "{without_backends}");
    }

    #[test]
    fn the_user_of_an_ignored_listener_is_shown() {
        let mut service = service();
        service.ports[0].frontends[0].ignored_listener_user = Some(1000);

        let shown = render_details(&[service]);

        let status = "\nstatus             programmed; local listener of user 1000 ignored\n";
        let front = "ClusterIP   Cluster; listener of user 1000 ignored   Cluster\n";
        assert!(shown.contains(status) && shown.contains(front), "{shown}");
    }

    #[test]
    fn a_service_without_a_backend_shows_the_error_that_connects_get() {
        let mut service = service();
        service.ports[0].backends.clear();
        let elsewhere = render(&[service.clone()]);
        service.ports[0].has_endpoints = false;
        let nowhere = render(&[service]);

        let status = "no backend for this node: connects fail as unreachable";
        assert!(elsewhere.contains(status), "{elsewhere}");
        let status = "no backend: connects are refused";
        assert!(nowhere.contains(status), "{nowhere}");
    }

    #[test]
    fn each_backend_has_a_row() {
        let expected = "\
SERVICE    PORT            ENDPOINT      POD     NODE     ZONE   SETS             WEIGHT   CONNECTIONS   STATUS
shop/web   http TCP IPv4   10.1.0.1:80   web-0   node-a   -      cluster, local   1        12            active
                           10.1.0.2:80   -       -        -      -                1        -             inactive";

        assert_eq!(render_backends(&[service()]), expected);
    }

    #[test]
    fn endpoints_that_are_not_listed_are_counted() {
        let mut service = service();
        service.ports[0].omitted_endpoints = 160;

        let shown = render_backends(&[service]);

        let last = shown.lines().last().expect("a row");
        let words: Vec<_> = last.split_whitespace().collect();
        assert_eq!(words[..2], ["160", "more"], "{shown}");
        assert!(last.ends_with("not programmed"), "{shown}");
    }

    #[test]
    fn a_long_list_is_abbreviated() {
        assert_eq!(abbreviate(&["1", "2", "3", "4", "5"]), "1 2 3 and 2 more");
        assert_eq!(abbreviate(&["1", "2", "3"]), "1 2 3");
        assert_eq!(abbreviate(&["1"]), "1");
        assert_eq!(abbreviate(&[]), "-");
    }
}
