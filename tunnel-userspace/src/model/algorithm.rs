use std::{collections::BTreeMap, sync::Arc};

use schemars::JsonSchema;
use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer, value::Error},
};

/// The algorithm that chooses a backend. The names of the equivalent IPVS schedulers are accepted as
/// well (`ip_vs_*.c` in Linux `net/netfilter/ipvs`). IPVS has a weighted variant of some, such as `wrr`
/// of `rr`; here, every algorithm uses the weights.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// A random choice for each connection, uniform or by weight, as in kube-proxy.
    #[default]
    #[serde(alias = "weighted", alias = "Random")]
    Random,
    /// Round-robin, with a counter per service port.
    #[serde(alias = "rr", alias = "wrr", alias = "RoundRobin")]
    RoundRobin,
    /// A hash of the client's address: a client keeps its backend until the backends change.
    #[serde(alias = "sh")]
    SourceHash,
    /// A hash of the destination address and port.
    #[serde(alias = "dh")]
    DestinationHash,
    /// A consistent hash of the client's address: when the backends change, few clients change theirs.
    #[serde(alias = "mh")]
    Maglev,
    /// The one of two random backends that has fewer open connections relative to its weight.
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
    /// Returns the algorithm with this name or alias.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::deserialize(IntoDeserializer::<Error>::into_deserializer(name)).ok()
    }
}

/// The relative weights of a Service's endpoints. The weight for a Pod takes precedence over the weight
/// for its zone.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Weights {
    /// Weights by Pod name.
    pub names: BTreeMap<Arc<str>, u32>,
    /// Weights by zone.
    pub zones: BTreeMap<Arc<str>, u32>,
    /// The weight of all other endpoints.
    pub others: Option<u32>,
}

impl Weights {
    /// The largest weight.
    pub const MAX: u32 = 100;

    /// Returns the weight of an endpoint by the name of its Pod and its zone; 1 by default.
    #[must_use]
    pub fn of(&self, name: Option<&str>, zone: Option<&str>) -> u32 {
        let named = name.and_then(|name| self.names.get(name));
        let zoned = || self.zones.get(zone?);
        let weight = named.or_else(zoned).copied();
        weight.or(self.others).unwrap_or(1)
    }
}
