//! Formats the demo's load reports as a table.

use tunnel_tests::{
    load::Report,
    table::{format_table, microseconds},
};

/// Formats a table with one line per report.
pub(crate) fn format_reports(reports: &[(String, Report)]) -> String {
    format_table(
        reports,
        &[
            ("phase", |(name, _)| name.clone()),
            ("connections", |(_, report)| report.attempts.to_string()),
            ("failures", |(_, report)| report.failed().to_string()),
            ("p50 connect", |(_, it)| microseconds(it.connect.p50_ns)),
            ("p99 connect", |(_, it)| microseconds(it.connect.p99_ns)),
            ("answered by", |(_, report)| distribution(report)),
        ],
    )
}

/// Lists the servers, each with its number of replies.
pub(crate) fn distribution(report: &Report) -> String {
    let servers = report.servers.iter();
    let counts: Vec<_> = servers
        .map(|(name, seen)| format!("{name} {}", seen.count))
        .collect();
    counts.join(", ")
}
