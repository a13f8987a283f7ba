//! The health checks of Services, kept up with what is planned.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use crate::{
    model::ObjectName,
    plan::{HealthCheck, HealthChecks},
};

/// The health checks of the node, and whether somebody must hear of them. Those of all Services are
/// told as one: there are few, only load balancers of policy Local have one.
#[derive(Debug, Default)]
pub(super) struct Health {
    checks: HealthChecks,
    is_new: bool,
}

impl Health {
    /// Takes what is told of a Service now.
    pub(super) fn put(&mut self, service: &ObjectName, check: Option<HealthCheck>) {
        let services = &mut self.checks.services;
        if services.get(service) == check.as_ref() {
            return;
        }
        self.is_new = true;
        match check {
            Some(check) => services.insert(service.clone(), check),
            None => services.remove(service),
        };
    }

    /// Takes the addresses that it is told at now.
    pub(super) fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        self.is_new |= self.checks.addresses != addresses;
        self.checks.addresses = addresses;
    }

    /// What there is, if it is not what was given last.
    pub(super) fn take(&mut self) -> Option<Arc<HealthChecks>> {
        std::mem::take(&mut self.is_new).then(|| Arc::new(self.checks.clone()))
    }
}
