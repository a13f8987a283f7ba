use litemap::LiteMap;
use tunnel_common::service::{FrontendKey, Membership};

use crate::{
    model::TrafficPolicy,
    plan::{
        BackendTarget, FrontendKind, FrontendPlan, PlannedEndpoint, PlannedEndpoints, PortPlan,
    },
};

/// A frontend that belongs to the daemon rather than to a Service. The daemon connects to it to check that
/// the BPF programs translate connections.
#[derive(Clone, Copy, Debug)]
pub struct ProbeFrontend {
    /// The address, port and protocol that the daemon dials.
    pub frontend: FrontendKey,
    /// The frontend's only backend.
    pub target: BackendTarget,
}

impl ProbeFrontend {
    pub(super) fn plan(&self) -> PortPlan {
        let frontend = FrontendPlan {
            kind: FrontendKind::ClusterIp,
            socket_policy: TrafficPolicy::Cluster,
            packet_policy: TrafficPolicy::Cluster,
            admits_host: None,
            has_listener: false,
        };
        PortPlan {
            frontends: LiteMap::from_iter([(self.frontend, frontend)]),
            endpoints: PlannedEndpoints::from_iter([PlannedEndpoint {
                target: self.target,
                weight: 1,
                sets: Membership::CLUSTER,
            }]),
            has_endpoints: true,
            ..PortPlan::default()
        }
    }
}
