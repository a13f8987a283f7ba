//! Changes of an endpoint while others read: all Services and the metrics are asked for in a loop, or
//! the daemon looks for listeners on an address of a Service.

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
pub(super) fn measure(options: &Options) -> Result<[Times; 3]> {
    let node = probe::node(settings(&options.common, SERVICES)?)?;
    for file in many(SERVICES, Protocol::UDP, [PORT; 2], |_| ENDPOINTS) {
        node.apply(file)?;
    }
    node.start()?;
    let client = node.pod("client")?;
    let last = offset(FIRST, SERVICES - 1);
    probe::until_all(&client, std::iter::once(last))?;
    let changes = |what: &str| -> Result<Times> {
        let changes = probe::change(&node, options.changes)?;
        let reached: Vec<_> = changes.iter().map(|change| change.reached).collect();
        let what = format!("one endpoint of {SERVICES} services, {what}");
        Ok(Times::of(what, &reached))
    };
    let alone = changes("alone")?;
    let asked = || changes("while all services and the metrics are asked for");
    let asked = while_asked(&node, asked)?;
    // Something may listen there now, so the daemon looks for it.
    node.host().ip(&format!("addr add {last}/32 dev lo"))?;
    let looked = changes("while listeners are looked for")?;
    Ok([alone, asked, looked])
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

/// The verdicts on the times: each p99 beside that of the first.
pub(super) fn verdicts([alone, others @ ..]: &[Times; 3]) -> [Verdict; 2] {
    others.each_ref().map(|other| {
        let ratio = ratio(other.p99_ns, alone.p99_ns);
        let most = thousandths(MOST);
        let target = format!("{}: p99 at most {most} of that alone", other.what);
        Verdict::new(target, thousandths(ratio), ratio <= MOST)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_change_that_takes_a_quarter_longer_beside_readers_misses_the_target() {
        let times = [8, 9, 10].map(Duration::from_millis);
        let times = times.map(|time| Times::of(String::new(), &[time; 3]));

        assert_eq!(verdicts(&times).map(|verdict| verdict.met), [true, false]);
    }
}
