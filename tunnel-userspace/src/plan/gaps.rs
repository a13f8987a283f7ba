use super::{FrontKind, PortPlan, ServicePlan};
use crate::model::{ByFamily, TrafficPolicy};

/// How many service ports have endpoints, but none on this node, where their policy is Local
/// (kube-proxy's `sync_proxy_rules_no_local_endpoints_total`).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Gaps {
    /// By the policy for cluster IPs.
    pub internal: usize,
    /// By the policy for everything else.
    pub external: usize,
}

/// The gaps of a Service, by family.
#[must_use]
pub fn gaps(plan: &ServicePlan) -> ByFamily<Gaps> {
    let mut gaps = ByFamily::<Gaps>::default();
    for (name, port) in plan {
        let gaps = gaps.of_mut(name.family);
        gaps.internal += usize::from(lacks_local(port, true));
        gaps.external += usize::from(lacks_local(port, false));
    }
    gaps
}

fn lacks_local(port: &PortPlan, is_internal: bool) -> bool {
    let mut fronts = port.fronts.values();
    let is_local = fronts.any(|front| {
        (front.kind == FrontKind::ClusterIp) == is_internal && front.packets == TrafficPolicy::Local
    });
    is_local && port.has_endpoints && port.local.is_empty()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tunnel_common::{
        addr::{Address, Port, Protocol},
        service::FrontKey,
    };

    use super::*;
    use crate::{
        model::{Family, ObjectName},
        plan::{FrontPlan, PortName, Target},
    };

    /// The plan of a port with two addresses, each with a policy for packets.
    fn plan(
        family: Family,
        [internal, external]: [TrafficPolicy; 2],
        has_endpoints: bool,
        local: usize,
    ) -> ServicePlan {
        let ips = match family {
            Family::V4 => ["10.96.0.1", "192.0.2.1"],
            Family::V6 => ["fd96::1", "2001:db8::1"],
        };
        let address = |ip: &str| Address::from_ip(ip.parse::<IpAddr>().expect("an address"));
        let kinds = [FrontKind::ClusterIp, FrontKind::LoadBalancerIp];
        let fronts = ips.into_iter().zip(kinds).zip([internal, external]);
        let front = |((ip, kind), packets)| {
            let key = FrontKey::new(address(ip), Port::from_host(80), Protocol::TCP);
            let plan = FrontPlan {
                kind,
                sockets: TrafficPolicy::Cluster,
                packets,
                admits_host: Some(true),
                has_listener: false,
            };
            (key, plan)
        };
        let target = |number: usize| Target {
            address: address(ips[0]),
            port: Port::from_host(u16::try_from(number).expect("a port")),
        };
        let name = PortName {
            service: ObjectName::new("shop", "web"),
            port: "http".into(),
            protocol: Protocol::TCP,
            family,
        };
        let port = PortPlan {
            fronts: fronts.map(front).collect(),
            local: (1..=local).map(target).collect(),
            has_endpoints,
            ..PortPlan::nothing()
        };
        ServicePlan::from_iter([(name, std::sync::Arc::new(port))])
    }

    #[test]
    fn a_port_of_policy_local_with_endpoints_elsewhere_only_is_a_gap() {
        use TrafficPolicy::{Cluster, Local};

        for family in [Family::V4, Family::V6] {
            for (policies, has_endpoints, local, wanted) in [
                ([Local, Local], true, 0, [1, 1]),
                ([Local, Cluster], true, 0, [1, 0]),
                ([Cluster, Local], true, 0, [0, 1]),
                ([Cluster, Cluster], true, 0, [0, 0]),
                ([Local, Local], true, 1, [0, 0]),
                // Where there is none at all, nobody is sent away for being here.
                ([Local, Local], false, 0, [0, 0]),
            ] {
                let found = gaps(&plan(family, policies, has_endpoints, local));

                let Gaps { internal, external } = *found.of(family);
                assert_eq!([internal, external], wanted, "{policies:?}");
                let other = if family == Family::V4 {
                    found.v6
                } else {
                    found.v4
                };
                assert_eq!(other, Gaps::default());
            }
        }
    }
}
