//! A manifest from its text as JSON. Nearly all are complete and right, and are read as what they
//! are, which takes a third of the time and memory of reading them as values first; the others are
//! read once more for an error that says what is wrong.

use std::borrow::Cow;

use k8s_openapi::api::{core::v1, discovery::v1 as discovery, networking::v1 as networking};
use serde::Deserialize;
use serde_json::Value;

use super::{Arriving, Invalid, Manifest, Refused, Taken, known, named, parse};
use crate::model::{Kind, ObjectName};

/// As much of a manifest as is needed to say what it is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head<'a> {
    #[serde(borrow)]
    api_version: Cow<'a, str>,
    #[serde(borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    metadata: Named<'a>,
}

#[derive(Debug, Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    namespace: Option<Cow<'a, str>>,
}

/// Reads one manifest: as [`parse`] does from its value.
///
/// # Errors
///
/// It is no JSON; the inner error is that of [`parse`].
pub fn parse_json(text: &str) -> serde_json::Result<Result<Manifest, Refused>> {
    match complete(text) {
        Some(manifest) => Ok(manifest),
        None => serde_json::from_str::<Value>(text).map(parse),
    }
}

/// A manifest that is complete and of the right types; nothing if it is not.
fn complete(text: &str) -> Option<Result<Manifest, Refused>> {
    let head = serde_json::from_str::<Head<'_>>(text).ok()?;
    let (kind, [version, _]) = known(&head.kind)?;
    let (name, namespace) = (&*head.metadata.name, head.metadata.namespace.as_deref());
    if head.api_version != *version || name.is_empty() || namespace == Some("") {
        return None;
    }
    let id = named(kind, name, namespace).ok()?;
    let name = id.name.clone();
    let taken = match kind {
        Kind::Service => taken::<v1::Service>(text, name),
        Kind::EndpointSlice => taken::<discovery::EndpointSlice>(text, name),
        Kind::Node => taken::<v1::Node>(text, name),
        Kind::ConfigMap => taken::<v1::ConfigMap>(text, name),
        Kind::ServiceCidr => taken::<networking::ServiceCIDR>(text, name),
    };
    Some(match taken? {
        Ok(Some(taken)) => Ok(Manifest::Object(taken)),
        Ok(None) => Ok(Manifest::Skipped(id)),
        Err(invalid) => Err(Refused {
            id: Some(id),
            invalid,
        }),
    })
}

/// What came of an object; nothing if it is none of that type.
fn taken<T: Arriving>(text: &str, name: ObjectName) -> Option<Result<Option<Taken>, Invalid>> {
    let mut object = serde_json::from_str::<T>(text).ok()?;
    // In a file it is that of an object that was exported, perhaps from another cluster.
    object.metadata_mut().uid = None;
    Some(object.read(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Manifests, each with whether it is complete.
    const MANIFESTS: [(&str, bool); 15] = [
        (
            r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","uid":"1-2","namespace":"shop"},
                "spec":{"clusterIP":"10.96.0.1","clusterIPs":["10.96.0.1","fd00::1"],"ports":[{"port":80}]}}"#,
            true,
        ),
        (
            r#"{"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1","metadata":{"name":"web-1",
                "labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv6",
                "ports":[{"port":8080}],"endpoints":[{"addresses":["fd00::7"]}]}"#,
            true,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"headless"},"spec":{"clusterIP":"None"}}"#,
            true,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},
                "spec":{"clusterIP":"fd00::1","ports":[{"port":0}]}}"#,
            true,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"edge\u002d1","namespace":"no"}}"#,
            true,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"ports":[{"port":"80"}]}}"#,
            false,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"No"}}"#,
            false,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":""}}"#,
            false,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Node","metadata":null}"#,
            false,
        ),
        (
            r#"{"apiVersion":"v2","kind":"Node","metadata":{"name":"a"}}"#,
            false,
        ),
        (
            r#"{"apiVersion":"serving.knative.dev/v1","kind":"Service","metadata":{"name":"a"}}"#,
            false,
        ),
        (
            r#"{"apiVersion":"networking.k8s.io/v1beta1","kind":"ServiceCIDR","metadata":{"name":"a"}}"#,
            false,
        ),
        (
            r#"{"apiVersion":"v1","kind":"List","items":[{"kind":"Pod"}]}"#,
            false,
        ),
        (
            r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"a","namespace":7}}"#,
            false,
        ),
        (r#"[1, 2]"#, false),
    ];

    #[test]
    fn text_is_read_as_its_value_is() {
        for (text, is_complete) in MANIFESTS {
            let value = serde_json::from_str(text).expect("JSON");

            assert_eq!(complete(text).is_some(), is_complete, "{text}");
            assert_eq!(parse_json(text).expect("JSON"), parse(value), "{text}");
        }
        parse_json("{").expect_err("no JSON");
    }
}
