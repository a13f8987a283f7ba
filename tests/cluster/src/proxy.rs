//! A cluster's service proxy: Culvert or kube-proxy.

use anyhow::Result;

use super::{SharedParts, culvert_deployment::CulvertDeployment, node::Node};

/// A cluster's service proxy.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Proxy {
    /// Culvert, deployed as pods.
    Culvert(CulvertDeployment),
    /// kube-proxy in nftables mode, started directly on each host.
    KubeProxy,
}

/// Starts kube-proxy on a node.
pub(super) fn start_kube_proxy(node: &mut Node, shared: &SharedParts) -> Result<()> {
    let config = config(node.name, &shared.pki.file("proxy.kubeconfig"));
    node.write("kube-proxy.yaml", &config)?;
    let command = [
        shared.components.program("kube-proxy"),
        format!("--config={}", node.path("kube-proxy.yaml")),
    ];
    node.run_daemon(shared, "kube-proxy", &command)
}

/// Returns kube-proxy's configuration for a node.
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
