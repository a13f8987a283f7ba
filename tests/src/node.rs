//! A node of the laboratory: its network, and an instance of the product.

use std::{ops::Deref, sync::Arc};

use anyhow::Result;

use crate::{
    instance::{Instance, Settings},
    place::Place,
    pod::Pod,
    topology::Topology,
};

/// A node with a host, pods and a client outside, on which `culvert node` can be started. Everything is
/// removed on drop.
#[derive(Debug)]
pub struct Node {
    instance: Instance,
    topology: Topology,
}

impl Node {
    /// Creates a node with the product's default map sizes; the daemon isn't started yet.
    pub fn new() -> Result<Self> {
        Self::with(Settings::from_environment()?)
    }

    /// Creates a node with these settings; the daemon isn't started yet.
    pub fn with(settings: Settings) -> Result<Self> {
        let topology = Topology::new()?;
        let folder = topology.lab().folder().to_owned();
        let cgroup = topology.instance_cgroup();
        let instance = Instance::new(topology.host().clone(), folder, &cgroup, settings)?;
        Ok(Self { instance, topology })
    }

    /// Returns the pod of this name; creates it on first use.
    pub fn pod(&self, name: &str) -> Result<Arc<Pod>> {
        self.topology.pod(name)
    }

    /// Returns the client outside: it is connected to the host, but not in the cgroup of the instance.
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
