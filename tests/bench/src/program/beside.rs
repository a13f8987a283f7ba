//! Changes of an endpoint while others read: all Services and the metrics are asked for in a loop, or
//! the daemon looks for listeners on an address of a Service. The loop takes CPU from whatever runs
//! beside it, so its row is held against changes while another daemon is asked for as much.

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

/// The longest that a change may take, in thousandths of its time beside the load that it is held
/// against.
const MOST: u64 = 1200;

/// The number of changes that are waited for, not measured, after an address was added: it concerns all
/// Services.
const SETTLING: u32 = 10;

/// The times from the rename of a slice until a connect reaches its endpoint.
pub(super) fn measure(options: &Options) -> Result<[Times; 4]> {
    let (node, other) = (started(options)?, started(options)?);
    let changes = |what: &str| -> Result<Times> {
        // Enough for a steady p99.
        let changes = probe::change(&node, options.changes.saturating_mul(10))?;
        let reached: Vec<_> = changes.iter().map(|change| change.reached).collect();
        let what = format!("one endpoint of {SERVICES} services, {what}");
        Ok(Times::of(what, &reached))
    };
    let other = while_asked(&other, || changes("while another daemon is asked"))?;
    let asked = || changes("while all services and the metrics are asked for");
    let asked = while_asked(&node, asked)?;
    let alone = changes("alone")?;
    // Something may listen there now, so the daemon looks for it.
    node.host().ip(&format!("addr add {}/32 dev lo", last()))?;
    probe::change(&node, SETTLING)?;
    let looked = changes("while listeners are looked for")?;
    Ok([other, asked, alone, looked])
}

/// The address of the last Service.
fn last() -> IpAddr {
    offset(FIRST, SERVICES - 1)
}

/// A node that has programmed all Services.
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

/// Does something while all Services and the metrics are asked for, each again as soon as it is there.
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
        asking.join().ok().context("a thread panicked")??;
        done
    })
}

/// The verdicts on the times: the p99 while the daemon is asked beside that while another is, and while
/// it looks for listeners beside that alone; and the median while it is asked.
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
