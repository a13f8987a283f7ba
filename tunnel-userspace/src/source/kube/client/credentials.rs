//! Reads the kubeconfig and the credentials for the API server, and detects when these files change, as
//! happens when the kubelet renews its certificate.

use std::{collections::BTreeMap, path::PathBuf};

use kube::config::{Config, KubeConfigOptions, Kubeconfig, KubeconfigError};

use super::{AccessError, KubeSettings};
use crate::source::fingerprint::{Fingerprint, fingerprint};

/// The files that hold a pod's service account credentials; kube-client reads the same ones
/// (`config/incluster_config.rs`).
const POD_FILES: [&str; 2] = [
    "/var/run/secrets/kubernetes.io/serviceaccount/token",
    "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
];

/// Each file's fingerprint from just before it was last read; `None` if the file could not be reached.
#[derive(Clone, Debug, Default)]
pub(super) struct CredentialFiles(BTreeMap<PathBuf, Option<Fingerprint>>);

impl CredentialFiles {
    /// Records the current fingerprint of a file.
    fn record(&mut self, path: impl Into<PathBuf>) {
        let path = path.into();
        let fingerprint = fingerprint(&path);
        self.0.insert(path, fingerprint);
    }

    /// Returns true if any of the files has changed since it was last read.
    pub(super) fn have_changed(&self) -> bool {
        let mut files = self.0.iter();
        files.any(|(path, seen)| fingerprint(path) != *seen)
    }

    /// Reads the files. Each fingerprint is taken before its file is read, so that a change during the read
    /// is noticed later.
    pub(super) async fn read(&mut self, settings: &KubeSettings) -> Result<Config, AccessError> {
        self.0.clear();
        let mut config = match &settings.kubeconfig {
            Some(path) => {
                let failed = |source| {
                    let path = path.clone();
                    if matches!(source, KubeconfigError::CurrentContextNotSet) {
                        return AccessError::NoContext { path };
                    }
                    let source = Box::new(source);
                    AccessError::Kubeconfig { path, source }
                };
                self.record(path);
                let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
                referenced_files(&kubeconfig).for_each(|path| self.record(path));
                Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                    .await
                    .map_err(failed)?
            }
            None => {
                POD_FILES.into_iter().for_each(|path| self.record(path));
                Config::incluster().map_err(|source| AccessError::InCluster(Box::new(source)))?
            }
        };
        config.connect_timeout = Some(settings.connect_timeout);
        Ok(config)
    }
}

/// Returns the paths of all files that a kubeconfig refers to.
fn referenced_files(kubeconfig: &Kubeconfig) -> impl Iterator<Item = &String> {
    let clusters = kubeconfig.clusters.iter();
    let authorities = clusters
        .flat_map(|named| &named.cluster)
        .flat_map(|cluster| &cluster.certificate_authority);
    let users = kubeconfig.auth_infos.iter();
    let of_users = users.flat_map(|named| &named.auth_info).flat_map(|user| {
        [&user.client_certificate, &user.client_key, &user.token_file]
            .into_iter()
            .flatten()
    });
    authorities.chain(of_users)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_replacement_of_any_file_of_a_kubeconfig_is_detected() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["ca", "cert", "key", "token"].map(|name| directory.path().join(name));
        let [ca, cert, key, token] = paths.each_ref().map(|path| path.display());
        let text = format!(
            "clusters: [{{name: a, cluster: {{server: 'https://a', certificate-authority: {ca}}}}}]\n\
             users:\n\
             - name: a\n\
             \x20 user: {{client-certificate: {cert}, client-key: {key}, tokenFile: {token}}}\n"
        );
        let kubeconfig = Kubeconfig::from_yaml(&text).unwrap();
        // The key does not exist yet, as happens when the certificate is written first.
        for path in [&paths[0], &paths[1], &paths[3]] {
            fs::write(path, "old").unwrap();
        }

        for path in &paths {
            let mut files = CredentialFiles::default();
            referenced_files(&kubeconfig).for_each(|path| files.record(path));
            assert!(!files.have_changed());
            let draft = directory.path().join("draft");
            fs::write(&draft, "new").unwrap();
            fs::rename(&draft, path).unwrap();
            assert!(files.have_changed(), "{}", path.display());
        }
    }
}
