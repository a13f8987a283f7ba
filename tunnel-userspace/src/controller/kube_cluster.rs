//! The objects of the cluster, on the API server.

use http::header::DATE;
use jiff::{SignedDuration, Timestamp, fmt::rfc2822::DateTimeParser};
use k8s_openapi::{
    api::{
        certificates::v1::CertificateSigningRequest,
        core::v1::{ConfigMap, Node, ObjectReference, Secret},
        events::v1::Event,
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client, Resource as _,
    api::{GetParams, ObjectMeta, PostParams},
    client::Body,
    core::Request,
};

use super::{
    cluster::{Cluster, ClusterError, NodeEvent},
    received::{Received, Requests},
    table::NodeFacts,
};
use crate::{
    error_chain::chain,
    events::{hash, truncate},
};

/// The name of the Secret and of the ConfigMap.
const NAME: &str = "culvert-ca";
/// The controller that reports Events.
const REPORTING_CONTROLLER: &str = "culvert.dev/controller";
/// The largest difference between the clocks of this machine and of the API server with which certificates are issued.
const MAX_SKEW: SignedDuration = SignedDuration::from_mins(5);
/// The maximum length of an Event's note, in bytes (Kubernetes `pkg/apis/core/validation/events.go`).
const MAX_NOTE: usize = 1024;

/// The API server.
pub(super) struct KubeCluster {
    client: Client,
    namespace: String,
    /// The name of this controller.
    instance: String,
}

impl KubeCluster {
    pub(super) const fn new(client: Client, namespace: String, instance: String) -> Self {
        Self {
            client,
            namespace,
            instance,
        }
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Reads the Secret, and the time of the API server's clock.
    async fn read_secret(&self) -> kube::Result<(Secret, Option<String>)> {
        let request = Request::new(Secret::url_path(&(), Some(&self.namespace)));
        let request = request.get(NAME, &GetParams::default());
        let request = request.map_err(kube::Error::BuildRequest)?;
        let response = self.client.send(request.map(Body::from)).await?;
        let date = response.headers().get(DATE);
        let date = date.and_then(|date| date.to_str().ok()).map(str::to_owned);
        let is_success = response.status().is_success();
        let body = response.into_body().collect_bytes().await?;
        if is_success {
            let secret = serde_json::from_slice(&body).map_err(kube::Error::SerdeError)?;
            return Ok((secret, date));
        }
        let status = serde_json::from_slice(&body).map_err(kube::Error::SerdeError)?;
        Err(kube::Error::Api(status))
    }

    /// Converts the error of an access to one of the two objects with the CA.
    fn of_ca(&self, error: kube::Error, kind: &str) -> ClusterError {
        if let kube::Error::Api(status) = &error
            && status.is_not_found()
        {
            return ClusterError::Missing(format!("{kind} {}/{NAME}", self.namespace));
        }
        converted(error)
    }
}

impl Cluster for KubeCluster {
    fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    async fn ca(&self) -> Result<Secret, ClusterError> {
        let (secret, date) = self
            .read_secret()
            .await
            .map_err(|error| self.of_ca(error, "Secret"))?;
        check_clock(date.as_deref(), self.now())?;
        Ok(secret)
    }

    async fn replace_ca(&self, secret: Secret) -> Result<(), ClusterError> {
        let (secrets, params) = (self.secrets(), PostParams::default());
        let written = secrets.replace(NAME, &params, &secret).await;
        written
            .map(drop)
            .map_err(|error| self.of_ca(error, "Secret"))
    }

    async fn trust(&self) -> Result<ConfigMap, ClusterError> {
        let read = self.config_maps().get(NAME).await;
        read.map_err(|error| self.of_ca(error, "ConfigMap"))
    }

    async fn replace_trust(&self, trust: ConfigMap) -> Result<(), ClusterError> {
        let (maps, params) = (self.config_maps(), PostParams::default());
        let written = maps.replace(NAME, &params, &trust).await;
        written
            .map(drop)
            .map_err(|error| self.of_ca(error, "ConfigMap"))
    }

    async fn node(&self, name: &str) -> Result<Option<NodeFacts>, ClusterError> {
        let nodes = Api::<Node>::all(self.client.clone());
        let node = nodes.get_metadata_opt(name).await.map_err(converted)?;
        Ok(node.map(|node| NodeFacts {
            uid: node.metadata.uid.unwrap_or_default(),
            is_being_deleted: node.metadata.deletion_timestamp.is_some(),
        }))
    }

    async fn replace_approval(
        &self,
        request: CertificateSigningRequest,
    ) -> Result<CertificateSigningRequest, ClusterError> {
        let requests = Requests::new(self.client.clone());
        let written = requests.replace("approval", &request).await;
        let Received(written) = written.map_err(converted)?;
        written.map_err(|error| ClusterError::Failed(error.to_string()))
    }

    async fn replace_status(&self, request: CertificateSigningRequest) -> Result<(), ClusterError> {
        let requests = Requests::new(self.client.clone());
        let written = requests.replace("status", &request).await;
        written.map(drop).map_err(converted)
    }

    async fn report(&self, event: NodeEvent) -> Result<(), ClusterError> {
        // Events about objects without a namespace are in this one (client-go `tools/events/event_recorder.go`).
        let events = Api::<Event>::namespaced(self.client.clone(), "default");
        let event = Event {
            metadata: ObjectMeta {
                // Of Events that say the same about a Node, the API server keeps one.
                name: Some(format!("{}.{:016x}", event.node, hash(&event.subject))),
                namespace: Some("default".to_owned()),
                ..ObjectMeta::default()
            },
            action: Some("DenyCertificate".to_owned()),
            event_time: Some(MicroTime(self.now())),
            note: Some(truncate(&event.message, MAX_NOTE).to_owned()),
            reason: Some(event.reason.to_owned()),
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                // Events about Nodes use the Node's name as the UID, as the kubelet's Events do.
                uid: Some(event.node.clone()),
                name: Some(event.node),
                ..ObjectReference::default()
            }),
            reporting_controller: Some(REPORTING_CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some("Warning".to_owned()),
            ..Event::default()
        };
        let created = events.create(&PostParams::default(), &event).await;
        created.map(drop).map_err(converted)
    }
}

/// Compares this machine's clock with the date of a response of the API server (RFC 9110 section 6.6.1), if it has one.
fn check_clock(date: Option<&str>, now: Timestamp) -> Result<(), ClusterError> {
    let date = date.and_then(|date| DateTimeParser::new().parse_timestamp(date).ok());
    let difference = date.map(|date| now.duration_since(date).abs());
    match difference.filter(|difference| *difference > MAX_SKEW) {
        Some(difference) => Err(ClusterError::Clock(difference.as_secs().unsigned_abs())),
        None => Ok(()),
    }
}

fn converted(error: kube::Error) -> ClusterError {
    if let kube::Error::Api(status) = &error
        && (status.is_conflict() || status.is_already_exists() || status.is_not_found())
    {
        return ClusterError::Conflict;
    }
    ClusterError::Failed(chain(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_done_while_the_clock_differs_from_that_of_the_api_server() {
        let now = "2026-11-30T12:00:00Z".parse().expect("a time");
        let check = |date| check_clock(date, now);

        for date in [None, Some("later"), Some("Mon, 30 Nov 2026 12:04:59 GMT")] {
            assert!(check(date).is_ok(), "{date:?}");
        }
        for date in [
            "Mon, 30 Nov 2026 10:00:00 GMT",
            "Mon, 30 Nov 2026 12:05:01 GMT",
        ] {
            let error = check(Some(date)).expect_err("another time").to_string();
            assert!(error.contains("differ by"), "{error}");
        }
    }
}
