//! What the maps should hold for a Service. Pure: no I/O, no clock, no chance.
//!
//! - `claims`: who owns an address that several Services claim
//! - `endpoints`: which endpoints count
//! - `steering`: which addresses and ports go to the tunnel

mod claims;
mod endpoints;
mod steering;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
};

pub use claims::{Claims, Rank};
pub use steering::{SteeringPlan, SteeringProblem, SteeringRules, steering};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::{Algorithm, FrontKey},
};

use crate::model::{self, Family, ObjectName, ServicePort, ServiceState};

/// A port of a Service in one family: what owns fronts and backends. The port is known by its
/// name and protocol, as kube-proxy knows it (kube-proxy `pkg/proxy/serviceport.go`).
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortName {
    /// The Service.
    pub service: ObjectName,
    /// The name of the port; empty for an unnamed one.
    pub port: Arc<str>,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The family of its fronts and backends.
    pub family: Family,
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = match self.family {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        };
        self.service.fmt(f)?;
        if !self.port.is_empty() {
            write!(f, ":{}", self.port)?;
        }
        write!(f, "/{} {family}", self.protocol)
    }
}

/// Where a backend is.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Target {
    /// Its address.
    pub address: Address,
    /// Its port.
    pub port: Port,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address.to_ip() {
            IpAddr::V4(ip) => write!(f, "{ip}:{}", self.port),
            IpAddr::V6(ip) => write!(f, "[{ip}]:{}", self.port),
        }
    }
}

/// What the maps should hold for one port of a Service in one family.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortPlan {
    /// The addresses that are translated.
    pub fronts: BTreeSet<FrontKey>,
    /// The backends for the policies Cluster, in the order of their slots.
    pub cluster: Vec<Target>,
    /// The backends for the policies Local, in the order of their slots.
    pub local: Vec<Target>,
    /// Every backend that still serves, chosen for new connections or not.
    pub serving: BTreeSet<Target>,
    /// How a slot is chosen.
    pub algorithm: Algorithm,
    /// Client-IP affinity in seconds, or 0.
    pub affinity: u32,
}

impl PortPlan {
    /// The plan of a port that is no longer there.
    #[must_use]
    pub const fn nothing() -> Self {
        Self {
            fronts: BTreeSet::new(),
            cluster: Vec::new(),
            local: Vec::new(),
            serving: BTreeSet::new(),
            algorithm: Algorithm::RANDOM,
            affinity: 0,
        }
    }

    /// The same plan with no other backends than those. It needs no more room than the plan that
    /// is programmed, so it can be followed when the maps are full.
    #[must_use]
    pub fn restricted_to(&self, known: impl Fn(&Target) -> bool) -> Self {
        let only = |targets: &[Target]| targets.iter().copied().filter(&known).collect();
        Self {
            fronts: self.fronts.clone(),
            cluster: only(&self.cluster),
            local: only(&self.local),
            serving: self.serving.iter().copied().filter(&known).collect(),
            algorithm: self.algorithm,
            affinity: self.affinity,
        }
    }
}

/// The plans of one Service, by port and family.
pub type ServicePlan = BTreeMap<PortName, PortPlan>;

/// Plans a Service: each port in each family that it has a cluster IP of. The algorithm is for a
/// Service that names none.
#[must_use]
pub fn service(state: &ServiceState, algorithm: model::Algorithm) -> ServicePlan {
    let service = &state.service;
    let algorithm = match service.algorithm.unwrap_or(algorithm) {
        model::Algorithm::Random => Algorithm::RANDOM,
        model::Algorithm::RoundRobin => Algorithm::ROUND_ROBIN,
    };
    let mut plans = ServicePlan::new();
    for ip in &service.cluster_ips {
        for port in &service.ports {
            let name = PortName {
                service: service.name.clone(),
                port: Arc::clone(&port.name),
                protocol: port.protocol,
                family: Family::of(*ip),
            };
            if is_planned(port.protocol) {
                plans.insert(name, self::port(state, *ip, port, algorithm));
            }
        }
    }
    plans
}

/// Whether sockets of the protocol can be translated; SCTP has no connect hook.
fn is_planned(protocol: Protocol) -> bool {
    protocol == Protocol::TCP || protocol == Protocol::UDP
}

fn port(state: &ServiceState, ip: IpAddr, port: &ServicePort, algorithm: Algorithm) -> PortPlan {
    let chosen = endpoints::of_port(&state.slices, Family::of(ip), port);
    PortPlan {
        fronts: BTreeSet::from([FrontKey::new(
            Address::from_ip(ip),
            Port::from_host(port.port),
            port.protocol,
        )]),
        cluster: chosen.ready.into_iter().collect(),
        local: Vec::new(),
        serving: chosen.serving,
        algorithm,
        affinity: 0,
    }
}

/// The claims of a Service on fronts: each front of its plan, with the rank that decides between
/// it and others.
pub fn claims(
    state: &ServiceState,
    plan: &ServicePlan,
) -> impl Iterator<Item = (FrontKey, Rank, PortName)> {
    let created = state.service.created;
    plan.iter().flat_map(move |(name, port)| {
        port.fronts
            .iter()
            .map(move |key| (*key, Rank::cluster_ip(created), name.clone()))
    })
}

#[cfg(test)]
mod tests;
