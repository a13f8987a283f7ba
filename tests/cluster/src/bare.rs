//! A control plane without controllers, and the hosts of two nodes without kubelets: for what only
//! watches the API server.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use tunnel_tests::{lab::Lab, place::Place};

use super::{
    Site,
    api::Api,
    control::Control,
    kit::Kit,
    kubectl::Kubectl,
    logs::Logs,
    network::{self, NODES, Network, Size},
    pki::Pki,
};

/// It ends when it is dropped.
#[derive(Debug)]
pub struct Bare {
    control: Control,
    network: Network,
    pki: Pki,
    kit: Kit,
    logs: Logs,
    lab: Lab,
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
    ///
    /// # Errors
    ///
    /// Without the rights of root, or when the API server doesn't get ready.
    pub fn start(kit: Kit, logs: Logs) -> Result<Self> {
        let lab = Lab::new()?;
        let network = Network::new(&lab, &kit, Size::Two)?;
        let pki = Pki::write(&lab.folder().join("pki"))?;
        let site = Site {
            lab: &lab,
            kit: &kit,
            logs: &logs,
            pki: &pki,
        };
        let control = Control::start_api(&site, network.cloud())?;
        Ok(Self {
            control,
            network,
            pki,
            kit,
            logs,
            lab,
        })
    }

    /// A host by its number.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn host(&self, number: usize) -> Result<Host> {
        let place = self.network.hosts().get(number).context("no such host")?;
        let (name, group) = NODES.get(number).copied().context("no such node")?;
        let [address, _] = network::addresses(number);
        Ok(Host {
            name,
            place: place.clone(),
            cgroup: self.lab.cgroup().join(group),
            address,
        })
    }

    /// A connection of the administrator's to the API server.
    ///
    /// # Errors
    ///
    /// When it can't be made.
    pub fn api(&self) -> Result<Api> {
        let [address, _] = network::addresses(0);
        let server = SocketAddr::new(address.parse()?, 6443);
        Api::connect(self.network.cloud(), server, &self.pki)
    }

    /// The client config of the administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> String {
        self.pki.file("admin.kubeconfig")
    }

    /// Asks the API server by `kubectl`.
    #[must_use]
    pub const fn kubectl(&self) -> &Kubectl {
        self.control.kubectl()
    }

    /// The programs.
    #[must_use]
    pub const fn kit(&self) -> &Kit {
        &self.kit
    }

    /// Where every part writes what it says.
    #[must_use]
    pub const fn logs(&self) -> &Logs {
        &self.logs
    }

    /// A folder that goes with it.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.lab.folder().to_owned()
    }
}
