use std::{collections::BTreeMap, sync::Arc};

use serde::{
    Deserialize, Serialize,
    de::{IntoDeserializer, value::Error},
};

/// How a backend is chosen. The names of IPVS's schedulers are accepted for what is the same here
/// (`ip_vs_sh.c` and its like in Linux's `net/netfilter/ipvs`): those with a `w` differ only by the
/// weights, which every choice here respects.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// A random choice for each connection, uniform or by weight, as kube-proxy makes it.
    #[default]
    #[serde(alias = "weighted", alias = "Random")]
    Random,
    /// In turn, counted per CPU.
    #[serde(alias = "rr", alias = "wrr", alias = "RoundRobin")]
    RoundRobin,
    /// By the client: the same backend for the same client, as long as the backends don't change.
    #[serde(alias = "sh")]
    SourceHash,
    /// By the address and port that are dialled.
    #[serde(alias = "dh")]
    DestinationHash,
    /// By the client, so that few clients change their backend when the backends change.
    #[serde(alias = "mh")]
    Maglev,
    /// Of two that are drawn at random, by weight, the one with fewer open connections for its weight.
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
    /// The algorithm of that name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::deserialize(IntoDeserializer::<Error>::into_deserializer(name)).ok()
    }
}

/// How much each endpoint of a Service gets, beside the others. An endpoint is known by its name,
/// else by its zone.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Weights {
    /// By the name of the endpoint's Pod.
    pub names: BTreeMap<Arc<str>, u32>,
    /// By the zone that the endpoint is in.
    pub zones: BTreeMap<Arc<str>, u32>,
    /// For every other.
    pub others: Option<u32>,
}

impl Weights {
    /// The largest weight.
    pub const MOST: u32 = 100;

    /// The weight of an endpoint with that name in that zone: 1 where nothing is said of it.
    #[must_use]
    pub fn of(&self, name: Option<&str>, zone: Option<&str>) -> u32 {
        let named = name.and_then(|name| self.names.get(name));
        let zoned = || self.zones.get(zone?);
        let weight = named.or_else(zoned).copied();
        weight.or(self.others).unwrap_or(1)
    }
}
