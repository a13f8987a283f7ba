//! Endpoint changes while the daemon is busy: a client queries all Services and the metrics in a loop, or
//! the daemon scans for listeners on the address of a Service. The query loop takes CPU time itself, so
//! its baseline is the time of changes while the same loop queries another daemon.

use std::{
    net::{IpAddr, Ipv4Addr},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    admin,
    load::{Enough, race::offset},
    manifest::Protocol,
    node::Node,
};

use super::{
    CHANGED, Options, Times, Verdict,
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

/// The maximum p99, in thousandths of the baseline's p99.
const MOST: u64 = 1200;

/// The number of unmeasured changes after the address of a Service was added to the node: the daemon first
/// handles the new address for all Services.
const SETTLING: u32 = 10;

/// Measures the times from the rename of a slice until a connect reaches its endpoint: while another
/// daemon is queried, while this one is queried, while it is idle, and while it scans for listeners.
pub(super) fn measure(options: &Options) -> Result<[Times; 4]> {
    let (node, other) = (started(options)?, started(options)?);
    let changes = |what: &str| -> Result<Times> {
        // Enough samples for a stable p99.
        let changes = probe::change(&node, options.changes.saturating_mul(10))?;
        let reached: Vec<_> = changes.iter().map(|change| change.reached).collect();
        let what = format!("one endpoint of {SERVICES} services, {what}");
        Ok(Times::of(what, &reached))
    };
    let other = while_asked(&other, || changes("while another daemon is asked"))?;
    let asked = || changes("while all services and the metrics are asked for");
    let asked = while_asked(&node, asked)?;
    let alone = changes("alone")?;
    // A process may listen on this address now, so the daemon scans for listeners.
    node.host().ip(&format!("addr add {}/32 dev lo", last()))?;
    probe::change(&node, SETTLING)?;
    let looked = changes("while listeners are looked for")?;
    Ok([other, asked, alone, looked])
}

/// Returns the address of the last Service.
fn last() -> IpAddr {
    offset(FIRST, SERVICES - 1)
}

/// Starts a node, and waits until all Services are programmed.
fn started(options: &Options) -> Result<Node> {
    let node = probe::node(settings(&options.common, SERVICES)?)?;
    for file in many(SERVICES, Protocol::UDP, [PORT; 2], |_| ENDPOINTS) {
        node.apply(file)?;
    }
    node.start()?;
    let client = node.pod("client")?;
    probe::until_all(&client, std::iter::once(last()))?;
    Ok(node)
}

/// Runs `act` while a thread queries `/services` and `/metrics` of a daemon in a loop.
fn while_asked<T>(node: &Node, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let (enough, socket) = (Enough::default(), node.admin_socket());
    thread::scope(|scope| {
        let asking = scope.spawn(|| -> Result<()> {
            while !enough.is_said() {
                for path in ["/services", "/metrics"] {
                    let answer = admin::get(&socket, path)?;
                    ensure!(answer.status == 200, "GET {path}: {}", answer.status);
                }
            }
            Ok(())
        });
        let done = enough.after(act);
        asking.join().ok().context("the thread that sends queries panicked")??;
        done
    })
}

/// Returns the verdicts: on the median while the daemon is queried, on its p99 compared with that while
/// another daemon is queried, and on the p99 during listener scans compared with that of an idle daemon.
pub(super) fn verdicts([other, asked, alone, looked]: &[Times; 4]) -> [Verdict; 3] {
    let beside = |times: &Times, base: &Times, name| {
        let ratio = ratio(times.p99_ns, base.p99_ns);
        let most = thousandths(MOST);
        let target = format!("{}: p99 at most {most} of that {name}", times.what);
        Verdict::new(target, thousandths(ratio), ratio <= MOST)
    };
    [
        asked.verdict(CHANGED),
        beside(asked, other, "while another is"),
        beside(looked, alone, "alone"),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_change_that_takes_a_quarter_longer_beside_readers_misses_the_target() {
        let times = [20, 25, 8, 9].map(Duration::from_millis);
        let times = times.map(|time| Times::of(String::new(), &[time; 3]));

        let met = verdicts(&times).map(|verdict| verdict.met);

        assert_eq!(met, [true, false, true]);
    }
}
