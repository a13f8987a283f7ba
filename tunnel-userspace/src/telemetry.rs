//! Logs: to stderr, as text or JSON.

use std::io;

use clap::ValueEnum;
use tracing_subscriber::{EnvFilter, fmt};

/// How a log line looks.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A filter that can't be read.
#[derive(Debug, thiserror::Error)]
#[error("log filter `{filter}`: {reason}")]
pub struct FilterError {
    filter: String,
    reason: String,
}

/// Starts logging. The filter is as `info` or `info,culvert::source=debug`.
///
/// # Errors
///
/// The filter can't be read.
pub fn start(filter: &str, format: Format) -> Result<(), FilterError> {
    let failed = |reason: String| FilterError { filter: filter.to_owned(), reason };
    let parsed = EnvFilter::try_new(filter).map_err(|error| failed(error.to_string()))?;
    let lines = fmt().with_env_filter(parsed).with_writer(io::stderr).with_target(true);
    let started = match format {
        Format::Text => lines.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).try_init(),
        Format::Json => lines.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| failed(error.to_string()))
}
