//! Generates rules like kube-proxy's for comparison: input for `nft -f` and `iptables-restore` that sets up a
//! given number of ClusterIP Services with the same endpoints, and input for `nft -f` that replaces a
//! Service's endpoints.
//!
//! The chains, maps and rules are those that kube-proxy 1.36 (`pkg/proxy/{nftables,iptables}/proxier.go`)
//! creates for Services without traffic policies or session affinity, with or without node ports. Chain names are as long as
//! kube-proxy's, but contain a number instead of a hash.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::{address::nth_address, clock::Instant, node_network, sandbox::Sandbox};

pub mod iptables;
pub mod nft;

/// The ClusterIP of the first Service.
pub const FIRST_CLUSTER_IP: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 97, 0, 0));

/// The bit in the packet mark that requests masquerading (kube-proxy's `masqueradeBit` 14).
const MASQUERADE_MARK: &str = "0x4000";

/// The Services to generate rules for.
#[derive(Clone, Debug)]
pub struct ServiceSet {
    /// The number of Services. Their addresses start at [`FIRST_CLUSTER_IP`].
    pub services: u32,
    /// The port of each Service.
    pub port: u16,
    /// The endpoints of each Service.
    pub endpoints: Vec<SocketAddr>,
}

/// A Service whose only endpoint and node port are its own.
#[derive(Clone, Copy, Debug)]
pub struct NodePortService {
    pub number: u32,
    /// The protocol in lower case.
    pub protocol: &'static str,
    pub port: u16,
    pub node_port: Option<u16>,
    pub endpoint: SocketAddr,
}

impl ServiceSet {
    fn address(number: u32) -> IpAddr {
        nth_address(FIRST_CLUSTER_IP, number)
    }

    fn pods() -> &'static str {
        let [v4, _] = node_network::POD_RANGES;
        v4
    }
}

/// A program that loads rules from a file into a sandbox's network namespace.
#[derive(Clone, Debug)]
pub struct Loader {
    pid: u32,
    command_line: Vec<&'static str>,
}

impl Loader {
    /// Creates a loader for a sandbox. [`Self::load`] appends the path of the rules file to `command_line`.
    pub fn new(sandbox: &Sandbox, command_line: &[&'static str]) -> Self {
        Self {
            pid: sandbox.pid(),
            command_line: command_line.to_vec(),
        }
    }

    /// Writes the rules to a file and runs the program on it; returns how long the program ran.
    pub fn load(&self, directory: &Path, name: &str, rules: &str) -> Result<Duration> {
        let (file, program) = (directory.join(name), self.command_line.join(" "));
        fs::write(&file, rules).with_context(|| format!("cannot write {}", file.display()))?;
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string(), "--net"]);
        command.args(&self.command_line).arg(&file);
        let start = Instant::now();
        let output = command.output();
        let took = start.elapsed();
        let output = output.with_context(|| format!("cannot start {program}"))?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{program} failed: {stderr}");
        Ok(took)
    }
}
