//! Parses the annotations on a Service that set the algorithm, the weights, socket translation and topology
//! keys. Invalid values are ignored, since the Service works without them.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{
    k8s::{ANNOTATION_DOMAIN, FieldError, FieldErrorKind},
    model::{Algorithm, EndpointScope, Weights},
};

/// The prefix that marks a zone in the weights annotation.
const ZONE_PREFIX: &str = "zone:";
/// The key in the weights annotation that stands for all other endpoints.
const WILDCARD: &str = "*";
/// The valid topology keys, as listed in error messages.
const TOPOLOGY_KEY_FORM: &str =
    "kubernetes.io/hostname, openyurt.io/nodepool or kubernetes.io/zone";
/// The OpenYurt annotation that holds a topology key.
const TOPOLOGY_KEYS_ANNOTATION: &str = "openyurt.io/topologyKeys";

/// Parses the `culvert.dev/algorithm` annotation.
pub(super) fn algorithm(metadata: &ObjectMeta, ignored: &mut Vec<FieldError>) -> Option<Algorithm> {
    let (field, text) = annotation(metadata, "algorithm")?;
    let algorithm = Algorithm::named(text);
    if algorithm.is_none() {
        ignored.push(FieldError::new(
            field,
            FieldErrorKind::wrong_form(Algorithm::FORM, text),
        ));
    }
    algorithm
}

/// Parses the `culvert.dev/weights` annotation, such as `web-0=3, zone:north=2, *=1`. Invalid entries are
/// ignored.
pub(super) fn weights(
    metadata: &ObjectMeta,
    ignored: &mut Vec<FieldError>,
) -> Option<Arc<Weights>> {
    let (field, text) = annotation(metadata, "weights")?;
    let mut weights = Weights::default();
    for entry in text.split(',').map(str::trim) {
        if entry.is_empty() {
            continue;
        }
        let read = entry.split_once('=').and_then(|(key, weight)| {
            let weight = weight.trim().parse().ok();
            let weight: u32 = weight.filter(|weight| *weight <= Weights::MAX)?;
            Some((key.trim(), weight))
        });
        match read {
            Some((WILDCARD, weight)) => weights.others = Some(weight),
            Some((key, weight)) if !key.is_empty() => {
                let (map, name) = match key.strip_prefix(ZONE_PREFIX) {
                    Some(zone) => (&mut weights.zones, zone),
                    None => (&mut weights.names, key),
                };
                map.insert(Arc::from(name), weight);
            }
            Some(_) | None => {
                let reason = FieldErrorKind::wrong_form(
                    "POD=WEIGHT, zone:ZONE=WEIGHT or *=WEIGHT, from 0 to 100",
                    entry,
                );
                ignored.push(FieldError::new(&field, reason));
            }
        }
    }
    (weights != Weights::default()).then(|| Arc::new(weights))
}

/// Parses the `culvert.dev/socket-translation` annotation. Returns true if it disables translation at the
/// socket.
pub(super) fn is_socket_translation_disabled(
    metadata: &ObjectMeta,
    ignored: &mut Vec<FieldError>,
) -> bool {
    let Some((field, text)) = annotation(metadata, "socket-translation") else {
        return false;
    };
    match text {
        "enabled" => false,
        "disabled" => true,
        other => {
            ignored.push(FieldError::new(
                field,
                FieldErrorKind::wrong_form("enabled or disabled", other),
            ));
            false
        }
    }
}

/// Parses the `openyurt.io/topologyKeys` annotation, which holds a single key without surrounding spaces, or
/// is empty (openyurt `pkg/yurthub/filter/servicetopology/filter.go`, `serviceTopologyHandler`).
pub(super) fn endpoint_scope(
    metadata: &ObjectMeta,
    ignored: &mut Vec<FieldError>,
) -> Option<EndpointScope> {
    let text = annotation_text(metadata, TOPOLOGY_KEYS_ANNOTATION)?;
    match text {
        "" => None,
        "kubernetes.io/hostname" => Some(EndpointScope::Node),
        "openyurt.io/nodepool" | "kubernetes.io/zone" => Some(EndpointScope::Pool),
        other => {
            let reason = FieldErrorKind::wrong_form(TOPOLOGY_KEY_FORM, other);
            ignored.push(FieldError::new(
                annotation_field(TOPOLOGY_KEYS_ANNOTATION),
                reason,
            ));
            None
        }
    }
}

/// Returns the field path and the trimmed value of one of Culvert's annotations.
fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<(String, &'a str)> {
    let annotation = format!("{ANNOTATION_DOMAIN}/{name}");
    let text = annotation_text(metadata, &annotation)?.trim();
    Some((annotation_field(&annotation), text))
}

fn annotation_text<'a>(metadata: &'a ObjectMeta, annotation: &str) -> Option<&'a str> {
    let annotations: &BTreeMap<_, _> = metadata.annotations.as_ref()?;
    annotations.get(annotation).map(String::as_str)
}

fn annotation_field(annotation: &str) -> String {
    format!("metadata.annotations[{annotation}]")
}

#[cfg(test)]
mod tests;
