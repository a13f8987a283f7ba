//! Who reaches a Service, and which of its endpoints: everything beside its cluster IPs. None of it
//! is a reason to leave a Service without translation, so what can't be used is left out.

use std::net::IpAddr;

use k8s_openapi::api::core::v1;

use crate::{
    k8s::{Invalid, Reason, address, good, port},
    model::TrafficPolicy,
};

/// How long a client keeps its endpoint where the Service doesn't say, in seconds
/// (`DefaultClientIPServiceAffinitySeconds` in Kubernetes' `pkg/apis/core/v1`), and at most.
const AFFINITY: u32 = 10_800;
const LONGEST_AFFINITY: u32 = 86_400;

/// The mode of an address of a load balancer whose traffic must leave the node.
const PROXY: &str = "Proxy";

/// `spec.externalIPs`.
pub(super) fn external_ips(spec: &v1::ServiceSpec, ignored: &mut Vec<Invalid>) -> Vec<IpAddr> {
    let texts = spec.external_ips.iter().flatten().enumerate();
    let read = texts.map(|(i, text)| address::unicast(text, || format!("spec.externalIPs[{i}]")));
    good(read, ignored)
}

/// The addresses of the load balancer that the node serves itself. Traffic to one of mode `Proxy`
/// must leave the node (KEP-1860); host names are not addresses.
pub(super) fn load_balancer_ips(
    status: Option<&v1::ServiceStatus>,
    ignored: &mut Vec<Invalid>,
) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for (i, ingress) in ingresses(status).enumerate() {
        let field = |name: &str| format!("status.loadBalancer.ingress[{i}].{name}");
        let is_vip = match ingress.ip_mode.as_deref() {
            None | Some("VIP") => true,
            Some(PROXY) => false,
            Some(other) => {
                let reason = Reason::not("VIP or Proxy", other);
                ignored.push(Invalid::new(field("ipMode"), reason));
                true
            }
        };
        let text = ingress.ip.as_deref().filter(|text| !text.is_empty());
        if let Some(text) = text.filter(|_| is_vip) {
            addresses.push(address::unicast(text, || field("ip")));
        }
    }
    good(addresses, ignored)
}

/// The addresses of the load balancer of mode `Proxy`; what is none is not told.
pub(super) fn proxied_ips(status: Option<&v1::ServiceStatus>) -> Vec<IpAddr> {
    let proxied = ingresses(status).filter(|ingress| ingress.ip_mode.as_deref() == Some(PROXY));
    proxied.filter_map(ip).collect()
}

/// All addresses of the load balancer, of whatever mode; what is none is not told.
pub(super) fn ingress_ips(status: Option<&v1::ServiceStatus>) -> Vec<IpAddr> {
    ingresses(status).filter_map(ip).collect()
}

fn ip(ingress: &v1::LoadBalancerIngress) -> Option<IpAddr> {
    address::ip(ingress.ip.as_deref()?)
}

fn ingresses(status: Option<&v1::ServiceStatus>) -> impl Iterator<Item = &v1::LoadBalancerIngress> {
    let balancer = status.and_then(|status| status.load_balancer.as_ref());
    let ingresses = balancer.into_iter().flat_map(|balancer| &balancer.ingress);
    ingresses.flatten()
}

/// `spec.loadBalancerSourceRanges`; blanks around a range don't count.
pub(super) fn source_ranges(
    spec: &v1::ServiceSpec,
    ignored: &mut Vec<Invalid>,
) -> Vec<(IpAddr, u8)> {
    let texts = spec.load_balancer_source_ranges.iter().flatten();
    let read = texts.enumerate().map(|(i, text)| {
        address::cidr(text.trim()).ok_or_else(|| {
            let field = format!("spec.loadBalancerSourceRanges[{i}]");
            Invalid::new(field, Reason::not(address::A_CIDR, text))
        })
    });
    good(read, ignored)
}

/// A traffic policy; `Cluster` where there is none.
pub(super) fn policy(field: &str, text: Option<&str>, ignored: &mut Vec<Invalid>) -> TrafficPolicy {
    match text {
        None | Some("" | "Cluster") => TrafficPolicy::Cluster,
        Some("Local") => TrafficPolicy::Local,
        Some(other) => {
            let reason = Reason::not("Cluster or Local", other);
            ignored.push(Invalid::new(field, reason));
            TrafficPolicy::Cluster
        }
    }
}

/// How long a client keeps its endpoint, in seconds; 0 where it doesn't.
pub(super) fn affinity(spec: &v1::ServiceSpec, ignored: &mut Vec<Invalid>) -> u32 {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return 0,
        Some("ClientIP") => {}
        Some(other) => {
            let reason = Reason::not("ClientIP or None", other);
            ignored.push(Invalid::new("spec.sessionAffinity", reason));
            return 0;
        }
    }
    let config = spec.session_affinity_config.as_ref();
    let timeout = config.and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
    let Some(seconds) = timeout else {
        return AFFINITY;
    };
    let known = u32::try_from(seconds).ok();
    let is_allowed = |seconds: &u32| (1..=LONGEST_AFFINITY).contains(seconds);
    known.filter(is_allowed).unwrap_or_else(|| {
        let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        ignored.push(Invalid::new(field, Reason::Timeout(seconds)));
        AFFINITY
    })
}

/// `spec.healthCheckNodePort`.
pub(super) fn health_check_port(spec: &v1::ServiceSpec, ignored: &mut Vec<Invalid>) -> Option<u16> {
    let field = || "spec.healthCheckNodePort".to_owned();
    optional_port(spec.health_check_node_port, field, ignored)
}

/// A port that need not be there.
pub(super) fn optional_port(
    number: Option<i32>,
    field: impl FnOnce() -> String,
    ignored: &mut Vec<Invalid>,
) -> Option<u16> {
    let number = number.filter(|number| *number != 0)?;
    good([port(number, field)], ignored).pop()
}

#[cfg(test)]
mod tests;
