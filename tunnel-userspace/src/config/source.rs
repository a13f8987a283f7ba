use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::FieldError;
use crate::source::{file, kube};

/// The sources of Kubernetes objects. If both sources have the same object, the one from the file is used.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct SourceConfig {
    /// A manifest file, or a directory of manifest files; enabled by default if no source is configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<file::FileSettings>,
    /// The cluster's API server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kube: Option<kube::KubeSettings>,
}

impl SourceConfig {
    /// Returns the settings for manifest files, if that source is enabled.
    #[must_use]
    pub fn file(&self) -> Option<file::FileSettings> {
        match (&self.file, &self.kube) {
            (None, None) => Some(file::FileSettings::default()),
            (file, _) => file.clone(),
        }
    }

    pub(super) fn check(&self) -> Result<(), FieldError> {
        let is_nameless = |file: file::FileSettings| file.path.as_os_str().is_empty();
        if self.file().is_some_and(is_nameless) {
            let reason = "is empty, but must be the path of a manifest file or of a directory";
            return Err(("source.file.path".to_owned(), reason.to_owned()));
        }
        Ok(())
    }

    /// Returns the file paths in this section.
    pub(super) fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let file = self.file.as_mut().map(|file| &mut file.path);
        let kubeconfig = self.kube.as_mut().and_then(|kube| kube.kubeconfig.as_mut());
        file.into_iter().chain(kubeconfig)
    }
}
