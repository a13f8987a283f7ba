//! Streams to measure: a server that floods or echoes, over TCP and over TLS, and its clients.
//! A connection's first byte says what it is for.

use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};
use serde::{Deserialize, Serialize};

pub mod client;
pub mod serve;

/// The server sends for ever.
const FLOOD: u8 = b'F';
/// The same, and the server keeps little in the kernel: nobody is going to read it.
const STALL: u8 = b'S';
/// The server sends back what comes.
const ECHO: u8 = b'E';

/// The buffers of sockets that nobody reads from.
const LITTLE: usize = 64 * 1024;

/// How much is read or written at once.
const CHUNK: usize = 64 * 1024;

/// What a client got out of floods.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Flood {
    /// How many bytes came while it was measured.
    pub bytes: u64,
    /// How long that was.
    pub took_ns: u64,
    /// How long the client itself ran on a CPU meanwhile.
    pub cpu_ns: u64,
}

impl Flood {
    /// Millions of bytes a second.
    #[must_use]
    pub fn megabytes(&self) -> u64 {
        per(u128::from(self.bytes) * 1000, self.took_ns)
    }
}

/// A ratio without fractions; 0 if nothing was measured.
pub fn per(value: u128, by: u64) -> u64 {
    u64::try_from(value / u128::from(by.max(1))).unwrap_or(u64::MAX)
}

/// How long this process has run on a CPU.
fn own_cpu() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).context("no usage")?;
    let micros = (usage.user_time() + usage.system_time()).num_microseconds();
    Ok(Duration::from_micros(u64::try_from(micros)?))
}
