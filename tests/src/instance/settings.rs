use std::{net::SocketAddr, path::PathBuf};

use anyhow::Result;
use tunnel_common::table::{Size, Sizes};

use crate::{environment, scale::Scale};

/// The settings that differ between instances.
#[derive(Clone, Debug)]
pub struct Settings {
    pub culvert: PathBuf,
    /// The sizes of the maps: `bpf.maps`.
    pub maps: Sizes,
    /// The address of metrics and status in the host's namespace.
    pub admin: SocketAddr,
    /// The address of health checks in the host's namespace.
    pub healthz: SocketAddr,
    /// True if it has the cloud's end of a tunnel: steering, ingress and gateway.
    pub tunnel: bool,
    /// A line of the section `service`, such as `nodePortAddresses: []`.
    pub node_ports: String,
}

impl Settings {
    /// Returns the product's defaults for a program.
    #[must_use]
    pub fn of(culvert: PathBuf) -> Self {
        Self {
            culvert,
            maps: Sizes::default(),
            admin: SocketAddr::from(([127, 0, 0, 1], 10249)),
            healthz: SocketAddr::from(([0, 0, 0, 0], 10256)),
            tunnel: false,
            node_ports: String::new(),
        }
    }

    /// Returns the product's defaults for the program in the environment, with smaller maps on slow
    /// machines.
    pub fn from_environment() -> Result<Self> {
        let scale = Scale::from_environment();
        let whole = Self::of(environment::culvert()?);
        let maps = Size::ALL.into_iter().fold(whole.maps, |maps, size| {
            maps.with(size, scale.count(maps.of(size)))
        });
        Ok(Self { maps, ..whole })
    }

    /// Returns `bpf.maps` as a line of YAML.
    pub(super) fn sizes(&self) -> String {
        let sizes = self
            .maps
            .words()
            .map(|(word, size)| format!("{word}: {size}"));
        format!("maps: {{ {} }}", sizes.collect::<Vec<_>>().join(", "))
    }
}
