//! Measures the throughput and latency of streams. A server floods its clients, or echoes what they send,
//! over TCP or TLS. The first byte that a client sends on a connection selects the mode.

use std::time::Duration;

use anyhow::{Context as _, Result};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};
use serde::{Deserialize, Serialize};

pub mod client;
pub mod server;

/// The mode in which the server sends data as fast as possible.
const FLOOD: u8 = b'F';
/// Like the mode for floods, but for a client that doesn't read: both sides use small socket buffers.
pub const STALL: u8 = b'S';
/// The mode in which the server echoes the bytes it receives.
pub const ECHO: u8 = b'E';

/// The size of the socket buffers in mode [`STALL`].
const SMALL_BUFFER: usize = 64 * 1024;

/// The maximum size of a single read or write.
const CHUNK: usize = 64 * 1024;

/// The result of a flood, for all connections of a client.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct FloodReport {
    /// The number of bytes that the client received during the measurement.
    pub bytes: u64,
    /// The duration of the measurement.
    pub took_ns: u64,
    /// The CPU time that the client used during the measurement.
    pub cpu_ns: u64,
}

impl FloodReport {
    /// Returns the throughput in megabytes (millions of bytes) per second.
    #[must_use]
    pub fn megabytes(&self) -> u64 {
        divide(u128::from(self.bytes) * 1000, self.took_ns)
    }
}

/// Divides `value` by `by`, rounding down. Treats a divisor of 0 as 1.
pub fn divide(value: u128, by: u64) -> u64 {
    u64::try_from(value / u128::from(by.max(1))).unwrap_or(u64::MAX)
}

/// Returns the CPU time that this process has used.
fn own_cpu_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).context("getrusage failed")?;
    let micros = (usage.user_time() + usage.system_time()).num_microseconds();
    Ok(Duration::from_micros(u64::try_from(micros)?))
}
