use std::fmt::Write as _;

use crate::{admin::Status, source::Report};

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
        row("services", programmed.services.to_string()),
        row(
            "fronts",
            format!("{} of {}", programmed.fronts, setup.maps.fronts),
        ),
        row(
            "slots",
            format!("{} of {}", programmed.slots, setup.maps.slots),
        ),
        row(
            "backends",
            format!("{} of {}", programmed.backends, setup.maps.backends),
        ),
        row("last write", last_write(status)),
    ];
    if let Some(since) = &programmed.failing_since {
        lines.push(row("failing", format!("writes fail since {since}")));
    }
    lines.extend(reasons(status));
    lines.extend(problems(status));
    for (port, reason) in &status.not_listening {
        lines.push(row("waiting", format!("for {port}: {reason}")));
    }
    lines.join("\n")
}

fn row(name: &str, value: impl std::fmt::Display) -> String {
    format!("  {name:<13}{value}")
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

fn problems(status: &Status) -> Vec<String> {
    let mut lines = Vec::new();
    for (reason, count) in &status.programmed.problems {
        lines.push(row(
            "refused",
            format!("{count} service ports: {reason} (culvert services)"),
        ));
    }
    let report: Report = serde_json::from_value(status.source.clone()).unwrap_or_default();
    for problem in report.problems.iter().take(SHOWN) {
        lines.push(row("refused", problem));
    }
    let more = report.problems.len().saturating_sub(SHOWN);
    if more > 0 {
        lines.push(row("", format!("and {more} more")));
    }
    lines
}
