use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::api::discovery::v1;

use super::{Arriving, Invalid, Reason, address, good, port, protocol};
use crate::model::{
    Endpoint, EndpointPort, EndpointSlice, Family, Hints, Kind, Object, ObjectName,
};

/// The label with the Service of a slice.
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The label of slices of headless Services, with any value.
const HEADLESS: &str = "service.kubernetes.io/headless";

/// The annotation with the time of the change that led to this version of a slice
/// (`EndpointsLastChangeTriggerTime` in `k8s.io/api/core/v1`).
const TRIGGERED: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// The maximum number of invalid endpoints, and of invalid ports, that are reported per slice.
const NOTED: usize = 8;

impl Arriving for v1::EndpointSlice {
    const READ_AS: Kind = Kind::EndpointSlice;

    /// Converts an EndpointSlice; `None` if it has no Service or a headless one, or has host names instead
    /// of addresses. Like kube-proxy, it ignores invalid endpoints and ports
    /// (`pkg/proxy/endpointslicecache.go`, `addEndpoints`).
    fn read(self, name: ObjectName, ignored: &mut Vec<Invalid>) -> Result<Option<Object>, Invalid> {
        let annotations = self.metadata.annotations.unwrap_or_default();
        // Only a metric uses the time, so an invalid one is ignored.
        let triggered = annotations
            .get(TRIGGERED)
            .and_then(|text| text.parse().ok());
        let labels = self.metadata.labels.unwrap_or_default();
        let Some(service) = labels
            .get(SERVICE_NAME)
            .filter(|service| !service.is_empty())
        else {
            return Ok(None);
        };
        if labels.contains_key(HEADLESS) {
            return Ok(None);
        }
        let family = match self.address_type.as_str() {
            "IPv4" => Family::V4,
            "IPv6" => Family::V6,
            "FQDN" => return Ok(None),
            "" => return Err(Invalid::new("addressType", Reason::Missing)),
            other => {
                let reason = Reason::not("IPv4, IPv6 or FQDN", other);
                return Err(Invalid::new("addressType", reason));
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

/// Parses the ports. A port without a number is skipped, since no port of a Service uses it. A missing
/// name is the empty name, as in the API server (`SetDefaults_EndpointPort` in Kubernetes
/// `pkg/apis/discovery/v1`).
fn ports(ports: &[v1::EndpointPort], ignored: &mut Vec<Invalid>) -> Vec<EndpointPort> {
    let mut names = BTreeSet::new();
    let mut read_one = |(i, entry): (usize, &v1::EndpointPort)| {
        let field = |name: &str| format!("ports[{i}].{name}");
        let name = entry.name.as_deref().unwrap_or_default();
        let protocol = protocol(entry.protocol.as_deref(), || field("protocol"))?;
        let Some(number) = entry.port.filter(|number| *number != 0) else {
            return Ok(None);
        };
        let port = port(number, || field("port"))?;
        if !names.insert(name.to_owned()) {
            let reason = Reason::Repeated(name.to_owned());
            return Err(Invalid::new(field("name"), reason));
        }
        Ok(Some(EndpointPort {
            name: Arc::from(name),
            port,
            protocol,
        }))
    };
    let read = ports.iter().enumerate().map(&mut read_one);
    usable(read, ignored).into_iter().flatten().collect()
}

fn endpoints(
    endpoints: Vec<v1::Endpoint>,
    family: Family,
    ignored: &mut Vec<Invalid>,
) -> Vec<Endpoint> {
    let read_one = |(i, entry): (usize, v1::Endpoint)| {
        let Some(text) = entry.addresses.first() else {
            let field = format!("endpoints[{i}].addresses");
            return Err(Invalid::new(field, Reason::Missing));
        };
        let field = || format!("endpoints[{i}].addresses[0]");
        let address = address::endpoint(text, field)?;
        if Family::of(address) != family {
            let reason = Reason::OtherFamily {
                address: text.to_owned(),
                wanted: family.label(),
            };
            return Err(Invalid::new(field(), reason));
        }
        let conditions = entry.conditions.unwrap_or_default();
        Ok(Endpoint {
            address,
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
            name: known(entry.target_ref.and_then(|target| target.name)),
            node: known(entry.node_name),
            zone: known(entry.zone),
            hints: entry.hints.and_then(hints),
        })
    };
    usable(endpoints.into_iter().enumerate().map(read_one), ignored)
}

/// Collects the valid items, and pushes the first errors to `ignored`: a slice has up to a thousand
/// items.
fn usable<T>(read: impl Iterator<Item = Result<T, Invalid>>, ignored: &mut Vec<Invalid>) -> Vec<T> {
    let mut rest = Vec::new();
    let usable = good(read, &mut rest);
    ignored.extend(rest.into_iter().take(NOTED));
    usable
}

/// Returns the text unless it is empty.
fn known(text: Option<String>) -> Option<Arc<str>> {
    text.filter(|text| !text.is_empty()).map(Arc::from)
}

/// Converts the hints; `None` if there are none.
fn hints(hints: v1::EndpointHints) -> Option<Arc<Hints>> {
    let nodes = hints.for_nodes.unwrap_or_default().into_iter();
    let zones = hints.for_zones.unwrap_or_default().into_iter();
    let read = Hints {
        nodes: nodes.map(|node| Arc::from(node.name)).collect(),
        zones: zones.map(|zone| Arc::from(zone.name)).collect(),
    };
    (read != Hints::default()).then(|| Arc::new(read))
}

#[cfg(test)]
mod tests;
