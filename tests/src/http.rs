//! An HTTP/1.1 parser for the lab's clients and servers.

use std::io::{self, BufRead, BufReader, Read, Write};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The maximum length of the head of a request.
const MAX_HEAD: usize = 64 << 10;

/// The maximum length of one line of a response, such as a header.
const MAX_LINE: u64 = 64 << 10;

/// Requests `/` over a connection that stays open, and returns the body of the response.
pub fn get(mut connection: impl Read + Write) -> Result<String> {
    connection.write_all(b"GET / HTTP/1.1\r\nHost: lab\r\n\r\n")?;
    let mut reader = BufReader::new(connection);
    ResponseHead::read(&mut reader)?.body(&mut reader)
}

/// The head of a response.
#[derive(Clone, Copy, Debug)]
pub struct ResponseHead {
    pub status: u16,
    /// The value of `Content-Length`.
    pub length: Option<u64>,
    is_chunked: bool,
}

impl ResponseHead {
    /// Reads the head of a response, including the blank line that ends it.
    pub fn read(from: &mut impl BufRead) -> Result<Self> {
        let first = line(from)?;
        let status = first
            .split(' ')
            .nth(1)
            .context("the first line of the response has no status")?;
        let mut head = Self {
            status: status.parse()?,
            length: None,
            is_chunked: false,
        };
        loop {
            let line = line(from)?.to_ascii_lowercase();
            match line.split_once(':') {
                Some(("content-length", value)) => head.length = Some(value.trim().parse()?),
                Some(("transfer-encoding", value)) => head.is_chunked = value.trim() == "chunked",
                Some(_) => {}
                None => return Ok(head),
            }
        }
    }

    /// Reads the body that follows the head. If the head specifies no length, the body ends where the stream
    /// ends.
    pub fn body(&self, from: &mut impl BufRead) -> Result<String> {
        let mut body = Vec::new();
        if self.is_chunked {
            loop {
                let size = u64::from_str_radix(&line(from)?, 16)
                    .context("the size of a chunk is not a hexadecimal number")?;
                body.extend(read_exactly(from, size).context("the stream ends within a chunk")?);
                line(from)?;
                if size == 0 {
                    break;
                }
            }
        } else if let Some(length) = self.length {
            body = read_exactly(from, length)?;
        } else {
            from.read_to_end(&mut body)?;
        }
        Ok(String::from_utf8_lossy(&body).into_owned())
    }
}

fn read_exactly(from: &mut impl BufRead, length: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length)?];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn line(from: &mut impl BufRead) -> Result<String> {
    let mut line = String::new();
    from.take(MAX_LINE).read_line(&mut line)?;
    if !line.ends_with('\n') {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof))
            .context("the stream ends within a line");
    }
    Ok(line.trim_end().to_owned())
}

/// Returns the value of the header `name` in a head.
pub(crate) fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// Reads the head of the next request, or returns `None` if the client has half-closed the connection. Bytes
/// received after the head stay in the buffer.
pub(crate) async fn next_head(
    from: &mut (impl AsyncRead + Unpin),
    buffer: &mut Vec<u8>,
) -> io::Result<Option<String>> {
    loop {
        if let Some(end) = head_end(buffer) {
            let head: Vec<u8> = buffer.drain(..end).collect();
            return Ok(Some(String::from_utf8_lossy(&head).into_owned()));
        }
        if buffer.len() > MAX_HEAD {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if from.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

/// Returns the length of the head, including the blank line that ends it, if `bytes` contains the whole head.
fn head_end(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .map(|at| at + 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_ends_as_its_head_defines() {
        for (head, body, read) in [
            ("Content-Length: 3", "abcde", "abc"),
            (
                "Transfer-Encoding: chunked",
                "3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n",
                "abcd",
            ),
            ("Connection: close", "abc", "abc"),
        ] {
            let response = format!("HTTP/1.1 201 Created\r\n{head}\r\n\r\n{body}");
            let mut response = response.as_bytes();
            let answered = ResponseHead::read(&mut response).unwrap();

            assert_eq!(answered.status, 201);
            assert_eq!(answered.body(&mut response).unwrap(), read, "{head}");
        }
    }

    #[test]
    fn a_head_ends_with_a_blank_line() {
        assert_eq!(head_end(b"GET / HTTP/1.1\r\n\r\nrest"), Some(18));
        assert_eq!(head_end(b"GET / HTTP/1.1\r\n"), None);
        assert_eq!(
            header("GET /\r\nContent-Length:  5 \r\n", "content-length"),
            Some("5")
        );
    }
}
