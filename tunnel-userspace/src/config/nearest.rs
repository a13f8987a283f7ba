//! The nearest known field of an unknown one.

/// The least similarity of two names (Jaro-Winkler, 0 to 1) of which one is taken for a mistake for the other.
const SIMILAR: f64 = 0.8;

/// The least length of a name that is taken for a part of another.
const PART: usize = 4;

/// Appends the nearest known field to serde's reason, where that is an unknown field with a similar name
/// among the known ones: ``unknown field `nodename`, expected one of `nodeName`, …``.
pub(super) fn suggest(reason: String) -> String {
    match nearest(&reason) {
        Some(field) => format!("{reason}; did you mean `{field}`?"),
        None => reason,
    }
}

fn nearest(reason: &str) -> Option<&str> {
    let (unknown, known) = reason.strip_prefix("unknown field `")?.split_once('`')?;
    // The names are every second part between the backticks.
    let known = known.split('`').skip(1).step_by(2);
    let lower = unknown.to_lowercase();
    let similarity = |field: &str| {
        let field = field.to_lowercase();
        // A part of a name is meant for the whole: `streams` for `maxStreams`, at its end first.
        if lower.len() < PART || !field.contains(&lower) {
            strsim::jaro_winkler(&lower, &field)
        } else if field.ends_with(&lower) {
            2.0
        } else {
            1.0
        }
    };
    known
        .map(|field| (similarity(field), field))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, field)| field)
}
