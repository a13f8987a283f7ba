//! Deploys Culvert to a cluster's nodes from a copy of its manifests. As an administrator would, it fills in
//! addresses; it also adds settings that only these nodes need.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};

use super::{kubectl::Kubectl, network, node::Node};

/// The kustomization to apply, as in docs/install.md, with all optional components.
const OVERLAY: &str = "apiVersion: kustomize.config.k8s.io/v1beta1\n\
    kind: Kustomization\n\
    resources: [../deploy/tunnel]\n\
    components: [../deploy/sockets]\n";
/// The Deployments and DaemonSets in the overlay.
const WORKLOADS: [&str; 4] = [
    "deployment/culvert-controller",
    "daemonset/culvert-cloud",
    "daemonset/culvert-node",
    "daemonset/culvert-agent",
];
const NAMESPACE: &str = "kube-system";

/// The files that contain a placeholder for an address, each with that placeholder: one for the API server's
/// address and one for the gateway's.
const PLACEHOLDERS: [(&str, &str); 2] = [
    ("common/kustomization.yaml", "apiserver.example"),
    ("tunnel/agent/culvert.yaml", "gateway.example"),
];
/// The configuration files for nodes with and without the gateway.
const CONFIGS: [&str; 2] = ["tunnel/culvert.yaml", "common/culvert.yaml"];

/// The label that nodes with the gateway have.
const GATEWAY_LABEL: &str = "node-restriction.kubernetes.io/culvert-gateway=true";

/// The files from which Culvert is deployed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CulvertDeployment {
    /// The directory that contains the manifests.
    pub manifests: PathBuf,
    /// The archive of the image that the manifests refer to.
    pub image: PathBuf,
    /// True if packets are also translated on the links that lead to pods (`service.packets.links: all`).
    pub includes_pod_links: bool,
}

/// Deploys Culvert to all nodes, and waits until it is ready.
pub(super) fn deploy(
    deployment: &CulvertDeployment,
    kubectl: &Kubectl,
    nodes: &[Node],
    scratch: &Path,
) -> Result<()> {
    for node in nodes {
        node.import(&deployment.image)?;
    }
    let manifests = scratch.join("deploy");
    copy(&deployment.manifests, &manifests)?;
    fill_in(&manifests, nodes, deployment.includes_pod_links)?;
    // The admission plugin NodeRestriction keeps kubelets from setting this label themselves.
    let cloud = nodes.first().context("the cluster has no node")?;
    kubectl.run(&["label", "node", cloud.name, GATEWAY_LABEL])?;
    let overlay = scratch.join("overlay");
    fs::create_dir_all(&overlay)?;
    fs::write(overlay.join("kustomization.yaml"), OVERLAY)?;
    kubectl.run(&["apply", "--kustomize", &overlay.display().to_string()])?;
    for name in WORKLOADS {
        kubectl.wait_for_rollout(NAMESPACE, name)?;
    }
    Ok(())
}

/// Replaces the placeholders in the manifests, and adds settings to the configuration files.
fn fill_in(manifests: &Path, nodes: &[Node], includes_pod_links: bool) -> Result<()> {
    let [cloud, _] = network::addresses(0);
    for (name, placeholder) in PLACEHOLDERS {
        edit_file(&manifests.join(name), |text| {
            ensure!(
                text.contains(placeholder),
                "the file does not contain {placeholder}"
            );
            Ok(text.replace(placeholder, &cloud))
        })?;
    }
    edit_file(&manifests.join(CONFIGS[0]), |text| {
        let gateway = "  gateway: {}\n";
        ensure!(
            text.contains(gateway),
            "the file does not contain {gateway}"
        );
        Ok(text.replace(gateway, "  gateway: { missingNodeTimeout: 5s }\n"))
    })?;
    let first = nodes.first().context("the cluster has no node")?;
    for name in CONFIGS {
        let settings = additional_settings(first, includes_pod_links);
        edit_file(&manifests.join(name), |text| Ok(text + &settings))?;
    }
    Ok(())
}

/// Returns the settings that these nodes need because their pods are in a cgroup below the root, and because
/// their Node objects have no pod CIDRs, and kube-proxy's default for connection tracking. The settings are the same on every
/// node.
fn additional_settings(node: &Node, includes_pod_links: bool) -> String {
    let links = if includes_pod_links { "all" } else { "uplinks" };
    format!(
        "bpf: {{ cgroup: {} }}\n\
         conntrack: {{ tcpCloseWaitTimeout: 1h }}\n\
         service: {{ detectLocal: ClusterCIDR, clusterCIDRs: [\"10.244.0.0/16\", \"fd00:244::/32\"], \
         packets: {{ links: {links} }} }}\n",
        node.shared_cgroup_path.display()
    )
}

fn edit_file(path: &Path, edit: impl FnOnce(String) -> Result<String>) -> Result<()> {
    let read_and_write = || -> Result<()> {
        let text = edit(fs::read_to_string(path)?)?;
        Ok(fs::write(path, text)?)
    };
    read_and_write().with_context(|| format!("cannot edit {}", path.display()))
}

/// Copies a directory recursively.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}
