//! Values as kube-proxy's file has them.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use super::Field;

/// An address, with or without brackets.
pub(super) fn ip_of(text: &str) -> Option<IpAddr> {
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    bare.unwrap_or(text).parse().ok()
}

/// An address with a port, or with that port where it has none (kube-proxy
/// `pkg/proxy/util/utils.go`, `AppendPortIfNeeded`).
pub(super) fn address(text: &str, port: u16) -> Option<SocketAddr> {
    let whole = text.parse().ok();
    whole.or_else(|| Some(SocketAddr::new(ip_of(text)?, port)))
}

/// Whether a field is as it is where a file doesn't name it.
pub(super) fn has_default(value: &Value, field: &Field) -> bool {
    let shown = match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            value.to_string()
        }
    };
    let is_same = |default: &&str| {
        let times = duration(default).zip(duration(&shown));
        **default == shown || times.is_some_and(|(default, shown)| default == shown)
    };
    value.is_null() || field.zero && is_zero(value) || field.defaults.iter().any(is_same)
}

fn is_zero(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || duration(text) == Some(0),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}

/// A whole duration as Go writes it (`24h0m0s`, `1m30s`, `250ms`), in milliseconds.
fn duration(text: &str) -> Option<u64> {
    let mut rest = text;
    let mut total = 0_u64;
    while !rest.is_empty() {
        let end = rest.find(|letter: char| !letter.is_ascii_digit())?;
        let (number, tail) = rest.split_at(end);
        let unit_end = tail.find(|letter: char| letter.is_ascii_digit());
        let (unit, tail) = tail.split_at(unit_end.unwrap_or(tail.len()));
        let factor = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        let part = number.parse::<u64>().ok()?.checked_mul(factor)?;
        total = total.checked_add(part)?;
        rest = tail;
    }
    (!text.is_empty()).then_some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        assert_eq!(duration("24h0m0s"), Some(86_400_000));
        assert_eq!(duration("1m30s"), Some(90_000));
        assert_eq!(duration("250ms"), Some(250));
        assert_eq!(duration("0s"), Some(0));
        for bad in ["", "5", "1d", "-1s", "1.5s", "99999999999999999999h"] {
            assert_eq!(duration(bad), None, "{bad}");
        }
    }

    #[test]
    fn an_address_may_have_its_port_or_that_of_the_endpoint() {
        let read = |text| address(text, 10256).map(|address| address.to_string());
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
