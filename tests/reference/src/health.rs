//! Health check node ports (contract §7).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Service;

use super::{AddressKind, Cluster, LocalNode, Policy, address::Family, endpoints, objects};

/// The response from a Service's health check node port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HealthCheck {
    pub namespace: String,
    pub service: String,
    /// The number of local ready endpoints in each address family in which the Service has a cluster IP. The
    /// listeners in a family return that family's number, since kube-proxy has a separate proxier for each
    /// family (contract §1, "dual stack").
    pub local_ready: BTreeMap<Family, usize>,
}

/// Returns all of a node's health check node ports. The API server doesn't let two Services use the same
/// port; here, the first Service in the list would get it.
#[must_use]
pub fn health_check_node_ports(cluster: &Cluster, here: &LocalNode) -> BTreeMap<u16, HealthCheck> {
    let mut checks = BTreeMap::new();
    for service in objects::proxied_services(cluster) {
        let Some(port) = health_check_node_port(service) else {
            continue;
        };
        let mut local_ready = BTreeMap::new();
        for family in Family::BOTH {
            if objects::cluster_ip(service, family).is_some() {
                let count = count_local_ready(cluster, here, service, family);
                local_ready.insert(family, count);
            }
        }
        checks.entry(port).or_insert_with(|| HealthCheck {
            namespace: objects::namespace(&service.metadata).to_owned(),
            service: objects::name(&service.metadata).to_owned(),
            local_ready,
        });
    }
    checks
}

/// Returns a Service's `healthCheckNodePort` if it isn't 0, the Service's type is LoadBalancer and its
/// external traffic policy is `Local` (contract §7).
fn health_check_node_port(service: &Service) -> Option<u16> {
    let spec = service.spec.as_ref()?;
    let wanted = spec.type_.as_deref() == Some("LoadBalancer")
        && objects::policy(service, AddressKind::LoadBalancerIp) == Policy::Local;
    if !wanted {
        return None;
    }
    objects::port_number(spec.health_check_node_port?)
}

/// Counts the distinct addresses of local ready endpoints across all ports in the slices, including ports
/// that the Service lacks (contract §7, "N"; see getLocalReadyEndpointIPs in kube-proxy's
/// `pkg/proxy/endpointschangetracker.go`).
fn count_local_ready(
    cluster: &Cluster,
    here: &LocalNode,
    service: &Service,
    family: Family,
) -> usize {
    let namespace = objects::namespace(&service.metadata);
    let name = objects::name(&service.metadata);
    let mut addresses = BTreeSet::new();
    for slice in objects::slices(cluster, (namespace, name), family) {
        for port in slice.ports.iter().flatten() {
            let Some(protocol) = objects::protocol(port.protocol.as_deref()) else {
                continue;
            };
            let owner = objects::owner(service, port.name.as_deref(), protocol);
            let mut endpoints = endpoints::endpoints(cluster, here, &owner, family);
            endpoints.retain(|_, endpoint| endpoint.local && endpoint.ready);
            addresses.extend(endpoints.into_keys().map(|at| at.ip()));
        }
    }
    addresses.len()
}
