//! Rules of kube-proxy's shape, for benchmarks that compare with them: what `nft -f` and
//! `iptables-restore` load for a number of ClusterIP Services, each with the same endpoints, and
//! what they load when one endpoint is replaced.
//!
//! Chains, maps and rules are those of kube-proxy 1.36 (`pkg/proxy/{nftables,iptables}/proxier.go`)
//! for Services without node ports, policies and affinity; names of chains have the length of its
//! own, with a number where it has a hash.

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

/// The bit of the packet mark that asks for masquerading (kube-proxy's `masqueradeBit` 14).
const MARK: &str = "0x4000";

/// What rules are made for.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// How many Services there are, from [`FIRST`] on.
    pub(crate) services: u32,
    /// The port of each.
    pub(crate) port: u16,
    /// The endpoints of each.
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

/// A program that is run in a place's network namespace, and takes rules by a file.
#[derive(Clone, Debug)]
pub(crate) struct Loader {
    pid: u32,
    words: Vec<&'static str>,
}

impl Loader {
    /// For a place, with the command that takes a file's name, or the file itself as its input.
    pub(crate) fn new(place: &Place, words: &[&'static str]) -> Self {
        Self {
            pid: place.pid(),
            words: words.to_vec(),
        }
    }

    /// Writes rules to a file and loads it, and says how long that took from the start of the
    /// program.
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
