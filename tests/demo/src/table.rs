//! The demonstration's table.

use tunnel_tests::{
    load::Report,
    table::{in_columns, microseconds},
};

const HEAD: [&str; 6] = [
    "phase",
    "connections",
    "failures",
    "p50 connect",
    "p99 connect",
    "answered by",
];

/// One line per report, in columns.
pub(crate) fn rows(reports: &[(String, Report)]) -> String {
    let lines = reports.iter().map(|(name, report)| {
        [
            name.clone(),
            report.attempts.to_string(),
            report.failed().to_string(),
            microseconds(report.connect.p50_ns),
            microseconds(report.connect.p99_ns),
            distribution(report),
        ]
    });
    in_columns(HEAD, lines)
}

/// Who answered how often.
pub(crate) fn distribution(report: &Report) -> String {
    let servers = report
        .servers
        .iter()
        .map(|(name, seen)| format!("{name} {}", seen.count));
    servers.collect::<Vec<_>>().join(", ")
}
