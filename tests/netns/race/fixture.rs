//! The fixture for the race tests: Services with separate backends, readers that detect a misrouted
//! connection immediately, and servers that record it.
//!
//! All backends are addresses of one pod. The route to each Service's backends sets a different source
//! address, so a reader knows which Service it has reached without sending a datagram.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde::de::DeserializeOwned;
use tunnel_common::table::MapSizes;
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    environment,
    load::{Report, race},
    manifest::{Protocol, Service},
    node::Node,
    pod::{Pod, Server},
    sandbox::Process,
    server::{Counts, Listener, ServerKind},
};
use tunnel_userspace::model::Family;

use crate::support::{DNS, HTTP};

/// Reasons that the kernel programs never count as long as the maps are written correctly.
pub(crate) const UNEXPECTED_REASONS: [&str; 4] = [
    "record_unstable",
    "record_invalid",
    "no_backend",
    "socket_storage_full",
];

/// The CPU that only readers run on.
pub(crate) const READER_CPU: u32 = 0;
/// The CPU to which the writer is pinned.
pub(crate) const WRITER_CPU: u32 = 1;

/// The number of UDP Services, which the readers connect to. They are so few that entries freed by one are
/// soon reused for another.
pub(crate) const UDP_SERVICES: u8 = 4;
/// The total number of Services. Those that don't use UDP serve HTTP.
pub(crate) const SERVICES: u8 = 6;
/// The maximum number of endpoints per Service.
pub(crate) const ENDPOINTS: u8 = 4;

/// The first of the backends' UDP ports. Each UDP Service uses one port.
const DNS_TARGETS: u16 = 2000;
/// The first of the backends' HTTP ports. Each HTTP Service uses one port.
const HTTP_TARGETS: u16 = 3000;

/// The prefix of the Services' names.
const NAME_PREFIX: &str = "svc";

/// The number of connections that a reader makes per datagram, so that the servers can keep up.
const CONNECTS_PER_DATAGRAM: u64 = 64;

/// The map sizes, with enough room for replaced entries, which are freed only after a grace period.
pub(crate) const FRONTS: u32 = 512;
pub(crate) const SLOTS: u32 = 2048;
pub(crate) const BACKENDS: u32 = 2048;

/// The extra time that a reader or load may take to exit, beyond its planned duration.
const SLACK: Duration = Duration::from_secs(20);

/// Returns a Service's ClusterIP.
pub(crate) fn vip(family: Family, service: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 96, 1, service).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 1, service.into()).into(),
    }
}

/// Returns a Service's name.
pub(crate) fn name(service: u8) -> String {
    format!("{NAME_PREFIX}-{service}")
}

/// Returns a Service's protocol, its port, and its target port. Each Service has a single port, so that its
/// freed entries are reused for another Service rather than for another port of its own.
pub(crate) fn port(service: u8) -> (Protocol, u16, u16) {
    if service < UDP_SERVICES {
        (Protocol::UDP, DNS, DNS_TARGETS + u16::from(service))
    } else {
        (Protocol::TCP, HTTP, HTTP_TARGETS + u16::from(service))
    }
}

/// Returns the address of one of a Service's endpoints.
pub(crate) fn backend(family: Family, service: u8, number: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 3, service, number + 1).into(),
        Family::V6 => {
            let (service, number) = (service.into(), u16::from(number) + 1);
            Ipv6Addr::new(0xfd00, 0x10, 3, service, 0, 0, 0, number).into()
        }
    }
}

/// Returns the source address set by the route to a Service's endpoints.
fn source(family: Family, service: u8) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 4, 0, service).into(),
        Family::V6 => Ipv6Addr::new(0xfd00, 0x10, 4, 0, 0, 0, 0, service.into()).into(),
    }
}

/// A change to a Service's endpoints: the Service, and a bit mask of the endpoints that it then has (at least
/// one).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change {
    pub(crate) service: u8,
    endpoints: u8,
}

