//! Changes of an endpoint while others read: all Services and the metrics are asked for in a loop, or
//! the daemon looks for listeners on an address of a Service.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use tunnel_tests::{admin, load::race::offset, manifest::Protocol, node::Node};

use super::{
    Options, Times, Verdict,
    few::settings,
    probe::{self, PORT},
};
use crate::{
    report::{ratio, thousandths},
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
                    let answer = admin::get(&socket, path)?;
                    ensure!(answer.status == 200, "GET {path}: {}", answer.status);
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
        let ratio = ratio(other.p99_ns, alone.p99_ns);
        let most = thousandths(MOST);
        let target = format!("{}: p99 at most {most} of that alone", other.what);
        Verdict::new(target, thousandths(ratio), ratio <= MOST)
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
