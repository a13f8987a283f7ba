//! Objects as the API server sends them: complete, of a known kind.

use std::sync::Arc;

use k8s_openapi::{Metadata, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde::de::{DeserializeOwned, Error as _};
use serde_json::Value;

use super::{Invalid, Taken, endpoint_slice, typed};
use crate::model::{self, Kind, Object, ObjectId, ObjectName};

/// A type of the API server that Culvert reads.
pub trait Arriving: DeserializeOwned + Metadata<Ty = ObjectMeta> {
    /// The kind of the type.
    const READ_AS: Kind;

    /// Converts the object; `None` if Culvert does not serve it. The fields that are left out are pushed
    /// to `ignored`.
    ///
    /// # Errors
    ///
    /// Returns the first invalid field.
    fn read(self, name: ObjectName, ignored: &mut Vec<Invalid>) -> Result<Option<Object>, Invalid>;

    /// Converts the object, with the fields that are left out; `None` if Culvert does not serve it.
    ///
    /// # Errors
    ///
    /// Returns the first invalid field.
    fn take(self, name: ObjectName) -> Result<Option<Taken>, Invalid> {
        let mut ignored = Vec::new();
        let object = self.read(name, &mut ignored)?;
        Ok(object.map(|object| Taken { object, ignored }))
    }
}

/// The result of reading one object, without the fields that Culvert does not read.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrived {
    /// The ID of the object.
    pub id: ObjectId,
    /// The `resourceVersion` of the object.
    pub version: String,
    /// The uid, which distinguishes the object from earlier ones of its name, if it was sent.
    pub uid: Option<Arc<str>>,
    /// The name of the Service in the label of the object.
    pub owner: Option<Arc<str>>,
    /// The object; `None` if Culvert does not serve it.
    pub object: Result<Option<Taken>, Invalid>,
}

/// Reads an object that the API server sent.
///
/// # Errors
///
/// The text is no JSON, or contains no name.
pub fn arrived<K: Arriving>(json: &str) -> Result<Arrived, serde_json::Error> {
    let Ok(mut object) = serde_json::from_str::<K>(json) else {
        return misshapen::<K>(serde_json::from_str(json)?);
    };
    let metadata = object.metadata_mut();
    // Culvert doesn't read the managed fields; in a real cluster they are the larger part of many
    // objects.
    metadata.managed_fields = None;
    let version = metadata.resource_version.take().unwrap_or_default();
    let uid = metadata.uid.as_deref().map(Arc::from);
    let labels = metadata.labels.as_ref();
    let service = labels.and_then(|labels| labels.get(endpoint_slice::SERVICE_NAME));
    let owner = owner::<K>(service.map(String::as_str));
    let name = metadata.name.take().unwrap_or_default();
    let id = id::<K>(metadata.namespace.as_deref(), name);
    let name = id.name.clone();
    Ok(Arrived {
        id,
        version,
        uid,
        owner,
        object: object.take(name),
    })
}

fn id<K: Arriving>(namespace: Option<&str>, name: String) -> ObjectId {
    ObjectId {
        kind: K::READ_AS,
        name: ObjectName::new(model::namespace(namespace.unwrap_or_default()), name),
    }
}

/// Returns the Service that an object of this kind belongs to, by its label.
fn owner<K: Arriving>(service: Option<&str>) -> Option<Arc<str>> {
    let service = service.filter(|_| K::READ_AS == Kind::EndpointSlice);
    service.map(Arc::from)
}

/// Reads an object that does not have the shape of its kind, and returns its ID and the invalid field.
/// The error comes from the parsed value: it has no offset in the text, which would change with every
/// version of the object.
fn misshapen<K: Arriving>(value: Value) -> Result<Arrived, serde_json::Error> {
    let metadata = |field: &str| value.get("metadata")?.get(field);
    let text = |field| metadata(field).and_then(Value::as_str);
    let name = text("name").ok_or_else(|| serde_json::Error::missing_field("metadata.name"))?;
    let id = id::<K>(text("namespace"), name.to_owned());
    let service = metadata("labels").and_then(|labels| labels.get(endpoint_slice::SERVICE_NAME));
    Ok(Arrived {
        version: text("resourceVersion").unwrap_or_default().to_owned(),
        uid: text("uid").map(Arc::from),
        owner: owner::<K>(service.and_then(Value::as_str)),
        object: typed::<K>(value).and_then(|object| object.take(id.name.clone())),
        id,
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1;

    use super::*;

    fn service(spec: &str) -> Arrived {
        let json = r#""metadata": {"name": "a", "namespace": "shop", "resourceVersion": "7",
                     "managedFields": [{"manager": "m"}]}"#;
        let json = format!(r#"{{{json}, "spec": {spec}}}"#);
        let arrived = arrived::<v1::Service>(&json).expect("an object with a name");
        assert_eq!(arrived.id.to_string(), "Service shop/a");
        assert_eq!(arrived.version, "7");
        arrived
    }

    #[test]
    fn an_object_arrives_with_its_name_and_version_if_it_is_served() {
        let served = service(r#"{"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}"#);
        let taken = served.object.expect("good").expect("served");
        assert!(matches!(taken.object, Object::Service(_)));

        let other = service(r#"{"type": "ExternalName", "externalName": "b.example"}"#);
        assert_eq!(other.object, Ok(None));
    }

    #[test]
    fn an_object_of_another_shape_is_refused_by_name_and_field() {
        let arrived = service(r#"{"clusterIP": "10.96.0.1", "ports": [{"port": "http"}]}"#);

        let invalid = arrived.object.expect_err("a port is a number");
        assert_eq!(invalid.field, "spec.ports[0].port");
        let reason = invalid.reason.to_string();
        assert_eq!(reason, "invalid type: string \"http\", expected i32");
    }
}
