//! The first part of the demo: the daemon on a node, and Services under load.
#![expect(clippy::print_stdout, reason = "the demo prints to a terminal")]

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tunnel_tests::{
    clock::{self, Instant},
    culvert_instance::InstanceSettings,
    load::{self, Report},
    sandbox::{Process, connect_within},
    table::microseconds,
};

use crate::{
    Faults, finish, finish_all,
    fixture::{BALANCER_WEB, Fixture, NODE_WEB, VIP_DNS, VIP_DNS6, VIP_EMPTY, VIP_WEB, VIP_WEB6},
    heading,
    server_counts::ServerCounts,
    start_load,
    table::{distribution, format_reports},
};

/// The load while the node is being changed, in connections per second.
const RATE: u32 = 500;

/// The arguments for a load on the Service `web`.
const HTTP: [&str; 3] = ["tcp", "--service", "web"];

/// The time for which a load runs before and after a change. It is long enough to show the change's effect.
const STEP: Duration = Duration::from_millis(500);

/// The number of connection attempts to a Service without endpoints.
const REFUSED_CONNECTS: usize = 20;

/// The first part of the demo.
pub(super) struct ServicesDemo {
    pub(super) fixture: Fixture,
    rows: Vec<(String, Report)>,
    faults: Faults,
}

impl ServicesDemo {
    pub(super) fn prepare(settings: InstanceSettings) -> Result<Self> {
        Ok(Self {
            fixture: Fixture::new(settings)?,
            rows: Vec::new(),
            faults: Faults::default(),
        })
    }

    pub(super) fn run(&mut self) -> Result<()> {
        let start = Instant::now();
        self.start_daemon()?;
        self.http()?;
        self.udp()?;
        self.peer()?;
        self.change_endpoints()?;
        self.kill_daemon()?;
        self.refuse()?;
        self.outside()?;
        self.conclude(start)
    }

    fn start_daemon(&self) -> Result<()> {
        let node = &self.fixture.node;
        heading("A node of network namespaces, and the daemon in it");
        println!(
            "  host 192.0.2.1, pods client-1, client-2, backend-1 … backend-4, a client outside"
        );
        println!("  {}", self.fixture.manifests()?);
        let start = Instant::now();
        node.start()?;
        let took = start.elapsed().as_millis();
        println!("  culvert node: ready {took} ms after its start");
        Ok(())
    }

    fn http(&mut self) -> Result<()> {
        heading("HTTP through the ClusterIP of Service web: 3 backends, both families");
        let counts = ServerCounts::read(&self.fixture.servers)?;
        let [one, two] = &self.fixture.clients;
        let host = self.fixture.node.host();
        let quick = Duration::from_millis(300);
        let mut loads = Vec::new();
        for (name, sandbox, to) in [
            ("host", host, VIP_WEB),
            ("host", host, VIP_WEB6),
            ("client-1", one, VIP_WEB),
            ("client-2", two, VIP_WEB6),
        ] {
            let load = start_load(sandbox, &HTTP, &[to], RATE, quick)?;
            loads.push((format!("http {name} → {to}"), load));
        }
        self.finish_and_check(&counts, loads, quick)
    }

    fn udp(&mut self) -> Result<()> {
        heading("UDP: a question and its answer through the ClusterIP of Service dns");
        let counts = ServerCounts::read(&self.fixture.servers)?;
        let [one, two] = self.fixture.clients.clone();
        let quick = Duration::from_millis(200);
        let kind = ["udp", "--service", "dns", "--unconnected"];
        let connected = start_load(&one, &kind[..3], &[VIP_DNS], RATE, quick)?;
        let unconnected = start_load(&two, &kind, &[VIP_DNS6], RATE, quick)?;
        let first = format!("udp client-1 → {VIP_DNS}, connect and send");
        let second = format!("udp client-2 → {VIP_DNS6}, sendto");
        let loads = vec![(first, connected), (second, unconnected)];
        self.finish_and_check(&counts, loads, quick)?;

        let socket = one.udp("0.0.0.0:0")?;
        let question = "dns please: who is there?";
        socket.send_to(question.as_bytes(), VIP_DNS)?;
        let mut answer = [0; 256];
        let answered = socket.recv_from(&mut answer);
        let (length, from) = answered.context("no answer to a datagram")?;
        let answer = String::from_utf8_lossy(&answer[..length]).into_owned();
        println!("  client-1 asked {VIP_DNS} \"{question}\"");
        println!("  and got \"{answer}\" from {from}");
        let fault = || format!("an answer came from {from}");
        self.faults.expect(from == VIP_DNS, fault);
        Ok(())
    }

