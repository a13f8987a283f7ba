//! The health checks of Services, limited to the endpoints that are in the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tunnel_common::service::Membership;

use crate::{
    model::ObjectName,
    plan::{FrontendKind, HealthCheck, HealthChecks, PortPlan},
    reconcile::{desired_plans::DesiredPlans, map_sync::MapSync},
};

/// Returns the planned health checks. If a port of a Service has no room in the maps, or a write failed, only the endpoints
/// that every port of the Service has in the maps are counted, so that no load balancer sends connections to a
/// port that refuses them.
pub(in crate::reconcile) fn programmed_health<M>(
    desired: &DesiredPlans,
    sync: &MapSync<M>,
) -> Arc<HealthChecks> {
    let services = desired.health.services.iter();
    let changed = services.filter_map(|(service, planned)| {
        let has_problem = sync.problems.is_incomplete(service);
        let is_incomplete = has_problem || sync.waiting_for_entries.contains(service);
        let programmed =
            is_incomplete.then(|| programmed_check(desired, sync, service, planned))?;
        (programmed != *planned).then(|| (service.clone(), programmed))
    });
    let changed: BTreeMap<_, _> = changed.collect();
    if changed.is_empty() {
        return Arc::clone(&desired.health);
    }
    let mut health = HealthChecks::clone(&desired.health);
    health.services.extend(changed);
    Arc::new(health)
}

fn programmed_check<M>(
    desired: &DesiredPlans,
    sync: &MapSync<M>,
    service: &ObjectName,
    planned: &HealthCheck,
) -> HealthCheck {
    let mut check = planned.clone();
    let (ports, _) = desired.plan_to_write(service);
    for (name, plan) in &ports {
        let is_local = plan.used_sets().includes(Membership::LOCAL);
        if !is_local || !plan.endpoints.has_any_in(Membership::LOCAL) {
            continue;
        }
        let id = sync.tracked.actual.id(name);
        let programmed = id.map_or(0, |id| programmed_addresses(sync, id, plan));
        if let Some(ready) = check.ready_endpoints.get_mut(&name.family) {
            *ready = programmed.min(*ready);
        }
    }
    check
}

/// Returns how many addresses the endpoints on this node have to which a port sends external traffic. If an
/// external address of the port is not in the maps, there are none.
fn programmed_addresses<M>(sync: &MapSync<M>, id: u32, plan: &PortPlan) -> usize {
    let actual = &sync.tracked.actual;
    let Some(port) = actual.ports.get(&id) else {
        return 0;
    };
    let mut frontends = plan.frontends.iter();
    let is_programmed = frontends.all(|(key, frontend)| {
        frontend.kind == FrontendKind::ClusterIp || port.frontends.contains_key(key)
    });
    if !is_programmed {
        return 0;
    }
    let endpoints = plan.endpoints.iter();
    let local = endpoints.filter(|endpoint| endpoint.sets.includes(Membership::LOCAL));
    let programmed = local.filter(|endpoint| {
        let index = port.backends.get(&endpoint.target);
        index.is_some_and(|index| {
            let status = actual.backend_status(*index);
            status.membership.includes(Membership::LOCAL)
        })
    });
    let addresses: BTreeSet<_> = programmed.map(|it| it.target.address).collect();
    addresses.len()
}
