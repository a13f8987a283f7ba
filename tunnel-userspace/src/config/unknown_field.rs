//! Suggests a known field in the error about an unknown field.

use crate::serde_message;

/// The minimum similarity (Jaro-Winkler, 0 to 1) between an unknown field and a suggested one.
const MIN_SIMILARITY: f64 = 0.8;

/// The minimum length of an unknown field for it to be taken as an abbreviation of a longer one.
const MIN_ABBREVIATION: usize = 4;

/// Appends `did you mean …?` to serde's error about an unknown field, such as ``unknown field `nodename`,
/// expected one of `nodeName`, …``. Rewords other errors.
pub(super) fn reword(message: &str) -> String {
    match nearest_field(message) {
        Some(field) => format!("{message}; did you mean `{field}`?"),
        None => serde_message::reword(message),
    }
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
