use std::{net::SocketAddr, path::PathBuf};

use anyhow::Result;
use tunnel_common::table::{MapSize, MapSizes};

use crate::{environment, load_scale::LoadScale};

/// The settings that can differ between instances.
#[derive(Clone, Debug)]
pub struct InstanceSettings {
    pub culvert: PathBuf,
    /// The map sizes (`bpf.maps`).
    pub maps: MapSizes,
    /// The address on which the daemon serves metrics and status, in the host's network namespace
    /// (`admin.address`).
    pub admin: SocketAddr,
    /// The address on which the daemon serves health checks, in the host's network namespace
    /// (`healthz.address`).
    pub healthz: SocketAddr,
    /// True if all parts of the tunnel are enabled: steering, ingress and gateway.
    pub tunnel: bool,
    /// The share of the maps that one namespace may use (`service.namespaceShare`).
    pub namespace_share: u8,
    /// A line of YAML for the config's `service` section, such as `nodePortAddresses: []`.
    pub node_ports: String,
    /// The interval between the daemon's test connections (`bpf.testConnectionInterval`), which the programs count, too. `None`
    /// leaves it at its default.
    pub test_connections: Option<&'static str>,
    /// The fields of the config's `tunnel.gateway` section in YAML, such as `missingNodeTimeout: 1s`.
    pub gateway: String,
}

impl InstanceSettings {
    /// Returns Culvert's default settings for a given `culvert` program.
    #[must_use]
    pub fn for_program(culvert: PathBuf) -> Self {
        Self {
            culvert,
            maps: MapSizes::default(),
            admin: SocketAddr::from(([127, 0, 0, 1], 10249)),
            healthz: SocketAddr::from(([0, 0, 0, 0], 10256)),
            tunnel: false,
            namespace_share: 50,
            node_ports: String::new(),
            test_connections: None,
            gateway: String::new(),
        }
    }

    /// Returns Culvert's default settings for the program under test, but without test connections while it runs, and on slow
    /// machines with smaller maps, all of which one namespace may use.
    pub fn from_environment() -> Result<Self> {
        let scale = LoadScale::from_environment();
        let defaults = Self::for_program(environment::culvert()?);
        let maps = MapSize::ALL.into_iter().fold(defaults.maps, |maps, size| {
            maps.with(size, scale.count(maps.of(size)))
        });
        let namespace_share = if maps == defaults.maps {
            defaults.namespace_share
        } else {
            100
        };
        Ok(Self {
            maps,
            namespace_share,
            test_connections: Some("1h"),
            ..defaults
        })
    }

    /// Formats the map sizes as a line of YAML for `bpf.maps`.
    pub(super) fn maps_yaml(&self) -> String {
        let sizes = self
            .maps
            .by_key()
            .map(|(word, size)| format!("{word}: {size}"));
        format!("maps: {{ {} }}", sizes.collect::<Vec<_>>().join(", "))
    }
}
