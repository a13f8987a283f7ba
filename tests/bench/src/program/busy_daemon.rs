//! Endpoint changes while the daemon is busy, either because a client queries all Services and the metrics in
//! a loop, or because the daemon scans for listeners on a Service's address. The query loop itself takes CPU
//! time, so its baseline is the time that changes take while the same loop queries another daemon.

use std::{
    net::{IpAddr, Ipv4Addr},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{address::nth_address, admin, load::StopSignal, manifest::Protocol, node::Node};

use super::{
    CHANGE_TARGET, Options, TimeStats, Verdict,
    probe::{self, PORT},
    small_case::settings,
};
use crate::{
    report::{ratio, thousandths},
    services::{FIRST_CLUSTER_IP, service_files},
};

/// The number of Services that `/services` lists.
const SERVICES: u32 = 10_000;

const ENDPOINTS: [IpAddr; 1] = [IpAddr::V4(Ipv4Addr::new(10, 1, 0, 101))];

/// The maximum ratio of a p99 to its baseline's, in thousandths.
const MAX_RATIO: u64 = 1200;

/// The number of changes made without being measured after a Service's address has been added to the node.
/// They give the daemon time to handle the new address for all Services.
const UNMEASURED_CHANGES: u32 = 10;

/// Measures the time from renaming a slice's file until a connection reaches its endpoint: while another
/// daemon is queried, while this one is queried, while it is idle, and while it scans for listeners.
pub(super) fn measure(options: &Options) -> Result<[TimeStats; 4]> {
    let (node, other) = (start_node(options)?, start_node(options)?);
    let changes = |what: &str| -> Result<TimeStats> {
        // This is enough samples for a stable p99.
        let changes = probe::measure_changes(&node, options.changes.saturating_mul(10))?;
        let delay: Vec<_> = changes.iter().map(|change| change.delay).collect();
        let what = format!("one endpoint of {SERVICES} services, {what}");
        Ok(TimeStats::of(what, &delay))
    };
    let other = while_queried(&other, || changes("while another daemon is queried"))?;
    let queried = || changes("while the daemon is queried for Services and metrics");
    let queried = while_queried(&node, queried)?;
    let alone = changes("alone")?;
    // A process could now be listening on this address, so the daemon scans for listeners.
    node.host()
        .ip(&format!("addr add {}/32 dev lo", last_service()))?;
    probe::measure_changes(&node, UNMEASURED_CHANGES)?;
    let scanning = changes("while the daemon polls for local listeners")?;
    Ok([other, queried, alone, scanning])
}

/// Returns the last Service's address.
fn last_service() -> IpAddr {
    nth_address(FIRST_CLUSTER_IP, SERVICES - 1)
}

/// Starts a node and waits until all Services are programmed.
fn start_node(options: &Options) -> Result<Node> {
    let node = probe::create_node(settings(&options.common, SERVICES)?)?;
    for file in service_files(SERVICES, Protocol::UDP, [PORT; 2], |_| ENDPOINTS) {
        node.apply(file)?;
    }
    node.start()?;
    let client = node.pod("client")?;
    probe::wait_until_translated(&client, std::iter::once(last_service()))?;
    Ok(node)
}

/// Runs `act` while a thread queries a daemon's `/services` and `/metrics` in a loop.
fn while_queried<T>(node: &Node, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let (stop, socket) = (StopSignal::default(), node.admin_socket());
    thread::scope(|scope| {
        let queries = scope.spawn(|| -> Result<()> {
            while !stop.is_stopped() {
                for path in ["/services", "/metrics"] {
                    let answer = admin::get(&socket, path)?;
                    ensure!(answer.status == 200, "GET {path}: {}", answer.status);
                }
            }
            Ok(())
        });
        let result = stop.stop_after(act);
        queries
            .join()
            .ok()
            .context("the thread that sends queries panicked")??;
        result
    })
}

/// Returns three verdicts: one on the median while the daemon is queried; one on the p99 while it is queried,
/// compared with the p99 while another daemon is queried; and one on the p99 during listener scans, compared
/// with an idle daemon's.
pub(super) fn verdicts([other, queried, alone, scanning]: &[TimeStats; 4]) -> [Verdict; 3] {
    let compared = |times: &TimeStats, base: &TimeStats, name| {
        let ratio = ratio(times.p99_ns, base.p99_ns);
        let most = thousandths(MAX_RATIO);
        let target = format!("{}: p99 at most {most} of the p99 {name}", times.what);
        Verdict::new(target, thousandths(ratio), ratio <= MAX_RATIO)
    };
    [
        queried.verdict(CHANGE_TARGET),
        compared(queried, other, "while another is"),
        compared(scanning, alone, "alone"),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_p99_a_quarter_above_the_baseline_misses_the_target() {
        let times = [20, 25, 8, 9].map(Duration::from_millis);
        let times = times.map(|time| TimeStats::of(String::new(), &[time; 3]));

        let met = verdicts(&times).map(|verdict| verdict.met);

        assert_eq!(met, [true, false, true]);
    }
}
