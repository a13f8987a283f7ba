use litemap::LiteMap;
use tunnel_common::service::FrontKey;

use crate::{
    model::TrafficPolicy,
    plan::{FrontKind, FrontPlan, PortPlan, Target},
};

/// A frontend of the daemon's own, which no Service has. The daemon connects to it to check that the programs
/// translate connects.
#[derive(Clone, Copy, Debug)]
pub struct Canary {
    /// The address, port and protocol that the daemon dials.
    pub front: FrontKey,
    /// Its only backend.
    pub target: Target,
}

impl Canary {
    pub(super) fn plan(&self) -> PortPlan {
        let front = FrontPlan {
            kind: FrontKind::ClusterIp,
            sockets: TrafficPolicy::Cluster,
            packets: TrafficPolicy::Cluster,
            admits_host: None,
            has_listener: false,
        };
        PortPlan {
            fronts: LiteMap::from_iter([(self.front, front)]),
            cluster: vec![self.target],
            serving: vec![self.target],
            has_endpoints: true,
            ..PortPlan::default()
        }
    }
}
