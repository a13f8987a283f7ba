use super::table::{self, or_dash};
use crate::reconcile::{EndpointView, FrontView, PortView, ServiceView};

/// The number of backends, and of frontends, that a line names.
const NAMED: usize = 3;

/// The note at a frontend that sockets leave alone.
const LEFT_ALONE: &str = "left alone: this node listens there itself";

/// The note at a Service without ports.
const NO_PORT: &str = "no port is translated at sockets";

/// Renders a line for each port of each Service.
pub(super) fn render(services: &[ServiceView]) -> String {
    let mut rows = Vec::new();
    for service in services {
        let mut ports: Vec<_> = service.ports.iter().map(line).collect();
        if ports.is_empty() {
            ports.push(["", "", "", NO_PORT].map(str::to_owned).to_vec());
        }
        rows.extend(table::named(full_name(service), ports));
    }
    table::render(&["SERVICE", "FRONT", "CHOICE", "BACKENDS", "STATE"], &rows)
}

fn line(port: &PortView) -> Vec<String> {
    let fronts: Vec<_> = port.fronts.iter().map(|front| &*front.front).collect();
    let backends: Vec<_> = port.backends.iter().map(String::as_str).collect();
    vec![
        some(&fronts),
        port.algorithm.clone(),
        some(&backends),
        state(port),
    ]
}

/// Renders all details of each Service.
pub(super) fn render_each(services: &[ServiceView]) -> String {
    let mut blocks = Vec::new();
    for service in services {
        let name = full_name(service);
        if service.ports.is_empty() {
            blocks.push(format!("{name}: {NO_PORT}"));
        }
        blocks.extend(service.ports.iter().map(|port| block(&name, port)));
    }
    blocks.join("\n\n")
}

fn block(name: &str, port: &PortView) -> String {
    let mut choice = port.algorithm.clone();
    if port.affinity_seconds > 0 {
        let kept = port.affinity_seconds;
        choice.push_str(&format!("; a client keeps its backend for {kept} s"));
    }
    let mut lines = vec![
        format!("{name}  {}", port_name(port)),
        format!("choice     {choice}"),
    ];
    if port.not_for_sockets {
        lines.push("sockets    leave it alone, as its annotation says".to_owned());
    }
    if !port.sources.is_empty() {
        let only = port.sources.join(", ");
        lines.push(format!("sources    of the load balancer: only {only}"));
    }
    lines.push(format!("state      {}", state(port)));
    let (sent, refused) = (port.sent, port.refused);
    lines.push(format!("counted    {sent} sent on, {refused} refused"));
    let fronts: Vec<_> = port.fronts.iter().map(front).collect();
    let endpoints: Vec<_> = port.endpoints.iter().map(endpoint).collect();
    [
        lines.join("\n"),
        table::render(&["FRONT", "KIND", "SOCKETS", "PACKETS"], &fronts),
        table::render(&ENDPOINT, &endpoints),
    ]
    .join("\n\n")
}

fn front(front: &FrontView) -> Vec<String> {
    let sockets = if front.has_listener {
        LEFT_ALONE.to_owned()
    } else {
        front.sockets.clone()
    };
    vec![
        front.front.clone(),
        front.kind.clone(),
        sockets,
        front.packets.clone(),
    ]
}

const ENDPOINT: [&str; 8] = [
    "ENDPOINT", "POD", "NODE", "ZONE", "SETS", "WEIGHT", "OPEN", "STATE",
];

fn endpoint(endpoint: &EndpointView) -> Vec<String> {
    let sets = (!endpoint.sets.is_empty()).then(|| endpoint.sets.join(", "));
    vec![
        endpoint.endpoint.clone(),
        or_dash(endpoint.pod.as_ref()),
        or_dash(endpoint.node.as_ref()),
        or_dash(endpoint.zone.as_ref()),
        or_dash(sets),
        endpoint.weight.to_string(),
        or_dash(endpoint.open),
        endpoint.why.clone(),
    ]
}

/// Renders a line for each endpoint of each port of each Service.
pub(super) fn render_backends(services: &[ServiceView]) -> String {
    let mut rows = Vec::new();
    for service in services {
        let ports = service.ports.iter().flat_map(|port| {
            let endpoints = port.endpoints.iter().map(endpoint);
            table::named(port_name(port), endpoints)
        });
        rows.extend(table::named(full_name(service), ports));
    }
    let head = [&["SERVICE", "PORT"], &ENDPOINT[..]].concat();
    table::render(&head, &rows)
}

fn full_name(service: &ServiceView) -> String {
    format!("{}/{}", service.namespace, service.name)
}

fn port_name(port: &PortView) -> String {
    let mut words = vec![&*port.port, &port.protocol, &port.family];
    words.retain(|word| !word.is_empty());
    words.join(" ")
}

/// Returns the first few names, and the number of the others.
fn some(names: &[&str]) -> String {
    match names.split_at_checked(NAMED) {
        None | Some((_, [])) => or_dash((!names.is_empty()).then(|| names.join(" "))),
        Some((shown, more)) => format!("{} and {} more", shown.join(" "), more.len()),
    }
}

