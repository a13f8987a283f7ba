//! Renders the output of `culvert status` for a node.

use tunnel_common::table::MapSize;

use super::rows::{Row, Rows};
use crate::{
    admin::{HealthChecksView, NodeStatus, used_entries},
    bpf::AttachmentView,
    flows::FlowsView,
    net::{NetworkView, PacketsView},
    round_robin,
    sockets::{PodTerminator, TerminatorView},
    source::{Problem, ServerStatus, SourceReport},
    tunnel::NodeView,
};

/// The maximum number of problems shown for each kind of problem.
const MAX_PROBLEMS: usize = 20;
/// The maximum number of links shown in a row.
const MAX_LINKS: usize = 8;

pub(super) fn render(status: &NodeStatus) -> String {
    let setup = &status.setup;
    let programmed = &status.programmed;
    let ready = match &status.not_ready {
        None => "ready".to_owned(),
        Some(reason) => format!("not ready: {reason}"),
    };
    let (version, node) = (&setup.version, &setup.node);
    let mut rows = Rows::with_headline(format!("culvert {version} on node {node}: {ready}"));
    let process = format!("{}, started {}", setup.pid, setup.started);
    rows.add(Row::Process, process);
    rows.add(Row::Cgroup, &setup.cgroup);
    rows.add(
        Row::Pins,
        format!("{} (layout {})", setup.pins, setup.layout),
    );
    programs(&mut rows, &status.programs);
    packets(&mut rows, &status.packets, &status.flows);
    rows.add_each(Row::Warning, &setup.state_dir_problem);
    rows.add_each(Row::Warning, &setup.descriptor_problem);
    rows.add(Row::RefusalMethod, &setup.refusal_method);
    rows.add(Row::ClientIdentity, &setup.client_identity);
    rows.add(Row::Services, programmed.services);
    for (size, used) in used_entries(programmed) {
        if let Some(row) = Row::of_size(size) {
            rows.add(row, usage(status, size, used));
        }
    }
    rows.add(Row::OpenConnections, status.open_connections);
    rows.add(Row::LastWrite, last_write(status));
    rows.add_each(Row::Error, &status.node_missing);
    if let Some(since) = &programmed.failing_since {
        rows.add(Row::Error, format!("writes to maps fail since {since}"));
    }
    if let Some(log) = &status.kernel_log {
        rows.add(Row::KernelLog, format!("{}, {}", log.program, log.level));
    }
    let report: SourceReport = serde_json::from_value(status.source.clone()).unwrap_or_default();
    if let Some(server) = &report.server {
        api_server(&mut rows, server);
    }
    terminated_sockets(&mut rows, &status.sockets);
    health_checks(&mut rows, &status.health_checks);
    tunnel(&mut rows, status);
    rows.add_counts(Row::Reasons, &status.reasons);
    problems(&mut rows, status, &report);
    rows.to_string()
}

/// Formats how many of a map's entries are in use, along with the map's capacity.
fn usage(status: &NodeStatus, size: MapSize, used: usize) -> String {
    let capacity = status.setup.maps.get(size.key()).copied().unwrap_or(0);
    let draining = status.programmed.draining_backends;
    if size == MapSize::Backends && draining > 0 {
        return format!("{used} of {capacity}; {draining} removed ones have open connections");
    }
    format!("{used} of {capacity}")
}

/// Adds the rows about the attached programs, and about those of others at the same hooks.
fn programs(rows: &mut Rows, programs: &AttachmentView) {
    let in_effect = programs.in_effect.map_or_else(
        || "not checked yet".to_owned(),
        |count| format!("{count} in effect"),
    );
    rows.add(Row::Programs, in_effect);
    if programs.restored_total > 0 {
        let last = programs.last_restored.join("; ");
        let total = programs.restored_total;
        rows.continue_with(format!("{total} restored, last: {last}"));
    }
    for other in &programs.others {
        rows.continue_with(format!("also attached: {other}"));
    }
    rows.add_each(Row::Error, &programs.problems);
}

