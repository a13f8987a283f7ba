use tunnel_common::table::Size;

use super::table::Rows;
use crate::{
    admin::{ChecksView, Status, used},
    sockets::{Pods, View},
    source::{Report, Server},
    tunnel::NodeView,
};

/// The number of problems that are shown.
const SHOWN: usize = 20;

pub(super) fn render(status: &Status) -> String {
    let setup = &status.setup;
    let programmed = &status.programmed;
    let ready = match &status.not_ready {
        None => "ready".to_owned(),
        Some(reason) => format!("not ready: {reason}"),
    };
    let (version, node) = (&setup.version, &setup.node);
    let mut rows = Rows::under(format!("culvert {version} on node {node}: {ready}"));
    let process = format!("{}, started {}", setup.pid, setup.started);
    rows.add("process", process);
    rows.add("cgroup", &setup.cgroup);
    rows.add("pins", format!("{} (layout {})", setup.pins, setup.layout));
    rows.add("refusing by", &setup.refusing);
    rows.add("clients by", &setup.clients);
    rows.add("services", programmed.services);
    for (size, used) in used(programmed) {
        rows.add(size.word(), room(status, size, used));
    }
    rows.add("connections", format!("{} open", status.connections));
    rows.add("last write", last_write(status));
    rows.add_each("refused", &status.nameless);
    if let Some(since) = &programmed.failing_since {
        rows.add("failing", format!("writes fail since {since}"));
    }
    if let Some(log) = &status.kernel_log {
        rows.add("kernel log", format!("{}, {}", log.program, log.level));
    }
    let report: Report = serde_json::from_value(status.source.clone()).unwrap_or_default();
    if let Some(server) = &report.server {
        api_server(&mut rows, server);
    }
    ended_sockets(&mut rows, &status.sockets);
    health_checks(&mut rows, &status.health_checks);
    tunnel(&mut rows, status);
    rows.add_counts("reasons", &status.reasons);
    problems(&mut rows, status, &report);
    rows.to_string()
}

/// Returns the used part of a size.
fn room(status: &Status, size: Size, used: usize) -> String {
    let room = status.setup.maps.get(size.word()).copied().unwrap_or(0);
    let occupied = status.programmed.occupied_backends;
    if size == Size::Backends && occupied > 0 {
        return format!(
            "{used} of {room}; open connections keep the indices of {occupied} that are gone"
        );
    }
    format!("{used} of {room}")
}

fn last_write(status: &Status) -> String {
    let programmed = &status.programmed;
    match &programmed.last_pass_at {
        None => "none yet".to_owned(),
        Some(at) => {
            let millis = programmed.last_delay_seconds * 1000.0;
            format!("{at}, {millis:.1} ms after the change was noticed")
        }
    }
}

/// Adds the state of the API server.
fn api_server(rows: &mut Rows, server: &Server) {
    rows.add("API server", &server.address);
    if let (Some(why), Some(since)) = (&server.trouble, &server.trouble_since) {
        rows.add("", format!("can't be asked since {since}: {why}"));
    }
    rows.add_each("stale", &server.stale);
}

/// Adds the state of the task that ends sockets of removed backends.
fn ended_sockets(rows: &mut Rows, sockets: &View) {
    if sockets.protocols.is_empty() {
        rows.add("sockets", "not ended when their backend goes");
        return;
    }
    let protocols: Vec<_> = sockets.protocols.iter().map(ToString::to_string).collect();
    let protocols = protocols.join(" and ");
    rows.add("sockets", format!("{protocols}: {} ended", sockets.ended));
    match &sockets.pods {
        Pods::Daemon => {}
        Pods::Helper => rows.add("", "in pods by the helper"),
        Pods::Off => rows.add("", "not in pods, as sockets.includePods says"),
        Pods::Unreached(why) => rows.add("", format!("not in pods: {why}")),
    }
    if sockets.left > 0 {
        rows.add("", format!("{} in pods left as they are", sockets.left));
    }
    rows.add_each("", sockets.problem.iter().chain(&sockets.helper_problem));
}

/// Adds the health check ports of Services; nothing if no Service has one.
fn health_checks(rows: &mut Rows, checks: &ChecksView) {
    let services = checks.services;
    if services > 0 {
        let told = format!("{services} Services have a health check port");
        rows.add("checks", told);
    }
    for (service, why) in checks.refused.iter().take(SHOWN) {
        rows.add("refused", format!("{service}: {why}"));
    }
}

/// Adds the parts of the tunnel; nothing if it is off.
fn tunnel(rows: &mut Rows, status: &Status) {
    let steering = &status.programmed.steering;
    let network = &status.network;
    if !network.uplinks.is_empty() || network.problem.is_some() {
        let (entries, nodes) = (steering.entries, steering.edge_nodes);
        let steered = format!("{entries} addresses and ports of {nodes} edge nodes");
        rows.add("steering", steered);
        rows.add("guarded", network.uplinks.join(" "));
        rows.add_each("route", &network.routes);
    }
    rows.add_each("refused", &network.problem);
    rows.add_each("refused", steering.problems.iter().take(SHOWN));
    let is_away = |node: &&NodeView| node.sessions.is_empty();
    let away = status.nodes.iter().filter(is_away);
    if let Some(identity) = &status.identity {
        let connected = status.nodes.len() - away.clone().count();
        let connected = format!("{connected} nodes connected (culvert nodes)");
        rows.add("agents", connected);
        let expires = identity.expires.map(|expires| format!("expires {expires}"));
        rows.add_each("certificate", expires);
        rows.add_each("refused", &identity.problem);
        rows.add_each("warning", &identity.warnings);
    }
    let errors = away.take(SHOWN).filter_map(|node| node.last_error.as_ref());
    rows.add_each("tunnel", errors);
}

fn problems(rows: &mut Rows, status: &Status, report: &Report) {
    for (reason, count) in &status.programmed.problems {
        let problem = format!("{count} service ports: {reason} (culvert services)");
        rows.add("refused", problem);
    }
    for problem in report.problems.iter().take(SHOWN) {
        let is_ignored = problem.ignored;
        rows.add(if is_ignored { "ignored" } else { "refused" }, problem);
    }
    if let Some(more @ 1..) = report.problems.len().checked_sub(SHOWN) {
        rows.add("", format!("and {more} more"));
    }
}