    fn peer(&mut self) -> Result<()> {
        heading("A connected socket shows the address that was dialled");
        for (client, to) in self.fixture.clients.iter().zip([VIP_WEB, VIP_WEB6]) {
            let peer = client.connect(to)?.peer_addr()?;
            println!("  {}: connect({to}), getpeername() = {peer}", client.name());
            self.faults.expect(peer == to, || {
                format!("a socket connected to {to} shows {peer}")
            });
        }
        Ok(())
    }

    fn change_endpoints(&mut self) -> Result<()> {
        heading("backend-1 leaves Service web and backend-4 joins it, under 500 connects a second");
        let counts = ServerCounts::read(&self.fixture.servers)?;
        let duration = STEP * 3;
        let load = self.start_web_load(duration)?;
        clock::pause(STEP);
        let changed = load::since_epoch_ms();
        self.fixture.apply_web(&[2, 3, 4])?;
        let report = finish(load, duration)?;

        let at = changed.saturating_sub(report.began_ms);
        let seen = |name: &str| report.servers.get(name).copied();
        match (seen("backend-1"), seen("backend-4")) {
            (Some(old), Some(new)) => {
                println!("  {}", distribution(&report));
                println!("  the manifest was replaced at {at} ms");
                println!("  backend-4 answered first at {} ms", new.first_ms);
                println!("  backend-1 answered last at {} ms", old.last_ms);
                let late = Duration::from_millis(old.last_ms.saturating_sub(at));
                self.faults.expect(late < STEP, || {
                    format!("backend-1 still answered {late:?} after it was removed")
                });
            }
            (old, new) => self
                .faults
                .add(format!("backend-1: {old:?}, backend-4: {new:?}")),
        }
        self.check(&counts, vec![("http, endpoints change".to_owned(), report)])
    }

    fn kill_daemon(&mut self) -> Result<()> {
        heading("kill -9 of the daemon under the same load; it is started again 1 s later");
        let counts = ServerCounts::read(&self.fixture.servers)?;
        let duration = STEP * 7;
        let load = self.start_web_load(duration)?;
        clock::pause(STEP);
        self.fixture.node.kill9()?;
        let killed = load::since_epoch_ms();
        clock::pause(STEP);
        // No daemon is running that could apply this change.
        self.fixture.apply_web(&[1, 2, 3, 4])?;
        clock::pause(STEP);
        let started = load::since_epoch_ms();
        self.fixture.node.start()?;
        let ready = load::since_epoch_ms();
        let report = finish(load, duration)?;

        println!("  {}", distribution(&report));
        let at = |moment: u64| moment.saturating_sub(report.began_ms);
        let [killed, started, ready] = [killed, started, ready].map(at);
        println!("  killed at {killed} ms; started at {started} ms, ready at {ready} ms");
        match report.servers.get("backend-1").map(|seen| seen.first_ms) {
            Some(first) => {
                println!("  backend-1, added while no daemon ran, answered first at {first} ms");
                let fault = || "backend-1 answered before the daemon was started again".to_owned();
                self.faults.expect(first >= started, fault);
            }
            None => self.faults.add("backend-1 didn't come back".to_owned()),
        }
        self.check(
            &counts,
            vec![("http, kill -9 and start".to_owned(), report)],
        )
    }

    fn refuse(&mut self) -> Result<()> {
        heading("A Service without endpoints refuses at once");
        let ([one, _], host) = (&self.fixture.clients, self.fixture.node.host());
        for (name, sandbox) in [("host", host), ("client-1", one)] {
            let mut times = Vec::new();
            let mut outcomes = BTreeSet::new();
            for _ in 0..REFUSED_CONNECTS {
                let socket = sandbox.socket(socket2::Domain::IPV4, socket2::Type::STREAM)?;
                let start = Instant::now();
                let outcome = connect_within(&socket, VIP_EMPTY, load::timeout());
                times.push(load::nanoseconds(start.elapsed()));
                outcomes.insert(outcome.map_or_else(
                    |error| load::error_name(&error),
                    |()| "connected".to_owned(),
                ));
            }
            times.sort_unstable();
            let outcomes: Vec<_> = outcomes.into_iter().collect();
            println!(
                "  {name} → {VIP_EMPTY}: {REFUSED_CONNECTS} connects, {}, half of them within {}",
                outcomes.join(" and "),
                microseconds(load::percentile(&times, 50))
            );
            self.faults.expect(outcomes == ["ECONNREFUSED"], || {
                format!("{VIP_EMPTY} from {name}: {outcomes:?}")
            });
        }
        Ok(())
    }