fn state(port: &PortView) -> String {
    if let Some(problem) = &port.problem {
        return format!("refused: {problem}");
    }
    if port.fronts.is_empty() {
        return "not programmed yet".to_owned();
    }
    let mut state = match (port.backends.is_empty(), port.leaving.len()) {
        (true, _) if port.has_endpoints => {
            "no backend for this node: connects find no way".to_owned()
        }
        (true, _) => "no backend: connects are refused".to_owned(),
        (false, 0) => "programmed".to_owned(),
        (false, leaving) => format!("programmed, {leaving} leaving"),
    };
    if port.fronts.iter().any(|front| front.has_listener) {
        state.push_str("; sockets ");
        state.push_str(LEFT_ALONE);
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    fn front(front: &str, kind: &str, packets: &str) -> FrontView {
        FrontView {
            front: front.to_owned(),
            kind: kind.to_owned(),
            sockets: "Cluster".to_owned(),
            packets: packets.to_owned(),
            has_listener: false,
        }
    }

    fn endpoint(endpoint: &str, pod: Option<&str>, sets: &[&str], why: &str) -> EndpointView {
        EndpointView {
            endpoint: endpoint.to_owned(),
            pod: pod.map(str::to_owned),
            node: pod.map(|_| "node-a".to_owned()),
            zone: None,
            category: "ready".to_owned(),
            sets: sets.iter().map(|set| (*set).to_owned()).collect(),
            weight: 1,
            programmed: pod.is_some(),
            open: pod.map(|_| 12),
            why: why.to_owned(),
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
                not_for_sockets: false,
                sources: vec!["10.0.0.0-10.0.0.255".to_owned()],
                sent: 40,
                refused: 2,
                fronts: vec![
                    front("10.96.0.1:80/TCP", "cluster IP", "Cluster"),
                    front("192.0.2.1:30080/TCP", "node port", "Local"),
                ],
                backends: vec!["10.1.0.1:80".to_owned()],
                leaving: vec![],
                has_endpoints: true,
                endpoints: vec![
                    endpoint("10.1.0.1:80", Some("web-0"), &["cluster", "local"], "used"),
                    endpoint("10.1.0.2:80", None, &[], "not used"),
                ],
                reason: None,
                problem: None,
            }],
        }
    }

    #[test]
    fn a_service_by_itself_shows_its_addresses_and_what_becomes_of_each_endpoint() {
        let shown = "\
shop/web  http TCP IPv4
choice     random; a client keeps its backend for 30 s
sources    of the load balancer: only 10.0.0.0-10.0.0.255
state      programmed
counted    40 sent on, 2 refused

FRONT                 KIND         SOCKETS   PACKETS
10.96.0.1:80/TCP      cluster IP   Cluster   Cluster
192.0.2.1:30080/TCP   node port    Cluster   Local

ENDPOINT      POD     NODE     ZONE   SETS             WEIGHT   OPEN   STATE
10.1.0.1:80   web-0   node-a   -      cluster, local   1        12     used
10.1.0.2:80   -       -        -      -                1        -      not used";

        assert_eq!(render_each(&[service()]), shown);
    }

    #[test]
    fn a_front_where_this_node_listens_is_told_with_the_reason() {
        let mut service = service();
        service.ports[0].fronts[0].has_listener = true;

        let shown = render_each(&[service.clone()]);
        service.ports[0].backends.clear();
        service.ports[0].has_endpoints = false;
        let lonely = render_each(&[service]);

        let state = "\nstate      programmed; sockets left alone: this node listens there itself\n";
        let front = "cluster IP   left alone: this node listens there itself   Cluster\n";
        assert!(shown.contains(state) && shown.contains(front), "{shown}");
        let state = "refused; sockets left alone: this node listens there itself\n";
        assert!(lonely.contains(state), "{lonely}");
    }

    #[test]
    fn it_is_told_whether_connects_without_a_backend_are_refused_or_find_no_way() {
        let mut service = service();
        service.ports[0].backends.clear();
        let elsewhere = render(&[service.clone()]);
        service.ports[0].has_endpoints = false;
        let nowhere = render(&[service]);

        let told = "no backend for this node: connects find no way";
        assert!(elsewhere.contains(told), "{elsewhere}");
        let told = "no backend: connects are refused";
        assert!(nowhere.contains(told), "{nowhere}");
    }

    #[test]
    fn backends_stand_in_a_line_each() {
        let shown = "\
SERVICE    PORT            ENDPOINT      POD     NODE     ZONE   SETS             WEIGHT   OPEN   STATE
shop/web   http TCP IPv4   10.1.0.1:80   web-0   node-a   -      cluster, local   1        12     used
                           10.1.0.2:80   -       -        -      -                1        -      not used";

        assert_eq!(render_backends(&[service()]), shown);
    }

    #[test]
    fn a_long_list_is_cut() {
        assert_eq!(some(&["1", "2", "3", "4", "5"]), "1 2 3 and 2 more");
        assert_eq!(some(&["1", "2", "3"]), "1 2 3");
        assert_eq!(some(&["1"]), "1");
        assert_eq!(some(&[]), "-");
    }
}
