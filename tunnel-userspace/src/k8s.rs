//! Parses Kubernetes objects into domain types. An invalid object is refused with the field that is
//! wrong; an object that Culvert does not serve is skipped.

mod address;
mod arrived;
mod config_map;
mod endpoint_slice;
mod json;
mod node;
mod service;
mod service_cidr;

pub use arrived::{Arrived, Arriving, arrived};
pub use json::parse_json;
use k8s_openapi::api::{core::v1, discovery::v1 as discovery, networking::v1 as networking};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tunnel_common::addr::Protocol;

use crate::model::{self, Kind, Object, ObjectId, ObjectName};

/// The domain of Culvert's own annotations and labels.
pub const ANNOTATION_DOMAIN: &str = "culvert.dev";

/// The result of parsing a manifest.
#[derive(Clone, Debug, PartialEq)]
pub enum Manifest {
    /// An object that Culvert uses.
    Object(Taken),
    /// An object of a kind that Culvert reads, but does not serve: a headless Service, another proxy's,
    /// an EndpointSlice without a Service.
    Skipped(ObjectId),
    /// Several manifests in one, each complete with its kind.
    List(Vec<Value>),
    /// A kind that Culvert doesn't read: its `apiVersion` and `kind`.
    Unknown(String),
}

/// A valid object, and its invalid fields, which are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Taken {
    /// The object.
    pub object: Object,
    /// The fields that are left out.
    pub ignored: Vec<Invalid>,
}

/// A manifest that was refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{}{invalid}", .id.as_ref().map(|id| format!("{id}: ")).unwrap_or_default())]
pub struct Refused {
    /// The object, if kind and name could be read.
    pub id: Option<ObjectId>,
    /// The error.
    #[source]
    pub invalid: Invalid,
}

/// A field, and its error.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{}: {reason}", if .field.is_empty() { "manifest" } else { .field })]
pub struct Invalid {
    /// The field as a path from the object, `spec.ports[0].port`; empty for the object itself.
    pub field: String,
    /// The error.
    pub reason: Reason,
}

