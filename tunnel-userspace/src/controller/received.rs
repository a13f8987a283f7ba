//! Requests for certificates as the API server sends them, and the calls that return them. Whoever creates a request decides about
//! most of its metadata, so only the fields that are used are read, and a request that can't be read stops no other.

use std::collections::BTreeMap;

use futures_util::Stream;
use k8s_openapi::{
    api::certificates::v1::{
        CertificateSigningRequest, CertificateSigningRequestSpec, CertificateSigningRequestStatus,
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{
    Client, Resource as _,
    api::{ListParams, ObjectMeta, PostParams, WatchEvent, WatchParams},
    core::{ObjectList, Request},
};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// The maximum size in bytes of labels, annotations and the like. A request with more loses all of them.
const MAX_METADATA: usize = 16 * 1024;

/// A request for a certificate, or the error if it can't be read.
#[derive(Clone, Debug)]
pub(super) struct Received(pub(super) Result<CertificateSigningRequest, Unreadable>);

/// The error for a request that can't be read.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the request {name} for a certificate can't be read: {problem}")]
pub(super) struct Unreadable {
    name: String,
    problem: String,
}

impl<'de> Deserialize<'de> for Received {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = Box::<RawValue>::deserialize(deserializer)?;
        Ok(Self(read(json.get())))
    }
}

/// The fields of a request that are used, or that a write must contain so that it changes nothing else. The API server keeps the
/// others, whatever a write contains.
#[derive(Deserialize)]
struct Fields {
    metadata: MetadataFields,
    spec: CertificateSigningRequestSpec,
    status: Option<CertificateSigningRequestStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct MetadataFields {
    name: Option<String>,
    generate_name: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    finalizers: Option<Vec<String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

/// The name of a request, whatever else it contains.
#[derive(Default, Deserialize)]
#[serde(default)]
struct NameFields {
    metadata: NameField,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NameField {
    name: String,
}

fn read(json: &str) -> Result<CertificateSigningRequest, Unreadable> {
    let fields: Fields = serde_json::from_str(json).map_err(|error| Unreadable {
        name: serde_json::from_str(json).map_or_else(
            |_| "without a name".to_owned(),
            |named: NameFields| named.metadata.name,
        ),
        problem: error.to_string(),
    })?;
    Ok(CertificateSigningRequest {
        metadata: fields.metadata.into(),
        spec: fields.spec,
        status: fields.status,
    })
}

impl MetadataFields {
    /// Returns the size of the fields in which the requester may write what it likes, in bytes.
    fn size(&self) -> usize {
        let maps = [&self.labels, &self.annotations].into_iter().flatten();
        let entries = maps.flatten().map(|(key, value)| key.len() + value.len());
        let finalizers = self.finalizers.iter().flatten().map(String::len);
        let owners = self.owner_references.iter().flatten();
        let owners = owners.map(|it| it.api_version.len() + it.kind.len() + it.name.len());
        entries.chain(finalizers).chain(owners).sum()
    }
}

impl From<MetadataFields> for ObjectMeta {
    fn from(fields: MetadataFields) -> Self {
        let is_small = fields.size() <= MAX_METADATA;
        let MetadataFields {
            name,
            generate_name,
            uid,
            resource_version,
            labels,
            annotations,
            finalizers,
            owner_references,
        } = fields;
        Self {
            name,
            generate_name,
            uid,
            resource_version,
            labels: labels.filter(|_| is_small),
            annotations: annotations.filter(|_| is_small),
            finalizers: finalizers.filter(|_| is_small),
            owner_references: owner_references.filter(|_| is_small),
            ..Self::default()
        }
    }
}

/// The requests for certificates on the API server.
#[derive(Clone)]
pub(super) struct Requests {
    client: Client,
}

impl Requests {
    pub(super) const fn new(client: Client) -> Self {
        Self { client }
    }

    fn endpoint() -> Request {
        Request::new(CertificateSigningRequest::url_path(&(), None))
    }

    /// Returns a page of the requests.
    pub(super) async fn list(&self, params: &ListParams) -> kube::Result<ObjectList<Received>> {
        let request = Self::endpoint().list(params);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request(request).await
    }

    /// Watches the requests, from a version on.
    pub(super) async fn watch(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> kube::Result<impl Stream<Item = kube::Result<WatchEvent<Received>>> + use<>> {
        let request = Self::endpoint().watch(params, version);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request_events(request).await
    }

    /// Writes a subresource of a request, and returns the request as written.
    pub(super) async fn replace(
        &self,
        subresource: &str,
        request: &CertificateSigningRequest,
    ) -> kube::Result<Received> {
        let name = request.metadata.name.as_deref().unwrap_or_default();
        let data = serde_json::to_vec(request).map_err(kube::Error::SerdeError)?;
        let params = PostParams::default();
        let request = Self::endpoint().replace_subresource(subresource, name, &params, data);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request(request).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a request with these metadata.
    fn request(metadata: &str) -> String {
        format!(
            r#"{{"metadata": {{"name": "a", "uid": "1", "resourceVersion": "7", {metadata}}},
                "spec": {{"signerName": "culvert.dev/tunnel-agent", "request": "YQ=="}}}}"#
        )
    }

    fn received(json: &str) -> Result<CertificateSigningRequest, Unreadable> {
        let received: Received = serde_json::from_str(json).expect("valid JSON");
        received.0
    }

    #[test]
    fn times_and_fields_of_others_stop_no_request() {
        let deep = "{\"f:a\":".repeat(1000) + "{}" + &"}".repeat(1000);
        let hostile = request(&format!(
            r#""labels": {{"app": "x"}}, "creationTimestamp": "9999-12-31T23:59:59Z", "managedFields":
               [{{"manager": "x", "time": "9999-12-31T23:59:59Z", "fieldsV1": {deep}}}]"#
        ));
        let page = format!(
            r#"{{"metadata": {{"resourceVersion": "9"}}, "items": [{hostile}, {{"metadata": {{"name": "b"}}, "spec": 1}}]}}"#
        );

        let page: ObjectList<Received> = serde_json::from_str(&page).expect("a list");

        let [first, second] = page.items.try_into().expect("two items");
        let metadata = first.0.expect("a request").metadata;
        assert_eq!(metadata.resource_version.as_deref(), Some("7"));
        assert_eq!(metadata.labels.map(|labels| labels.len()), Some(1));
        let error = second.0.expect_err("no specification").to_string();
        assert!(error.contains("the request b for"), "{error}");
        let event = format!(r#"{{"type": "ADDED", "object": {hostile}}}"#);
        let event: WatchEvent<Received> = serde_json::from_str(&event).expect("an event");
        assert!(matches!(event, WatchEvent::Added(Received(Ok(_)))));
    }

    #[test]
    fn metadata_that_are_too_large_are_left_out() {
        let with = |length| {
            request(&format!(
                r#""annotations": {{"a": "{}"}}"#,
                "x".repeat(length)
            ))
        };

        let small = received(&with(MAX_METADATA - 1))
            .expect("a request")
            .metadata;
        let large = received(&with(MAX_METADATA)).expect("a request").metadata;

        assert!(small.annotations.is_some());
        assert_eq!((large.annotations, large.uid.as_deref()), (None, Some("1")));
    }
}
