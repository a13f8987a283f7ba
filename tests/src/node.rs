//! A node of the laboratory: its network, and an instance of the product.

use std::{ops::Deref, sync::Arc};

use anyhow::Result;

use crate::{
    instance::{Instance, InstanceSettings},
    node_network::NodeNetwork,
    pod::Pod,
    sandbox::Sandbox,
};

/// A node with a host, pods and a client outside, on which `culvert node` can be started. Everything is
/// removed on drop.
#[derive(Debug)]
pub struct Node {
    instance: Instance,
    network: NodeNetwork,
}

impl Node {
    /// Creates a node with the product's default map sizes; the daemon isn't started yet.
    pub fn new() -> Result<Self> {
        Self::with_settings(InstanceSettings::from_environment()?)
    }

    /// Creates a node with these settings; the daemon isn't started yet.
    pub fn with_settings(settings: InstanceSettings) -> Result<Self> {
        let network = NodeNetwork::new()?;
        let directory = network.lab().directory().to_owned();
        let cgroup = network.instance_cgroup();
        let instance = Instance::new(network.host().clone(), directory, &cgroup, settings)?;
        Ok(Self { instance, network })
    }

    /// Returns the pod of this name; creates it on first use.
    pub fn pod(&self, name: &str) -> Result<Arc<Pod>> {
        self.network.pod(name)
    }

    /// Returns the client outside: it is connected to the host, but not in the cgroup of the instance.
    #[must_use]
    pub const fn outside(&self) -> &Sandbox {
        self.network.outside()
    }

    #[must_use]
    pub const fn network(&self) -> &NodeNetwork {
        &self.network
    }
}

impl Deref for Node {
    type Target = Instance;

    fn deref(&self) -> &Instance {
        &self.instance
    }
}
