//! Asking the daemon over its Unix socket: HTTP/1.1, one question a connection.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

/// How long an answer may take: a table of 100,000 Services is long.
const ANSWER: Duration = Duration::from_secs(20);

/// An answer of the daemon.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// Asks for a path.
///
/// # Errors
///
/// When nobody listens, or the answer is no HTTP.
pub fn get(socket: &Path, path: &str) -> Result<Answer> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("nobody answers on {}", socket.display()))?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: culvert\r\nConnection: close\r\n\r\n"
    )?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    parse(&String::from_utf8_lossy(&bytes))
}

fn parse(text: &str) -> Result<Answer> {
    let (head, body) = text
        .split_once("\r\n\r\n")
        .context("the answer has no head")?;
    let status = head
        .split(' ')
        .nth(1)
        .context("the answer has no status")?
        .parse()?;
    let chunked = head
        .lines()
        .filter_map(|line| line.split_once(':'))
        .any(|(name, value)| {
            name.eq_ignore_ascii_case("transfer-encoding") && value.trim() == "chunked"
        });
    let body = if chunked {
        unchunk(body)?
    } else {
        body.to_owned()
    };
    Ok(Answer { status, body })
}

fn unchunk(mut rest: &str) -> Result<String> {
    let mut body = String::new();
    loop {
        let (size, tail) = rest.split_once("\r\n").context("a chunk has no size")?;
        let size = usize::from_str_radix(size.trim(), 16).context("a chunk has an odd size")?;
        if size == 0 {
            return Ok(body);
        }
        let Some((chunk, tail)) = tail.split_at_checked(size) else {
            bail!("a chunk is cut off");
        };
        body.push_str(chunk);
        rest = tail.strip_prefix("\r\n").context("a chunk has no end")?;
    }
}

/// The value of a metric, given with its labels as it is printed; absent metrics have none.
#[must_use]
pub fn metric(metrics: &str, name: &str) -> Option<u64> {
    let value = metrics
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    // A counter may be printed as a decimal fraction, and with a time after it.
    value.split([' ', '.']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_put_together() {
        let answer = parse(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n",
        );

        let answer = answer.unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (200, "abcd"));
    }

    #[test]
    fn a_metric_is_found_by_its_whole_name() {
        let text = "culvert_reason_total{reason=\"no_backend\"} 3\nculvert_reason_total{reason=\"translated\"} 42\n";

        assert_eq!(
            metric(text, "culvert_reason_total{reason=\"translated\"}"),
            Some(42)
        );
        assert_eq!(metric(text, "culvert_reason_total{reason=\"trans\"}"), None);
    }
}
