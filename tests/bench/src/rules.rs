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
use tunnel_tests::{clock::Instant, load::race::offset, place::Place, topology};

use crate::services::FIRST;

pub(crate) mod iptables;
pub(crate) mod nft;

/// The bit of the packet mark that requests masquerading (kube-proxy's `masqueradeBit` 14).
const MARK: &str = "0x4000";

/// The Services that the rules are for.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// The number of Services, from [`FIRST`] on.
    pub(crate) services: u32,
    /// The port of each Service.
    pub(crate) port: u16,
    /// The endpoints of each Service.
    pub(crate) endpoints: Vec<SocketAddr>,
}

impl Shape {
    fn address(number: u32) -> IpAddr {
        offset(FIRST, number)
    }

    fn pods() -> &'static str {
        let [v4, _] = topology::PODS;
        v4
    }
}

/// A program that loads rules from a file into the network namespace of a sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Loader {
    pid: u32,
    words: Vec<&'static str>,
}

impl Loader {
    /// Creates a loader for a sandbox; the path of a file with rules is appended to its command line.
    pub(crate) fn new(place: &Place, words: &[&'static str]) -> Self {
        Self {
            pid: place.pid(),
            words: words.to_vec(),
        }
    }

    /// Writes rules to a file and loads it; returns how long the program ran.
    pub(crate) fn load(&self, folder: &Path, name: &str, rules: &str) -> Result<Duration> {
        let (file, program) = (folder.join(name), self.words.join(" "));
        fs::write(&file, rules).with_context(|| format!("cannot write {}", file.display()))?;
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.pid.to_string(), "--net"]);
        command.args(&self.words).arg(&file);
        let start = Instant::now();
        let output = command.output();
        let took = start.elapsed();
        let output = output.with_context(|| format!("cannot start {program}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{program} failed: {said}");
        Ok(took)
    }
}
