//! Rules of kube-proxy's shape, for benchmarks that compare with them: what `nft -f` and
//! `iptables-restore` load for a number of ClusterIP Services, each with the same endpoints, and
//! what they load when one endpoint is replaced.
//!
//! Chains, maps and rules are those of kube-proxy 1.36 (`pkg/proxy/{nftables,iptables}/proxier.go`)
//! for Services without node ports, policies and affinity; names of chains have the length of its
//! own, with a number where it has a hash.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
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
    words: Vec<String>,
}

impl Loader {
    /// For a place, with the command that takes a file's name, or the file itself as its input.
    pub(crate) fn new(place: &Place, words: &[&str]) -> Self {
        Self {
            pid: place.pid(),
            words: words.iter().map(|word| (*word).to_owned()).collect(),
        }
    }

    /// Loads a file, and says how long that took, with the start of the program.
    pub(crate) fn load(&self, file: &Path) -> Result<Duration> {
        let start = Instant::now();
        let output = Command::new("nsenter")
            .args(["--target", &self.pid.to_string(), "--net"])
            .args(&self.words)
            .arg(file)
            .output()
            .with_context(|| format!("cannot start {}", self.name()))?;
        let took = start.elapsed();
        if !output.status.success() {
            bail!(
                "{} {} failed: {}",
                self.name(),
                file.display(),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(took)
    }

    fn name(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }
}

/// Writes rules to a file for a [`Loader`].
pub(crate) fn write(folder: &Path, name: &str, rules: &str) -> Result<PathBuf> {
    let file = folder.join(name);
    std::fs::write(&file, rules).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}
