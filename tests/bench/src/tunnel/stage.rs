//! The fixture of the benchmark: a cloud node and an edge node with a tunnel, a server on the edge node,
//! and the network paths to it.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    clock,
    edge::{EDGE_V4, LINK_V4},
    manifest::Manifest,
    place::{COMMAND, Command, Process},
    pod::text,
    site::{KUBELET, Site},
    wait,
};

use super::{Options, Variant};

/// The ports of the server: over TCP, and over TLS.
const PORTS: [u16; 2] = [9200, 9201];

/// The congestion control of all sockets, one without pacing. `bbr`, the default of some machines, arms a
/// timer for each segment. The tunnel has three hops and bare TLS has one, so on a virtual machine the
/// cost of timers would be a large part of the difference.
const CONGESTION: &str = "reno";

/// The time in which streams that nobody reads fill all buffers.
const FILL: Duration = Duration::from_millis(500);

/// One path to the server.
pub(super) struct Way {
    to: SocketAddr,
    is_tls: bool,
    /// The processes whose CPU time is measured, besides the client.
    pub(super) ends: Vec<i32>,
    /// True if the client's CPU time is added.
    pub(super) client_is_end: bool,
}

/// The nodes with a running tunnel, and the server.
pub(super) struct Stage {
    server: Process,
    site: Site,
    tunnel: Vec<i32>,
}

impl Stage {
    pub(super) fn set(options: &Options) -> Result<Self> {
        let site = Site::set(options.common.settings()?)?;
        for place in [site.node().host(), site.edge().place()] {
            place.sysctl("net.ipv4.tcp_congestion_control", CONGESTION)?;
        }
        let [plain, secure] = PORTS;
        let ports = Manifest::further_ports("https-proxy-ports", &plain.to_string());
        site.node().apply(ports)?;
        site.node().start()?;
        site.edge().start_agent([KUBELET[0], plain])?;
        site.until_served()?;
        let tunnel = vec![
            site.node().daemon_pid().context("the daemon doesn't run")?,
            site.edge().agent().pid().context("the agent doesn't run")?,
        ];
        let files = site.edge().kubelet_files();
        let server = site.edge().place().lab_command(&["flow", "serve"])?;
        let server = server
            .option("--plain", plain)
            .option("--secure", secure)
            .option("--cert", text(&files.cert)?)
            .option("--key", text(&files.key)?);
        Ok(Self {
            server: ready(&site, server)?,
            site,
            tunnel,
        })
    }

    pub(super) fn way(&self, variant: Variant) -> Way {
        let [plain, secure] = PORTS;
        let server = vec![self.server.pid()];
        let (address, port, ends) = match variant {
            Variant::Plain => (LINK_V4, plain, server),
            Variant::Tls => (LINK_V4, secure, server),
            Variant::Tunnel => (EDGE_V4, plain, self.tunnel.clone()),
        };
        Way {
            to: SocketAddr::new(IpAddr::V4(address), port),
            is_tls: variant == Variant::Tls,
            ends,
            client_is_end: variant != Variant::Tunnel,
        }
    }

    /// Builds the command of a client on the host of the cloud node.
    pub(super) fn client(&self, way: &Way, what: &str, connections: u32) -> Result<Command<'_>> {
        let command = self.site.node().host().lab_command(&["flow", what])?;
        let command = command
            .option("--to", way.to)
            .option("--connections", connections);
        if !way.is_tls {
            return Ok(command);
        }
        let ca = text(&self.site.edge().kubelet_files().ca)?;
        Ok(command.option("--ca", ca).option("--address", EDGE_V4))
    }

    /// Starts a process with connections that it doesn't read from; they end when it is dropped.
    pub(super) fn stall(&self, way: &Way, count: u32) -> Result<Process> {
        let stalled = ready(&self.site, self.client(way, "stall", count)?)?;
        clock::pause(FILL);
        Ok(stalled)
    }
}

/// Starts a command, and waits until its ready file exists.
fn ready(site: &Site, command: Command<'_>) -> Result<Process> {
    let file = site.node().topology().lab().folder().join("flow.ready");
    let process = command.option("--ready", text(&file)?).start()?;
    wait::until(COMMAND, || file.exists()).context("the process did not create its ready file")?;
    fs::remove_file(&file)?;
    Ok(process)
}
