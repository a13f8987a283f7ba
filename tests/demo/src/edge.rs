//! The second part of the demo: a kubelet on an edge node to which the cloud cannot connect, and the
//! kubelet's clients in the cloud.
#![expect(clippy::print_stdout, reason = "the demo prints to a terminal")]

use std::{net::SocketAddr, time::Duration};

use anyhow::Result;
use tunnel_tests::{
    clock::{self, Instant},
    culvert_instance::InstanceSettings,
    edge_node::{EDGE_NAME, EDGE_V4, EDGE_V6},
    fake_kubelet::ConnectionRecord,
    load::{self, Report, kubelet::Dialog},
    pod::path_to_string,
    sandbox::{COMMAND_TIMEOUT, Process, Sandbox},
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
};

use crate::{Faults, finish_all, heading, start_load, table::distribution};

/// The number of requests per second that each client sends while the agent is cut off.
const RATE: u32 = 20;

/// The maximum number of concurrent requests from each client.
const WORKERS: &str = "64";

/// The duration of the load before the link is cut, and after it is restored.
const BEFORE: Duration = Duration::from_secs(1);
const AFTER: Duration = Duration::from_secs(3);

/// The time for which the link stays cut.
const CUT_TIME: Duration = Duration::from_secs(10);

/// The size of each request body and response body, in bytes.
const BODY: u64 = 1_000_000;

/// The second part of the demo.
pub(super) struct EdgeDemo {
    pub(super) testbed: TunnelTestbed,
    faults: Faults,
}

impl EdgeDemo {
    pub(super) fn prepare(settings: InstanceSettings) -> Result<Self> {
        heading("An edge node that only dials out");
        let testbed = TunnelTestbed::prepare(settings)?;
        println!("  cloud 192.0.2.1 with a pod; edge {EDGE_NAME} with {EDGE_V4} and {EDGE_V6}");
        println!("  a kubelet-like server on the edge, ports {KUBELET_PORTS:?}");
        Ok(Self {
            testbed,
            faults: Faults::default(),
        })
    }

    pub(super) fn run(&mut self) -> Result<()> {
        let start = Instant::now();
        let to = TunnelTestbed::addr_v4(KUBELET_PORTS[0]);
        match self.testbed.node().host().connect(to) {
            Ok(_) => self
                .faults
                .add(format!("connect to {to} succeeds without a tunnel")),
            Err(error) => println!("  host → {to}: {}", load::error_name(&error)),
        }
        self.start_tunnel()?;
        self.run_dialogs()?;
        self.cut_link_under_load()?;
        heading("culvert nodes");
        let output = self.testbed.node().culvert(&["nodes"])?;
        print!("{}{}", output.stdout, output.stderr);
        let took = start.elapsed().as_secs_f64();
        println!("\nthe second part took {took:.1} s");
        self.faults.conclude()
    }

    fn start_tunnel(&self) -> Result<()> {
        let start = Instant::now();
        self.testbed.node().start()?;
        let took = start.elapsed().as_millis();
        println!("  culvert node, with gateway and ingress: ready {took} ms after its start");
        let start = Instant::now();
        self.testbed.edge().start_agent(KUBELET_PORTS)?;
        self.testbed.wait_for_kubelet()?;
        let took = start.elapsed().as_millis();
        println!("  culvert agent: the kubelet is reached {took} ms after its start");
        Ok(())
    }

    fn exchanges(&self) -> Result<Vec<ConnectionRecord>> {
        Ok(self.testbed.kubelet().record()?.exchanges)
    }

