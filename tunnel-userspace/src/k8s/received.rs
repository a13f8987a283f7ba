//! Parses objects that the API server sends in lists and watches.

use std::sync::Arc;

use k8s_openapi::{Metadata, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::de::{DeserializeOwned, Error as _};
use serde_json::Value;

use super::{FieldError, ParsedObject, deserialize, endpoint_slice};
use crate::model::{self, Kind, Object, ObjectId, ObjectName};

/// A Kubernetes type that Culvert can convert to an [`Object`].
pub trait ApiObject: DeserializeOwned + Metadata<Ty = ObjectMeta> {
    /// The kind of the converted object.
    const MODEL_KIND: Kind;

    /// Converts the object. Returns `None` if Culvert does not serve it. The errors in ignored fields are
    /// appended to `ignored`.
    ///
    /// # Errors
    ///
    /// Returns the error in the first invalid field.
    fn into_model(
        self,
        name: ObjectName,
        ignored: &mut Vec<FieldError>,
    ) -> Result<Option<Object>, FieldError>;

    /// Converts the object, and returns it together with the errors in ignored fields. Returns `None` if
    /// Culvert does not serve the object.
    ///
    /// # Errors
    ///
    /// Returns the error in the first invalid field.
    fn into_parsed(self, name: ObjectName) -> Result<Option<ParsedObject>, FieldError> {
        let mut ignored = Vec::new();
        let object = self.into_model(name, &mut ignored)?;
        Ok(object.map(|object| ParsedObject { object, ignored }))
    }
}

/// An object received from the API server.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceivedObject {
    /// The ID of the object.
    pub id: ObjectId,
    /// The object's `resourceVersion`.
    pub version: String,
    /// The object's UID, which distinguishes it from earlier objects with the same name.
    pub uid: Option<Arc<str>>,
    /// The name of the Service that an EndpointSlice belongs to, from its label; `None` for other kinds.
    pub service: Option<Arc<str>>,
    /// The converted object, `None` if Culvert does not serve it, or the error in the first invalid field.
    pub object: Result<Option<ParsedObject>, FieldError>,
}

/// Parses an object received from the API server.
///
/// # Errors
///
/// Returns an error if the text is not valid JSON, or if it has no `metadata.name`.
pub fn parse_received<K: ApiObject>(json: &str) -> Result<ReceivedObject, serde_json::Error> {
    let Ok(mut object) = serde_json::from_str::<K>(json) else {
        return parse_malformed::<K>(serde_json::from_str(json)?);
    };
    let metadata = object.metadata_mut();
    // In many objects, managed fields make up most of the size, and Culvert does not use them.
    metadata.managed_fields = None;
    let version = metadata.resource_version.take().unwrap_or_default();
    let uid = metadata.uid.as_deref().map(Arc::from);
    let labels = metadata.labels.as_ref();
    let service = labels.and_then(|labels| labels.get(endpoint_slice::SERVICE_NAME_LABEL));
    let service = service_of_slice::<K>(service.map(String::as_str));
    let name = metadata.name.take().unwrap_or_default();
    let id = id::<K>(metadata.namespace.as_deref(), name);
    let name = id.name.clone();
    Ok(ReceivedObject {
        id,
        version,
        uid,
        service,
        object: object.into_parsed(name),
    })
}

fn id<K: ApiObject>(namespace: Option<&str>, name: String) -> ObjectId {
    ObjectId {
        kind: K::MODEL_KIND,
        name: ObjectName::new(model::intern_namespace(namespace.unwrap_or_default()), name),
    }
}

/// Returns the Service named in an EndpointSlice's label, or `None` for objects of other kinds.
fn service_of_slice<K: ApiObject>(service: Option<&str>) -> Option<Arc<str>> {
    let service = service.filter(|_| K::MODEL_KIND == Kind::EndpointSlice);
    service.map(Arc::from)
}

/// Parses an object in which a field has the wrong type, and returns its ID together with the error. The
/// error comes from deserialising the parsed value: an error from the text itself would contain a line and
/// column, which differ in each version of the object.
fn parse_malformed<K: ApiObject>(value: Value) -> Result<ReceivedObject, serde_json::Error> {
    let metadata = |field: &str| value.get("metadata")?.get(field);
    let text = |field| metadata(field).and_then(Value::as_str);
    let name = text("name").ok_or_else(|| serde_json::Error::missing_field("metadata.name"))?;
    let id = id::<K>(text("namespace"), name.to_owned());
    let service =
        metadata("labels").and_then(|labels| labels.get(endpoint_slice::SERVICE_NAME_LABEL));
    Ok(ReceivedObject {
        version: text("resourceVersion").unwrap_or_default().to_owned(),
        uid: text("uid").map(Arc::from),
        service: service_of_slice::<K>(service.and_then(Value::as_str)),
        object: deserialize::<K>(value).and_then(|object| object.into_parsed(id.name.clone())),
        id,
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1;

    use super::*;

    fn service(spec: &str) -> ReceivedObject {
        let json = r#""metadata": {"name": "a", "namespace": "shop", "resourceVersion": "7",
                     "managedFields": [{"manager": "m"}]}"#;
        let json = format!(r#"{{{json}, "spec": {spec}}}"#);
        let received = parse_received::<v1::Service>(&json).expect("an object with a name");
        assert_eq!(received.id.to_string(), "Service shop/a");
        assert_eq!(received.version, "7");
        received
    }

    #[test]
    fn an_object_is_parsed_with_its_name_and_version() {
        let served = service(r#"{"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}"#);
        let parsed = served.object.expect("good").expect("served");
        assert!(matches!(parsed.object, Object::Service(_)));

        let other = service(r#"{"type": "ExternalName", "externalName": "b.example"}"#);
        assert_eq!(other.object, Ok(None));
    }

    #[test]
    fn an_object_with_a_field_of_the_wrong_type_is_refused_with_name_and_field() {
        let received = service(r#"{"clusterIP": "10.96.0.1", "ports": [{"port": "http"}]}"#);

        let error = received.object.expect_err("a port is a number");
        assert_eq!(error.field, "spec.ports[0].port");
        let message = error.kind.to_string();
        assert_eq!(message, "is the string \"http\", but must be an integer");
    }
}
