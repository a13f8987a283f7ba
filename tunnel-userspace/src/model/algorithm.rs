use std::{collections::BTreeMap, sync::Arc};

use schemars::JsonSchema;
use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer, value::Error},
};

/// The algorithm for choosing a backend. The names of equivalent IPVS schedulers are accepted, too
/// (`ip_vs_*.c` in Linux `net/netfilter/ipvs`). In IPVS, some schedulers have a separate weighted variant,
/// such as `wrr` for `rr`; in Culvert, every algorithm uses the weights.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// A random backend for each connection, as in kube-proxy. All backends are equally likely unless they
    /// have weights.
    #[default]
    #[serde(alias = "weighted", alias = "Random")]
    Random,
    /// Round-robin, with a counter per service port.
    #[serde(alias = "rr", alias = "wrr", alias = "RoundRobin")]
    RoundRobin,
    /// A hash of the client's address. A client keeps its backend until the set of backends changes.
    #[serde(alias = "sh")]
    SourceHash,
    /// A hash of the destination address and port.
    #[serde(alias = "dh")]
    DestinationHash,
    /// A consistent hash of the client's address. When the set of backends changes, few clients change their
    /// backend.
    #[serde(alias = "mh")]
    Maglev,
    /// Of two random backends, the one with fewer open connections relative to its weight.
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
    /// The valid names, as listed in error messages.
    pub const FORM: &str = "random, weighted, round-robin, source-hash, destination-hash, maglev, \
                            least-conn or an IPVS scheduler (rr, wrr, sh, dh, mh, lc, wlc, sed, nq)";

    /// Returns the algorithm with this name or alias.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::deserialize(IntoDeserializer::<Error>::into_deserializer(name)).ok()
    }
}

/// The relative weights of a Service's endpoints. A weight for a Pod takes precedence over one for its zone.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Weights {
    /// The weights of individual Pods, by name.
    pub names: BTreeMap<Arc<str>, u32>,
    /// The weights of zones, by name.
    pub zones: BTreeMap<Arc<str>, u32>,
    /// The weight of all other endpoints, if it is set.
    pub others: Option<u32>,
}

impl Weights {
    /// The maximum weight.
    pub const MAX: u32 = 100;

    /// Returns the weight of an endpoint, given its Pod's name and its zone. The default is 1.
    #[must_use]
    pub fn of(&self, name: Option<&str>, zone: Option<&str>) -> u32 {
        let named = name.and_then(|name| self.names.get(name));
        let zoned = || self.zones.get(zone?);
        let weight = named.or_else(zoned).copied();
        weight.or(self.others).unwrap_or(1)
    }
}
