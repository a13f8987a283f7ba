//! Starts logging to stderr, as text or JSON.

use std::io;

use jiff::Timestamp;
use tracing::{Subscriber, subscriber::SetGlobalDefaultError};
use tracing_subscriber::{EnvFilter, filter::LevelFilter, fmt, fmt::MakeWriter};

/// The error returned if logging can't be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The filter is invalid.
    #[error(
        "--log {filter}: {reason}; use off, error, warn, info, debug or trace, and TARGET=LEVEL for a \
         single target, as in info,tunnel_userspace::source=debug"
    )]
    Filter {
        /// The value of `--log`.
        filter: String,
        /// The parse error.
        reason: String,
    },
    /// Logging was already started in this process.
    #[error("cannot start logging")]
    AlreadyStarted(#[from] SetGlobalDefaultError),
}

/// Starts logging, either as text or as one JSON object per line. Example filters: `info`,
/// `info,tunnel_userspace::source=debug`.
///
/// # Errors
///
/// Returns an error if the filter is invalid, or if logging has already been started.
pub fn start(filter: &str, as_json: bool) -> Result<(), StartError> {
    let parsed = parse(filter).map_err(|reason| StartError::Filter {
        filter: filter.to_owned(),
        reason,
    })?;
    if as_json {
        tracing::subscriber::set_global_default(json(parsed, io::stderr))?;
    } else {
        let lines = fmt()
            .with_env_filter(parsed)
            .with_writer(io::stderr)
            .with_ansi(io::IsTerminal::is_terminal(&io::stderr()));
        tracing::subscriber::set_global_default(lines.finish())?;
    }
    Ok(())
}

/// Builds a subscriber that writes each event as one JSON object. The event's fields are at the top level,
/// next to `timestamp`, `level`, `target`, `span` and `spans`, so events must not use these names. A span
/// must not have a field called `name`.
fn json<W>(filter: EnvFilter, writer: W) -> impl Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .json()
        .flatten_event(true)
        .finish()
}

/// Parses a filter. A directive without `=` must be a level: `EnvFilter` would take any other word for the
/// name of a target, and turn off all other targets.
fn parse(filter: &str) -> Result<EnvFilter, String> {
    let is_level = |text: &str| !text.is_empty() && text.parse::<LevelFilter>().is_ok();
    let mut directives = filter.split(',').map(str::trim);
    let invalid = directives
        .find(|directive| !directive.contains(['=', '[', ']', '}']) && !is_level(directive));
    match invalid {
        Some(directive) => Err(format!("`{directive}` is not a level")),
        None => EnvFilter::try_new(filter).map_err(|error| error.to_string()),
    }
}

/// Formats the error that ends the process as a line in the log's format. The log filter does not apply to
/// it.
#[must_use]
pub fn fatal_error_line(error: &str, as_json: bool) -> String {
    if !as_json {
        return format!("culvert: {error}");
    }
    let line = serde_json::json!({
        "timestamp": Timestamp::now().to_string(),
        "level": "ERROR",
        "message": "stopped by an error",
        "error": error,
        "target": "culvert",
    });
    line.to_string()
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Seek as _},
        sync::Arc,
    };

    use serde_json::Value;
    use tracing::{info, info_span};

    use super::*;

    #[test]
    fn a_word_that_is_not_a_level_is_named_in_the_error() {
        for filter in [
            "verbose",
            "warning",
            "info,verbose",
            "",
            "info,",
            "h2=verbose",
        ] {
            assert!(parse(filter).is_err(), "{filter}");
        }
        for filter in ["off", "WARN", "info", "kernel=debug,info", "info,h2=off"] {
            assert!(parse(filter).is_ok(), "{filter}");
        }

        let message = start("warning", false).expect_err("no level").to_string();

        assert!(
            message.starts_with("--log warning: `warning` is not a level; use off, error, warn"),
            "{message}"
        );
    }

    /// Returns the keys of a JSON object; `None` if the object, or one nested in it, has a duplicate key.
    fn keys(line: &str) -> Option<Vec<String>> {
        let object: serde_json::Map<String, Value> = serde_json::from_str(line).expect("JSON");
        let keys = object.keys().cloned().collect();
        // Parsing keeps only the last of two duplicate keys, so the text gets shorter.
        (Value::Object(object).to_string().len() == line.len()).then_some(keys)
    }

    #[test]
    fn no_json_line_has_a_duplicate_key() {
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        let filter = parse("info").expect("a filter");
        tracing::subscriber::with_default(json(filter, Arc::clone(&file)), || {
            info_span!("a", name = "b").in_scope(|| info!("a span with two names"));
            crate::tasks::span("reconcile").in_scope(|| info!(port = 1, "from a task"));
        });
        let mut text = String::new();
        (&*file).rewind().expect("rewound");
        (&*file).read_to_string(&mut text).expect("text");
        let lines: Vec<&str> = text.lines().collect();

        assert!(keys(lines[0]).is_none(), "duplicate key not found: {text}");
        let found = keys(lines[1]).expect("each key once");
        let known = [
            "level",
            "message",
            "port",
            "span",
            "spans",
            "target",
            "timestamp",
        ];
        assert_eq!(found, known, "{text}");
    }

    #[test]
    fn the_error_that_ends_the_process_has_the_format_of_the_log() {
        assert_eq!(fatal_error_line("no config", false), "culvert: no config");

        let line = fatal_error_line("no \"config\"", true);

        let found = keys(&line).expect("an object");
        let known = ["error", "level", "message", "target", "timestamp"];
        assert_eq!(found, known);
        let value: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(value["error"], "no \"config\"");
    }
}
