//! A control plane without controllers, and the hosts of two nodes without kubelets: for what only
//! watches the API server.

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

/// It ends when it is dropped.
#[derive(Debug)]
pub struct Bare {
    /// Held, not used.
    _control: Control,
    /// What all parts share.
    pub site: Site,
}

/// A host that a proxy runs on.
#[derive(Clone, Debug)]
pub struct Host {
    /// The name of its Node.
    pub name: &'static str,
    /// Where it is.
    pub place: Place,
    /// The control group of everything on it.
    pub cgroup: PathBuf,
    /// Its own address.
    pub address: String,
}

impl Bare {
    /// Starts it, and waits until the API server answers.
    pub fn start(kit: Kit, logs: Logs) -> Result<Self> {
        let site = Site::new(kit, logs, Size::Two)?;
        Ok(Self {
            _control: Control::start_api(&site)?,
            site,
        })
    }

    /// A host by its number.
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

    /// A connection of the administrator's to the API server.
    pub fn api(&self) -> Result<Api> {
        let [address, _] = network::addresses(0);
        let server = SocketAddr::new(address.parse()?, 6443);
        Api::connect(self.site.network.cloud(), server, &self.site.pki)
    }

    /// The client config of the administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        self.site.pki.file("admin.kubeconfig")
    }
}
