//! The kernel programs on a node, as loaded by the test itself instead of a daemon.

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result};
use tunnel_tests::{culvert_instance::NODE_NAME, node::Node};
use tunnel_userspace::{
    bpf::{Counters, DataPath, Features, KernelMaps, PinDirectory, ProgramSettings, RcuGrace},
    model::{Algorithm, ExternalIps, NodeAddresses, TopologyKeys},
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
    /// Loads the programs for the given kernel features, but does not attach them. The frontend maps have
    /// room for `frontends` entries.
    pub(crate) fn load(
        node: &Node,
        features: Features,
        frontends: u32,
    ) -> Result<(Self, KernelMaps)> {
        Self::load_in(&node.bpffs(), features, frontends)
    }

    /// Like [`Self::load`], but with another pin directory.
    pub(crate) fn load_in(
        pins: &Path,
        features: Features,
        frontends: u32,
    ) -> Result<(Self, KernelMaps)> {
        let pins = PinDirectory::lock(pins)?;
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

    /// Creates a reconciler that owns the maps, as the daemon does.
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
            node_addresses: NodeAddresses::Refuse,
            translates_packets: true,
            local_listeners: [0].into(),
            topology_keys: TopologyKeys::Ignore,
            namespace_share: 100,
        };
        let sizes = self.data_path.sizes();
        Ok(Reconciler::adopt(maps, sizes, grace, settings)?)
    }

    /// Returns how many times the kernel programs have counted the reason whose label is `word`.
    pub(crate) fn reason(&self, word: &str) -> Result<u64> {
        let counts = self.counters.read()?;
        let found = counts.iter().find(|(reason, _)| reason.label() == word);
        Ok(found
            .with_context(|| format!("no reason has the label {word}"))?
            .1)
    }
}
