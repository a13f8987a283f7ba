use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tunnel_common::addr::{Address, Port};

use super::Target;
use crate::model::{EndpointSlice, Family, ServicePort};

/// The endpoints of a port that count.
pub(super) struct Endpoints {
    /// Those that take new connections.
    pub(super) ready: BTreeSet<Target>,
    /// Those that answer: the ready ones, and those that are only finishing what they have.
    pub(super) serving: BTreeSet<Target>,
}

/// The endpoints of a Service's port over all its slices of a family. A slice serves the port if
/// one of its own ports has the same name and protocol; its number may differ from slice to slice
/// (kube-proxy `pkg/proxy/endpointslicecache.go`). Where slices say different things of one
/// address, the one that is not terminating holds.
pub(super) fn of_port(
    slices: &[Arc<EndpointSlice>],
    family: Family,
    port: &ServicePort,
) -> Endpoints {
    let mut found: BTreeMap<Target, (bool, bool, bool)> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.family == family) {
        let numbers = slice
            .ports
            .iter()
            .filter(|own| own.name == port.name && own.protocol == port.protocol)
            .map(|own| Port::from_host(own.port));
        for number in numbers {
            for endpoint in &slice.endpoints {
                let target = Target {
                    address: Address::from_ip(endpoint.address),
                    port: number,
                };
                // Ordered so that the greater of two conditions is the one that holds.
                let condition = (!endpoint.terminating, endpoint.ready, endpoint.serving);
                let known = found.entry(target).or_insert(condition);
                *known = condition.max(*known);
            }
        }
    }
    let pick = |wanted: fn(&(bool, bool, bool)) -> bool| {
        found
            .iter()
            .filter(|(_, held)| wanted(held))
            .map(|(target, _)| *target)
            .collect()
    };
    Endpoints {
        ready: pick(|(_, ready, _)| *ready),
        serving: pick(|(_, ready, serving)| *ready || *serving),
    }
}
