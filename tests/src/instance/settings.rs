use std::{net::SocketAddr, path::PathBuf};

use anyhow::Result;

use crate::{environment, scale::Scale};

/// What differs between instances.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The program.
    pub culvert: PathBuf,
    /// How many fronts fit into the maps.
    pub fronts: u32,
    /// How many slots fit into the maps.
    pub slots: u32,
    /// How many backends fit into the maps.
    pub backends: u32,
    /// How many ports of edge nodes fit into the maps.
    pub steering: u32,
    /// `bpf.maps.affinity`.
    pub affinity: u32,
    /// Where metrics and status are served in the host's namespace.
    pub admin: SocketAddr,
    /// Where health is served in the host's namespace.
    pub healthz: SocketAddr,
    /// Whether it has the cloud's end of a tunnel: steering, ingress and gateway.
    pub tunnel: bool,
    /// A line of `service`, as `nodePortAddresses: []`.
    pub node_ports: String,
}

impl Settings {
    /// The defaults of the product, for a program.
    #[must_use]
    pub fn of(culvert: PathBuf) -> Self {
        Self {
            culvert,
            fronts: 32_768,
            slots: 131_072,
            backends: 65_536,
            steering: 16_384,
            affinity: 16_384,
            admin: SocketAddr::from(([127, 0, 0, 1], 10249)),
            healthz: SocketAddr::from(([0, 0, 0, 0], 10256)),
            tunnel: false,
            node_ports: String::new(),
        }
    }

    /// For the program that the environment names: the defaults of the product, with smaller maps
    /// where the machine is slow.
    ///
    /// # Errors
    ///
    /// When there is no such program.
    pub fn from_environment() -> Result<Self> {
        let scale = Scale::from_environment();
        let whole = Self::of(environment::culvert()?);
        Ok(Self {
            fronts: scale.count(whole.fronts),
            slots: scale.count(whole.slots),
            backends: scale.count(whole.backends),
            steering: scale.count(whole.steering),
            affinity: scale.count(whole.affinity),
            ..whole
        })
    }

    /// `bpf.maps`, as a line of YAML.
    pub(super) fn sizes(&self) -> String {
        let Self {
            fronts,
            slots,
            backends,
            steering,
            affinity,
            ..
        } = self;
        format!(
            "maps: {{ fronts: {fronts}, slots: {slots}, backends: {backends}, steering: {steering}, \
             affinity: {affinity} }}"
        )
    }
}
