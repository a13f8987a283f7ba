//! The kernel programs on a node, loaded by the test itself rather than by a daemon.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tunnel_tests::{culvert_instance::NODE_NAME, node::Node};
use tunnel_userspace::{
    bpf::{Counters, DataPath, Features, KernelMaps, PinDirectory, ProgramSettings, RcuGrace},
    model::{Algorithm, ExternalIps, TopologyKeys},
    reconcile::{MapSizes, PlanSettings, Reconciler},
};

use crate::race::fixture::{BACKENDS, SLOTS};

/// The loaded programs and their counters.
pub(crate) struct Programs {
    counters: Counters,
    pub(crate) data_path: DataPath,
    _pins: PinDirectory,
}

impl Programs {
    /// Loads the programs for these kernel features, with room for this many frontends in the maps, but does
    /// not attach them.
    pub(crate) fn load(
        node: &Node,
        features: Features,
        frontends: u32,
    ) -> Result<(Self, KernelMaps)> {
        let pins = PinDirectory::lock(&node.bpffs())?;
        let sizes = MapSizes {
            frontends,
            slots: SLOTS,
            backends: BACKENDS,
            ..MapSizes::uniform(64)
        };
        let switches = ProgramSettings::default();
        let data_path = DataPath::load(&pins, sizes, features, &switches, Duration::ZERO)?;
        let (maps, counters) = data_path.open_maps()?;
        let programs = Self {
            counters,
            data_path,
            _pins: pins,
        };
        Ok((programs, maps))
    }

    pub(crate) fn attach(&self, node: &Node) -> Result<()> {
        Ok(self
            .data_path
            .attach(&node.network().instance_cgroup())?
            .pin()?)
    }

    /// Creates a reconciler that owns the maps, like the daemon's.
    pub(crate) fn reconciler(
        &self,
        maps: KernelMaps,
        grace: &RcuGrace,
    ) -> Result<Reconciler<KernelMaps>> {
        let settings = PlanSettings {
            node_name: NODE_NAME.to_owned(),
            algorithm: Algorithm::Random,
            node_port_addresses: Vec::new(),
            external_ips: ExternalIps::Any,
            topology_keys: TopologyKeys::Ignore,
        };
        let sizes = self.data_path.sizes();
        Ok(Reconciler::adopt(maps, sizes, grace, settings)?)
    }

    /// Returns how often the kernel programs have counted the reason with this label.
    pub(crate) fn reason(&self, word: &str) -> Result<u64> {
        let counts = self.counters.read()?;
        let found = counts.iter().find(|(reason, _)| reason.label() == word);
        Ok(found
            .with_context(|| format!("no reason has the label {word}"))?
            .1)
    }
}
