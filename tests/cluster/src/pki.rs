//! The cluster's certificates: one authority signs everything.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use tunnel_tests::pki::{self, Authority, Pair, Validity};

use super::network::{self, NODES};

/// Users of the API server other than nodes: file stem, name and group.
const USERS: [(&str, &str, &str); 5] = [
    ("admin", "admin", "system:masters"),
    ("apiserver-kubelet", "kube-apiserver-kubelet-client", "api"),
    ("controllers", "system:kube-controller-manager", "control"),
    ("scheduler", "system:kube-scheduler", "control"),
    ("proxy", "system:kube-proxy", "proxies"),
];

/// The names and addresses of the API server, in addition to those of its node.
const NAMES: [&str; 5] = [
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
];
const ADDRESSES: [&str; 3] = ["127.0.0.1", "10.96.0.1", "fd00:10:96::1"];

/// A folder of certificates, keys and client configs.
#[derive(Debug)]
pub(super) struct Pki {
    folder: PathBuf,
}

impl Pki {
    /// Creates all certificates of a cluster.
    pub(super) fn write(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let pki = Self {
            folder: folder.to_owned(),
        };
        let authority = Authority::new("cluster")?;
        pki.put("ca.crt", &authority.pem())?;
        pki.put("ca.key", &authority.key_pem())?;
        let [private, public] = pki::keys()?;
        pki.put("accounts.key", &private)?;
        pki.put("accounts.pub", &public)?;

        let mut addresses = network::ips(0)?;
        for address in ADDRESSES {
            addresses.push(address.parse::<IpAddr>()?);
        }
        pki.pair("apiserver", &authority.named_server(&NAMES, &addresses)?)?;
        for (number, (name, _)) in NODES.into_iter().enumerate() {
            let pair = authority.named_server(&[name], &network::ips(number)?)?;
            pki.pair(&format!("kubelet-{name}"), &pair)?;
            let user = format!("system:node:{name}");
            pki.user(&authority, name, &user, "system:nodes")?;
        }
        for (stem, user, group) in USERS {
            pki.user(&authority, stem, user, group)?;
        }
        Ok(pki)
    }

    /// Returns the path of a file in the folder.
    pub(super) fn file(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    fn put(&self, name: &str, text: &str) -> Result<()> {
        let path = self.folder.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn pair(&self, stem: &str, pair: &Pair) -> Result<()> {
        self.put(&format!("{stem}.crt"), &pair.cert)?;
        self.put(&format!("{stem}.key"), &pair.key)
    }

    /// Writes a user's certificate and client config.
    fn user(&self, authority: &Authority, stem: &str, user: &str, group: &str) -> Result<()> {
        self.pair(stem, &authority.client(user, group, Validity::Current)?)?;
        self.put(&format!("{stem}.kubeconfig"), &self.kubeconfig(stem))
    }

    fn kubeconfig(&self, user: &str) -> String {
        let [server, _] = network::addresses(0);
        let (ca, cert, key) = (
            self.file("ca.crt"),
            self.file(&format!("{user}.crt")),
            self.file(&format!("{user}.key")),
        );
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: it\n\
             clusters: [{{name: it, cluster: {{server: \"https://{server}:6443\", \
             certificate-authority: \"{ca}\"}}}}]\n\
             users: [{{name: it, user: {{client-certificate: \"{cert}\", client-key: \"{key}\"}}}}]\n\
             contexts: [{{name: it, context: {{cluster: it, user: it}}}}]\n"
        )
    }
}
