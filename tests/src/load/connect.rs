//! Connects one after another, as fast as can be: what `connect` costs.

use std::{collections::BTreeMap, io, net::SocketAddr, time::Duration};

use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{Latency, PATIENCE, errno, nanoseconds};
use crate::clock::Instant;

/// What the connects came to.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// How many there were a second, with making and closing the sockets.
    pub rate: u64,
    /// How long `connect` alone took.
    pub connect: Latency,
    /// The failures, by error.
    pub failures: BTreeMap<String, u64>,
}

/// Connects for some time, of which the first part isn't counted.
#[must_use]
pub fn run(to: SocketAddr, warm_up: Duration, lasting: Duration) -> Report {
    let mut failures = BTreeMap::new();
    let mut note = |error: &io::Error| *failures.entry(errno(error)).or_default() += 1;

    let start = Instant::now();
    while start.elapsed() < warm_up {
        if let Err(error) = once(to) {
            note(&error);
        }
    }
    let mut times = Vec::with_capacity(1 << 18);
    let start = Instant::now();
    while start.elapsed() < lasting {
        match once(to) {
            Ok(time) => times.push(nanoseconds(time)),
            Err(error) => note(&error),
        }
    }
    let connect = Latency::of(times);
    let rate = u128::from(connect.count) * 1_000_000_000 / start.elapsed().as_nanos().max(1);
    Report {
        rate: u64::try_from(rate).unwrap_or(u64::MAX),
        connect,
        failures,
    }
}

fn once(to: SocketAddr) -> io::Result<Duration> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    // Closing resets the connection: its port is free again at once.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let to = to.into();
    let start = Instant::now();
    socket.connect(&to)?;
    Ok(start.elapsed())
}