/// The reason why a field is refused, or left out.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Reason {
    #[error("is required")]
    Missing,
    #[error("is not a set of fields")]
    NotAnObject,
    #[error("is not a list")]
    NotAList,
    #[error("is not text")]
    NotText,
    #[error("{found:?} is not {wanted}")]
    Not { found: String, wanted: &'static str },
    #[error("{0}")]
    Shape(String),
    #[error("is {found:?}, but {kind} is read as {expected}")]
    ApiVersion {
        kind: Kind,
        found: String,
        expected: &'static str,
    },
    #[error("{0:?} is not a name: at most 253 lower case letters, digits, '-' and '.'")]
    Name(String),
    #[error("{0} is not a port from 1 to 65535")]
    Port(i32),
    #[error("{0:?} is there twice")]
    Repeated(String),
    #[error("must be named, as there are several ports")]
    UnnamedPort,
    #[error("{0} is a second address of its family")]
    SecondOfFamily(String),
    #[error("{0} is not of the slice's address type")]
    OtherFamily(String),
    #[error("{address} is {what}, which can't be used here")]
    Unusable { address: String, what: &'static str },
    #[error("{0} is not one of spec.clusterIPs")]
    NotAmongClusterIps(String),
    #[error("{0} is not from 1 to 86400 seconds")]
    Timeout(i32),
}

impl Reason {
    /// Returns the reason for a text that differs from the expected form.
    fn not(wanted: &'static str, found: &str) -> Self {
        let found = found.to_owned();
        Self::Not { found, wanted }
    }
}

impl Invalid {
    fn new(field: impl Into<String>, reason: Reason) -> Self {
        Self {
            field: field.into(),
            reason,
        }
    }
}

impl From<Invalid> for Refused {
    fn from(invalid: Invalid) -> Self {
        Self { id: None, invalid }
    }
}

/// Reads one manifest.
///
/// # Errors
///
/// Returns the first invalid field, and the object if its kind and name could be read.
pub fn parse(mut value: Value) -> Result<Manifest, Refused> {
    let Some(fields) = value.as_object_mut() else {
        return Err(Invalid::new("", Reason::NotAnObject).into());
    };
    let kind = required(fields, "kind", "kind")?.to_owned();
    if kind == "List" {
        return list(fields, None);
    }
    let items = kind.strip_suffix("List");
    if let Some(items) = items.filter(|items| Reader::of(items).is_some()) {
        return list(fields, Some(items));
    }
    let version = text(fields, "apiVersion", "apiVersion")?
        .unwrap_or_default()
        .to_owned();
    let reader = Reader::of(&kind).filter(|_| !is_foreign(&version));
    let Some(reader) = reader else {
        let unknown = format!("{version} {kind}");
        return Ok(Manifest::Unknown(unknown.trim_start().to_owned()));
    };

    let id = identify(reader.kind, fields)?;
    let refuse = |invalid| Refused {
        id: Some(id.clone()),
        invalid,
    };
    if version.is_empty() {
        return Err(refuse(Invalid::new("apiVersion", Reason::Missing)));
    }
    if version != reader.version && Some(&*version) != reader.also {
        let reason = Reason::ApiVersion {
            kind: reader.kind,
            found: version,
            expected: reader.version,
        };
        return Err(refuse(Invalid::new("apiVersion", reason)));
    }
    fields.insert("apiVersion".to_owned(), Value::from(reader.version));
    // In a file, the uid is that of an exported object, perhaps from another cluster.
    if let Some(Value::Object(metadata)) = fields.get_mut("metadata") {
        metadata.remove("uid");
    }
    let read = (reader.value)(id.name.clone(), value);
    manifest(id, read)
}

/// Converts the result of reading an object to a manifest.
fn manifest(id: ObjectId, read: Result<Option<Taken>, Invalid>) -> Result<Manifest, Refused> {
    match read {
        Ok(Some(taken)) => Ok(Manifest::Object(taken)),
        Ok(None) => Ok(Manifest::Skipped(id)),
        Err(invalid) => Err(Refused {
            id: Some(id),
            invalid,
        }),
    }
}

/// The reader of one kind.
struct Reader {
    kind: Kind,
    /// The kind's name.
    name: &'static str,
    /// The `apiVersion` of the type that is used here.
    version: &'static str,
    /// A further accepted `apiVersion` with the same fields.
    also: Option<&'static str>,
    /// Reads the object; `None` if Culvert does not serve it.
    value: fn(ObjectName, Value) -> Result<Option<Taken>, Invalid>,
    /// Reads the object from its text; `None` if the manifest is not complete.
    json: fn(&str) -> Option<Result<Manifest, Refused>>,
}

static READERS: [Reader; 5] = [
    Reader::new::<v1::Service>(),
    Reader::new::<discovery::EndpointSlice>(),
    Reader::new::<v1::Node>(),
    Reader::new::<v1::ConfigMap>(),
    Reader {
        also: Some("networking.k8s.io/v1beta1"),
        ..Reader::new::<networking::ServiceCIDR>()
    },
];

impl Reader {
    const fn new<T: Arriving>() -> Self {
        Self {
            kind: T::READ_AS,
            name: T::KIND,
            version: T::API_VERSION,
            also: None,
            value: |name, value| typed::<T>(value)?.take(name),
            json: json::taken::<T>,
        }
    }

    /// Returns the reader of a kind.
    fn of(kind: &str) -> Option<&'static Self> {
        READERS.iter().find(|reader| reader.name == kind)
    }
}

/// Returns true if the API group is not Kubernetes' own: a kind of a known name is then a different one
/// (Knative has a Service, too).
fn is_foreign(version: &str) -> bool {
    version
        .split_once('/')
        .is_some_and(|(group, _)| group.contains('.') && !group.ends_with(".k8s.io"))
}

/// Collects the valid items; pushes the errors to `ignored`.
fn good<T>(
    read: impl IntoIterator<Item = Result<T, Invalid>>,
    ignored: &mut Vec<Invalid>,
) -> Vec<T> {
    let read = read.into_iter();
    // `collect` would reuse the allocation of the source items, which are larger.
    let mut good = Vec::with_capacity(read.size_hint().0);
    for one in read {
        match one {
            Ok(one) => good.push(one),
            Err(invalid) => ignored.push(invalid),
        }
    }
    good
}

