//! Generates rules like kube-proxy's for comparison: the input of `nft -f` and `iptables-restore` for a
//! number of ClusterIP Services that share their endpoints, and for the replacement of an endpoint.
//!
//! Chains, maps and rules are those of kube-proxy 1.36 (`pkg/proxy/{nftables,iptables}/proxier.go`) for
//! Services without node ports, policies and affinity. Chain names have kube-proxy's length, with a
//! number instead of a hash.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{address::nth_address, clock::Instant, node_network, sandbox::Sandbox};

use crate::services::FIRST_CLUSTER_IP;

pub(crate) mod iptables;
pub(crate) mod nft;

/// The bit of the packet mark that requests masquerading (kube-proxy's `masqueradeBit` 14).
const MASQUERADE_MARK: &str = "0x4000";

/// The Services that the rules are for.
#[derive(Clone, Debug)]
pub(crate) struct ServiceSet {
    /// The number of Services, from [`FIRST_CLUSTER_IP`] on.
    pub(crate) services: u32,
    /// The port of each Service.
    pub(crate) port: u16,
    /// The endpoints of each Service.
    pub(crate) endpoints: Vec<SocketAddr>,
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

/// A program that loads rules from a file into the network namespace of a sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Loader {
    pid: u32,
    command_line: Vec<&'static str>,
}

impl Loader {
    /// Creates a loader for a sandbox; the path of a file with rules is appended to its command line.
    pub(crate) fn new(sandbox: &Sandbox, command_line: &[&'static str]) -> Self {
        Self {
            pid: sandbox.pid(),
            command_line: command_line.to_vec(),
        }
    }

    /// Writes rules to a file and loads it; returns how long the program ran.
    pub(crate) fn load(&self, directory: &Path, name: &str, rules: &str) -> Result<Duration> {
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
