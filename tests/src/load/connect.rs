//! Measures the cost of connect(), or of a whole request over a new connection, by repeating it as fast as possible.

use std::{
    collections::BTreeMap,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use clap::Args;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{Latency, error_name, nanoseconds, parse_millis, timeout};
use crate::{address::nth_address, clock::Instant};

/// The time for which connections are made before the measurement begins.
const WARM_UP: Duration = Duration::from_millis(50);

/// The pause after each connect(), excluded from the measurement. It lets the server go to sleep, so that
/// each connection has to wake it. Without a pause, a faster client would find the server awake more often,
/// and this would affect the rate more than the cost of connect() does.
const PAUSE: Duration = Duration::from_micros(20);

/// The results of a measurement.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Report {
    /// The total number of connection attempts, including those during the warm-up.
    pub made: u64,
    /// The number of connections per second, excluding the pauses but including the time to open and close
    /// the sockets.
    pub rate: u64,
    /// The distribution of the time that connect() took, together with the request if there is one.
    pub connect: Latency,
    pub failures: BTreeMap<String, u64>,
}

/// The addresses to connect to: `count` of them, starting at `first`.
#[derive(Args, Clone, Debug)]
pub struct Plan {
    /// The first address, and the port for all addresses.
    #[arg(long = "to")]
    pub first: SocketAddr,
    /// The number of addresses, which are connected to in turn.
    #[arg(long, default_value_t = 1)]
    pub count: u32,
    /// The distance between one address and the next.
    #[arg(long, default_value_t = 1)]
    pub apart: u32,
    /// Connect to ports that follow the first one, instead of to addresses.
    #[arg(long)]
    pub ports: bool,
    /// Send a byte over each connection and wait for one, without a pause between connections.
    #[arg(long)]
    pub request: bool,
    /// The duration of the measurement in milliseconds.
    #[arg(long = "millis", value_parser = parse_millis)]
    pub duration: Duration,
}

impl Plan {
    /// Returns the addresses in an endless cycle. Consecutive ones are far apart, so that the map entries for
    /// the next address are unlikely to be in a CPU cache.
    fn targets(&self) -> impl Iterator<Item = SocketAddr> {
        let Self {
            first,
            count,
            apart,
            ports,
            ..
        } = *self;
        let count = count.max(1);
        // The stride and the count are coprime, so no address is repeated before all others have been used.
        let stride = (1..)
            .map(|step| count / 2 + step)
            .find(|it| gcd(*it, count) == 1)
            .unwrap_or(1);
        let next = move |number: &u32| Some((number + stride) % count);
        std::iter::successors(Some(0), next).map(move |number| {
            let offset = number * apart;
            if ports {
                let offset = u16::try_from(offset).unwrap_or(u16::MAX);
                SocketAddr::new(first.ip(), first.port().saturating_add(offset))
            } else {
                SocketAddr::new(nth_address(first.ip(), offset), first.port())
            }
        })
    }
}

const fn gcd(one: u32, other: u32) -> u32 {
    if other == 0 {
        one
    } else {
        gcd(other, one % other)
    }
}

/// Measures connect() for the planned duration, after a warm-up.
#[must_use]
pub fn run(plan: &Plan) -> Report {
    let (mut made, mut failures) = (0, BTreeMap::new());
    let mut record_failure =
        |error: &io::Error| *failures.entry(error_name(error)).or_default() += 1;

    let mut targets = plan.targets();
    let mut connect_for = |duration: Duration| {
        let mut times = Vec::with_capacity(1 << 18);
        let mut busy = Duration::ZERO;
        let start = Instant::now();
        while start.elapsed() < duration {
            let Some(target) = targets.next() else { break };
            made += 1;
            let begun = Instant::now();
            match connect_once(target, plan.request) {
                Ok(time) => times.push(nanoseconds(time)),
                Err(error) => record_failure(&error),
            }
            busy += begun.elapsed();
            if !plan.request {
                spin();
            }
        }
        (times, busy)
    };
    connect_for(WARM_UP);
    let (times, busy) = connect_for(plan.duration);
    let connect = Latency::of(times);
    let rate = u128::from(connect.count) * 1_000_000_000 / busy.as_nanos().max(1);
    Report {
        made,
        rate: u64::try_from(rate).unwrap_or(u64::MAX),
        connect,
        failures,
    }
}

fn connect_once(to: SocketAddr, request: bool) -> io::Result<Duration> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    // With this option, closing the socket resets the connection, which frees its port at once.
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_write_timeout(Some(timeout()))?;
    let to = to.into();
    let start = Instant::now();
    socket.connect(&to)?;
    if request {
        let mut stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(timeout()))?;
        stream.write_all(&[1])?;
        stream.read_exact(&mut [0])?;
    }
    Ok(start.elapsed())
}

/// Waits without sleeping, since a client that sleeps would itself have to be woken.
fn spin() {
    let start = Instant::now();
    while start.elapsed() < PAUSE {
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
            ports: false,
            request: false,
            duration: Duration::ZERO,
        };
        plan.targets().take(count).collect()
    }

    #[test]
    fn all_addresses_come_before_one_is_repeated() {
        for count in [1, 2, 100, 997, 10_000] {
            assert_eq!(targets(count, 1).len(), count);
        }
    }

    #[test]
    fn addresses_have_the_given_distance() {
        let targets: Vec<_> = targets(3, 256).into_iter().collect();

        let wanted = ["10.97.0.0:80", "10.97.1.0:80", "10.97.2.0:80"];
        assert_eq!(targets, wanted.map(|it| it.parse().unwrap()));
    }
}
