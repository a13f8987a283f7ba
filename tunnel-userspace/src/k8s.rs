//! Parses Kubernetes objects into the types in the `model` module. The error for an invalid object names the
//! invalid field. Objects that Culvert does not serve are skipped.

mod address;
mod config_map;
mod endpoint_slice;
mod json;
mod node;
mod pod;
mod received;
mod service;
mod service_cidr;

pub use json::parse_json;
use k8s_openapi::api::{core::v1, discovery::v1 as discovery, networking::v1 as networking};
pub use received::{ApiObject, ReceivedObject, parse_received};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tunnel_common::addr::Protocol;

use crate::{
    model::{self, Kind, Object, ObjectId, ObjectName},
    serde_message,
};

/// The domain that prefixes the names of Culvert's annotations and labels.
pub const ANNOTATION_DOMAIN: &str = "culvert.dev";

/// The result of parsing a manifest.
#[derive(Clone, Debug, PartialEq)]
pub enum Manifest {
    /// An object that Culvert uses.
    Object(ParsedObject),
    /// An object that Culvert does not serve: a headless Service, a Service that is assigned to another
    /// proxy, or an EndpointSlice without a Service.
    Skipped(ObjectId),
    /// A list of manifests, each with its own kind and `apiVersion`.
    List(Vec<Value>),
    /// An object whose kind Culvert does not read: its `apiVersion` and kind.
    Unknown(String),
}

/// A valid object. Optional fields that were invalid have been left out.
#[derive(Clone, Debug, PartialEq)]
pub struct ParsedObject {
    /// The object.
    pub object: Object,
    /// The errors in the fields that were ignored.
    pub ignored: Vec<FieldError>,
}

/// The error for a manifest that can't be used.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{}{field_error}", .id.as_ref().map(|id| format!("{id}: ")).unwrap_or_default())]
pub struct ParseError {
    /// The kind and name of the object, if they could be read.
    pub id: Option<ObjectId>,
    /// The field, and the error in it.
    #[source]
    pub field_error: FieldError,
}

/// An error in a field.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{}: {kind}", if .field.is_empty() { "manifest" } else { .field })]
pub struct FieldError {
    /// The path of the field, such as `spec.ports[0].port`; empty if the error concerns the whole object.
    pub field: String,
    /// The kind of error, with its details.
    pub kind: FieldErrorKind,
}

