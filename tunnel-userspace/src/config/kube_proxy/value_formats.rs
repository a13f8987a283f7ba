//! Parses values in the formats that kube-proxy's config file uses: addresses, durations and defaults.

use std::net::{IpAddr, SocketAddr};

use jiff::SignedDuration;
use serde_json::Value;

/// Parses an IP address, with or without brackets.
pub(super) fn parse_ip(text: &str) -> Option<IpAddr> {
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    bare.unwrap_or(text).parse().ok()
}

/// Parses an IP address with an optional port, like kube-proxy's `AppendPortIfNeeded`
/// (`pkg/proxy/util/utils.go`). `port` is the default port.
pub(super) fn parse_address(text: &str, port: u16) -> Option<SocketAddr> {
    let with_port = text.parse().ok();
    with_port.or_else(|| Some(SocketAddr::new(parse_ip(text)?, port)))
}

/// Returns true if a value means the same as an absent field: null, one of `defaults` or, if `has_zero` is
/// true, the zero value of its type.
pub(super) fn is_default(value: &Value, defaults: &[&str], has_zero: bool) -> bool {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            value.to_string()
        }
    };
    let is_same = |default: &&str| {
        let times = parse_go_duration(default).zip(parse_go_duration(&text));
        **default == text || times.is_some_and(|(default, shown)| default == shown)
    };
    value.is_null() || has_zero && is_zero(value) || defaults.iter().any(is_same)
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => {
            text.is_empty() || parse_go_duration(text).is_some_and(|it| it.is_zero())
        }
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// Parses a duration in Go's format, such as `24h0m0s`, `1m30s` or `250ms`.
pub(super) fn parse_go_duration(text: &str) -> Option<SignedDuration> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_in_the_format_of_go() {
        for (text, millis) in [
            ("24h0m0s", Some(86_400_000)),
            ("1m30s", Some(90_000)),
            ("250ms", Some(250)),
            ("1.5s", Some(1500)),
            ("0s", Some(0)),
            ("", None),
            ("5", None),
            ("1d", None),
            ("99999999999999999999h", None),
        ] {
            assert_eq!(
                parse_go_duration(text).map(|it| it.as_millis()),
                millis,
                "{text}"
            );
        }
    }

    #[test]
    fn an_address_without_a_port_gets_the_default_port() {
        let read = |text| parse_address(text, 10256).map(|address| address.to_string());
        for (text, wanted) in [
            ("0.0.0.0", Some("0.0.0.0:10256")),
            ("127.0.0.1:1", Some("127.0.0.1:1")),
            ("::", Some("[::]:10256")),
            ("[::1]", Some("[::1]:10256")),
            ("[::1]:1", Some("[::1]:1")),
            ("localhost:1", None),
            ("", None),
        ] {
            assert_eq!(read(text).as_deref(), wanted, "{text}");
        }
    }
}
