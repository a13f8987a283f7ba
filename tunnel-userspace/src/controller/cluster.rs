//! The objects of the cluster that the controller reads and writes. Each write is conditional: it fails if the object has changed
//! since it was read, so that any number of controllers can work at once, and each can be stopped between any two writes.

use std::future::Future;

use jiff::Timestamp;
use k8s_openapi::api::{
    certificates::v1::CertificateSigningRequest,
    core::v1::{ConfigMap, Secret},
};

use super::table::NodeFacts;

/// The error from a read or a write.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The object has been changed, or removed, by another client since it was read.
    #[error("the object has been changed by another client")]
    Conflict,
    /// The object does not exist.
    #[error("{0} does not exist; it is in the manifests")]
    Missing(String),
    /// The request failed.
    #[error("a request to the API server failed: {0}")]
    Failed(String),
    /// The clock of this controller, or that of the API server, is wrong: the difference, in seconds.
    #[error("the clocks of this controller and of the API server differ by {0} s")]
    Clock(u64),
}

/// An Event about a Node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeEvent {
    /// The name of the Node.
    pub node: String,
    /// The reason: a word.
    pub reason: &'static str,
    /// The sentence.
    pub message: String,
    /// The role and reason. Another Event about the same Node with the same ones is left out.
    pub subject: String,
}

/// The objects of the cluster, and the time.
pub trait Cluster: Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Timestamp;

    /// Reads the Secret with the CA. Fails if this controller's clock is wrong, because all that is done with the CA depends on the
    /// time.
    fn ca(&self) -> impl Future<Output = Result<Secret, ClusterError>> + Send;

    /// Writes the Secret with the CA, which has been read before.
    fn replace_ca(&self, secret: Secret) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Reads the ConfigMap with the trusted CAs.
    fn trust(&self) -> impl Future<Output = Result<ConfigMap, ClusterError>> + Send;

    /// Writes the ConfigMap with the trusted CAs, which has been read before.
    fn replace_trust(
        &self,
        trust: ConfigMap,
    ) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Returns the facts about a Node, or `None` if there is none.
    fn node(
        &self,
        name: &str,
    ) -> impl Future<Output = Result<Option<NodeFacts>, ClusterError>> + Send;

    /// Writes the conditions of a request that approve or deny it, and returns the request as written.
    fn replace_approval(
        &self,
        request: CertificateSigningRequest,
    ) -> impl Future<Output = Result<CertificateSigningRequest, ClusterError>> + Send;

    /// Writes the certificate of a request, or the condition that there will be none.
    fn replace_status(
        &self,
        request: CertificateSigningRequest,
    ) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Creates an Event.
    fn report(&self, event: NodeEvent) -> impl Future<Output = Result<(), ClusterError>> + Send;
}
