//! Puts Services under load in the background while a test acts on the node, and checks the loads' reports.

use std::{collections::BTreeSet, net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock::Instant,
    load::{Plan, Report, StopSignal, tcp, udp},
    load_scale::LoadScale,
};

use crate::{
    fixture::Scene,
    support::{DNS, Dialer, HTTP, Vip, ensure_eq},
};

/// The time limit for a load that is not stopped earlier.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// The minimum duration of a load: long enough for it to reach both backends of a Service even at a low rate.
const MIN_DURATION: Duration = Duration::from_millis(2500);

impl Scene {
    /// Runs `action` at least `times` times while the client pod puts load on the given Services over TCP and
    /// UDP, in both address families. Every attempt must be answered by one of the Service's servers, and
    /// each of these servers must answer at least one attempt.
    pub(crate) fn under_load(
        &self,
        services: &[(Vip, &[&str])],
        times: usize,
        action: impl Fn(usize) -> Result<()>,
    ) -> Result<()> {
        let rate = LoadScale::from_environment().count(200);
        let enough = StopSignal::default();
        let plan = |to: SocketAddr| Plan::new(to, rate, LOAD_TIMEOUT).stop_on(&enough);
        let sockets = |domain, kind| self.client.socket(domain, kind);
        thread::scope(|scope| {
            let mut loads = Vec::new();
            let by_dialer = |dialer: Dialer| services.iter().map(move |service| (dialer, service));
            for (dialer, (vip, servers)) in [Dialer::V4, Dialer::V6].into_iter().flat_map(by_dialer)
            {
                let http = plan(dialer.address(*vip, HTTP));
                loads.push((servers, scope.spawn(move || tcp::run(&http, &sockets))));
                for mode in [udp::Mode::Connected, udp::Mode::Unconnected] {
                    let dns = plan(dialer.address(*vip, DNS));
                    let load = scope.spawn(move || udp::run(&dns, mode, &sockets));
                    loads.push((servers, load));
                }
            }
            enough.stop_after(|| repeat(times, action))?;
            for (servers, load) in loads {
                let report = load.join().ok().context("a load panicked")?;
                expect_all_answered(&report)?;
                let seen: BTreeSet<&str> = report.servers.keys().map(String::as_str).collect();
                ensure_eq("servers", seen, servers.iter().copied().collect())
                    .with_context(|| format!("{report:?}"))?;
            }
            Ok(())
        })
    }
}

/// Runs `action` at least `times` times, and for at least [`MIN_DURATION`].
fn repeat(times: usize, action: impl Fn(usize) -> Result<()>) -> Result<()> {
    let start = Instant::now();
    let mut number = 0;
    while number < times || start.elapsed() < MIN_DURATION {
        action(number)?;
        number += 1;
    }
    Ok(())
}

/// Asserts that every attempt in a load was answered, and that its peer was the dialled address.
pub(crate) fn expect_all_answered(report: &Report) -> Result<()> {
    ensure!(report.failed() == 0, "{report:?}");
    ensure!(report.attempts > 0, "the load made no attempt");
    ensure_eq("answered", report.answered, report.attempts)?;
    ensure_eq("other peers", report.other_peer, 0)
}
