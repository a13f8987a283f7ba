//! Rewords serde's errors for the authors of config files, and suggests a known field in place of an unknown
//! one.

/// The minimum similarity (Jaro-Winkler, 0 to 1) between an unknown field and a suggested one.
const MIN_SIMILARITY: f64 = 0.8;

/// The minimum length of an unknown field for it to be taken as an abbreviation of a longer one.
const MIN_ABBREVIATION: usize = 4;

/// Rust terms in messages from serde and the standard library, and their replacements.
const RUST_TERMS: [(&str, &str); 6] = [
    (
        "invalid socket address syntax",
        "must be an IP address and a port, such as 127.0.0.1:10249 or [::1]:10249",
    ),
    ("expected u8", "expected a number from 0 to 255"),
    ("expected u16", "expected a number from 0 to 65535"),
    ("expected u32", "expected a number"),
    ("expected u64", "expected a number"),
    ("expected usize", "expected a number"),
];

/// Replaces Rust terms, and appends `did you mean …?` to an error about an unknown field, such as
/// ``unknown field `nodename`, expected one of `nodeName`, …``.
pub(super) fn reword(message: &str) -> String {
    let mut reworded = message.to_owned();
    for (term, replacement) in RUST_TERMS {
        reworded = reworded.replace(term, replacement);
    }
    if let Some(field) = nearest_field(message) {
        reworded.push_str(&format!("; did you mean `{field}`?"));
    }
    reworded
}

/// Returns the known field that is most similar to the unknown one. `reason` lists all known fields.
fn nearest_field(reason: &str) -> Option<&str> {
    let (unknown, known) = reason.strip_prefix("unknown field `")?.split_once('`')?;
    // The known fields are in backticks, so every second part is a field.
    let known = known.split('`').skip(1).step_by(2);
    let lower = unknown.to_lowercase();
    let similarity = |field: &str| {
        let field = field.to_lowercase();
        // A field that contains the unknown name, as `maxStreams` contains `streams`, is a better match than
        // one that is merely similar; a field that ends with the name is the best match.
        if lower.len() < MIN_ABBREVIATION || !field.contains(&lower) {
            strsim::jaro_winkler(&lower, &field)
        } else if field.ends_with(&lower) {
            2.0
        } else {
            1.0
        }
    };
    known
        .map(|field| (similarity(field), field))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, field)| field)
}
