//! Parses the optional fields of a Service: additional addresses, source ranges, traffic policies, session
//! affinity and the health check port. Invalid values are ignored, since the Service works without them.

use std::net::IpAddr;

use k8s_openapi::api::core::v1;

use crate::{
    k8s::{FieldError, FieldErrorKind, address, collect_valid, parse_port},
    model::TrafficPolicy,
};

/// The default timeout for client IP affinity, in seconds (`DefaultClientIPServiceAffinitySeconds` in
/// Kubernetes `pkg/apis/core/v1`).
const DEFAULT_AFFINITY: u32 = 10_800;
/// The maximum timeout for client IP affinity, in seconds.
const MAX_AFFINITY: u32 = 86_400;

/// The `ipMode` for addresses that nodes must not serve themselves.
const PROXY_MODE: &str = "Proxy";

/// Parses `spec.externalIPs`.
pub(super) fn external_ips(spec: &v1::ServiceSpec, ignored: &mut Vec<FieldError>) -> Vec<IpAddr> {
    let texts = spec.external_ips.iter().flatten().enumerate();
    let read =
        texts.map(|(i, text)| address::parse_routable(text, || format!("spec.externalIPs[{i}]")));
    collect_valid(read, ignored)
}

/// Parses the load balancer addresses that nodes serve themselves. These are all addresses except those whose
/// `ipMode` is `Proxy`, since traffic to those must go through the load balancer (KEP-1860). Host names are
/// skipped.
pub(super) fn load_balancer_ips(
    status: Option<&v1::ServiceStatus>,
    ignored: &mut Vec<FieldError>,
) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for (i, ingress) in ingresses(status).enumerate() {
        let field = |name: &str| format!("status.loadBalancer.ingress[{i}].{name}");
        let is_vip = match ingress.ip_mode.as_deref() {
            None | Some("VIP") => true,
            Some(PROXY_MODE) => false,
            Some(other) => {
                let reason = FieldErrorKind::wrong_form("VIP or Proxy", other);
                ignored.push(FieldError::new(field("ipMode"), reason));
                true
            }
        };
        let text = ingress.ip.as_deref().filter(|text| !text.is_empty());
        if let Some(text) = text.filter(|_| is_vip) {
            addresses.push(address::parse_routable(text, || field("ip")));
        }
    }
    collect_valid(addresses, ignored)
}

/// Parses the load balancer addresses whose `ipMode` is `Proxy`. Invalid addresses are not reported.
pub(super) fn proxied_ips(status: Option<&v1::ServiceStatus>) -> Vec<IpAddr> {
    let proxied =
        ingresses(status).filter(|ingress| ingress.ip_mode.as_deref() == Some(PROXY_MODE));
    proxied.filter_map(ip).collect()
}

/// Parses all load balancer addresses, regardless of their `ipMode`. Invalid addresses are not reported.
pub(super) fn ingress_ips(status: Option<&v1::ServiceStatus>) -> Vec<IpAddr> {
    ingresses(status).filter_map(ip).collect()
}

fn ip(ingress: &v1::LoadBalancerIngress) -> Option<IpAddr> {
    address::parse_ip(ingress.ip.as_deref()?)
}

fn ingresses(status: Option<&v1::ServiceStatus>) -> impl Iterator<Item = &v1::LoadBalancerIngress> {
    let balancer = status.and_then(|status| status.load_balancer.as_ref());
    let ingresses = balancer.into_iter().flat_map(|balancer| &balancer.ingress);
    ingresses.flatten()
}

/// Parses `spec.loadBalancerSourceRanges`. Spaces around each range are trimmed.
pub(super) fn source_ranges(
    spec: &v1::ServiceSpec,
    ignored: &mut Vec<FieldError>,
) -> Vec<(IpAddr, u8)> {
    let texts = spec.load_balancer_source_ranges.iter().flatten();
    let read = texts.enumerate().map(|(i, text)| {
        address::parse_cidr(text.trim()).ok_or_else(|| {
            let field = format!("spec.loadBalancerSourceRanges[{i}]");
            FieldError::new(field, FieldErrorKind::wrong_form(address::CIDR_FORM, text))
        })
    });
    collect_valid(read, ignored)
}

/// Parses a traffic policy, which defaults to `Cluster`.
pub(super) fn policy(
    field: &str,
    text: Option<&str>,
    ignored: &mut Vec<FieldError>,
) -> TrafficPolicy {
    match text {
        None | Some("" | "Cluster") => TrafficPolicy::Cluster,
        Some("Local") => TrafficPolicy::Local,
        Some(other) => {
            let reason = FieldErrorKind::wrong_form("Cluster or Local", other);
            ignored.push(FieldError::new(field, reason));
            TrafficPolicy::Cluster
        }
    }
}

/// Parses the timeout for client IP affinity, in seconds. Returns 0 if there is no affinity.
pub(super) fn affinity(spec: &v1::ServiceSpec, ignored: &mut Vec<FieldError>) -> u32 {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return 0,
        Some("ClientIP") => {}
        Some(other) => {
            let reason = FieldErrorKind::wrong_form("ClientIP or None", other);
            ignored.push(FieldError::new("spec.sessionAffinity", reason));
            return 0;
        }
    }
    let config = spec.session_affinity_config.as_ref();
    let timeout = config.and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
    let Some(seconds) = timeout else {
        return DEFAULT_AFFINITY;
    };
    let known = u32::try_from(seconds).ok();
    let is_allowed = |seconds: &u32| (1..=MAX_AFFINITY).contains(seconds);
    known.filter(is_allowed).unwrap_or_else(|| {
        let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        ignored.push(FieldError::new(
            field,
            FieldErrorKind::InvalidTimeout(seconds),
        ));
        DEFAULT_AFFINITY
    })
}

/// Parses `spec.healthCheckNodePort`.
pub(super) fn health_check_port(
    spec: &v1::ServiceSpec,
    ignored: &mut Vec<FieldError>,
) -> Option<u16> {
    let field = || "spec.healthCheckNodePort".to_owned();
    optional_port(spec.health_check_node_port, field, ignored)
}

/// Parses an optional port. The number 0 means that there is no port.
pub(super) fn optional_port(
    number: Option<i32>,
    field: impl FnOnce() -> String,
    ignored: &mut Vec<FieldError>,
) -> Option<u16> {
    let number = number.filter(|number| *number != 0)?;
    collect_valid([parse_port(number, field)], ignored).pop()
}

#[cfg(test)]
mod tests;
