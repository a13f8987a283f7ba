//! A node in the lab: its network, and an instance of Culvert.

use std::{ops::Deref, sync::Arc};

use anyhow::Result;

use crate::{
    culvert_instance::{Instance, InstanceSettings},
    node_network::NodeNetwork,
    pod::Pod,
    sandbox::Sandbox,
};

/// A node that consists of a host, pods and an external client, and on which `culvert node` can be started.
/// Everything is removed on drop.
#[derive(Debug)]
pub struct Node {
    instance: Instance,
    network: NodeNetwork,
}

impl Node {
    /// Creates a node with Culvert's default settings, but does not start the daemon.
    pub fn new() -> Result<Self> {
        Self::with_settings(InstanceSettings::from_environment()?)
    }

    /// Creates a node with the given settings, but does not start the daemon.
    pub fn with_settings(settings: InstanceSettings) -> Result<Self> {
        let network = NodeNetwork::new()?;
        let directory = network.lab().directory().to_owned();
        let cgroup = network.instance_cgroup();
        let instance = Instance::new(network.host().clone(), directory, &cgroup, settings)?;
        Ok(Self { instance, network })
    }

    /// Returns the pod with the given name. Creates it on first use.
    pub fn pod(&self, name: &str) -> Result<Arc<Pod>> {
        self.network.pod(name)
    }

    /// Returns the external client's sandbox, which is connected to the host but is not in the instance's
    /// cgroup.
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
