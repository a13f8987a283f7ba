//! A node: its network and one instance of the product.

use std::{ops::Deref, sync::Arc};

use anyhow::Result;

use crate::{
    instance::{Instance, Settings},
    place::Place,
    pod::Pod,
    topology::Topology,
};

/// A node with a host, pods and a client outside, on which `culvert node` can be started.
/// Everything of it ends when it is dropped.
#[derive(Debug)]
pub struct Node {
    instance: Instance,
    topology: Topology,
}

impl Node {
    /// A node with the product's own map sizes; the daemon isn't started yet.
    pub fn new() -> Result<Self> {
        Self::with(Settings::from_environment()?)
    }

    /// A node with settings of its own; the daemon isn't started yet.
    pub fn with(settings: Settings) -> Result<Self> {
        let topology = Topology::new()?;
        let folder = topology.lab().folder().to_owned();
        let cgroup = topology.instance_cgroup();
        let instance = Instance::new(topology.host().clone(), folder, &cgroup, settings)?;
        Ok(Self { instance, topology })
    }

    /// The pod of this name, made when it is asked for first.
    pub fn pod(&self, name: &str) -> Result<Arc<Pod>> {
        self.topology.pod(name)
    }

    /// A client elsewhere in the network, outside the instance's cgroup.
    #[must_use]
    pub const fn outside(&self) -> &Place {
        self.topology.outside()
    }

    #[must_use]
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }
}

impl Deref for Node {
    type Target = Instance;

    fn deref(&self) -> &Instance {
        &self.instance
    }
}