/// Adds the rows about packets that are translated, and about their flows.
fn packets(rows: &mut Rows, packets: &PacketsView, flows: &FlowsView) {
    if !packets.enabled {
        rows.add(Row::Packets, "not translated (service.packets.enabled)");
        rows.add_each(Row::Error, &packets.problem);
        return;
    }
    let uplinks = counted_names(&packets.uplinks);
    rows.add(Row::Packets, format!("translated on uplinks {uplinks}"));
    if !packets.pod_links.is_empty() {
        let pod_links = counted_names(&packets.pod_links);
        rows.continue_with(format!("and on links of pods {pod_links}"));
    }
    for other in &packets.others {
        rows.continue_with(format!("also attached: {other}"));
    }
    rows.add_each(Row::Warning, &packets.warnings);
    rows.add_each(Row::Error, &packets.problem);
    let total: usize = flows.states.values().sum();
    let states = flows.states.iter().filter(|(_, count)| **count > 0);
    let states: Vec<_> = states.map(|(state, n)| format!("{state} {n}")).collect();
    let room = format!("{} of {} entries", flows.entries, flows.capacity);
    let text = format!("{total} ({room}; culvert flows) {}", states.join(", "));
    rows.add(Row::Flows, text.trim_end());
    rows.add_each(Row::Error, &flows.problem);
}

fn last_write(status: &NodeStatus) -> String {
    let programmed = &status.programmed;
    match &programmed.last_sync_at {
        None => "none yet".to_owned(),
        Some(at) => {
            let millis = programmed.programming_latency_seconds * 1000.0;
            format!("{at}, {millis:.1} ms after the change was noticed")
        }
    }
}

/// Adds the rows about the API server: its address, and whether it responds.
fn api_server(rows: &mut Rows, server: &ServerStatus) {
    rows.add(Row::ApiServer, &server.address);
    if let (Some(why), Some(since)) = (&server.error, &server.error_since) {
        rows.continue_with(format!("unreachable since {since}: {why}"));
    }
    rows.add_each(Row::Stale, &server.stale);
}

/// Adds the rows about the sockets of removed backends.
fn terminated_sockets(rows: &mut Rows, sockets: &TerminatorView) {
    if sockets.protocols.is_empty() {
        rows.add(Row::TerminatedSockets, "off (sockets.terminate)");
        return;
    }
    let protocols: Vec<_> = sockets.protocols.iter().map(ToString::to_string).collect();
    let protocols = protocols.join(" and ");
    let terminated = format!("{protocols} {}", sockets.terminated);
    rows.add(Row::TerminatedSockets, terminated);
    match &sockets.pods {
        PodTerminator::Daemon => {}
        PodTerminator::Helper => rows.continue_with("in pods: by the helper"),
        PodTerminator::Off => rows.continue_with("not in pods: sockets.includePods is false"),
        PodTerminator::Unreached(why) => rows.continue_with(format!("not in pods: {why}")),
    }
    if sockets.stale > 0 {
        rows.add(Row::StaleSockets, format!("{} in pods", sockets.stale));
    }
    for problem in sockets.problem.iter().chain(&sockets.helper_problem) {
        rows.continue_with(problem);
    }
}

/// Adds the rows about health check node ports, if any Service has one.
fn health_checks(rows: &mut Rows, checks: &HealthChecksView) {
    let services = checks.services;
    if services > 0 {
        let ports = format!("health check node ports of {services} Services");
        rows.add(Row::HealthChecks, ports);
    }
    for (service, why) in checks.unserved.iter().take(MAX_PROBLEMS) {
        rows.add(Row::Error, format!("{service}: {why}"));
    }
}

/// Adds the rows about steering and the gateway, if they are enabled.
fn tunnel(rows: &mut Rows, status: &NodeStatus) {
    let steering = &status.programmed.steering;
    let network = &status.network;
    if !network.uplinks.is_empty() || network.problem.is_some() {
        let (entries, nodes) = (steering.entries, steering.edge_nodes);
        let steered = format!("{entries} addresses and ports of {nodes} edge nodes");
        rows.add(Row::Steering, steered);
        rows.add(Row::GuardedUplinks, network.uplinks.join(" "));
        pod_links(rows, network);
        rows.add_each(Row::Route, &network.routes);
    }
    rows.add_each(Row::Error, &network.problem);
    rows.add_each(Row::Error, steering.problems.iter().take(MAX_PROBLEMS));
    let unconfirmed = steering.unconfirmed.iter().take(MAX_PROBLEMS);
    rows.add_each(Row::Warning, unconfirmed);
    let is_disconnected = |node: &&NodeView| node.sessions.is_empty();
    let disconnected = status.nodes.iter().filter(is_disconnected);
    if let Some(identity) = &status.identity {
        let connected = status.nodes.len() - disconnected.clone().count();
        let connected = format!("{connected} nodes connected (culvert nodes)");
        rows.add(Row::Agents, connected);
        rows.add_each(Row::Certificate, identity.validity());
        rows.add_each(Row::Clock, &identity.clock_problem);
        rows.add_each(Row::Error, &identity.problem);
        rows.add_each(Row::Warning, identity.request_problem());
        rows.add_each(Row::Warning, &identity.warnings);
    }
    if let Some(deny_list) = &status.deny_list {
        let (nodes, certificates) = (deny_list.nodes, deny_list.certificates);
        rows.add(
            Row::DenyList,
            format!("{nodes} nodes, {certificates} certificates"),
        );
        let problem = deny_list.problem.as_ref();
        let problem = problem.map(|problem| format!("tunnel.gateway.denyFile: {problem}"));
        rows.add_each(Row::Error, problem);
    }
    let errors = disconnected
        .take(MAX_PROBLEMS)
        .filter_map(|node| node.last_error.as_ref());
    rows.add_each(Row::TunnelError, errors);
}