impl Change {
    /// Returns the change that gives a Service all of its endpoints.
    pub(crate) const fn all_endpoints(service: u8) -> Self {
        Self {
            service,
            endpoints: (1 << ENDPOINTS) - 1,
        }
    }

    /// Returns the numbers of the endpoints that the Service then has.
    pub(crate) fn endpoints(self) -> impl Iterator<Item = u8> {
        (0..ENDPOINTS).filter(move |number| self.endpoints & (1 << number) != 0)
    }

    /// Returns the addresses of the endpoints that the Service then has.
    pub(crate) fn addresses(self, family: Family) -> impl Iterator<Item = IpAddr> {
        self.endpoints()
            .map(move |number| backend(family, self.service, number))
    }

    /// Builds the manifest of the Service after the change.
    pub(crate) fn manifest(self, family: Family) -> Service {
        let (protocol, port, target) = port(self.service);
        Service::new(&name(self.service), [vip(family, self.service)])
            .port(protocol, port, target)
            .backends(self.addresses(family))
    }
}

/// An endless sequence of random endpoint changes, generated with xorshift. It depends only on the seed.
#[derive(Clone, Debug)]
pub(crate) struct RandomChanges(u32);

impl RandomChanges {
    pub(crate) const fn new(seed: u32) -> Self {
        Self(seed | 1)
    }

    pub(crate) const fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 % limit
    }

    fn byte_below(&mut self, limit: u8) -> u8 {
        u8::try_from(self.below(limit.into())).unwrap_or(0)
    }
}

impl Iterator for RandomChanges {
    type Item = Change;

    fn next(&mut self) -> Option<Change> {
        let service = if self.below(8) > 0 {
            self.byte_below(UDP_SERVICES)
        } else {
            UDP_SERVICES + self.byte_below(SERVICES - UDP_SERVICES)
        };
        Some(Change {
            service,
            endpoints: 1 + self.byte_below((1 << ENDPOINTS) - 1),
        })
    }
}

/// A node with a pod for the readers and a pod for the backends' servers. All Service and backend addresses
/// are in one family.
pub(crate) struct RaceFixture {
    pub(crate) family: Family,
    pub(crate) node: Node,
    pub(crate) client: Arc<Pod>,
    server: Server,
}

impl RaceFixture {
    pub(crate) fn new(family: Family) -> Result<Self> {
        let mut settings = InstanceSettings::from_environment()?;
        settings.maps = MapSizes {
            frontends: FRONTS,
            slots: SLOTS,
            backends: BACKENDS,
            ..settings.maps
        };
        let node = Node::with_settings(settings)?;
        // These are the node's first two pods, so their interfaces on the host are named pod1 and pod2.
        let (client, backends) = (node.pod("readers")?, node.pod("backends")?);
        let (all_backends, sources, gateway) = match family {
            Family::V4 => ("10.3.0.0/16", "10.4.0.0/24", "169.254.1.1"),
            Family::V6 => ("fd00:10:3::/48", "fd00:10:4::/64", "fe80::1"),
        };
        let (to_client, to_backends) = (client.address(family), backends.address(family));
        node.host().ip(&format!(
            "route add {all_backends} via {to_backends} dev pod2 onlink\n\
                 route add {sources} via {to_client} dev pod1 onlink\n"
        ))?;
        backends.ip(&format!("route add local {all_backends} dev lo\n"))?;
        let routes: String = (0..SERVICES)
            .map(|service| {
                let source = source(family, service);
                let (address, backends) = match family {
                    Family::V4 => (
                        format!("{source}/32 dev lo"),
                        format!("10.3.{service}.0/24"),
                    ),
                    Family::V6 => (
                        format!("{source}/128 dev lo nodad"),
                        format!("fd00:10:3:{service:x}::/64"),
                    ),
                };
                format!(
                    "addr add {address}\n\
                     route add {backends} via {gateway} dev eth0 src {source}\n"
                )
            })
            .collect();
        client.ip(&routes)?;
        let server = backends.serve(&[
            Listener::range(
                ServerKind::Udp,
                DNS_TARGETS,
                UDP_SERVICES.into(),
                NAME_PREFIX,
            ),
            Listener::range(ServerKind::Http, HTTP_TARGETS, SERVICES.into(), NAME_PREFIX),
            // The UDP servers on the HTTP ports record misrouted datagrams.
            Listener::range(ServerKind::Udp, HTTP_TARGETS, SERVICES.into(), NAME_PREFIX),
        ])?;
        Ok(Self {
            family,
            node,
            client,
            server,
        })
    }

