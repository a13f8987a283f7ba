use super::table;
use crate::{
    admin::AgentStatus,
    tunnel::{ConnectionState, ConnectionView},
};

pub(super) fn render(status: &AgentStatus) -> String {
    let setup = &status.setup;
    let ready = match &status.not_ready {
        None => "connected".to_owned(),
        Some(reason) => format!("not ready: {reason}"),
    };
    let mut lines = vec![
        format!("culvert agent {}: {ready}", setup.version),
        format!("  process      {}, started {}", setup.pid, setup.started),
        format!("  allowed      {}", setup.allow.join(" ")),
    ];
    if let Some(expires) = status.identity.expires {
        let name = status.identity.name.as_deref().unwrap_or_default();
        lines.push(format!("  certificate  {name}, expires {expires}"));
    }
    if let Some(problem) = &status.identity.problem {
        lines.push(format!("  refused      {problem}"));
    }
    lines.extend(
        status
            .identity
            .warnings
            .iter()
            .map(|warning| format!("  warning      {warning}")),
    );
    let reasons: Vec<_> = status
        .tunnel
        .counts
        .iter()
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    if !reasons.is_empty() {
        lines.push(format!("  reasons      {}", reasons.join(", ")));
    }
    let rows: Vec<_> = status.tunnel.connections.iter().map(row).collect();
    lines.push(String::new());
    lines.push(table::render(
        &["GATEWAY", "STATE", "SINCE", "STREAMS", "LAST ERROR"],
        &rows,
    ));
    lines.join("\n")
}

fn row(connection: &ConnectionView) -> Vec<String> {
    let state = match connection.state {
        ConnectionState::Connecting => "connecting",
        ConnectionState::Connected => "connected",
        ConnectionState::Waiting => "waiting",
        ConnectionState::Draining => "draining",
    };
    vec![
        format!("{} #{}", connection.gateway, connection.connection),
        state.to_owned(),
        connection
            .since
            .map_or_else(|| "-".to_owned(), |since| since.to_string()),
        connection.traffic.streams.to_string(),
        connection.last_error.clone().unwrap_or_default(),
    ]
}
