//! Measures how long many agents on slow links take to reconnect after their gateway has restarted, and counts the
//! handshakes that fail meanwhile.
//!
//! The gateway runs in one process and the agents in another, without kernel programs. A relay delays the agents'
//! bytes.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use nix::sys::signal::Signal;
use serde::Serialize;
use tunnel_tests::{
    clock::{Instant, pause},
    lab::Lab,
    pki::{Authority, PemFiles, Validity},
    tunnel_process::{AgentSettings, AgentsSettings, CloudSettings, TunnelProcess},
};
use tunnel_userspace::tunnel::{SessionLimits, agent, gateway};

use crate::{
    descriptor_limit,
    report::{CommonOptions, Verdict, median},
};

/// The target for the time until all agents are connected to the restarted gateway.
const TARGET: Duration = Duration::from_secs(3);
/// The time limit for all agents to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(120);
/// The interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// The time for which the agents stay connected before the gateway is restarted. After it, they count as stable.
const STABLE_TIME: Duration = Duration::from_secs(11);
/// The reasons for handshakes that failed.
const FAILURES: [&str; 4] = [
    "handshake_failed",
    "handshake_timed_out",
    "handshake_limit",
    "session_limit",
];
/// The number of descriptors that the process with the agents needs for each connection: the agent's socket and the
/// two of the relay, and one in reserve.
const DESCRIPTORS: u64 = 4;

/// The benchmark's options.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: CommonOptions,
    /// The number of restarts of each kind.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// The number of agents.
    #[arg(long, default_value_t = 1500)]
    agents: u32,
    /// The number of connections that each agent opens.
    #[arg(long, default_value_t = 2)]
    connections: u8,
    /// The round-trip time between an agent and the gateway, in milliseconds.
    #[arg(long, default_value_t = 200)]
    round_trip_millis: u64,
}

/// A way to stop the gateway.
#[derive(Clone, Copy, Debug)]
enum Stop {
    /// With SIGTERM, as Kubernetes does.
    Polite,
    /// With SIGKILL.
    Kill,
}

impl Stop {
    const ALL: [Self; 2] = [Self::Polite, Self::Kill];

    const fn name(self) -> &'static str {
        match self {
            Self::Polite => "SIGTERM",
            Self::Kill => "SIGKILL",
        }
    }

    const fn signal(self) -> Signal {
        match self {
            Self::Polite => Signal::SIGTERM,
            Self::Kill => Signal::SIGKILL,
        }
    }
}

/// One restart.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// The time from the start of the new gateway until all agents are connected, in milliseconds.
    millis: u64,
    /// The number of handshakes with the new gateway that have failed.
    failures: u64,
}

#[derive(Debug, Serialize)]
struct Line {
    stopped_by: &'static str,
    all_connected_after_ms: u64,
    /// The maximum of all rounds.
    failed_handshakes: u64,
}

#[derive(Debug, Serialize)]
struct Measurements {
    rounds: u32,
    agents: u32,
    connections: u8,
    round_trip_ms: u64,
    lines: Vec<Line>,
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let connections = u64::from(options.agents) * u64::from(options.connections);
    descriptor_limit::raise(DESCRIPTORS * connections)?;
    let lab = Lab::new()?;
    let mut fixture = Fixture::start(options, lab.directory())?;
    let mut lines = Vec::new();
    for stop in Stop::ALL {
        let rounds = (0..options.rounds.max(1)).map(|_| fixture.restart(stop));
        let samples = rounds.collect::<Result<Vec<_>>>()?;
        lines.push(Line {
            stopped_by: stop.name(),
            all_connected_after_ms: median(samples.iter().map(|it| it.millis)),
            failed_handshakes: samples.iter().map(|it| it.failures).max().unwrap_or(0),
        });
    }
    let measured = Measurements {
        rounds: options.rounds,
        agents: options.agents,
        connections: options.connections,
        round_trip_ms: options.round_trip_millis,
        lines,
    };
    let text = text(&measured);
    options
        .common
        .report(&measured, &text, &verdicts(&measured.lines))
}

fn verdicts(lines: &[Line]) -> Vec<Verdict> {
    let limit = u64::try_from(TARGET.as_millis()).unwrap_or(u64::MAX);
    let verdicts = lines.iter().flat_map(|line| {
        let (millis, failures) = (line.all_connected_after_ms, line.failed_handshakes);
        let name = line.stopped_by;
        [
            Verdict::new(
                format!("after {name}: all agents connected within {limit} ms"),
                format!("{millis} ms"),
                millis <= limit,
            ),
            Verdict::new(
                format!("after {name}: no failed handshake"),
                failures.to_string(),
                failures == 0,
            ),
        ]
    });
    verdicts.collect()
}

