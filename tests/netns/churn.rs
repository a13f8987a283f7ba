//! Endpoint changes from files while the daemon is killed and restarted, under a load of connections.

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
    manifest::{Protocol, Service},
    place::Place,
    pod::{Pod, Server},
    scale::Scale,
    serve::{Kind, Listener},
};
use tunnel_userspace::model::Family;

use crate::{
    race::field::{Change, Dice, Field, NEVER, READER, Reading, SERVICES},
    support::{DNS, DNS_TARGET, HTTP, HTTP_TARGET, each_family, until_backends},
    under_load::is_answered,
};

/// The number of kills of the daemon; at least two on slow machines.
const KILLS: u32 = 5;

/// The duration of the load around one kill: longer than a restart, even on slow machines.
const ROUND: Duration = Duration::from_millis(2500);

/// The number of attempts per second over TCP, and over UDP.
const RATE: u32 = 500;

/// Endpoint changes per second: the attempted rate, which slow files or CPUs may reduce, and the
/// required minimum.
const CHANGES: u32 = 1000;
const LEAST: u32 = 200;

const ECHO: u16 = 7;
const ECHO_TARGET: u16 = 7007;

/// The Service under load; any of its pods may leave and return.
const WEB: &str = "web";
/// The Service of the long-lived flows; its first pod always stays an endpoint.
const TALK: &str = "talk";

/// A lock, so that only one test puts load on the CPUs.
static CPUS: Mutex<()> = Mutex::new(());

struct Stage {
    field: Field,
    pods: [Arc<Pod>; 3],
    servers: [Server; 3],
}

impl Stage {
    fn new(family: Family) -> Result<Self> {
        let field = Field::new(family)?;
        let pod = |name: &str| field.node.pod(name);
        let pods = [pod("first")?, pod("second")?, pod("third")?];
        let serve = |pod: &Pod| {
            pod.serve(&[
                Listener::new(Kind::Http, HTTP_TARGET).of(WEB),
                Listener::new(Kind::Udp, DNS_TARGET).of(WEB).of(TALK),
                Listener::new(Kind::Echo, ECHO_TARGET),
            ])
        };
        let servers = [serve(&pods[0])?, serve(&pods[1])?, serve(&pods[2])?];
        let stage = Self {
            field,
            pods,
            servers,
        };
        for service in 0..SERVICES {
            let manifest = Change::whole(service).manifest(family);
            stage.field.node.apply(manifest)?;
        }
        stage.apply(WEB, 0b111)?;
        stage.apply(TALK, 0b001)?;
        stage.field.node.start()?;
        Ok(stage)
    }

