//! Rewords serde's error messages, which contain Rust terms, for the authors of configuration files and
//! manifests.

/// The standard library's message about an address that can't be parsed, and its replacement.
const ADDRESS: (&str, &str) = (
    "invalid socket address syntax",
    "must be an IP address and a port, such as 127.0.0.1:10249 or [::1]:10249",
);

/// The types in serde's messages, and their names for users.
const TYPES: [(&str, &str); 12] = [
    ("unit value", "null"),
    ("sequence", "list"),
    ("a sequence", "a list"),
    ("map", "object"),
    ("a map", "an object"),
    ("i32", "an integer"),
    ("i64", "an integer"),
    ("u8", "a number from 0 to 255"),
    ("u16", "a number from 0 to 65535"),
    ("u32", "a number from 0 to 4294967295"),
    ("u64", "a number from 0 to 18446744073709551615"),
    ("usize", "a number from 0 to 18446744073709551615"),
];

/// Rewords one message:
///
/// | serde | reworded |
/// |---|---|
/// | ``invalid type: integer `5`, expected a string`` | `is the integer 5, but must be a string` |
/// | ``invalid type: map, expected a sequence`` | `is an object, but must be a list` |
/// | ``unknown variant `x`, expected `a` or `b` `` | ``unsupported value `x`; use `a` or `b` `` |
///
/// Other messages stay the same.
pub(crate) fn reword(message: &str) -> String {
    let mismatch = ["invalid type: ", "invalid value: "]
        .iter()
        .find_map(|prefix| message.strip_prefix(prefix))
        .and_then(|rest| rest.rsplit_once(", expected "));
    if let Some((found, wanted)) = mismatch {
        return format!("is {}, but must be {}", describe(found), type_name(wanted));
    }
    match message.split_once(", expected ") {
        Some((unknown, known)) if unknown.starts_with("unknown variant `") => {
            let value = unknown.trim_start_matches("unknown variant ");
            format!("unsupported value {value}; use {known}")
        }
        Some(_) | None if message == ADDRESS.0 => ADDRESS.1.to_owned(),
        Some(_) | None => message.to_owned(),
    }
}

/// Describes the value that serde found, such as ``integer `5` `` or `map`.
fn describe(found: &str) -> String {
    match found.split_once(' ') {
        // A value; a string is in quotation marks, any other one in backticks.
        Some((kind @ ("integer" | "boolean" | "string"), value)) => {
            format!("the {kind} {}", value.trim_matches('`'))
        }
        Some(("floating", value)) => {
            let value = value.trim_start_matches("point ");
            format!("the number {}", value.trim_matches('`'))
        }
        Some(_) | None => match type_name(found) {
            "null" => "null".to_owned(),
            kind if kind.starts_with('o') => format!("an {kind}"),
            kind => format!("a {kind}"),
        },
    }
}

/// Returns the name of a type for users.
fn type_name(name: &str) -> &str {
    let known = TYPES.iter().find(|(rust, _)| *rust == name);
    known.map_or(name, |(_, replacement)| replacement)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_the_value_found_and_the_type_wanted() {
        for (serde, reworded) in [
            (
                "invalid type: integer `5`, expected a duration",
                "is the integer 5, but must be a duration",
            ),
            (
                "invalid type: string \"a, expected b\", expected i32",
                "is the string \"a, expected b\", but must be an integer",
            ),
            (
                "invalid type: map, expected a sequence",
                "is an object, but must be a list",
            ),
            (
                "invalid type: sequence, expected a map",
                "is a list, but must be an object",
            ),
            (
                "invalid type: null, expected a string",
                "is null, but must be a string",
            ),
            (
                "invalid type: unit value, expected a string",
                "is null, but must be a string",
            ),
            (
                "invalid type: floating point `1.5`, expected a string",
                "is the number 1.5, but must be a string",
            ),
            (
                "invalid value: integer `70000`, expected u16",
                "is the integer 70000, but must be a number from 0 to 65535",
            ),
            (
                "unknown variant `x`, expected one of `a`, `b`",
                "unsupported value `x`; use one of `a`, `b`",
            ),
            (
                "unknown variant `x`, expected `a` or `b`",
                "unsupported value `x`; use `a` or `b`",
            ),
            (
                "invalid socket address syntax",
                "must be an IP address and a port, such as 127.0.0.1:10249 or [::1]:10249",
            ),
            ("missing field `program`", "missing field `program`"),
            // A user's own words stay the same.
            ("`a map` is not a duration", "`a map` is not a duration"),
        ] {
            assert_eq!(reword(serde), reworded);
        }
    }
}
