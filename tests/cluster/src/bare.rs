//! A control plane without controllers, and the hosts of two nodes without kubelets: for programs that
//! only watch the API server.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use tunnel_tests::place::Place;

use super::{
    Site,
    api::Api,
    control::Control,
    kit::Kit,
    logs::Logs,
    network::{self, NODES, Size},
};

/// A running control plane with its hosts; it ends on drop.
#[derive(Debug)]
pub struct Bare {
    /// The control plane, held for its drop.
    _control: Control,
    /// The network, the programs and the logs.
    pub site: Site,
}

/// A host that a proxy runs on.
#[derive(Clone, Debug)]
pub struct Host {
    /// The name of the host's Node.
    pub name: &'static str,
    /// The host's network namespace and control group.
    pub place: Place,
    /// The control group of all processes on the host.
    pub cgroup: PathBuf,
    /// The host's own IPv4 address.
    pub address: String,
}

impl Bare {
    /// Starts the control plane, and waits until the API server answers.
    pub fn start(kit: Kit, logs: Logs) -> Result<Self> {
        let site = Site::new(kit, logs, Size::Two)?;
        Ok(Self {
            _control: Control::start_api(&site)?,
            site,
        })
    }

    /// Returns a host by its number.
    pub fn host(&self, number: usize) -> Result<Host> {
        let place = self.site.network.hosts.get(number);
        let (name, group) = NODES.get(number).copied().context("no such node")?;
        let [address, _] = network::addresses(number);
        Ok(Host {
            name,
            place: place.context("no such host")?.clone(),
            cgroup: self.site.lab.cgroup().join(group),
            address,
        })
    }

    /// Connects to the API server as the administrator.
    pub fn api(&self) -> Result<Api> {
        let [address, _] = network::addresses(0);
        let server = SocketAddr::new(address.parse()?, 6443);
        Api::connect(self.site.network.cloud(), server, &self.site.pki)
    }

    /// Returns the path of the administrator's client config.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        self.site.pki.file("admin.kubeconfig")
    }
}
