//! Endpoints in manifest files change while clients connect, and while the daemon is killed and restarted.

mod flows;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock::{self, Instant},
    load::Report,
    load_scale::LoadScale,
    manifest::{Protocol, Service},
    pod::{Pod, Server},
    sandbox::Sandbox,
    server::{Listener, ServerKind},
};
use tunnel_userspace::model::Family;

use crate::{
    background_load::expect_all_answered,
    race::fixture::{
        Change, READER_CPU, RaceFixture, RandomChanges, RunningLoad, SERVICES, UNEXPECTED_REASONS,
    },
    support::{DNS, DNS_TARGET, HTTP, HTTP_TARGET, each_family, until_backends},
};

/// The number of times the daemon is killed. It is scaled down on slow machines, but is at least two.
const KILLS: u32 = 5;

/// The duration of the load around each kill: longer than a restart takes, even on slow machines.
const ROUND: Duration = Duration::from_millis(2500);

/// The number of attempts per second over TCP, and also over UDP.
const RATE: u32 = 500;

/// The target rate of endpoint changes per second, which a slow file system or CPU may reduce, and the
/// minimum rate that must be reached.
const CHANGES: u32 = 1000;
const MIN_CHANGES: u32 = 200;

const ECHO: u16 = 7;
const ECHO_TARGET: u16 = 7007;

/// The Service under load. Any of its pods may stop being an endpoint and later become one again.
const WEB: &str = "web";
/// The Service that the long-lived flows use. Its first pod always remains an endpoint.
const TALK: &str = "talk";

/// Held by each test while it runs, so that only one test at a time puts load on the CPUs.
static CPUS: Mutex<()> = Mutex::new(());

struct ChurnFixture {
    race: RaceFixture,
    pods: [Arc<Pod>; 3],
    servers: [Server; 3],
}

impl ChurnFixture {
    fn new(family: Family) -> Result<Self> {
        let race = RaceFixture::new(family)?;
        let pod = |name: &str| race.node.pod(name);
        let pods = [pod("first")?, pod("second")?, pod("third")?];
        let serve = |pod: &Pod| {
            pod.serve(&[
                Listener::new(ServerKind::Http, HTTP_TARGET).for_service(WEB),
                Listener::new(ServerKind::Udp, DNS_TARGET)
                    .for_service(WEB)
                    .for_service(TALK),
                Listener::new(ServerKind::Echo, ECHO_TARGET),
            ])
        };
        let servers = [serve(&pods[0])?, serve(&pods[1])?, serve(&pods[2])?];
        let fixture = Self {
            race,
            pods,
            servers,
        };
        for service in 0..SERVICES {
            let manifest = Change::all_endpoints(service).manifest(family);
            fixture.race.node.apply(manifest)?;
        }
        fixture.apply(WEB, 0b111)?;
        fixture.apply(TALK, 0b001)?;
        fixture.race.node.start()?;
        Ok(fixture)
    }

