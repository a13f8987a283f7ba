//! A client for the daemon's admin socket: HTTP/1.1 over a Unix socket, with one request per connection.

use std::{
    io::{BufReader, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::http::ResponseHead;

/// The timeout for a response: long enough for a list of 100,000 Services.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A response from the daemon.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    pub body: String,
}

/// Sends a GET request for `path`.
pub fn get(socket: &Path, path: &str) -> Result<Response> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: culvert\r\nConnection: close\r\n\r\n"
    )?;
    let mut stream = BufReader::new(stream);
    let head = ResponseHead::read(&mut stream)?;
    Ok(Response {
        status: head.status,
        body: head.body(&mut stream)?,
    })
}

/// Returns the value of a metric in the text of `/metrics`. `name` includes the labels exactly as printed
/// there.
#[must_use]
pub fn metric(metrics: &str, name: &str) -> Option<u64> {
    let value = metrics
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    // Strip any fractional part of the value, and any timestamp after it.
    value.split([' ', '.']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_found_by_its_complete_name() {
        let text = "culvert_reason_total{reason=\"no_backend\"} 3\nculvert_reason_total{reason=\"translated\"} 42\n";

        assert_eq!(
            metric(text, "culvert_reason_total{reason=\"translated\"}"),
            Some(42)
        );
        assert_eq!(metric(text, "culvert_reason_total{reason=\"trans\"}"), None);
    }
}