/// The kind of error in a field, with its details.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the variants")]
pub enum FieldErrorKind {
    #[error("is required")]
    Missing,
    #[error("is {found}, but must be {wanted}")]
    WrongType {
        found: &'static str,
        wanted: &'static str,
    },
    #[error("{found:?} is not {wanted}")]
    WrongForm { found: String, wanted: &'static str },
    #[error("{0}")]
    Deserialize(String),
    #[error("{found:?} is not supported for {kind}; use {expected}")]
    UnsupportedVersion {
        kind: Kind,
        found: String,
        expected: &'static str,
    },
    #[error("{0:?} is not a valid name: use at most 253 lower-case letters, digits, '-' or '.'")]
    InvalidName(String),
    #[error("{0} is not a port from 1 to 65535")]
    InvalidPort(i32),
    #[error("{0:?} is already used by an earlier port")]
    Duplicate(String),
    #[error("is required if there are several ports")]
    UnnamedPort,
    #[error("{0} is a second address of its IP family; only one of each family is allowed")]
    SecondOfFamily(String),
    #[error("{address} is not an {wanted} address, as addressType requires")]
    WrongFamily {
        address: String,
        wanted: &'static str,
    },
    #[error("{address} is {what}, which is not allowed here")]
    ForbiddenAddress { address: String, what: &'static str },
    #[error("{0} is missing from spec.clusterIPs")]
    NotAmongClusterIps(String),
    #[error("{0} is not a number of seconds from 1 to 86400")]
    InvalidTimeout(i32),
}

impl FieldErrorKind {
    /// Creates the error for a value of the wrong JSON type.
    const fn wrong_type(wanted: &'static str, found: &Value) -> Self {
        let found = match found {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Number(_) => "a number",
            Value::String(_) => "a string",
            Value::Array(_) => "a list",
            Value::Object(_) => "an object",
        };
        Self::WrongType { found, wanted }
    }

    /// Creates the error for text that is not in the required form.
    fn wrong_form(wanted: &'static str, found: &str) -> Self {
        let found = found.to_owned();
        Self::WrongForm { found, wanted }
    }
}

impl FieldError {
    /// Returns true if the field contains an address that Culvert never serves.
    const fn is_forbidden_address(&self) -> bool {
        matches!(self.kind, FieldErrorKind::ForbiddenAddress { .. })
    }

    fn new(field: impl Into<String>, kind: FieldErrorKind) -> Self {
        Self {
            field: field.into(),
            kind,
        }
    }
}

impl From<FieldError> for ParseError {
    fn from(error: FieldError) -> Self {
        Self {
            id: None,
            field_error: error,
        }
    }
}

/// Parses a manifest from a JSON value.
///
/// # Errors
///
/// Returns the error in the first invalid field, together with the object's ID if its kind and name could be
/// read.
pub fn parse(mut value: Value) -> Result<Manifest, ParseError> {
    let Value::Object(fields) = &mut value else {
        let kind = FieldErrorKind::wrong_type("an object", &value);
        return Err(FieldError::new("", kind).into());
    };
    let kind = required_string(fields, "kind", "kind")?.to_owned();
    if kind == "List" {
        return parse_list(fields, None);
    }
    let items = kind.strip_suffix("List");
    if let Some(items) = items.filter(|items| KindParser::for_kind(items).is_some()) {
        return parse_list(fields, Some(items));
    }
    let version = optional_string(fields, "apiVersion", "apiVersion")?
        .unwrap_or_default()
        .to_owned();
    let parser = KindParser::for_kind(&kind).filter(|_| !is_foreign_group(&version));
    let Some(parser) = parser else {
        let unknown = format!("{version} {kind}");
        return Ok(Manifest::Unknown(unknown.trim_start().to_owned()));
    };

    let id = parse_id(parser.kind, fields)?;
    let error = |error| ParseError {
        id: Some(id.clone()),
        field_error: error,
    };
    if version.is_empty() {
        return Err(error(FieldError::new(
            "apiVersion",
            FieldErrorKind::Missing,
        )));
    }
    if version != parser.api_version && Some(&*version) != parser.other_version {
        let kind = FieldErrorKind::UnsupportedVersion {
            kind: parser.kind,
            found: version,
            expected: parser.api_version,
        };
        return Err(error(FieldError::new("apiVersion", kind)));
    }
    fields.insert("apiVersion".to_owned(), Value::from(parser.api_version));
    // The UID in a file was exported along with the object, perhaps from a different cluster.
    if let Some(Value::Object(metadata)) = fields.get_mut("metadata") {
        metadata.remove("uid");
    }
    let parsed = (parser.parse_value)(id.name.clone(), value);
    to_manifest(id, parsed)
}

/// Turns the result of parsing an object into a manifest, or into an error that includes the object's ID.
fn to_manifest(
    id: ObjectId,
    parsed: Result<Option<ParsedObject>, FieldError>,
) -> Result<Manifest, ParseError> {
    match parsed {
        Ok(Some(parsed)) => Ok(Manifest::Object(parsed)),
        Ok(None) => Ok(Manifest::Skipped(id)),
        Err(error) => Err(ParseError {
            id: Some(id),
            field_error: error,
        }),
    }
}

/// The parser for one kind of object.
struct KindParser {
    kind: Kind,
    /// The kind, as spelt in manifests.
    name: &'static str,
    /// The `apiVersion` of the Kubernetes type.
    api_version: &'static str,
    /// Another `apiVersion` that is accepted because it has the same fields.
    other_version: Option<&'static str>,
    /// Parses a value. Returns `None` if Culvert does not serve the object.
    parse_value: fn(ObjectName, Value) -> Result<Option<ParsedObject>, FieldError>,
    /// Parses JSON text. Returns `None` if the text must be parsed as a value instead.
    parse_text: fn(&str) -> Option<Result<Manifest, ParseError>>,
}

static PARSERS: [KindParser; 6] = [
    KindParser::new::<v1::Service>(),
    KindParser::new::<discovery::EndpointSlice>(),
    KindParser::new::<v1::Node>(),
    KindParser::new::<v1::ConfigMap>(),
    KindParser::new::<v1::Pod>(),
    KindParser {
        other_version: Some("networking.k8s.io/v1beta1"),
        ..KindParser::new::<networking::ServiceCIDR>()
    },
];

impl KindParser {
    const fn new<T: ApiObject>() -> Self {
        Self {
            kind: T::MODEL_KIND,
            name: T::KIND,
            api_version: T::API_VERSION,
            other_version: None,
            parse_value: |name, value| deserialize::<T>(value)?.into_parsed(name),
            parse_text: json::parse_as::<T>,
        }
    }

    /// Returns the parser for a kind, or `None` if Culvert does not read that kind.
    fn for_kind(kind: &str) -> Option<&'static Self> {
        PARSERS.iter().find(|parser| parser.name == kind)
    }
}

/// Returns true if an `apiVersion` belongs to an API group that is not part of Kubernetes. Other groups may
/// reuse the names of Kubernetes kinds; Knative, for example, has its own Service.
fn is_foreign_group(version: &str) -> bool {
    version
        .split_once('/')
        .is_some_and(|(group, _)| group.contains('.') && !group.ends_with(".k8s.io"))
}

/// Collects the valid items, and appends the errors to `ignored`.
fn collect_valid<T>(
    results: impl IntoIterator<Item = Result<T, FieldError>>,
    ignored: &mut Vec<FieldError>,
) -> Vec<T> {
    let results = results.into_iter();
    // `collect` would reuse the allocation of `results`, whose elements are larger than the valid items.
    let mut valid = Vec::with_capacity(results.size_hint().0);
    for result in results {
        match result {
            Ok(item) => valid.push(item),
            Err(error) => ignored.push(error),
        }
    }
    valid
}

/// Parses a list. The items of a typed list inherit the list's kind and version, since the API server omits
/// both from items.
fn parse_list(fields: &mut Map<String, Value>, kind: Option<&str>) -> Result<Manifest, ParseError> {
    let version = fields.get("apiVersion").cloned();
    let mut items = match fields.remove("items") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(items)) => items,
        Some(other) => {
            return Err(
                FieldError::new("items", FieldErrorKind::wrong_type("a list", &other)).into(),
            );
        }
    };
    if let (Some(kind), Some(version)) = (kind, version) {
        for item in items.iter_mut().filter_map(Value::as_object_mut) {
            item.entry("kind").or_insert_with(|| Value::from(kind));
            item.entry("apiVersion").or_insert_with(|| version.clone());
        }
    }
    Ok(Manifest::List(items))
}

