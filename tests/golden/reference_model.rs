//! Runs the reference model on the golden cases. Their expected maps are written by hand, so agreement shows
//! that the model and Culvert are correct, and not merely that they agree with each other.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use serde_json::Value;
use tunnel_reference::{
    Cluster, ExternalIps, LocalNode, LocalSenders, NodePortEntry, OwnAddresses, TopologyKeys,
    address::Cidr,
};

use crate::{ADDRESSES, random_clusters};

/// The cases that the model does not cover: those with objects that no API server accepts, or with Culvert's
/// own annotation that excludes sockets.
const EXCLUDED: [&str; 2] = [
    "a_bad_document_leaves_the_rest",
    "sockets_ignore_a_service_with_the_annotation_for_that",
];

/// Compares the model's result for a case with the programmed maps.
pub(crate) fn check(case: &Path) -> Result<()> {
    if EXCLUDED.iter().any(|other| case.ends_with(other)) {
        return Ok(());
    }
    let text = fs::read_to_string(case.join("objects.yaml"))?;
    let mut cluster = Cluster::default();
    for object in serde_saphyr::from_multiple::<Value>(&text)? {
        add(&mut cluster, object)?;
    }
    let here = here(&case.join("config.yaml"))?;
    random_clusters::compare(cluster, &here).map(drop)
}

fn add(cluster: &mut Cluster, mut object: Value) -> Result<()> {
    match object["kind"].as_str().unwrap_or_default() {
        "Service" => {
            // The API server sets this default.
            let spec = &mut object["spec"];
            if spec["clusterIP"].is_null() {
                spec["clusterIP"] = spec["clusterIPs"][0].clone();
            }
            cluster.services.push(serde_json::from_value(object)?);
        }
        "EndpointSlice" => cluster.slices.push(serde_json::from_value(object)?),
        "Node" => cluster.nodes.push(serde_json::from_value(object)?),
        "List" => {
            let items = object["items"]
                .as_array_mut()
                .context("a List without items")?;
            items
                .iter_mut()
                .try_for_each(|item| add(cluster, item.take()))?;
        }
        _ => {}
    }
    Ok(())
}

/// Returns the node, with the settings from a case's config.
fn here(config: &Path) -> Result<LocalNode> {
    let service = if config.exists() {
        let config: Value = serde_saphyr::from_str(&fs::read_to_string(config)?)?;
        Some(config["service"].clone())
    } else {
        None
    };
    let word = |field: &str| {
        let service = service.as_ref()?;
        service[field].as_str()
    };
    let node_ports = service
        .as_ref()
        .map(|service| &service["nodePortAddresses"]);
    Ok(LocalNode {
        node: "node-a".to_owned(),
        addresses: ADDRESSES.into(),
        node_port_addresses: match node_ports {
            None => Some(Vec::new()),
            Some(Value::Array(entries)) => Some(entries.iter().map(entry).collect::<Result<_>>()?),
            Some(_) => None,
        },
        external_ips: match word("externalIPs") {
            Some("owned") => ExternalIps::Owned,
            _ => ExternalIps::Any,
        },
        own_addresses: match word("nodeAddresses") {
            Some("serve") => OwnAddresses::Serve,
            _ => OwnAddresses::Refuse,
        },
        topology_keys: match word("topologyKeys") {
            Some("honor") => TopologyKeys::Honor,
            _ => TopologyKeys::Ignore,
        },
        local_senders: LocalSenders::InRanges(Vec::new()),
        masquerade_all: false,
    })
}

fn entry(entry: &Value) -> Result<NodePortEntry> {
    let word = entry
        .as_str()
        .with_context(|| format!("the entry {entry} of nodePortAddresses is not a string"))?;
    Ok(match word {
        "primary" => NodePortEntry::Primary,
        "localhost" => NodePortEntry::Localhost,
        "all" => NodePortEntry::All,
        range => NodePortEntry::Cidr(
            Cidr::parse(range)
                .with_context(|| format!("the entry {range} of nodePortAddresses is not a CIDR"))?,
        ),
    })
}
