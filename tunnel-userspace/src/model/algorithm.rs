use std::{collections::BTreeMap, sync::Arc};

use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer, value::Error},
};

/// The algorithm that chooses a backend. Names of IPVS's equivalent schedulers are accepted
/// (`ip_vs_sh.c` and its like in Linux's `net/netfilter/ipvs`): those with a `w` differ only by the
/// weights, which every algorithm here respects.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// A random choice for each connection, uniform or by weight, as in kube-proxy.
    #[default]
    #[serde(alias = "weighted", alias = "Random")]
    Random,
    /// Round-robin, with a counter per service port.
    #[serde(alias = "rr", alias = "wrr", alias = "RoundRobin")]
    RoundRobin,
    /// A hash of the client: the same backend for the same client, until the backends change.
    #[serde(alias = "sh")]
    SourceHash,
    /// A hash of the address and port that are dialled.
    #[serde(alias = "dh")]
    DestinationHash,
    /// A hash of the client by which few clients change their backend when the backends change.
    #[serde(alias = "mh")]
    Maglev,
    /// The better of two random backends: the one with fewer open connections for its weight.
    #[serde(
        alias = "lc",
        alias = "wlc",
        alias = "sed",
        alias = "nq",
        alias = "LeastConn"
    )]
    LeastConn,
}

impl Algorithm {
    /// Returns the algorithm with this name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::deserialize(IntoDeserializer::<Error>::into_deserializer(name)).ok()
    }
}

/// The relative weights of a Service's endpoints, by the name of an endpoint, else by its zone.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Weights {
    /// The weights by the name of the endpoint's Pod.
    pub names: BTreeMap<Arc<str>, u32>,
    /// The weights by the zone of the endpoint.
    pub zones: BTreeMap<Arc<str>, u32>,
    /// The weight of all other endpoints.
    pub others: Option<u32>,
}

impl Weights {
    /// The largest weight.
    pub const MOST: u32 = 100;

    /// Returns the weight of an endpoint with this name in this zone; 1 by default.
    #[must_use]
    pub fn of(&self, name: Option<&str>, zone: Option<&str>) -> u32 {
        let named = name.and_then(|name| self.names.get(name));
        let zoned = || self.zones.get(zone?);
        let weight = named.or_else(zoned).copied();
        weight.or(self.others).unwrap_or(1)
    }
}