    /// Starts a reader that is pinned to a CPU and connects a new socket to the UDP Services each time.
    pub(crate) fn reader(&self, cpu: u32, duration: Duration) -> Result<RunningLoad<race::Report>> {
        self.start_reader(
            cpu,
            duration,
            &["--source", &source(self.family, 0).to_string()],
        )
    }

    /// Starts a reader that is pinned to a CPU and keeps reconnecting the same socket to the UDP Services.
    pub(crate) fn reconnecting_reader(
        &self,
        cpu: u32,
        duration: Duration,
    ) -> Result<RunningLoad<race::Report>> {
        self.start_reader(cpu, duration, &["--reconnect"])
    }

    fn start_reader(
        &self,
        cpu: u32,
        duration: Duration,
        more: &[&str],
    ) -> Result<RunningLoad<race::Report>> {
        let first = SocketAddr::from((vip(self.family, 0), DNS)).to_string();
        let (count, millis) = (UDP_SERVICES.to_string(), duration.as_millis().to_string());
        let each = CONNECTS_PER_DATAGRAM.to_string();
        let mut words = vec!["race-read", "--first", &first, "--count", &count];
        words.extend([
            "--stem",
            NAME_PREFIX,
            "--millis",
            &millis,
            "--send-each",
            &each,
        ]);
        words.extend(more);
        let lab = environment::culvert_lab()?;
        let lab = lab
            .to_str()
            .context("the path of culvert-lab is not UTF-8")?;
        // On the writer's CPU, a reader gets a lower priority than the writer.
        let nice = [
            "nice",
            "-n",
            if cpu == WRITER_CPU { "15" } else { "0" },
            lab,
        ];
        let words: Vec<_> = nice.into_iter().chain(words).collect();
        let process = self.client.command(&words).cpu(cpu).start()?;
        Ok(RunningLoad::new(process, duration))
    }

    /// Starts a load of HTTP requests to one Service.
    pub(crate) fn requests(
        &self,
        service: u8,
        rate: u32,
        duration: Duration,
    ) -> Result<RunningLoad<Report>> {
        let to = SocketAddr::from((vip(self.family, service), HTTP));
        let command = self.client.lab_command(&["load", "tcp"])?;
        let command = command
            .option("--to", to)
            .option("--service", name(service))
            .option("--rate", rate)
            .option("--millis", duration.as_millis());
        Ok(RunningLoad::new(command.start()?, duration))
    }

    /// Returns the counts of the backends' servers, summed over all ports.
    pub(crate) fn counts(&self) -> Result<Counts> {
        Ok(self.server.record()?.total())
    }
}

/// A running reader or load, which prints a report of type `T` before it exits.
pub(crate) struct RunningLoad<T> {
    process: Process,
    duration: Duration,
    report: std::marker::PhantomData<T>,
}

impl<T: DeserializeOwned> RunningLoad<T> {
    pub(crate) const fn new(process: Process, duration: Duration) -> Self {
        Self {
            process,
            duration,
            report: std::marker::PhantomData,
        }
    }

    /// Waits until the process has exited, and returns its report.
    pub(crate) fn finish(self) -> Result<T> {
        let output = self.process.finish(self.duration + SLACK)?;
        ensure!(
            output.exit.is_success(),
            "{:?}: {}",
            output.exit,
            output.stderr
        );
        serde_json::from_str(&output.stdout).with_context(|| output.stdout.clone())
    }
}