/// Parses an object's namespace and name, and returns its ID.
fn parse_id(kind: Kind, fields: &Map<String, Value>) -> Result<ObjectId, FieldError> {
    let metadata = match fields.get("metadata") {
        None | Some(Value::Null) => {
            return Err(FieldError::new("metadata.name", FieldErrorKind::Missing));
        }
        Some(Value::Object(metadata)) => metadata,
        Some(other) => {
            let kind = FieldErrorKind::wrong_type("an object", other);
            return Err(FieldError::new("metadata", kind));
        }
    };
    let name = required_string(metadata, "name", "metadata.name")?;
    let namespace = match kind {
        Kind::Node | Kind::ServiceCidr => None,
        Kind::Service | Kind::EndpointSlice | Kind::ConfigMap | Kind::Pod => {
            optional_string(metadata, "namespace", "metadata.namespace")?
        }
    };
    object_id(kind, name, namespace)
}

/// Validates an object's name and namespace, and returns its ID. For cluster-scoped kinds, the namespace is
/// ignored.
fn object_id(kind: Kind, name: &str, namespace: Option<&str>) -> Result<ObjectId, FieldError> {
    let is_name = |name: &str| {
        name.len() <= 253
            && name
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
    };
    let namespace = match kind {
        Kind::Node | Kind::ServiceCidr => "",
        Kind::Service | Kind::EndpointSlice | Kind::ConfigMap | Kind::Pod => {
            namespace.unwrap_or("default")
        }
    };
    for (field, text) in [("metadata.name", name), ("metadata.namespace", namespace)] {
        if !is_name(text) {
            return Err(FieldError::new(
                field,
                FieldErrorKind::InvalidName(text.to_owned()),
            ));
        }
    }
    Ok(ObjectId {
        kind,
        name: ObjectName::new(model::intern_namespace(namespace), name),
    })
}

/// Returns the value of a required string field.
fn required_string<'a>(
    fields: &'a Map<String, Value>,
    key: &str,
    path: &str,
) -> Result<&'a str, FieldError> {
    optional_string(fields, key, path)?
        .ok_or_else(|| FieldError::new(path, FieldErrorKind::Missing))
}

/// Returns the value of an optional string field, or `None` if it is missing or empty.
fn optional_string<'a>(
    fields: &'a Map<String, Value>,
    key: &str,
    path: &str,
) -> Result<Option<&'a str>, FieldError> {
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then_some(text)),
        Some(other) => Err(FieldError::new(
            path,
            FieldErrorKind::wrong_type("a string", other),
        )),
    }
}

/// Deserialises a value into a Kubernetes type.
fn deserialize<T: DeserializeOwned>(value: Value) -> Result<T, FieldError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { "" } else { &path };
        let message = serde_message::reword(&error.into_inner().to_string());
        FieldError::new(field, FieldErrorKind::Deserialize(message))
    })
}

/// Validates a port number.
fn parse_port(number: i32, field: impl FnOnce() -> String) -> Result<u16, FieldError> {
    u16::try_from(number)
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| FieldError::new(field(), FieldErrorKind::InvalidPort(number)))
}

/// Parses a protocol, which defaults to TCP.
fn parse_protocol(
    name: Option<&str>,
    field: impl FnOnce() -> String,
) -> Result<Protocol, FieldError> {
    match name {
        None | Some("" | "TCP") => Ok(Protocol::TCP),
        Some("UDP") => Ok(Protocol::UDP),
        Some("SCTP") => Ok(Protocol::SCTP),
        Some(other) => Err(FieldError::new(
            field(),
            FieldErrorKind::wrong_form("TCP, UDP or SCTP", other),
        )),
    }
}

#[cfg(test)]
mod tests;
