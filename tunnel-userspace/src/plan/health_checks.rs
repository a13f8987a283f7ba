//! The health checks of Services, which load balancers use to find nodes with ready endpoints (kube-proxy
//! `pkg/proxy/healthcheck/service_health.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{NodeInfo, endpoint_selection};
use crate::model::{Family, ObjectName, ServiceState};

/// A Service's health check.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HealthCheck {
    /// The port of the health check, in host byte order.
    pub port: u16,
    /// For each family of the Service's cluster IPs, how many distinct addresses the ready endpoints on this
    /// node have.
    pub ready_endpoints: BTreeMap<Family, usize>,
    /// The Service's UID, if known.
    pub uid: Option<Arc<str>>,
    /// The Service's creation time, in seconds since the epoch. A Service without one counts as the youngest.
    pub created: Option<i64>,
}

/// Returns the health check of a Service, if it has one.
///
/// Endpoints of all ports in the slices are counted, even of ports that the Service doesn't have (kube-proxy
/// `pkg/proxy/endpointschangetracker.go`, `getLocalReadyEndpointIPs`). A terminating endpoint isn't counted,
/// although it may still get traffic, so that load balancers stop using this node in time.
#[must_use]
pub fn plan_health_check(state: &ServiceState, node_info: &NodeInfo) -> Option<HealthCheck> {
    let service = &state.service;
    let port = service.health_check_port?;
    let families = service.cluster_ips.iter().map(|ip| Family::of(*ip));
    Some(HealthCheck {
        port,
        ready_endpoints: families
            .map(|family| {
                (
                    family,
                    local_ready_addresses(state, family, node_info).len(),
                )
            })
            .collect(),
        uid: service.uid.clone(),
        created: service.created,
    })
}

/// Returns the addresses of ready endpoints on this node.
fn local_ready_addresses(
    state: &ServiceState,
    family: Family,
    node_info: &NodeInfo,
) -> BTreeSet<IpAddr> {
    let of_family = state.slices.iter().filter(|slice| slice.family == family);
    let ports: BTreeSet<_> = of_family
        .flat_map(|slice| &slice.ports)
        .map(|port| (&*port.name, port.protocol))
        .collect();
    let found = |port| endpoint_selection::endpoints_of_port(&state.slices, family, port);
    ports
        .into_iter()
        .flat_map(found)
        .filter(|(_, endpoint)| endpoint.ready && node_info.hosts(endpoint))
        .map(|(target, _)| target.address.to_ip())
        .collect()
}

/// The health checks that this node serves.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HealthChecks {
    /// The addresses to listen on; an unspecified address stands for all addresses of its family.
    pub addresses: BTreeSet<IpAddr>,
    /// The health checks, by Service.
    pub services: BTreeMap<ObjectName, HealthCheck>,
}

/// The listeners for health checks.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct HealthCheckListeners {
    /// The Service that each listener serves.
    pub owners: BTreeMap<SocketAddr, ObjectName>,
    /// The Services whose health check port belongs to another Service, each with that Service.
    pub losers: BTreeMap<ObjectName, ObjectName>,
}

impl HealthChecks {
    /// Returns the listeners. If several Services have the same port in a family, the oldest one owns it; if
    /// they are equally old, the first by namespace and name does.
    #[must_use]
    pub fn listeners(&self) -> HealthCheckListeners {
        let mut services: Vec<_> = self.services.iter().collect();
        services.sort_by_key(|(name, check)| (check.created.unwrap_or(i64::MAX), *name));
        let mut owners: BTreeMap<(u16, Family), &ObjectName> = BTreeMap::new();
        let mut losers = BTreeMap::new();
        for (name, check) in services {
            for family in check.ready_endpoints.keys() {
                let owner = *owners.entry((check.port, *family)).or_insert(name);
                if owner != name {
                    losers.insert(name.clone(), owner.clone());
                }
            }
        }
        let at = |((port, family), owner): ((u16, Family), &ObjectName)| {
            let ips = self.addresses.iter();
            let ips = ips.filter(move |ip| Family::of(**ip) == family);
            let owner = owner.clone();
            ips.map(move |ip| (SocketAddr::new(*ip, port), owner.clone()))
        };
        HealthCheckListeners {
            owners: owners.into_iter().flat_map(at).collect(),
            losers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixture::ip;

    #[test]
    fn of_two_services_with_the_same_port_the_older_one_owns_it() {
        let check = |port, created, families: &[Family]| HealthCheck {
            port,
            ready_endpoints: families.iter().map(|family| (*family, 0)).collect(),
            uid: None,
            created,
        };
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| ObjectName::new("shop", name));
        let checks = HealthChecks {
            addresses: [ip("192.0.2.1"), ip("::")].into(),
            services: [
                (a.clone(), check(31000, None, &[Family::V4])),
                (b.clone(), check(31000, Some(2), &[Family::V4, Family::V6])),
                (c.clone(), check(31000, Some(2), &[Family::V6])),
                (d.clone(), check(31001, None, &[Family::V4, Family::V6])),
            ]
            .into(),
        };

        let HealthCheckListeners { owners, losers } = checks.listeners();

        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert_eq!(
            owners,
            BTreeMap::from([
                (at("192.0.2.1:31000"), b.clone()),
                (at("[::]:31000"), b.clone()),
                (at("192.0.2.1:31001"), d.clone()),
                (at("[::]:31001"), d),
            ])
        );
        assert_eq!(losers, BTreeMap::from([(a, b.clone()), (c, b)]));
    }
}
