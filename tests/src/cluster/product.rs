//! The product on the nodes of a cluster: its manifests, with what differs here laid over them.

use std::path::Path;

use anyhow::Result;

use super::kubectl::Kubectl;
use crate::lab::Lab;

/// Applies the manifests in a folder.
pub(super) fn deploy(kubectl: &Kubectl, lab: &Lab, folder: &Path) -> Result<()> {
    let _folder = lab.folder();
    kubectl
        .run(&["apply", "-k", &folder.display().to_string()])
        .map(drop)
}
