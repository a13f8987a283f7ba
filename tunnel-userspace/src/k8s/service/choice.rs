//! Parses the annotations of a Service: algorithm, weights, translation at sockets, topology keys.
//! Invalid ones are ignored, since the Service works without them.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{
    k8s::{ANNOTATION_DOMAIN, Invalid, Reason},
    model::{Algorithm, KeepTo, Weights},
};

/// The prefix of a zone in the weights.
const ZONE: &str = "zone:";
/// The key in the weights for all other endpoints.
const OTHERS: &str = "*";
/// The description of the algorithms in errors.
const ALGORITHMS: &str = "random, weighted, round-robin, source-hash, destination-hash, maglev, \
                          least-conn or an IPVS scheduler (rr, wrr, sh, dh, mh, lc, wlc, sed, nq)";
/// The description of the topology keys in errors.
const TOPOLOGIES: &str = "kubernetes.io/hostname, openyurt.io/nodepool or kubernetes.io/zone";
/// The annotation of `OpenYurt` with a topology key.
const TOPOLOGY_KEYS: &str = "openyurt.io/topologyKeys";

/// Parses the annotation `culvert.dev/algorithm`.
pub(super) fn algorithm(metadata: &ObjectMeta, ignored: &mut Vec<Invalid>) -> Option<Algorithm> {
    let (field, text) = annotation(metadata, "algorithm")?;
    let algorithm = Algorithm::named(text);
    if algorithm.is_none() {
        ignored.push(Invalid::new(field, Reason::not(ALGORITHMS, text)));
    }
    algorithm
}

/// Parses the annotation `culvert.dev/weights`, such as `web-0=3, zone:north=2, *=1`. Ignores invalid
/// entries.
pub(super) fn weights(metadata: &ObjectMeta, ignored: &mut Vec<Invalid>) -> Option<Arc<Weights>> {
    let (field, text) = annotation(metadata, "weights")?;
    let mut weights = Weights::default();
    for entry in text.split(',').map(str::trim) {
        if entry.is_empty() {
            continue;
        }
        let read = entry.split_once('=').and_then(|(key, weight)| {
            let weight = weight.trim().parse().ok();
            let weight: u32 = weight.filter(|weight| *weight <= Weights::MOST)?;
            Some((key.trim(), weight))
        });
        match read {
            Some((OTHERS, weight)) => weights.others = Some(weight),
            Some((key, weight)) if !key.is_empty() => {
                let (map, name) = match key.strip_prefix(ZONE) {
                    Some(zone) => (&mut weights.zones, zone),
                    None => (&mut weights.names, key),
                };
                map.insert(Arc::from(name), weight);
            }
            Some(_) | None => {
                let reason =
                    Reason::not("POD=WEIGHT, zone:ZONE=WEIGHT or *=WEIGHT, from 0 to 100", entry);
                ignored.push(Invalid::new(&field, reason));
            }
        }
    }
    (weights != Weights::default()).then(|| Arc::new(weights))
}

/// Parses the annotation `culvert.dev/socket-translation`. Returns true if it disables the translation
/// at sockets.
pub(super) fn is_not_for_sockets(metadata: &ObjectMeta, ignored: &mut Vec<Invalid>) -> bool {
    let Some((field, text)) = annotation(metadata, "socket-translation") else {
        return false;
    };
    match text {
        "enabled" => false,
        "disabled" => true,
        other => {
            ignored.push(Invalid::new(
                field,
                Reason::not("enabled or disabled", other),
            ));
            false
        }
    }
}

/// Parses the annotation `openyurt.io/topologyKeys`: one key without blanks around it, or nothing
/// (openyurt `pkg/yurthub/filter/servicetopology/filter.go`, `serviceTopologyHandler`).
pub(super) fn keep_to(metadata: &ObjectMeta, ignored: &mut Vec<Invalid>) -> Option<KeepTo> {
    let text = text(metadata, TOPOLOGY_KEYS)?;
    match text {
        "" => None,
        "kubernetes.io/hostname" => Some(KeepTo::Node),
        "openyurt.io/nodepool" | "kubernetes.io/zone" => Some(KeepTo::Pool),
        other => {
            let reason = Reason::not(TOPOLOGIES, other);
            ignored.push(Invalid::new(field(TOPOLOGY_KEYS), reason));
            None
        }
    }
}

/// Returns the field path and the trimmed text of one of Culvert's annotations.
fn annotation<'a>(metadata: &'a ObjectMeta, name: &str) -> Option<(String, &'a str)> {
    let annotation = format!("{ANNOTATION_DOMAIN}/{name}");
    let text = text(metadata, &annotation)?.trim();
    Some((field(&annotation), text))
}

fn text<'a>(metadata: &'a ObjectMeta, annotation: &str) -> Option<&'a str> {
    let annotations: &BTreeMap<_, _> = metadata.annotations.as_ref()?;
    annotations.get(annotation).map(String::as_str)
}

fn field(annotation: &str) -> String {
    format!("metadata.annotations[{annotation}]")
}

#[cfg(test)]
mod tests;
