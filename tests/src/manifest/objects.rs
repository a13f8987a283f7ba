//! Nodes and ConfigMaps.

use std::net::IpAddr;

use super::{Manifest, listed};

/// The label that makes a Node an edge node, as the product's default selects it.
pub const EDGE_LABEL: (&str, &str) = ("openyurt.io/is-edge-worker", "true");

/// A Node object.
#[derive(Clone, Debug)]
pub struct NodeObject {
    name: String,
    labels: Vec<(String, String)>,
    addresses: Vec<IpAddr>,
}

impl NodeObject {
    /// A Node without labels and addresses.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            labels: Vec::new(),
            addresses: Vec::new(),
        }
    }

    /// An edge node with these addresses.
    #[must_use]
    pub fn edge(name: &str, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        let (key, value) = EDGE_LABEL;
        addresses
            .into_iter()
            .fold(Self::new(name).label(key, value), Self::address)
    }

    /// With a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Without any label.
    #[must_use]
    pub fn unlabelled(mut self) -> Self {
        self.labels.clear();
        self
    }

    /// With an address of type InternalIP.
    #[must_use]
    pub fn address(mut self, address: IpAddr) -> Self {
        self.addresses.push(address);
        self
    }

    /// The name of the file that holds it.
    #[must_use]
    pub fn file(&self) -> String {
        format!("node-{}.yaml", self.name)
    }
}

impl From<NodeObject> for Manifest {
    fn from(node: NodeObject) -> Self {
        let labels = node.labels.iter();
        let labels = labels.map(|(key, value)| format!("\"{key}\": \"{value}\""));
        let addresses = node.addresses.iter();
        let addresses = addresses.map(|it| format!("{{ type: InternalIP, address: \"{it}\" }}"));
        let text = format!(
            "apiVersion: v1\n\
             kind: Node\n\
             metadata: {{ name: {name}, labels: {{ {labels} }} }}\n\
             status: {{ addresses: [{addresses}] }}\n",
            name = node.name,
            labels = listed(labels),
            addresses = listed(addresses),
        );
        Self {
            file: node.file(),
            text,
        }
    }
}

/// A ConfigMap.
#[derive(Clone, Debug)]
pub struct ConfigMap {
    namespace: String,
    name: String,
    data: Vec<(String, String)>,
}

impl ConfigMap {
    /// An empty one.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            data: Vec::new(),
        }
    }

    /// The one that names further ports of edge nodes, as the product's default has it.
    #[must_use]
    pub fn of_tunnel() -> Self {
        Self::new("kube-system", "yurt-tunnel-server-cfg")
    }

    /// With a value.
    #[must_use]
    pub fn data(mut self, key: &str, value: &str) -> Self {
        self.data.push((key.to_owned(), value.to_owned()));
        self
    }

    /// The name of the file that holds it.
    #[must_use]
    pub fn file(&self) -> String {
        format!("configmap-{}.yaml", self.name)
    }
}

impl From<ConfigMap> for Manifest {
    fn from(map: ConfigMap) -> Self {
        let data = map.data.iter();
        let data = data.map(|(key, value)| format!("\"{key}\": \"{value}\""));
        let text = format!(
            "apiVersion: v1\n\
             kind: ConfigMap\n\
             metadata: {{ name: {name}, namespace: {namespace} }}\n\
             data: {{ {data} }}\n",
            name = map.name,
            namespace = map.namespace,
            data = listed(data),
        );
        Self {
            file: map.file(),
            text,
        }
    }
}
