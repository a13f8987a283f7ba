//! Describes the values that a field may have, for errors in which serde names only a type.

use serde_json::Value;

use super::{numeric_ranges::MAX_ENTRIES, schema, service};
use crate::model::Algorithm;

/// Replaces the type that a refused value must have by the values that its field may have, if these are known.
pub(super) fn reword(field: &str, reason: String) -> String {
    let Some((found, wanted)) = reason.rsplit_once(MUST_BE) else {
        return reason;
    };
    match allowed_values(field, wanted) {
        Some(allowed) => format!("{found}{MUST_BE}{allowed}"),
        None => reason,
    }
}

const MUST_BE: &str = ", but must be ";

/// The type that serde names for an enum.
const ENUM: &str = "string or map";

fn allowed_values(field: &str, wanted: &str) -> Option<String> {
    let parent = field.rsplit_once(['.', '[']);
    Some(match (field, parent) {
        ("mode", _) => service::MODES.to_owned(),
        ("service.algorithm", _) => Algorithm::FORM.to_owned(),
        ("service.namespaceShare", _) => "a percentage from 1 to 100, as in 50".to_owned(),
        ("service.localListeners", _) => "a list of user ids, as in [0]".to_owned(),
        (_, Some(("service.localListeners", _))) => {
            format!("a user id from 0 to {}", u32::MAX - 1)
        }
        (_, Some(("bpf.maps", _))) => format!("a number from 1 to {MAX_ENTRIES}"),
        _ if wanted == ENUM => words(field)?,
        _ => return None,
    })
}

/// Returns the words that a field with an enum may have.
fn words(field: &str) -> Option<String> {
    let schema = schema::value_of_config();
    let mut at = &schema;
    for name in field.split(['.', '[']) {
        let is_item = name.ends_with(']');
        at = if is_item {
            at.get("items")?
        } else {
            at.get("properties")?.get(name)?
        };
        // An optional field may also be null.
        let either = at.get("anyOf").and_then(Value::as_array);
        let value = either.and_then(|any| any.iter().find(|it| it["type"] != "null"));
        at = value.unwrap_or(at);
    }
    let words = at.get("oneOf")?.as_array()?.iter();
    let words = words.filter_map(|word| Some(format!("`{}`", word["const"].as_str()?)));
    let words: Vec<_> = words.collect();
    let (last, others) = words.split_last()?;
    Some(format!("{} or {last}", others.join(", ")))
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn an_error_about_a_type_names_the_field_the_value_and_the_allowed_values() {
        for (text, wanted) in [
            (
                "service: { namespaceShare: 50% }",
                "service.namespaceShare: is the string \"50%\", but must be a percentage from 1 to 100, as in 50",
            ),
            (
                "service: { namespaceShare: 256 }",
                "service.namespaceShare: is the integer 256, but must be a percentage from 1 to 100, as in 50",
            ),
            (
                "service: { namespaceShare: 101 }",
                "service.namespaceShare: must be from 1 to 100, but is 101",
            ),
            (
                "service: { localListeners: [-1] }",
                "service.localListeners[0]: is the integer -1, but must be a user id from 0 to 4294967294",
            ),
            (
                "service: { localListeners: [0, root] }",
                "service.localListeners[1]: is the string \"root\", but must be a user id from 0 to 4294967294",
            ),
            (
                "service: { localListeners: 65534 }",
                "service.localListeners: is the integer 65534, but must be a list of user ids, as in [0]",
            ),
            (
                "service: { nodeAddresses: true }",
                "service.nodeAddresses: is the boolean true, but must be `refuse` or `serve`",
            ),
            (
                "service: { detectLocal: [] }",
                "service.detectLocal: is a list, but must be `ClusterCIDR`, `NodeCIDR`, `BridgeInterface`, \
                 `InterfaceNamePrefix` or `None`",
            ),
            (
                "service: { algorithm: 1 }",
                "service.algorithm: is the integer 1, but must be random, weighted, ",
            ),
            (
                "mode: true",
                "mode: is the boolean true, but must be `auto` or `ebpf`",
            ),
            (
                "sockets: { terminate: [1] }",
                "sockets.terminate[0]: is the integer 1, but must be `udp` or `tcp`",
            ),
            (
                "tunnel: { steering: { onIngressDown: 5 } }",
                "tunnel.steering.onIngressDown: is the integer 5, but must be `refuse` or `pass`",
            ),
            (
                "log: { kernel: { program: connect4, level: 5 } }",
                "log.kernel.level: is the integer 5, but must be `error`, `warn`, `info`, `debug` or `trace`",
            ),
            (
                "bpf: { maps: { sharedTranslations: 99999999999 } }",
                "bpf.maps.sharedTranslations: is the integer 99999999999, but must be a number from 1 to 16777216",
            ),
            (
                "bpf: { maps: { sharedTranslations: 16777217 } }",
                "bpf.maps.sharedTranslations: must be from 1 to 16777216, but is 16777217",
            ),
            (
                "source: { file: { replacementDelay: \"301s\" } }",
                "source.file.replacementDelay: must be from 0s to 300s, but is 301s",
            ),
            (
                "source: { file: { replacementDelay: 300 } }",
                "source.file.replacementDelay: is the integer 300, but must be a duration with a unit",
            ),
        ] {
            let (field, reason) = Config::parse(text).expect_err(text);
            let error = format!("{field}: {reason}");
            assert!(error.starts_with(wanted), "{text}: {error}");
        }
    }
}
