//! Keeps the CA in its Secret and the trusted CAs in their ConfigMap.

use std::sync::Arc;

use k8s_openapi::{ByteString, api::core::v1::Secret};
use tracing::info;

use super::{
    ca_state::{self, CaData, CaSettings, CaStateError, Plan},
    cluster::{Cluster, ClusterError},
};
use crate::identity::ca::Authority;

/// The annotation of the Secret that asks for a new CA.
pub const RENEW: &str = "culvert.dev/renew";

/// The key in the ConfigMap.
pub const TRUST_KEY: &str = "ca.pem";

/// The maximum number of changes in one call. Each call makes at most three, and the others are left for conflicts.
const MAX_CHANGES: usize = 8;

/// The error from a call.
#[derive(Debug, thiserror::Error)]
pub enum CaKeeperError {
    /// The Secret can't be used.
    #[error(transparent)]
    State(#[from] CaStateError),
    /// A read or write failed.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// Other controllers change the objects all the time.
    #[error("the CA was changed by other clients {MAX_CHANGES} times in a row")]
    Contended,
}

/// Makes the changes that are due, and returns the CA that signs. All ends trust it: its certificate is in the ConfigMap.
///
/// # Errors
///
/// Returns an error if the objects can't be read or written, or the Secret can't be used.
pub async fn keep<C: Cluster>(
    cluster: &C,
    settings: &CaSettings,
) -> Result<Arc<Authority>, CaKeeperError> {
    for _ in 0..MAX_CHANGES {
        // The ConfigMap is read first. If it is written, it had not changed since, so the Secret was not older than what the
        // ConfigMap contained.
        let mut map = cluster.trust().await?;
        let secret = cluster.ca().await?;
        let annotations = secret.metadata.annotations.as_ref();
        let must_renew = annotations.is_some_and(|it| it.contains_key(RENEW));
        let data = data_of(&secret);
        let published = map.data.iter().flat_map(|values| values.get(TRUST_KEY));
        let published = published.cloned().collect::<String>();
        let plan = ca_state::plan(&data, must_renew, &published, settings, cluster.now())?;
        match plan {
            Plan::Replace {
                data,
                why,
                is_renewal,
            } => {
                let changed = with_data(secret, data, is_renewal);
                if was_written(cluster.replace_ca(changed).await)? {
                    info!(why, "the CA was changed");
                }
            }
            Plan::Use { authority, trust } => {
                let values = map.data.get_or_insert_default();
                if values.get(TRUST_KEY) == Some(&trust) {
                    return Ok(Arc::from(authority));
                }
                values.insert(TRUST_KEY.to_owned(), trust);
                if was_written(cluster.replace_trust(map).await)? {
                    info!("the trusted CAs were published");
                }
            }
        }
    }
    Err(CaKeeperError::Contended)
}

/// Returns false if another controller was faster.
fn was_written(written: Result<(), ClusterError>) -> Result<bool, ClusterError> {
    match written {
        Err(ClusterError::Conflict) => Ok(false),
        other => other.map(|()| true),
    }
}

fn data_of(secret: &Secret) -> CaData {
    let values = secret.data.iter().flatten();
    values
        .map(|(key, value)| (key.clone(), value.0.clone()))
        .collect()
}

/// Returns the Secret with other data, and without the request for a new CA if this answers it.
fn with_data(mut secret: Secret, data: CaData, is_renewal: bool) -> Secret {
    if let Some(annotations) = secret.metadata.annotations.as_mut().filter(|_| is_renewal) {
        annotations.remove(RENEW);
    }
    let values = data.into_iter();
    secret.data = Some(
        values
            .map(|(key, value)| (key, ByteString(value)))
            .collect(),
    );
    secret
}
