//! Measures the cost of `connect`: connects one after another, as fast as possible.

use std::{collections::BTreeMap, io, net::SocketAddr, time::Duration};

use clap::Args;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{Latency, errno, millis, nanoseconds, patience, race::offset};
use crate::clock::Instant;

/// The duration of connects before the measurement.
const WARM_UP: Duration = Duration::from_millis(50);

/// The pause after each connect, which isn't measured. In this time the server goes to sleep, so that each
/// connect has to wake it. Without a pause, a faster client would find the server awake more often, and rates
/// would differ by several times the difference of the connects.
const REST: Duration = Duration::from_micros(20);

/// The result of the connects.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// The number of all connects, including those of the warm-up.
    pub made: u64,
    /// The connects per second, without the pauses, and with the opening and closing of the sockets.
    pub rate: u64,
    /// The durations of `connect` alone.
    pub connect: Latency,
    pub failures: BTreeMap<String, u64>,
}

/// The targets of the connects: `count` addresses from `first` on.
#[derive(Args, Clone, Debug)]
pub struct Plan {
    /// The first address and the port.
    #[arg(long = "to")]
    pub first: SocketAddr,
    /// The number of addresses to connect to, in turn.
    #[arg(long, default_value_t = 1)]
    pub count: u32,
    /// The distance from one address to the next.
    #[arg(long, default_value_t = 1)]
    pub apart: u32,
    /// The duration of the measurement in milliseconds.
    #[arg(long = "millis", value_parser = millis)]
    pub lasting: Duration,
}

impl Plan {
    /// Returns the addresses, again and again, in an order in which neighbours are far apart, so that the map
    /// entries for the next address are in no CPU cache.
    fn targets(&self) -> impl Iterator<Item = SocketAddr> {
        let Self {
            first,
            count,
            apart,
            ..
        } = *self;
        let count = count.max(1);
        // The stride and the count have no common factor, so that all addresses come before one is repeated.
        let stride = (1..)
            .map(|step| count / 2 + step)
            .find(|it| gcd(*it, count) == 1)
            .unwrap_or(1);
        let next = move |number: &u32| Some((number + stride) % count);
        std::iter::successors(Some(0), next)
            .map(move |number| SocketAddr::new(offset(first.ip(), number * apart), first.port()))
    }
}

const fn gcd(one: u32, other: u32) -> u32 {
    if other == 0 {
        one
    } else {
        gcd(other, one % other)
    }
}

/// Measures connects for some time, after a warm-up.
#[must_use]
pub fn run(plan: &Plan) -> Report {
    let (mut made, mut failures) = (0, BTreeMap::new());
    let mut note = |error: &io::Error| *failures.entry(errno(error)).or_default() += 1;

    let mut targets = plan.targets();
    let mut connect_for = |lasting: Duration| {
        let mut times = Vec::with_capacity(1 << 18);
        let mut busy = Duration::ZERO;
        let start = Instant::now();
        while start.elapsed() < lasting {
            let Some(target) = targets.next() else { break };
            made += 1;
            let begun = Instant::now();
            match once(target) {
                Ok(time) => times.push(nanoseconds(time)),
                Err(error) => note(&error),
            }
            busy += begun.elapsed();
            rest();
        }
        (times, busy)
    };
    connect_for(WARM_UP);
    let (times, busy) = connect_for(plan.lasting);
    let connect = Latency::of(times);
    let rate = u128::from(connect.count) * 1_000_000_000 / busy.as_nanos().max(1);
    Report {
        made,
        rate: u64::try_from(rate).unwrap_or(u64::MAX),
        connect,
        failures,
    }
}

fn once(to: SocketAddr) -> io::Result<Duration> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    // The close resets the connection, so that its port is free at once.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_write_timeout(Some(patience()))?;
    let to = to.into();
    let start = Instant::now();
    socket.connect(&to)?;
    Ok(start.elapsed())
}

/// Waits without sleeping, since a client that sleeps would have to be woken itself.
fn rest() {
    let start = Instant::now();
    while start.elapsed() < REST {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn targets(count: usize, apart: u32) -> BTreeSet<SocketAddr> {
        let plan = Plan {
            first: "10.97.0.0:80".parse().unwrap(),
            count: u32::try_from(count).unwrap(),
            apart,
            lasting: Duration::ZERO,
        };
        plan.targets().take(count).collect()
    }

    #[test]
    fn every_address_comes_before_one_comes_again() {
        for count in [1, 2, 100, 997, 10_000] {
            assert_eq!(targets(count, 1).len(), count);
        }
    }

    #[test]
    fn a_few_addresses_are_spread_over_all() {
        let targets: Vec<_> = targets(3, 256).into_iter().collect();

        let wanted = ["10.97.0.0:80", "10.97.1.0:80", "10.97.2.0:80"];
        assert_eq!(targets, wanted.map(|it| it.parse().unwrap()));
    }
}
