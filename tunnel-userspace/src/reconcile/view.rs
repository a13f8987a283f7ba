//! What is shown of the reconciler.

use serde::{Deserialize, Serialize};

use super::Reconciler;
use crate::model::Family;

/// A Service as it is programmed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its ports, each in each family.
    pub ports: Vec<PortView>,
}

/// A port of a Service in one family, as it is programmed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// The name of the port, or empty.
    pub port: String,
    /// `TCP` or `UDP`.
    pub protocol: String,
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// The word for how a backend is chosen.
    pub algorithm: String,
    /// The fronts that are programmed.
    pub fronts: Vec<String>,
    /// The backends that new connections go to.
    pub backends: Vec<String>,
    /// Backends that only finish what they have.
    pub leaving: Vec<String>,
    /// Why it is not programmed as planned, as a word.
    pub reason: Option<String>,
    /// Why it is not programmed as planned, as a sentence.
    pub problem: Option<String>,
}

impl<M> Reconciler<M> {
    /// Every Service that was read, and what is programmed of it.
    #[must_use]
    pub fn services(&self) -> Vec<ServiceView> {
        let mut views = Vec::with_capacity(self.plans.len());
        for (service, plans) in &self.plans {
            let problems = self.problems.get(service);
            let mut ports = Vec::with_capacity(plans.len());
            for (name, plan) in plans {
                let id = self.actual.id(name);
                let used = id.and_then(|id| self.actual.ports.get(&id));
                let fronts = used.into_iter().flat_map(|port| &port.fronts);
                let placed = self.placed(used);
                let (backends, leaving) = used
                    .into_iter()
                    .flat_map(|port| &port.backends)
                    .partition::<Vec<_>, _>(|(_, index)| placed.contains(index));
                let names = |targets: Vec<(&crate::plan::Target, &u32)>| {
                    targets
                        .into_iter()
                        .map(|(target, _)| target.to_string())
                        .collect()
                };
                let problem = problems.and_then(|problems| problems.get(name));
                ports.push(PortView {
                    port: name.port.to_string(),
                    protocol: name.protocol.to_string(),
                    family: match name.family {
                        Family::V4 => "IPv4".to_owned(),
                        Family::V6 => "IPv6".to_owned(),
                    },
                    algorithm: plan.algorithm.label().to_owned(),
                    fronts: fronts.map(ToString::to_string).collect(),
                    backends: names(backends),
                    leaving: names(leaving),
                    reason: problem.map(|problem| problem.reason.label().to_owned()),
                    problem: problem.map(ToString::to_string),
                });
            }
            views.push(ServiceView {
                namespace: service.namespace.to_string(),
                name: service.name.to_string(),
                ports,
            });
        }
        views
    }

    /// The backends that the sets of a port lead to.
    fn placed(&self, port: Option<&super::actual::PortUse>) -> std::collections::BTreeSet<u32> {
        let fronts = port.into_iter().flat_map(|port| &port.fronts);
        fronts
            .filter_map(|key| self.actual.fronts.get(key))
            .flat_map(|front| [front.record.cluster, front.record.local])
            .filter(|set| set.len > 0)
            .filter_map(|set| self.actual.sets.get(&set.base))
            .flat_map(|set| set.backends.iter().copied())
            .collect()
    }
}