    /// Returns the ClusterIP of one of the Services.
    fn vip(&self, name: &str) -> IpAddr {
        let number = if name == WEB { 1 } else { 2 };
        match self.field.family {
            Family::V4 => Ipv4Addr::new(10, 96, 2, number).into(),
            Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 2, number.into()).into(),
        }
    }

    /// Applies one of the Services with these pods (a bit mask) as endpoints.
    fn apply(&self, name: &str, pods: u32) -> Result<()> {
        let numbered = (0..3).zip(&self.pods);
        let chosen = numbered.filter(|(number, _)| pods & (1 << number) != 0);
        let addresses = chosen.map(|(_, pod)| pod.address(self.field.family));
        self.field.node.apply(
            Service::new(name, [self.vip(name)])
                .port(Protocol::TCP, HTTP, HTTP_TARGET)
                .port(Protocol::TCP, ECHO, ECHO_TARGET)
                .port(Protocol::UDP, DNS, DNS_TARGET)
                .backends(addresses),
        )
    }

    /// Changes endpoints in files until `stop` is set. Returns the number of changes.
    fn churn(&self, rate: u32, stop: &AtomicBool) -> Result<u32> {
        let mut dice = Dice::new(1);
        let start = Instant::now();
        let mut made = 0;
        while !stop.load(Ordering::Relaxed) {
            let due = Duration::from_secs(1) * made / rate;
            if let Some(early) = due.checked_sub(start.elapsed()) {
                clock::pause(early);
            }
            match made % 4 {
                0 => self.apply(WEB, 1 + dice.below(7))?,
                1 => self.apply(TALK, 1 + 2 * dice.below(4))?,
                _ => {
                    let change = dice.next().context("the random sequence has ended")?;
                    self.field.node.apply(change.manifest(self.field.family))?;
                }
            }
            made += 1;
        }
        Ok(made)
    }

    /// Asserts that no request for a Service reached the backend of another one.
    fn no_stranger_was_served(&self) -> Result<()> {
        let mut seen = vec![self.field.seen()?];
        for server in &self.servers {
            seen.push(server.record()?.total());
        }
        ensure!(seen.iter().all(|seen| seen.foreign == 0), "{seen:?}");
        ensure!(seen.iter().any(|seen| seen.answered > 0), "{seen:?}");
        Ok(())
    }

    /// Runs the loads once, and kills and restarts the daemon meanwhile.
    fn round(&self, scale: Scale, dice: &mut Dice) -> Result<()> {
        let (client, host) = (&*self.field.client, self.field.node.host());
        let web = self.vip(WEB);
        let (http, dns) = ((web, HTTP).into(), (web, DNS).into());
        let (all, half) = (scale.count(RATE), scale.count(RATE / 2));
        let loads = [
            load(client, &["tcp"], http, all, ROUND)?,
            load(client, &["udp"], dns, half, ROUND)?,
            load(host, &["udp", "--unconnected"], dns, half, ROUND)?,
        ];
        let reader = self.field.reader(READER, ROUND)?;

        clock::pause(ROUND / 4 * dice.below(1000) / 1000);
        self.field.node.kill9()?;
        self.field.node.start()?;

        for load in loads {
            is_answered(&load.finish()?)?;
        }
        let read = reader.finish()?;
        ensure!(read.failures.is_empty(), "{read:?}");
        ensure!(read.connects > 0 && read.astray == 0, "{read:?}");
        Ok(())
    }
}

fn load(
    from: &Place,
    kind: &[&str],
    to: SocketAddr,
    rate: u32,
    lasting: Duration,
) -> Result<Reading<Report>> {
    let command = from
        .lab_command(&[&["load"], kind].concat())?
        .option("--service", WEB)
        .option("--to", to)
        .option("--rate", rate)
        .option("--millis", lasting.as_millis());
    Ok(Reading::new(command.start()?, lasting))
}

#[test]
fn connects_and_flows_survive_kills_of_the_daemon_while_endpoints_change() -> Result<()> {
    each_family(kill_under_load)
}

fn kill_under_load(family: Family) -> Result<()> {
    let _turn = CPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let scale = Scale::from_environment();
    let stage = Stage::new(family)?;
    let (node, client) = (&stage.field.node, &*stage.field.client);
    let (stop_churn, stop_flows) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut dice = Dice::new(std::process::id());

    thread::scope(|scope| -> Result<()> {
        let flows = flows::begin(
            scope,
            client,
            (stage.vip(WEB), stage.vip(TALK)),
            &stop_flows,
        )?;
        let start = Instant::now();
        let churn = scope.spawn(|| stage.churn(scale.count(CHANGES), &stop_churn));
        let kills = scale.count(KILLS).max(2);
        let rounds = (0..kills).try_for_each(|_| stage.round(scale, &mut dice));
        stop_churn.store(true, Ordering::Relaxed);
        let took = start.elapsed();
        let changes = churn.join().ok().context("the writer panicked")?;
        stop_flows.store(true, Ordering::Relaxed);
        let ended = flows.end();
        rounds?;
        ended?;
        let changes = changes?;
        let least = u128::from(scale.count(LEAST)) * took.as_millis() / 1000;
        ensure!(
            u128::from(changes) >= least,
            "{changes} changes in {took:?}"
        );
        Ok(())
    })?;

    stage.no_stranger_was_served()?;
    for reason in NEVER {
        let count = node.reason(reason)?;
        ensure!(count == 0, "{count} times {reason}");
    }
    stage.apply(WEB, 0b111)?;
    stage.apply(TALK, 0b011)?;
    until_backends(node, WEB, 3)?;
    until_backends(node, TALK, 2)
}
