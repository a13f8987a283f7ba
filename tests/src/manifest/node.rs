//! A Node object.

use std::net::IpAddr;

use super::{Manifest, listed};

#[derive(Clone, Debug)]
pub struct NodeObject {
    name: String,
    addresses: Vec<IpAddr>,
    labels: &'static str,
}

impl NodeObject {
    /// A Node with addresses of type InternalIP, which is no edge node.
    #[must_use]
    pub fn new(name: &str, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        Self {
            name: name.to_owned(),
            addresses: addresses.into_iter().collect(),
            labels: "",
        }
    }

    /// Labelled as an edge node, as the product's default selects it.
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
        } = &node;
        let addresses = addresses.iter();
        let addresses = addresses.map(|it| format!("{{ type: InternalIP, address: \"{it}\" }}"));
        let text = format!(
            "apiVersion: v1\n\
             kind: Node\n\
             metadata: {{ name: {name}, labels: {{ {labels} }} }}\n\
             status: {{ addresses: [{addresses}] }}\n",
            addresses = listed(addresses),
        );
        Self {
            file: node.file(),
            text,
        }
    }
}
