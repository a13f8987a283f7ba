//! The benchmark's fixture: a cloud node and an edge node with a tunnel between them, a server on the edge
//! node, and the network paths to it.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    clock,
    edge_node::{EDGE_V4, LINK_V4},
    manifest::Manifest,
    pod::path_to_string,
    sandbox::{COMMAND_TIMEOUT, Command, Process},
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use super::{Options, Variant};

/// The server's ports: one for plain TCP and one for TLS.
const PORTS: [u16; 2] = [9200, 9201];

/// The congestion control algorithm for all sockets, chosen because it doesn't pace. `bbr`, the default on
/// some machines, arms a timer for each segment. The tunnel has three hops and bare TLS has one, so on a
/// virtual machine, the cost of these timers would be a large part of the difference.
const CONGESTION: &str = "reno";

/// The time that unread streams are given to fill all buffers.
const FILL_TIME: Duration = Duration::from_millis(500);

/// A network path to the server.
pub(super) struct NetworkPath {
    to: SocketAddr,
    is_tls: bool,
    /// The processes whose CPU time is measured, apart from the client.
    pub(super) measured_processes: Vec<i32>,
    /// True if the client's CPU time is added to that of `measured_processes`.
    pub(super) adds_client_cpu_time: bool,
}

/// The two nodes with a running tunnel between them, and the server on the edge node.
pub(super) struct Fixture {
    server: Process,
    testbed: TunnelTestbed,
    tunnel_processes: Vec<i32>,
}

impl Fixture {
    pub(super) fn new(options: &Options) -> Result<Self> {
        let testbed = TunnelTestbed::prepare(options.common.settings()?)?;
        for sandbox in [testbed.node().host(), testbed.edge().sandbox()] {
            sandbox.sysctl("net.ipv4.tcp_congestion_control", CONGESTION)?;
        }
        let [plain, secure] = PORTS;
        let ports = Manifest::further_ports("https-proxy-ports", &plain.to_string());
        testbed.node().apply(ports)?;
        testbed.node().start()?;
        testbed.edge().start_agent([KUBELET_PORTS[0], plain])?;
        testbed.wait_for_kubelet()?;
        let tunnel_processes = vec![
            testbed
                .node()
                .daemon_pid()
                .context("the daemon doesn't run")?,
            testbed
                .edge()
                .agent()
                .pid()
                .context("the agent doesn't run")?,
        ];
        let files = testbed.edge().kubelet_files();
        let server = testbed
            .edge()
            .sandbox()
            .lab_command(&["throughput", "serve"])?;
        let server = server
            .option("--plain", plain)
            .option("--secure", secure)
            .option("--cert", path_to_string(&files.cert)?)
            .option("--key", path_to_string(&files.key)?);
        Ok(Self {
            server: start_until_ready(&testbed, server)?,
            testbed,
            tunnel_processes,
        })
    }

    pub(super) fn path(&self, variant: Variant) -> NetworkPath {
        let [plain, secure] = PORTS;
        let server = vec![self.server.pid()];
        let (address, port, measured_processes) = match variant {
            Variant::Plain => (LINK_V4, plain, server),
            Variant::Tls => (LINK_V4, secure, server),
            Variant::Tunnel => (EDGE_V4, plain, self.tunnel_processes.clone()),
        };
        NetworkPath {
            to: SocketAddr::new(IpAddr::V4(address), port),
            is_tls: variant == Variant::Tls,
            measured_processes,
            adds_client_cpu_time: variant != Variant::Tunnel,
        }
    }

    /// Builds the command that runs a client on the cloud node's host.
    pub(super) fn client(
        &self,
        path: &NetworkPath,
        mode: &str,
        connections: u32,
    ) -> Result<Command<'_>> {
        let command = self
            .testbed
            .node()
            .host()
            .lab_command(&["throughput", mode])?;
        let command = command
            .option("--to", path.to)
            .option("--connections", connections);
        if !path.is_tls {
            return Ok(command);
        }
        let ca = path_to_string(&self.testbed.edge().kubelet_files().ca)?;
        Ok(command.option("--ca", ca).option("--address", EDGE_V4))
    }

    /// Starts a client that opens connections and never reads from them. It runs until the returned process
    /// is dropped.
    pub(super) fn stall(&self, path: &NetworkPath, count: u32) -> Result<Process> {
        self.hold(path, "stall", count)
    }

    /// Starts a client that opens connections and sends nothing over them. It runs until the returned process
    /// is dropped.
    pub(super) fn idle(&self, path: &NetworkPath, count: u32) -> Result<Process> {
        self.hold(path, "idle", count)
    }

    fn hold(&self, path: &NetworkPath, mode: &str, count: u32) -> Result<Process> {
        let holding = start_until_ready(&self.testbed, self.client(path, mode, count)?)?;
        clock::pause(FILL_TIME);
        Ok(holding)
    }
}

/// Starts a command and waits until its ready file exists.
fn start_until_ready(testbed: &TunnelTestbed, command: Command<'_>) -> Result<Process> {
    let file = testbed
        .node()
        .network()
        .lab()
        .directory()
        .join("flow.ready");
    let process = command.option("--ready", path_to_string(&file)?).start()?;
    wait::until(COMMAND_TIMEOUT, || file.exists())
        .context("the process did not create its ready file")?;
    fs::remove_file(&file)?;
    Ok(process)
}