    fn outside(&mut self) -> Result<()> {
        heading(
            "A client outside, under kill -9: the node port and the load balancer's address of web",
        );
        let node = &self.fixture.node;
        let outside = node.outside();
        let (to, via) = (BALANCER_WEB.ip(), NODE_WEB.ip());
        outside.ip(&format!("route add {to}/32 via {via}\n"))?;
        let counts = ServerCounts::read(&self.fixture.servers)?;
        let duration = STEP * 4;
        let mut loads = Vec::new();
        for to in [NODE_WEB, BALANCER_WEB] {
            let load = start_load(outside, &HTTP, &[to], RATE / 2, duration)?;
            loads.push((format!("http outside → {to}"), load));
        }
        clock::pause(STEP);
        node.kill9()?;
        clock::pause(STEP);
        node.start()?;
        self.finish_and_check(&counts, loads, duration)?;

        let stream = self.fixture.node.outside().connect(BALANCER_WEB)?;
        let flows = self.fixture.node.culvert(&["flows", "--output", "json"])?;
        let flows: Vec<Value> = serde_json::from_str(&flows.stdout)?;
        let client = stream.local_addr()?.to_string();
        let flow = flows.iter().find(|flow| flow["client"] == *client);
        match flow.filter(|flow| flow["masquerade"].is_null()) {
            Some(flow) => {
                let backend = flow["backend"].as_str().unwrap_or_default();
                println!("  culvert flows: backend {backend} sees the client {client} itself");
            }
            None => self.faults.add(format!("the flow of {client}: {flow:?}")),
        }
        Ok(())
    }

    /// Starts a load from a pod on both addresses of the Service `web`.
    fn start_web_load(&self, duration: Duration) -> Result<Process> {
        let [one, _] = &self.fixture.clients;
        start_load(one, &HTTP, &[VIP_WEB, VIP_WEB6], RATE, duration)
    }

    /// Waits for the loads to finish, prints the servers that replied to each of them, and checks the
    /// reports.
    fn finish_and_check(
        &mut self,
        counts: &ServerCounts,
        loads: Vec<(String, Process)>,
        duration: Duration,
    ) -> Result<()> {
        let reports = finish_all(loads, duration)?;
        for (name, report) in &reports {
            println!("  {name}: {}", distribution(report));
        }
        self.check(counts, reports)
    }

    /// Compares the clients' reports with the servers' records, and keeps the reports for the table.
    fn check(&mut self, counts: &ServerCounts, reports: Vec<(String, Report)>) -> Result<()> {
        match counts.compare(&self.fixture.servers, &reports)? {
            Ok(count) => println!("  clients and servers recorded the same {count} answers"),
            Err(fault) => self.faults.add(fault),
        }
        for (name, report) in &reports {
            let failed = report.failed();
            self.faults.expect(failed == 0, || {
                format!("{name}: {failed} failures: {:?}", report.failures)
            });
            let other = report.other_peer;
            self.faults.expect(other == 0, || {
                format!("{name}: {other} sockets show another peer")
            });
        }
        self.rows.extend(reports);
        Ok(())
    }

    fn conclude(&self, start: Instant) -> Result<()> {
        heading("Summary");
        print!("{}", format_reports(&self.rows));
        for command in ["status", "services"] {
            heading(&format!("culvert {command}"));
            let output = self.fixture.node.culvert(&[command, "--output", "table"])?;
            print!("{}{}", output.stdout, output.stderr);
            if !output.exit.is_success() {
                bail!("`culvert {command}` ended with {:?}", output.exit);
            }
        }
        let attempts: u64 = self.rows.iter().map(|(_, report)| report.attempts).sum();
        let failed: u64 = self.rows.iter().map(|(_, report)| report.failed()).sum();
        let took = start.elapsed().as_secs_f64();
        println!("\n{attempts} connections, {failed} failures, {took:.1} s");
        self.faults.conclude()
    }
}