/// Returns the items of a list. Items of a typed list get its kind and version, which the API server
/// omits from them.
fn list(fields: &mut Map<String, Value>, kind: Option<&str>) -> Result<Manifest, Refused> {
    let version = fields.get("apiVersion").cloned();
    let mut items = match fields.remove("items") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(Invalid::new("items", Reason::NotAList).into()),
    };
    if let (Some(kind), Some(version)) = (kind, version) {
        for item in items.iter_mut().filter_map(Value::as_object_mut) {
            item.entry("kind").or_insert_with(|| Value::from(kind));
            item.entry("apiVersion").or_insert_with(|| version.clone());
        }
    }
    Ok(Manifest::List(items))
}

/// Reads the name of an object.
fn identify(kind: Kind, fields: &Map<String, Value>) -> Result<ObjectId, Invalid> {
    let metadata = match fields.get("metadata") {
        None | Some(Value::Null) => return Err(Invalid::new("metadata.name", Reason::Missing)),
        Some(Value::Object(metadata)) => metadata,
        Some(_) => return Err(Invalid::new("metadata", Reason::NotAnObject)),
    };
    let name = required(metadata, "name", "metadata.name")?;
    let namespace = match kind {
        Kind::Node | Kind::ServiceCidr => None,
        Kind::Service | Kind::EndpointSlice | Kind::ConfigMap => {
            text(metadata, "namespace", "metadata.namespace")?
        }
    };
    named(kind, name, namespace)
}

/// Returns the ID of a kind, name and namespace; the namespace of a cluster-scoped kind is ignored.
fn named(kind: Kind, name: &str, namespace: Option<&str>) -> Result<ObjectId, Invalid> {
    let is_name = |name: &str| {
        name.len() <= 253
            && name
                .bytes()
                .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.'))
    };
    let namespace = match kind {
        Kind::Node | Kind::ServiceCidr => "",
        Kind::Service | Kind::EndpointSlice | Kind::ConfigMap => namespace.unwrap_or("default"),
    };
    for (field, text) in [("metadata.name", name), ("metadata.namespace", namespace)] {
        if !is_name(text) {
            return Err(Invalid::new(field, Reason::Name(text.to_owned())));
        }
    }
    Ok(ObjectId {
        kind,
        name: ObjectName::new(model::namespace(namespace), name),
    })
}

/// Returns a text field that must exist.
fn required<'a>(fields: &'a Map<String, Value>, key: &str, path: &str) -> Result<&'a str, Invalid> {
    text(fields, key, path)?.ok_or_else(|| Invalid::new(path, Reason::Missing))
}

/// Returns a text field that must not be empty, if it exists.
fn text<'a>(
    fields: &'a Map<String, Value>,
    key: &str,
    path: &str,
) -> Result<Option<&'a str>, Invalid> {
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then_some(text)),
        Some(_) => Err(Invalid::new(path, Reason::NotText)),
    }
}

/// Reads a value as one of Kubernetes' types.
fn typed<T: DeserializeOwned>(value: Value) -> Result<T, Invalid> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { "" } else { &path };
        Invalid::new(field, Reason::Shape(error.into_inner().to_string()))
    })
}

/// Returns a valid port number, from 1 to 65535.
fn port(number: i32, field: impl FnOnce() -> String) -> Result<u16, Invalid> {
    u16::try_from(number)
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| Invalid::new(field(), Reason::Port(number)))
}

/// Returns a protocol by its name; TCP if none is given.
fn protocol(name: Option<&str>, field: impl FnOnce() -> String) -> Result<Protocol, Invalid> {
    match name {
        None | Some("" | "TCP") => Ok(Protocol::TCP),
        Some("UDP") => Ok(Protocol::UDP),
        Some("SCTP") => Ok(Protocol::SCTP),
        Some(other) => Err(Invalid::new(
            field(),
            Reason::not("TCP, UDP or SCTP", other),
        )),
    }
}

#[cfg(test)]
mod tests;
