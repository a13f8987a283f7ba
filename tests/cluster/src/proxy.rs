//! The service proxy on the nodes.

use anyhow::Result;

use super::{Site, node::Node, product::Product};

/// The service proxy of a cluster.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Proxy {
    /// Culvert.
    Culvert(Product),
    /// kube-proxy, in its nftables mode.
    KubeProxy,
}

/// Starts kube-proxy on a node.
pub(super) fn start_kube_proxy(node: &mut Node, site: &Site) -> Result<()> {
    let config = config(node.name, &site.pki.file("proxy.kubeconfig"));
    node.write("kube-proxy.yaml", &config)?;
    let command = [
        site.kit.program("kube-proxy"),
        format!("--config={}", node.path("kube-proxy.yaml")),
    ];
    node.run_daemon(site, "kube-proxy", &command)
}

/// Returns kube-proxy's config on a node.
#[must_use]
pub fn config(node: &str, kubeconfig: &str) -> String {
    format!(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\n\
         kind: KubeProxyConfiguration\n\
         mode: nftables\n\
         hostnameOverride: {node}\n\
         clusterCIDR: 10.244.0.0/16,fd00:244::/32\n\
         clientConnection: {{kubeconfig: {kubeconfig}}}\n\
         conntrack: {{maxPerCore: 0, min: 0}}\n"
    )
}
