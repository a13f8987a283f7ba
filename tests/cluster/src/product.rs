//! The product on the nodes of a cluster: a copy of its manifests with the values that every cluster
//! must fill in, and with settings for the peculiarities of these nodes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::pki::{Authority, Pair, Validity};

use super::{kubectl::Kubectl, network, node::Node};

/// The applied overlay: as in docs/install.md, with all components for these nodes.
const OVERLAY: &str = "apiVersion: kustomize.config.k8s.io/v1beta1\n\
    kind: Kustomization\n\
    resources: [../deploy/tunnel]\n\
    components: [../deploy/sockets]\n";
/// The DaemonSets of the overlay.
const DAEMONS: [&str; 3] = ["culvert-cloud", "culvert-node", "culvert-agent"];
const NAMESPACE: &str = "kube-system";

/// The placeholders of the addresses of the API server and the gateway in the manifests.
const PLACEHOLDERS: [(&str, &str); 2] = [
    ("common/kustomization.yaml", "apiserver.example"),
    ("tunnel/agent/culvert.yaml", "gateway.example"),
];
/// The configs of nodes with and without the gateway.
const CONFIGS: [&str; 2] = ["tunnel/culvert.yaml", "common/culvert.yaml"];

/// The label of nodes with the gateway.
const GATEWAY: &str = "node-restriction.kubernetes.io/culvert-gateway=true";

/// The product to deploy.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Product {
    /// The folder of manifests.
    pub manifests: PathBuf,
    /// The archive of the image in the manifests.
    pub image: PathBuf,
}

/// Deploys the product to all nodes, and waits until it is ready.
pub(super) fn deploy(
    product: &Product,
    kubectl: &Kubectl,
    nodes: &[Node],
    scratch: &Path,
) -> Result<()> {
    for node in nodes {
        node.import(&product.image)?;
    }
    let manifests = scratch.join("deploy");
    copy(&product.manifests, &manifests)?;
    fill_in(&manifests, nodes)?;
    identify(kubectl, nodes)?;
    // NodeRestriction forbids a kubelet to set this label itself.
    let cloud = nodes.first().context("no node")?;
    kubectl.run(&["label", "node", cloud.name, GATEWAY])?;
    let overlay = scratch.join("overlay");
    fs::create_dir_all(&overlay)?;
    fs::write(overlay.join("kustomization.yaml"), OVERLAY)?;
    kubectl.run(&["apply", "--kustomize", &overlay.display().to_string()])?;
    for daemon in DAEMONS {
        kubectl.rolled_out(NAMESPACE, &format!("daemonset/{daemon}"))?;
    }
    Ok(())
}

fn fill_in(manifests: &Path, nodes: &[Node]) -> Result<()> {
    let [cloud, _] = network::addresses(0);
    for (name, placeholder) in PLACEHOLDERS {
        change(&manifests.join(name), |text| {
            ensure!(text.contains(placeholder), "it names no {placeholder}");
            Ok(text.replace(placeholder, &cloud))
        })?;
    }
    let first = nodes.first().context("no node")?;
    for name in CONFIGS {
        change(&manifests.join(name), |text| Ok(text + &oddities(first)))?;
    }
    Ok(())
}

/// Returns the settings for two peculiarities: a node is not a complete machine here, and its Node has no
/// pod ranges. The settings are valid on every node.
fn oddities(node: &Node) -> String {
    format!(
        "bpf: {{ cgroup: {} }}\n\
         service: {{ detectLocal: ClusterCIDR, clusterCIDRs: [\"10.244.0.0/16\", \"fd00:244::/32\"] }}\n",
        node.shown.display()
    )
}

/// Creates the gateway's certificate as a Secret, and each agent's as files on its own node.
fn identify(kubectl: &Kubectl, nodes: &[Node]) -> Result<()> {
    let authority = Authority::new("tunnel")?;
    let gateway = authority.gateway(Validity::Current)?;
    let mut secret = format!(
        "apiVersion: v1\nkind: Secret\n\
         metadata: {{name: culvert-gateway, namespace: {NAMESPACE}}}\nstringData:\n"
    );
    for (name, text) in files(&authority, &gateway) {
        secret.push_str(&format!("  {name}: |\n"));
        for line in text.lines() {
            secret.push_str(&format!("    {line}\n"));
        }
    }
    kubectl.apply(&secret)?;
    for node in nodes.iter().filter(|node| node.is_edge()) {
        let agent = authority.agent(node.name, Validity::Current)?;
        let folder = node.own("/etc/culvert").join("identity");
        fs::create_dir_all(&folder)?;
        for (name, text) in files(&authority, &agent) {
            fs::write(folder.join(name), text)?;
        }
    }
    Ok(())
}

fn files(authority: &Authority, pair: &Pair) -> [(&'static str, String); 3] {
    [
        ("ca.pem", authority.pem()),
        ("cert.pem", pair.cert.clone()),
        ("key.pem", pair.key.clone()),
    ]
}

fn change(path: &Path, edit: impl FnOnce(String) -> Result<String>) -> Result<()> {
    let inner = || -> Result<()> {
        let text = edit(fs::read_to_string(path)?)?;
        Ok(fs::write(path, text)?)
    };
    inner().with_context(|| format!("cannot fill in {}", path.display()))
}

/// Copies a folder with its content.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
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
