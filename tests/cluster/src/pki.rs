//! Creates a cluster's certificate authority, and the certificates, keys and kubeconfigs that depend on it.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use tunnel_tests::pki::{self, Authority, CertifiedKey, Validity};

use super::network::{self, NODES};

/// The API server's users other than the nodes, each as the stem of its file names, its user name and its
/// group.
const USERS: [(&str, &str, &str); 5] = [
    ("admin", "admin", "system:masters"),
    ("apiserver-kubelet", "kube-apiserver-kubelet-client", "api"),
    ("controllers", "system:kube-controller-manager", "control"),
    ("scheduler", "system:kube-scheduler", "control"),
    ("proxy", "system:kube-proxy", "proxies"),
];

/// The names in the API server's certificate.
const API_SERVER_NAMES: [&str; 5] = [
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
];
/// The addresses in the API server's certificate, in addition to those of its node.
const API_SERVER_ADDRESSES: [&str; 3] = ["127.0.0.1", "10.96.0.1", "fd00:10:96::1"];

/// The directory that contains a cluster's certificates, keys and kubeconfigs.
#[derive(Debug)]
pub(super) struct Pki {
    directory: PathBuf,
    authority: Authority,
}

impl Pki {
    /// Creates the files for a cluster.
    pub(super) fn create(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let pki = Self {
            directory: directory.to_owned(),
            authority: Authority::new("cluster")?,
        };
        let authority = &pki.authority;
        pki.write("ca.crt", &authority.pem())?;
        pki.write("ca.key", &authority.key_pem())?;
        let [private, public] = pki::key_pair()?;
        pki.write("accounts.key", &private)?;
        pki.write("accounts.pub", &public)?;

        let mut addresses = network::ip_addresses(0)?;
        for address in API_SERVER_ADDRESSES {
            addresses.push(address.parse::<IpAddr>()?);
        }
        let key = authority.named_server(&API_SERVER_NAMES, &addresses)?;
        pki.write_key("apiserver", &key)?;
        for (number, (name, _)) in NODES.into_iter().enumerate() {
            let key = authority.named_server(&[name], &network::ip_addresses(number)?)?;
            pki.write_key(&format!("kubelet-{name}"), &key)?;
            let user = format!("system:node:{name}");
            pki.write_user(name, &user, "system:nodes")?;
        }
        for (stem, user, group) in USERS {
            pki.write_user(stem, user, group)?;
        }
        Ok(pki)
    }

    /// Returns the path of a file in the directory.
    pub(super) fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Writes a certificate and its key.
    fn write_key(&self, stem: &str, key: &CertifiedKey) -> Result<()> {
        self.write(&format!("{stem}.crt"), &key.cert)?;
        self.write(&format!("{stem}.key"), &key.key)
    }

    /// Writes a user's certificate, key and kubeconfig.
    pub(super) fn write_user(&self, stem: &str, user: &str, group: &str) -> Result<()> {
        self.write_key(
            stem,
            &self.authority.client(user, group, Validity::Current)?,
        )?;
        self.write(&format!("{stem}.kubeconfig"), &self.kubeconfig(stem))
    }

    fn kubeconfig(&self, stem: &str) -> String {
        let [server, _] = network::addresses(0);
        let (ca, cert, key) = (
            self.file("ca.crt"),
            self.file(&format!("{stem}.crt")),
            self.file(&format!("{stem}.key")),
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
