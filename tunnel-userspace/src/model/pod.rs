use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::ObjectName;

/// A Pod that has addresses of its own, and that has not ended.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Pod {
    /// The namespace and name.
    pub name: ObjectName,
    /// The name of the node that the Pod runs on.
    pub node: Arc<str>,
    /// The Pod's addresses.
    pub ips: Vec<IpAddr>,
}

/// The namespaces of the Pods that have an address. While an address passes from one Pod to another, it may have
/// several.
pub type PodNamespaces = BTreeMap<IpAddr, BTreeSet<Arc<str>>>;
