//! What serves Services on the nodes.

use anyhow::Result;

use super::{Site, node::Node, product::Product};

/// Whose Services are looked at.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Proxy {
    /// The product's.
    Culvert(Product),
    /// Kubernetes' own, in its nftables mode.
    KubeProxy,
}

/// Starts Kubernetes' own proxy on a node.
pub(super) fn start_kube_proxy(node: &mut Node, site: &Site<'_>) -> Result<()> {
    let config = format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\n\
         kind: KubeProxyConfiguration\n\
         mode: nftables\n\
         hostnameOverride: {}\n\
         clusterCIDR: 10.244.0.0/16,fd00:244::/32\n\
         clientConnection: {{kubeconfig: {}}}\n\
         conntrack: {{maxPerCore: 0, min: 0}}\n",
        node.name(),
        site.pki.file("proxy.kubeconfig"),
    );
    node.write("kube-proxy.yaml", &config)?;
    let command = [
        site.kit.program("kube-proxy"),
        format!("--config={}", node.path("kube-proxy.yaml")),
    ];
    node.run_daemon(site, "kube-proxy", &command)
}
