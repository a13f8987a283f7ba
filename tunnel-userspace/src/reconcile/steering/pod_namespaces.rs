//! Publishes the namespaces of this node's Pods by address, for the rules about who may use the ingress.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::{
    model::{ObjectName, Pod, PodNamespaces},
    publish,
};

/// The Pods on this node.
#[derive(Default)]
pub(super) struct LocalPods {
    pods: BTreeMap<ObjectName, Arc<Pod>>,
    namespaces: watch::Sender<Arc<PodNamespaces>>,
}

impl LocalPods {
    pub(super) fn namespaces(&self) -> watch::Receiver<Arc<PodNamespaces>> {
        self.namespaces.subscribe()
    }

    /// Applies the changes in an update. Pods on other nodes, which only files contain, are ignored.
    pub(super) fn update(&mut self, changes: &[(ObjectName, Option<Arc<Pod>>)], own_node: &str) {
        if changes.is_empty() {
            return;
        }
        for (name, pod) in changes {
            match pod.as_ref().filter(|pod| *pod.node == *own_node) {
                Some(pod) => self.pods.insert(name.clone(), Arc::clone(pod)),
                None => self.pods.remove(name),
            };
        }
        let mut namespaces = PodNamespaces::new();
        for pod in self.pods.values() {
            for ip in &pod.ips {
                let of_address = namespaces.entry(*ip).or_default();
                of_address.insert(Arc::clone(&pod.name.namespace));
            }
        }
        publish::publish_if_changed(&self.namespaces, Arc::new(namespaces));
    }
}
