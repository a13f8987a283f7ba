mod annotations;
mod optional_fields;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use k8s_openapi::api::core::v1;

use super::{ApiObject, FieldError, FieldErrorKind, address, parse_port, parse_protocol};
use crate::model::{Family, Kind, Object, ObjectName, Service, ServicePort, TrafficPolicy};

/// The label, with any value, that assigns a Service to another proxy.
const PROXY_NAME_LABEL: &str = "service.kubernetes.io/service-proxy-name";

impl ApiObject for v1::Service {
    const MODEL_KIND: Kind = Kind::Service;

    /// Converts a Service. If it has no cluster IP or is assigned to another proxy, only its addresses are kept. Returns
    /// `None` if there are none.
    fn into_model(
        self,
        name: ObjectName,
        ignored: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError> {
        let Self {
            metadata,
            spec,
            status,
        } = self;
        let spec = spec.unwrap_or_default();
        let labels = metadata.labels.as_ref();
        let is_of_other_proxy = labels.is_some_and(|labels| labels.contains_key(PROXY_NAME_LABEL));
        if spec.type_.as_deref() == Some("ExternalName") {
            return Ok(unserved(name, status.as_ref()));
        }
        if is_of_other_proxy {
            return Ok(of_other_proxy(name, &spec, status.as_ref()));
        }
        let Some(cluster_ips) = cluster_ips(&spec, ignored)? else {
            return Ok(unserved(name, status.as_ref()));
        };
        let is_of_load_balancer = spec.type_.as_deref() == Some("LoadBalancer");
        let external = spec.external_traffic_policy.as_deref();
        let external_policy =
            optional_fields::policy("spec.externalTrafficPolicy", external, ignored);
        let internal = spec.internal_traffic_policy.as_deref();
        Ok(Some(Object::Service(Arc::new(Service {
            name,
            uid: metadata.uid.as_deref().map(Arc::from),
            created: metadata
                .creation_timestamp
                .as_ref()
                .map(|time| time.0.as_second()),
            cluster_ips,
            is_of_other_proxy: false,
            external_ips: optional_fields::external_ips(&spec, ignored),
            load_balancer_ips: optional_fields::load_balancer_ips(status.as_ref(), ignored),
            unserved_ips: optional_fields::proxied_ips(status.as_ref()),
            source_ranges: optional_fields::source_ranges(&spec, ignored),
            ports: ports(spec.ports.as_deref().unwrap_or_default(), ignored)?,
            internal_policy: optional_fields::policy(
                "spec.internalTrafficPolicy",
                internal,
                ignored,
            ),
            external_policy,
            affinity: optional_fields::affinity(&spec, ignored),
            health_check_port: (is_of_load_balancer && external_policy == TrafficPolicy::Local)
                .then(|| optional_fields::health_check_port(&spec, ignored))
                .flatten(),
            algorithm: annotations::algorithm(&metadata, ignored),
            weights: annotations::weights(&metadata, ignored),
            socket_translation_disabled: annotations::is_socket_translation_disabled(
                &metadata, ignored,
            ),
            endpoint_scope: annotations::endpoint_scope(&metadata, ignored),
        }))))
    }
}

/// Converts a Service that is not served. Keeps only its load balancer addresses.
fn unserved(name: ObjectName, status: Option<&v1::ServiceStatus>) -> Option<Object> {
    let unserved_ips = optional_fields::ingress_ips(status);
    (!unserved_ips.is_empty()).then(|| {
        Object::Service(Arc::new(Service {
            unserved_ips,
            ..Service::named(name)
        }))
    })
}

/// Converts a Service that another proxy serves. Keeps its cluster IPs, whose packets are left alone, and its load balancer
/// addresses.
fn of_other_proxy(
    name: ObjectName,
    spec: &v1::ServiceSpec,
    status: Option<&v1::ServiceStatus>,
) -> Option<Object> {
    // A wrong address is no concern of ours.
    let cluster_ips = cluster_ips(spec, &mut Vec::new()).ok().flatten();
    let Some(cluster_ips) = cluster_ips else {
        return unserved(name, status);
    };
    Some(Object::Service(Arc::new(Service {
        cluster_ips,
        is_of_other_proxy: true,
        unserved_ips: optional_fields::ingress_ips(status),
        ..Service::named(name)
    })))
}

/// Parses the cluster IPs. Returns `None` if the Service has none. Ignores an address that Culvert never serves,
/// such as a loopback address, if another cluster IP is left.
fn cluster_ips(
    spec: &v1::ServiceSpec,
    ignored: &mut Vec<FieldError>,
) -> Result<Option<Vec<IpAddr>>, FieldError> {
    let is_set = |text: &&str| !text.is_empty();
    let single = spec.cluster_ip.as_deref().filter(is_set);
    let several = spec.cluster_ips.as_deref().unwrap_or_default();
    let first = single.or_else(|| several.first().map(String::as_str).filter(is_set));
    if matches!(first, None | Some("None")) {
        return Ok(None);
    }

    let single = single.map(|text| address::parse_routable(text, || "spec.clusterIP".to_owned()));
    if several.is_empty() {
        return single.map(|address| address.map(|it| vec![it])).transpose();
    }
    let mut addresses: Vec<IpAddr> = Vec::with_capacity(several.len());
    let mut forbidden = Vec::new();
    for (i, text) in several.iter().enumerate() {
        let field = || format!("spec.clusterIPs[{i}]");
        let address = match address::parse_routable(text, field) {
            Err(error) if error.is_forbidden_address() => {
                forbidden.push(error);
                continue;
            }
            parsed => parsed?,
        };
        if addresses
            .iter()
            .any(|other| Family::of(*other) == Family::of(address))
        {
            return Err(FieldError::new(
                field(),
                FieldErrorKind::SecondOfFamily(text.to_owned()),
            ));
        }
        addresses.push(address);
    }
    match single {
        Some(Ok(missing)) if !addresses.contains(&missing) => {
            let kind = FieldErrorKind::NotAmongClusterIps(missing.to_string());
            return Err(FieldError::new("spec.clusterIP", kind));
        }
        // The error for the same address in the list is reported instead.
        Some(Err(error)) if !error.is_forbidden_address() || forbidden.is_empty() => {
            return Err(error);
        }
        Some(Ok(_) | Err(_)) | None => {}
    }
    if addresses.is_empty()
        && let Some(error) = forbidden.pop()
    {
        return Err(error);
    }
    ignored.append(&mut forbidden);
    Ok(Some(addresses))
}

fn ports(
    ports: &[v1::ServicePort],
    ignored: &mut Vec<FieldError>,
) -> Result<Vec<ServicePort>, FieldError> {
    if ports.is_empty() {
        return Err(FieldError::new("spec.ports", FieldErrorKind::Missing));
    }
    let mut names = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    let mut parsed = Vec::with_capacity(ports.len());
    for (i, entry) in ports.iter().enumerate() {
        let field = |name: &str| format!("spec.ports[{i}].{name}");
        let name = entry.name.as_deref().unwrap_or_default();
        if name.is_empty() && ports.len() > 1 {
            return Err(FieldError::new(field("name"), FieldErrorKind::UnnamedPort));
        }
        if !names.insert(name) {
            return Err(FieldError::new(
                field("name"),
                FieldErrorKind::Duplicate(name.to_owned()),
            ));
        }
        let number = parse_port(entry.port, || field("port"))?;
        let protocol = parse_protocol(entry.protocol.as_deref(), || field("protocol"))?;
        if !numbers.insert((number, protocol)) {
            let kind = FieldErrorKind::Duplicate(format!("{number}/{protocol}"));
            return Err(FieldError::new(field("port"), kind));
        }
        parsed.push(ServicePort {
            name: Arc::from(name),
            port: number,
            node_port: optional_fields::optional_port(
                entry.node_port,
                || field("nodePort"),
                ignored,
            ),
            protocol,
        });
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests;