    /// Returns the two clients, the host and a pod, each with the address that it dials.
    fn clients(&self) -> Result<[(&'static str, Sandbox, SocketAddr); 2]> {
        let pod = self.testbed.pod()?;
        let host = self.testbed.node().host().clone();
        Ok([
            ("host", host, TunnelTestbed::addr_v4(KUBELET_PORTS[0])),
            (
                "pod",
                Sandbox::clone(&pod),
                TunnelTestbed::addr_v6(KUBELET_PORTS[0]),
            ),
        ])
    }

    fn start_dialog(
        &self,
        sandbox: &Sandbox,
        to: SocketAddr,
        requests: &[&str],
    ) -> Result<Process> {
        let ca = path_to_string(&self.testbed.edge().kubelet_files().ca)?;
        let command = sandbox.lab_command(&[&["load", "dialog"], requests].concat())?;
        command.option("--to", to).option("--ca", ca).start()
    }

    fn run_dialogs(&mut self) -> Result<()> {
        let [bytes, sum, half] = ["bytes", "sum", "until-end"].map(|ask| format!("{ask}={BODY}"));
        let exchange = ["healthz", &bytes, &sum, "echo=hello", "close"];
        let upgrade = "upgrade exchange=one pause=300 exchange=two close";
        let upgrade: Vec<_> = upgrade.split(' ').collect();
        for (what, requests) in [
            ("HTTP requests", &exchange[..]),
            ("an upgrade that stays open", &upgrade[..]),
            ("a half-close", &[&*half][..]),
        ] {
            heading(&format!("TLS to the kubelet behind the edge: {what}"));
            for (name, sandbox, to) in self.clients()? {
                let before = self.exchanges()?.len();
                let output = self
                    .start_dialog(&sandbox, to, requests)?
                    .finish(COMMAND_TIMEOUT)?;
                let dialog: Dialog = output.parse_report()?;
                let seen = self.exchanges()?.split_off(before);
                self.compare(name, &dialog, &seen);
            }
        }
        Ok(())
    }

    /// Prints the client's and the kubelet's records of a connection, and compares them.
    fn compare(&mut self, name: &str, dialog: &Dialog, seen: &[ConnectionRecord]) {
        let (dialled, peer) = (&dialog.dialled, &dialog.peer);
        let (subject, steps) = (&dialog.subject, &dialog.steps);
        println!("  {name}: connect({dialled}), getpeername() = {peer}, certificate of {subject}");
        for step in steps.iter().filter(|step| !step.ask.starts_with("pause")) {
            let (Ok(outcome) | Err(outcome)) = &step.outcome;
            println!("    client: {} → {}", step.ask, shortened(outcome));
            let fault = || format!("{name}: {}: {outcome}", step.ask);
            self.faults.expect(step.outcome.is_ok(), fault);
        }
        self.faults.expect(peer == dialled, || {
            format!("{name}: a socket connected to {dialled} shows {peer}")
        });
        let is_edge = subject.contains(&format!("system:node:{EDGE_NAME}"));
        let fault = || format!("{name}: the certificate has the subject {subject}");
        self.faults.expect(is_edge, fault);
        let [exchange] = seen else {
            let fault = format!("{name}: the kubelet saw {} connections", seen.len());
            return self.faults.add(fault);
        };
        let recorded: Vec<_> = exchange.steps.iter().map(|it| shortened(it)).collect();
        println!("    kubelet: {}", recorded.join("; "));
        for step in steps.iter().filter(|step| has_sum(&step.ask)) {
            let sum = step.outcome.as_deref().unwrap_or_default();
            let is_counted = exchange.steps.iter().any(|it| it.contains(sum));
            let fault = || format!("{name}: the kubelet recorded another sum for {}", step.ask);
            self.faults.expect(is_counted, fault);
        }
    }

    fn cut_link_under_load(&mut self) -> Result<()> {
        heading("The agent is cut off for ten seconds, and comes back");
        let duration = BEFORE + CUT_TIME + AFTER;
        let healthy = |seen: &[ConnectionRecord]| {
            let steps = seen.iter().flat_map(|it| &it.steps);
            steps.filter(|it| *it == "GET /healthz").count()
        };
        let before = healthy(&self.exchanges()?);
        let reasons = ["agent_connection_lost", "agent_not_connected"];
        let counts = || reasons.map(|it| self.testbed.node().reason_count(it).unwrap_or(0));
        let counted = counts();
        let [(_, host, to), _] = self.clients()?;
        let open = self.start_dialog(&host, to, &["upgrade", "pause=1500", "exchange=hello"])?;
        let mut loads = Vec::new();
        for (name, sandbox, to) in self.clients()? {
            let load = self.start_load(&sandbox, to, duration)?;
            loads.push((format!("{name} → {to}"), load));
        }
        clock::pause(BEFORE);
        let cut = load::since_epoch_ms();
        self.testbed.edge().cut_link()?;
        clock::pause(CUT_TIME);
        let mended = load::since_epoch_ms();
        self.testbed.edge().restore_link()?;
        let output = open.finish(COMMAND_TIMEOUT)?;
        let dialog: Dialog = output.parse_report()?;
        let reports = finish_all(loads, duration)?;

        let counted_by_reason: Vec<_> = reasons.iter().zip(counted.iter().zip(counts())).collect();
        match dialog.steps.last() {
            Some(step) => println!(
                "  the last exchange on an upgraded connection took {} ms: {:?}",
                step.took_ms, step.outcome
            ),
            None => self
                .faults
                .add("the client of the upgraded connection recorded no step".to_owned()),
        }
        let mut answered = 0;
        for (name, report) in &reports {
            self.report(name, report, [cut, mended]);
            answered += usize::try_from(report.answered)?;
        }
        for (reason, (before, now)) in counted_by_reason {
            println!("  the gateway counted {reason}: {} times", now - before);
        }
        let recorded = healthy(&self.exchanges()?) - before;
        println!("  clients recorded {answered} answers, the kubelet {recorded} requests");
        // A response may be lost if it was in flight when the link was cut.
        let fault = || "clients recorded more answers than the kubelet".to_owned();
        self.faults.expect(recorded >= answered, fault);
        Ok(())
    }

    fn start_load(&self, sandbox: &Sandbox, to: SocketAddr, duration: Duration) -> Result<Process> {
        let ca = path_to_string(&self.testbed.edge().kubelet_files().ca)?;
        let kind = ["kubelet", "--ca", &ca, "--workers", WORKERS];
        start_load(sandbox, &kind, &[to], RATE, duration)
    }

    fn report(&mut self, name: &str, report: &Report, [cut, mended]: [u64; 2]) {
        let [cut, mended] = [cut, mended].map(|at| at.saturating_sub(report.began_ms));
        let attempts = report.attempts;
        println!("  {name}: {attempts} connects; cut at {cut} ms, back at {mended} ms");
        println!("    answered: {}", distribution(report));
        for (failure, seen) in &report.failures {
            println!(
                "    failed with {failure}: {} times, from {} to {} ms",
                seen.count, seen.first_ms, seen.last_ms
            );
        }
        let last_failure = report.failures.values().map(|it| it.last_ms).max();
        let last_answer = report.servers.values().map(|it| it.last_ms).max();
        let is_back = last_failure.is_some() && last_answer > last_failure;
        let fault = || {
            format!(
                "{name}: the last failure is at {last_failure:?} ms, the last answer at {last_answer:?} ms"
            )
        };
        self.faults.expect(is_back, fault);
        let other = report.other_peer;
        let fault = || format!("{name}: {other} sockets show another peer");
        self.faults.expect(other == 0, fault);
    }
}

fn has_sum(ask: &str) -> bool {
    ask.starts_with("sum=") || ask.starts_with("until-end=")
}

/// Shortens each digest in a line of text.
fn shortened(line: &str) -> String {
    let word = |word: &str| match word.get(..12) {
        Some(beginning) if word.len() == 64 => format!("{beginning}…"),
        _ => word.to_owned(),
    };
    line.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_shortened_and_nothing_else() {
        let digest = "ab".repeat(32);

        assert_eq!(
            shortened(&format!("read 3 {digest}")),
            "read 3 abababababab…"
        );
        assert_eq!(shortened("GET /healthz"), "GET /healthz");
    }
}
