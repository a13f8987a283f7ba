//! Parses a manifest from JSON text. Almost all manifests are complete and valid, so the text is first
//! deserialised directly into the Kubernetes type, which takes a third of the time and memory needed to parse
//! it into a [`Value`]. Only if this fails is the text parsed into a value, in order to report the invalid
//! field.

use std::fmt;

use serde::de::{Deserializer as _, IgnoredAny, MapAccess, Visitor};
use serde_json::{Deserializer, Value};

use super::{ApiObject, KindParser, Manifest, ParseError, object_id, parse, to_manifest};

/// The `apiVersion` and `kind` found in the text of a manifest.
#[derive(Default)]
struct TypeMeta<'a> {
    api_version: Option<&'a str>,
    kind: Option<&'a str>,
}

impl<'a> TypeMeta<'a> {
    /// Reads the text until both fields have been found. They usually come first.
    fn read(text: &'a str) -> Self {
        let mut meta = Self::default();
        // This usually returns an error, since the rest of the object is not read.
        let (Ok(()) | Err(_)) = Deserializer::from_str(text).deserialize_map(&mut meta);
        meta
    }
}

impl<'a> Visitor<'a> for &mut TypeMeta<'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while self.api_version.is_none() || self.kind.is_none() {
            match map.next_key::<&str>()? {
                Some("apiVersion") => self.api_version = Some(map.next_value()?),
                Some("kind") => self.kind = Some(map.next_value()?),
                Some(_) => {
                    map.next_value::<IgnoredAny>()?;
                }
                None => break,
            }
        }
        Ok(())
    }
}

/// Parses a manifest from JSON text. Gives the same result as deserialising the text to a [`Value`] and
/// calling [`parse`] with it.
///
/// # Errors
///
/// Returns an error if the text is not valid JSON. For the errors in the inner result, see [`parse`].
pub fn parse_json(text: &str) -> serde_json::Result<Result<Manifest, ParseError>> {
    match parse_complete(text) {
        Some(manifest) => Ok(manifest),
        None => serde_json::from_str::<Value>(text).map(parse),
    }
}

/// Parses a complete manifest. Returns `None` if a field is missing or has the wrong type.
fn parse_complete(text: &str) -> Option<Result<Manifest, ParseError>> {
    let TypeMeta { api_version, kind } = TypeMeta::read(text);
    let parser = KindParser::for_kind(kind?)?;
    // The version only has to be present; its value is checked when the Kubernetes type is deserialised.
    api_version?;
    (parser.parse_text)(text)
}

/// Parses an object. Returns `None` if a field has the wrong type or the name is invalid.
pub(super) fn parse_as<T: ApiObject>(text: &str) -> Option<Result<Manifest, ParseError>> {
    let mut object = serde_json::from_str::<T>(text).ok()?;
    let metadata = object.metadata_mut();
    // The UID in a file was exported along with the object, perhaps from a different cluster.
    metadata.uid = None;
    let name = metadata.name.as_deref().filter(|name| !name.is_empty())?;
    let namespace = metadata.namespace.as_deref();
    let namespace = namespace.filter(|namespace| !namespace.is_empty());
    let id = object_id(T::MODEL_KIND, name, namespace).ok()?;
    let parsed = object.into_parsed(id.name.clone());
    Some(to_manifest(id, parsed))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Complete manifests, which are deserialised directly into their types.
    const COMPLETE: [&str; 7] = [
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web","uid":"1-2","namespace":"shop"},
            "spec":{"clusterIP":"10.96.0.1","clusterIPs":["10.96.0.1","fd00::1"],"ports":[{"port":80}]}}"#,
        r#"{"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1","metadata":{"name":"web-1",
            "labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv6",
            "ports":[{"port":8080}],"endpoints":[{"addresses":["fd00::7"]}]}"#,
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"headless"},"spec":{"clusterIP":"None"}}"#,
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},
            "spec":{"clusterIP":"fd00::1","ports":[{"port":0}]}}"#,
        r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"edge\u002d1","namespace":"no"}}"#,
        r#"{"spec":{"clusterIP":"fd00::1","kind":"Node"},"metadata":{"name":"web"},"kind":"Service","apiVersion":"v1"}"#,
        r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":""}}"#,
    ];

    /// Incomplete or invalid manifests, which are parsed into values.
    const INCOMPLETE: [&str; 12] = [
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"ports":[{"port":"80"}]}}"#,
        r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"No"}}"#,
        r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":""}}"#,
        r#"{"apiVersion":"v1","kind":"Node","metadata":null}"#,
        r#"{"apiVersion":"v2","kind":"Node","metadata":{"name":"a"}}"#,
        r#"{"apiVersion":"serving.knative.dev/v1","kind":"Service","metadata":{"name":"a"}}"#,
        r#"{"apiVersion":"networking.k8s.io/v1beta1","kind":"ServiceCIDR","metadata":{"name":"a"}}"#,
        r#"{"apiVersion":"v1","kind":"List","items":[{"kind":"Pod"}]}"#,
        r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"a","namespace":7}}"#,
        r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"a"},"apiVersion":"v2"}"#,
        r#"{"kind":"Node","metadata":{"name":"a"}}"#,
        "[1, 2]",
    ];

    #[test]
    fn text_and_value_are_parsed_alike() {
        let complete_ones = COMPLETE.map(|text| (text, true));
        for (text, is_complete) in complete_ones
            .into_iter()
            .chain(INCOMPLETE.map(|text| (text, false)))
        {
            let value = serde_json::from_str(text).expect("JSON");

            assert_eq!(parse_complete(text).is_some(), is_complete, "{text}");
            assert_eq!(parse_json(text).expect("JSON"), parse(value), "{text}");
        }
        for no_json in ["{", r#"{"apiVersion":"v1","kind":"Node"} 7"#] {
            parse_json(no_json).expect_err("no JSON");
        }
    }
}
