//! The manifest of a Node.

use std::net::IpAddr;

use super::{Manifest, comma_separated};

/// A Node with addresses, and with a label if it is an edge node.
#[derive(Clone, Debug)]
pub struct NodeObject {
    name: String,
    addresses: Vec<IpAddr>,
    labels: &'static str,
    pod_cidrs: &'static [&'static str],
}

impl NodeObject {
    /// Creates a Node with the given InternalIP addresses and no labels.
    #[must_use]
    pub fn new(name: &str, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        Self {
            name: name.to_owned(),
            addresses: addresses.into_iter().collect(),
            labels: "",
            pod_cidrs: &[],
        }
    }

    /// Sets the ranges of the pods' addresses.
    #[must_use]
    pub const fn pod_cidrs(mut self, cidrs: &'static [&'static str]) -> Self {
        self.pod_cidrs = cidrs;
        self
    }

    /// Adds the label that marks edge nodes in Culvert's default config.
    #[must_use]
    pub const fn edge(mut self) -> Self {
        self.labels = "openyurt.io/is-edge-worker: \"true\"";
        self
    }

    #[must_use]
    pub fn file(&self) -> String {
        format!("{}.yaml", self.name)
    }
}

impl From<NodeObject> for Manifest {
    fn from(node: NodeObject) -> Self {
        let NodeObject {
            name,
            addresses,
            labels,
            pod_cidrs,
        } = &node;
        let addresses = addresses.iter();
        let addresses = addresses.map(|it| format!("{{ type: InternalIP, address: \"{it}\" }}"));
        let spec = if pod_cidrs.is_empty() {
            String::new()
        } else {
            format!("spec: {{ podCIDRs: {pod_cidrs:?} }}\n")
        };
        let text = format!(
            "apiVersion: v1\n\
             kind: Node\n\
             metadata: {{ name: {name}, labels: {{ {labels} }} }}\n\
             {spec}\
             status: {{ addresses: [{addresses}] }}\n",
            addresses = comma_separated(addresses),
        );
        Self {
            file: node.file(),
            text,
        }
    }
}
