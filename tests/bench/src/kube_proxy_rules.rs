//! Generates rules like kube-proxy's for comparison: input for `nft -f` and `iptables-restore` that sets up a
//! given number of ClusterIP Services with the same endpoints, and input for `nft -f` that replaces a
//! Service's endpoints.
//!
//! The chains, maps and rules are those that kube-proxy 1.36 (`pkg/proxy/{nftables,iptables}/proxier.go`)
//! creates for Services without node ports, traffic policies or session affinity. Chain names are as long as
//! kube-proxy's, but contain a number instead of a hash.

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

/// The bit in the packet mark that requests masquerading (kube-proxy's `masqueradeBit` 14).
const MASQUERADE_MARK: &str = "0x4000";

/// The Services to generate rules for.
#[derive(Clone, Debug)]
pub(crate) struct ServiceSet {
    /// The number of Services. Their addresses start at [`FIRST_CLUSTER_IP`].
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

/// A program that loads rules from a file into a sandbox's network namespace.
#[derive(Clone, Debug)]
pub(crate) struct Loader {
    pid: u32,
    command_line: Vec<&'static str>,
}

impl Loader {
    /// Creates a loader for a sandbox. [`Self::load`] appends the path of the rules file to `command_line`.
    pub(crate) fn new(sandbox: &Sandbox, command_line: &[&'static str]) -> Self {
        Self {
            pid: sandbox.pid(),
            command_line: command_line.to_vec(),
        }
    }

    /// Writes the rules to a file and runs the program on it; returns how long the program ran.
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
