//! Changes of an endpoint while others read: all Services and the metrics are asked for in a loop, or
//! the daemon looks for listeners on an address of a Service.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr},
    os::unix::net::UnixStream,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{load::race::offset, manifest::Protocol, node::Node};

use super::{
    Options, Times, Verdict,
    few::settings,
    probe::{self, PORT},
};
use crate::{
    report::thousandths,
    services::{FIRST, many},
};

/// The number of Services that `/services` shows.
const SERVICES: u32 = 10_000;

const ENDPOINTS: [IpAddr; 1] = [IpAddr::V4(Ipv4Addr::new(10, 1, 0, 101))];

/// The longest that a change may take, in thousandths of its time alone.
const MOST: u64 = 1200;

/// The times from the rename of a slice until a connect reaches its endpoint.
#[derive(Debug, Default)]
pub(super) struct Beside {
    alone: Vec<Duration>,
    asked: Vec<Duration>,
    looked: Vec<Duration>,
}

pub(super) fn measure(options: &Options) -> Result<Beside> {
    let services = SERVICES;
    let room = Options {
        services,
        ..options.clone()
    };
    let node = probe::node(settings(&room)?)?;
    for file in many(services, Protocol::Udp, [PORT; 2], |_| ENDPOINTS) {
        node.apply(file)?;
    }
    node.start()?;
    let client = node.pod("client")?;
    let last = offset(FIRST, services.saturating_sub(1));
    probe::until_all(&client, std::iter::once(last))?;
    let changes = || -> Result<Vec<Duration>> {
        let changes = probe::change(&node, options.changes)?;
        Ok(changes.iter().map(|change| change.reached).collect())
    };
    let alone = changes()?;
    let asked = while_asked(&node, changes)?;
    // Something may listen there now, so the daemon looks for it.
    node.host().ip(&format!("addr add {last}/32 dev lo"))?;
    Ok(Beside {
        alone,
        asked,
        looked: changes()?,
    })
}

/// Does something while all Services and the metrics are asked for, each again as soon as it is there.
fn while_asked<T>(node: &Node, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let is_over = AtomicBool::new(false);
    let socket = node.admin_socket();
    thread::scope(|scope| {
        let asking = scope.spawn(|| -> Result<()> {
            while !is_over.load(Ordering::Relaxed) {
                for path in ["/services", "/metrics"] {
                    ask(&socket, path).with_context(|| format!("GET {path}"))?;
                }
            }
            Ok(())
        });
        let done = act();
        is_over.store(true, Ordering::Relaxed);
        match asking.join() {
            Ok(asked) => asked.and(done),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn ask(socket: &Path, path: &str) -> Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "no good answer");
    Ok(())
}

impl Beside {
    pub(super) fn times(&self) -> Vec<Times> {
        let of = |what: &str, times: &[Duration]| {
            let what = format!("one endpoint of {SERVICES} services, {what}");
            Times::of(what, times)
        };
        vec![
            of("alone", &self.alone),
            of(
                "while all services and the metrics are asked for",
                &self.asked,
            ),
            of("while listeners are looked for", &self.looked),
        ]
    }
}

/// The verdicts on the times: each p99 beside that of the first.
pub(super) fn verdicts(times: &[Times]) -> Vec<Verdict> {
    let Some((alone, others)) = times.split_first() else {
        return Vec::new();
    };
    let verdict = |other: &Times| {
        let ratio = other.p99_ns.saturating_mul(1000) / alone.p99_ns.max(1);
        Verdict {
            target: format!(
                "{}: p99 at most {} of that alone",
                other.what,
                thousandths(MOST)
            ),
            measured: thousandths(ratio),
            met: ratio <= MOST,
        }
    };
    others.iter().map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_takes_a_quarter_longer_beside_readers_misses_the_target() {
        let of = |ms: u64| vec![Duration::from_millis(ms); 3];
        let beside = Beside {
            alone: of(8),
            asked: of(9),
            looked: of(10),
        };

        let verdicts = verdicts(&beside.times());

        let met: Vec<_> = verdicts.iter().map(|verdict| verdict.met).collect();
        assert_eq!(met, [true, false]);
    }
}
