use std::fmt::Write as _;

use tunnel_common::table::Size;

use crate::{
    admin::{ChecksView, Status, used},
    sockets::{Pods, View},
    source::{Report, Server},
};

/// How many problems are shown.
const SHOWN: usize = 20;

pub(super) fn render(status: &Status) -> String {
    let setup = &status.setup;
    let programmed = &status.programmed;
    let ready = match &status.not_ready {
        None => "ready".to_owned(),
        Some(reason) => format!("not ready: {reason}"),
    };
    let mut lines = vec![
        format!("culvert {} on node {}: {ready}", setup.version, setup.node),
        row(
            "process",
            format!("{}, started {}", setup.pid, setup.started),
        ),
        row("cgroup", setup.cgroup.clone()),
        row("pins", format!("{} (layout {})", setup.pins, setup.layout)),
        row("refusing by", setup.refusing.clone()),
        row("clients by", setup.clients.clone()),
        row("services", programmed.services.to_string()),
    ];
    lines.extend(used(programmed).map(|(size, used)| map(status, size, used)));
    lines.extend([
        row("connections", format!("{} open", status.connections)),
        row("last write", last_write(status)),
    ]);
    if let Some(nameless) = &status.nameless {
        lines.push(row("refused", nameless));
    }
    if let Some(since) = &programmed.failing_since {
        lines.push(row("failing", format!("writes fail since {since}")));
    }
    if let Some(log) = &status.kernel_log {
        lines.push(row("kernel log", format!("{}, {}", log.program, log.level)));
    }
    let report: Report = serde_json::from_value(status.source.clone()).unwrap_or_default();
    lines.extend(report.server.iter().flat_map(api_server));
    lines.extend(ended_sockets(&status.sockets));
    lines.extend(health_checks(&status.health_checks));
    lines.extend(tunnel(status));
    lines.extend(reasons(status));
    lines.extend(problems(status, &report));
    lines.join("\n")
}

fn row(name: &str, value: impl std::fmt::Display) -> String {
    format!("  {name:<13}{value}")
}

/// How much of a size is used.
fn map(status: &Status, size: Size, used: usize) -> String {
    let room = status.setup.maps.get(size.word()).copied().unwrap_or(0);
    let mut text = format!("{used} of {room}");
    let occupied = status.programmed.occupied_backends;
    if size == Size::Backends && occupied > 0 {
        text.push_str(&format!(
            "; open connections keep the indices of {occupied} that are gone"
        ));
    }
    row(size.word(), text)
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

/// How it is with the API server.
fn api_server(server: &Server) -> Vec<String> {
    let mut lines = vec![row("API server", &server.address)];
    if let (Some(why), Some(since)) = (&server.trouble, &server.trouble_since) {
        lines.push(row("", format!("can't be asked since {since}: {why}")));
    }
    lines.extend(server.stale.iter().map(|stale| row("stale", stale)));
    lines
}

/// The ending of sockets whose backend is gone.
fn ended_sockets(sockets: &View) -> Vec<String> {
    if sockets.protocols.is_empty() {
        return vec![row("sockets", "not ended when their backend goes")];
    }
    let protocols: Vec<_> = sockets.protocols.iter().map(ToString::to_string).collect();
    let protocols = protocols.join(" and ");
    let ended = sockets.ended;
    let mut lines = vec![row("sockets", format!("{protocols}: {ended} ended"))];
    match &sockets.pods {
        Pods::Daemon => {}
        Pods::Helper => lines.push(row("", "in pods by the helper")),
        Pods::Off => lines.push(row("", "not in pods, as sockets.pods says")),
        Pods::Unreached(why) => lines.push(row("", format!("not in pods: {why}"))),
    }
    if sockets.left > 0 {
        lines.push(row(
            "",
            format!("{} in pods left as they are", sockets.left),
        ));
    }
    let problems = sockets.problem.iter().chain(&sockets.helper_problem);
    lines.extend(problems.map(|problem| row("", problem)));
    lines
}

/// The health check ports of Services; nothing where none has one.
fn health_checks(checks: &ChecksView) -> Vec<String> {
    let ChecksView {
        services, refused, ..
    } = checks;
    let shown = refused.iter().take(SHOWN);
    let told = format!("{services} Services have a health check port");
    let told = (*services > 0).then(|| row("checks", told));
    told.into_iter()
        .chain(shown.map(|(service, why)| row("refused", format!("{service}: {why}"))))
        .collect()
}

/// What there is of the tunnel; nothing where it is off.
fn tunnel(status: &Status) -> Vec<String> {
    let mut lines = Vec::new();
    let steering = &status.programmed.steering;
    if !status.network.uplinks.is_empty() || status.network.problem.is_some() {
        lines.push(row(
            "steering",
            format!(
                "{} addresses and ports of {} edge nodes",
                steering.entries, steering.edge_nodes
            ),
        ));
        lines.push(row("guarded", status.network.uplinks.join(" ")));
        lines.extend(
            status
                .network
                .routes
                .iter()
                .map(|route| row("route", route)),
        );
    }
    if let Some(problem) = &status.network.problem {
        lines.push(row("refused", problem));
    }
    let shown = steering.problems.iter().take(SHOWN);
    lines.extend(shown.map(|problem| row("refused", problem)));
    if let Some(identity) = &status.identity {
        let connected = status.nodes.iter().filter(|node| !node.sessions.is_empty());
        let connected = connected.count();
        lines.push(row(
            "agents",
            format!("{connected} nodes connected (culvert nodes)"),
        ));
        if let Some(expires) = identity.expires {
            lines.push(row("certificate", format!("expires {expires}")));
        }
        lines.extend(
            identity
                .problem
                .iter()
                .map(|problem| row("refused", problem)),
        );
        lines.extend(
            identity
                .warnings
                .iter()
                .map(|warning| row("warning", warning)),
        );
    }
    for node in status
        .nodes
        .iter()
        .filter(|node| node.sessions.is_empty())
        .take(SHOWN)
    {
        lines.extend(node.last_error.iter().map(|error| row("tunnel", error)));
    }
    lines
}

fn reasons(status: &Status) -> Vec<String> {
    let mut text = String::new();
    for (reason, count) in status.reasons.iter().filter(|(_, count)| **count > 0) {
        // Writing to a string can't fail.
        if write!(
            text,
            "{}{reason} {count}",
            if text.is_empty() { "" } else { ", " }
        )
        .is_err()
        {
            break;
        }
    }
    if text.is_empty() {
        Vec::new()
    } else {
        vec![row("reasons", text)]
    }
}

fn problems(status: &Status, report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    for (reason, count) in &status.programmed.problems {
        lines.push(row(
            "refused",
            format!("{count} service ports: {reason} (culvert services)"),
        ));
    }
    for problem in report.problems.iter().take(SHOWN) {
        let word = if problem.ignored {
            "ignored"
        } else {
            "refused"
        };
        lines.push(row(word, problem));
    }
    let more = report.problems.len().saturating_sub(SHOWN);
    if more > 0 {
        lines.push(row("", format!("and {more} more")));
    }
    lines
}
