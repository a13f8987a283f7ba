//! What is measured on: a site with a tunnel, a server on its edge, and ways there from its cloud.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    clock,
    edge::{AgentSettings, EDGE_V4, LINK_V4},
    manifest::objects::ConfigMap,
    place::{COMMAND, Process},
    pod::text,
    site::{KUBELET, Site},
    wait,
};

use super::{Options, Variant};

/// The ports of the server: over TCP, and over TLS.
const PORTS: [u16; 2] = [9200, 9201];

/// What paces TCP everywhere: nothing. `bbr`, the default of some machines, arms a timer for each
/// piece that it sends. The tunnel has three hops and bare TLS has one, so what a timer costs on a
/// virtual machine would be a good part of what is compared.
const CONGESTION: &str = "reno";

/// How long streams that nobody reads get to fill what there is to fill.
const FILL: Duration = Duration::from_millis(500);

/// One way to the server.
pub(super) struct Way {
    to: SocketAddr,
    is_tls: bool,
    /// The processes whose time on CPUs is that of the way.
    pub(super) ends: Vec<i32>,
    /// Whether the client is one of its ends, too.
    pub(super) client_is_end: bool,
}

/// Everything that is measured on.
pub(super) struct Stage {
    server: Process,
    site: Site,
    tunnel: Vec<i32>,
    stalls: AtomicU32,
}

impl Stage {
    pub(super) fn set(options: &Options) -> Result<Self> {
        let site = Site::set(options.common.settings()?)?;
        for place in [site.node().host(), site.edge().place()] {
            place.sysctl("net.ipv4.tcp_congestion_control", CONGESTION)?;
        }
        let [plain, secure] = PORTS;
        let ports = ConfigMap::of_tunnel().data("https-proxy-ports", &plain.to_string());
        site.node().apply(ports)?;
        site.node().start()?;
        site.edge().start_agent(&AgentSettings {
            allow: [KUBELET[0], plain]
                .map(|port| format!("self:{port}"))
                .into(),
            ..AgentSettings::default()
        })?;
        site.until_served()?;
        let tunnel = vec![
            site.node().daemon_pid().context("no daemon runs")?,
            site.edge().agent_pid().context("no agent runs")?,
        ];
        let files = site.edge().kubelet_files();
        let ready = site.node().topology().lab().folder().join("flow.ready");
        let server = site
            .edge()
            .place()
            .lab_command(&["flow", "serve"])?
            .option("--plain", plain)
            .option("--secure", secure)
            .option("--cert", text(&files.cert)?)
            .option("--key", text(&files.key)?)
            .option("--ready", text(&ready)?)
            .start()?;
        wait::until(COMMAND, || ready.exists()).context("the server doesn't listen")?;
        Ok(Self {
            server,
            site,
            tunnel,
            stalls: AtomicU32::new(0),
        })
    }

    pub(super) fn way(&self, variant: Variant) -> Way {
        let [plain, secure] = PORTS;
        let (address, port) = match variant {
            Variant::Plain => (LINK_V4, plain),
            Variant::Tls => (LINK_V4, secure),
            Variant::Tunnel => (EDGE_V4, plain),
        };
        let ends = match variant {
            Variant::Plain | Variant::Tls => vec![self.server.pid()],
            Variant::Tunnel => self.tunnel.clone(),
        };
        Way {
            to: SocketAddr::new(IpAddr::V4(address), port),
            is_tls: variant == Variant::Tls,
            ends,
            client_is_end: variant != Variant::Tunnel,
        }
    }

    /// Starts a client on the cloud's host.
    pub(super) fn client(
        &self,
        way: &Way,
        what: &str,
        connections: u32,
        more: &[(&str, String)],
    ) -> Result<Process> {
        let mut command = self.site.node().host().lab_command(&["flow", what])?;
        command = command
            .option("--to", way.to)
            .option("--connections", connections);
        if way.is_tls {
            let ca = text(&self.site.edge().kubelet_ca())?;
            command = command.option("--ca", ca).option("--address", EDGE_V4);
        }
        let more = more.iter();
        more.fold(command, |command, (name, value)| {
            command.option(name, value)
        })
        .start()
    }

    /// Readers that read nothing; they go when the process is dropped.
    pub(super) fn stall(&self, way: &Way, count: u32) -> Result<Process> {
        let number = self.stalls.fetch_add(1, Ordering::Relaxed);
        let ready: PathBuf = self
            .site
            .node()
            .topology()
            .lab()
            .folder()
            .join(format!("stall-{number}"));
        let stalled = self.client(way, "stall", count, &[("--ready", text(&ready)?)])?;
        wait::until(COMMAND, || ready.exists()).context("stalled readers aren't open")?;
        fs::remove_file(&ready)?;
        clock::pause(FILL);
        Ok(stalled)
    }
}