fn text(measured: &Measurements) -> String {
    let Measurements {
        rounds,
        agents,
        connections,
        round_trip_ms,
        lines,
    } = measured;
    let mut text = format!(
        "medians of {rounds} restarts of the gateway; {agents} agents with {connections} connections each; \
         round trips of {round_trip_ms} ms\n"
    );
    for line in lines {
        text += &format!(
            "  stopped by {}: all agents connected after {} ms; at most {} failed handshakes\n",
            line.stopped_by, line.all_connected_after_ms, line.failed_handshakes
        );
    }
    text
}

/// A gateway and its agents.
struct Fixture {
    cloud: Option<TunnelProcess>,
    cloud_settings: CloudSettings,
    agents: TunnelProcess,
    count: usize,
    stem: std::path::PathBuf,
}

impl Fixture {
    fn start(options: &Options, directory: &Path) -> Result<Self> {
        let authority = Authority::new("tunnel")?;
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let files = PemFiles::in_directory(directory, "gateway");
        files.write(&authority.pem(), &authority.gateway(Validity::Current)?)?;
        let mut cloud_settings = CloudSettings {
            gateway: gateway::GatewaySettings {
                listen: any,
                ..gateway::GatewaySettings::default()
            },
            ingress: any,
            prefix: (Ipv4Addr::new(127, 19, 0, 0).into(), 16),
            targets: Vec::new(),
            certificate: (&files).into(),
            manifests: None,
            session: SessionLimits::default(),
            open_files: None,
        };
        let stem = directory.join("cloud");
        let cloud = TunnelProcess::start("cloud", &stem, &cloud_settings)?;
        cloud_settings.gateway.listen = cloud.cloud_state()?.gateway;
        let agents = (0..options.agents).map(|number| {
            let node = format!("edge-{number}");
            let files = PemFiles::in_directory(directory, &node);
            files.write(
                &authority.pem(),
                &authority.agent(&node, Validity::Current)?,
            )?;
            let agent = agent::AgentSettings {
                connections_per_gateway: options.connections,
                ..agent::AgentSettings::default()
            };
            Ok(AgentSettings::among_many(agent, (&files).into()))
        });
        let settings = AgentsSettings {
            agents: agents.collect::<Result<_>>()?,
            gateway: cloud_settings.gateway.listen,
            delay_millis: options.round_trip_millis / 2,
            watch_files: false,
        };
        let fixture = Self {
            count: settings.agents.len(),
            cloud: Some(cloud),
            cloud_settings,
            agents: TunnelProcess::start("agents", &directory.join("agents"), &settings)?,
            stem,
        };
        fixture.wait_for_all()?;
        Ok(fixture)
    }

    /// Restarts the gateway, and waits until all agents are connected.
    fn restart(&mut self, stop: Stop) -> Result<Sample> {
        pause(STABLE_TIME);
        self.wait_for_all()?;
        let old = self.cloud.take().context("the gateway doesn't run")?;
        old.stop(stop.signal())?;
        let new = TunnelProcess::start("cloud", &self.stem, &self.cloud_settings)?;
        let start = Instant::now();
        let new = self.cloud.insert(new);
        // The agents of the old gateway may not have noticed yet that it has gone.
        loop {
            let nodes = new.cloud_state()?.nodes;
            let nodes = nodes.as_array().into_iter().flatten();
            let sessions =
                |node: &serde_json::Value| node["sessions"].as_array().map_or(0, Vec::len);
            if nodes.filter(|node| sessions(node) > 0).count() >= self.count {
                break;
            }
            if start.elapsed() > CONNECT_TIMEOUT {
                bail!("the agents don't reconnect:\n{}", new.log());
            }
            pause(CHECK_INTERVAL);
        }
        let millis = u64::try_from(start.elapsed().as_millis())?;
        let state = new.cloud_state()?;
        let failures = FAILURES.iter().map(|reason| state.count(reason)).sum();
        Ok(Sample { millis, failures })
    }

    fn wait_for_all(&self) -> Result<()> {
        let start = Instant::now();
        while self.agents.agents_state()?.connected < self.count {
            if start.elapsed() > CONNECT_TIMEOUT {
                bail!("the agents don't connect:\n{}", self.agents.log());
            }
            pause(CHECK_INTERVAL);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_agent_and_a_failed_handshake_each_miss_a_target() {
        let line = |all_connected_after_ms, failed_handshakes| Line {
            stopped_by: "SIGTERM",
            all_connected_after_ms,
            failed_handshakes,
        };
        let met = |line| {
            verdicts(&[line])
                .iter()
                .map(|it| it.met)
                .collect::<Vec<_>>()
        };

        assert_eq!(met(line(3000, 0)), [true, true]);
        assert_eq!(met(line(3001, 0)), [false, true]);
        assert_eq!(met(line(900, 1)), [true, false]);
    }
}