/// Adds the rows about the links over which connections may reach the ingress.
fn pod_links(rows: &mut Rows, network: &NetworkView) {
    rows.add(Row::PodLinks, counted_names(&network.pod_links));
    let ranges = network.pod_ranges.as_deref();
    if ranges.is_some_and(<[_]>::is_empty) {
        rows.continue_with(
            "the ranges of pod addresses are unknown (service.clusterCIDRs, spec.podCIDRs of the Node), \
             so some of these links may lead outside",
        );
    }
    if !network.refused_links.is_empty() {
        rows.add(Row::RefusedLinks, counted_names(&network.refused_links));
        let ranges = ranges.unwrap_or_default().join(" ");
        rows.continue_with(format!(
            "no pod address ({ranges}) is reached over them; if they lead to pods: service.podLinks"
        ));
    }
}

/// Formats the number of links, and the names of the first ones.
fn counted_names(names: &[String]) -> String {
    let shown = names.iter().take(MAX_LINKS).map(String::as_str);
    let shown = shown.collect::<Vec<_>>().join(" ");
    match names.len() {
        0 => "none".to_owned(),
        count @ 1..=MAX_LINKS => format!("{count}: {shown}"),
        count => format!("{count}: {shown} and {} more", count - MAX_LINKS),
    }
}

/// Adds the rows about problems with Service ports and with the objects that were read.
fn problems(rows: &mut Rows, status: &NodeStatus, report: &SourceReport) {
    for (reason, count) in &status.programmed.problems {
        let problem = format!("{count} service ports: {reason} (culvert services)");
        rows.add(Row::Error, problem);
    }
    let beyond_share = status.programmed.namespaces_beyond_share.iter();
    for (namespace, count) in beyond_share.take(MAX_PROBLEMS) {
        let problem = format!(
            "namespace {namespace}: {count} service ports do not fit into its share of the maps \
             (service.namespaceShare)"
        );
        rows.add(Row::Error, problem);
    }
    for problem in shown_problems(&report.problems) {
        let is_ignored = problem.ignored;
        rows.add(
            if is_ignored {
                Row::Ignored
            } else {
                Row::Rejected
            },
            problem,
        );
    }
    if let Some(more @ 1..) = report.problems.len().checked_sub(MAX_PROBLEMS) {
        rows.continue_with(format!("and {more} more"));
    }
}

/// Returns the problems with objects that are shown. If there are too many, those of each namespace are shown in
/// turn.
fn shown_problems(problems: &[Problem]) -> Vec<&Problem> {
    // The kind and the namespace of the object precede the slash.
    let namespace = |problem: &&Problem| {
        let object = problem.object.as_deref().unwrap_or_default();
        object
            .rsplit_once('/')
            .map(|(namespace, _)| namespace.to_owned())
    };
    round_robin::take_by(problems.iter(), namespace, MAX_PROBLEMS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_with_very_many_invalid_objects_does_not_hide_those_of_others() {
        let problem = |object: String| Problem {
            origin: "API server".to_owned(),
            document: None,
            line: None,
            object: Some(object),
            field: None,
            reason: "is invalid".to_owned(),
            ignored: false,
        };
        let many = (0..2 * MAX_PROBLEMS).map(|number| format!("Service a/web-{number}"));
        let others = ["Service b/web".to_owned(), "Node node-a".to_owned()];
        let problems: Vec<_> = many.chain(others.clone()).map(problem).collect();

        let shown = shown_problems(&problems);

        assert_eq!(shown.len(), MAX_PROBLEMS);
        let is_shown = |object: &String| shown.iter().any(|it| it.object.as_ref() == Some(object));
        assert!(others.iter().all(is_shown), "{shown:?}");
    }
}
