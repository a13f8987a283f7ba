use std::{net::SocketAddr, path::PathBuf};

use anyhow::Result;
use tunnel_common::table::{MapSize, MapSizes};

use crate::{environment, load_scale::LoadScale};

/// The settings in which instances differ.
#[derive(Clone, Debug)]
pub struct InstanceSettings {
    pub culvert: PathBuf,
    /// The sizes of the maps: `bpf.maps`.
    pub maps: MapSizes,
    /// The address of metrics and status, in the network namespace of the host: `admin.address`.
    pub admin: SocketAddr,
    /// The address of health checks, in the network namespace of the host: `healthz.address`.
    pub healthz: SocketAddr,
    /// True to enable the tunnel: steering, ingress and gateway.
    pub tunnel: bool,
    /// A line of YAML for the section `service`, such as `nodePortAddresses: []`.
    pub node_ports: String,
}

impl InstanceSettings {
    /// Returns the product's defaults for a program.
    #[must_use]
    pub fn for_program(culvert: PathBuf) -> Self {
        Self {
            culvert,
            maps: MapSizes::default(),
            admin: SocketAddr::from(([127, 0, 0, 1], 10249)),
            healthz: SocketAddr::from(([0, 0, 0, 0], 10256)),
            tunnel: false,
            node_ports: String::new(),
        }
    }

    /// Returns the product's defaults for the program under test, with smaller maps on slow machines.
    pub fn from_environment() -> Result<Self> {
        let scale = LoadScale::from_environment();
        let defaults = Self::for_program(environment::culvert()?);
        let maps = MapSize::ALL.into_iter().fold(defaults.maps, |maps, size| {
            maps.with(size, scale.count(maps.of(size)))
        });
        Ok(Self { maps, ..defaults })
    }

    /// Returns `bpf.maps` as a line of YAML.
    pub(super) fn maps_yaml(&self) -> String {
        let sizes = self
            .maps
            .by_key()
            .map(|(word, size)| format!("{word}: {size}"));
        format!("maps: {{ {} }}", sizes.collect::<Vec<_>>().join(", "))
    }
}
