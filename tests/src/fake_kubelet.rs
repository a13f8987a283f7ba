//! A server that behaves like a kubelet, and a client for it. They use HTTP/1.1 over TLS 1.3, including
//! upgrades, half-closes, stalls and resets. The server records the events on each connection.
//!
//! | request | response |
//! |---|---|
//! | `GET /healthz` | `ok` |
//! | `GET /bytes/N` | N bytes of the pattern |
//! | `POST /sum` | the length of the body, and its digest |
//! | `POST /echo` | the body |
//! | `POST /until-end` | like `/sum`, for everything up to the client's half-close; then the server closes |
//! | `GET /upgrade` | 101 and [`FIRST_BYTES`] in one segment, then echoes until the client's half-close |
//! | `GET /reset` | a TCP reset |
//! | `GET /stall` | none; the server stops reading |

use std::{
    fmt::{self, Display},
    io::Write,
    net::SocketAddr,
    str::FromStr,
};

use anyhow::{Context as _, Result};
use aws_lc_rs::digest::{Context, SHA256};
use serde::{Deserialize, Serialize};

pub mod client;
pub mod server;

/// The bytes that the server sends after the head of an upgrade response, in the same segment.
pub const FIRST_BYTES: &[u8] = b"first bytes of the upgraded stream";

/// The length of the repeating pattern. It is prime, so that swapping two blocks of a body changes the
/// digest.
const PATTERN: usize = 65_521;

/// Returns the pattern that is repeated to fill the bodies.
#[must_use]
pub fn pattern() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(PATTERN + 8);
    while bytes.len() < PATTERN {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(PATTERN);
    bytes
}

/// Sends a body of `length` bytes, and returns its sum.
pub fn send(to: &mut impl Write, length: u64) -> Result<Sum> {
    let pattern = pattern();
    let mut builder = SumBuilder::default();
    while builder.bytes() < length {
        let remaining = usize::try_from(length - builder.bytes())?;
        let part = &pattern[..pattern.len().min(remaining)];
        to.write_all(part)?;
        builder.add(part);
    }
    to.flush()?;
    Ok(builder.finish())
}

/// A byte count, and the SHA-256 digest of the bytes.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Sum {
    pub bytes: u64,
    /// The digest as hexadecimal digits.
    pub digest: String,
}

impl Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.bytes, self.digest)
    }
}

impl FromStr for Sum {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (bytes, digest) = text.split_once(' ').context("expected BYTES DIGEST")?;
        Ok(Self {
            bytes: bytes.parse()?,
            digest: digest.to_owned(),
        })
    }
}

/// Computes the [`Sum`] of bytes that are added part by part.
#[derive(Clone)]
pub struct SumBuilder {
    bytes: u64,
    context: Context,
}

impl Default for SumBuilder {
    fn default() -> Self {
        Self {
            bytes: 0,
            context: Context::new(&SHA256),
        }
    }
}

impl SumBuilder {
    /// Adds the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.context.update(bytes);
        self.bytes += count(bytes.len());
    }

    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the sum of all the bytes added.
    #[must_use]
    pub fn finish(self) -> Sum {
        let digest = self.context.finish();
        Sum {
            bytes: self.bytes,
            digest: digest
                .as_ref()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        }
    }
}

/// Converts a byte count to the type that sums and records use.
pub(crate) fn count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// The server's record of one connection.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ConnectionRecord {
    pub peer: SocketAddr,
    /// The events on the connection, in the order in which they occurred.
    pub steps: Vec<String>,
    pub over: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_is_parsed_as_it_is_formatted() {
        let mut builder = SumBuilder::default();
        builder.add(b"abc");

        let sum = builder.finish();

        assert!(sum.to_string().starts_with("3 ba7816bf8f01cfea"));
        assert_eq!(sum.to_string().parse::<Sum>().unwrap(), sum);
    }

    #[test]
    fn the_pattern_does_not_repeat_within_itself() {
        let pattern = pattern();

        assert_eq!(pattern.len(), PATTERN);
        assert_ne!(pattern[..32], pattern[32..64]);
    }
}
