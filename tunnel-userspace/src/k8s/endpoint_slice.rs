use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::discovery::v1;

use super::{
    ApiObject, FieldError, FieldErrorKind, address, collect_valid, parse_port, parse_protocol,
};
use crate::model::{
    Endpoint, EndpointPort, EndpointSlice, Family, Hints, Kind, Object, ObjectName,
};

/// The label that names the Service that a slice belongs to.
pub(super) const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// The label, with any value, that marks slices of headless Services.
const HEADLESS_LABEL: &str = "service.kubernetes.io/headless";

/// The annotation that holds the time of the change that led to this version of a slice
/// (`EndpointsLastChangeTriggerTime` in `k8s.io/api/core/v1`).
const TRIGGER_TIME_ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// The maximum number of invalid endpoints to report per slice, and likewise of invalid ports.
const MAX_REPORTED: usize = 8;

impl ApiObject for v1::EndpointSlice {
    const MODEL_KIND: Kind = Kind::EndpointSlice;

    /// Converts an EndpointSlice. Returns `None` if it belongs to no Service or to a headless one, or if it
    /// has host names instead of addresses. Invalid endpoints and ports are ignored, as in kube-proxy
    /// (`pkg/proxy/endpointslicecache.go`, `addEndpoints`).
    fn into_model(
        self,
        name: ObjectName,
        ignored: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError> {
        let annotations = self.metadata.annotations.unwrap_or_default();
        // The time is only used in a metric, so an invalid time is ignored.
        let triggered = annotations
            .get(TRIGGER_TIME_ANNOTATION)
            .and_then(|text| text.parse().ok());
        let labels = self.metadata.labels.unwrap_or_default();
        let Some(service) = labels
            .get(SERVICE_NAME_LABEL)
            .filter(|service| !service.is_empty())
        else {
            return Ok(None);
        };
        if labels.contains_key(HEADLESS_LABEL) {
            return Ok(None);
        }
        let family = match self.address_type.as_str() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            "FQDN" => return Ok(None),
            "" => return Err(FieldError::new("addressType", FieldErrorKind::Missing)),
            other => {
                let kind = FieldErrorKind::wrong_form("IPv4, IPv6 or FQDN", other);
                return Err(FieldError::new("addressType", kind));
            }
        };
        Ok(Some(Object::EndpointSlice(Arc::new(EndpointSlice {
            service: ObjectName::new(Arc::clone(&name.namespace), service.as_str()),
            name,
            family,
            ports: ports(&self.ports.unwrap_or_default(), ignored),
            endpoints: endpoints(self.endpoints.unwrap_or_default(), family, ignored),
            triggered,
        }))))
    }
}

/// Parses the ports. A port without a number is skipped, since no Service port can use it. A missing name is
/// treated as an empty name, as in the API server (`SetDefaults_EndpointPort` in Kubernetes
/// `pkg/apis/discovery/v1`).
fn ports(ports: &[v1::EndpointPort], ignored: &mut Vec<FieldError>) -> Vec<EndpointPort> {
    let mut names = BTreeSet::new();
    let mut parse_one = |(i, entry): (usize, &v1::EndpointPort)| {
        let field = |name: &str| format!("ports[{i}].{name}");
        let name = entry.name.as_deref().unwrap_or_default();
        let protocol = parse_protocol(entry.protocol.as_deref(), || field("protocol"))?;
        let Some(number) = entry.port.filter(|number| *number != 0) else {
            return Ok(None);
        };
        let port = parse_port(number, || field("port"))?;
        if !names.insert(name.to_owned()) {
            let kind = FieldErrorKind::Duplicate(name.to_owned());
            return Err(FieldError::new(field("name"), kind));
        }
        Ok(Some(EndpointPort {
            name: Arc::from(name),
            port,
            protocol,
        }))
    };
    let results = ports.iter().enumerate().map(&mut parse_one);
    collect_valid_items(results, ignored)
        .into_iter()
        .flatten()
        .collect()
}

fn endpoints(
    endpoints: Vec<v1::Endpoint>,
    family: Family,
    ignored: &mut Vec<FieldError>,
) -> Vec<Endpoint> {
    let parse_one = |(i, entry): (usize, v1::Endpoint)| {
        let Some(text) = entry.addresses.first() else {
            let field = format!("endpoints[{i}].addresses");
            return Err(FieldError::new(field, FieldErrorKind::Missing));
        };
        let field = || format!("endpoints[{i}].addresses[0]");
        let address = address::parse_routable(text, field)?;
        if Family::of(address) != family {
            let kind = FieldErrorKind::WrongFamily {
                address: text.to_owned(),
                wanted: family.label(),
            };
            return Err(FieldError::new(field(), kind));
        }
        let conditions = entry.conditions.unwrap_or_default();
        Ok(Endpoint {
            address,
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
            name: non_empty(entry.target_ref.and_then(|target| target.name)),
            node: non_empty(entry.node_name),
            zone: non_empty(entry.zone),
            hints: entry.hints.and_then(hints),
        })
    };
    collect_valid_items(endpoints.into_iter().enumerate().map(parse_one), ignored)
}

/// Collects the valid items, and appends only the first few errors to `ignored`, since a slice may have up to
/// a thousand items.
fn collect_valid_items<T>(
    results: impl Iterator<Item = Result<T, FieldError>>,
    ignored: &mut Vec<FieldError>,
) -> Vec<T> {
    let mut errors = Vec::new();
    let valid = collect_valid(results, &mut errors);
    ignored.extend(errors.into_iter().take(MAX_REPORTED));
    valid
}

/// Returns the text, or `None` if it is empty.
fn non_empty(text: Option<String>) -> Option<Arc<str>> {
    text.filter(|text| !text.is_empty()).map(Arc::from)
}

/// Converts the hints. Returns `None` if there are none.
fn hints(hints: v1::EndpointHints) -> Option<Arc<Hints>> {
    let nodes = hints.for_nodes.unwrap_or_default().into_iter();
    let zones = hints.for_zones.unwrap_or_default().into_iter();
    let hints = Hints {
        nodes: nodes.map(|node| Arc::from(node.name)).collect(),
        zones: zones.map(|zone| Arc::from(zone.name)).collect(),
    };
    (hints != Hints::default()).then(|| Arc::new(hints))
}

#[cfg(test)]
mod tests;
