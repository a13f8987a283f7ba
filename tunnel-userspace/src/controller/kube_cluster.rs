//! The objects of the cluster, on the API server.

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        certificates::v1::CertificateSigningRequest,
        core::v1::{ConfigMap, Node, ObjectReference, Secret},
        events::v1::Event,
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};

use super::{
    cluster::{Cluster, ClusterError, NodeEvent},
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
        let read = self.secrets().get(NAME).await;
        read.map_err(|error| self.of_ca(error, "Secret"))
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
        let requests = Api::<CertificateSigningRequest>::all(self.client.clone());
        let name = request.metadata.name.clone().unwrap_or_default();
        let params = PostParams::default();
        let written = requests.replace_subresource("approval", &name, &params, &request);
        written.await.map_err(converted)
    }

    async fn replace_status(&self, request: CertificateSigningRequest) -> Result<(), ClusterError> {
        let requests = Api::<CertificateSigningRequest>::all(self.client.clone());
        let name = request.metadata.name.clone().unwrap_or_default();
        let params = PostParams::default();
        let written = requests.replace_status(&name, &params, &request).await;
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

fn converted(error: kube::Error) -> ClusterError {
    if let kube::Error::Api(status) = &error
        && (status.is_conflict() || status.is_not_found())
    {
        return ClusterError::Conflict;
    }
    ClusterError::Failed(chain(&error))
}