    /// Returns the ClusterIP of the Service [`WEB`] or [`TALK`].
    fn vip(&self, name: &str) -> IpAddr {
        let number = if name == WEB { 1 } else { 2 };
        match self.race.family {
            Family::V4 => Ipv4Addr::new(10, 96, 2, number).into(),
            Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 2, number.into()).into(),
        }
    }

    /// Applies the named Service; its endpoints are the pods whose bits are set in `pods`.
    fn apply(&self, name: &str, pods: u32) -> Result<()> {
        let numbered = (0..3).zip(&self.pods);
        let chosen = numbered.filter(|(number, _)| pods & (1 << number) != 0);
        let addresses = chosen.map(|(_, pod)| pod.address(self.race.family));
        self.race.node.apply(
            Service::new(name, [self.vip(name)])
                .port(Protocol::TCP, HTTP, HTTP_TARGET)
                .port(Protocol::TCP, ECHO, ECHO_TARGET)
                .port(Protocol::UDP, DNS, DNS_TARGET)
                .backends(addresses),
        )
    }

    /// Keeps changing endpoints in manifest files until `stop` is set, and returns how many changes it made.
    fn churn(&self, rate: u32, stop: &AtomicBool) -> Result<u32> {
        let mut random = RandomChanges::new(1);
        let start = Instant::now();
        let mut made = 0;
        while !stop.load(Ordering::Relaxed) {
            let due = Duration::from_secs(1) * made / rate;
            if let Some(early) = due.checked_sub(start.elapsed()) {
                clock::pause(early);
            }
            match made % 4 {
                0 => self.apply(WEB, 1 + random.below(7))?,
                1 => self.apply(TALK, 1 + 2 * random.below(4))?,
                _ => {
                    let change = random.next().context("the random sequence has ended")?;
                    self.race.node.apply(change.manifest(self.race.family))?;
                }
            }
            made += 1;
        }
        Ok(made)
    }

    /// Asserts that no request for one Service reached another Service's backend.
    fn expect_no_misrouted_request(&self) -> Result<()> {
        let mut counts = vec![self.race.counts()?];
        for server in &self.servers {
            counts.push(server.record()?.total());
        }
        ensure!(counts.iter().all(|it| it.foreign == 0), "{counts:?}");
        ensure!(counts.iter().any(|it| it.answered > 0), "{counts:?}");
        Ok(())
    }

    /// Runs the loads for one round, during which it kills and restarts the daemon.
    fn run_round(&self, scale: LoadScale, random: &mut RandomChanges) -> Result<()> {
        let (client, host) = (&*self.race.client, self.race.node.host());
        let web = self.vip(WEB);
        let (http, dns) = ((web, HTTP).into(), (web, DNS).into());
        let (all, half) = (scale.count(RATE), scale.count(RATE / 2));
        let loads = [
            load(client, &["tcp"], http, all, ROUND)?,
            load(client, &["udp"], dns, half, ROUND)?,
            load(host, &["udp", "--unconnected"], dns, half, ROUND)?,
        ];
        let reader = self.race.reader(READER_CPU, ROUND)?;

        clock::pause(ROUND / 4 * random.below(1000) / 1000);
        self.race.node.kill9()?;
        self.race.node.start()?;

        for load in loads {
            expect_all_answered(&load.finish()?)?;
        }
        let read = reader.finish()?;
        ensure!(read.failures.is_empty(), "{read:?}");
        ensure!(read.connects > 0 && read.astray == 0, "{read:?}");
        Ok(())
    }
}

fn load(
    from: &Sandbox,
    kind: &[&str],
    to: SocketAddr,
    rate: u32,
    duration: Duration,
) -> Result<RunningLoad<Report>> {
    let command = from
        .lab_command(&[&["load"], kind].concat())?
        .option("--service", WEB)
        .option("--to", to)
        .option("--rate", rate)
        .option("--millis", duration.as_millis());
    Ok(RunningLoad::new(command.start()?, duration))
}

#[test]
fn connects_and_flows_survive_kills_of_the_daemon_while_endpoints_change() -> Result<()> {
    each_family(kill_under_load)
}

fn kill_under_load(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let scale = LoadScale::from_environment();
    let fixture = ChurnFixture::new(family)?;
    let (node, client) = (&fixture.race.node, &*fixture.race.client);
    let (stop_churn, stop_flows) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut random = RandomChanges::new(std::process::id());

    thread::scope(|scope| -> Result<()> {
        let flows = flows::start(
            scope,
            client,
            (fixture.vip(WEB), fixture.vip(TALK)),
            &stop_flows,
        )?;
        let start = Instant::now();
        let churn = scope.spawn(|| fixture.churn(scale.count(CHANGES), &stop_churn));
        let kills = scale.count(KILLS).max(2);
        let rounds = (0..kills).try_for_each(|_| fixture.run_round(scale, &mut random));
        stop_churn.store(true, Ordering::Relaxed);
        let took = start.elapsed();
        let changes = churn.join().ok().context("the writer panicked")?;
        stop_flows.store(true, Ordering::Relaxed);
        let ended = flows.finish();
        rounds?;
        ended?;
        let changes = changes?;
        let expected = u128::from(scale.count(MIN_CHANGES)) * took.as_millis() / 1000;
        ensure!(
            u128::from(changes) >= expected,
            "{changes} changes in {took:?}"
        );
        Ok(())
    })?;

    fixture.expect_no_misrouted_request()?;
    for reason in UNEXPECTED_REASONS {
        let count = node.reason_count(reason)?;
        ensure!(count == 0, "{count} times {reason}");
    }
    fixture.apply(WEB, 0b111)?;
    fixture.apply(TALK, 0b011)?;
    until_backends(node, WEB, 3)?;
    until_backends(node, TALK, 2)
}
