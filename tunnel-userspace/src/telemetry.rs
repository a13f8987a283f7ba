//! Logs: to stderr, as text or JSON.

use std::io;

use tracing_subscriber::{EnvFilter, fmt};

/// A filter that can't be read.
#[derive(Debug, thiserror::Error)]
#[error("log filter `{filter}`: {reason}")]
pub struct FilterError {
    filter: String,
    reason: String,
}

/// Starts logging, as text or as one JSON object a line. The filter is as `info` or `info,culvert::source=debug`.
///
/// # Errors
///
/// The filter can't be read.
pub fn start(filter: &str, as_json: bool) -> Result<(), FilterError> {
    let failed = |reason: String| FilterError {
        filter: filter.to_owned(),
        reason,
    };
    let parsed = EnvFilter::try_new(filter).map_err(|error| failed(error.to_string()))?;
    let lines = fmt()
        .with_env_filter(parsed)
        .with_writer(io::stderr)
        .with_target(true);
    let started = if as_json {
        lines.json().flatten_event(true).try_init()
    } else {
        lines
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
            .try_init()
    };
    started.map_err(|error| failed(error.to_string()))
}
