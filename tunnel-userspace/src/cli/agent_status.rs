//! Renders the output of `culvert status` for an agent.

use super::{
    nodes::relative,
    rows::{Row, Rows},
    table,
};
use crate::{admin::AgentStatus, tunnel::ConnectionView};

pub(super) fn render(status: &AgentStatus) -> String {
    let setup = &status.setup;
    let ready = match &status.not_ready {
        None => "connected".to_owned(),
        Some(reason) => format!("not ready: {reason}"),
    };
    let mut rows = Rows::with_headline(format!("culvert agent {}: {ready}", setup.version));
    let process = format!("{}, started {}", setup.pid, setup.started);
    rows.add(Row::Process, process);
    rows.add(Row::AllowedTargets, setup.allowed_targets.join(" "));
    rows.add_each(Row::Warning, &setup.descriptor_problem);
    let identity = &status.identity;
    if let Some(validity) = identity.validity() {
        let name = identity.name.as_deref().unwrap_or_default();
        rows.add(Row::Certificate, format!("{name}, {validity}"));
    }
    rows.add_each(Row::Clock, &identity.clock_problem);
    rows.add_each(Row::Clock, skew(&status.tunnel.connections));
    rows.add_each(Row::Error, &identity.problem);
    rows.add_each(Row::Warning, identity.request_problem());
    rows.add_each(Row::Warning, &identity.warnings);
    rows.add_counts(Row::Reasons, &status.tunnel.counts);
    let connections: Vec<_> = status.tunnel.connections.iter().map(row).collect();
    format!("{rows}\n\n{}", table::render(&COLUMNS, &connections))
}

/// Returns a description of the clocks if this machine's differs from a gateway's.
fn skew(connections: &[ConnectionView]) -> Option<String> {
    let mut skewed = connections.iter().filter_map(|connection| {
        let skew = connection.large_clock_skew()?;
        Some(format!(
            "that of the gateway {} was {} this machine's when the session began",
            connection.gateway,
            relative(skew)
        ))
    });
    skewed.next()
}

pub(super) const COLUMNS: [&str; 5] = ["GATEWAY", "STATE", "SINCE", "STREAMS", "LAST ERROR"];

fn row(connection: &ConnectionView) -> Vec<String> {
    vec![
        format!("{} #{}", connection.gateway, connection.connection),
        connection.state.label().to_owned(),
        table::or_dash(connection.since),
        connection.traffic.streams.to_string(),
        connection.last_error.clone().unwrap_or_default(),
    ]
}
